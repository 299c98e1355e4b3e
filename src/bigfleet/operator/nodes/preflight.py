"""Decides whether a node may be drained for a voluntary reclaim: its pods must find room on the other nodes.

A forecast by first fit (`bigfleet.operator.nodes.placement`). Room that was promised to the pods of one drain counts
for no other drain until those pods have moved. Nodes that are being drained offer no room. Many drains may be judged at
once in a large cluster, and other tasks run in the meantime. This module reads caches and stores promises; it must
never touch a node.
"""

import asyncio
from collections.abc import Callable, Generator, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Final

from bigfleet.model.clock import Clock
from bigfleet.model.quantity import QuantityError, parse_quantity
from bigfleet.operator.kubernetes.objects import NodeObject, PodObject
from bigfleet.operator.kubernetes.pod_requests import requested_by
from bigfleet.operator.kubernetes.resources import RECLAIM_ANNOTATION
from bigfleet.operator.nodes.matching import NodeMatcher
from bigfleet.operator.nodes.placement import NodeRoom, PodPlacer, exhaust
from bigfleet.operator.nodes.pod_index import PodKey, PodsByNode, moves_in_a_drain
from bigfleet.operator.nodes.topology_rules import Located, depends_on_others

#: How long room stays promised after its pod has left: until the pod's successor is bound and counts by itself.
PROMISE_SECONDS: Final = 30.0
#: Most that a drain waits for its forecast, those of other drains before it among it. The time is taken from its grace.
PREFLIGHT_SECONDS_MAX: Final = 10.0
#: How long a forecast runs before other tasks have their turn: renewing the Lease takes several turns within 10 s.
SLICE_SECONDS: Final = 0.1


@dataclass(slots=True)
class _Promise:
    """Room on one node for a pod that has to leave another."""

    pod: PodObject
    source: str
    target: str
    #: When the pod was first found to be gone; None while it is there.
    gone_seconds: float | None = None


