"""Defines the result of one cycle, for logs and tests."""

from dataclasses import dataclass

from bigfleet.engine.decision import Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleReport:
    """What one cycle did."""

    cycle: int
    is_timer: bool
    decision: Decision | None
    capped: int = 0
    #: Reclaims of machines that have not been excess for long enough.
    delayed: int = 0
    postponed: int = 0
    enqueued: int = 0
