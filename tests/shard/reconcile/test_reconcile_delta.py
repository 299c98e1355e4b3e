"""Deltas with tombstones and without, what they would lose, and drains under way (docs/spec/shard.md §5.2, §9.3)."""

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

import pytest

from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.states import MachineState
from bigfleet.shard.ports import ListedMachine, Listing, ProviderRefusal, RefusalKind, ShardSettings
from bigfleet.shard.reconcile.reconciler import REVISITS_AT_ONCE_MAX, REVISITS_PER_CYCLE_MAX, REVISITS_SECONDS_MAX
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.shard.world import RevisionedProvider, ScriptedProvider, World, machine, need, note_pending

pytestmark = pytest.mark.virtual_time

S = MachineState


def delta_world(provider: ScriptedProvider, **settings: Any) -> World:
    """Return a world whose shard reads deltas."""
    return World(provider, settings=ShardSettings(incremental_reconcile=True, **settings))


def fleet(count: int) -> Sequence[Machine]:
    """Return that many Idle machines."""
    return [machine(f"m{number:03d}", S.IDLE) for number in range(count)]


def revisioned(*machines: Machine, **options: Any) -> RevisionedProvider:
    """Return a provider that answers deltas, with these machines."""
    provider = RevisionedProvider(**options)
    provider.add(*machines)
    return provider


# ---- with tombstones --------------------------------------------------------------------------------------------


@pytest.mark.rule("shard 5.2/1")
async def test_a_delta_changes_what_it_names_and_removes_what_it_tells() -> None:
    """What an answer with tombstones leaves out is as it was."""
    provider = revisioned(*fleet(5))
    world = delta_world(provider)
    await world.cycle()
    provider.add(machine("m001", S.IDLE, price_usd_per_hour=7.0), machine("new", S.IDLE))
    del provider.records["m004"]
    await world.cycle()

    assert {"m000", "m001", "m002", "m003", "new"} == set(world.shard.inventory.ids)
    assert world.machine("m001").price_usd_per_hour == 7.0
    assert provider.cursors == [b"", b"0"]
    assert [world.metric("reconcile_total", mode=mode, outcome="ok") for mode in ("full", "delta")] == [1, 1]


@pytest.mark.parametrize("is_there", [True, False])
async def test_a_machine_that_a_delta_shows_and_reports_as_removed_is_read_by_itself(is_there: bool) -> None:
    """A slot that was removed and added again has a tombstone and a record; a defect may give a bound machine both."""
    provider = revisioned(machine("m000", S.CONFIGURED, cluster="c1"), machine("m001", S.IDLE))
    world = delta_world(provider)
    world.connect("c1").report(need("c1", "4"))
    await world.cycle()
    shown = ListedMachine(provider.records["m000"], {})
    if not is_there:
        del provider.records["m000"]
    provider.listings.append(Listing(records=[shown], revision=b"1", removed_ids=("m000",), tombstones=True))
    await world.cycle()
    assert "m000" in world.shard.inventory
    assert provider.gets == ["m000"]
    await world.cycle()
    assert ("m000" in world.shard.inventory) is is_there
    assert provider.state("m001") is S.IDLE or not is_there


@pytest.mark.rule("shard 5.2/3")
async def test_a_full_answer_to_a_cursor_is_taken_as_one() -> None:
    """A provider known to send tombstones that sends none has found the cursor too old: what is absent is gone."""
    provider = revisioned(*fleet(5))
    world = delta_world(provider)
    await world.cycle()
    await world.cycle()
    provider.forgets = True
    del provider.records["m004"]
    await world.cycle()

    assert len(world.shard.inventory) == 4
    assert [world.metric("reconcile_total", mode=mode, outcome="ok") for mode in ("full", "delta")] == [2, 1]


@pytest.mark.rule("shard 6/12")
async def test_removals_that_a_delta_told_are_remembered_while_they_are_held_back() -> None:
    """They are told once; the third pass in a row believes them."""
    provider = revisioned(*fleet(40))
    world = delta_world(provider)
    await world.cycle()
    for number in range(12):
        del provider.records[f"m{number:03d}"]
    left = []
    for _ in range(3):
        await world.cycle()
        left.append((len(world.shard.inventory), world.metric("removals_braked")))

    assert left == [(40, 12), (40, 12), (28, 0)]


