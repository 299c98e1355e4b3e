"""Places pods on nodes by first fit, largest pods first: a pure forecast of whether they would find room.

Requests against what is free, the pods limit, host ports, node selectors, required node affinity, taints, and rules
about other pods. A pod that a voluntary drain must not evict has no place. Volumes that are bound to a node and
preferences are not read. It must never say that a pod fits where the scheduler would refuse it for a rule that is read
here.
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Final, TypeVar

import msgspec

from bigfleet.model.quantity import MILLI, QuantityError, parse_quantity
from bigfleet.model.vector import format_vector
from bigfleet.operator.kubernetes.objects import NodeObject, PodObject
from bigfleet.operator.kubernetes.pod_requests import UnreadableRequest, pod_requests
from bigfleet.operator.kubernetes.scheduling_rules import HostPort, admits, host_ports, repelling_taint, taken_port
from bigfleet.operator.nodes.disruption import why_not_disrupted
from bigfleet.operator.nodes.pod_index import PodKey, PodsOnNode
from bigfleet.operator.nodes.topology_rules import (
    Located,
    PodRules,
    ReplicaGroup,
    SpreadDomains,
    asks_for_others,
    grouped,
)

_PODS: Final = "pods"
#: Rooms that are tried for a pod between two pauses: some milliseconds.
_ROOMS_A_STEP: Final = 500

Result = TypeVar("Result")


@dataclass(slots=True)
class NodeRoom:
    """What is free on one node, milli-units; `pods` is the number of pods that it may still host."""

    node: NodeObject
    free: dict[str, int]
    pods: int
    #: All of it, free or not.
    capacity: Mapping[str, int] = field(default_factory=dict)
    #: Host ports that its pods take.
    ports: set[HostPort] = field(default_factory=set)

    @classmethod
    def of(cls, node: NodeObject, load: PodsOnNode) -> "NodeRoom":
        """Return what a node's pods leave free; 0 of what it does not declare."""
        allocatable = {}
        for name, quantity in (node.status.allocatable or {}).items():
            try:
                allocatable[name] = parse_quantity(str(quantity))
            except QuantityError:
                continue
        slots = allocatable.pop(_PODS, 0) // MILLI
        free = {name: milli - load.requested.get(name, 0) for name, milli in allocatable.items()}
        return cls(node, free, slots - len(load.pods), allocatable, load.ports)

    def copy(self) -> "NodeRoom":
        """Return the same room, from which others can be taken."""
        return NodeRoom(self.node, dict(self.free), self.pods, self.capacity, set(self.ports))

    def take(self, requests: Mapping[str, int], ports: Set[HostPort]) -> None:
        """Take the room of one pod."""
        self.ports |= ports
        for name, milli in requests.items():
            self.free[name] = self.free.get(name, 0) - milli
        self.pods -= 1

    def lacks(self, requests: Mapping[str, int]) -> str | None:
        """Return the first resource, in name order, of which a pod finds too little; None when it fits."""
        if self.pods < 1:
            return _PODS
        # A loop, not a comprehension: this is asked for each pod and node.
        for name, milli in requests.items():
            if self.free.get(name, 0) < milli:
                return min(n for n, m in requests.items() if self.free.get(n, 0) < m)
        return None


#: How good a room is for a pod with these requests; more is better.
RoomScore = Callable[[NodeRoom, dict[str, int]], int]


@dataclass(frozen=True, slots=True)
class Unplaced:
    """A pod that has no place, and why."""

    pod: PodObject
    reason: str
    what: str = "fits on no other node"

    @property
    def text(self) -> str:
        """The pod and the reason, as a clause."""
        return f"pod {'/'.join(self.pod.metadata.key)} {self.what}: {self.reason}"


@dataclass(slots=True)
class PlacedPods:
    """Where each pod would go, by node name; `unplaced` is the first that fits nowhere."""

    assigned: dict[PodKey, str] = field(default_factory=dict)
    unplaced: Unplaced | None = None


@dataclass(slots=True)
class _Kind:
    """Pods that are alike to the scheduler."""

    requests: dict[str, int]
    ports: Set[HostPort]
    rules: PodRules
    #: In order, without those that were found to be too small, or forbidden for good.
    rooms: list[NodeRoom]


