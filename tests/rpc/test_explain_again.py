"""One row or machine retold says what the whole cycle, decided again, would say (docs/adr/0121-explain-one-row.md)."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.engine.columnar.engine import ColumnarEngine
from bigfleet.engine.columns.objects import snapshot_of
from bigfleet.engine.columns.store import column_snapshot
from bigfleet.engine.decision import Options
from bigfleet.engine.explain import scope as explain_scope
from bigfleet.engine.explain.decided_fleet import DecidedFleet
from bigfleet.engine.explain.earmarks import EarmarkReplay
from bigfleet.engine.explain.explanation import rows_to_ask
from bigfleet.engine.explain.records import Record, RowRef
from bigfleet.engine.explain.replay import ExplainMismatch
from bigfleet.engine.explain.scope import RowScope
from bigfleet.engine.reference import decide as reference
from bigfleet.engine.snapshot import Snapshot
from bigfleet.model.labels import ZONE
from bigfleet.model.machine import PreemptedFor
from bigfleet.model.profile import Operator, Profile, Requirement
from bigfleet.model.states import MachineState
from bigfleet.model.vector import parse_vector
from bigfleet.rpc.servers import explain as explain_server
from bigfleet.rpc.servers.explain import row_events_in_full
from bigfleet.rpc.wire import convert_explain
from bigfleet.shard.status.views import DecidedOn
from tests.engine.crowds import crowd, seeded, varied_fleets
from tests.engine.proof import examples
from tests.shard.world import machine, need
from tests.strategies import NOW_SECONDS, FleetInput

EXAMPLES = examples(150)
#: Events of an answer and entries of a list: none left out, or so few that most are.
BOUNDS = ((1_000, 100), (7, 2), (1, 1))


def decided(fleet: FleetInput, *, has_source: bool = True) -> DecidedOn:
    """Decide a fleet over aggregates as a shard does, and keep what a shard keeps of it."""
    fleet = replace(fleet, demand=tuple(replace(need, shapes=(), waiting=()) for need in fleet.demand))
    view = column_snapshot(fleet.snapshot)
    if not has_source:
        view = replace(view, source=None)
    decision = ColumnarEngine().decide(view, fleet.demand, fleet.options)
    return DecidedOn(snapshot=view, demand=fleet.demand, options=fleet.options, rows=decision.rows)


@contextmanager
def bounded(events_max: int, listed_max: int) -> Iterator[None]:
    """Answer with so few events, and let no question fall back to deciding everything again."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(explain_server, "EVENTS_MAX", events_max))
        for module in (explain_server, convert_explain):
            stack.enter_context(patch.object(module, "LISTED_MAX", listed_max))
        stack.enter_context(patch.object(explain_server, "_log_mismatch", raise_it))
        yield


def raise_it(fault: ExplainMismatch) -> None:
    raise fault


class Ears:
    """Gives several reporters one decision to hear; each hears what it would hear alone."""

    def __init__(self, ears: Sequence[Any]) -> None:
        self._ears = ears

    def wants_row(self, row: RowRef) -> bool:
        return any(ear.wants_row(row) for ear in self._ears)

    def wants_machine(self, machine_id: str) -> bool:
        return any(ear.wants_machine(machine_id) for ear in self._ears)

    def report(self, record: Record) -> None:
        row, machine_id = getattr(record, "row", None), getattr(record, "machine", None)
        for ear in self._ears:
            if (row is None or ear.wants_row(row)) and (machine_id is None or ear.wants_machine(machine_id)):
                ear.report(record)


def in_full(on: DecidedOn, ears: Sequence[Any]) -> list[Any]:
    """Decide everything once more, and return what each ear heard."""
    reference.decide(snapshot_of(on.snapshot), on.demand, on.options, Ears(ears))
    return [ear.events.messages() for ear in ears]


def assert_rows_are_retold(on: DecidedOn) -> None:
    """Every row, asked for by its last member, gets the answer that the whole cycle gives."""
    told = in_full(on, [explain_server._RowEar(position) for position in range(len(on.rows))])
    for result, full in zip(on.rows, told, strict=True):
        view: Any = SimpleNamespace(need=result.members[-1])
        assert explain_server._need_events(on, view) == full, result.need


