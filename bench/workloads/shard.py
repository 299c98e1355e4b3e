"""What is timed of a shard's view and its demand: W7 and W10 (docs/spec/benchmarks.md).

Both begin where the wire ends. For W7 that is a `Listing`: what `GrpcProvider.list` hands over, the places of the
records in the answer's bytes and their digests; two more begin with those bytes, and with records that were converted
because none was recognised, each an object of its own that shares what conversion shares. For W10 it is
the frame's bytes: reading them is part of the time. Nothing here may time an inventory or a table that it has not
counted.
"""

import asyncio
import gc
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from functools import lru_cache

from prometheus_client import CollectorRegistry

from bench.engine_fleets import cluster_rows, fleet_machines
from bench.harness import Benchmark, Repeated
from bigfleet.cli.runtime import interpreter
from bigfleet.cli.runtime.system import SystemClock, SystemIds
from bigfleet.model.compute import compute_inline
from bigfleet.model.frames import Hello, RollUp
from bigfleet.model.ids import ClusterId, MachineId, ShardId
from bigfleet.model.machine import Machine
from bigfleet.model.metadata import encode_metadata
from bigfleet.model.quantity import parse_quantity
from bigfleet.rpc.wire.convert_machine import machine_to_wire
from bigfleet.rpc.wire.convert_need import ReceivedRollUp, rollup_to_wire
from bigfleet.rpc.wire.convert_session import operator_frame_from_bytes
from bigfleet.rpc.wire.gen import capacity_pb2, provider_pb2, shard_pb2
from bigfleet.rpc.wire.list_response import read_listing
from bigfleet.shard.cycle.controller import Shard
from bigfleet.shard.ports import FenceToken, ListedMachine, Listing, ShardSettings, TransitionAck
from bigfleet.shard.reconcile.reconciler import ReconcileResult
from bigfleet.shard.sessions.demand import RollUpOutcome

CLUSTERS = 100
ROLLUP_ROWS = 100
UNCHANGED_TARGET_MS = 0.060
CHANGED_TARGET_MS = 1.5
#: A changed price is a changed fact: the record is screened, replaced and written into the columns.
CHANGED_USD_PER_HOUR = (1.5, 2.5)


def answer_of(machines: Iterable[Machine]) -> list[bytes]:
    """Return what a provider answers with, machine by machine: together they are a MachineList."""
    return [
        provider_pb2.MachineList(
            machines=[machine_to_wire(machine, encode_metadata(machine) if machine.cluster else {})]
        ).SerializeToString()
        for machine in machines
    ]


class ListedProvider:
    """Implements `bigfleet.shard.ports.Provider` for one that is only read: List answers what stands in `listing`.

    With `content` it reads that instead, as the client of a provider does. With `delta` that is the answer to whoever
    has a cursor.
    """

    def __init__(self) -> None:
        self.listing = Listing(records=())
        self.delta: Listing | None = None
        self.content = b""

    async def list(self, since_revision: bytes) -> Listing:
        """Return the listing, or what has changed."""
        if since_revision and self.delta is not None:
            return self.delta
        return await read_listing(self.content, SystemClock()) if self.content else self.listing

    async def get(self, machine_id: MachineId) -> ListedMachine:
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
        settings=settings or ShardSettings(reclaim_after_seconds=0.0),
        provider=provider,
        clock=SystemClock(),
        ids=SystemIds(),
        compute=compute_inline,
        registry=CollectorRegistry(),
    )


@lru_cache(maxsize=1)
def known_fleet(machines: int, *, is_incremental: bool) -> "KnownFleet":
    """Return a fleet, the one of the benchmark before where it was of the same kind: making one takes a minute."""
    return KnownFleet(machines, is_incremental=is_incremental)


