"""The candidate that exchanges machines reaches the fleet that is planned from nothing, where nothing prevents it."""

from dataclasses import replace
from typing import Any

import pytest

from bench.quality.exchanges_candidate import ExchangesCandidate
from bench.quality.judges import judge
from bench.quality.reports.handmade import instance, offer, row
from bench.quality.shapes_candidate import ShapesCandidate
from bench.quality.values import Instance, PackingRow, Scheduler, Start
from bigfleet.model.penalty import PINNED

ORDER = Scheduler.LEAST_ALLOCATED
#: Of the ones that pods ran on at first, and cheaper ones.
DEAR, CHEAP = offer("dear", 4, 16, 1.0), offer("cheap", 8, 32, 0.4)


def pods(count: int, kind: str = "", **fields: Any) -> PackingRow:
    """Return pods of 1 cpu, on machines of one type where a type is named."""
    return replace(row("r", [(1, 2, count)], kind), **fields)


def cost(of: Instance, candidate: ShapesCandidate | ExchangesCandidate, start: Start = Start.STEPS) -> float:
    """Return what the fleet of a candidate costs, completed by the judge."""
    settled = candidate.settle(of, start, ORDER)
    assert settled.is_at_rest
    verdict = judge(of, settled, scheduler=ORDER, orders=5)
    assert verdict.violations == ()
    return verdict.completed_usd_per_hour


def test_dear_machines_are_exchanged_for_cheaper_ones() -> None:
    """The pods asked for dear machines, and then for any: without exchanges they stay there."""
    found = instance([DEAR, CHEAP], {"c": [pods(20, "dear")]}, {"c": [pods(20)]})
    fresh = cost(found, ShapesCandidate(), Start.NOTHING)

    assert cost(found, ShapesCandidate()) > 2 * fresh
    assert cost(found, ExchangesCandidate()) == pytest.approx(fresh, rel=0.05)


def test_clusters_exchange_side_by_side_within_the_stock() -> None:
    """Two clusters want the only cheaper machine: one gets it."""
    offers = [DEAR, replace(CHEAP, stock=1)]
    step = {name: [pods(7, "dear")] for name in "ab"}
    found = instance(offers, step, {name: [pods(7)] for name in "ab"})

    settled = ExchangesCandidate().settle(found, Start.STEPS, ORDER)
    cheap = [each.cluster for each in settled.holdings if found.offers[each.offer].id == "cheap"]
    assert len(cheap) == 1
    assert cost(found, ExchangesCandidate()) < cost(found, ShapesCandidate())


def test_pinned_pods_stay() -> None:
    pinned = pods(20, interruption_bucket=PINNED, reclamation_bucket=PINNED)
    found = instance(
        [DEAR, CHEAP], {"c": [replace(pinned, requirements=pods(1, "dear").requirements)]}, {"c": [pinned]}
    )

    assert cost(found, ExchangesCandidate()) == cost(found, ShapesCandidate())
