"""The pods and nodes of one simulated cluster: what is bound where, who is evicted, and what is made anew.

docs/spec/simulation.md, docs/spec/operator.md §11. A workload's controller keeps as many pods as it is told to; a pod
that loses its node is made anew under another name and waits. The scheduler binds a waiting pod to a Ready node that
its profile matches and that has room, higher priorities first, the pods of a gang in one place; it takes lower
priorities off a node where there is no other way. It knows nothing of BigFleet. It must never make more pods, or fewer,
than the workloads say.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from bigfleet.engine.matching import matches
from bigfleet.model.machine import Machine
from bigfleet.model.profile import Profile
from bigfleet.model.vector import Vector
from bigfleet.operator.requests import CapacityRequest, map_request


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

    @classmethod
    def of(cls, workload: str, name: str, request: CapacityRequest) -> "Template":
        """Return the template of a request. Raises UnmappableRequest."""
        mapped = map_request(request)
        together = request.co_location
        key = together.topology_key if together else ""
        return cls(workload, name, request, mapped.profile, mapped.group, mapped.vector, key)


@dataclass(slots=True, eq=False)
class Pod:
    """One pod for its whole life."""

    id: str
    template: Template
    #: Rises with each pod of the cluster.
    number: int
    #: The machine whose node runs it, None while it waits.
    node: str | None = None


@dataclass(slots=True, eq=False)
class Node:
    """One Ready node."""

    machine: Machine
    #: What is left of the allocatable, milli-units.
    free: dict[str, int]
    pods: dict[str, Pod] = field(default_factory=dict)
    is_cordoned: bool = False

    def places(self, template: Template) -> int:
        """Return how many pods of a template have room."""
        return min((self.free.get(name, 0) // milli for name, milli in template.vector.items()), default=0)


#: Called with the requests that came and the ids of those that went.
OnChange = Callable[[list[CapacityRequest], list[str]], None]


class PodCluster:
    """Pods, nodes and a scheduler; every change leaves nothing waiting that could be bound."""

    def __init__(self, name: str, on_change: OnChange) -> None:
        self.name = name
        self.pods: dict[str, Pod] = {}
        #: By machine id.
        self.nodes: dict[str, Node] = {}
        #: Pods that lost their node to a drain or with the node, and those that made room for a higher priority.
        self.evictions = 0
        self.preemptions = 0
        self._on_change = on_change
        self._number = 0
        #: Pods by template, oldest first.
        self._by_template: dict[Template, dict[str, Pod]] = {}
        self._waiting: dict[str, Pod] = {}

    @property
    def bound(self) -> int:
        """How many pods have a node."""
        return len(self.pods) - len(self._waiting)

    def counts(self, workload: str = "") -> tuple[int, int]:
        """Return the pods that are bound and all pods, of one workload or of all."""
        pods = [pod for pod in self.pods.values() if workload in ("", pod.template.workload)]
        return sum(pod.node is not None for pod in pods), len(pods)

    def machines_running(self, workload: str) -> list[str]:
        """Return the machines that run pods of a workload, ids ascending."""
        return sorted({pod.node for pod in self.pods.values() if pod.node and pod.template.workload == workload})

    # ---- what others do ------------------------------------------------------------------------------------------

    def resize(self, template: Template, pods: int) -> None:
        """Keep so many pods of a template: waiting ones go first, then the newest."""
        own = self._by_template.setdefault(template, {})
        came = [self._make(template).id for _ in range(pods - len(own))]
        surplus = sorted(own.values(), key=lambda pod: (pod.node is not None, -pod.number))[: max(0, len(own) - pods)]
        for pod in surplus:
            self._remove(pod)
        self._told([self.pods[pod_id] for pod_id in came], surplus)
        self._bind()

    def join(self, machine: Machine) -> None:
        """A machine's node is Ready."""
        self.nodes[machine.id] = Node(machine, dict(machine.supply))
        self._bind()

    def leave(self, machine_id: str) -> None:
        """A machine's node is gone, and its pods with it; they are made anew."""
        self._evict(machine_id)
        self.nodes.pop(machine_id, None)
        self._bind()

    def drain(self, machine_id: str) -> None:
        """Cordon a node and evict its pods; they are made anew."""
        self.nodes[machine_id].is_cordoned = True
        self._evict(machine_id)
        self._bind()

    def uncordon(self, machine_id: str) -> None:
        """Let pods onto a node again."""
        node = self.nodes.get(machine_id)
        if node is not None:
            node.is_cordoned = False
            self._bind()

    # ---- pods come and go ----------------------------------------------------------------------------------------

    def _make(self, template: Template) -> Pod:
        self._number += 1
        pod = Pod(f"{self.name}-{template.name}-{self._number}", template, self._number)
        self.pods[pod.id] = self._waiting[pod.id] = pod
        self._by_template.setdefault(template, {})[pod.id] = pod
        return pod

    def _remove(self, pod: Pod) -> None:
        self._unbind(pod)
        del self.pods[pod.id], self._by_template[pod.template][pod.id]
        self._waiting.pop(pod.id, None)

    def _told(self, came: Iterable[Pod], went: Iterable[Pod]) -> None:
        add = [_request_of(pod) for pod in came]
        remove = [pod.id for pod in went]
        if add or remove:
            self._on_change(add, remove)

    def _evict(self, machine_id: str) -> None:
        node = self.nodes.get(machine_id)
        if node is not None:
            self.evictions += len(node.pods)
            self._renew(list(node.pods.values()))

    def _renew(self, lost: list[Pod]) -> None:
        """Let the controllers make anew what is lost: another pod, the same demand."""
        for pod in lost:
            self._remove(pod)
        self._told([self._make(pod.template) for pod in lost], lost)

    # ---- the scheduler -------------------------------------------------------------------------------------------

    def _bind(self) -> None:
        """Bind what waits, until nothing more can be bound."""
        while True:
            hopeless: set[Template] = set()
            made_room = False
            for pod in sorted(self._waiting.values(), key=lambda pod: (-pod.template.profile.priority, pod.number)):
                if pod.template in hopeless:
                    continue
                node = self._node_for(pod.template)
                if node is not None:
                    self._put(pod, node)
                elif self._make_room(pod):
                    made_room = True
                else:
                    hopeless.add(pod.template)
            if not made_room:
                return

    def _candidates(self, template: Template) -> Iterator[Node]:
        place = self._place_of(template)
        for _machine_id, node in sorted(self.nodes.items()):
            if node.is_cordoned or not matches(template.profile, node.machine):
                continue
            if place is None or node.machine.attribute(template.topology_key) == place:
                yield node

    def _place_of(self, template: Template) -> str | None:
        """Return the value that a gang's pods must share because some are bound, None where nothing binds them."""
        if not template.topology_key:
            return None
        for pod in self._by_template[template].values():
            if pod.node is not None:
                return self.nodes[pod.node].machine.attribute(template.topology_key)
        return None

    def _node_for(self, template: Template) -> Node | None:
        """Return the emptiest node with room; the first pod of a gang looks for the place with the most room."""
        nodes = [node for node in self._candidates(template) if node.places(template)]
        if template.topology_key and self._place_of(template) is None:
            room: dict[str, int] = {}
            for node in nodes:
                place = node.machine.attribute(template.topology_key) or ""
                room[place] = room.get(place, 0) + node.places(template)
            best = min(room, key=lambda place: (-room[place], place), default=None)
            nodes = [node for node in nodes if node.machine.attribute(template.topology_key) == best]
        return min(nodes, key=lambda node: (-node.places(template), node.machine.id), default=None)

    def _put(self, pod: Pod, node: Node) -> None:
        for name, milli in pod.template.vector.items():
            node.free[name] -= milli
        node.pods[pod.id] = pod
        pod.node = node.machine.id
        del self._waiting[pod.id]

    def _unbind(self, pod: Pod) -> None:
        if pod.node is None:
            return
        node = self.nodes[pod.node]
        for name, milli in pod.template.vector.items():
            node.free[name] += milli
        del node.pods[pod.id]
        pod.node = None

    def _make_room(self, pod: Pod) -> bool:
        """Take pods of lower priority off the node where that costs the fewest; say whether there was one."""
        choices = []
        for node in self._candidates(pod.template):
            victims = _victims(node, pod.template)
            if victims is not None:
                choices.append((len(victims), node.machine.id, victims))
        if not choices:
            return False
        _count, machine_id, victims = min(choices, key=lambda choice: choice[:2])
        self.preemptions += len(victims)
        # Bound before the others look: what was freed is this pod's.
        for victim in victims:
            self._unbind(victim)
        self._put(pod, self.nodes[machine_id])
        self._renew(victims)
        return True


def _victims(node: Node, template: Template) -> list[Pod] | None:
    """Return the fewest pods of lower priority whose leaving makes room on a node, None when that is not enough."""
    lower = [pod for pod in node.pods.values() if pod.template.profile.priority < template.profile.priority]
    free = dict(node.free)
    victims: list[Pod] = []
    for pod in sorted(lower, key=lambda pod: (pod.template.profile.priority, -pod.number)):
        if all(free.get(name, 0) >= milli for name, milli in template.vector.items()):
            break
        victims.append(pod)
        for name, milli in pod.template.vector.items():
            free[name] = free.get(name, 0) + milli
    has_room = all(free.get(name, 0) >= milli for name, milli in template.vector.items())
    return victims if has_room else None


def _request_of(pod: Pod) -> CapacityRequest:
    return replace(pod.template.request, id=pod.id)
