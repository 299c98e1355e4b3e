"""Records which pods of a simulated cluster lost their node, and why."""

from enum import Enum
from typing import Final, NamedTuple

from bigfleet.operator.drains import DrainRecord

#: Reasons of an instruction for which somebody of a higher priority takes the machine.
_PREEMPTIONS: Final = ("preempt", "cross_shard_preempt")


class Cause(Enum):
    """Why pods lost their node."""

    #: A voluntary reclaim, after the preflight found room for all of them.
    RECLAIMED = "reclaimed"
    #: Somebody of a higher priority takes the machine.
    PREEMPTED = "preempted"
    #: The shard takes a machine for one that never joined.
    UNJOINED = "unjoined"
    #: The provider drained the node without an answer of the operator.
    UNANSWERED = "unanswered"
    #: The host is gone or broken.
    LOST = "lost"


class Eviction(NamedTuple):
    """Pods that lost their node at one moment."""

    at_seconds: float
    cluster: str
    machine_id: str
    cause: Cause
    #: How many pods lost it.
    pods: int
    #: By how many more pods wait since then, once the scheduler has placed what it could.
    left_waiting: int
    #: How many of the pods had no room on the other nodes, first fit, largest first; the scheduler's own order may
    #: leave over one that had.
    without_room: int


def is_voluntary(drain: DrainRecord) -> bool:
    """Return whether an instruction is a voluntary reclaim, before which the operator checks that the pods fit."""
    return not drain.preemptor_priority and drain.reason not in (*_PREEMPTIONS, "unjoined")


def cause_of(drain: DrainRecord) -> Cause:
    """Return why the pods of a drained node lose it."""
    if is_voluntary(drain):
        return Cause.RECLAIMED
    return Cause.UNJOINED if drain.reason == "unjoined" else Cause.PREEMPTED
