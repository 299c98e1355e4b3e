"""Pools whose machines cannot be bootstrapped: each cluster leaves them alone by itself, and says so."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest

from bigfleet.engine.decision import CapacityPool
from bigfleet.model.frames import CAPABILITY_NEED_STATUS, CAPABILITY_NODE_STATUS, UnmetReason
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.shard.actuation.bootstrap_failures import FAILURES_OF_A_POOL
from bigfleet.shard.ports import FenceToken, JoinGate, ProviderRefusal, RefusalKind, ShardSettings, TransitionAck
from tests.shard.cycle.test_pods import pods
from tests.shard.world import ScriptedProvider, World, machine

S = MachineState
CYCLE_SECONDS = 10.0
CHEAP = CapacityPool("cheap", "za", CapacityType.ON_DEMAND)

pytestmark = pytest.mark.virtual_time


def offer_of(record: Machine) -> dict[str, Any]:
    """Return what is offered of a machine."""
    names = ("instance_type", "price_usd_per_hour", "capacity_type")
    return {name: getattr(record, name) for name in names}


@dataclass
class CannotConfigure(ScriptedProvider):
    """Creates every machine; those of some (type, cluster) cannot be configured: refused, or Failed later."""

    broken: set[tuple[str, str]] = field(default_factory=set)
    is_refused: bool = True
    #: (type, cluster) of each Configure that did not succeed.
    failures: list[tuple[str, str]] = field(default_factory=list)

    def is_broken(self, machine_id: str, cluster: str) -> bool:
        return (self.records[MachineId(machine_id)].instance_type, cluster) in self.broken

    async def configure(
        self, machine_id: MachineId, cluster: ClusterId, blob: bytes, metadata: Mapping[str, str], token: FenceToken
    ) -> TransitionAck:
        if self.is_broken(machine_id, cluster):
            self.failures.append((self.records[machine_id].instance_type, cluster))
            if self.is_refused:
                raise ProviderRefusal(RefusalKind.REFUSED, "boom")
        return await super().configure(machine_id, cluster, blob, metadata, token)

    def settle(self, *machine_ids: str) -> None:
        for record in list(self.records.values()):
            if record.state is S.FAILED:
                self.records[record.id] = machine(record.id, S.SPECULATIVE, **offer_of(record))
            elif record.state is S.CONFIGURING and self.is_broken(record.id, record.cluster):
                self.fail(record.id, "BACKEND: boom")
        super().settle(*machine_ids)

    def creates(self, kind: str) -> int:
        """Return how many machines of a type were created."""
        return sum(method == "create" and name.startswith(kind) for method, name, _sequence in self.calls)


def offer(provider: ScriptedProvider, kind: str, price: float, count: int = 20) -> None:
    """Offer machines of 4 cpu."""
    fields = {"instance_type": kind, "price_usd_per_hour": price, "capacity_type": CapacityType.ON_DEMAND}
    provider.add(*(machine(f"{kind}-{number:02d}", S.SPECULATIVE, **fields) for number in range(count)))


async def run(world: World, provider: ScriptedProvider, seconds: float) -> None:
    """Cycle every ten seconds, transitions ending in between."""
    for _ in range(int(seconds / CYCLE_SECONDS)):
        await world.cycle()
        provider.settle()
        await world.shard._clock.sleep(CYCLE_SECONDS)


def served(provider: ScriptedProvider, cluster: str) -> list[str]:
    """Return the types of the machines that serve a cluster."""
    found = [each for each in provider.records.values() if each.state is S.CONFIGURED and each.cluster == cluster]
    return sorted(each.instance_type for each in found)


@pytest.mark.rule("shard 9.8/6")
@pytest.mark.parametrize("is_refused", [True, False], ids=["refused", "failed later"])
async def test_a_row_acquires_elsewhere_when_the_machines_of_its_pool_cannot_be_configured(is_refused: bool) -> None:
    """Every Create went to the cheapest pool for ever, although another one had machines that work."""
    provider = CannotConfigure(broken={("cheap", "c1")}, is_refused=is_refused)
    offer(provider, "cheap", 1.0)
    offer(provider, "costly", 2.0)
    world = World(provider)
    world.connect("c1").report(pods("c1", ("3", 2)))
    await run(world, provider, 600)
    assert served(provider, "c1") == ["costly", "costly"]
    assert world.metric("capacity_pools_withheld") == 1

    await run(world, provider, 4 * 3600)
    assert served(provider, "c1") == ["costly", "costly"]
    assert provider.creates("cheap") <= 2 + FAILURES_OF_A_POOL
    # Nothing asks for the pool, so it is forgotten an hour after the back-off.
    assert world.metric("capacity_pools_withheld") == 0


@pytest.mark.rule("shard 9.8/6")
@pytest.mark.rule("shard 15/29")
@pytest.mark.parametrize("is_refused", [True, False], ids=["refused", "failed later"])
async def test_without_another_pool_it_is_probed_ever_less_and_the_row_is_short_with_the_reason(
    is_refused: bool,
) -> None:
    provider = CannotConfigure(broken={("cheap", "c1")}, is_refused=is_refused)
    offer(provider, "cheap", 1.0)
    world = World(provider)
    operator = world.connect("c1", CAPABILITY_NEED_STATUS)
    operator.report(pods("c1", ("3", 1)))
    seconds = []
    for number in range(int(3 * 3600 / CYCLE_SECONDS)):
        before = provider.creates("cheap")
        await run(world, provider, CYCLE_SECONDS)
        seconds += [number * CYCLE_SECONDS] * (provider.creates("cheap") - before)
        if number > 30:
            assert [row.reason for row in operator.verdicts()[-1].rows] == [UnmetReason.BOOTSTRAP_FAILED], number
    gaps = [int((later - earlier) // 60) for earlier, later in pairwise(seconds)]
    assert [gap for gap in gaps if gap >= 3] == [3, 6, 12, 24, 48, 60]
    assert (
        operator.verdicts()[-1]
        .rows[0]
        .message.startswith("machines of cheap OnDemand in za could not be bootstrapped (")
    )
    assert world.shard.view.needs[0].unmet_age_cycles > 100

    provider.broken.clear()
    await run(world, provider, 3700)
    assert served(provider, "c1") == ["cheap"]
    assert (world.shard.stockouts.bootstraps._failures, operator.verdicts()[-1].rows) == ({}, ())


@pytest.mark.rule("shard 9.8/6")
async def test_a_cluster_that_cannot_be_bootstrapped_takes_no_pool_from_another_one() -> None:
    """The fault may be the cluster's or the pool's; another cluster gives up after its first failure."""
    provider = CannotConfigure(broken={("cheap", "c1")})
    offer(provider, "cheap", 1.0)
    offer(provider, "costly", 2.0)
    world = World(provider)
    world.connect("c1").report(pods("c1", ("3", 2)))
    await run(world, provider, 300)
    world.connect("c2").report(pods("c2", ("3", 3)))
    await run(world, provider, 60)
    assert (served(provider, "c1"), served(provider, "c2")) == (["costly"] * 2, ["cheap"] * 3)

    provider.broken.add(("cheap", "c3"))
    provider.failures.clear()
    world.connect("c3").report(pods("c3", ("3", 1)))
    await run(world, provider, 60)
    assert served(provider, "c3") == ["costly"]
    assert provider.failures == [("cheap", "c3")]


@pytest.mark.rule("shard 9.8/6")
async def test_a_cluster_that_works_again_or_whose_operator_comes_back_tries_its_pools_at_once() -> None:
    """Its template was broken in every pool; each wait is ended early once."""
    provider = CannotConfigure(broken={("cheap", "c1"), ("costly", "c1")})
    offer(provider, "cheap", 1.0)
    offer(provider, "costly", 2.0)
    world = World(provider)
    world.connect("c1").report(pods("c1", ("3", 1)))
    await run(world, provider, 3600)
    assert served(provider, "c1") == []
    known = world.shard.stockouts.bootstraps._failures
    assert {pool.instance_type for _cluster, pool in known} == {"cheap", "costly"}

    provider.broken.clear()
    world.connect("c1").report(pods("c1", ("3", 1)))
    await run(world, provider, 60)
    assert len(served(provider, "c1")) == 1
    now_seconds = world.shard._clock.monotonic_seconds()
    assert [each.until_seconds <= now_seconds for each in known.values()] == [True]


@pytest.mark.rule("shard 9.8/6")
async def test_machines_whose_nodes_never_join_count_and_only_one_that_joins_is_a_success() -> None:
    provider = CannotConfigure(synchronous=True)
    offer(provider, "cheap", 1.0)
    offer(provider, "costly", 2.0)
    settings = ShardSettings(join_gate=JoinGate.ENFORCE, join_deadline_seconds=120.0, reclaim_after_seconds=0.0)
    world = World(provider, settings=settings)
    operator = world.connect("c1", CAPABILITY_NODE_STATUS)
    operator.report(pods("c1", ("3", 1)))
    joined: set[str] = set()
    for _ in range(int(1800 / CYCLE_SECONDS)):
        await run(world, provider, CYCLE_SECONDS)
        for each in list(provider.records.values()):
            if each.state is S.CONFIGURED and each.instance_type == "costly":
                operator.saw(each.id)
                joined.add(each.id)
    assert len(joined) == 1
    # One of the three was Idle again.
    assert provider.creates("cheap") == FAILURES_OF_A_POOL - 1

    known = world.shard.stockouts.bootstraps
    assert [(name, pool, each.is_unjoined) for (name, pool), each in known._failures.items()] == [("c1", CHEAP, True)]
    known.configured(replace(provider.records[MachineId("cheap-00")], cluster=ClusterId("c1")))
    assert known._failures
    known.joined(replace(provider.records[MachineId("cheap-00")], cluster=ClusterId("c1")))
    assert known._failures == {}
