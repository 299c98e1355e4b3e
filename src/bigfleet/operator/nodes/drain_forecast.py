"""Forecasts whether the pods of nodes would find a place if these were drained, once other nodes have come.

docs/spec/operator.md §7.6. The nodes are drained in turn on paper: each passes the preflight of its drain, then the
scheduler's order places its pods, which takes room from the next. One request is answered at a time; a newer one takes
the place of one that waits. This module reads caches and must never touch a node.
"""

import asyncio
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from typing import Final

import structlog

from bigfleet.model.clock import Clock
from bigfleet.model.frames import ComingNodes, DrainForecast, DrainForecastRequest, ForecastOutcome
from bigfleet.operator.kubernetes.objects import (
    NodeObject,
    NodeObjectStatus,
    NodeSpec,
    NodeTaint,
    ObjectMeta,
)
from bigfleet.operator.nodes.budgets import DisruptionBudgets
from bigfleet.operator.nodes.matching import NodeMatcher
from bigfleet.operator.nodes.placement import NodeRoom, PodPlacer, RoomScore
from bigfleet.operator.nodes.pod_index import PodKey, PodsByNode, PodsOnNode, leaving_pods, moves_in_a_drain
from bigfleet.operator.nodes.preflight import Preflight, share_of
from bigfleet.operator.nodes.topology_rules import Located

#: Pods on nodes that would be drained × nodes that stay. More would hold up the operator for seconds.
FORECAST_CHECKS_MAX: Final = 200_000
#: Nodes that would come.
FORECAST_COMING_MAX: Final = 1_000
#: What a kubelet allows where nothing else is said.
_PODS_DEFAULT: Final = "110"
_HOSTNAME: Final = "kubernetes.io/hostname"
_SCORED: Final = ("cpu", "memory")
_SCORE_MAX: Final = 100
_MOST_ALLOCATED: Final = "most-allocated"

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Cluster:
    """A cluster on paper: what stays of it, and the pods that have moved."""

    rooms: dict[str, NodeRoom]
    staying: dict[str, NodeObject]
    moved: dict[PodKey, Located] = field(default_factory=dict)

    def leave(self, node: NodeObject) -> None:
        """Take a node away."""
        self.rooms.pop(node.metadata.name, None)
        self.staying.pop(node.metadata.name, None)


