"""What is recorded of any course is read back as it was, and decided again it comes to the same, bit for bit."""

import asyncio
import itertools
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from bigfleet.engine.columnar.engine import ColumnarEngine
from bigfleet.engine.columns import store as store_module
from bigfleet.engine.columns.objects import snapshot_of
from bigfleet.engine.columns.store import Columns, ColumnSnapshot, Shape
from bigfleet.engine.decision import Decision, Options
from bigfleet.engine.explain.explanation import explain_decision
from bigfleet.engine.explain.sentences import sentences
from bigfleet.engine.parking import PARK_AFTER_CYCLES, parking_key
from bigfleet.engine.reference import decide as reference
from bigfleet.engine.shapes import decide as shapes
from bigfleet.engine.snapshot import Snapshot
from bigfleet.model.frames import BootstrapResponse
from bigfleet.model.labels import ZONE
from bigfleet.model.need import Need
from bigfleet.model.profile import Operator, Profile, Requirement
from bigfleet.model.states import MachineState
from bigfleet.recording.digest import digest_text, outcome_of
from bigfleet.recording.frames import Frame, FrameKind, Unpacker, frames
from bigfleet.recording.hook import CycleInput, recorded
from bigfleet.recording.reader import RecordedCycle
from bigfleet.recording.recorder import WAITING_MAX, Recorder
from bigfleet.recording.tracker import differing_ids
from bigfleet.recording.values import (
    OptionsDelta,
    ProfileEntry,
    RecordedNeed,
    RecordedShape,
)
from bigfleet.sim.kernel.virtual_time import run_virtual
from tests.engine.changes import History, histories
from tests.engine.columnar.test_incremental import Life
from tests.engine.proof import examples
from tests.recording.recorded import cycles_of, new_recorder, recording
from tests.shard.cycle.test_pods import pods
from tests.shard.test_invariants import Story, modes, rounds
from tests.shard.world import ScriptedProvider, World, machine, need
from tests.strategies import FleetInput

S = MachineState

numbers = itertools.count()


class Witness:
    """Takes cycles for a recorder and remembers what they were, by value."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.seen: list[tuple[CycleInput, Decision, list[object]]] = []

    def take(self, asked: CycleInput, decision: Decision | None) -> None:
        """Remember, and have it written at once."""
        assert decision is not None
        self.seen.append((asked, decision, machines_of(asked.snapshot)))
        self.recorder.take(asked, decision)
        self.recorder.write_waiting()


def machines_of(view: ColumnSnapshot) -> list[object]:
    """Return the machines of a view as values."""
    snapshot = snapshot_of(view)
    since = {one: seconds.hex() for one, seconds in snapshot.idle_since_seconds.items()}
    return [list(snapshot.machines.values()), since]


def families_of(demand: Any) -> list[object]:
    """Return how rows were written: no part of their equality."""
    return [dict(row.families) for row in demand]


def assert_replays(cycle: RecordedCycle, asked: CycleInput, decision: Decision, machines: list[object]) -> None:
    """The cycle holds what was asked, and both engines come to the same again, explanations included."""
    assert (cycle.cycle, cycle.at_unix_nanos, cycle.is_timer) == (asked.cycle, asked.at_unix_nanos, asked.is_timer)
    assert machines_of(cycle.view) == machines
    assert list(cycle.demand) == list(asked.demand)
    assert families_of(cycle.demand) == families_of(asked.demand)
    assert cycle.options == asked.options
    assert list(cycle.options.parking_ages) == list(asked.options.parking_ages)
    assert cycle.outcome is not None
    fast = ColumnarEngine(is_incremental=False).decide(cycle.view, cycle.demand, cycle.options)
    plain = reference.decide(snapshot_of(cycle.view), cycle.demand, cycle.options)
    for again in (fast, plain):
        assert list(again.actions) == list(decision.actions)
        assert list(again.rows) == list(decision.rows)
        assert outcome_of(again, cycle.view, cycle.demand) == cycle.outcome
    assert outcome_of(decision, asked.snapshot, asked.demand) == cycle.outcome


def assert_explains_alike(cycle: RecordedCycle, decision: Decision) -> None:
    again = ColumnarEngine(is_incremental=False).decide(cycle.view, cycle.demand, cycle.options)
    subjects: list[Any] = [*(row.key for row in cycle.demand[:2]), *snapshot_of(cycle.view).machines]
    for subject in subjects:
        assert sentences(explain_decision(again, subject)) == sentences(explain_decision(decision, subject))


@examples(20)
@given(past=histories())
def test_any_history_of_a_fleet_is_read_back_and_decided_alike(
    past: History, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Gangs, preemptors, other options, equal rows, machines in any state: what the engine's own proof goes through."""
    path = tmp_path_factory.getbasetemp() / f"history-{next(numbers)}"
    with recording(path) as recorder:
        witness, life = Witness(recorder), Life(past.first)
        for number, step in enumerate(((), *past.steps)):
            for change in step:
                life.change(change)
            view = life.store.snapshot()
            life.decision = life.engine.decide(view, life.demand, life.options)
            witness.take(CycleInput(number, number, True, view, life.demand, life.options), life.decision)
    cycles = cycles_of(path)
    assert len(cycles) == len(witness.seen)
    for cycle, seen in zip(cycles, witness.seen, strict=True):
        assert_replays(cycle, *seen)


