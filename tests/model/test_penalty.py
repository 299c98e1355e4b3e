"""Penalty buckets: the ladder of docs/spec/model.md §6."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.model.penalty import ORDINALS, PINNED, bucket_for_dollars, bucket_label, bucket_upper_dollars


@given(st.floats(min_value=0.0, max_value=8_388_608.0))
def test_a_bucket_is_the_smallest_that_is_not_below(amount: float) -> None:
    bucket = bucket_for_dollars(amount)

    assert amount <= bucket_upper_dollars(bucket)
    assert bucket == 1 or bucket_upper_dollars(bucket - 1) < amount


@given(st.floats(allow_nan=False), st.floats(allow_nan=False))
def test_more_dollars_never_give_a_lower_bucket(left: float, right: float) -> None:
    low, high = sorted([left, right])

    assert bucket_for_dollars(low) <= bucket_for_dollars(high)


@pytest.mark.parametrize("ordinal", [ordinal for ordinal in ORDINALS if ordinal])
def test_a_buckets_upper_bound_lies_in_the_bucket(ordinal: int) -> None:
    assert bucket_for_dollars(bucket_upper_dollars(ordinal)) == ordinal


def test_the_ends_of_the_ladder() -> None:
    assert bucket_upper_dollars(0) == bucket_upper_dollars(1) == 0.0
    assert bucket_upper_dollars(3) == 1.0
    assert bucket_upper_dollars(26) == 8_388_608.0
    assert bucket_upper_dollars(PINNED) == math.inf
    assert bucket_for_dollars(math.inf) == PINNED
    assert bucket_for_dollars(-math.inf) == 1


def test_not_a_number_is_an_error() -> None:
    with pytest.raises(ValueError, match="NaN"):
        bucket_for_dollars(math.nan)


@pytest.mark.parametrize("ordinal", [-1, 28])
def test_an_ordinal_outside_the_ladder_is_an_error(ordinal: int) -> None:
    with pytest.raises(ValueError, match=str(ordinal)):
        bucket_upper_dollars(ordinal)
    with pytest.raises(ValueError, match=str(ordinal)):
        bucket_label(ordinal)


def test_labels_are_those_of_the_ladder() -> None:
    powers = [str(2**n) for n in range(24)]

    assert [bucket_label(ordinal) for ordinal in ORDINALS] == ["unspecified", "0", "0.5", *powers, "pinned"]
