"""Two engines, one answer: the columnar engine decides what the reference engine decides, field for field."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.cli.engine.checks import ENGINE_CHECKS, check_fleet
from bigfleet.cli.engine.columns import decide_from_columns
from bigfleet.cli.engine.runner import run_case
from bigfleet.engine import plain_engine
from bigfleet.engine.columnar.answer import ActionColumns
from bigfleet.engine.columnar.engine import ColumnarEngine, columnar_decide, warm_up
from bigfleet.engine.columns.store import ColumnStore
from bigfleet.engine.decision import ActionKind, Decision, Options, Weights
from bigfleet.engine.deferred import LazySequence
from bigfleet.engine.explain.records import RecordLog, Reporter
from bigfleet.engine.reference import decide as reference
from bigfleet.engine.snapshot import Snapshot
from bigfleet.model.need import Need
from bigfleet.model.states import CapacityType, MachineState
from tests.engine.crowds import varied_fleets
from tests.engine.proof import EQUALITY_EXAMPLES_USUAL, Proof, RecordProperty, examples
from tests.engine_cases import Case, Entry, cases_of, fleet_need_of, fleet_options_of, fleet_snapshot_of, load_fleets
from tests.strategies import FleetInput, fleets


def assert_equal(expected: Decision, actual: Decision) -> None:
    """Compare part by part, so that a failure names the part."""
    assert list(expected.actions) == list(actual.actions)
    assert len(expected.rows) == len(actual.rows)
    for want, have in zip(expected.rows, actual.rows, strict=True):
        assert want == have
    assert expected == actual


def both_decide(
    snapshot: Snapshot, demand: Sequence[Need], options: Options, reporter: Reporter | None = None
) -> Decision:
    """Decide with both engines and return the columnar one's answer."""
    actual = decide_from_columns(snapshot, demand, options)
    assert_equal(plain_engine.decide(snapshot, demand, options, reporter), actual)
    return actual


FLEETS = [pytest.param(fleet, id=str(fleet["seed"])) for fleet in load_fleets()]


@pytest.mark.parametrize("fleet", FLEETS)
def test_a_generated_fleet_gets_the_reference_decision(fleet: Entry) -> None:
    snapshot, options = fleet_snapshot_of(fleet), fleet_options_of(fleet)
    needs = [fleet_need_of(record) for record in fleet["demand"]]

    assert_equal(reference.decide(snapshot, needs, options), columnar_decide(snapshot, needs, options))


@pytest.mark.parametrize("fleet", FLEETS)
def test_a_generated_fleet_gets_the_recorded_decision(fleet: Entry) -> None:
    check_fleet(fleet, columnar_decide)


@cases_of(*ENGINE_CHECKS)
def test_a_case_gets_the_decision_that_it_says(case: Case) -> None:
    run_case(case, both_decide)


# ---- random fleets -----------------------------------------------------------------------------------------------

#: What the fleets of the comparison must have had in them.
FEATURES = frozenset(
    {
        *(f"action {kind.label}" for kind in ActionKind),
        *(f"state {state.label}" for state in MachineState if state is not MachineState.UNSPECIFIED),
        *("several clusters", "infinite penalty", "infinite price", "unjoined", "reserved", "idle without stamp"),
        *("row folded", "row same", "row same, no domain", "row spread", "row parked", "row short after victims"),
        *("spot", "own stamp", "stamp of another row", "creating unrecorded", "coming", "silent cluster", "weights"),
    }
)


