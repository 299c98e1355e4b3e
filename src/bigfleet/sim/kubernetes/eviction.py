"""Decides whether a pod may be evicted under the PodDisruptionBudgets of its namespace.

The budget is computed from the pods as stored, where a real cluster has a controller write it into the status.
"""

import math
from collections.abc import Sequence
from typing import Any

from bigfleet.operator.kubernetes.api import ApiError
from bigfleet.sim.kubernetes.kinds import Stored
from bigfleet.sim.kubernetes.selectors import selector_object_matches

_ENDED = frozenset({"Succeeded", "Failed"})


def as_evicted(pod: Stored, timestamp: str) -> Stored:
    """Return the pod with the condition that an eviction leaves on it."""
    status = pod.get("status", {})
    condition = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "EvictionByEvictionAPI",
        "message": "Eviction API: evicting",
        "lastTransitionTime": timestamp,
    }
    others = [each for each in status.get("conditions") or () if each["type"] != condition["type"]]
    return {**pod, "status": {**status, "conditions": [*others, condition]}}


def eviction_refusal(
    pod: Stored, budgets: Sequence[Stored], pods: Sequence[Stored], wanted: int | None
) -> ApiError | None:
    """Return why a pod may not be evicted now, or None.

    `budgets` and `pods` are those of its namespace; `wanted` is how many pods its controller wants, None without one.
    """
    status = pod.get("status", {})
    if (
        status.get("phase") in _ENDED
        or "deletionTimestamp" in pod["metadata"]
        or not pod.get("spec", {}).get("nodeName")
    ):
        return None
    labels = pod["metadata"].get("labels") or {}
    binding = [budget for budget in budgets if selector_object_matches(budget["spec"].get("selector"), labels)]
    if len(binding) > 1:
        text = "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."
        return ApiError(500, "InternalError", text)
    return _budget_refusal(pod, binding[0], pods, wanted) if binding else None


def _budget_refusal(pod: Stored, budget: Stored, pods: Sequence[Stored], wanted: int | None) -> ApiError | None:
    spec = budget["spec"]
    covered = [
        each
        for each in pods
        if selector_object_matches(spec["selector"], each["metadata"].get("labels") or {})
        and each.get("status", {}).get("phase") not in _ENDED
    ]
    healthy = sum(_is_healthy(each) for each in covered)
    desired = _desired(spec, len(covered) if wanted is None else wanted)
    if not _is_healthy(pod) and "deletionTimestamp" not in pod["metadata"]:
        if spec.get("unhealthyPodEvictionPolicy") == "AlwaysAllow" or (desired > 0 and healthy >= desired):
            return None
    elif healthy > desired:
        return None
    name = budget["metadata"]["name"]
    text = f"The disruption budget {name} needs {desired} healthy pods and has {healthy} currently"
    return ApiError(
        429,
        "TooManyRequests",
        f"Cannot evict pod as it would violate the pod's disruption budget. ({text})",
        causes=("DisruptionBudget",),
    )


def _is_healthy(pod: Stored) -> bool:
    conditions = pod.get("status", {}).get("conditions") or []
    is_ready = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
    return is_ready and "deletionTimestamp" not in pod["metadata"]


def _desired(spec: dict[str, Any], expected: int) -> int:
    if "maxUnavailable" in spec:
        return max(0, expected - _scaled(spec["maxUnavailable"], expected))
    return _scaled(spec.get("minAvailable", 1), expected)


def _scaled(value: int | str, expected: int) -> int:
    """Return a count, or a percentage of the expected pods rounded up."""
    return value if isinstance(value, int) else math.ceil(int(value.removesuffix("%")) * expected / 100)
