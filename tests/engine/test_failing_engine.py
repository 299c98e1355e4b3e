"""An engine that fails on a demand does not keep a fleet from its decisions: the plain engine makes them."""

from dataclasses import replace

import pytest

from bigfleet.engine.columnar.cycle import Cycle
from bigfleet.engine.columnar.verification import Divergence
from bigfleet.engine.columns.store import ColumnStore
from bigfleet.engine.fleet_engine import FleetEngine
from bigfleet.engine.reference import decide as reference
from bigfleet.engine.shapes.decide import decide
from bigfleet.engine.shapes.pod_engine import PodEngine
from bigfleet.engine.snapshot import Snapshot
from bigfleet.model.need import Need
from tests.engine.shapes.shape_fleets import Drawn, fleet

SEEDS = range(40)


def _fail(*_args: object, **_kwargs: object) -> None:
    raise OverflowError("an amount that does not fit")


def _without_shapes(drawn: Drawn) -> tuple[Need, ...]:
    return tuple(replace(row, shapes=(), waiting=()) for row in drawn.demand)


def test_a_decision_over_pods_that_fails_is_made_by_the_plain_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Divergence] = []
    engine = FleetEngine(on_divergence=found.append)
    drawn = [each for each in map(fleet, SEEDS) if any(row.shapes for row in each.demand)]
    with monkeypatch.context() as broken:
        broken.setattr(PodEngine, "decide", _fail)
        for each in drawn:
            view = ColumnStore.from_snapshot(each.snapshot).snapshot()
            made, plain = (
                engine.decide(view, each.demand, each.options),
                decide(each.snapshot, each.demand, each.options),
            )
            assert (list(made.actions), list(made.rows)) == (list(plain.actions), list(plain.rows))
    assert [each.decisions for each in found] == list(range(1, len(drawn) + 1))
    assert {each.difference for each in found} == {
        "the compiled engine failed: OverflowError: an amount that does not fit"
    }
    frames = found[0].evidence["frames"]
    assert isinstance(frames, list)
    assert frames[-1].startswith("_fail line ")

    # It decides by itself again as soon as it can, without what it knew when it failed.
    view = ColumnStore.from_snapshot(drawn[0].snapshot).snapshot()
    engine.decide(view, drawn[0].demand, drawn[0].options)
    assert len(found) == len(drawn)


def test_a_decision_over_aggregates_that_fails_is_made_by_the_reference_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Divergence] = []
    engine = FleetEngine(on_divergence=found.append)
    monkeypatch.setattr(Cycle, "__init__", _fail)
    for drawn in map(fleet, SEEDS):
        demand = _without_shapes(drawn)
        made = engine.decide(ColumnStore.from_snapshot(drawn.snapshot).snapshot(), demand, drawn.options)
        plain = reference.decide(drawn.snapshot, demand, drawn.options)
        assert (list(made.actions), list(made.rows)) == (list(plain.actions), list(plain.rows))
    assert len(found) == len(SEEDS)


def test_without_a_listener_a_failure_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure in a command or a test must be seen; it is replaced only where it is reported."""
    monkeypatch.setattr(PodEngine, "decide", _fail)
    drawn = next(each for each in map(fleet, SEEDS) if any(row.shapes for row in each.demand))
    view = ColumnStore.from_snapshot(Snapshot.of(drawn.machines)).snapshot()
    with pytest.raises(OverflowError):
        FleetEngine().decide(view, drawn.demand, drawn.options)
