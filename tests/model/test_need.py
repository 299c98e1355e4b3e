"""Rows of demand and how rows of one kind merge (docs/spec/engine.md §1.8)."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from bigfleet.model import vector
from bigfleet.model.need import Need, merge_rows
from tests.strategies import needs


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
    )
