"""Computes the pauses between attempts: they double up to a bound, and jitter keeps clients from retrying in step."""

from bigfleet.model.ids import Rng
from bigfleet.operator.kubernetes.api import ApiError

#: 2**16 is past every bound; a larger exponent would only make a larger integer.
_DOUBLINGS_MAX = 16


def doubled_seconds(attempt: int, *, first_seconds: float, seconds_max: float) -> float:
    """Return the longest pause after attempt 0, 1, …: `first_seconds`, doubling up to `seconds_max`."""
    return min(seconds_max, first_seconds * float(2 ** min(attempt, _DOUBLINGS_MAX)))


def retry_delay_seconds(
    attempt: int, error: ApiError | None, rng: Rng, *, first_seconds: float, seconds_max: float
) -> float:
    """Return the pause after attempt 0, 1, …: doubling, with jitter over its upper half, and what the server asks for.

    Never more than `seconds_max`.
    """
    ceiling_seconds = doubled_seconds(attempt, first_seconds=first_seconds, seconds_max=seconds_max)
    asked_seconds = (error.retry_after_seconds or 0.0) if error is not None else 0.0
    return max(rng.uniform(0.5, 1.0) * ceiling_seconds, min(asked_seconds, seconds_max))
