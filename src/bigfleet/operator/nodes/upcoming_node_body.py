"""Renders what an UpcomingNode holds for one machine, and compares it with what is stored (docs/spec/operator.md §2.2).

Bodies are those of server-side apply: a field that is absent from a body is removed if it was ours. Resources that are
no quantities are left out.
"""

from dataclasses import dataclass
from typing import Any, Final

from bigfleet.model.frames import DrainOutcome, DrainResult, NodeStateUpdate
from bigfleet.model.quantity import QuantityError, parse_quantity
from bigfleet.model.states import MachineState
from bigfleet.operator.kubernetes.objects import Condition, NodeObject, UpcomingNode
from bigfleet.operator.kubernetes.resources import FIELD_MANAGER, MACHINE_ID, MANAGED_BY, UPCOMING_NODES
from bigfleet.operator.kubernetes.timestamps import rfc3339
from bigfleet.operator.nodes.names import machine_label

DRAINED_PHASE: Final = "Drained"
#: Phase by machine state; Idle and the states in which the machine goes have rules of their own.
PHASES: Final = {
    MachineState.CREATING: "Provisioning",
    MachineState.CONFIGURING: "Registered",
    MachineState.CONFIGURED: "Ready",
    MachineState.DRAINING: "Draining",
    MachineState.FAILED: "Failed",
}
NODE_JOINED: Final = "NodeJoined"
DRAINED: Final = "Drained"
#: Reason of condition Drained.
_REASONS: Final = {
    DrainOutcome.DRAINED: "Drained",
    DrainOutcome.GRACE_EXPIRED: "GraceExpired",
    DrainOutcome.NODE_NOT_FOUND: "NodeNotFound",
    DrainOutcome.FAILED: "Failed",
    DrainOutcome.WOULD_NOT_FIT: "WouldNotFit",
}


@dataclass(frozen=True, slots=True)
class NodeView:
    """What the cluster sees of a machine's Node."""

    node: NodeObject | None
    #: The Nodes that all fit the machine.
    ambiguous: tuple[str, ...] = ()


def spec_body(name: str, frame: NodeStateUpdate) -> dict[str, Any]:
    """Return the body that applies the spec."""
    return {
        **_head(),
        "metadata": {
            "name": name,
            "labels": {MANAGED_BY: FIELD_MANAGER, MACHINE_ID: machine_label(frame.machine_id)},
            "annotations": {MACHINE_ID: frame.machine_id},
        },
        "spec": {
            "machineID": frame.machine_id,
            "resources": {name: text for name, text in sorted(frame.resources.items()) if _is_quantity(text)},
            "labels": {**frame.labels, MACHINE_ID: machine_label(frame.machine_id)},
            "taints": [
                {"key": taint.key, **({"value": taint.value} if taint.value else {}), "effect": taint.effect}
                for taint in frame.taints
                if taint.key and taint.effect
            ],
        },
    }


def status_body(
    name: str,
    frame: NodeStateUpdate,
    phase: str,
    *,
    stored: UpcomingNode,
    view: NodeView,
    result: DrainResult | None,
    now_nanos: int,
) -> dict[str, Any]:
    """Return the body that applies the status; moments that are stored already stay as they are."""
    known = stored.status
    status: dict[str, Any] = {
        "phase": phase,
        "provisioningStartTime": known.provisioning_start_time or rfc3339(now_nanos),
    }
    if frame.provider_id:
        status["providerID"] = frame.provider_id
    if view.node is not None:
        metadata = view.node.metadata
        status["nodeRef"] = {"apiVersion": "v1", "kind": "Node", "name": metadata.name, "uid": metadata.uid}
    last_error = _last_error(frame, result)
    if last_error:
        status["lastError"] = last_error
    conditions = [_node_joined(frame, view)]
    drained = _drained(frame, phase, result)
    if drained is not None:
        conditions.append(drained)
    before = {condition.type: condition for condition in known.conditions or ()}
    for condition in conditions:
        condition["lastTransitionTime"] = _transition(condition, before.get(condition["type"]), now_nanos)
    status["conditions"] = conditions
    return {**_head(), "metadata": {"name": name}, "status": status}


