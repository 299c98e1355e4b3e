"""Judges whether a machine that joined while a pod waited could have taken the pod.

If such a node exists and the pod still waits, it does not wait for capacity (docs/spec/operator.md §3). Only rules that
the scheduler certainly applies are checked: requests, node selector, required node affinity, taints. A node that other
pods have filled meanwhile never counts against a pod.
"""

from collections.abc import Mapping
from typing import Final, Protocol

from bigfleet.model.clock import Clock
from bigfleet.model.vector import Vector, covers, parse_vector, subtract
from bigfleet.operator.kubernetes.objects import NodeObject, PodObject, PodSpec, Quantity
from bigfleet.operator.kubernetes.pod_requests import requested_by
from bigfleet.operator.kubernetes.resources import MACHINE_ID
from bigfleet.operator.kubernetes.scheduling_rules import admits, repelling_taint

PODS: Final = "pods"
_ONE_POD_MILLI: Final = 1000


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
        """Return whether a node that became Ready between two moments, and is since, could have taken the pod.

        Its labels and taints suit the pod, and it has room for the pod now. Or it hosts nothing but daemons and its
        capacity is large enough: then less of it is left for pods than was said, and so it would be of another one.
        """
        joined = [name for name, since in self._since_seconds.items() if after_seconds <= since <= before_seconds]
        if not joined:
            return False
        wanted = requested_by(pod.spec)
        return any(self._could_take(self._ready[name], pod.spec, wanted) for name in joined)

    def _could_take(self, node: NodeObject, spec: PodSpec, wanted: Mapping[str, int]) -> bool:
        if node.spec.unschedulable or not admits(node, spec):
            return False
        if repelling_taint(node.spec.taints, spec.tolerations) is not None:
            return False
        on_node = self._pods.on(node.metadata.name)
        if _has_room(node, on_node, wanted):
            return True
        hosts_daemons_alone = all(pod.is_mirror or pod.is_of_daemon_set for pod in on_node.pods.values())
        return hosts_daemons_alone and covers(_parsed(node.status.capacity), wanted)


def _parsed(quantities: Mapping[str, Quantity] | None) -> Vector:
    return parse_vector({name: str(quantity) for name, quantity in (quantities or {}).items()})


def _has_room(node: NodeObject, on_node: NodePods, wanted: Mapping[str, int]) -> bool:
    allocatable = _parsed(node.status.allocatable)
    if len(on_node.pods) * _ONE_POD_MILLI >= allocatable.get(PODS, (len(on_node.pods) + 1) * _ONE_POD_MILLI):
        return False
    return covers(subtract(allocatable, on_node.requested), wanted)