def features_of(fleet: FleetInput, decision: Decision) -> Iterator[str]:
    """Say what a fleet and its decision have in them."""
    options, machines = fleet.options, fleet.snapshot.machines
    own = {need.key[1:] for need in fleet.demand}
    for machine in machines.values():
        yield f"state {machine.state.label}"
        stamp = (machine.assigned_need_fingerprint, machine.assigned_group)
        if machine.cluster and any(stamp):
            yield "own stamp" if stamp in own else "stamp of another row"
        facts = {
            "infinite penalty": math.inf in (machine.assigned_reclamation_penalty_dollars,),
            "infinite price": machine.price_usd_per_hour == math.inf,
            "unjoined": machine.id in options.unjoined and machine.state is MachineState.CONFIGURED,
            "reserved": machine.id in options.reserved and machine.state is MachineState.IDLE,
            "idle without stamp": machine.state is MachineState.IDLE
            and machine.id not in fleet.snapshot.idle_since_seconds,
            "spot": machine.capacity_type is CapacityType.SPOT,
            "creating unrecorded": machine.state is MachineState.CREATING and not machine.intended_cluster,
            "coming": machine.preempted_for in {need.key for need in fleet.demand},
            "silent cluster": machine.cluster != "" and machine.cluster not in options.reported,
        }
        yield from (name for name, is_so in facts.items() if is_so)
    if len({machine.cluster for machine in machines.values()} - {""}) > 1:
        yield "several clusters"
    if options.weights != Weights():
        yield "weights"
    yield from (f"action {action.kind.label}" for action in decision.actions)
    for row in decision.rows:
        is_same = row.need.profile.same_key is not None
        facts = {
            "row folded": row.folded,
            "row same": row.has_domain,
            "row same, no domain": is_same and not row.has_domain,
            "row spread": row.need.profile.strict_spread is not None and bool(row.claimed),
            "row parked": row.need.parked,
            "row short after victims": bool(row.victims and row.unresolved),
        }
        yield from (name for name, is_so in facts.items() if is_so)


def test_any_fleet_gets_the_reference_decision(record_property: RecordProperty) -> None:
    """Every field of every action and row is equal, and the same reporter hears the same records of both engines, also
    of machines that are columns and no objects. The fleets have everything in them that a decision looks at."""
    decided, explained = Proof(), Proof()

    @examples(EQUALITY_EXAMPLES_USUAL)
    @given(varied_fleets())
    def check(fleet: FleetInput) -> None:
        expected, actual = RecordLog(), RecordLog()
        view = ColumnStore.from_snapshot(fleet.snapshot).snapshot()
        with decided.example():
            decision = reference.decide(fleet.snapshot, fleet.demand, fleet.options, expected)
            decided.features.update(set(features_of(fleet, decision)))
            assert_equal(decision, ColumnarEngine().decide(view, fleet.demand, fleet.options))
        with explained.example():
            assert_equal(decision, ColumnarEngine().decide(view, fleet.demand, fleet.options, actual))
            assert expected.records == actual.records

    with decided.told(record_property, "engine equality"), explained.told(record_property, "engine records"):
        check()
    decided.assert_features(FEATURES)


# ---- numbers that do not fit -------------------------------------------------------------------------------------

ODD_SIZES = st.sampled_from(
    [
        {"memory": "100m", "cpu": "3"},
        {"memory": "999999999999937", "cpu": "7"},
        {"memory": "9223372036854775807", "cpu": "1001m"},
        {"memory": "7Ti", "cpu": "9007199254740993m"},
        {"gpu": "9223372036854775807"},
    ]
)
ODD_AGGREGATES = st.sampled_from(
    [
        {"memory": 10**30, "cpu": 10**25},
        {"memory": 1, "cpu": 1},
        {"memory": 999_999_999_999_937_001, "cpu": 6_007, "gpu": 13},
        {"cpu": 2**63 - 1, "gpu": 2**62 + 1},
        {"licence": 1, "cpu": 4000},
    ]
)


@st.composite
def odd_inputs(draw: st.DrawFn) -> FleetInput:
    """Draw a fleet whose quantities share no divisor, exceed an int64, or are far beyond what the fleet has."""
    fleet = draw(fleets(machines_max=14))
    machines = [
        replace(machine, resources=draw(ODD_SIZES), allocatable={}) if draw(st.booleans()) else machine
        for machine in fleet.snapshot.machines.values()
    ]
    demand = tuple(
        replace(need, aggregate=draw(ODD_AGGREGATES)) if draw(st.booleans()) else need for need in fleet.demand
    )
    return FleetInput(Snapshot.of(machines, fleet.snapshot.idle_since_seconds), demand, fleet.options)


