"""Objects of a cluster, and a view of them that is changed by hand, for tests of the demand side."""

from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from bigfleet.model.frames import NeedStatus, NeedStatusUpdate, UnmetReason
from bigfleet.operator.kubernetes.objects import (
    CapacityRequestObject,
    CapacityRequestSpec,
    DaemonSet,
    KubernetesObject,
    NodeObject,
    PodObject,
)
from bigfleet.operator.kubernetes.resources import MACHINE_ID, OWNED_BY_POD
from bigfleet.operator.kubernetes.views import ObjectListener

K = TypeVar("K", bound=KubernetesObject)


class HandView(Generic[K]):
    """An ObjectView that tests change, with listeners that hear it."""

    def __init__(self, *listeners: ObjectListener[K]) -> None:
        self.objects: dict[tuple[str, str], K] = {}
        self.listeners = list(listeners)
        self.is_synced = True
        self.failing = 0.0

    def put(self, stored: K) -> K:
        key = stored.metadata.key
        former = self.objects.get(key)
        if former is not None and former.metadata.uid != stored.metadata.uid:
            self.remove(former)
            former = None
        self.objects[key] = stored
        for listener in self.listeners:
            listener.put(stored, former)
        return stored

    def remove(self, stored: K) -> None:
        former = self.objects.pop(stored.metadata.key)
        for listener in self.listeners:
            listener.remove(former)

    def failing_seconds(self) -> float:
        return self.failing

    def get(self, name: str, namespace: str = "") -> K | None:
        return self.objects.get((namespace, name))

    def __iter__(self) -> Iterator[K]:
        return iter(list(self.objects.values()))

    def __len__(self) -> int:
        return len(self.objects)


def request(
    name: str = "a",
    *,
    namespace: str = "ns",
    uid: str = "",
    generation: int = 1,
    pod_uid: str = "",
    status: Mapping[str, Any] | None = None,
    deleting: bool = False,
    resource_version: str = "1",
    **spec: Any,
) -> CapacityRequestObject:
    """Return a stored CapacityRequest; keywords are fields of its spec as they are written in JSON."""
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": namespace,
        "uid": uid or f"uid-of-{name}",
        "generation": generation,
        "resourceVersion": resource_version,
    }
    if pod_uid:
        metadata["labels"] = {OWNED_BY_POD: pod_uid}
    if deleting:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    fields = {"priority": 0, "resources": {"cpu": "1"}} | spec
    return msgspec.convert({"metadata": metadata, "spec": fields, "status": status or {}}, CapacityRequestObject)


def spec_of(**spec: Any) -> CapacityRequestSpec:
    """Return the spec of a CapacityRequest."""
    return request(**spec).spec


NO_CPU = (
    "0/3 nodes are available: 3 Insufficient cpu. preemption: 0/3 nodes are available: 3 No preemption victims found."
)


def pod(
    name: str = "a",
    *,
    namespace: str = "ns",
    uid: str = "",
    message: str | None = NO_CPU,
    reason: str = "Unschedulable",
    node: str = "",
    owner: str = "",
    deleting: bool = False,
    **spec: Any,
) -> PodObject:
    """Return a pod of which the scheduler says `message`; None says nothing."""
    metadata: dict[str, Any] = {"name": name, "namespace": namespace, "uid": uid or f"pod-{name}"}
    if deleting:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    if owner:
        metadata["ownerReferences"] = [
            {"apiVersion": "apps/v1", "kind": owner, "name": "o", "uid": "o", "controller": True}
        ]
    conditions = []
    if message is not None:
        conditions.append({"type": "PodScheduled", "status": "False", "reason": reason, "message": message})
    fields = {"nodeName": node, "containers": [{"name": "c", "resources": {"requests": {"cpu": "1"}}}]} | spec
    status = {"phase": "Pending", "conditions": conditions}
    return msgspec.convert({"metadata": metadata, "spec": fields, "status": status}, PodObject)


def node(
    name: str = "n",
    *,
    ready: bool = True,
    machine: bool = True,
    labels: Mapping[str, str] | None = None,
    allocatable: Mapping[str, str] | None = None,
    capacity: Mapping[str, str] | None = None,
    **spec: Any,
) -> NodeObject:
    """Return the node of a machine."""
    all_labels = dict(labels or {}) | ({MACHINE_ID: name} if machine else {})
    allocatable = allocatable or {"cpu": "4", "pods": "10"}
    status = {
        "allocatable": allocatable,
        "capacity": capacity or allocatable,
        "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
    }
    return msgspec.convert(
        {"metadata": {"name": name, "labels": all_labels}, "spec": spec, "status": status}, NodeObject
    )


def daemon_set(name: str = "d", *, cpu: str = "100m", **pod_spec: Any) -> DaemonSet:
    """Return a DaemonSet of one container; keywords are fields of the pod's spec."""
    spec = {"containers": [{"name": "c", "resources": {"requests": {"cpu": cpu}}}]} | pod_spec
    metadata = {"name": name, "namespace": "kube-system", "uid": f"ds-{name}"}
    return msgspec.convert({"metadata": metadata, "spec": {"template": {"spec": spec}}}, DaemonSet)


def need_status(
    *unmet: tuple[str, str],
    stamp: int = 10**30,
    coming: tuple[tuple[str, str], ...] = (),
    truncated: bool = False,
    reason: UnmetReason = UnmetReason.PRIORITY_STARVED,
    message: str = "matching machines are held",
    residual: Mapping[str, str] | None = None,
) -> NeedStatusUpdate:
    """Return a verdict that lists these (fingerprint, group) as unmet, all for one reason."""
    rows = tuple(
        NeedStatus(fingerprint=row[0], group=row[1], residual=residual or {"cpu": "1"}, reason=reason, message=message)
        for row in unmet
    )
    return NeedStatusUpdate(
        cycle=1,
        computed_at_unix_nanos=1,
        rows=rows,
        rollup_timestamp_unix_nanos=stamp,
        truncated=truncated,
        coming=coming,
    )


class HandClock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def monotonic_seconds(self) -> float:
        return self.seconds

    def unix_nanos(self) -> int:
        return int(self.seconds * 1e9)

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing here waits")