@pytest.mark.rule("shard 6/12")
async def test_a_held_back_machine_that_is_reported_again_stays() -> None:
    """Two of twelve come back, and ten are few enough to be believed at once."""
    provider = revisioned(*fleet(40))
    world = delta_world(provider)
    await world.cycle()
    gone = [provider.records.pop(f"m{number:03d}") for number in range(12)]
    await world.cycle()
    provider.add(*gone[:2])
    await world.cycle()

    assert len(world.shard.inventory) == 30
    assert "m001" in world.shard.inventory


@pytest.mark.rule("shard 6/12")
async def test_a_full_answer_that_is_held_back_is_asked_for_again() -> None:
    """A delta to it would never name what it left out: a provider that was blind once loses nothing by it."""
    provider = revisioned(*fleet(30))
    world = delta_world(provider)
    await world.cycle()
    await world.cycle()
    records, provider.records = provider.records, {}
    provider.forgets = True
    await world.cycle()
    assert world.metric("removals_braked") == 30

    provider.records, provider.forgets = records, False
    for _ in range(4):
        await world.cycle()
    assert (len(world.shard.inventory), world.metric("removals_braked")) == (30, 0)
    assert provider.cursors[2:5] == [b"1", b"", b"3"]


@pytest.mark.rule("shard 15/6")
async def test_the_third_empty_full_answer_in_a_row_is_believed() -> None:
    """After the first that is due, the other two are asked for at once, each without a cursor."""
    provider = revisioned(*fleet(30), tombstones=False)
    world = delta_world(provider, full_list_every_cycles=2)
    await world.cycle()
    provider.records.clear()
    left = []
    for _ in range(4):
        await world.cycle()
        left.append(len(world.shard.inventory))

    assert left == [30, 30, 30, 0]
    assert provider.cursors == [b"", b"0", b"", b"", b""]


@pytest.mark.rule("shard 5.2/6")
async def test_an_error_keeps_the_cursor() -> None:
    """It is replaced only after a whole answer was applied, so nothing is missed."""
    provider = revisioned(*fleet(3))
    world = delta_world(provider)
    await world.cycle()
    provider.list_fails = True
    await world.cycle()
    provider.list_fails = False
    del provider.records["m002"]
    await world.cycle()

    assert provider.cursors == [b"", b"0", b"0"]
    assert len(world.shard.inventory) == 2


# ---- without tombstones -----------------------------------------------------------------------------------------


@pytest.mark.rule("shard 5.2/4")
async def test_without_tombstones_only_a_full_list_finds_removals() -> None:
    """Deltas remove nothing, and every so many cycles the cursor is left out."""
    provider = revisioned(*fleet(5), tombstones=False)
    world = delta_world(provider, full_list_every_cycles=4)
    await world.cycle()
    del provider.records["m004"]
    left = []
    for _ in range(5):
        await world.cycle()
        left.append(len(world.shard.inventory))

    assert left == [5, 5, 5, 4, 4]
    assert [cursor == b"" for cursor in provider.cursors] == [True, False, False, False, True, False]


@pytest.mark.rule("shard 5.2/5")
async def test_a_provider_without_revisions_is_always_listed_in_full() -> None:
    """An empty revision is no cursor."""
    provider = ScriptedProvider()
    provider.add(*fleet(3))
    world = delta_world(provider)
    await world.cycle()
    del provider.records["m002"]
    await world.cycle()

    assert (len(world.shard.inventory), provider.cursors) == (2, [b"", b""])


# ---- revisits ---------------------------------------------------------------------------------------------------


@pytest.mark.rule("shard 5.2/7", "shard 15/9")
async def test_a_record_skipped_in_flight_is_read_again() -> None:
    """Later deltas would not name it, so Get does, as soon as the machine is not pending."""
    provider = revisioned(machine("m1", S.IDLE))
    world = delta_world(provider)
    world.connect("c1").report(need("c1", "4"))
    await world.step()
    provider.add(machine("m1", S.IDLE, price_usd_per_hour=5.0))
    await world.step()
    assert (provider.gets, world.machine("m1").price_usd_per_hour) == ([], 1.0)

    await world.shard.actuator.run_inline()
    provider.settle()
    await world.cycle()
    assert provider.gets == ["m1"]
    assert (world.state("m1"), world.machine("m1").price_usd_per_hour) == (S.CONFIGURED, 5.0)