@given(mode=modes, synchronous=st.booleans(), story=st.lists(rounds, min_size=1, max_size=8))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_course_of_a_shard_is_read_back_and_decided_and_explained_alike(
    mode: str, synchronous: bool, story: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Roll-ups, refusals, lost answers, silent operators: whatever happened to it, what it decided is reproduced."""
    path = tmp_path_factory.getbasetemp() / f"course-{next(numbers)}"

    async def live() -> Witness:
        told = Story(mode, synchronous)
        with recording(path) as recorder:
            witness = told.world.shard.recorder = Witness(recorder)
            for odd, report, cycle in story:
                for step in (*odd, *report, cycle):
                    await told.happen(step)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        return witness

    witness = run_virtual(live)
    cycles = cycles_of(path)
    assert len(cycles) == len(witness.seen)
    for cycle, seen in zip(cycles, witness.seen, strict=True):
        assert_replays(cycle, *seen)
    if cycles:
        assert_explains_alike(cycles[-1], witness.seen[-1][1])


@given(
    old=st.sets(st.text("abc", max_size=4)),
    new=st.sets(st.text("abc", max_size=4)),
)
def test_the_ids_that_two_numberings_do_not_share_are_found(old: set[str], new: set[str]) -> None:
    before: list[Any] = sorted(old)
    after: list[Any] = sorted(new)
    gone, come = differing_ids(before, after)
    assert {before[place] for place in gone} == old - new
    assert {after[place] for place in come} == new - old
    assert (list(gone), list(come)) == (sorted(gone), sorted(come))


def test_long_runs_of_shared_ids_are_compared_at_once() -> None:
    """One that went near the end and one that came near the beginning of 200,000 are found."""
    before: list[Any] = [f"m{number:06}" for number in range(200_000)]
    after = [*before[:3], "m000002b", *before[3:199_998], *before[199_999:]]
    gone, come = differing_ids(before, after)
    assert (gone.tolist(), come.tolist()) == ([199_998], [3])


def test_everything_that_decides_is_written() -> None:
    """A field that is added to what an engine is given needs a place in a record."""
    #: A shard has no flag for it.
    unrecorded = {"idle_head_start"}
    assert {field.name for field in fields(Options)} - unrecorded == set(OptionsDelta.__struct_fields__)
    assert set(RecordedNeed.__struct_fields__) == {field.name for field in fields(Need)}
    derived = {"fingerprint", "same_key"}
    assert set(ProfileEntry.__struct_fields__) == {field.name for field in fields(Profile)} - derived
    assert RecordedShape.__struct_fields__ == Shape._fields
    assert Columns._fields == ("state", "cluster", "shape", "offer", "stamp", "idle_since_seconds")


SECRET = b"join-token-7f3a91"


@pytest.mark.virtual_time
async def test_nothing_that_is_sent_or_named_outside_of_decisions_is_written(tmp_path: Path) -> None:
    """Bootstrap data, host and node names, and causes of failures have no field."""
    provider = ScriptedProvider()
    provider.add(
        machine("m1", S.IDLE, node_name="node-of-m1"), machine("m2", S.FAILED, last_error="password hunter2 refused")
    )
    world = World(provider)
    operator = world.connect("c1")
    operator.answer = lambda request: BootstrapResponse(request_id=request.request_id, user_data=SECRET)
    path = tmp_path / "recording"
    with recording(path) as recorder:
        world.shard.recorder = Witness(recorder)
        operator.report(need("c1", "4"))
        await world.settle()
    assert world.state("m1") is S.CONFIGURED
    unpacked = b"".join(contents(path))
    assert b"m1" in unpacked
    for word in (SECRET, b"host-m1", b"node-of-m1", b"hunter2"):
        assert word not in unpacked


def contents(path: Path) -> list[bytes]:
    """Return what the frames of a file hold, unpacked."""
    unpacker = Unpacker()
    with path.open("rb") as file:
        found = [frame for frame in frames(file) if isinstance(frame, Frame)]
    return [unpacker.cycle(frame) if frame.kind is FrameKind.CYCLE else frame.content for frame in found]


async def test_a_cycle_whose_engine_fails_is_recorded_without_an_outcome(tmp_path: Path) -> None:
    """It is the one that somebody wants to see again."""
    path = tmp_path / "recording"
    asked = some_asked(1)

    async def fails() -> tuple[CycleInput, Decision]:
        raise ValueError("no")

    with recording(path) as recorder, pytest.raises(ValueError, match="no"):
        await recorded(recorder, asked, fails())
    (cycle,) = cycles_of(path)
    assert (cycle.cycle, cycle.outcome) == (1, None)


def some_asked(cycle: int, life: Life | None = None) -> CycleInput:
    life = life or Life(small_fleet())
    return CycleInput(cycle, cycle, True, life.store.snapshot(), life.demand, life.options)


def test_a_recorder_that_is_behind_leaves_cycles_out_and_says_so(tmp_path: Path) -> None:
    """The bound is on what waits; the next cycle that is taken knows how many are missing before it."""
    registry = CollectorRegistry()
    path = tmp_path / "recording"
    recorder = new_recorder(path, registry=registry)
    life = Life(small_fleet())
    for cycle in range(1, WAITING_MAX + 4):
        recorder.take(some_asked(cycle, life), None)
    recorder.write_waiting()
    recorder.take(some_asked(99, life), None)
    recorder.close()

    assert [(cycle.cycle, cycle.missed) for cycle in cycles_of(path)][-2:] == [(WAITING_MAX, 0), (99, 3)]
    assert registry.get_sample_value("bigfleet_shard_recording_missed_cycles_total") == 3
    assert registry.get_sample_value("bigfleet_shard_recorded_cycles_total") == WAITING_MAX + 1


async def test_what_is_taken_is_written_while_it_runs_and_when_it_is_cancelled(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    recorder = new_recorder(path)
    running = asyncio.create_task(recorder.run())
    recorder.take(some_asked(1), None)
    await asyncio.sleep(0.01)
    assert len(cycles_of(path)) == 1
    recorder.take(some_asked(2), None)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    recorder.close()
    assert [cycle.cycle for cycle in cycles_of(path)] == [1, 2]


def test_views_that_were_left_out_cost_nothing_but_themselves(tmp_path: Path) -> None:
    """More changes than the store remembers lie between two that are recorded."""
    path = tmp_path / "recording"
    life = Life(small_fleet())
    with recording(path) as recorder:
        witness = Witness(recorder)
        for cycle in range(40):
            life.put(machine("m1", S.IDLE, price_usd_per_hour=float(cycle)), float(cycle))
            view = life.store.snapshot()
            if cycle in (0, 39):
                decision = life.engine.decide(view, life.demand, life.options)
                witness.take(CycleInput(cycle, 1, True, view, life.demand, life.options), decision)
    for cycle_read, seen in zip(cycles_of(path), witness.seen, strict=True):
        assert_replays(cycle_read, *seen)


def test_a_vocabulary_that_is_made_anew_begins_a_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "VOCABULARY_SPARE", 10)
    path = tmp_path / "recording"
    life = Life(small_fleet())
    with recording(path) as recorder:
        witness = Witness(recorder)
        for cycle in range(60):
            life.put(machine("m1", S.IDLE, price_usd_per_hour=float(cycle)), None)
            view = life.store.snapshot()
            decision = life.engine.decide(view, life.demand, life.options)
            witness.take(CycleInput(cycle, 1, True, view, life.demand, life.options), decision)
    cycles = cycles_of(path)
    assert sum(cycle.is_fresh for cycle in cycles) > 1
    for cycle_read, seen in zip(cycles, witness.seen, strict=True):
        assert_replays(cycle_read, *seen)


def test_a_digest_tells_one_decision_from_another() -> None:
    """Of each kind of difference, whichever engine made the decision."""
    life = Life(small_fleet())
    view = life.store.snapshot()
    decision = reference.decide(snapshot_of(view), life.demand, life.options)
    whole = outcome_of(decision, view, life.demand)
    fewer = Decision(actions=decision.actions[1:], rows=decision.rows)
    assert digest_text(outcome_of(fewer, view, life.demand)) != digest_text(whole)
    first = decision.rows[0]
    for changed in (
        {"claimed": first.claimed[::-1]},
        {"claimed": first.claimed[1:]},
        {"domain": "za", "has_domain": True},
        {"victims": (first.claimed[0],)},
        {"satisfiable": False},
    ):
        other = Decision(actions=decision.actions, rows=(replace(first, **changed), *decision.rows[1:]))
        assert digest_text(outcome_of(other, view, life.demand)) != digest_text(whole), changed


def test_a_gang_of_pods_that_is_parked_by_its_age_is_recorded(tmp_path: Path) -> None:
    """The decision's row is another object than the demand's, and not equal to it."""
    gang = replace(
        pods("c1", ("64", 2)),
        profile=Profile(requirements=(Requirement(ZONE, Operator.SAME, ()),), priority=100),
        group="run-1",
    )
    snapshot = Snapshot.of([machine("m1", S.IDLE)], {machine("m1", S.IDLE).id: 0.0})
    demand = (pods("c1", ("1", 1)), gang)
    ages = {parking_key(gang): PARK_AFTER_CYCLES}
    life = Life(FleetInput(snapshot, demand, Options(now_seconds=1.0, reported=frozenset({"c1"}), parking_ages=ages)))
    path = tmp_path / "recording"
    with recording(path) as recorder:
        view = life.store.snapshot()
        decision = shapes.decide(snapshot_of(view), life.demand, life.options)
        assert any(row.need.parked for row in decision.rows)
        recorder.take(CycleInput(1, 1, True, view, life.demand, life.options), decision)
        recorder.write_waiting()
    assert [cycle.cycle for cycle in cycles_of(path)] == [1]


def small_fleet() -> FleetInput:
    """Three machines, and a row that wants two of them."""
    machines = [machine(name, S.IDLE) for name in ("m1", "m2", "m3")]
    snapshot = Snapshot.of(machines, {machines[0].id: 0.0})
    return FleetInput(snapshot, (need("c1", "8"),), Options(now_seconds=1.0, reported=frozenset({"c1"})))