class KnownFleet:
    """A shard that has applied one full List of W8's machines."""

    def __init__(self, machines: int, *, is_incremental: bool) -> None:
        fleet = fleet_machines(machines, CLUSTERS)
        assert len(fleet) == machines
        #: One loop for all runs, as in a shard: making one takes a millisecond.
        self._runner = asyncio.Runner()
        self.provider = ListedProvider()
        settings = ShardSettings(incremental_reconcile=is_incremental, reclaim_after_seconds=0.0)
        self.shard = new_shard(self.provider, settings)
        #: What the provider tells of each machine.
        self.answer = answer_of(fleet)
        self.content = b"".join(self.answer)
        self.listing = self.provider.listing = self.read(self.content, tombstones=is_incremental)
        self.reconcile()
        assert len(self.shard.inventory) == machines
        self.shard.inventory.snapshot()
        # As a shard's process does when its first List has been applied.
        gc.freeze()

    def read(self, content: bytes, *, tombstones: bool = False) -> Listing:
        """Return an answer as the client of a provider hands it over."""
        listing = self._runner.run(read_listing(content, SystemClock()))
        return replace(listing, revision=b"1", tombstones=tombstones)

    def reconcile(self) -> ReconcileResult:
        """Let the shard read its provider once."""
        return self._runner.run(self.shard.reconciler.run())

    @property
    def written(self) -> int:
        """How many machines were written since the last view."""
        return len(self.shard.inventory.changed_since_snapshot)


class ListedFrom(Enum):
    """From where on a full List is timed."""

    #: As the client hands it over: digests of records that are read when they are asked for.
    LISTING = "nothing changed"
    #: From the bytes of the answer on.
    BYTES = "nothing changed, from its bytes on"
    #: Records that were converted before, each an object of its own: a provider that writes none of them twice alike.
    RECORDS = "nothing changed, nothing recognised"


def full_list(machines: int, listed_from: ListedFrom = ListedFrom.LISTING, target_ms: float | None = None) -> Benchmark:
    """W7: a full List in which nothing has changed."""

    def prepare() -> Repeated:
        world = known_fleet(machines, is_incremental=False)
        listing = world.listing
        if listed_from is ListedFrom.RECORDS:
            listing = Listing(records=list(world.listing.records))

        def show() -> None:
            world.provider.listing = listing
            world.provider.content = world.content if listed_from is ListedFrom.BYTES else b""

        def work() -> object:
            result = world.reconcile()
            assert (result.mode, result.records, world.written) == ("full", machines, 0)
            return result, len(world.shard.inventory)

        return Repeated(show, work)

    return Benchmark(
        name=f"W7 reconcile, full List, {listed_from.value}",
        size=f"{machines:,} machines",
        prepare=prepare,
        items=machines,
        is_slow=machines > 20_000,
        target_ms=target_ms,
    )