@pytest.mark.rule("shard 9.6/5")
async def test_a_call_that_was_never_applied_is_found_by_reading_the_machine() -> None:
    """A state that did not move makes no delta: without the Get the machine would be Configuring for ever."""
    provider = revisioned(machine("m1", S.IDLE))
    provider.refusals["configure", "m1"] = [RefusalKind.UNKNOWN_OUTCOME]
    world = delta_world(provider)
    world.connect("c1").report(need("c1", "4"))
    await world.cycle()
    assert S.CONFIGURING is world.state("m1")
    await world.settle(3)

    assert world.outcomes() == [("Bootstrap", "m1", "unknown_outcome"), ("Bootstrap", "m1", "success")]
    assert S.CONFIGURED is world.state("m1")


async def test_an_action_that_broke_inside_is_found_by_reading_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong in this process, the provider's view is the one to go on from."""
    provider = revisioned(machine("m1", S.IDLE))
    world = delta_world(provider)
    world.connect("c1").report(need("c1", "4"))

    async def breaks(*_arguments: object) -> None:
        raise KeyError("a defect")

    with monkeypatch.context() as patch:
        patch.setattr(provider, "configure", breaks)
        await world.cycle()
    assert (world.state("m1"), world.outcomes()) == (S.CONFIGURING, [("Bootstrap", "m1", "transition_error")])
    await world.settle(3)

    assert S.CONFIGURED is world.state("m1")


@pytest.mark.rule("shard 5.2/8")
async def test_the_end_of_a_hold_is_found_by_reading_the_machine() -> None:
    """After half an hour the machine takes the state that its provider showed all the time."""
    provider = revisioned(machine("m1", S.IDLE))
    provider.refusals["configure", "m1"] = [RefusalKind.REFUSED] * 3
    world = delta_world(provider)
    world.connect("c1").report(need("c1", "4"))
    for _ in range(4):
        await world.cycle()
    assert S.FAILED is world.state("m1")

    await world.shard._clock.sleep(1799)
    await world.cycle()
    assert S.FAILED is world.state("m1")
    await world.shard._clock.sleep(1)
    await world.settle()
    assert S.CONFIGURED is world.state("m1")


@pytest.mark.rule("shard 5.2/8")
async def test_a_removal_told_while_its_machine_is_in_flight_is_not_lost() -> None:
    """The action ends first; then the machine is asked for, and its absence removes it."""
    provider = revisioned(machine("m1", S.IDLE))
    world = delta_world(provider)
    world.connect("c1").report(need("c1", "4"))
    await world.cycle()
    provider.settle()
    await world.cycle()
    note_pending(world.shard, "m1")
    del provider.records["m1"]
    await world.cycle()
    assert "m1" in world.shard.inventory

    del world.shard.ledger._pending[MachineId("m1")]
    await world.cycle()
    await world.cycle()
    assert "m1" not in world.shard.inventory


class SlowGets(RevisionedProvider):
    """Counts how many Gets run at once, and refuses some."""

    now = most = 0
    seconds = 0.5
    refused: Collection[str] = ()

    async def get(self, machine_id: MachineId) -> ListedMachine:
        """Answer after a while."""
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await LoopClock().sleep(self.seconds)
        finally:
            self.now -= 1
        record = await super().get(machine_id)
        if machine_id in self.refused:
            raise ProviderRefusal(RefusalKind.REFUSED, "not now")
        return record


async def with_revisits(provider: SlowGets, count: int, **settings: Any) -> World:
    """Return a world that is to read that many machines again."""
    provider.add(*fleet(count))
    world = delta_world(provider, **settings)
    await world.cycle()
    world.shard.reconciler._revisit.update(each.id for each in provider.records.values())
    return world


@pytest.mark.rule("shard 5.2/7")
async def test_revisits_are_bounded() -> None:
    """At most 256 a cycle, 16 at a time; the rest follows in the next one."""
    provider = SlowGets()
    world = await with_revisits(provider, 300)
    await world.cycle()
    assert (len(provider.gets), provider.most) == (REVISITS_PER_CYCLE_MAX, REVISITS_AT_ONCE_MAX)

    await world.cycle()
    assert len(provider.gets) == 300


@pytest.mark.rule("shard 5.2/7")
async def test_a_cycle_waits_ten_seconds_for_revisits_and_the_others_follow() -> None:
    """Gets that hang are cut off together; those that were not asked for come first in the next cycle."""
    provider = SlowGets()
    provider.seconds = 3600.0
    world = await with_revisits(provider, 20)
    clock = world.shard._clock
    before_seconds = clock.monotonic_seconds()
    await world.cycle()
    assert clock.monotonic_seconds() - before_seconds == pytest.approx(REVISITS_SECONDS_MAX)
    assert (len(world.shard.reconciler._revisit), provider.now) == (20, 0)

    provider.seconds = 0.0
    await world.cycle()
    assert [provider.gets[:4], len(provider.gets)] == [["m016", "m017", "m018", "m019"], 20]
    assert world.shard.reconciler._revisit == set()


