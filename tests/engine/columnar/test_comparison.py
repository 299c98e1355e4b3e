"""A shard's check of its own decisions sees every difference, though it makes no object to look for one."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.engine.columnar.answer import ColumnarAnswer, RowColumns
from bigfleet.engine.columnar.comparison import are_alike
from bigfleet.engine.columnar.engine import ColumnarEngine
from bigfleet.engine.columnar.verification import divergence
from bigfleet.engine.columns.store import ColumnStore
from bigfleet.engine.decision import Decision, Options
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need
from bigfleet.model.states import MachineState
from tests.engine.crowds import varied_fleets
from tests.engine.proof import examples
from tests.strategies import HOST, FleetInput


def decided(store: ColumnStore, demand: Sequence[Need], options: Options) -> Decision:
    return ColumnarEngine().decide(store.snapshot(), demand, options)


def store_of(fleet: FleetInput) -> ColumnStore:
    store = ColumnStore()
    for machine in fleet.snapshot.machines.values():
        store.insert(machine, fleet.snapshot.idle_since_seconds.get(machine.id))
    return store


def altered(decision: Decision, answer: ColumnarAnswer) -> Decision:
    return replace(decision, actions=answer.actions(), rows=answer.results())


ACTION_COLUMNS = ("acquired_machine", "acquired_row", "victim_machine", "victim_row", "reclaimed", "released")
ROW_COLUMNS = ("acquired_row", "victim_row")
WORK_COLUMNS = ("credited", "acquired", "satisfiable", "domain", "taken_machine")


@examples(150)
@given(varied_fleets(), st.integers(0, 2**31), st.sampled_from((*ACTION_COLUMNS, *WORK_COLUMNS)))
def test_what_differs_in_any_column_is_not_alike(fleet: FleetInput, pick: int, column: str) -> None:
    """Where it is alike all the same, the difference was in a place that nothing is read from."""
    store = store_of(fleet)
    first = decided(store, fleet.demand, fleet.options)
    if not isinstance(first.rows, RowColumns):
        return
    answer = first.rows.answer
    holder = answer if column in ACTION_COLUMNS else answer.work
    values = getattr(holder, column).copy()
    numbers = len(answer.rows_in_list) if column in ROW_COLUMNS else len(answer.view.ids)
    if not len(values) or not numbers:
        return
    place = pick % len(values)
    values[place] = -1 if column == "domain" else (values[place] + 1) % numbers
    if column in ACTION_COLUMNS:
        changed = replace(answer, **{column: values}, _needs={}, _tails=None)
    else:
        changed = replace(answer, work=answer.work._replace(**{column: values}), _needs={}, _tails=None)
    if are_alike(answer, changed):
        assert altered(first, changed) == first


@examples(150)
@given(varied_fleets(), st.floats(0, 1e6))
def test_alike_is_equal(fleet: FleetInput, later_seconds: float) -> None:
    """Two decisions on one view, by other clocks: they are alike exactly where they are equal."""
    store = store_of(fleet)
    first = decided(store, fleet.demand, fleet.options)
    other = decided(store, fleet.demand, replace(fleet.options, now_seconds=later_seconds))
    if isinstance(first.rows, RowColumns) and isinstance(other.rows, RowColumns):
        is_equal = list(first.actions) == list(other.actions) and list(first.rows) == list(other.rows)
        assert are_alike(first.rows.answer, other.rows.answer) == is_equal
        assert (divergence(first, other, 1) is None) == is_equal


def test_a_difference_is_told_with_its_place() -> None:
    store = ColumnStore()
    store.insert(Machine(id=MachineId("m0"), state=MachineState.CONFIGURED, host=HOST, cluster=ClusterId("c0")), None)
    options = Options(now_seconds=0.0, reported=frozenset({ClusterId("c0")}))
    first = ColumnarEngine().decide(store.snapshot(), (), options)
    assert isinstance(first.rows, RowColumns)
    other = altered(first, replace(first.rows.answer, reclaimed=np.zeros(0, np.int32)))
    told = divergence(first, other, 7)

    assert told is not None
    assert (told.decisions, told.evidence["actions_kept"], told.evidence["actions_full"]) == (7, 1, 0)
    assert told.difference.startswith("action 0: kept Action(")