class PodPlacer:
    """Places pods, one set at a time, into rooms that it uses up."""

    def __init__(
        self,
        rooms: Sequence[NodeRoom],
        *,
        residents: Callable[[], Iterable[Located]],
        anti_affine: Sequence[Located],
        nodes: Sequence[NodeObject],
        score: RoomScore | None = None,
    ) -> None:
        """`residents` are all pods that stay, with their nodes; it is called once, and only if a rule asks for it.

        `anti_affine` are those of them with anti-affinity; `nodes` are all nodes that stay, schedulable or not. With
        `score` a pod goes to the best of the rooms that may take it, not to the first.
        """
        self._score = score
        self._rooms = rooms
        self._residents = residents
        self._resident_groups: Sequence[ReplicaGroup] | None = None
        self._anti_affine = anti_affine
        self._anti_affine_groups: Sequence[ReplicaGroup] | None = None
        self._domains = SpreadDomains(nodes)
        self._kinds: dict[bytes, _Kind] = {}
        self._placed: list[ReplicaGroup] = []

    def place(self, pods: Iterable[PodObject], *, size: Callable[[Mapping[str, int]], float]) -> PlacedPods:
        """Place pods, the largest by `size` first; stops at the first that fits nowhere."""
        return exhaust(self.steps(pods, size=size))

    def steps(
        self, pods: Iterable[PodObject], *, size: Callable[[Mapping[str, int]], float]
    ) -> Generator[None, None, PlacedPods]:
        """Place pods as `place` does, with pauses every some milliseconds; `pods` are read before the first."""
        placement = PlacedPods()
        sized = []
        for pod in list(pods):
            yield
            why_not = why_not_disrupted(pod)
            if why_not is not None:
                placement.unplaced = Unplaced(pod, why_not, "must not be evicted by a voluntary drain")
                return placement
            try:
                requests = pod_requests(pod.spec)
            except UnreadableRequest as error:
                placement.unplaced = Unplaced(pod, f"its requests cannot be read: {error}")
                return placement
            if pod.spec.resource_claims:
                placement.unplaced = Unplaced(pod, "whether its resource claims can be met elsewhere is unknown")
                return placement
            sized.append((-size(requests), pod.metadata.key, pod, requests))
        sized.sort(key=lambda entry: entry[:2])
        for _size, key, pod, requests in sized:
            yield
            kind = yield from self._kind_of(pod, requests)
            room = yield from self._find(pod, kind)
            if room is None:
                why = yield from self._why(pod, kind)
                placement.unplaced = Unplaced(pod, why)
                return placement
            room.take(requests, kind.ports)
            self._note(pod, room.node)
            placement.assigned[key] = room.node.metadata.name
        return placement

    def _find(self, pod: PodObject, kind: _Kind) -> Generator[None, None, NodeRoom | None]:
        score = self._score
        if score is not None:
            rooms = (room for room in self._rooms if self._fault(room, pod, kind) is None)
            return max(rooms, key=lambda room: score(room, kind.requests), default=None)
        rules_last = kind.rules.only_get_stricter
        kept = 0
        for position, room in enumerate(kind.rooms):
            if position % _ROOMS_A_STEP == _ROOMS_A_STEP - 1:
                yield
            if _lasting_fault(room, pod, kind) is not None:
                continue
            is_free = kind.rules.fault(room.node) is None
            if is_free or not rules_last:
                kind.rooms[kept] = room
                kept += 1
            if is_free:
                del kind.rooms[kept : position + 1]
                return room
        del kind.rooms[kept:]
        return None

    def _fault(self, room: NodeRoom, pod: PodObject, kind: _Kind) -> str | None:
        return _lasting_fault(room, pod, kind) or kind.rules.fault(room.node)

    def _why(self, pod: PodObject, kind: _Kind) -> Generator[None, None, str]:
        amounts = ", ".join(f"{name} {text}" for name, text in format_vector(kind.requests).items())
        if not self._rooms:
            return f"it requests {amounts or 'nothing'}; no other node is schedulable and Ready"
        faults: Counter[str | None] = Counter()
        for position, room in enumerate(self._rooms, 1):
            faults[self._fault(room, pod, kind)] += 1
            if position % _ROOMS_A_STEP == 0:
                yield
        listed = "; ".join(
            f"{count} {fault}" for fault, count in sorted(faults.items(), key=lambda f: (-f[1], f[0] or ""))
        )
        return f"it requests {amounts or 'nothing'}; of {len(self._rooms)} other nodes: {listed}"

    def _kind_of(self, pod: PodObject, requests: dict[str, int]) -> Generator[None, None, _Kind]:
        spec = pod.spec
        ports = host_ports(spec)
        text = msgspec.json.encode(
            (
                pod.metadata.namespace,
                sorted((pod.metadata.labels or {}).items()),
                sorted(requests.items()),
                sorted(ports),
                spec.node_selector,
                spec.affinity,
                spec.tolerations,
                spec.topology_spread_constraints,
            )
        )
        kind = self._kinds.get(text)
        if kind is None:
            if self._anti_affine_groups is None:
                self._anti_affine_groups = yield from grouped(self._anti_affine)
            if self._resident_groups is None and asks_for_others(pod):
                self._resident_groups = yield from grouped(self._residents())
            residents = self._resident_groups if asks_for_others(pod) else None
            rules = yield from PodRules.steps(pod, residents or (), self._anti_affine_groups, self._domains)
            for placed in self._placed:
                rules.place(placed)
            kind = self._kinds[text] = _Kind(requests, ports, rules, list(self._rooms))
        return kind

    def _note(self, pod: PodObject, node: NodeObject) -> None:
        placed = ReplicaGroup.of(pod, node)
        self._placed.append(placed)
        for kind in self._kinds.values():
            kind.rules.place(placed)


def _lasting_fault(room: NodeRoom, pod: PodObject, kind: _Kind) -> str | None:
    """Say why the room will never take a pod of the kind; None if rules about other pods decide."""
    lacking = room.lacks(kind.requests)
    if lacking is not None:
        return f"too little {lacking}"
    port = taken_port(kind.ports, room.ports)
    if port is not None:
        return f"host port {port} taken"
    if not admits(room.node, pod.spec):
        return "not selected by its node selector or affinity"
    taint = repelling_taint(room.node.spec.taints, pod.spec.tolerations)
    return f"taint {taint.key} not tolerated" if taint is not None else None


def exhaust(steps: Generator[None, None, Result]) -> Result:
    """Return the result of a computation that pauses, without a pause."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result
