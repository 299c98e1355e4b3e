"""Computes the merge patch that brings the status of a CapacityRequest to its desired content.

A patch has only what differs. `lastTransitionTime` changes with the status of a condition and with nothing else;
conditions of other writers stay. Every patch names the version of the object that it was computed for, because a status
of one generation must never reach another object under the same name.
"""

from dataclasses import dataclass
from typing import Final

from bigfleet.operator.conditions.verdicts import DesiredStatus
from bigfleet.operator.conditions.wording import ACCEPTED, SATISFIED, SHORTFALL, ConditionValue
from bigfleet.operator.kubernetes.api import Json, JsonObject
from bigfleet.operator.kubernetes.objects import CapacityRequestObject, Condition

PENDING: Final = "Pending"
ACKNOWLEDGED: Final = "Acknowledged"


@dataclass(frozen=True, slots=True)
class ConditionChange:
    """A condition that a patch writes."""

    type: str
    #: "" when the condition is new.
    former_status: str
    former_reason: str
    value: ConditionValue


@dataclass(frozen=True, slots=True)
class StatusChange:
    """What a patch writes."""

    body: JsonObject
    #: "" when the phase stays.
    phase: str
    conditions: tuple[ConditionChange, ...]


def status_change(stored: CapacityRequestObject, desired: DesiredStatus, now: str) -> StatusChange | None:
    """Return what is to be written to the stored object's status, None for nothing. `now` is RFC 3339."""
    phase = _phase(stored, desired)
    known = {condition.type: condition for condition in stored.status.conditions or ()}
    changes = []
    for type_, value in (
        (ACCEPTED, desired.accepted),
        (SATISFIED, desired.satisfied),
        (SHORTFALL, desired.shortfall),
    ):
        condition = known.get(type_)
        if value is not None and not _says(condition, value, desired.generation):
            former = (condition.status, condition.reason) if condition is not None else ("", "")
            changes.append(ConditionChange(type_, *former, value))
    if not phase and (not changes or (desired.is_passing and all(each.type != ACCEPTED for each in changes))):
        return None
    status: dict[str, Json] = {}
    if phase:
        status["phase"] = phase
        status["observedGeneration"] = desired.generation
        status["acknowledgedAt"] = now if phase == ACKNOWLEDGED else None
    if changes:
        status["conditions"] = _conditions(known, changes, desired.generation, now)
    body: JsonObject = {"metadata": {"resourceVersion": stored.metadata.resource_version}, "status": status}
    return StatusChange(body, phase, tuple(changes))


def _phase(stored: CapacityRequestObject, desired: DesiredStatus) -> str:
    """Return the phase to write; "" for none. The phase of an object speaks of its observedGeneration."""
    status = stored.status
    is_of_generation = status.observed_generation == desired.generation
    if desired.is_acknowledged:
        return "" if status.phase == ACKNOWLEDGED and is_of_generation else ACKNOWLEDGED
    if status.phase == ACKNOWLEDGED and status.observed_generation is not None and not is_of_generation:
        return PENDING
    return ""


def _says(condition: Condition | None, value: ConditionValue, generation: int) -> bool:
    return condition is not None and (
        (condition.status, condition.reason, condition.message) == value and condition.observed_generation == generation
    )


def _conditions(known: dict[str, Condition], changes: list[ConditionChange], generation: int, now: str) -> list[Json]:
    """Return all conditions, in the order in which they are stored, new ones last: a merge patch replaces lists."""
    written: dict[str, Json] = {type_: _json(condition) for type_, condition in known.items()}
    for change in changes:
        former = known.get(change.type)
        is_transition = former is None or former.status != change.value.status or not former.last_transition_time
        written[change.type] = {
            "type": change.type,
            "status": change.value.status,
            "reason": change.value.reason,
            "message": change.value.message,
            "observedGeneration": generation,
            "lastTransitionTime": now if is_transition or former is None else former.last_transition_time,
        }
    return list(written.values())


def _json(condition: Condition) -> JsonObject:
    fields: dict[str, Json] = {
        "type": condition.type,
        "status": condition.status,
        "reason": condition.reason,
        "message": condition.message,
        "observedGeneration": condition.observed_generation,
        "lastTransitionTime": condition.last_transition_time,
    }
    return {name: value for name, value in fields.items() if value is not None}
