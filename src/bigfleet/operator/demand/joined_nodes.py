"""Judges whether a machine that joined while a pod waited could have taken the pod, and whether one will take it soon.

If a node could have taken it and the pod still waits, it does not wait for capacity (docs/spec/operator.md §3.1). Nor
does it if its machine suits the pod as far as the shard knows and the node does not: the next one would be no better.
Only rules that the scheduler certainly applies are checked: requests, node selector, required node affinity, taints. A
node that other pods have filled meanwhile never counts against a pod. A machine that was there before this process
began is not joining: how long it has been Configured is unknown, and may be an hour.
"""

from collections.abc import Mapping
from itertools import takewhile
from typing import Final, NamedTuple, Protocol

import msgspec

from bigfleet.model.clock import Clock
from bigfleet.model.frames import NodeStateUpdate
from bigfleet.model.states import MachineState
from bigfleet.model.vector import Vector, covers, maximum, parse_vector, subtract
from bigfleet.operator.kubernetes.objects import (
    NodeObject,
    NodeSpec,
    NodeTaint,
    ObjectMeta,
    PodObject,
    PodSpec,
    Quantity,
)
from bigfleet.operator.kubernetes.pod_requests import requested_by
from bigfleet.operator.kubernetes.resources import MACHINE_ID
from bigfleet.operator.kubernetes.scheduling_rules import admits, machine_admits, node_terms, repelling_taint
from bigfleet.operator.nodes.names import machine_label

PODS: Final = "pods"
#: For so long after it is first reported as Configured a machine may come for pods that it cannot run yet; the default
#: of the shard's --join-deadline.
JOINING_SECONDS: Final = 900.0
_ONE_POD_MILLI: Final = 1000
#: The fields of a pod's spec that are read here, for `scheduling_key` among others.
KEY_FIELDS: Final = (
    "containers", "init_containers", "resources", "overhead", "node_selector", "affinity", "tolerations"
)  # fmt: skip


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


class _Machine(NamedTuple):
    """A Configured machine of the cluster, as the shard describes it."""

    #: What it has for pods, milli-units.
    promised: Vector
    #: A node with its labels and taints.
    described: NodeObject
    #: When it was first reported as Configured; minus infinity if that was before the first resync of the process.
    since_seconds: float


class _ReadyNode(NamedTuple):
    """A node of a machine that is Ready."""

    node: NodeObject
    #: Milli-units.
    allocatable: Vector
    capacity: Vector


def scheduling_key(spec: PodSpec) -> bytes:
    """Return what `JoinedNodes` reads of a pod's spec, encoded: pods with equal keys get equal answers."""
    return msgspec.msgpack.encode((dict(requested_by(spec)), spec.node_selector, node_terms(spec), spec.tolerations))


