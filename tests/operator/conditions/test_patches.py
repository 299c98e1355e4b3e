"""What a patch of a status holds: what differs, and nothing else."""

from typing import Any

from bigfleet.operator.conditions import wording
from bigfleet.operator.conditions.patches import ConditionChange, StatusChange, status_change
from bigfleet.operator.conditions.verdicts import DesiredStatus
from bigfleet.operator.conditions.wording import ConditionValue, RowVerdict
from tests.operator.demand.objects import request

NOW = "2026-01-02T00:00:00Z"
THEN = "2026-01-01T00:00:00Z"


def desired(
    *,
    acknowledged: bool = True,
    accepted: ConditionValue | None = wording.IN_ROLLUP,
    verdict: RowVerdict | None = wording.MET,
    passing: bool = False,
    generation: int = 1,
) -> DesiredStatus:
    satisfied, shortfall = (verdict.satisfied, verdict.shortfall) if verdict is not None else (None, None)
    return DesiredStatus(generation, acknowledged, accepted, satisfied, shortfall, passing)


def condition(type_: str, value: ConditionValue, *, generation: int = 1) -> dict[str, Any]:
    return {
        "type": type_,
        "status": value.status,
        "reason": value.reason,
        "message": value.message,
        "observedGeneration": generation,
        "lastTransitionTime": THEN,
    }


def met(**status: Any) -> dict[str, Any]:
    """Return the status of an acknowledged request whose need is met."""
    conditions = [
        condition("Accepted", wording.IN_ROLLUP),
        condition("Satisfied", wording.MET.satisfied),
        condition("Shortfall", wording.MET.shortfall),
    ]
    return {
        "phase": "Acknowledged",
        "acknowledgedAt": THEN,
        "observedGeneration": 1,
        "conditions": conditions,
    } | status


def body_of(change: StatusChange | None) -> dict[str, Any]:
    assert change is not None
    return change.body  # type: ignore[return-value]


def test_the_first_write_holds_phase_and_conditions() -> None:
    change = status_change(request(status={"phase": "Pending"}, resource_version="7"), desired(), NOW)

    body = body_of(change)
    assert body["metadata"] == {"resourceVersion": "7"}
    assert {name: body["status"][name] for name in ("phase", "acknowledgedAt", "observedGeneration")} == {
        "phase": "Acknowledged",
        "acknowledgedAt": NOW,
        "observedGeneration": 1,
    }
    assert [(each["type"], each["lastTransitionTime"]) for each in body["status"]["conditions"]] == [
        ("Accepted", NOW),
        ("Satisfied", NOW),
        ("Shortfall", NOW),
    ]


def test_a_status_that_says_it_all_is_not_written() -> None:
    assert status_change(request(status=met()), desired(), NOW) is None


def test_a_restarted_operator_takes_no_phase_back() -> None:
    """It knows of no ack yet, and the stored one is of this generation."""
    assert status_change(request(status=met()), desired(acknowledged=False, accepted=None), NOW) is None


def test_a_new_generation_is_pending_until_it_is_acknowledged() -> None:
    stored = request(status=met(), generation=2)
    body = body_of(status_change(stored, desired(acknowledged=False, accepted=None, verdict=None, generation=2), NOW))

    assert body["status"] == {"phase": "Pending", "acknowledgedAt": None, "observedGeneration": 2}


def test_a_phase_of_an_unknown_generation_is_left_alone_until_the_next_ack() -> None:
    """Requests that were written before observedGeneration existed."""
    stored = request(status={"phase": "Acknowledged"})

    assert status_change(stored, desired(acknowledged=False, accepted=None, verdict=None), NOW) is None
    assert body_of(status_change(stored, desired(verdict=None), NOW))["status"]["observedGeneration"] == 1


def test_the_transition_time_changes_with_the_status_alone() -> None:
    row = RowVerdict(
        ConditionValue("False", "Unmet", "short"), ConditionValue("False", "None", "now with some other message")
    )
    change = status_change(request(status=met()), desired(verdict=row), NOW)

    body = body_of(change)
    assert "phase" not in body["status"]
    assert [(c["type"], c["status"], c["lastTransitionTime"]) for c in body["status"]["conditions"]] == [
        ("Accepted", "True", THEN),
        ("Satisfied", "False", NOW),
        ("Shortfall", "False", THEN),
    ]
    assert change is not None
    assert [each.type for each in change.conditions] == ["Satisfied", "Shortfall"]
    assert change.conditions[0] == ConditionChange("Satisfied", "True", "Covered", row.satisfied)


def test_conditions_of_other_writers_stay() -> None:
    foreign = condition("Audited", ConditionValue("True", "Yes", "by somebody else"))
    stored = request(status=met(conditions=[foreign]))

    body = body_of(status_change(stored, desired(verdict=None), NOW))

    assert body["status"]["conditions"][0] == foreign
    assert [each["type"] for each in body["status"]["conditions"]] == ["Audited", "Accepted"]


def test_what_passes_by_itself_is_written_only_beside_something_else() -> None:
    passing = desired(verdict=wording.NOT_JUDGED_YET, passing=True)
    conditions = [condition("Accepted", wording.IN_ROLLUP)]

    assert status_change(request(status=met(conditions=conditions)), passing, NOW) is None
    body = body_of(status_change(request(), passing, NOW))
    assert [each["reason"] for each in body["status"]["conditions"]] == ["InRollup", "NotEvaluated", "NotEvaluated"]


def test_a_condition_of_a_former_generation_is_written_again() -> None:
    stored = request(status=met(observedGeneration=2), generation=2)
    body = body_of(status_change(stored, desired(generation=2), NOW))

    assert {each["observedGeneration"] for each in body["status"]["conditions"]} == {2}
    assert {each["lastTransitionTime"] for each in body["status"]["conditions"]} == {THEN}
