"""Both engines tell when each phase of a decision ends, whatever they remember and whoever else listens."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from bigfleet.engine.columnar.engine import ColumnarEngine, columnar_decide
from bigfleet.engine.columns.objects import snapshot_of
from bigfleet.engine.columns.store import ColumnStore
from bigfleet.engine.decision import Decision, Options, Phase
from bigfleet.engine.explain.records import RecordLog
from bigfleet.engine.reference import decide as reference
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need
from bigfleet.model.profile import Profile
from bigfleet.model.states import MachineState
from bigfleet.model.vector import parse_vector
from tests.strategies import HOST

OPTIONS = Options(now_seconds=0.0, reported=frozenset())
ROWS = (Need(cluster=ClusterId("c"), profile=Profile(priority=1), aggregate=parse_vector({"cpu": "4"})),)
#: A cpu more than any column holds.
HUGE = "9" * 30


def store_of(cpu: str = "4") -> ColumnStore:
    store = ColumnStore()
    store.insert(Machine(id=MachineId("m"), state=MachineState.IDLE, host=HOST, resources={"cpu": cpu}))
    return store


def decisions(engine: ColumnarEngine, told: list[Phase]) -> Iterator[Decision]:
    """Decide with nothing remembered, with the last decision, and with what a change leaves of it."""
    store = store_of()
    yield engine.decide(store.snapshot(), ROWS, OPTIONS, on_phase=told.append)
    yield engine.decide(store.snapshot(), ROWS, replace(OPTIONS, now_seconds=1.0), on_phase=told.append)
    store.insert(Machine(id=MachineId("m"), state=MachineState.IDLE, host=HOST, resources={"cpu": "2"}))
    yield engine.decide(store.snapshot(), ROWS, OPTIONS, on_phase=told.append)
    yield engine.decide(store.snapshot(), (), OPTIONS, on_phase=told.append)


@pytest.mark.rule("shard 14/4")
@pytest.mark.parametrize("is_incremental", [True, False])
def test_each_phase_is_told_once_and_in_order_whatever_was_kept(is_incremental: bool) -> None:
    told: list[Phase] = []
    for decision in decisions(ColumnarEngine(is_incremental=is_incremental), told):
        assert told == [Phase.FOLD, Phase.ASSIGN, Phase.PREEMPT, Phase.RECLAIM]
        assert decision.basis is not None
        told.clear()


def test_the_reference_tells_the_same_and_answers_as_if_nobody_listened() -> None:
    told: list[Phase] = []
    snapshot = snapshot_of(store_of().snapshot())

    heard = reference.decide(snapshot, ROWS, OPTIONS, on_phase=told.append)

    assert (told, heard) == (list(Phase), reference.decide(snapshot, ROWS, OPTIONS))
    assert heard == columnar_decide(snapshot, ROWS, OPTIONS)


def test_whoever_wants_records_too_hears_of_the_reference() -> None:
    told: list[Phase] = []
    log = RecordLog()

    ColumnarEngine().decide(store_of().snapshot(), ROWS, OPTIONS, log, on_phase=told.append)

    assert (told, bool(log.records)) == (list(Phase), True)


def test_an_engine_that_begins_again_tells_all_phases_of_the_last_time() -> None:
    """Whether it checks itself, or the numbers do not fit into its columns."""
    told: list[Phase] = []

    ColumnarEngine(verify_every_cycles=1).decide(store_of().snapshot(), ROWS, OPTIONS, on_phase=told.append)
    assert told == [*Phase, *Phase]

    told.clear()
    ColumnarEngine().decide(store_of(HUGE).snapshot(), ROWS, OPTIONS, on_phase=told.append)
    assert told[-4:] == list(Phase)
