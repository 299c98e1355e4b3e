"""A stockout that one shard finds keeps the others of its provider from that pool, through a real coordinator."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bigfleet.coordinator.ephemeral_state import EphemeralState
from bigfleet.link.client import Client
from bigfleet.link.inbox import Inbox
from bigfleet.link.report_conversion import pools_of
from bigfleet.link.report_source import ShardReportSource
from bigfleet.link.reporter import CoordinatorLink
from bigfleet.model.ids import ShardId
from bigfleet.model.shard_report import SoldOutPool
from bigfleet.model.states import CapacityType
from bigfleet.rpc.clients.shard_reports import GrpcCoordinator
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.coordinator.replica_world import PROVIDER, Served, serving, sqlite_store
from tests.shard.actuation.test_stockouts import CHEAP, SellsOut, row, slots
from tests.shard.ownership.handover_shard import ME, OTHER, THIRD, HandoverShard


class SharingShard(HandoverShard):
    """A shard that reports to a coordinator, with slots of its own: ten cheap ones and ten dear ones."""

    def __init__(self, directory: Path, name: ShardId, served: Served, *, provider_address: str = PROVIDER) -> None:
        self.stock = SellsOut(synchronous=True, sold_out={"cheap"})
        slots(self.stock, "cheap", 10, 1.0)
        slots(self.stock, "dear", 10, 2.0)
        super().__init__(directory / name, name=name, provider=self.stock)
        shard = self.world.shard
        assert shard.ownership is not None
        self.reporter = CoordinatorLink(
            shard_id=name,
            epoch=shard.epoch,
            advertised_address=f"{name}:7780",
            interval_seconds=30.0,
            source=ShardReportSource(shard, shard.ownership.file, provider_address=provider_address),
            inbox=Inbox(self.handover, accepted_term=self.file.accepted_term),
            client=Client([served.address], GrpcCoordinator(), LoopClock()),
            clock=LoopClock(),
            on_sold_out=lambda pools: shard.stockouts.others_report(pools_of(pools)),
        )

    async def wants(self, machines: int) -> list[str]:
        """Report demand and run two cycles; return the types of all Creates so far."""
        self.world.connect(self.name).report(row(machines, cluster=self.name))
        for _ in range(2):
            await self.world.cycle()
        return self.stock.creates


@asynccontextmanager
async def shards_of(directory: Path, **addresses: str) -> AsyncIterator[tuple[Served, list[SharingShard]]]:
    """Serve a coordinator and three shards; the third has the provider address that is given."""
    async with serving(sqlite_store(directory / "c.db")) as served:
        await served.led()
        shards = [SharingShard(directory, name, served) for name in (ME, OTHER)]
        shards.append(SharingShard(directory, THIRD, served, provider_address=addresses.get("third", PROVIDER)))
        yield served, shards
        for shard in shards:
            shard.close()


@pytest.mark.rule("shard 9.8/5")
async def test_a_second_shard_does_not_try_a_pool_that_the_first_found_sold_out(tmp_path: Path) -> None:
    """A shard of another provider does: it sells other machines."""
    async with shards_of(tmp_path, third="elsewhere:9100") as (_served, (first, second, third)):
        assert "cheap" in await first.wants(3)
        for shard in (first, second, third):
            await shard.reporter.exchange()

        assert await second.wants(3) == ["dear"] * 3
        assert "cheap" in await third.wants(3)


@pytest.mark.rule("shard 9.8/5")
async def test_what_was_heard_of_is_not_reported_again_and_ends_with_the_report_of_who_found_it(tmp_path: Path) -> None:
    async with shards_of(tmp_path) as (_served, (first, second, third)):
        await first.wants(3)
        for shard in (first, second):
            await shard.reporter.exchange()
        assert (list(first.world.shard.stockouts.own()), dict(second.world.shard.stockouts.own())) == ([CHEAP], {})

        # The first finds stock again.
        first.world.shard.stockouts._pools.clear()
        for shard in (first, second, third):
            await shard.reporter.exchange()
        second.stock.sold_out.clear()
        assert await second.wants(3) == ["cheap"] * 3


async def test_the_longest_back_off_of_other_shards_counts_less_the_time_since_it_was_reported(tmp_path: Path) -> None:
    async with shards_of(tmp_path) as (served, shards):
        await shards[0].wants(1)
        for shard in shards:
            await shard.reporter.exchange()
        ephemeral: EphemeralState = served.replica.leading().leader.ephemeral
        received_seconds = ephemeral.known[ME].received_seconds
        (pool,) = ephemeral.known[ME].report.sold_out

        assert ephemeral._sold_out_elsewhere(ME, received_seconds) == ()
        (left,) = ephemeral._sold_out_elsewhere(OTHER, received_seconds + 100)
        assert left == SoldOutPool("cheap", "za", CapacityType.ON_DEMAND, left.backoff_seconds)
        assert left.backoff_seconds == pytest.approx(pool.backoff_seconds - 100)
        # A time of the loop's clock and a duration, added and subtracted again, differ by rounding.
        assert ephemeral._sold_out_elsewhere(OTHER, received_seconds + pool.backoff_seconds + 0.001) == ()
