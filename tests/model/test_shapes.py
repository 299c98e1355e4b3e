"""Shapes of demand: one order for equal demand, sums, and fewer shapes that still speak for every pod."""

from collections.abc import Sequence
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.model import labels as keys
from bigfleet.model import vector
from bigfleet.model.profile import Operator, Requirement
from bigfleet.model.quantity import MILLI_MAX
from bigfleet.model.shapes import (
    SHAPES_MAX,
    DemandShape,
    Overhead,
    canonical_overheads,
    canonical_shapes,
    largest_of,
    merged_upwards,
    missing_in,
    shape_key,
    total_of,
)
from tests.strategies import demand_shapes

CPU_1, CPU_2 = {"cpu": 1000}, {"cpu": 2000}


def pods_of(shapes: Sequence[DemandShape]) -> dict[tuple[tuple[str, int], ...], int]:
    """Return how many pods of each request there are."""
    pods: dict[tuple[tuple[str, int], ...], int] = {}
    for shape in shapes:
        request = vector.vector_key(shape.resources)
        pods[request] = pods.get(request, 0) + shape.count
    return pods


@given(st.lists(demand_shapes, max_size=5))
def test_equal_demand_has_one_form_whatever_the_order(shapes: list[DemandShape]) -> None:
    expected = canonical_shapes(shapes)

    assert all(canonical_shapes(order) == expected for order in permutations(shapes))
    assert canonical_shapes(expected) == expected
    assert pods_of(expected) == pods_of(shapes)
    assert len({shape_key(shape) for shape in expected}) == len(expected)


def test_equal_requests_without_a_limit_are_joined() -> None:
    assert canonical_shapes([DemandShape(CPU_1, 3), DemandShape(CPU_2, 1), DemandShape(CPU_1, 4)]) == (
        DemandShape(CPU_2, 1),
        DemandShape(CPU_1, 7),
    )


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([(10, 1), (2, 1)], [(2, 1), (10, 1)]),
        ([(10, 1), (10, 1)], [(20, 2)]),
        ([(10, 1), (20, 2)], [(30, 3)]),
        ([(10, 1), (10, 3)], [(10, 1), (10, 3)]),
        ([(10, 1), (5, 0)], [(5, 0), (10, 1)]),
    ],
)
def test_groups_that_exclude_themselves_are_joined_only_when_they_fill_as_many_machines(
    groups: list[tuple[int, int]], expected: list[tuple[int, int]]
) -> None:
    """Groups of 10 and 2 pods with limit 1 need 10 machines; 12 pods with limit 2 would need 6."""
    joined = canonical_shapes([DemandShape(CPU_1, count, limit) for count, limit in groups])

    assert [(shape.count, shape.max_per_machine) for shape in joined] == expected


@given(st.lists(demand_shapes, max_size=5))
def test_sums_and_maxima_are_those_of_every_pod(shapes: list[DemandShape]) -> None:
    total, largest = vector.ZERO, vector.ZERO
    for shape in shapes:
        for _pod in range(shape.count):
            total, largest = vector.add(total, shape.resources), vector.maximum(largest, shape.resources)

    assert (total_of(shapes), largest_of(shapes)) == (total, largest)


def test_sums_stay_within_the_number_form() -> None:
    assert total_of([DemandShape({"cpu": MILLI_MAX - 1}, 2)]) == {"cpu": MILLI_MAX}


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [
        ({"cpu": 4000}, None),
        ({"cpu": 3999}, None),
        ({"cpu": 4001}, ("cpu", 4000, 4001)),
        ({"cpu": 4000, "gpu": 1}, ("gpu", 0, 1)),
        ({}, ("cpu", 4000, 0)),
    ],
)
def test_shapes_may_add_up_to_more_and_never_to_less(
    aggregate: dict[str, int], expected: tuple[str, int, int] | None
) -> None:
    assert missing_in([DemandShape(CPU_2, 2)], aggregate) == expected


# ---- fewer shapes ------------------------------------------------------------------------------------------------

#: Pods and machines so small that every placement can be tried.
small_shapes = st.builds(
    DemandShape,
    st.sampled_from([{"cpu": 1}, {"cpu": 2}, {"cpu": 3}, {"cpu": 1, "gpu": 1}, {"cpu": 5}]),
    st.integers(1, 3),
    st.sampled_from([0, 0, 1, 2]),
)


@st.composite
def machines_that_host(draw: st.DrawFn, shapes: Sequence[DemandShape]) -> list[dict[str, int]]:
    """Draw machines that host the shapes exactly: each pod is put somewhere, no machine has more than its pods."""
    machines: list[dict[str, int]] = [{} for _ in range(3)]
    for shape in shapes:
        held = [0] * len(machines)
        for _pod in range(shape.count):
            fitting = [n for n, count in enumerate(held) if not shape.max_per_machine or count < shape.max_per_machine]
            if not fitting:
                machines.append({})
                held.append(0)
                fitting = [len(machines) - 1]
            on = draw(st.sampled_from(fitting))
            held[on] += 1
            machines[on] = dict(vector.add(machines[on], shape.resources))
    return machines