class Preflight:
    """The forecasts of one cluster, and the promises that follow from them."""

    def __init__(self, *, nodes: NodeMatcher, pods: PodsByNode, clock: Clock) -> None:
        self._nodes = nodes
        self._pods = pods
        self._clock = clock
        #: By the machine whose drain was accepted.
        self._promises: dict[str, list[_Promise]] = {}
        #: Held by the drain that is judged: another one must find what it was promised.
        self._turn = asyncio.Lock()

    async def judge(
        self, machine_id: str, node: NodeObject, *, leaving: Callable[[], Set[str]], is_begun: bool = False
    ) -> str | None:
        """Return what `refusal` returns: one drain after the other, with pauses in which other tasks run.

        Refuses and promises nothing once `PREFLIGHT_SECONDS_MAX` are over.
        """
        asked_seconds = self._clock.monotonic_seconds()
        async with self._turn:
            steps = self._steps(machine_id, node, leaving(), is_begun=is_begun)
            while self._clock.monotonic_seconds() - asked_seconds < PREFLIGHT_SECONDS_MAX:
                await self._clock.sleep(0)
                slice_seconds = self._clock.monotonic_seconds()
                try:
                    while True:
                        next(steps)
                        if self._clock.monotonic_seconds() - slice_seconds >= SLICE_SECONDS:
                            break
                except StopIteration as end:
                    refusal: str | None = end.value
                    return refusal
        return f"its forecast, with those of other drains before it, took longer than {PREFLIGHT_SECONDS_MAX:g} s"

    def refusal(self, machine_id: str, node: NodeObject, *, leaving: Set[str], is_begun: bool = False) -> str | None:
        """Say why the node's pods would not fit elsewhere; None accepts, and promises them their room.

        `leaving` are the names of all nodes that are drained or are about to be. Of a drain that has begun, pods that
        terminate need room as well: what takes their place may not be there yet. The text names the first pod that
        fits nowhere.
        """
        return exhaust(self._steps(machine_id, node, leaving, is_begun=is_begun))

    def _steps(
        self, machine_id: str, node: NodeObject, leaving: Set[str], *, is_begun: bool
    ) -> Generator[None, None, str | None]:
        self._prune()
        name = node.metadata.name
        away = {*leaving, name}
        pods = [pod for pod in self._pods.on(name).pods.values() if moves_in_a_drain(pod)]
        moving = [pod for pod in pods if is_begun or not pod.is_terminating]
        # Pods that were to come here need another place; where others fit may depend on the pods that leave now.
        redirected = [
            promise
            for promise in self._all_promises()
            if promise.gone_seconds is None and (promise.target == name or depends_on_others(promise.pod))
        ]
        everyone = {pod.metadata.key: pod for pod in (*(p.pod for p in redirected), *moving)}
        redirected_ids = {id(promise) for promise in redirected}
        staying = [promise for promise in self._all_promises() if id(promise) not in redirected_ids]
        placement = yield from self._fit(away, staying).steps(everyone.values(), size=share_of(node))
        if placement.unplaced is not None:
            return placement.unplaced.text
        for promise in redirected:
            promise.target = placement.assigned[promise.pod.metadata.key]
        self._promises[machine_id] = [_Promise(pod, name, placement.assigned[pod.metadata.key]) for pod in moving]
        return None

    def promised(self, machine_id: str) -> dict[PodKey, str]:
        """Return where the pods of a machine's accepted drain have room, by node name."""
        return {promise.pod.metadata.key: promise.target for promise in self._promises.get(machine_id, ())}

    def release(self, machine_id: str) -> None:
        """Take back the room that was promised for a machine's drain: it was withdrawn."""
        self._promises.pop(machine_id, None)

    def rooms(self, away: Set[str]) -> tuple[dict[str, NodeRoom], dict[str, NodeObject], list[Located]]:
        """Return the room on each schedulable node that stays, all nodes that stay, and promised pods.

        The room that is promised to pods is taken.
        """
        self._prune()
        return self._rooms(away, self._all_promises())

    def _rooms(
        self, away: Set[str], promises: Iterable[_Promise]
    ) -> tuple[dict[str, NodeRoom], dict[str, NodeObject], list[Located]]:
        staying = {n.metadata.name: n for n in self._nodes.nodes() if n.metadata.name not in away}
        rooms = {}
        for name in sorted(staying):
            node = staying[name]
            if _takes_pods(node):
                load = self._pods.on(name)
                rooms[name] = NodeRoom.of(node, load.requested, len(load.pods))
        promised: list[Located] = []
        for promise in promises:
            room = rooms.get(promise.target)
            if room is not None:
                room.take(requested_by(promise.pod.spec))
                promised.append((promise.pod, room.node))
        return rooms, staying, promised

    def _fit(self, away: Set[str], promises: Iterable[_Promise]) -> PodPlacer:
        rooms, staying, promised = self._rooms(away, promises)

        def residents() -> Iterable[Located]:
            for name, node in staying.items():
                for pod in self._pods.on(name).pods.values():
                    yield pod, node
            yield from promised

        anti_affine: list[Located] = [
            (pod, staying[pod.spec.node_name]) for pod in self._pods.anti_affine() if pod.spec.node_name in staying
        ]
        return PodPlacer(
            tuple(rooms.values()),
            residents=residents,
            anti_affine=[*anti_affine, *promised],
            nodes=tuple(staying.values()),
        )

    def _all_promises(self) -> Iterable[_Promise]:
        for promises in self._promises.values():
            yield from promises

    def _prune(self) -> None:
        """Forget promises whose pods left long enough ago."""
        now_seconds = self._clock.monotonic_seconds()
        for machine_id, promises in list(self._promises.items()):
            for promise in promises:
                here = self._pods.on(promise.source).pods.get(promise.pod.metadata.key)
                if promise.gone_seconds is None and (here is None or here.metadata.uid != promise.pod.metadata.uid):
                    promise.gone_seconds = now_seconds
            left = [p for p in promises if p.gone_seconds is None or now_seconds - p.gone_seconds < PROMISE_SECONDS]
            if left:
                self._promises[machine_id] = left
            else:
                del self._promises[machine_id]


def _takes_pods(node: NodeObject) -> bool:
    """Return whether the scheduler may put pods on the node, and it is not about to be drained by a former leader."""
    return (
        node.is_ready
        and not node.spec.unschedulable
        and node.metadata.deletion_timestamp is None
        and RECLAIM_ANNOTATION not in (node.metadata.annotations or {})
    )


def share_of(node: NodeObject) -> Callable[[Mapping[str, int]], float]:
    """Return a measure of requests: their largest share of the node's allocatable resources."""
    allocatable: dict[str, int] = {}
    for name, quantity in (node.status.allocatable or {}).items():
        try:
            allocatable[name] = parse_quantity(str(quantity))
        except QuantityError:
            continue

    def share(requests: Mapping[str, int]) -> float:
        # What the node itself does not have is the scarcest of all.
        return max((milli / (allocatable.get(name) or 1) for name, milli in requests.items()), default=0.0)

    return share
