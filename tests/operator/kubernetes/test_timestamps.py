"""Moments as Kubernetes writes them, and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.operator.kubernetes.timestamps import rfc3339, rfc3339_micro, rfc3339_milli, unix_seconds

SECOND = 1_000_000_000


@given(st.integers(min_value=0, max_value=4_000_000_000))
def test_a_moment_is_read_back_as_it_was_written(seconds: int) -> None:
    assert unix_seconds(rfc3339(seconds * SECOND)) == seconds


def test_what_a_format_does_not_show_is_cut_off() -> None:
    moment = 1_767_225_599 * SECOND + 999_999_999

    assert rfc3339(moment) == "2025-12-31T23:59:59Z"
    assert rfc3339_milli(moment) == "2025-12-31T23:59:59.999Z"
    assert rfc3339_micro(moment) == "2025-12-31T23:59:59.999999Z"


@pytest.mark.parametrize("text", [None, "", "tomorrow", "2026-01-01", "2026-01-01T00:00:00", "5"])
def test_what_is_no_moment_is_none(text: str | None) -> None:
    assert unix_seconds(text) is None