@pytest.mark.rule("shard 5.2/7")
async def test_revisits_that_fail_each_time_do_not_keep_the_others_waiting() -> None:
    """With 256 of them the machine after those is read in the second cycle."""
    provider = SlowGets()
    provider.seconds = 0.0
    provider.refused = [each.id for each in fleet(REVISITS_PER_CYCLE_MAX)]
    world = await with_revisits(provider, REVISITS_PER_CYCLE_MAX + 1)
    await world.cycle()
    assert "m256" not in provider.gets

    await world.cycle()
    assert "m256" in provider.gets
    assert world.shard.reconciler._revisit == set(provider.refused)


@pytest.mark.rule("shard 5.2/7")
async def test_a_full_answer_ends_the_revisits_of_what_it_shows() -> None:
    """But for a machine that was in flight."""
    provider = SlowGets()
    world = await with_revisits(provider, 3)
    note_pending(world.shard, "m001")
    world.shard.reconciler.widen()
    await world.cycle()

    assert (provider.gets, world.shard.reconciler._revisit) == ([], {"m001"})


# ---- drains that wait for their operator ------------------------------------------------------------------------


async def drain_wait(provider: ScriptedProvider) -> tuple[World, "asyncio.Task[None]"]:
    """Return a world in which the drain of m1 waits for an operator that does not answer, and its workers."""
    provider.add(machine("m1", S.CONFIGURED, cluster="c1"))
    world = World(provider)
    operator = world.connect("c1")
    operator.drain = None
    operator.report()
    workers = asyncio.create_task(world.shard.actuator.run())
    await world.step()
    await world.shard._clock.sleep(1)
    assert S.DRAINING is world.state("m1")
    return world, workers


async def stop(workers: "asyncio.Task[None]") -> None:
    """End the workers."""
    workers.cancel()
    await asyncio.gather(workers, return_exceptions=True)


@pytest.mark.rule("shard 5.3/2")
async def test_a_configured_machine_in_a_drain_wait_stays_draining() -> None:
    """Draining here, Configured there: that is what the wait is."""
    world, workers = await drain_wait(ScriptedProvider())
    for _ in range(3):
        await world.step()

    assert (world.state("m1"), world.machine("m1").cluster) == (S.DRAINING, "c1")
    assert world.provider.calls == []
    await stop(workers)


@pytest.mark.rule("shard 5.3/2", "shard 9.3/11")
@pytest.mark.parametrize("shown", [S.IDLE, S.FAILED, S.DRAINING])
async def test_any_other_state_ends_a_drain_wait(shown: MachineState) -> None:
    """What the provider shows is taken, and it is not called."""
    world, workers = await drain_wait(ScriptedProvider())
    cluster = "" if shown is S.IDLE else "c1"
    world.provider.add(machine("m1", shown, cluster=cluster, last_error="" if shown is not S.FAILED else "broken"))
    await world.step()
    await world.shard._clock.sleep(1)

    assert shown is world.state("m1")
    assert (world.outcomes(), world.provider.calls) == ([("Reclaim", "m1", "noop")], [])
    await stop(workers)


@pytest.mark.rule("shard 9.3/11")
async def test_a_refused_record_does_not_end_a_drain_wait() -> None:
    """Garbage says nothing about the drain."""
    world, workers = await drain_wait(ScriptedProvider())
    world.provider.add(machine("m1", S.IDLE, price_usd_per_hour=-1.0))
    await world.step()
    await world.shard._clock.sleep(1)

    assert (world.state("m1"), world.outcomes()) == (S.DRAINING, [("Reclaim", "m1", "")])
    await stop(workers)


@pytest.mark.rule("shard 5.1/1", "shard 9.3/11")
async def test_a_machine_that_goes_in_a_drain_wait_is_removed() -> None:
    """A drain wait does not count as pending for removals."""
    world, workers = await drain_wait(ScriptedProvider())
    world.provider.records.clear()
    await world.step()
    await world.shard._clock.sleep(1)

    assert "m1" not in world.shard.inventory
    assert (world.outcomes(), world.provider.calls) == ([("Reclaim", "m1", "noop")], [])
    await stop(workers)
