"""Formats the conditions of CapacityRequests: their reasons, and their messages for people (docs/spec/operator.md §5).

The message of a row's verdict names the need, because all requests of a need share its verdict.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from bigfleet.model.frames import NeedStatus, UnmetReason
from bigfleet.operator.demand.too_large import Largest, largest_named

ACCEPTED: Final = "Accepted"
SATISFIED: Final = "Satisfied"
SHORTFALL: Final = "Shortfall"
TRUE: Final = "True"
FALSE: Final = "False"
UNKNOWN: Final = "Unknown"

NOT_FOR_WANT_OF_CAPACITY: Final = "NotForWantOfCapacity"
REQUEST_TOO_LARGE: Final = "RequestTooLarge"
PARKED: Final = "Parked"

#: Of Shortfall; a reason that this version does not know is shown as `Unmet`.
SHORTFALL_REASONS: Final[Mapping[UnmetReason, str]] = {
    UnmetReason.UNSPECIFIED: "Unmet",
    UnmetReason.PRIORITY_STARVED: "PriorityStarved",
    UnmetReason.NO_MATCHING_SUPPLY: "NoMatchingSupply",
    UnmetReason.TOPOLOGY_UNSATISFIABLE: "TopologyUnsatisfiable",
    UnmetReason.PREEMPTION_EXHAUSTED: "PreemptionExhausted",
    UnmetReason.BOOTSTRAP_REFUSED: "BootstrapRefused",
    UnmetReason.BOOTSTRAP_FAILED: "BootstrapFailed",
    UnmetReason.STOCKOUT: "Stockout",
    UnmetReason.REQUEST_TOO_LARGE: REQUEST_TOO_LARGE,
    UnmetReason.CLUSTER_LIMIT: "ClusterLimit",
}
#: The schema takes 32,768 and Events 1,024.
_MESSAGE_CHARACTERS_MAX: Final = 1_000
#: Ages are said in these steps, so that a message does not change by the minute for thousands of requests.
_AGE_MINUTES: Final = (1, 2, 5, 10, 20, 30)
_AGE_HOURS: Final = (1, 2, 4, 8, 12)


class ConditionValue(NamedTuple):
    """The content of one condition, without times and generation."""

    status: str
    reason: str
    message: str


class RowVerdict(NamedTuple):
    """What the shard's last verdict makes of the requests of one row."""

    satisfied: ConditionValue
    shortfall: ConditionValue
    #: With RequestTooLarge: the largest amount of a resource that a machine has, milli-units. Requests below all of
    #: them are not concerned. Empty when all requests of the row are.
    largest: Largest = ()

    @property
    def kind(self) -> tuple[str, str, str, str, Largest]:
        """Everything but the messages."""
        return (*self.satisfied[:2], *self.shortfall[:2], self.largest)


IN_ROLLUP: Final = ConditionValue(TRUE, "InRollup", "the shard has put a roll-up with this request into force")
HELD: Final = ConditionValue(
    UNKNOWN,
    "Held",
    "the shard holds the cluster's roll-up back, because it asks for far less than the one before; until it is released"
    " or repeated often enough, the former demand stays in force",
)
NOT_REPORTED: Final = ConditionValue(
    UNKNOWN,
    "NotReported",
    "the operator has had no session with its shard for over 60 s; the shard keeps the demand that it was sent last",
)
_NO_SHORTFALL: Final = ConditionValue(FALSE, "None", "")
MET: Final = RowVerdict(
    ConditionValue(TRUE, "Covered", "the need of this request is met in the shard's last cycle"), _NO_SHORTFALL
)
COMING: Final = RowVerdict(
    ConditionValue(
        TRUE, "Coming", "the need of this request is met by machines of which some are still created or configured"
    ),
    _NO_SHORTFALL,
)


def not_evaluated(why: str) -> RowVerdict:
    """Return the verdict of a request that was not judged."""
    value = ConditionValue(UNKNOWN, "NotEvaluated", why)
    return RowVerdict(value, value)


NOT_JUDGED_YET: Final = not_evaluated("the shard has not judged a roll-up with this request yet")
NO_VERDICTS: Final = not_evaluated("the shard does not report verdicts on needs")
TRUNCATED: Final = not_evaluated("so many needs are unmet that the shard did not report on this one")
NOT_COUNTED: Final = not_evaluated("the request is not part of the cluster's demand; see the condition Accepted")


def rejected(error: str) -> ConditionValue:
    """Return Accepted of a request that is in a roll-up that the shard refused."""
    return ConditionValue(FALSE, "RollupRejected", _cut(f"the shard refused the cluster's roll-up: {error}"))


def invalid(reason: str, message: str) -> ConditionValue:
    """Return Accepted of a request that cannot be counted."""
    return ConditionValue(FALSE, reason, _cut(message))


def waiting(reasons: str) -> RowVerdict:
    """Return the verdict of a pod that is asked for once more although its need is met."""
    text = (
        "the need of this request is met, but the scheduler finds no place for its pod, so that it is asked for once"
        f" more; the scheduler says: {reasons}"
    )
    return RowVerdict(ConditionValue(FALSE, "Waiting", _cut(text)), _NO_SHORTFALL)


def not_for_want_of_capacity(reasons: str) -> RowVerdict:
    """Return the verdict of a pod that no machine helps as far as is known."""
    text = (
        "no machine helps this pod: one that came for it has been Ready for 5 min, or it waits for something else;"
        " nothing is requested for it until its spec changes or what it waits for is there, and it is tried again after"
        f" some hours; it waits for: {reasons}"
    )
    return RowVerdict(ConditionValue(FALSE, NOT_FOR_WANT_OF_CAPACITY, _cut(text)), _NO_SHORTFALL)


def unmet(row: NeedStatus, *, requests: int, age_seconds: float) -> RowVerdict:
    """Return the verdict of the requests of a row that is short."""
    reason = PARKED if row.parked else SHORTFALL_REASONS[row.reason]
    lacking = ", ".join(f"{name} {quantity}" for name, quantity in sorted(row.residual.items()))
    share = "1 request has this need" if requests == 1 else f"{requests:,} requests share this need"
    text = f"{share}; short of {lacking}{age_text(age_seconds)}"
    message = _cut(f"{text}: {row.message}" if row.message else text)
    largest = largest_named(row.message) if row.reason is UnmetReason.REQUEST_TOO_LARGE and not row.parked else ()
    return RowVerdict(ConditionValue(FALSE, "Unmet", message), ConditionValue(TRUE, reason, message), largest)


def age_text(age_seconds: float) -> str:
    """Return ` for 5 min` in coarse steps, "" below a minute."""
    minutes = int(age_seconds // 60)
    if minutes < 1:
        return ""
    if minutes < 60:
        return f" for {max(step for step in _AGE_MINUTES if step <= minutes)} min"
    hours = minutes // 60
    if hours < 24:
        return f" for {max(step for step in _AGE_HOURS if step <= hours)} h"
    return f" for {hours // 24} d"


def _cut(text: str) -> str:
    return text if len(text) <= _MESSAGE_CHARACTERS_MAX else text[: _MESSAGE_CHARACTERS_MAX - 1] + "…"
