"""Defines a machine of the fake kubelet, and writes the Node, Lease and pod statuses that it reports.

Pods are controlled by annotations (`RUN_SECONDS`, `TERMINATION_SECONDS`). This module does no I/O.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from bigfleet.operator.kubernetes.api import Json, JsonObject
from bigfleet.operator.kubernetes.objects import NodeTaint, PodObject
from bigfleet.operator.kubernetes.timestamps import rfc3339, rfc3339_micro

#: On a pod: it succeeds after it has run for so many seconds; without it, it runs until it is deleted.
RUN_SECONDS: Final = "demo.bigfleet.lucy.sh/run-seconds"
#: On a pod: how long it takes to end once it is being deleted, in seconds, or `never`.
TERMINATION_SECONDS: Final = "demo.bigfleet.lucy.sh/termination-seconds"
NEVER: Final = "never"
NODE_LEASE_NAMESPACE: Final = "kube-node-lease"
_LEASE_SECONDS: Final = 40
_PODS_MAX: Final = "110"


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeNode:
    """One machine: how it joins, and what its Node says of it."""

    name: str
    #: Capacity and allocatable, such as `{"cpu": "4", "memory": "16Gi"}`; `pods` is 110 unless it is named.
    resources: Mapping[str, str]
    #: `kubernetes.io/hostname`, `os` and `arch` are added.
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[NodeTaint, ...] = ()
    #: Also one that fits no machine.
    provider_id: str = ""
    #: How long after `FakeKubelet.add_node` the Node appears; None: the machine never joins.
    joins_after_seconds: float | None = 0.0
    #: How long after that it is Ready; None: it never is.
    ready_after_seconds: float | None = 0.0


def node_body(node: FakeNode, *, ready: bool, unix_nanos: int) -> JsonObject:
    """Return the Node of a machine, with its status."""
    resources: dict[str, Json] = {"pods": _PODS_MAX, **node.resources}
    labels = {
        "kubernetes.io/hostname": node.name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
        **node.labels,
    }
    taints: list[Json] = [{"key": each.key, "value": each.value, "effect": each.effect} for each in node.taints]
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": node.name, "labels": labels, "annotations": dict(node.annotations)},
        "spec": {"providerID": node.provider_id, "taints": taints} if node.provider_id else {"taints": taints},
        "status": {
            "capacity": resources,
            "allocatable": resources,
            "conditions": node_conditions(ready=ready, unix_nanos=unix_nanos),
            "nodeInfo": dict.fromkeys(_NODE_INFO, "fake"),
        },
    }


_NODE_INFO: Final = (
    "architecture",
    "bootID",
    "containerRuntimeVersion",
    "kernelVersion",
    "kubeProxyVersion",
    "kubeletVersion",
    "machineID",
    "operatingSystem",
    "osImage",
    "systemUUID",
)


def node_conditions(*, ready: bool, unix_nanos: int) -> list[Json]:
    """Return the conditions of a Node whose kubelet works."""
    now = rfc3339(unix_nanos)
    reason = "KubeletReady" if ready else "KubeletNotReady"
    conditions: list[Json] = [
        {
            "type": "Ready",
            "status": "True" if ready else "False",
            "reason": reason,
            "message": "a fake kubelet reports this",
            "lastHeartbeatTime": now,
            "lastTransitionTime": now,
        }
    ]
    for pressure in ("MemoryPressure", "DiskPressure", "PIDPressure"):
        conditions.append({"type": pressure, "status": "False", "lastHeartbeatTime": now, "lastTransitionTime": now})
    return conditions


def lease_body(name: str, *, unix_nanos: int) -> JsonObject:
    """Return the Lease that shows that a node is alive."""
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": name, "namespace": NODE_LEASE_NAMESPACE},
        "spec": {
            "holderIdentity": name,
            "leaseDurationSeconds": _LEASE_SECONDS,
            "renewTime": rfc3339_micro(unix_nanos),
        },
    }


def running_status(pod: PodObject, *, unix_nanos: int) -> JsonObject:
    """Return a patch of the status: all containers run and are ready."""
    now = rfc3339(unix_nanos)
    return {
        "metadata": _same_pod(pod),
        "status": {
            "phase": "Running",
            "startTime": now,
            "conditions": [
                {"type": kind, "status": "True", "lastTransitionTime": now}
                for kind in ("Initialized", "Ready", "ContainersReady", "PodReadyToStartContainers")
            ],
            "containerStatuses": [
                _container_status(each.name, {"running": {"startedAt": now}}, ready=True)
                for each in pod.spec.containers
            ],
        },
    }


def succeeded_status(pod: PodObject, *, unix_nanos: int) -> JsonObject:
    """Return a patch of the status: all containers have ended with exit code 0."""
    now = rfc3339(unix_nanos)
    ended: JsonObject = {"terminated": {"exitCode": 0, "reason": "Completed", "startedAt": now, "finishedAt": now}}
    return {
        "metadata": _same_pod(pod),
        "status": {
            "phase": "Succeeded",
            "conditions": [
                {"type": kind, "status": "False", "reason": "PodCompleted", "lastTransitionTime": now}
                for kind in ("Ready", "ContainersReady")
            ],
            "containerStatuses": [_container_status(each.name, ended, ready=False) for each in pod.spec.containers],
        },
    }


def _same_pod(pod: PodObject) -> JsonObject:
    """Return metadata with which a patch is a conflict if another pod has got the name."""
    return {"uid": pod.metadata.uid}


def _container_status(name: str, state: JsonObject, *, ready: bool) -> JsonObject:
    return {
        "name": name,
        "ready": ready,
        "started": ready,
        "restartCount": 0,
        "image": "",
        "imageID": "",
        "state": state,
    }


def run_seconds(pod: PodObject) -> float | None:
    """Return how long a pod runs before it succeeds; None when it says nothing valid: it runs until it is deleted."""
    return _seconds(pod, RUN_SECONDS)


def termination_seconds(pod: PodObject, seconds_max: float) -> float | None:
    """Return how long a pod takes to end once it is being deleted; None when it never does.

    Without an annotation: its grace period, at most `seconds_max`.
    """
    if (pod.metadata.annotations or {}).get(TERMINATION_SECONDS) == NEVER:
        return None
    annotated = _seconds(pod, TERMINATION_SECONDS)
    if annotated is not None:
        return annotated
    grace = pod.spec.termination_grace_period_seconds
    return seconds_max if grace is None else min(float(grace), seconds_max)


def _seconds(pod: PodObject, key: str) -> float | None:
    try:
        seconds = float((pod.metadata.annotations or {})[key])
    except (KeyError, ValueError):
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None