def is_same_spec(stored: UpcomingNode, body: dict[str, Any]) -> bool:
    """Return whether the stored object has the labels, the annotation and the spec of the body."""
    metadata, spec = body["metadata"], body["spec"]
    have = stored.spec
    return (
        _has(stored.metadata.labels, metadata["labels"])
        and _has(stored.metadata.annotations, metadata["annotations"])
        and have.machine_id == spec["machineID"]
        and (have.labels or {}) == spec["labels"]
        and _numbers(have.resources) == _numbers(spec["resources"])
        and [(t.key, t.value, t.effect) for t in have.taints or ()]
        == [(t["key"], t.get("value", ""), t["effect"]) for t in spec["taints"]]
    )


def is_same_status(stored: UpcomingNode, body: dict[str, Any]) -> bool:
    """Return whether the stored status has what the body says of it."""
    have, want = stored.status, body["status"]
    reference = have.node_ref
    node_ref = want.get("nodeRef", {"name": "", "uid": ""})
    return (
        have.phase == want["phase"]
        and have.provider_id == want.get("providerID", "")
        and have.provisioning_start_time == want["provisioningStartTime"]
        and (have.last_error or "") == want.get("lastError", "")
        and ((reference.name, reference.uid) if reference is not None else ("", ""))
        == (node_ref["name"], node_ref["uid"])
        and {(c.type, c.status, c.reason, c.message) for c in have.conditions or ()}
        == {(c["type"], c["status"], c["reason"], c["message"]) for c in want["conditions"]}
    )


def _head() -> dict[str, Any]:
    return {"apiVersion": UPCOMING_NODES.api_version, "kind": UPCOMING_NODES.kind}


def _last_error(frame: NodeStateUpdate, result: DrainResult | None) -> str:
    if frame.state is MachineState.FAILED:
        return frame.last_error or "the machine has failed; the provider gave no reason"
    if result is not None and result.outcome is not DrainOutcome.DRAINED and frame.state is MachineState.DRAINING:
        return f"drain: {result.message or result.outcome.name}"
    return ""


def _node_joined(frame: NodeStateUpdate, view: NodeView) -> dict[str, str]:
    if view.ambiguous:
        message = f"several Nodes fit machine {frame.machine_id}: {', '.join(view.ambiguous)}"
        return _condition(NODE_JOINED, "False", "Ambiguous", message)
    if view.node is None:
        return _condition(NODE_JOINED, "False", "NoNode", f"no Node fits machine {frame.machine_id}")
    name = view.node.metadata.name
    if not view.node.is_ready:
        return _condition(NODE_JOINED, "False", "NodeNotReady", f"Node {name} is not Ready")
    return _condition(NODE_JOINED, "True", "NodeReady", f"Node {name} is Ready")


def _drained(frame: NodeStateUpdate, phase: str, result: DrainResult | None) -> dict[str, str] | None:
    if result is not None:
        done = result.outcome is DrainOutcome.DRAINED
        reason = _REASONS.get(result.outcome, "Failed")
        return _condition(DRAINED, "True" if done else "False", reason, result.message or result.outcome.name)
    if phase == DRAINED_PHASE:
        return _condition(DRAINED, "True", "MachineIdle", "the machine serves this cluster no more")
    if frame.state is MachineState.DRAINING:
        return _condition(DRAINED, "False", "Draining", "pods are being evicted")
    return None


def _condition(type_: str, status: str, reason: str, message: str) -> dict[str, str]:
    return {"type": type_, "status": status, "reason": reason, "message": message}


def _transition(condition: dict[str, str], before: Condition | None, now_nanos: int) -> str:
    if before is not None and before.status == condition["status"] and before.last_transition_time:
        return before.last_transition_time
    return rfc3339(now_nanos)


def _has(stored: dict[str, str] | None, wanted: dict[str, str]) -> bool:
    return stored is not None and all(stored.get(key) == value for key, value in wanted.items())


def _numbers(resources: Any) -> dict[str, int]:
    """Return quantities as numbers: a server may write an equal one in another way."""
    return {
        name: parse_quantity(str(quantity))
        for name, quantity in (resources or {}).items()
        if _is_quantity(str(quantity))
    }


def _is_quantity(text: str) -> bool:
    try:
        return parse_quantity(text) >= 0
    except QuantityError:
        return False
