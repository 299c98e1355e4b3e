"""The limit on the share of one pool: what it forces, what it leaves alone, and what it yields to."""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.planner import Composition, Effort, MachineClass, PlannerShape, Problem, plan
from bigfleet.planner.concentration import pool_shares
from tests.planner.building import kind, problem, shape, small_problems
from tests.planner.checking import faults

LITTLE = Effort(rounds=3, proposals=40, simulated=6, orders=2, final_orders=2, finalists=3)
HALF = Fraction(1, 2)


def spot(
    key: str, dollars: float, *, cpu: int = 4, gib: int = 16, held: int = 0, stock: int | None = None
) -> MachineClass:
    """Return a class that is a pool of its own."""
    return replace(kind(key, cpu * 1000, gib * 1024, dollars, probability=1000, held=held, stock=stock), pool=key)


def answer(
    classes: Sequence[MachineClass], shapes: Sequence[PlannerShape], percent: int = 50
) -> tuple[Problem, Composition]:
    """Return the problem with the limit, and its composition."""
    asked = replace(problem(classes, shapes), pool_percent_max=percent)
    return asked, plan(asked, LITTLE)


def services(classes: Sequence[MachineClass], penalty: float = 4.0, count: int = 60) -> list[PlannerShape]:
    """Return pods of 1 cpu and 4 GiB."""
    return [shape(1000, 4096, count, classes, penalty=penalty)]


def test_the_cheapest_pool_provides_half_at_most() -> None:
    classes = (spot("a", 0.05), spot("b", 0.06), spot("c", 0.07))

    asked, found = answer(classes, services(classes))

    assert max(pool_shares(asked, found).values()) <= HALF
    assert found.counts[0] >= found.counts[1] >= found.counts[2]
    assert "a" in found.limited_pools
    assert not faults(asked, found)


@pytest.mark.parametrize(
    ("penalty", "count", "percent"),
    [(0.0, 60, 50), (4.0, 20, 50), (4.0, 60, 0)],
    ids=["without a penalty", "in a small cluster", "switched off"],
)
def test_the_lowest_cost_counts_where_no_limit_applies(penalty: float, count: int, percent: int) -> None:
    classes = (spot("a", 0.05), spot("b", 0.06))

    asked, found = answer(classes, services(classes, penalty, count), percent)

    assert found.counts[1] == 0
    assert found.limited_pools == ()
    assert pool_shares(asked, found) == {}


def test_machines_on_demand_take_over_where_one_pool_is_all_there_is() -> None:
    classes = (spot("a", 0.05), kind("od", 4000, 16384, 0.2))

    asked, found = answer(classes, services(classes, count=120))

    assert pool_shares(asked, found)["a"] <= HALF
    assert found.counts[1] > 0


def test_a_pool_is_cut_for_the_supply_that_there_is_then() -> None:
    """Of 10 cheap machines in 13 half of the supply is 8: the larger machines that come instead bring more supply."""
    classes = (spot("a", 0.04), spot("b", 0.05, gib=32), spot("c", 0.3, cpu=16, gib=32))
    shapes = [
        shape(1000, 4096, 41, classes, penalty=4.0),
        shape(500, 1024, 27, classes, penalty=4.0),
    ]

    asked, found = answer(classes, shapes)

    assert max(pool_shares(asked, found).values()) <= HALF
    assert found.cost <= 0.85 * 10**9, "with 7, 4 and 2 machines it cost $1.08 an hour"


@pytest.mark.parametrize(
    ("dollars", "is_kept"), [(0.2, False), (0.045, True)], ids=["others are expensive", "others are cheap"]
)
def test_a_pool_may_exceed_the_limit_by_a_tenth_where_keeping_it_is_expensive(dollars: float, is_kept: bool) -> None:
    """Five machines of 12 cpu are 54 % of the supply; with four, three more of another pool are needed."""
    classes = (spot("a", 0.12, cpu=12, gib=48), spot("b", 0.16, stock=8), spot("c", dollars, stock=60))

    asked, found = answer(classes, services(classes, count=109))

    share = max(pool_shares(asked, found).values())
    assert (share <= HALF) == is_kept
    assert share <= HALF * Fraction(11, 10)
    assert not faults(asked, found)


def test_pods_count_for_more_than_the_limit() -> None:
    classes = (spot("a", 0.05), spot("b", 0.06, stock=2))

    _, found = answer(classes, services(classes))

    assert found.unhosted == ()
    assert found.limited_pools == ("a",)


def test_held_machines_stay_and_growth_goes_elsewhere() -> None:
    classes = (spot("a", 0.05, held=12), spot("b", 0.06))

    asked, found = answer(classes, services(classes, count=80))

    assert found.retained[0] == 12
    assert pool_shares(asked, found)["a"] <= Fraction(12, sum(found.counts))
    assert found.counts[1] >= 8


@given(small_problems(), st.integers(1, 100))
def test_the_limit_costs_no_pod_its_place(asked: Problem, percent: int) -> None:
    """With any limit as many pods are hosted as without it, and every claim keeps the rules."""
    pools = tuple(replace(one, pool=one.key if one.probability else "") for one in asked.classes)
    free = replace(asked, classes=pools)
    bound = replace(free, pool_percent_max=percent)

    found = plan(bound, LITTLE)

    assert faults(bound, found) == []
    assert sum(one.count for one in found.unhosted) <= sum(one.count for one in plan(free, LITTLE).unhosted)
