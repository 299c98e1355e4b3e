"""Rows of demand and how rows of one kind merge (docs/spec/model.md §8)."""

from collections.abc import Sequence
from dataclasses import fields

from hypothesis import given
from hypothesis import strategies as st

from bigfleet.model import vector
from bigfleet.model.ids import ClusterId
from bigfleet.model.need import Need, amounts_of, merge_rows, new_need
from bigfleet.model.profile import Profile
from bigfleet.model.shapes import (
    SHAPES_MAX,
    DemandShape,
    canonical_shapes,
    largest_of,
    merged_upwards,
    total_of,
)
from tests.strategies import demand_shapes, needs


@given(st.lists(needs(), max_size=8))
def test_merged_rows_have_the_sums_and_maxima_of_their_class(rows: Sequence[Need]) -> None:
    merged = merge_rows(rows)

    assert [row.key for row in merged] == list(dict.fromkeys(row.key for row in rows))
    for row in merged:
        members = [member for member in rows if member.key == row.key]
        aggregate, min_unit = vector.ZERO, vector.ZERO
        for member in members:
            aggregate, min_unit = vector.add(aggregate, member.aggregate), vector.maximum(min_unit, member.min_unit)
        assert (row.aggregate, row.min_unit) == (aggregate, min_unit)
        known = [member.arrival_unix_nanos for member in members if member.arrival_unix_nanos]
        assert row.arrival_unix_nanos == min(known, default=0)


@given(st.lists(needs(), max_size=8))
def test_merging_again_changes_nothing(rows: Sequence[Need]) -> None:
    merged = merge_rows(rows)

    assert merge_rows(merged) == merged


@given(st.lists(needs(), max_size=8))
def test_merged_rows_have_the_shapes_of_their_class(rows: Sequence[Need]) -> None:
    """A row that wants something and has no shapes leaves the merged row without any."""
    for row in merge_rows(rows):
        members = [member for member in rows if member.key == row.key]
        shapes = canonical_shapes(shape for member in members for shape in member.shapes)
        assert row.shapes == (() if any(m.aggregate and not m.shapes for m in members) else shapes)
        assert row.waiting == canonical_shapes(shape for member in members for shape in member.waiting)
        if row.shapes:
            assert total_of(row.shapes) == row.aggregate


def test_more_shapes_than_a_row_may_have_are_merged_upwards() -> None:
    def row(first: int) -> Need:
        shapes = [DemandShape({"cpu": 1000 + n}, 1) for n in range(first, first + SHAPES_MAX)]
        amounts = amounts_of(shapes, aggregate={}, min_unit={})
        return Need(ClusterId("c"), Profile(), amounts.aggregate, amounts.min_unit, shapes=amounts.shapes)

    one, other = row(0), row(500)
    (merged,) = merge_rows([one, other])

    assert merged.shapes == merged_upwards((*one.shapes, *other.shapes))
    assert len(merged.shapes) <= SHAPES_MAX
    assert merged.aggregate == vector.add(one.aggregate, other.aggregate)


@given(st.lists(demand_shapes, max_size=4))
def test_what_a_row_leaves_out_follows_from_its_shapes(shapes: list[DemandShape]) -> None:
    assert amounts_of(shapes, aggregate={}, min_unit={}) == (
        total_of(shapes),
        largest_of(shapes),
        canonical_shapes(shapes),
    )
    given_amounts = amounts_of(shapes, aggregate={"cpu": 1}, min_unit={"cpu": 2})
    assert given_amounts[:2] == ({"cpu": 1}, {"cpu": 2})


@given(needs())
def test_a_row_made_quickly_is_the_row(need: Need) -> None:
    """Its way of writing included, which is no part of equality."""
    values = [getattr(need, slot.name) for slot in fields(Need)]
    made = new_need(*values)

    assert made == need
    assert [getattr(made, slot.name) for slot in fields(Need)] == values


@given(needs())
def test_writing_does_not_make_rows_differ(need: Need) -> None:
    """How a quantity was written is for printing alone."""
    assert need == Need(
        need.cluster,
        need.profile,
        need.aggregate,
        need.min_unit,
        need.arrival_unix_nanos,
        need.group,
        need.parked,
        shapes=need.shapes,
        waiting=need.waiting,
    )
