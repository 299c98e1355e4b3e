"""Places the pods of a cluster on its machines one by one, as kube-scheduler does, and counts those without a place.

The filters and the score are those of `bigfleet.sim.pods.scheduler`. Higher priorities come first, then older pods.
Nothing is preempted and no pod moves once it is placed. A shard's claims play no part.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from bigfleet.engine.matching import matches
from bigfleet.model.machine import Machine
from bigfleet.model.vector import vector_key
from bigfleet.operator.requests import CapacityRequest, MappedRequest, map_request
from bigfleet.planner.problem import SchedulerOrder
from bigfleet.sim.pods.scheduler import Node, Pod, Scheduler, Template


@dataclass(frozen=True, slots=True, kw_only=True)
class PodCounts:
    """How many pods of one cluster have a place."""

    pods: int
    #: Without a place on the machines that are Configured.
    unplaced: int
    #: Those of them that have a place on the machines that boot for the cluster.
    booting: int


def count_unplaced(
    requests: Iterable[CapacityRequest],
    *,
    machines: Iterable[Machine],
    booting: Iterable[Machine] = (),
    order: SchedulerOrder = SchedulerOrder.LEAST_ALLOCATED,
) -> PodCounts:
    """Place the pods on `machines`, then those that are left on `booting`. Raises UnmappableRequest."""
    pods = list(_pods(requests))
    placement = _Placement(machines, order)
    left = placement.place(pods)
    placement.add(booting)
    waiting = placement.place(left)
    return PodCounts(pods=len(pods), unplaced=len(left), booting=len(left) - len(waiting))


def _pods(requests: Iterable[CapacityRequest]) -> Iterator[Pod]:
    """Yield a pod for each request, in the order of the scheduler's queue; equal requests share a template."""
    templates: dict[object, Template] = {}
    queued: list[Pod] = []
    for number, request in enumerate(requests):
        kind = _kind_of(map_request(request))
        template = templates.get(kind)
        if template is None:
            template = templates[kind] = Template.of("", str(len(templates)), request)
        queued.append(Pod(str(number), template, number, turn=(0.0, number)))
    yield from sorted(queued, key=lambda pod: (-pod.template.profile.priority, pod.number))


def _kind_of(mapped: MappedRequest) -> object:
    limits = (mapped.exclusion, mapped.max_per_machine)
    return mapped.profile.fingerprint, mapped.group, vector_key(mapped.vector), *limits


class _Placement:
    """Nodes that pods are placed on; a node only fills up."""

    def __init__(self, machines: Iterable[Machine], order: SchedulerOrder) -> None:
        self._order = order
        self._nodes: dict[str, Node] = {}
        self._scheduler = Scheduler(self._nodes, order)
        self._bound: dict[Template, list[Pod]] = {}
        #: By template: (score negated, machine id) of each node that may have room, at the score it once had.
        self._ranked: dict[Template, list[tuple[int, str]]] = {}
        self.add(machines)

    def add(self, machines: Iterable[Machine]) -> None:
        """Let empty nodes join."""
        self._nodes.update((machine.id, Node.of(machine)) for machine in machines)
        self._ranked.clear()

    def place(self, pods: Iterable[Pod]) -> list[Pod]:
        """Place pods in their order; return those without a place."""
        left: list[Pod] = []
        hopeless: set[Template] = set()
        for pod in pods:
            node = None if pod.template in hopeless else self._node_for(pod.template)
            if node is None:
                # No node gains room, so that an equal pod has no place either.
                hopeless.add(pod.template)
                left.append(pod)
                continue
            node.put(pod)
            self._bound.setdefault(pod.template, []).append(pod)
        return left

    def _node_for(self, template: Template) -> Node | None:
        """Return the node that the scheduler picks; the short way finds the same one in less time."""
        is_tied = template.topology_key or template.profile.strict_spread is not None
        if is_tied or self._order is not SchedulerOrder.LEAST_ALLOCATED:
            return self._scheduler.node_for(template, self._bound.get(template, ()))
        return self._least_allocated(template)

    def _least_allocated(self, template: Template) -> Node | None:
        # Scores only fall as nodes fill up: the first node whose score still holds is the best.
        ranked = self._ranked.get(template)
        if ranked is None:
            ranked = self._ranked[template] = list(self._rank(template, self._nodes))
            heapq.heapify(ranked)
        while ranked:
            known, machine_id = ranked[0]
            node = self._nodes[machine_id]
            if not node.places(template):
                heapq.heappop(ranked)
                continue
            score = -node.score(template, self._order)
            if score == known:
                return node
            heapq.heapreplace(ranked, (score, machine_id))
        return None

    def _rank(self, template: Template, nodes: Mapping[str, Node]) -> Iterator[tuple[int, str]]:
        for machine_id, node in nodes.items():
            if node.places(template) and matches(template.profile, node.machine):
                yield -node.score(template, self._order), machine_id