@examples(300)
@given(odd_inputs())
def test_no_quantity_is_too_odd_or_too_large(fleet: FleetInput) -> None:
    expected = reference.decide(fleet.snapshot, fleet.demand, fleet.options)

    assert_equal(expected, columnar_decide(fleet.snapshot, fleet.demand, fleet.options))


@st.composite
def tall_orders(draw: st.DrawFn) -> FleetInput:
    """Draw a plain fleet with rows that are far beyond the integers: the kernels serve them, without the reference."""
    fleet = draw(fleets(machines_max=14))
    demand = tuple(
        replace(need, aggregate=draw(ODD_AGGREGATES)) if draw(st.booleans()) else need for need in fleet.demand
    )
    return FleetInput(fleet.snapshot, demand, fleet.options)


@examples(300)
@given(tall_orders())
def test_rows_beyond_the_integers_need_no_other_engine(fleet: FleetInput) -> None:
    expected = reference.decide(fleet.snapshot, fleet.demand, fleet.options)

    actual = columnar_decide(fleet.snapshot, fleet.demand, fleet.options)

    actions: object = actual.actions
    assert isinstance(actions, LazySequence)
    assert_equal(expected, actual)


# ---- what an answer is -------------------------------------------------------------------------------------------


def some_decisions() -> tuple[Decision, Decision]:
    fleet = load_fleets()[0]
    snapshot, options = fleet_snapshot_of(fleet), fleet_options_of(fleet)
    needs = [fleet_need_of(record) for record in fleet["demand"]]
    return reference.decide(snapshot, needs, options), columnar_decide(snapshot, needs, options)


def test_an_answer_reads_like_the_tuples_of_the_reference() -> None:
    expected, actual = some_decisions()

    assert expected.actions[-1] == actual.actions[-1]
    assert expected.rows[1:3] == actual.rows[1:3]
    assert len(expected.actions) == len(actual.actions)
    assert repr(expected.actions) == repr(actual.actions)
    with pytest.raises(IndexError):
        actual.actions[len(expected.actions)]


def test_an_answer_differs_from_a_shorter_or_another_one() -> None:
    expected, actual = some_decisions()

    assert actual.actions != expected.actions[:-1]
    assert actual.actions != (expected.actions[-1], *expected.actions[1:-1], expected.actions[0])
    number: object = 1
    assert actual.actions != number


def test_actions_are_counted_without_being_made() -> None:
    expected, actual = some_decisions()
    actions: object = actual.actions

    assert isinstance(actions, ActionColumns)
    counts = {kind: count for kind, count in actions.counts().items() if count}
    assert Counter(action.kind for action in expected.actions) == counts


def test_records_are_those_of_the_reference() -> None:
    fleet = load_fleets()[0]
    snapshot, options = fleet_snapshot_of(fleet), fleet_options_of(fleet)
    needs = [fleet_need_of(record) for record in fleet["demand"]]
    expected, actual = RecordLog(), RecordLog()
    reference.decide(snapshot, needs, options, expected)

    columnar_decide(snapshot, needs, options, actual)

    assert expected.records == actual.records


def test_warming_up_decides_once_and_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    decisions: list[Decision] = []

    def noted(snapshot: Snapshot, demand: Sequence[Need], options: Options) -> Decision:
        decisions.append(columnar_decide(snapshot, demand, options))
        return decisions[-1]

    monkeypatch.setattr("bigfleet.engine.columnar.engine.columnar_decide", noted)

    warm_up()

    assert [(len(decision.actions), len(decision.rows)) for decision in decisions] == [(0, 0)]
