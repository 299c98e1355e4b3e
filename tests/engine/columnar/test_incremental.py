"""What an engine remembers changes nothing: after any changes it decides what it would decide without a memory.

One engine and one store live through a history; after each step the decision equals the reference's on the object form
and that of an engine that was made for it. Answers that were given stay what they were.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.engine.columnar.answer import RowColumns
from bigfleet.engine.columnar.comparison import are_alike
from bigfleet.engine.columnar.engine import ColumnarEngine
from bigfleet.engine.columns import store as store_module
from bigfleet.engine.columns.store import ColumnSnapshot, ColumnStore
from bigfleet.engine.decision import ActionKind, Decision, Options
from bigfleet.engine.reference import decide as reference
from bigfleet.engine.snapshot import Snapshot
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need
from bigfleet.model.profile import Operator, Profile, Requirement
from bigfleet.model.states import MachineState
from bigfleet.model.vector import parse_vector
from tests.engine.changes import CarryOut, Change, History, Look, Put, Remove, Rows, Settings, histories, large_history
from tests.engine.closed_loop import begun
from tests.engine.crowds import seeded
from tests.engine.proof import Proof, RecordProperty, examples
from tests.strategies import HOST, NOW_SECONDS, RACK, FleetInput


class Life:
    """One store and one engine, and the plain objects that they must never disagree with."""

    def __init__(self, first: FleetInput) -> None:
        self.machines: dict[MachineId, Machine] = {}
        self.since: dict[MachineId, float] = {}
        self.demand: Sequence[Need] = list(first.demand)
        self.options = first.options
        self.engine, self.store = ColumnarEngine(), ColumnStore()
        self.decision: Decision | None = None
        for machine in first.snapshot.machines.values():
            self.put(machine, first.snapshot.idle_since_seconds.get(machine.id))

    def put(self, machine: Machine, since: float | None) -> None:
        if machine.id in self.machines:
            self.store.update(machine, since)
        else:
            self.store.insert(machine, since)
        self.machines[machine.id] = machine
        self.since.pop(machine.id, None)
        if since is not None:
            self.since[machine.id] = since

    def change(self, change: Change) -> None:
        match change:
            case Put(machine, since):
                self.put(machine, since)
            case Remove(machine_id) if machine_id in self.machines:
                self.store.remove(machine_id)
                del self.machines[machine_id]
                self.since.pop(machine_id, None)
            case Rows(demand):
                self.demand = list(demand)
            case Settings(options):
                self.options = options
            case Look():
                self.store.snapshot()
            case CarryOut() if self.decision is not None:
                self.carry_out(self.decision)

    def carry_out(self, decision: Decision) -> None:
        """Begin what is still possible: a machine may have changed since."""
        starts = {ActionKind.BOOTSTRAP: MachineState.IDLE, ActionKind.PROVISION: MachineState.SPECULATIVE}
        starts |= {ActionKind.RECLAIM: MachineState.CONFIGURED, ActionKind.PREEMPT: MachineState.CONFIGURED}
        for action in decision.actions:
            machine = self.machines.get(action.machine_id)
            if machine is not None and machine.state is starts.get(action.kind, MachineState.IDLE):
                self.put(begun(machine, action), None)

    def decide(self) -> tuple[Decision, ColumnSnapshot]:
        """Decide with everybody, compare, and return the reference's decision and the view."""
        snapshot, view = Snapshot.of(self.machines.values(), self.since), self.store.snapshot()
        expected = reference.decide(snapshot, self.demand, self.options)
        remembered = self.engine.decide(view, self.demand, self.options)
        fresh = ColumnarEngine().decide(view, self.demand, self.options)
        assert_same(expected, fresh)
        assert_same(expected, remembered)
        if isinstance(fresh.rows, RowColumns) and isinstance(remembered.rows, RowColumns):
            # What a shard compares while it serves.
            assert are_alike(remembered.rows.answer, fresh.rows.answer)
        self.decision = remembered
        return expected, view


def assert_same(expected: Decision, actual: Decision) -> None:
    """Compare part by part, so that a failure names the part."""
    for want, have in zip(expected.rows, actual.rows, strict=True):
        assert want == have
    assert list(expected.actions) == list(actual.actions)
    assert expected == actual