class DrainForecaster:
    """The forecasts of one cluster."""

    def __init__(
        self,
        *,
        nodes: NodeMatcher,
        pods: PodsByNode,
        budgets: DisruptionBudgets,
        preflight: Preflight,
        leaving: Callable[[], Set[str]],
        clock: Clock,
        answer: Callable[[DrainForecast], None],
    ) -> None:
        """`leaving` returns the names of the nodes that are drained or are about to be."""
        self._nodes = nodes
        self._pods = pods
        self._budgets = budgets
        self._preflight = preflight
        self._leaving = leaving
        self._clock = clock
        self._answer = answer
        self._waiting: DrainForecastRequest | None = None
        self._asked = asyncio.Event()

    def ask(self, request: DrainForecastRequest) -> None:
        """Answer a request soon, in place of one that waits."""
        self._waiting = request
        self._asked.set()

    async def run(self) -> None:
        """Answer requests until cancelled."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            request, self._waiting = self._waiting, None
            if request is None:
                continue
            try:
                answer = await self.forecast(request)
            except Exception as error:
                # A fault of ours must not end the operator.
                log.exception("drain.forecast_failed", request=request.request_id)
                answer = _unknown(request, f"the operator failed: {type(error).__name__}; see its log")
            log.info(
                "drain.forecast",
                machines=len(request.machine_ids),
                outcome=answer.outcome.name,
                machine=answer.machine_id,
                reason=answer.message,
            )
            self._answer(answer)

    async def forecast(self, request: DrainForecastRequest) -> DrainForecast:
        """Return whether all pods of the nodes would find a place."""
        nodes: list[tuple[str, NodeObject]] = []
        for machine_id in request.machine_ids:
            node = self._nodes.node_of(machine_id)
            if node is None:
                return _unknown(request, f"no node of machine {machine_id}")
            nodes.append((machine_id, node))
        coming = sum(max(0, each.count) for each in request.comes)
        if coming > FORECAST_COMING_MAX:
            return _unknown(request, f"{coming} nodes would come, at most {FORECAST_COMING_MAX} are forecast")
        for machine_id, node in nodes:
            why_never = await self._budgets.why_never(leaving_pods(self._pods.on(node.metadata.name)))
            if why_never is not None:
                return _would_not_fit(request, machine_id, why_never)
        cluster = self._cluster(request.comes)
        checks = sum(len(self._pods.on(node.metadata.name).pods) for _, node in nodes) * len(cluster.rooms)
        if checks > FORECAST_CHECKS_MAX:
            return _unknown(request, f"{checks} placements would be tried, at most {FORECAST_CHECKS_MAX} are")
        score = _score(is_most_allocated=request.scheduler == _MOST_ALLOCATED)
        for machine_id, node in nodes:
            fault = self._drain(cluster, node, score)
            if fault is not None:
                return _would_not_fit(request, machine_id, fault)
            # Sessions and drains have their turn between two nodes.
            await self._clock.sleep(0)
        return DrainForecast(request_id=request.request_id, outcome=ForecastOutcome.FITS)

    def _cluster(self, comes: Iterable[ComingNodes]) -> _Cluster:
        """Return the cluster with the nodes that come; pods of drains under way are where they have room."""
        rooms, staying, promised = self._preflight.rooms(self._leaving())
        cluster = _Cluster(rooms, staying)
        for pod, node in promised:
            cluster.moved[pod.metadata.key] = (pod, node)
        for position, kind in enumerate(comes):
            for number in range(kind.count):
                node = _coming_node(f"coming-{position}-{number}", kind)
                cluster.staying[node.metadata.name] = node
                cluster.rooms[node.metadata.name] = NodeRoom.of(node, PodsOnNode())
        return cluster

    def _drain(self, cluster: _Cluster, node: NodeObject, score: RoomScore) -> str | None:
        """Drain a node on paper; return why its pods do not all find a place."""
        cluster.leave(node)
        own = (pod for key, pod in self._pods.on(node.metadata.name).pods.items() if key not in cluster.moved)
        moving = [pod for pod in own if moves_in_a_drain(pod) and not pod.is_terminating]
        came = [pod for pod, at in cluster.moved.values() if at.metadata.name == node.metadata.name]
        for pod in came:
            del cluster.moved[pod.metadata.key]
        moving += came
        copies = tuple(room.copy() for room in cluster.rooms.values())
        first_fit = self._placer(cluster, copies, None).place(moving, size=share_of(node))
        if first_fit.unplaced is not None:
            return first_fit.unplaced.text
        # The rooms themselves are used up: the next node finds what is left.
        scheduled = self._placer(cluster, tuple(cluster.rooms.values()), score).place(moving, size=share_of(node))
        if scheduled.unplaced is not None:
            pod = scheduled.unplaced.pod
            reason = scheduled.unplaced.reason
            return f"pod {'/'.join(pod.metadata.key)} would wait in the scheduler's order: {reason}"
        for pod in moving:
            target = scheduled.assigned[pod.metadata.key]
            cluster.moved[pod.metadata.key] = (pod, cluster.staying[target])
        return None

    def _placer(self, cluster: _Cluster, rooms: tuple[NodeRoom, ...], score: RoomScore | None) -> PodPlacer:
        moved = cluster.moved

        def residents() -> Iterable[Located]:
            for name, node in cluster.staying.items():
                for key, pod in self._pods.on(name).pods.items():
                    if key not in moved:
                        yield pod, node
            yield from moved.values()

        staying = cluster.staying
        anti_affine: list[Located] = [
            (pod, staying[pod.spec.node_name])
            for pod in self._pods.anti_affine()
            if pod.spec.node_name in staying and pod.metadata.key not in moved
        ]
        return PodPlacer(
            rooms,
            residents=residents,
            anti_affine=[*anti_affine, *moved.values()],
            nodes=tuple(staying.values()),
            score=score,
        )


def _score(*, is_most_allocated: bool) -> RoomScore:
    """Return how kube-scheduler scores a node for a pod: by the mean free share of cpu and memory, or the used one."""

    def score(room: NodeRoom, requests: "dict[str, int]") -> int:
        parts = []
        for name in _SCORED:
            capacity = room.capacity.get(name, 0)
            if capacity > 0:
                free = room.free.get(name, 0) - requests.get(name, 0)
                part = capacity - free if is_most_allocated else free
                parts.append(part * _SCORE_MAX // capacity)
        return sum(parts) // max(1, len(parts))

    return score


def _coming_node(name: str, kind: ComingNodes) -> NodeObject:
    """Return a node as it will be when it is Ready."""
    return NodeObject(
        metadata=ObjectMeta(name=name, uid=name, labels={_HOSTNAME: name, **kind.labels}),
        spec=NodeSpec(taints=[NodeTaint(taint.key, taint.value, taint.effect) for taint in kind.taints]),
        status=NodeObjectStatus(allocatable={"pods": _PODS_DEFAULT, **kind.resources}),
    )


def _would_not_fit(request: DrainForecastRequest, machine_id: str, why: str) -> DrainForecast:
    outcome = ForecastOutcome.WOULD_NOT_FIT
    return DrainForecast(request_id=request.request_id, outcome=outcome, machine_id=machine_id, message=why)


def _unknown(request: DrainForecastRequest, why: str) -> DrainForecast:
    return DrainForecast(request_id=request.request_id, outcome=ForecastOutcome.UNSPECIFIED, message=why)
