"""Places pods on the nodes of a simulated cluster as kube-scheduler does: filter, then score, one pod at a time.

docs/spec/simulation.md, "Pods". A node is filtered by requests, its `pods` limit, the pod's node requirements, limits
per node and strict spreads; what is left is scored by how much of its cpu and memory is allocated. It knows nothing of
BigFleet.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from bigfleet.engine.matching import matches
from bigfleet.model import vector
from bigfleet.model.machine import Machine
from bigfleet.model.profile import Profile, TopologySpread
from bigfleet.model.quantity import MILLI
from bigfleet.model.vector import Vector
from bigfleet.operator.requests import CapacityRequest, map_request
from bigfleet.planner.problem import SchedulerOrder

#: The dimension that counts pods; a node without it has no such limit.
PODS: Final = "pods"
#: What a node is scored by, and the score of a node where all of it is free.
SCORED: Final = ("cpu", "memory")
SCORE_MAX: Final = 100


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """What the pods of one workload, or of one gang of it, are made from."""

    workload: str
    #: Unique in the cluster; the gang's number is in it.
    name: str
    #: Without an id: every pod gets its own.
    request: CapacityRequest
    profile: Profile
    group: str
    vector: Vector
    #: The key whose value the pods of a gang share, "" for pods that need no common place.
    topology_key: str
    #: The group of which a node takes so many pods, "" and 0 for no limit.
    exclusion: str
    max_per_node: int
    #: No node is ever good enough, for a reason that is no want of capacity, such as a volume that is not bound.
    is_unschedulable: bool = False

    @classmethod
    def of(cls, workload: str, name: str, request: CapacityRequest, *, is_unschedulable: bool = False) -> "Template":
        """Return the template of a request. Raises UnmappableRequest."""
        mapped = map_request(request)
        together = request.co_location
        return cls(
            workload=workload,
            name=name,
            request=request,
            profile=mapped.profile,
            group=mapped.group,
            vector=mapped.vector,
            topology_key=together.topology_key if together else "",
            exclusion=mapped.exclusion,
            max_per_node=mapped.max_per_machine,
            is_unschedulable=is_unschedulable,
        )

    @property
    def row(self) -> tuple[str, str]:
        """Fingerprint and group of the row of demand that the pods are part of."""
        return (self.profile.fingerprint, self.group)


@dataclass(slots=True, eq=False)
class Pod:
    """One pod for its whole life."""

    id: str
    template: Template
    #: Rises with each pod of the cluster.
    number: int
    #: Its place among waiting pods of equal priority.
    turn: tuple[float, int]
    #: When it was made; from then on it waits or runs.
    since_seconds: float = 0.0
    #: The machine whose node runs it, None while it waits.
    node: str | None = None


@dataclass(slots=True, eq=False)
class Node:
    """One Ready node."""

    machine: Machine
    #: What pods get, and what is left of it, milli-units.
    capacity: Vector
    free: dict[str, int]
    pods: dict[str, Pod] = field(default_factory=dict)
    is_cordoned: bool = False
    #: How many-th node of its cluster it is.
    number: int = 0
    #: Pods by the group that they exclude each other in.
    excluded: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, machine: Machine, overhead: Vector = vector.ZERO, *, number: int = 0) -> "Node":
        """Return an empty node; `overhead` is what DaemonSets take of it."""
        capacity = vector.subtract(machine.supply, overhead)
        return cls(machine, capacity, dict(capacity), number=number)

    def copied(self) -> "Node":
        """Return the node as it is, to be changed on paper."""
        return replace(self, free=dict(self.free), pods=dict(self.pods), excluded=Counter(self.excluded))

    def places(self, template: Template) -> int:
        """Return how many pods of a template have room by their requests and limits."""
        places = [self.free.get(name, 0) // milli for name, milli in template.vector.items()]
        if PODS in self.capacity:
            places.append(self.free[PODS] // MILLI)
        if template.exclusion:
            places.append(template.max_per_node - self.excluded[template.exclusion])
        return max(0, min(places, default=0))

    def put(self, pod: Pod) -> None:
        """Take a pod in."""
        self._take(pod, 1)
        self.pods[pod.id] = pod
        pod.node = self.machine.id

    def remove(self, pod: Pod) -> None:
        """Let a pod go."""
        self._take(pod, -1)
        del self.pods[pod.id]
        pod.node = None

    def _take(self, pod: Pod, sign: int) -> None:
        for name, milli in pod.template.vector.items():
            self.free[name] -= sign * milli
        if PODS in self.capacity:
            self.free[PODS] -= sign * MILLI
        if pod.template.exclusion:
            self.excluded[pod.template.exclusion] += sign

    def score(self, template: Template, order: SchedulerOrder) -> int:
        """Return how good the node is for a pod: the mean over cpu and memory once it is there, more is better."""
        scores = []
        for name in SCORED:
            capacity = self.capacity.get(name, 0)
            if capacity:
                free = self.free[name] - template.vector.get(name, 0)
                part = free if order is SchedulerOrder.LEAST_ALLOCATED else capacity - free
                scores.append(part * SCORE_MAX // capacity)
        return sum(scores) // max(1, len(scores))


class Scheduler:
    """Answers where a pod may go and where it goes; it changes nothing."""

    def __init__(self, nodes: dict[str, Node], order: SchedulerOrder = SchedulerOrder.LEAST_ALLOCATED) -> None:
        """`nodes` are those of the moment, by machine id; the caller keeps them."""
        self._nodes = nodes
        self._order = order

    def candidates(self, template: Template, bound: Collection[Pod]) -> Iterator[Node]:
        """Yield the nodes that may take a pod, if there is room; `bound` are the template's pods that have a node."""
        place = self._place_of(template, bound)
        spread = template.profile.strict_spread
        domains = self._spread_domains(template, spread, bound) if spread is not None else Counter()
        for _machine_id, node in sorted(self._nodes.items()):
            if node.is_cordoned or not matches(template.profile, node.machine):
                continue
            if place is not None and node.machine.attribute(template.topology_key) != place:
                continue
            if spread is not None:
                domain = node.machine.attribute(spread.topology_key)
                if domain is None or domains[domain] + 1 - min(domains.values()) > spread.skew_max:
                    continue
            yield node

    def node_for(self, template: Template, bound: Collection[Pod]) -> Node | None:
        """Return the best node with room; the first pod of a gang looks for the place with the most room."""
        nodes = [node for node in self.candidates(template, bound) if node.places(template)]
        if template.topology_key and not bound:
            room = _room(template, nodes)
            best = min(room, key=lambda place: (-room[place], place), default=None)
            nodes = [node for node in nodes if node.machine.attribute(template.topology_key) == best]
        return min(nodes, key=lambda node: (-node.score(template, self._order), node.machine.id), default=None)

    def most_room(self, template: Template) -> int:
        """Return for how many pods of a gang the place with the most room has room."""
        return max(_room(template, self.candidates(template, ())).values(), default=0)

    def _place_of(self, template: Template, bound: Collection[Pod]) -> str | None:
        """Return the value that a gang's pods must share because some are bound, None where nothing binds them."""
        if not template.topology_key:
            return None
        node = next((pod.node for pod in bound if pod.node is not None), None)
        return self._nodes[node].machine.attribute(template.topology_key) if node is not None else None

    def _spread_domains(
        self, template: Template, spread: TopologySpread, bound: Collection[Pod]
    ) -> Counter[str | None]:
        """Return the template's pods by domain, 0 where a node that matches has none."""
        domains: Counter[str | None] = Counter()
        for node in self._nodes.values():
            value = node.machine.attribute(spread.topology_key)
            if value is not None and matches(template.profile, node.machine):
                domains[value] += 0
        for pod in bound:
            if pod.node is not None:
                domains[self._nodes[pod.node].machine.attribute(spread.topology_key)] += 1
        return domains


