"""Holds the pods and nodes of one simulated cluster: bindings, evictions and replacement pods.

docs/spec/simulation.md, docs/spec/operator.md §11. A workload's controller maintains its number of pods; a pod that
loses its node is replaced by one of another name, which waits. The scheduler binds a waiting pod to a Ready node,
higher priorities first, the pods of a gang in one place; it preempts lower priorities if a pod fits on no node. It does
not know BigFleet. The number of pods is always that of the workloads.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Final, Protocol

from bigfleet.engine.matching import matches
from bigfleet.model import vector
from bigfleet.model.clock import Clock
from bigfleet.model.machine import Machine
from bigfleet.model.quantity import MILLI
from bigfleet.model.vector import Vector
from bigfleet.operator.requests import CapacityRequest
from bigfleet.planner.problem import SchedulerOrder
from bigfleet.sim.pods.evictions import Cause, Eviction
from bigfleet.sim.pods.scheduler import PODS, Node, Pod, Scheduler, Template, do_not_fit, largest_first

#: How long a gang runs in part before its controller restarts it in another place.
GANG_RESTART_SECONDS: Final = 120.0

#: Called with the requests that came and the ids of those that went.
OnChange = Callable[[list[CapacityRequest], list[str]], None]


class Draws(Protocol):
    """A stream of random numbers."""

    def random(self) -> float:
        """Return the next one, from 0 to below 1."""
        ...


def _note_nothing(_eviction: Eviction) -> None:
    """Do nothing."""


class PodCluster:
    """Pods, nodes and a scheduler; every change leaves nothing waiting that could be bound."""

    def __init__(
        self,
        name: str,
        on_change: OnChange,
        *,
        on_evicted: Callable[[Eviction], None] = _note_nothing,
        clock: Clock,
        draws: Draws | None = None,
        order: SchedulerOrder = SchedulerOrder.LEAST_ALLOCATED,
        overhead: Vector = vector.ZERO,
    ) -> None:
        """`on_evicted` is called when pods have lost their node, after the scheduler has placed what it could.

        Without `draws` pods of equal priority are bound in the order in which they were made.

        `overhead` is what DaemonSets take of every node.
        """
        self.name = name
        self.pods: dict[str, Pod] = {}
        #: By machine id.
        self.nodes: dict[str, Node] = {}
        self.overhead = overhead
        #: Nodes that ever joined.
        self.joins = 0
        #: Pods that lost their node to a drain or with the node, and those that made room for a higher priority.
        self.evictions = 0
        self.preemptions = 0
        self.restarts = 0
        self._order = order
        self._scheduler = Scheduler(self.nodes, order)
        self._on_change = on_change
        self._on_evicted = on_evicted
        self._clock = clock
        self._draws = draws
        self._number = 0
        #: Pods by template, oldest first, and those of them that have a node.
        self._by_template: dict[Template, dict[str, Pod]] = {}
        self._bound: dict[Template, dict[str, Pod]] = {}
        self._waiting: dict[str, Pod] = {}
        self._gang_draws: dict[Template, float] = {}

    @property
    def bound(self) -> int:
        """How many pods have a node."""
        return len(self.pods) - len(self._waiting)

    @property
    def waiting(self) -> list[Pod]:
        """The pods without a node, oldest first."""
        return list(self._waiting.values())

    def counts(self, workload: str = "") -> tuple[int, int]:
        """Return the pods that are bound and all pods, of one workload or of all."""
        pods = [pod for pod in self.pods.values() if workload in ("", pod.template.workload)]
        return sum(pod.node is not None for pod in pods), len(pods)

    def machines_running(self, workload: str) -> list[str]:
        """Return the machines that run pods of a workload, ids ascending."""
        return sorted({pod.node for pod in self.pods.values() if pod.node and pod.template.workload == workload})

    def requests(self) -> list[CapacityRequest]:
        """Return what the pods ask for, bound or not."""
        return [_request_of(pod) for pod in self.pods.values()]

    def requested(self, machine_id: str) -> tuple[Vector, int]:
        """Return what the pods on a node request in sum, and how many there are; nothing for a machine without one."""
        node = self.nodes.get(machine_id)
        if node is None:
            return {}, 0
        used = {name: milli - node.free[name] for name, milli in node.capacity.items() if name != PODS}
        return {name: milli for name, milli in used.items() if milli}, len(node.pods)

    def has_joined_for(self, template: Template, after: int) -> bool:
        """Return whether a node that is large enough for a pod, and matches it, has joined after so many others."""
        return any(
            node.number > after
            and vector.covers(node.capacity, template.vector)
            and matches(template.profile, node.machine)
            for node in self.nodes.values()
        )

    def has_room_for(self, template: Template) -> bool:
        """Return whether a schedulable node that matches a pod has room for it."""
        return any(
            not node.is_cordoned and node.places(template) and matches(template.profile, node.machine)
            for node in self.nodes.values()
        )

    def would_run_on(self, template: Template, machine: Machine) -> bool:
        """Return whether the scheduler would put one pod more of a template on a machine that joins, empty."""
        node = Node.of(machine, self.overhead, number=self.joins)
        scheduler = Scheduler({**self.nodes, machine.id: node}, self._order)
        return bool(node.places(template)) and node in scheduler.candidates(template, self._bound_of(template))

    def do_not_fit(self, machine_id: str) -> list[Pod]:
        """Return the pods of a node that would find no place on the other nodes."""
        return self._without_room(machine_id)

    def _without_room(self, machine_id: str) -> list[Pod]:
        node = self.nodes.get(machine_id)
        others = (other for _machine_id, other in sorted(self.nodes.items()))
        return do_not_fit(node, others) if node is not None else []

    def forecast(self, machine_ids: Sequence[str], coming: Iterable[Machine]) -> tuple[str, int] | None:
        """Drain nodes in turn on paper, once machines have come; return the first whose pods do not fit, and how many.

        Each passes the preflight; then the scheduler places its pods. None: all fit.
        """
        nodes = {machine_id: node.copied() for machine_id, node in self.nodes.items()}
        # Their overheads are taken off already.
        nodes.update({machine.id: Node.of(machine, number=self.joins) for machine in coming})
        scheduler = Scheduler(nodes, self._order)
        for machine_id in machine_ids:
            node = nodes.get(machine_id)
            if node is None:
                continue
            stranded = do_not_fit(node, (other for _machine_id, other in sorted(nodes.items())))
            del nodes[machine_id]
            for pod in [] if stranded else largest_first(node):
                bound = [each for other in nodes.values() for each in other.pods.values()]
                target = scheduler.node_for(pod.template, [each for each in bound if each.template is pod.template])
                if target is None:
                    stranded.append(pod)
                else:
                    target.put(Pod(pod.id, pod.template, pod.number, pod.turn))
            if stranded:
                return machine_id, len(stranded)
        return None

    # ---- what others do ------------------------------------------------------------------------------------------

    def resize(self, template: Template, pods: int) -> None:
        """Keep so many pods of a template: waiting ones go first, then the newest."""
        own = self._by_template.setdefault(template, {})
        came = [self._make(template).id for _ in range(pods - len(own))]
        surplus = sorted(own.values(), key=lambda pod: (pod.node is not None, -pod.number))[: max(0, len(own) - pods)]
        for pod in surplus:
            self._remove(pod)
        self._publish_change([self.pods[pod_id] for pod_id in came], surplus)
        self._bind()

    def join(self, machine: Machine) -> None:
        """A machine's node is Ready."""
        self.joins += 1
        self.nodes[machine.id] = Node.of(machine, self.overhead, number=self.joins)
        self._bind()

    def leave(self, machine_id: str, cause: Cause = Cause.LOST) -> None:
        """A machine's node is gone, and its pods with it."""
        self._take(machine_id, cause, is_gone=True)

    def drain(self, machine_id: str, cause: Cause = Cause.RECLAIMED) -> None:
        """Cordon a node and evict its pods."""
        self._take(machine_id, cause, is_gone=False)

    def _take(self, machine_id: str, cause: Cause, *, is_gone: bool) -> None:
        without_room = len(self._without_room(machine_id))
        node = self.nodes.get(machine_id)
        if node is not None:
            node.is_cordoned = True
        waiting, pods = len(self._waiting), self._evict(machine_id)
        if is_gone:
            self.nodes.pop(machine_id, None)
        self._bind()
        if pods:
            left_waiting = max(0, len(self._waiting) - waiting)
            now_seconds = self._clock.monotonic_seconds()
            self._on_evicted(Eviction(now_seconds, self.name, machine_id, cause, pods, left_waiting, without_room))

    def uncordon(self, machine_id: str) -> None:
        """Let pods onto a node again."""
        node = self.nodes.get(machine_id)
        if node is not None:
            node.is_cordoned = False
            self._bind()

    def restart_gangs(self) -> None:
        """Let the controllers of gangs that are stuck in a place without room for the rest start them all over.

        As one does whose pods cannot run alone: it waits for a while, and until another place has room for all.
        """
        now_seconds = self._clock.monotonic_seconds()
        for template, bound in list(self._bound.items()):
            own = self._by_template[template]
            waited = max((now_seconds - p.since_seconds for p in own.values() if p.node is None), default=0.0)
            if not template.topology_key or not bound or waited < GANG_RESTART_SECONDS:
                continue
            if self._scheduler.most_room(template) >= len(own):
                self.restarts += 1
                self._renew(list(own.values()))
                self._bind()

    # ---- pods come and go ----------------------------------------------------------------------------------------

    def _make(self, template: Template) -> Pod:
        self._number += 1
        pod = Pod(
            f"{self.name}-{template.name}-{self._number}",
            template,
            self._number,
            turn=(self._draw_of(template), self._number),
            since_seconds=self._clock.monotonic_seconds(),
        )
        self.pods[pod.id] = self._waiting[pod.id] = pod
        self._by_template.setdefault(template, {})[pod.id] = pod
        return pod

    def _draw_of(self, template: Template) -> float:
        """Return a pod's draw for its place in the queue; a gang comes together."""
        if self._draws is None:
            return 0.0
        if not template.topology_key:
            return self._draws.random()
        return self._gang_draws.setdefault(template, self._draws.random())

    def _remove(self, pod: Pod) -> None:
        self._unbind(pod)
        del self.pods[pod.id], self._by_template[pod.template][pod.id]
        self._waiting.pop(pod.id, None)

    def _publish_change(self, came: Iterable[Pod], went: Iterable[Pod]) -> None:
        add = [_request_of(pod) for pod in came]
        remove = [pod.id for pod in went]
        if add or remove:
            self._on_change(add, remove)

    def _evict(self, machine_id: str) -> int:
        node = self.nodes.get(machine_id)
        pods = largest_first(node) if node is not None else []
        self.evictions += len(pods)
        self._renew(pods)
        return len(pods)

    def _renew(self, lost: list[Pod]) -> None:
        """Replace pods that were lost, as their controllers do; the demand stays the same."""
        for pod in lost:
            self._remove(pod)
        self._publish_change([self._make(pod.template) for pod in lost], lost)

    # ---- the scheduler -------------------------------------------------------------------------------------------

    def _bind(self) -> None:
        """Bind what waits, until nothing more can be bound."""
        while True:
            hopeless: set[Template] = set()
            made_room = False
            for pod in sorted(self._waiting.values(), key=lambda pod: (-pod.template.profile.priority, pod.turn)):
                template = pod.template
                if template in hopeless or template.is_unschedulable:
                    continue
                node = self._scheduler.node_for(template, self._bound_of(template))
                if node is not None:
                    self._put(pod, node)
                elif self._make_room(pod):
                    made_room = True
                else:
                    hopeless.add(template)
            if not made_room:
                return

    def _bound_of(self, template: Template) -> Collection[Pod]:
        return self._bound.setdefault(template, {}).values()

    def _put(self, pod: Pod, node: Node) -> None:
        node.put(pod)
        self._bound.setdefault(pod.template, {})[pod.id] = pod
        del self._waiting[pod.id]

    def _unbind(self, pod: Pod) -> None:
        if pod.node is not None:
            self.nodes[pod.node].remove(pod)
            del self._bound[pod.template][pod.id]

    def _make_room(self, pod: Pod) -> bool:
        """Take pods of lower priority off the node where that costs the fewest; say whether there was one."""
        choices = []
        for node in self._scheduler.candidates(pod.template, self._bound_of(pod.template)):
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
    if template.exclusion and node.excluded[template.exclusion] >= template.max_per_node:
        return None
    lower = [pod for pod in node.pods.values() if pod.template.profile.priority < template.profile.priority]
    free = dict(node.free)
    wanted = dict(template.vector) | ({PODS: MILLI} if PODS in node.capacity else {})
    victims: list[Pod] = []
    for pod in sorted(lower, key=lambda pod: (pod.template.profile.priority, -pod.number)):
        if vector.covers(free, wanted):
            break
        victims.append(pod)
        for name, milli in pod.template.vector.items():
            free[name] = free.get(name, 0) + milli
        free[PODS] = free.get(PODS, 0) + MILLI
    return victims if vector.covers(free, wanted) else None


def _request_of(pod: Pod) -> CapacityRequest:
    return replace(pod.template.request, id=pod.id)
