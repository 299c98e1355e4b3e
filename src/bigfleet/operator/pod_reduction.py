"""Reduces pods to the fields that the operator reads, so that a cluster of many pods fits into little memory.

Equal labels and equal parts of specs of replicas are one object. Code that reads a dropped field sees it as absent, so
a new reader of a field must add its name here.
"""

from typing import Any, Final, TypeVar

import msgspec

from bigfleet.operator.kubernetes.objects import (
    MIRROR_ANNOTATION,
    Condition,
    Container,
    ContainerPort,
    ObjectMeta,
    OwnerReference,
    PodObject,
    PodSpec,
    PodStatus,
)
from bigfleet.operator.kubernetes.resources import DAEMON_SETS
from bigfleet.operator.nodes.disruption import ANNOTATIONS

#: Distinct specs and labels that are remembered; the next ones start a new memory.
_REMEMBERED_MAX: Final = 16_384
#: The conditions that are read: why a pod is unschedulable, and whether a budget counts it as healthy.
_SCHEDULED, _READY = "PodScheduled", "Ready"
_ANNOTATIONS: Final = (MIRROR_ANNOTATION, *ANNOTATIONS)

T = TypeVar("T")


class PodReduction:
    """Called with a pod, returns the pod that is stored in its place."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        #: By type and encoding.
        self._known: dict[tuple[type, bytes], Any] = {}

    def __call__(self, pod: PodObject) -> PodObject:
        """Return the pod with what is read alone; the given one is not changed."""
        metadata = pod.metadata
        spec = self._same(_reduced_spec(pod.spec))
        return PodObject(
            metadata=ObjectMeta(
                name=metadata.name,
                namespace=self._same(metadata.namespace),
                uid=metadata.uid,
                resource_version=metadata.resource_version,
                deletion_timestamp=metadata.deletion_timestamp,
                labels=self._same(metadata.labels) if metadata.labels else None,
                annotations=self._same(_reduced_annotations(pod)),
                owner_references=self._same(_reduced_owners(pod)),
            ),
            spec=msgspec.structs.replace(spec, node_name=self._same(pod.spec.node_name)),
            status=self._same(_reduced_status(pod.status)),
        )

    def _same(self, value: T) -> T:
        """Return the first of all values that are equal to this one."""
        if value is None:
            return value
        key = (type(value), self._encoder.encode(value))
        known: T | None = self._known.get(key)
        if known is None:
            if len(self._known) >= _REMEMBERED_MAX:
                self._known.clear()
            self._known[key] = known = value
        return known


def _reduced_annotations(pod: PodObject) -> dict[str, str] | None:
    found = pod.metadata.annotations or {}
    # The value of a mirror pod differs with each pod and is not read.
    return {n: "" if n == MIRROR_ANNOTATION else found[n] for n in _ANNOTATIONS if n in found} or None


def _reduced_owners(pod: PodObject) -> list[OwnerReference] | None:
    """Return the controllers; their UID is read of DaemonSets only."""
    owners = [
        OwnerReference(kind=each.kind, uid=each.uid if each.kind == DAEMON_SETS.kind else "", controller=True)
        for each in pod.metadata.owner_references or ()
        if each.controller
    ]
    return owners or None


def _reduced_spec(spec: PodSpec) -> PodSpec:
    """Return what is read of a spec, without the name of the node."""
    return PodSpec(
        node_selector=spec.node_selector,
        affinity=spec.affinity,
        tolerations=spec.tolerations,
        topology_spread_constraints=spec.topology_spread_constraints,
        containers=[_reduced_container(each) for each in spec.containers],
        init_containers=[_reduced_container(each) for each in spec.init_containers or ()] or None,
        resources=spec.resources,
        overhead=spec.overhead,
        resource_claims=spec.resource_claims,
        scheduler_name=spec.scheduler_name,
        termination_grace_period_seconds=spec.termination_grace_period_seconds,
    )


def _reduced_container(container: Container) -> Container:
    ports = [
        ContainerPort(host_port=port.host_port, host_ip=port.host_ip, protocol=port.protocol)
        for port in container.ports or ()
        if port.host_port > 0
    ]
    return Container(resources=container.resources, ports=ports or None, restart_policy=container.restart_policy)


def _reduced_status(status: PodStatus) -> PodStatus:
    conditions = [each for each in status.conditions or () if each.type == _SCHEDULED and each.status != "True"]
    is_ready = any(each.type == _READY and each.status == "True" for each in status.conditions or ())
    if is_ready:
        # Without times and texts, in which pods differ.
        conditions.append(Condition(type=_READY, status="True"))
    return PodStatus(phase=status.phase, conditions=conditions or None)