def _room(template: Template, nodes: Iterable[Node]) -> dict[str, int]:
    """Return how many pods of a gang have room, by place."""
    room: dict[str, int] = {}
    for node in nodes:
        place = node.machine.attribute(template.topology_key) or ""
        room[place] = room.get(place, 0) + node.places(template)
    return room


def do_not_fit(leaving: Node, others: Iterable[Node]) -> list[Pod]:
    """Return the pods of a node that find no place on the other schedulable nodes, first fit, largest first.

    This is the operator's preflight (docs/spec/operator.md §7): it goes by requests, limits per node, node requirements
    and strict spreads. A gang's pods must stay in their domain.
    """
    nodes = [node.copied() for node in others if node is not leaving and not node.is_cordoned]
    scheduler = Scheduler({node.machine.id: node for node in nodes})
    unplaced = []
    for pod in largest_first(leaving):
        template = pod.template
        place = leaving.machine.attribute(template.topology_key) if template.topology_key else None
        bound: list[Pod] = []
        if template.profile.strict_spread is not None:
            bound = [each for node in nodes for each in node.pods.values() if each.template is template]
        for node in scheduler.candidates(template, bound):
            is_place = place is None or node.machine.attribute(template.topology_key) == place
            if is_place and node.places(template):
                node.put(Pod(pod.id, template, pod.number, pod.turn))
                break
        else:
            unplaced.append(pod)
    return unplaced


def largest_first(node: Node) -> list[Pod]:
    """Return a node's pods, those first that take the largest share of it in any dimension."""

    def size(pod: Pod) -> float:
        shares = (milli / node.capacity[name] for name, milli in pod.template.vector.items() if node.capacity.get(name))
        return max(shares, default=0.0)

    return sorted(node.pods.values(), key=lambda pod: (-size(pod), pod.number))
