"""What is timed of a shard's view and its demand: W7 and W10 (docs/spec/benchmarks.md).

Both begin where the wire ends. For W7 that is a `Listing`: what `GrpcProvider.list` hands over, records already
converted, each an object of its own that shares with its machine in the inventory what conversion shares. For W10 it is
the frame's bytes: reading them is part of the time. Nothing here may time an inventory or a table that it did not count.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from prometheus_client import CollectorRegistry

from bench.engine_fleets import fleet_machines
from bench.harness import Benchmark, Repeated
from bigfleet.cli.runtime import SystemClock, SystemIds
from bigfleet.model.ids import ClusterId, MachineId, ShardId
from bigfleet.model.machine import Machine
from bigfleet.model.metadata import encode_metadata
from bigfleet.model.states import MachineState
from bigfleet.rpc.convert_machine import machine_from_wire, machine_to_wire
from bigfleet.shard.controller import Shard
from bigfleet.shard.ports import FenceToken, Listing, Record, ShardSettings, TransitionAck, compute_inline
from bigfleet.shard.reconcile import ReconcileResult

CLUSTERS = 100
#: A changed price is a changed fact: the record is screened, replaced and written into the columns.
CHANGED_USD_PER_HOUR = (1.5, 2.5)


def received(machines: Iterable[Machine]) -> list[Record]:
    """Return the machines as records that came over the wire."""
    return [
        Record(*machine_from_wire(machine_to_wire(machine, encode_metadata(machine) if machine.cluster else {})))
        for machine in machines
    ]


class ListedProvider:
    """Implements `bigfleet.shard.ports.Provider` for one that is only read: List answers what stands in `listing`."""

    def __init__(self) -> None:
        self.listing = Listing(records=())

    async def list(self, since_revision: bytes) -> Listing:
        """Return the listing."""
        return self.listing

    async def get(self, machine_id: MachineId) -> Record:
        """Never asked: nothing is in flight."""
        raise AssertionError(f"Get of {machine_id}")

    async def create(self, machine_id: MachineId, token: FenceToken) -> TransitionAck:
        """Never asked: nothing is decided."""
        raise AssertionError(f"Create of {machine_id}")

    async def configure(
        self, machine_id: MachineId, cluster: ClusterId, blob: bytes, metadata: Mapping[str, str], token: FenceToken
    ) -> TransitionAck:
        """Never asked: nothing is decided."""
        raise AssertionError(f"Configure of {machine_id}")

    async def drain(self, machine_id: MachineId, grace_seconds: int, token: FenceToken) -> TransitionAck:
        """Never asked: nothing is decided."""
        raise AssertionError(f"Drain of {machine_id}")

    async def delete(self, machine_id: MachineId, token: FenceToken) -> TransitionAck:
        """Never asked: nothing is decided."""
        raise AssertionError(f"Delete of {machine_id}")


def new_shard(provider: ListedProvider, settings: ShardSettings | None = None) -> Shard:
    """Return a shard over a provider; it has no engine and runs no loop."""
    return Shard(
        shard_id=ShardId("bench"),
        epoch=1,
        settings=settings or ShardSettings(),
        provider=provider,
        clock=SystemClock(),
        ids=SystemIds(),
        compute=compute_inline,
        registry=CollectorRegistry(),
    )


class KnownFleet:
    """A shard that has applied one full List of W8's machines."""

    def __init__(self, machines: int, *, is_incremental: bool) -> None:
        fleet = fleet_machines(machines, CLUSTERS)
        assert len(fleet) == machines
        #: One loop for all runs, as in a shard: making one takes a millisecond.
        self._runner = asyncio.Runner()
        self.provider = ListedProvider()
        self.shard = new_shard(self.provider, ShardSettings(incremental_reconcile=is_incremental))
        self.provider.listing = Listing(records=received(fleet), revision=b"1", tombstones=is_incremental)
        self.reconcile()
        assert len(self.shard.inventory) == machines
        #: What the provider would tell anew: equal to what was applied, in objects of their own.
        self.records = received(fleet)
        self.provider.listing = Listing(records=self.records, revision=b"1", tombstones=is_incremental)
        self.shard.inventory.snapshot()

    def reconcile(self) -> ReconcileResult:
        """Let the shard read its provider once."""
        return self._runner.run(self.shard.reconciler.run(self.shard.actuator))

    @property
    def written(self) -> int:
        """How many machines were written since the last view."""
        return len(self.shard.inventory.changed_since_snapshot)


def full_list(machines: int, target_ms: float | None = None) -> Benchmark:
    """W7: a full List in which nothing has changed."""

    def prepare() -> Callable[[], object]:
        world = KnownFleet(machines, is_incremental=False)

        def work() -> object:
            result = world.reconcile()
            assert (result.mode, result.records, world.written) == ("full", machines, 0)
            return result, len(world.shard.inventory)

        return work

    return Benchmark(
        name="W7 reconcile, full List, nothing changed",
        size=f"{machines:,} machines",
        prepare=prepare,
        items=machines,
        is_slow=machines > 20_000,
        target_ms=target_ms,
    )


def delta(machines: int, changed: int, target_ms: float | None = None) -> Benchmark:
    """W7: a delta in which the price of some machines changed, written into the inventory and its columns' queue."""

    def prepare() -> Repeated:
        world = KnownFleet(machines, is_incremental=True)
        chosen = world.records[:: machines // changed][:changed]
        turn = [0]

        def change() -> None:
            turn[0] += 1
            price = CHANGED_USD_PER_HOUR[turn[0] % 2]
            told = [Record(replace(record.machine, price_usd_per_hour=price), record.metadata) for record in chosen]
            world.provider.listing = Listing(records=told, revision=b"2", tombstones=True)
            world.shard.inventory.snapshot()

        def work() -> object:
            result = world.reconcile()
            assert (result.mode, result.records, world.written) == ("delta", changed, changed)
            return result

        return Repeated(change, work)

    return Benchmark(
        name="W7 reconcile, delta",
        size=f"{machines:,} machines, {changed:,} changed",
        prepare=prepare,
        items=changed,
        is_slow=machines > 20_000,
        target_ms=target_ms,
    )


def removals(machines: int, removed: int, *, is_incremental: bool) -> Benchmark:
    """W7: some machines are gone; a delta names them, a full List leaves them out. They are back before each run."""

    def prepare() -> Repeated:
        world = KnownFleet(machines, is_incremental=is_incremental)
        gone = {record.machine.id for record in world.records[:: machines // removed][:removed]}
        full = Listing(records=world.records, revision=b"1", tombstones=is_incremental)
        if is_incremental:
            # What was removed comes back as a delta: this provider never lists in full again.
            back = [record for record in world.records if record.machine.id in gone]
            full = Listing(records=back, revision=b"3", tombstones=True)
            less = Listing(records=(), revision=b"2", removed_ids=tuple(sorted(gone)), tombstones=True)
        else:
            less = Listing(records=[record for record in world.records if record.machine.id not in gone])

        def put_back() -> None:
            world.provider.listing = full
            world.reconcile()
            assert len(world.shard.inventory) == machines
            world.shard.inventory.snapshot()
            world.provider.listing = less

        def work() -> object:
            result = world.reconcile()
            assert (result.removed, result.braked, len(world.shard.inventory)) == (removed, 0, machines - removed)
            return result

        return Repeated(put_back, work)

    mode = "delta" if is_incremental else "full List"
    return Benchmark(
        name=f"W7 reconcile, {mode}, machines gone",
        size=f"{machines:,} machines, {removed:,} gone",
        prepare=prepare,
        items=removed,
        is_slow=machines > 20_000,
    )