def assert_machines_are_retold(on: DecidedOn, step: int = 1) -> None:
    """So does every machine, or every so many."""
    machines = list(snapshot_of(on.snapshot).machines.values())[::step]
    ears = [explain_server._MachineEar(one.id, positions=rows_to_ask(on.rows, one)) for one in machines]
    for one, full in zip(machines, in_full(on, ears), strict=True):
        assert explain_server._machine_events(on, one.id) == (one, full), one.id


@pytest.mark.rule("shard 12/13")
@EXAMPLES
@given(varied_fleets(), st.sampled_from(BOUNDS), st.booleans())
def test_a_row_retold_says_what_the_whole_cycle_says(
    fleet: FleetInput, bounds: tuple[int, int], has_source: bool
) -> None:
    with bounded(*bounds):
        assert_rows_are_retold(decided(fleet, has_source=has_source))


@pytest.mark.rule("shard 12/13")
@EXAMPLES
@given(varied_fleets(), st.sampled_from(BOUNDS), st.booleans())
def test_a_machine_retold_says_what_the_whole_cycle_says(
    fleet: FleetInput, bounds: tuple[int, int], has_source: bool
) -> None:
    with bounded(*bounds):
        assert_machines_are_retold(decided(fleet, has_source=has_source))


@pytest.mark.parametrize("seed", range(2))
def test_in_a_crowd_a_short_answer_says_what_the_whole_cycle_says(seed: int) -> None:
    """Most machines play no part in a question there, and most gangs count on machines that others want."""
    on = decided(crowd(seeded(seed), machines=150, rows=40), has_source=False)
    with bounded(9, 3):
        assert_rows_are_retold(on)
        assert_machines_are_retold(on, step=12)


@pytest.mark.parametrize("same", [(), (Requirement(ZONE, Operator.SAME),)], ids=["plain", "gang"])
def test_equal_rows_that_stand_twice_count_what_drains_once(same: tuple[Requirement, ...]) -> None:
    """The first of them, which wants large machines, has those that drain for their key, the second none."""
    profile = Profile(requirements=same, priority=900)
    twins = [
        replace(need("c1", "24"), profile=profile, group="g", min_unit=parse_vector({"cpu": "8"})),
        replace(need("c1", "40"), profile=profile, group="g", min_unit=parse_vector({"cpu": "4"})),
    ]
    large: dict[str, Any] = {"allocatable": {"cpu": "8"}}
    coming = {**large, "cluster": "c2", "preempted_for": PreemptedFor(*twins[0].key)}
    machines = [
        *(machine(f"d{number}", MachineState.DRAINING, **coming) for number in range(2)),
        machine("i0", MachineState.IDLE, **large),
        machine("i1", MachineState.IDLE),
    ]
    options = Options(now_seconds=NOW_SECONDS, reported=frozenset({"c1"}))
    on = decided(FleetInput(Snapshot.of(machines), tuple(twins), options))
    assert [row.claimed for row in on.rows] == [("i0",), ("i1",)]
    assert [row.unresolved == row.deficit for row in on.rows] == [False, True]
    with bounded(1_000, 100):
        assert_rows_are_retold(on)
        assert_machines_are_retold(on)


def test_a_question_looks_at_few_machines_whatever_the_fleet() -> None:
    """What is made into objects for a row is bounded by the answer and by what the row wants, not by the fleet."""
    sizes = []
    for machines in (400, 1600):
        on = decided(crowd(seeded(1), machines=machines, rows=30), has_source=False)
        fleet = DecidedFleet(on.snapshot, on.options, on.rows)
        scopes = (RowScope(fleet, place, EarmarkReplay(fleet)) for place in range(len(on.rows)))
        with patch.object(explain_scope, "MATCHING_COUNT_MAX", 3):
            sizes.append(max(len(scope.machines(heads=5, listed=3)) for scope in scopes))

    assert max(sizes) < 120


def test_a_row_that_comes_to_something_else_is_answered_by_the_whole_cycle() -> None:
    """And somebody is told."""
    on = decided(crowd(seeded(2), machines=30, rows=8))
    position = next(place for place, row in enumerate(on.rows) if row.claimed)
    full = row_events_in_full(on, position)
    rows = list(on.rows)
    rows[position] = replace(rows[position], unresolved={"gpu": 77_000})
    view: Any = SimpleNamespace(need=rows[position].members[0])
    with structlog.testing.capture_logs() as logs:
        told = explain_server._need_events(replace(on, rows=rows), view)

    assert told == full
    assert [entry["event"] for entry in logs] == ["explain.mismatch_found"]