def live(past: History, proof: Proof) -> None:
    """Live through a history; every other view is held to its end, so that buffers are used again and are not."""
    life = Life(past.first)
    given_answers: list[tuple[Decision, Decision | None]] = []
    held: list[ColumnSnapshot] = []
    for turn, step in enumerate(((), *past.steps)):
        for change in step:
            life.change(change)
        with proof.example():
            expected, view = life.decide()
        given_answers.append((expected, life.decision))
        if turn % 2:
            held.append(view)
        del view
    for expected, answer in given_answers:
        assert answer is not None
        assert_same(expected, answer)


def test_after_any_changes_the_decision_is_the_full_one(record_property: RecordProperty) -> None:
    proof = Proof()

    @examples(600)
    @given(histories())
    def check(past: History) -> None:
        live(past, proof)

    with proof.told(record_property, "incremental decisions"):
        check()


def test_after_changes_of_a_larger_fleet_the_decision_is_the_full_one(record_property: RecordProperty) -> None:
    """Ten clusters, 200 machines, 30 rows: what one cluster changes, others may feel through the machines that both
    could have."""
    proof = Proof()

    @examples(40)
    @given(st.integers(0, 2**32))
    def check(seed: int) -> None:
        live(large_history(seed), proof)

    with proof.told(record_property, "incremental decisions"):
        check()


def test_a_vocabulary_made_anew_at_every_view_changes_nothing(
    record_property: RecordProperty, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "VOCABULARY_SPARE", 0)
    monkeypatch.setattr(store_module, "VOCABULARY_GROWTH_MAX", 1)
    proof = Proof()

    @examples(40)
    @given(histories())
    def check(past: History) -> None:
        live(past, proof)

    with proof.told(record_property, "incremental decisions"):
        check()


@examples(40)
@given(histories(), st.integers(0, 2**32))
def test_one_engine_decides_for_two_fleets_in_turn(past: History, seed: int) -> None:
    """Nothing that was learnt of one store is believed of another, whatever their generations and layouts are."""
    engine, pick = ColumnarEngine(), seeded(seed)
    lives = [Life(past.first), Life(past.first)]
    for step in past.steps:
        life = pick(lives)
        for change in step:
            life.change(change)
        life.engine = engine
        life.decide()


@examples(40)
@given(histories())
def test_an_older_view_is_decided_as_it_was(past: History) -> None:
    """An engine may be asked about a view that it has gone beyond, and then about the newest again."""
    life = Life(past.first)
    first, view = life.decide()
    demand, options = list(life.demand), life.options
    for step in past.steps:
        for change in step:
            life.change(change)
        life.decide()
        assert_same(first, life.engine.decide(view, demand, options))


# ---- what one change must reach ----------------------------------------------------------------------------------

GANG = Profile(requirements=(Requirement(RACK, Operator.SAME),), priority=900)
PLAIN = Profile(priority=900)


def machine(machine_id: str, state: MachineState, **fields: object) -> Machine:
    hostless = state in (MachineState.SPECULATIVE, MachineState.CREATING)
    host = {} if hostless else {"host": HOST}
    made = Machine(id=MachineId(machine_id), state=state, resources={"gpu": "1"}, labels={RACK: "r0"})
    return replace(made, **{**host, **fields})  # type: ignore[arg-type]


def row(cluster: str, gpus: int, profile: Profile = PLAIN, group: str = "") -> Need:
    return Need(ClusterId(cluster), profile, parse_vector({"gpu": str(gpus)}), group=group)


def life_of(machines: Sequence[Machine], demand: Sequence[Need]) -> Life:
    reported = frozenset(need.cluster for need in demand) | {"c0", "c1", "c2"}
    options = Options(now_seconds=NOW_SECONDS, reported=reported)
    life = Life(FleetInput(Snapshot.of(machines), tuple(demand), options))
    life.decide()
    return life


def acted(life: Life) -> list[tuple[str, str, str]]:
    decision, _ = life.decide()
    return [(action.kind.label, action.machine_id, action.cluster) for action in decision.actions]


