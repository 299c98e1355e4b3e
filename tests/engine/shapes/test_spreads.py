"""Pods of a strict spread that are placed together stand where they would stand one after the other."""

import random
from dataclasses import replace
from typing import Any

import pytest

from bigfleet.engine.shapes import hosting
from bigfleet.engine.shapes.decide import decide
from bigfleet.model.need import Need
from bigfleet.model.profile import SpreadMode, TopologySpread
from tests.engine.proof import in_proportion
from tests.engine.shapes.shape_fleets import ZONE, fleet

FLEETS = in_proportion(800, least=50)


def spread(need: Need, rng: random.Random) -> Need:
    """Return the row with four times the pods and, mostly, under a strict spread."""
    if not need.shapes or need.profile.same_key is not None or rng.random() < 0.3:
        return need
    strict = (TopologySpread(ZONE, rng.choice([1, 2, 3]), SpreadMode.DO_NOT_SCHEDULE),)
    shapes = tuple(replace(shape, count=4 * shape.count) for shape in need.shapes)
    return replace(need, profile=replace(need.profile, spreads=strict), shapes=shapes)


def test_rounds_equal_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    together = 0
    place_rounds = hosting._place_rounds

    def counted(*arguments: Any) -> bool:
        nonlocal together
        is_placed = place_rounds(*arguments)
        together += is_placed
        return is_placed

    for seed in range(FLEETS):
        drawn, rng = fleet(seed), random.Random(seed)
        demand = tuple(spread(need, rng) for need in drawn.demand)
        monkeypatch.setattr(hosting, "_place_rounds", counted)
        fast = decide(drawn.snapshot, demand, drawn.options)
        monkeypatch.setattr(hosting, "_place_rounds", lambda *_arguments: False)
        assert fast == decide(drawn.snapshot, demand, drawn.options)
    assert together > FLEETS