class JoinedNodes:
    """The nodes of machines, with since when each is Ready. An ObjectListener of Nodes."""

    def __init__(self, *, pods: PodsOfNodes, clock: Clock) -> None:
        self._pods = pods
        self._clock = clock
        #: All and only the nodes of machines that are Ready.
        self._ready: dict[str, _ReadyNode] = {}
        #: Since when, those that became Ready last at the end.
        self._since_seconds: dict[str, float] = {}
        #: Names of these nodes by the value of their machine-id label.
        self._name_by_label: dict[str, str] = {}
        #: Configured machines by the value of their machine-id label.
        self._machines: dict[str, _Machine] = {}
        #: Those of them that may come for a pod, and old ones: their node is neither complete nor cordoned.
        self._joining: dict[str, _Machine] = {}
        #: Whether the shard has named all machines of the cluster to this process.
        self._is_resynced = False

    def put(self, stored: NodeObject, former: NodeObject | None) -> None:
        """Follow one node."""
        name, label = stored.metadata.name, _label_of(stored)
        if not stored.is_ready or not label:
            self.remove(stored)
            return
        self._forget_label(name)
        self._ready[name] = _ReadyNode(stored, _parsed(stored.status.allocatable), _parsed(stored.status.capacity))
        self._name_by_label[label] = name
        self._since_seconds.setdefault(name, self._clock.monotonic_seconds())
        self._note_joining(label)

    def remove(self, former: NodeObject) -> None:
        """Forget one node."""
        name = former.metadata.name
        self._forget_label(name)
        self._ready.pop(name, None)
        self._since_seconds.pop(name, None)

    def _forget_label(self, name: str) -> None:
        known = self._ready.get(name)
        if known is not None and self._name_by_label.get(_label_of(known.node)) == name:
            del self._name_by_label[_label_of(known.node)]
            self._note_joining(_label_of(known.node))

    def node_state(self, update: NodeStateUpdate) -> None:
        """Follow one machine."""
        label = machine_label(update.machine_id)
        if update.state is not MachineState.CONFIGURED or not update.cluster_id:
            self._machines.pop(label, None)
            self._joining.pop(label, None)
            return
        known = self._machines.get(label)
        if known is not None:
            since_seconds = known.since_seconds
        else:
            since_seconds = self._clock.monotonic_seconds() if self._is_resynced else float("-inf")
        taints = [NodeTaint(key=each.key, value=each.value, effect=each.effect) for each in update.taints]
        self._machines[label] = _Machine(
            promised=parse_vector(update.resources),
            described=NodeObject(
                metadata=ObjectMeta(name=update.node_name, labels=dict(update.labels)), spec=NodeSpec(taints=taints)
            ),
            since_seconds=since_seconds,
        )
        self._note_joining(label)

    def resynced(self, machine_ids: frozenset[str]) -> None:
        """Forget the machines that are no longer the cluster's; those that are named from now on are new to it."""
        self._is_resynced = True
        labels = {machine_label(machine_id) for machine_id in machine_ids}
        for label in self._machines.keys() - labels:
            del self._machines[label]
            self._joining.pop(label, None)

    def _note_joining(self, label: str) -> None:
        machine = self._machines.get(label)
        if machine is None or self._is_settled(label, machine):
            self._joining.pop(label, None)
        else:
            self._joining[label] = machine

    def _is_settled(self, label: str, machine: _Machine) -> bool:
        """Return whether a machine comes for no pod: its node is cordoned, or has all that the shard says and no taint
        beyond.
        """
        name = self._name_by_label.get(label)
        if name is None:
            return False
        ready = self._ready[name]
        is_complete = ready.allocatable.keys() >= machine.promised.keys()
        is_tainted = repelling_taint(_taints_beyond(ready.node, machine), None) is not None
        return ready.node.spec.unschedulable or (is_complete and not is_tainted)

    def is_coming(self, pod: PodObject) -> bool:
        """Return whether a machine that was Configured lately can take the pod as soon as its node is complete.

        Its labels and taints suit the pod, and what the shard says that it has covers the pod. Its node is not Ready,
        lacks a resource that the pod requests, or has a taint that the shard does not name.
        """
        young_seconds = self._clock.monotonic_seconds() - JOINING_SECONDS
        for label in [label for label, each in self._joining.items() if each.since_seconds <= young_seconds]:
            del self._joining[label]
        wanted = requested_by(pod.spec)
        return any(self._comes_for(label, pod.spec, wanted) for label in self._joining)

    def _comes_for(self, label: str, spec: PodSpec, wanted: Mapping[str, int]) -> bool:
        machine = self._machines[label]
        if not covers(machine.promised, wanted):
            return False
        if repelling_taint(machine.described.spec.taints, spec.tolerations) is not None:
            return False
        name = self._name_by_label.get(label)
        if name is None:
            return admits(machine.described, spec)
        ready = self._ready[name]
        lacks = any(resource not in ready.allocatable for resource in wanted)
        is_tainted = repelling_taint(_taints_beyond(ready.node, machine), spec.tolerations) is not None
        if ready.node.spec.unschedulable or not (lacks or is_tainted):
            return False
        return admits(ready.node, spec) and covers(subtract(machine.promised, self._pods.on(name).requested), wanted)

    def could_have_run(self, pod: PodObject, *, after_seconds: float, before_seconds: float) -> bool:
        """Return whether a node that became Ready between two moments, and is since, could have taken the pod.

        Its labels and taints suit the pod, and it has room for the pod now. Or it hosts nothing but daemons, and its
        capacity, or what the shard says that the machine has, is large enough: then less of it is left for pods than
        was said, and so it would be of another one.
        """
        joined = self._joined(after_seconds, before_seconds)
        if not joined:
            return False
        wanted = requested_by(pod.spec)
        return any(self._could_take(self._ready[name], pod.spec, wanted) for name in joined)

    def came_in_vain(self, pod: PodObject, *, after_seconds: float, before_seconds: float) -> bool:
        """Return whether a node that became Ready between two moments came for the pod and does not suit it.

        It hosts nothing but daemons. Its machine suits the pod as far as the shard knows, which reads no tolerations,
        but its labels or its taints do not. A taint that the shard does not name may be one of its start, and counts
        after `JOINING_SECONDS`.
        """
        joined = self._joined(after_seconds, before_seconds)
        if not joined:
            return False
        wanted = requested_by(pod.spec)
        return any(self._is_in_vain(name, pod.spec, wanted) for name in joined)

    def _joined(self, after_seconds: float, before_seconds: float) -> list[str]:
        lately = takewhile(lambda name: self._since_seconds[name] >= after_seconds, reversed(self._since_seconds))
        return [name for name in lately if self._since_seconds[name] <= before_seconds]

    def _is_in_vain(self, name: str, spec: PodSpec, wanted: Mapping[str, int]) -> bool:
        ready = self._ready[name]
        machine = self._machines.get(_label_of(ready.node))
        if machine is None or ready.node.spec.unschedulable or not _hosts_only_daemons(self._pods.on(name)):
            return False
        if not machine_admits(machine.described.metadata.labels or {}, spec):
            return False
        if not covers(maximum(ready.capacity, machine.promised), wanted):
            return False
        is_repelled = repelling_taint(machine.described.spec.taints, spec.tolerations) is not None
        if is_repelled or not admits(ready.node, spec):
            return True
        is_young = self._since_seconds[name] > self._clock.monotonic_seconds() - JOINING_SECONDS
        return not is_young and repelling_taint(_taints_beyond(ready.node, machine), spec.tolerations) is not None

    def _could_take(self, ready: _ReadyNode, spec: PodSpec, wanted: Mapping[str, int]) -> bool:
        node = ready.node
        if node.spec.unschedulable or not admits(node, spec):
            return False
        if repelling_taint(node.spec.taints, spec.tolerations) is not None:
            return False
        on_node = self._pods.on(node.metadata.name)
        if _has_room(ready.allocatable, on_node, wanted):
            return True
        machine = self._machines.get(_label_of(node))
        said = maximum(ready.capacity, {} if machine is None else machine.promised)
        return _hosts_only_daemons(on_node) and covers(said, wanted)


def _label_of(node: NodeObject) -> str:
    return (node.metadata.labels or {}).get(MACHINE_ID, "")


def _hosts_only_daemons(on_node: NodePods) -> bool:
    return all(pod.is_mirror or pod.is_of_daemon_set for pod in on_node.pods.values())


def _taints_beyond(node: NodeObject, machine: _Machine) -> list[NodeTaint]:
    """Return the taints of a node that the shard does not name, such as those of its start."""
    said = {(taint.key, taint.effect) for taint in machine.described.spec.taints or ()}
    return [taint for taint in node.spec.taints or () if (taint.key, taint.effect) not in said]


def _parsed(quantities: Mapping[str, Quantity] | None) -> Vector:
    return parse_vector({name: str(quantity) for name, quantity in (quantities or {}).items()})


def _has_room(allocatable: Vector, on_node: NodePods, wanted: Mapping[str, int]) -> bool:
    if len(on_node.pods) * _ONE_POD_MILLI >= allocatable.get(PODS, (len(on_node.pods) + 1) * _ONE_POD_MILLI):
        return False
    return covers(subtract(allocatable, on_node.requested), wanted)
