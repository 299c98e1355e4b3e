"""The choice among offers ranks those that are alike once, and finds what ranking each of them finds."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from bigfleet.engine.shapes import acquire, gangs
from bigfleet.engine.shapes.choice import OfferChoice, Prices, choose, fill_of, rank, wanted_of
from bigfleet.engine.shapes.decide import decide
from bigfleet.engine.shapes.state import OfferState, PodGroup, Room, RowState
from bigfleet.model.profile import Operator, Requirement
from tests.engine.proof import in_proportion
from tests.engine.shapes.shape_fleets import ZONE, Drawn, fleet

FLEETS = in_proportion(300, least=60)


def alike_machines(seed: int) -> Drawn:
    """Return a fleet in which machines of a type have one supply, and in which rows may use some zones only."""
    rng = random.Random(seed)
    drawn = fleet(seed, machines_max=60, rows_max=24, gangs=(0.15, 0.5)[seed % 2])
    machines = tuple(
        replace(one, allocatable={name: one.allocatable[name] for name in ("cpu", "memory")}) for one in drawn.machines
    )
    rows = []
    for row in drawn.demand:
        zones = Requirement(ZONE, Operator.IN, tuple(rng.sample("abc", 2)))
        requirements = (*row.profile.requirements, *((zones,) if rng.random() < 0.6 else ()))
        rows.append(replace(row, profile=replace(row.profile, requirements=requirements)))
    return replace(drawn, machines=machines, demand=tuple(rows))


def test_it_finds_what_ranking_every_offer_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    choices = runners_up = alike = 0

    def compared(
        row: RowState,
        others: Sequence[RowState],
        offers: Sequence[OfferState],
        totals: Mapping[int, Room],
        prices: Prices,
        *,
        left: Mapping[PodGroup, int],
        head_start: float,
    ) -> OfferChoice | None:
        nonlocal choices, runners_up, alike
        wanted, ranked = wanted_of((row, *others), left), []
        for offer in offers:
            fill = fill_of(offer, totals[offer.shape], wanted)
            served = {group.row for group, _ in fill.pods} | {share.row for share in fill.shares}
            if offer.available and row in served:
                key = rank(offer, totals[offer.shape], fill, prices, head_start)
                ranked.append((key, offer.peek().id, offer))
        ranked.sort(key=lambda each: each[:2])
        found = choose(row, others, offers, totals, prices, left=left, head_start=head_start)
        if not ranked:
            assert found is None
            return None
        assert found is not None
        assert (found.ratio, found.offer) == (ranked[0][0][0], ranked[0][2])
        assert found.fill == fill_of(found.offer, totals[found.offer.shape], wanted)
        assert found.runner_up == (ranked[1][1] if len(ranked) > 1 else "")
        choices += 1
        if len(ranked) > 1:
            assert found.runner_up_ratio == ranked[1][0][0]
            runners_up += 1
            alike += ranked[0][0] == ranked[1][0]
        return found

    monkeypatch.setattr(acquire, "choose", compared)
    monkeypatch.setattr(gangs, "choose", compared)
    for seed in range(FLEETS):
        drawn = alike_machines(seed)
        decide(drawn.snapshot, drawn.demand, drawn.options)
    assert choices > FLEETS
    assert runners_up
    assert alike, "some differ in their ids alone"
