"""Judges whether a machine that joined while a pod waited could have taken the pod.

A pod that keeps waiting beside such a node does not wait for capacity (docs/spec/operator.md §3). Only what the
scheduler would surely check is checked here: requests, node selector, required node affinity, taints. A node that other
pods have filled meanwhile never speaks against a pod.
"""

from collections.abc import Iterable, Mapping
from typing import Final, Protocol

from bigfleet.model.clock import Clock
from bigfleet.model.vector import ZERO, Vector, covers, parse_vector, subtract
from bigfleet.operator.kubernetes.objects import (
    LabelSelectorRequirement,
    NodeObject,
    NodeSelectorTerm,
    NodeTaint,
    PodObject,
    PodSpec,
    Quantity,
    Toleration,
)
from bigfleet.operator.kubernetes.pod_requests import UnreadableRequest, pod_requests
from bigfleet.operator.kubernetes.resources import MACHINE_ID

PODS: Final = "pods"
_ONE_POD_MILLI: Final = 1000
_MIRROR_ANNOTATION: Final = "kubernetes.io/config.mirror"
_REPELLING_EFFECTS: Final = frozenset({"NoSchedule", "NoExecute"})


class NodePods(Protocol):
    """The pods of one node that have not finished."""

    @property
    def pods(self) -> Mapping[tuple[str, str], PodObject]:
        """By (namespace, name)."""
        ...

    @property
    def requested(self) -> Mapping[str, int]:
        """What they request in sum, milli-units."""
        ...


class PodsOfNodes(Protocol):
    """The pods of every node."""

    def on(self, node: str) -> NodePods:
        """Return the pods of a node by its name; none for an unknown one."""
        ...


class JoinedNodes:
    """The nodes of machines, with since when each is Ready. An ObjectListener of Nodes."""

    def __init__(self, *, pods: PodsOfNodes, clock: Clock) -> None:
        self._pods = pods
        self._clock = clock
        #: All and only the nodes of machines that are Ready.
        self._ready: dict[str, NodeObject] = {}
        self._since_seconds: dict[str, float] = {}

    def put(self, stored: NodeObject, former: NodeObject | None) -> None:
        """Follow one node."""
        name = stored.metadata.name
        if stored.is_ready and MACHINE_ID in (stored.metadata.labels or {}):
            self._ready[name] = stored
            self._since_seconds.setdefault(name, self._clock.monotonic_seconds())
        else:
            self.remove(stored)

    def remove(self, former: NodeObject) -> None:
        """Forget one node."""
        self._ready.pop(former.metadata.name, None)
        self._since_seconds.pop(former.metadata.name, None)

    def could_have_run(self, pod: PodObject, *, after_seconds: float, before_seconds: float) -> bool:
        """Say whether a node that became Ready between two moments, and is since, could have taken the pod.

        Its labels and taints suit the pod, and it has room for the pod now. Or it hosts nothing but daemons and its
        capacity is large enough: then less of it is left for pods than was said, and so it would be of another one.
        """
        joined = [name for name, since in self._since_seconds.items() if after_seconds <= since <= before_seconds]
        if not joined:
            return False
        wanted = _requests_of(pod.spec)
        return any(self._could_take(self._ready[name], pod.spec, wanted) for name in joined)

    def _could_take(self, node: NodeObject, spec: PodSpec, wanted: Vector) -> bool:
        if node.spec.unschedulable or not accepts(node, spec):
            return False
        on_node = self._pods.on(node.metadata.name)
        if _has_room(node, on_node, wanted):
            return True
        return all(is_daemon(pod) for pod in on_node.pods.values()) and covers(_parsed(node.status.capacity), wanted)


def is_daemon(pod: PodObject) -> bool:
    """Say whether the pod came with its node: one of a DaemonSet, or a mirror pod."""
    owners = pod.metadata.owner_references or ()
    return _MIRROR_ANNOTATION in (pod.metadata.annotations or {}) or any(
        owner.controller and owner.kind == "DaemonSet" for owner in owners
    )


def _parsed(quantities: Mapping[str, Quantity] | None) -> Vector:
    return parse_vector({name: str(quantity) for name, quantity in (quantities or {}).items()})


def _requests_of(spec: PodSpec) -> Vector:
    try:
        return pod_requests(spec)
    except UnreadableRequest:
        return ZERO


def _has_room(node: NodeObject, on_node: NodePods, wanted: Vector) -> bool:
    allocatable = _parsed(node.status.allocatable)
    if len(on_node.pods) * _ONE_POD_MILLI >= allocatable.get(PODS, (len(on_node.pods) + 1) * _ONE_POD_MILLI):
        return False
    return covers(subtract(allocatable, on_node.requested), wanted)


def accepts(node: NodeObject, spec: PodSpec) -> bool:
    """Say whether a node's labels and taints suit a pod."""
    labels = node.metadata.labels or {}
    if any(labels.get(key) != value for key, value in (spec.node_selector or {}).items()):
        return False
    node_affinity = spec.affinity.node_affinity if spec.affinity is not None else None
    required = node_affinity.required_during_scheduling_ignored_during_execution if node_affinity is not None else None
    if required is not None and not any(_term_holds(term, node) for term in required.node_selector_terms or ()):
        return False
    return not any(_repels(taint, spec.tolerations or ()) for taint in node.spec.taints or ())


def _term_holds(term: NodeSelectorTerm, node: NodeObject) -> bool:
    if not term.match_expressions and not term.match_fields:
        return False
    labels = node.metadata.labels or {}
    fields = {"metadata.name": node.metadata.name}
    return all(_holds(each, labels) for each in term.match_expressions or ()) and all(
        _holds(each, fields) for each in term.match_fields or ()
    )


def _holds(expression: LabelSelectorRequirement, labels: Mapping[str, str]) -> bool:
    value, values = labels.get(expression.key), expression.values or []
    match expression.operator:
        case "In":
            return value is not None and value in values
        case "NotIn":
            return value is None or value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt":
            return _compares(expression.operator, value, values)
        case _:
            return False


def _compares(operator: str, value: str | None, values: list[str]) -> bool:
    try:
        left, right = int(value or ""), int(values[0] if values else "")
    except ValueError:
        return False
    return left > right if operator == "Gt" else left < right


def _repels(taint: NodeTaint, tolerations: Iterable[Toleration]) -> bool:
    return taint.effect in _REPELLING_EFFECTS and not any(_tolerates(each, taint) for each in tolerations)


def _tolerates(toleration: Toleration, taint: NodeTaint) -> bool:
    if toleration.effect not in ("", taint.effect) or toleration.key not in ("", taint.key):
        return False
    if toleration.operator == "Exists":
        return True
    return bool(toleration.key) and toleration.operator in ("", "Equal") and toleration.value == taint.value
