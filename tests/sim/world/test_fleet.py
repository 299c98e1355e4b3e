"""Several shards in the world of faults: machines move, disks have one holder, the store is one, silence is nothing."""

import random
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec
import pytest

from bigfleet.model.ids import MachineId, ShardId
from bigfleet.model.machine import HostRef, Machine
from bigfleet.model.ownership import Base, Domain, Owned, OwnershipVersion
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.rpc.etcd import client as etcd_client
from bigfleet.rpc.wire.gen import etcd_pb2
from bigfleet.shard.ownership.ownership_file import OwnershipNotWritten
from bigfleet.sim.checkers.handovers import remember, what_has_come_stays_for_a_while
from bigfleet.sim.kernel.journal import Journal
from bigfleet.sim.kernel.loop import KernelClock, KernelLoop, run_kernel
from bigfleet.sim.observations import Observations, OwnershipChanged
from bigfleet.sim.plan_generator import GONE, LEASE_LOST_OVER_PREEMPTION, NONE, draw
from bigfleet.sim.sites.etcd import DurableEtcd, LeaseNotFound
from bigfleet.sim.sites.ownership import OwnershipRecord, ShardDisk
from bigfleet.sim.world.run import run_plan
from bigfleet.sim.world.shrink import shrink
from tests.sim.world.planted_fleet import fleet
from tests.sim.world.test_world import fake

T = TypeVar("T")
ZONE = Domain("topology.kubernetes.io/zone", "a")


def run(main: Callable[[KernelClock], Coroutine[Any, Any, T]]) -> T:
    """Run on a kernel loop."""

    async def with_clock(loop: KernelLoop) -> T:
        return await main(KernelClock(loop))

    return run_kernel(with_clock, random.Random(1))


@pytest.mark.slow
def test_machines_move_between_shards_and_every_invariant_holds() -> None:
    """The starving shard gets what the other can spare."""
    result = run_plan(fleet(1))

    assert result.violations == ()
    assert result.reached["a machine moved between shards"]
    assert result.checks["S5"] > 100
    assert result.checks["S15"]
    assert result.checks["S17"]


@pytest.mark.slow
def test_a_leader_changes_while_a_gang_is_preempted() -> None:
    """A seed that ends every lease while a machine is being taken from a gang: the next leader finds it half done."""
    plan = draw(1035)
    assert LEASE_LOST_OVER_PREEMPTION in plan.faults

    result = run_plan(plan)

    assert result.violations == ()
    assert result.reached["gang preempted during a leader change"]


@pytest.mark.slow
def test_shards_whose_coordinator_never_answers_take_the_course_of_those_that_have_none() -> None:
    """S12, to the nanosecond: the links ask and ask, and nothing else is moved by it."""
    asked = run_plan(fleet(2, "shard-crash", "partition", coordinator=GONE))
    alone = run_plan(fleet(2, "shard-crash", "partition", coordinator=NONE))

    assert asked.violations == alone.violations == ()
    assert asked.checks["S12"] == len(alone.journal.entries) > 100
    assert asked.trace_hash == alone.trace_hash
    assert asked.steps > alone.steps


def test_a_smaller_world_keeps_a_home_for_each_cluster() -> None:
    """Shrinking takes a cluster and its home away together, and replicas too."""
    result = shrink(fleet(1, "stall", "lease-lost"), run=fake)

    assert result.plan.faults == ("stall",)
    assert (len(result.plan.clusters), len(result.plan.homes), result.plan.replicas) == (1, 1, 1)


def test_a_machine_that_is_given_on_before_its_cooldown_is_over_is_told() -> None:
    """S17 on what disks say: within the cooldown it is a breach, whoever gets the machine, and after it none."""
    now_nanos, machine_id, donor = [0], MachineId("m"), ShardId("a")
    observations = Observations(Journal(), lambda: now_nanos[0])
    observations.moves.cooldown_nanos = 80_000_000_000
    nothing = OwnershipRecord(owned=Owned(base=Base.DOMAINS))
    came = OwnershipRecord(owned=nothing.owned.adopted(machine_id, OwnershipVersion(1, 1), by_gift_of=ShardId("b")))
    remember(OwnershipChanged(donor, nothing, came), observations)
    machine = Machine(
        id=machine_id, state=MachineState.IDLE, host=HostRef("p", "h"), capacity_type=CapacityType.RESERVED
    )
    gone = OwnershipChanged(
        donor, came, OwnershipRecord(owned=came.owned.released(machine, OwnershipVersion(1, 2), to=ShardId("b")))
    )

    now_nanos[0] = 79_000_000_000
    assert list(what_has_come_stays_for_a_while(gone, observations)) == [
        "m came from b to a and goes to b after 79.0 s"
    ]
    now_nanos[0] = 80_000_000_000
    assert list(what_has_come_stays_for_a_while(gone, observations)) == []


# ---- disks ------------------------------------------------------------------------------------------------------


