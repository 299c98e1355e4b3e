"""Large clusters: planned on a sample, still filled by simple packers, within stock, near the cost of small ones."""

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from bigfleet.planner import Composition, MachineClass, Problem, plan
from tests.planner.building import CLOUD, DOLLAR, kind, problem, services, shape
from tests.planner.checking import faults


def without_a_place(asked: Problem, found: Composition) -> int:
    """Return the pods that the best of some orders of first-fit-decreasing leaves over."""
    return min(_left(asked, found, *order) for order in product((0, 1, 2), (True, False), (True, False)))


def _left(asked: Problem, found: Composition, key: int, are_rare_first: bool, is_largest_first: bool) -> int:
    """Return the pods that first-fit leaves over, by cpu (0), memory (1) or largest share (2), descending."""
    machines = [k for k, n in enumerate(found.counts) for _ in range(n)]
    machines.sort(key=lambda k: asked.classes[k].supply, reverse=is_largest_first)
    total = [sum(asked.classes[k].supply[d] for k in machines) for d in range(2)]
    hosts = Counter(machines)

    def size(position: int) -> tuple[float, ...]:
        one = asked.shapes[position]
        shares = [one.request[d] / total[d] for d in range(2)]
        matching = sum(n for k, n in hosts.items() if one.matches >> k & 1) if are_rare_first else 0
        return matching, -(max(shares) if key == 2 else shares[key])

    room = [list(asked.classes[k].supply) for k in machines]
    left = 0
    for position in sorted(range(len(asked.shapes)), key=size):
        one = asked.shapes[position]
        count = one.count
        for k, free in zip(machines, room, strict=True):
            if not count:
                break
            if one.matches >> k & 1:
                most = min(has // wants for has, wants in zip(free, one.request, strict=True) if wants)
                taken = min(most, count)
                count -= taken
                for d, wants in enumerate(one.request):
                    free[d] -= wants * taken
        left += count
    return left


def multiplied(asked: Problem, factor: int) -> Problem:
    """Return the problem with so many times the pods and the stock."""
    return replace(
        asked,
        shapes=tuple(replace(one, count=one.count * factor) for one in asked.shapes),
        classes=tuple(replace(one, stock=None if one.stock is None else one.stock * factor) for one in asked.classes),
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
@pytest.mark.parametrize("factor", [3, 12])
def test_a_large_fleet_is_filled_by_a_simple_packer(seed: int, factor: int) -> None:
    """What the sample finds is completed for all pods, at little more than what one part in so many costs."""
    small = problem(CLOUD, services(seed, 900))
    large = multiplied(small, factor)

    found = plan(large)

    assert faults(large, found) == []
    assert without_a_place(large, found) == 0
    assert found.lost_millipods <= large.pods * 5
    assert found.cost <= 1.08 * factor * plan(small).cost


def test_a_sample_knows_that_stock_is_limited() -> None:
    """What is paid for anyway suffices for half of the pods; the other half costs what it costs alone."""
    free = kind("free", 16_000, 64 * 1024, 0.0, stock=100)
    bought = kind("bought", 8_000, 32 * 1024, 0.4)
    classes: tuple[MachineClass, ...] = (free, bought)
    asked = problem(classes, [shape(1000, 4096, 3000, classes)])

    found = plan(asked)

    assert faults(asked, found) == []
    assert found.added[0] == 100
    assert 175 <= found.added[1] <= 185
    assert found.cost == round(found.added[1] * 0.4 * DOLLAR)
