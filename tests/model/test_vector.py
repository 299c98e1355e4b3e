"""Resource vectors: what the operations keep true (docs/spec/model.md §5)."""

from hypothesis import given
from hypothesis import strategies as st

from bigfleet.model import vector
from bigfleet.model.quantity import Family
from bigfleet.model.vector import Vector

vectors = st.dictionaries(st.sampled_from(["cpu", "memory", "gpu", "disk"]), st.integers(1, 10**30))


@given(vectors, vectors)
def test_sum_is_exact_and_commutes(left: Vector, right: Vector) -> None:
    total = vector.add(left, right)

    assert total == vector.add(right, left)
    assert all(total[name] == left.get(name, 0) + right.get(name, 0) for name in {*left, *right})


@given(vectors, vectors)
def test_difference_saturates_and_drops_what_is_gone(have: Vector, take: Vector) -> None:
    left = vector.subtract(have, take)

    assert left == {n: have[n] - take.get(n, 0) for n in have if have[n] - take.get(n, 0) > 0}
    assert vector.covers(take, have) == (not left)


@given(vectors, vectors)
def test_what_was_added_can_be_taken_away(left: Vector, right: Vector) -> None:
    assert vector.subtract(vector.add(left, right), right) == left


@given(vectors, vectors)
def test_the_maximum_covers_both_and_no_dimension_more(left: Vector, right: Vector) -> None:
    largest = vector.maximum(left, right)

    assert vector.covers(largest, left)
    assert vector.covers(largest, right)
    assert all(milli in (left.get(name), right.get(name)) for name, milli in largest.items())


@given(vectors)
def test_nothing_wanted_is_covered_and_useless(have: Vector) -> None:
    assert vector.covers(have, vector.ZERO)
    assert not vector.is_useful(have, vector.ZERO)


@given(vectors, vectors)
def test_supply_is_useful_when_subtracting_it_leaves_less(supply: Vector, remaining: Vector) -> None:
    assert vector.is_useful(supply, remaining) == (vector.subtract(remaining, supply) != remaining)


@given(vectors, st.integers(1, 50))
def test_scaling_is_repeated_addition(unit: Vector, count: int) -> None:
    total: Vector = vector.ZERO
    for _ in range(count):
        total = vector.add(total, unit)

    assert vector.scale(unit, count) == total


def test_operations_never_change_their_arguments() -> None:
    left, right = {"cpu": 5}, {"cpu": 3, "gpu": 1}
    for operation in (vector.add, vector.subtract, vector.maximum):
        operation(left, right)

    assert (left, right) == ({"cpu": 5}, {"cpu": 3, "gpu": 1})


def test_parsing_drops_what_is_not_positive_and_faults_name_it() -> None:
    quantities = {"cpu": "4", "memory": "lots", "gpu": "0", "disk": "-1"}

    assert vector.parse_vector(quantities) == {"cpu": 4000}
    disk, memory = vector.vector_faults(quantities)
    assert "disk" in disk
    assert "negative" in disk
    assert "memory" in memory
    assert "'lots'" in memory


def test_sums_print_as_their_rows_were_written() -> None:
    written = vector.families({"cpu": "1500m", "memory": "1Gi", "disk": "1e3", "bad": "x"})

    total = {"memory": 2 * 2**30 * 1000, "cpu": 2_000_000, "disk": 3_000_000}
    assert vector.format_vector(total, written) == {"cpu": "2k", "disk": "3e3", "memory": "2Gi"}
    assert "bad" not in written


def test_a_resource_of_unknown_writing_prints_as_users_expect() -> None:
    assert vector.guess_family("hugepages-2Mi") is Family.BINARY
    assert vector.format_vector({"memory": 2**20 * 1000, "cpu": 500}) == {"cpu": "500m", "memory": "1Mi"}