def disk_of(clock: KernelClock, seen: list[tuple[OwnershipRecord, OwnershipRecord]]) -> ShardDisk:
    """Return a disk that holds a zone."""
    return ShardDisk(
        ShardId("s"),
        domains=[ZONE],
        clock=clock,
        on_change=lambda before, after: seen.append((before, after)),
        on_full=lambda: None,
    )


def test_a_disk_has_one_holder_and_its_successor_finds_what_was_committed() -> None:
    async def main(clock: KernelClock) -> None:
        seen: list[tuple[OwnershipRecord, OwnershipRecord]] = []
        disk = disk_of(clock, seen)
        first = disk.open()
        first.accept_term(7)
        first.commit(first.owned.unassigned(ZONE))
        second = disk.open()

        assert (second.accepted_term, second.owned.leaving, disk.epoch) == (7, frozenset({ZONE}), 2)
        assert seen[-1][1].owned.leaving == {ZONE}
        with pytest.raises(OwnershipNotWritten, match="another process has the disk"):
            first.commit(first.owned.left(ZONE))
        disk.is_full = True
        with pytest.raises(OwnershipNotWritten, match="full"):
            second.accept_term(8)
        assert disk.ownership.accepted_term == 7

    run(main)


def test_a_disk_that_was_lost_owns_nothing_and_its_next_process_outranks_every_one_before() -> None:
    async def main(clock: KernelClock) -> None:
        disk = disk_of(clock, [])
        before = disk.open()
        disk.lose()
        after = disk.open()

        assert (after.owned.base, after.owned.domains, after.accepted_term) == (Base.DOMAINS, frozenset(), 0)
        assert disk.epoch > 1_700_000_000
        with pytest.raises(OwnershipNotWritten):
            before.accept_term(1)

    run(main)


# ---- the store --------------------------------------------------------------------------------------------------


def written(store: DurableEtcd, guard: etcd_pb2.Compare, key: bytes, lease: int = 0) -> bool:
    """Put a key under a guard, and say whether it held."""
    put = etcd_client.put(key, b"v", lease)
    return store.txn(etcd_pb2.TxnRequest(compare=[guard], success=[put])).succeeded


def keys(store: DurableEtcd) -> list[bytes]:
    """Return every key."""
    return [item.key for item in store.range(etcd_pb2.RangeRequest(key=b"\x01", range_end=b"\xff")).kvs]


def test_the_store_writes_only_under_its_guards() -> None:
    async def main(clock: KernelClock) -> None:
        store = DurableEtcd(clock)
        assert written(store, etcd_client.key_is_absent(b"k"), b"k")
        assert not written(store, etcd_client.key_is_absent(b"k"), b"k")
        (item,) = store.range(etcd_pb2.RangeRequest(key=b"k")).kvs
        assert written(store, etcd_client.modified_at(b"k", item.mod_revision), b"k")
        assert not written(store, etcd_client.modified_at(b"k", item.mod_revision), b"other")
        assert written(store, etcd_client.created_at(b"k", item.create_revision), b"other")
        assert keys(store) == [b"k", b"other"]

    run(main)


def test_a_lease_that_is_not_kept_takes_its_keys_with_it_unless_nobody_leads() -> None:
    async def main(clock: KernelClock) -> None:
        store = DurableEtcd(clock)
        store.start()
        lease = store.grant(10)
        assert written(store, etcd_client.key_is_absent(b"k"), b"k", lease)
        await clock.sleep(8.0)
        assert store.keep_alive(lease)
        store.is_down = True
        await clock.sleep(20.0)
        assert keys(store) == [b"k"]
        store.is_down = False
        await clock.sleep(1.0)
        assert keys(store) == []
        assert not store.keep_alive(lease)

    run(main)


def test_no_key_hangs_on_a_lease_that_has_ended() -> None:
    """A key that outlived its lease would never go: no replica could lead again."""

    async def main(clock: KernelClock) -> None:
        store = DurableEtcd(clock)
        lease = store.grant(10)
        store.end_leases()
        with pytest.raises(LeaseNotFound):
            written(store, etcd_client.key_is_absent(b"k"), b"k", lease)
        assert keys(store) == []

    run(main)


def test_a_watch_hears_of_a_change_but_in_a_gap() -> None:
    async def main(clock: KernelClock) -> list[float]:
        store = DurableEtcd(clock)
        taken = []
        for store.misses_events in (False, True):
            revision = store.range(etcd_pb2.RangeRequest(key=b"k")).header.revision
            written(store, etcd_client.modified_at(b"absent", 0), b"k")
            began = clock.monotonic_seconds()
            await store.watch(b"k", revision)
            taken.append(clock.monotonic_seconds() - began)
        return taken

    assert run(main) == [0.0, 20.0]


def test_a_plan_of_several_shards_reads_back() -> None:
    plan = fleet(3, "lease-lost")

    assert msgspec.json.decode(msgspec.json.encode(plan), type=type(plan)) == plan