def test_a_cluster_that_shrinks_leaves_a_free_machine_to_another() -> None:
    life = life_of([machine("m0", MachineState.IDLE)], [row("c0", 1), row("c1", 1)])

    life.change(Rows((row("c1", 1),)))

    assert acted(life) == [("Bootstrap", "m0", "c1")]


def test_equal_rows_in_another_order_take_the_only_free_machine_from_each_other() -> None:
    first, second = row("c0", 1), row("c1", 1)
    life = life_of([machine("m0", MachineState.IDLE)], [first, second])

    life.change(Rows((second, first)))

    assert acted(life) == [("Bootstrap", "m0", "c1")]


def test_a_row_that_a_free_machine_satisfies_gives_up_what_it_kept_while_it_was_short() -> None:
    """Nothing of the row's cluster changed; what it kept depends on what the row lacks in this decision."""
    stamp = {"cluster": ClusterId("c0"), "assigned_need_fingerprint": PLAIN.fingerprint}
    kept = machine("kept", MachineState.CONFIGURED, resources={"cpu": "1"}, **stamp)
    life = life_of([kept], [row("c0", 1)])
    assert acted(life) == []

    life.change(Put(machine("free", MachineState.IDLE), NOW_SECONDS))
    assert acted(life) == [("Bootstrap", "free", "c0"), ("Reclaim", "kept", "c0")]

    life.change(Remove(MachineId("free")))
    assert acted(life) == []


def test_an_earlier_gangs_earmark_moves_a_later_gang_of_another_cluster() -> None:
    """What the first gang counts on does not count for the second, though it claims nothing there yet."""
    racks = {"r0": 2, "r1": 2}
    free = [machine(f"{rack}-{n}", MachineState.IDLE, labels={RACK: rack}) for rack in racks for n in range(2)]
    life = life_of(free, [row("c1", 2, GANG, "b")])
    assert {"r0-0", "r0-1"} == {machine_id for _, machine_id, _ in acted(life)}

    life.change(Rows((row("c0", 2, GANG, "a"), row("c1", 2, GANG, "b"))))

    assert {("r0-0", "c0"), ("r0-1", "c0"), ("r1-0", "c1"), ("r1-1", "c1")} == {
        (machine_id, cluster) for _, machine_id, cluster in acted(life)
    }


def test_a_machine_that_appears_anywhere_may_fold_a_gang_of_a_cluster_that_did_not_change() -> None:
    life = life_of([machine(f"m{n}", MachineState.IDLE) for n in range(2)], [row("c0", 2, GANG, "a")])

    life.change(Put(machine("big", MachineState.SPECULATIVE, resources={"gpu": "2"}), None))

    decision, _ = life.decide()
    assert [result.folded for result in decision.rows] == [True]


def test_a_slot_that_is_created_without_a_record_serves_the_first_row_of_its_class() -> None:
    gang = row("c0", 1, PLAIN, "a")
    creating = machine("m0", MachineState.CREATING, assigned_need_fingerprint=gang.fingerprint, assigned_group="a")
    life = life_of([machine("m0", MachineState.SPECULATIVE)], [gang, row("c1", 1, PLAIN, "a")])

    life.change(Put(creating, None))
    decision, _ = life.decide()
    assert [result.claimed for result in decision.rows] == [("m0",), ()]

    life.change(Rows((row("c1", 1, PLAIN, "a"),)))
    decision, _ = life.decide()
    assert [result.claimed for result in decision.rows] == [("m0",)]


def test_a_slot_of_no_cluster_that_is_recorded_for_one_leaves_the_other_that_it_was_credited_to() -> None:
    """The other cluster's own rows and machines stay what they were."""
    first, second = row("c0", 1, PLAIN, "a"), row("c1", 1, PLAIN, "a")
    creating = machine("m0", MachineState.CREATING, assigned_need_fingerprint=first.fingerprint, assigned_group="a")
    life = life_of([creating], [first, second])

    life.change(Put(replace(creating, intended_cluster=ClusterId("c1")), None))

    decision, _ = life.decide()
    assert [result.claimed for result in decision.rows] == [(), ("m0",)]