def can_host(machines: list[dict[str, int]], shapes: Sequence[DemandShape]) -> bool:
    """Try every placement of the shapes, one pod after the other."""
    pods = [(number, shape) for number, shape in enumerate(shapes) for _pod in range(shape.count)]
    free = [dict(machine) for machine in machines]
    held: dict[tuple[int, int], int] = {}

    def place(position: int, first: int) -> bool:
        if position == len(pods):
            return True
        number, shape = pods[position]
        # Pods of one shape are alike: the next is on no machine before this one's.
        start = first if position and pods[position - 1][0] == number else 0
        for on in range(start, len(free)):
            limit = shape.max_per_machine
            if not vector.covers(free[on], shape.resources) or (limit and held.get((number, on), 0) >= limit):
                continue
            for name, milli in shape.resources.items():
                free[on][name] -= milli
            held[number, on] = held.get((number, on), 0) + 1
            found = place(position + 1, on)
            held[number, on] -= 1
            for name, milli in shape.resources.items():
                free[on][name] += milli
            if found:
                return True
        return False

    return place(0, 0)


@given(st.lists(small_shapes, min_size=3, max_size=5), st.data())
def test_what_hosts_the_merged_shapes_hosts_every_pod(shapes: list[DemandShape], data: st.DataObject) -> None:
    merged = merged_upwards(shapes, shapes_max=2)

    assert len(merged) <= 2
    assert merged == canonical_shapes(merged)
    assert can_host(data.draw(machines_that_host(merged)), shapes)


@given(st.lists(small_shapes, min_size=2, max_size=5), st.data())
def test_what_hosts_joined_groups_hosts_every_group(shapes: list[DemandShape], data: st.DataObject) -> None:
    assert can_host(data.draw(machines_that_host(canonical_shapes(shapes))), shapes)


def test_requests_that_name_ever_other_dimensions_are_merged_all_the_same() -> None:
    """Where there are more sets of dimensions than shapes may be, pods are given what they do not ask for."""
    shapes = [DemandShape({f"r{n:02}": 1000}, 1, n % 2) for n in range(6)]

    assert merged_upwards(shapes, shapes_max=2) == (
        DemandShape({"r01": 1000, "r03": 1000, "r05": 1000}, 3, 3),
        DemandShape({"r00": 1000, "r02": 1000, "r04": 1000}, 3),
    )


@given(st.lists(demand_shapes, max_size=6), st.integers(2, 6))
def test_merging_upwards_never_says_less(shapes: list[DemandShape], shapes_max: int) -> None:
    merged = merged_upwards(shapes, shapes_max)

    assert len(merged) <= shapes_max
    assert missing_in(merged, total_of(shapes)) is None
    assert vector.covers(largest_of(merged), largest_of(shapes))
    if len(canonical_shapes(shapes)) <= shapes_max:
        assert merged == canonical_shapes(shapes)


def test_many_requests_are_rounded_up_a_little() -> None:
    """A thousand different requests of a row become 64, which ask for an eighth more at most."""
    shapes = [DemandShape({"cpu": 100 + 7 * n, "memory": (1 << 30) + (n % 90 << 24)}, 1 + n % 3) for n in range(1000)]

    merged = merged_upwards(shapes)

    assert len(merged) == SHAPES_MAX
    before, after = total_of(shapes), total_of(merged)
    assert all(before[name] <= after[name] <= before[name] * 1.125 for name in before)


def test_groups_of_nearest_counts_are_rounded_up_to_the_larger_one() -> None:
    """Their requests stay as they are."""
    groups = [DemandShape(CPU_1, 1000 + n, 1) for n in range(SHAPES_MAX)]

    merged = merged_upwards([*groups, DemandShape(CPU_2, 7)])

    assert len(merged) <= SHAPES_MAX
    assert {vector.vector_key(shape.resources) for shape in merged} == {(("cpu", 1000),), (("cpu", 2000),)}
    limited = [shape for shape in merged if shape.max_per_machine]
    assert sum(shape.max_per_machine for shape in limited) == SHAPES_MAX
    assert max(shape.count / shape.max_per_machine for shape in limited) == 1000 + SHAPES_MAX - 1
    assert sum(shape.count for shape in limited) <= sum(shape.count for shape in groups) * 1.001


# ---- overheads ---------------------------------------------------------------------------------------------------

ZONE_A = Requirement(keys.ZONE, Operator.IN, ("a",))


def test_overheads_of_equal_requirements_are_added_up() -> None:
    everywhere, in_a = Overhead((), {"cpu": 100}), Overhead((ZONE_A,), {"memory": 5})

    summed = canonical_overheads([in_a, everywhere, Overhead((), {"cpu": 50}), Overhead((ZONE_A, ZONE_A), {})])

    assert summed == (Overhead((), {"cpu": 150}), in_a)


def test_an_overhead_applies_to_machines_that_hold_every_requirement() -> None:
    overhead = Overhead((ZONE_A, Requirement("gpu", Operator.DOES_NOT_EXIST)), {"cpu": 100})

    assert overhead.applies({keys.ZONE: "a"}.get)
    assert not overhead.applies({keys.ZONE: "b"}.get)
    assert not overhead.applies({keys.ZONE: "a", "gpu": "x"}.get)
