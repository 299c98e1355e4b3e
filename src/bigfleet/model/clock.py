"""Defines the one Protocol through which flows read a clock or wait.

Decisions take plain numbers. Flows take a `Clock`, so that tests and the simulation run the same lines on virtual time.
This module must not read the real clock; the real one lives in `bigfleet.cli.runtime.system`.
"""

from typing import Protocol

NANOS_PER_SECOND = 1_000_000_000


class Clock(Protocol):
    """What a flow may know of time."""

    def monotonic_seconds(self) -> float:
        """Seconds since an arbitrary start; never goes back. Ages, holds and deadlines are measured on it.

        A thread that works for a flow may ask too.
        """
        ...

    def unix_nanos(self) -> int:
        """Wall clock, nanoseconds since the Unix epoch. It labels records and nothing is decided by it."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds`; zero or less yields to other tasks once."""
        ...