def delta(machines: int, changed: int, target_ms: float | None = None) -> Benchmark:
    """W7: a delta in which the price of some machines changed, written into the inventory and its columns' queue."""

    def prepare() -> Repeated:
        world = known_fleet(machines, is_incremental=True)
        world.provider.content = b""
        chosen = world.listing.records[:: machines // changed][:changed]
        turn = [0]

        def change() -> None:
            turn[0] += 1
            price = CHANGED_USD_PER_HOUR[turn[0] % 2]
            repriced = [
                ListedMachine(replace(record.machine, price_usd_per_hour=price), record.metadata) for record in chosen
            ]
            world.provider.listing = Listing(records=repriced, revision=b"2", tombstones=True)
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
        world = known_fleet(machines, is_incremental=is_incremental)
        world.provider.content = b""
        places = range(0, machines, machines // removed)[:removed]
        gone = {world.listing.records[place].machine.id for place in places}
        full = world.listing
        if is_incremental:
            # What was removed comes back as a delta: this provider never lists in full again.
            back = [world.listing.records[place] for place in places]
            full = Listing(records=back, revision=b"3", tombstones=True)
            less = Listing(records=(), revision=b"2", removed_ids=tuple(sorted(gone)), tombstones=True)
        else:
            taken = set(places)
            less = world.read(b"".join(entry for place, entry in enumerate(world.answer) if place not in taken))

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


class Reporting:
    """W10: clusters whose operators are connected, each with a roll-up that is in force.

    No two roll-ups share a quantity, so that what is remembered of one helps no other.
    """

    def __init__(self, clusters: int, changed: int) -> None:
        self.shard = new_shard(ListedProvider())
        # Evenly spread, as clusters change in no order.
        self.changed = [c * clusters // changed for c in range(changed)] if changed else []
        rows = rollup_to_wire(
            RollUp(cluster_id=ClusterId("c"), timestamp_unix_nanos=1, needs=tuple(cluster_rows(0, 4_000)[:ROLLUP_ROWS]))
        )
        assert len(rows.needs) == ROLLUP_ROWS
        #: Frames as bytes, one per cluster; those of changed clusters have a second form.
        self.frames = [frame_of(rows, c, 0) for c in range(clusters)]
        self.others = {c: frame_of(rows, c, 1) for c in self.changed}
        self.connect()
        outcomes = self.take(self.frames)
        assert outcomes == Counter({RollUpOutcome.ACCEPTED: clusters})
        assert len(self.shard.intake.table.in_list_order()) == clusters * ROLLUP_ROWS
        # As a shard's process does.
        interpreter.settle()

    def connect(self) -> None:
        """Give every cluster a session of its own, with an empty outbox."""
        self.sessions = [
            self.shard.sessions.open(Hello(cluster_id=cluster_id(c), capabilities=frozenset()))
            for c in range(len(self.frames))
        ]

    def take(self, frames: Iterable[bytes], clusters: Sequence[int] | None = None) -> Counter[RollUpOutcome]:
        """Read frames and take what is in them, as a session's stream does; `clusters` says whose they are."""
        outcomes: Counter[RollUpOutcome] = Counter()
        sessions = self.sessions if clusters is None else [self.sessions[c] for c in clusters]
        for session, content in zip(sessions, frames, strict=True):
            offer = operator_frame_from_bytes(content, self.shard.intake.digest_of(session.cluster))
            assert isinstance(offer, ReceivedRollUp)
            outcomes[self.shard.take_rollup(session, offer)] += 1
        return outcomes

    def in_force(self) -> tuple[int, int]:
        """Return how many rows are in force for the clusters that change, and the cpu that they want, milli-units."""
        rows = [row for c in self.changed for row in self.shard.intake.table.rows_of(cluster_id(c))]
        return len(rows), sum(row.aggregate["cpu"] for row in rows)


def cluster_id(cluster: int) -> ClusterId:
    """Return a cluster's id."""
    return ClusterId(f"c-{cluster:04}")


def frame_of(rows: capacity_pb2.ClusterCapacityNeeds, cluster: int, form: int) -> bytes:
    """Return a cluster's frame as an operator sends it; every aggregate of the second form is another one."""
    message = shard_pb2.OperatorMessage(rollup=rows)
    message.rollup.cluster_id = cluster_id(cluster)
    message.rollup.timestamp_unix_nanos = 1_767_225_600_000_000_000 + cluster
    for need in message.rollup.needs:
        more_milli = 2 * cluster + form
        cpu_milli = parse_quantity(need.aggregate_resources["cpu"])
        need.aggregate_resources["cpu"] = f"{cpu_milli + more_milli}m"
    return message.SerializeToString(deterministic=True)


def ingest(clusters: int, changed: int, *, is_alone: bool = False) -> Benchmark:
    """W10: every cluster reports, or with `is_alone` only those that changed; from bytes to table and ack."""
    reports = changed if is_alone else clusters

    def prepare() -> Repeated:
        world = Reporting(clusters, changed)
        reporting = world.changed if is_alone else range(clusters)
        frames = [world.others.get(c, world.frames[c]) for c in reporting]

        def renew() -> None:
            world.connect()
            world.take([world.frames[c] for c in world.changed], world.changed)
            world.shard.intake.table.in_list_order()
            world.connect()

        def work() -> object:
            outcomes = world.take(frames, reporting)
            assert outcomes == Counter({RollUpOutcome.ACCEPTED: changed, RollUpOutcome.UNCHANGED: reports - changed}), (
                outcomes
            )
            return outcomes[RollUpOutcome.ACCEPTED], outcomes[RollUpOutcome.UNCHANGED], *world.in_force()

        return Repeated(renew, work)

    parts = [f"{changed:,} changed"] if is_alone else [f"{clusters:,} clusters", f"{changed:,} changed"]
    return Benchmark(
        name="W10 roll-up ingest",
        size=", ".join([*parts, f"{ROLLUP_ROWS} rows each"]),
        prepare=prepare,
        items=reports,
        is_slow=clusters > 500,
        target_ms=(reports - changed) * UNCHANGED_TARGET_MS + changed * CHANGED_TARGET_MS,
    )


SHARD = (
    full_list(500_000, target_ms=300.0),
    full_list(500_000, ListedFrom.BYTES),
    full_list(500_000, ListedFrom.RECORDS),
    removals(500_000, 1_000, is_incremental=False),
    delta(500_000, 1_000, target_ms=10.0),
    removals(500_000, 1_000, is_incremental=True),
    ingest(5_000, 0),
    ingest(5_000, 250, is_alone=True),
    ingest(5_000, 250),
)
