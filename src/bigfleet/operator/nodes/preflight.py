"""Decides whether a node may be drained for a voluntary reclaim: its pods must find room on the other nodes.

A forecast by first fit (`bigfleet.operator.nodes.placement`). Room that was promised to the pods of one drain counts
for no other drain until those pods have moved. Nodes that are being drained offer no room. Many drains may be judged at
once in a large cluster, and other tasks run in the meantime. A forecast begins when its turn comes and is accepted only
if the room is still there at its end. This module reads caches and stores promises; it must never touch a node.
"""

import asyncio
import contextlib
from collections.abc import Callable, Generator, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Final

from bigfleet.model.clock import Clock
from bigfleet.model.quantity import QuantityError, parse_quantity
from bigfleet.operator.kubernetes.objects import NodeObject, PodObject
from bigfleet.operator.kubernetes.pod_requests import requested_by
from bigfleet.operator.kubernetes.resources import RECLAIM_ANNOTATION
from bigfleet.operator.kubernetes.scheduling_rules import host_ports, taken_port
from bigfleet.operator.nodes.matching import NodeMatcher
from bigfleet.operator.nodes.placement import NodeRoom, PlacedPods, PodPlacer, exhaust
from bigfleet.operator.nodes.pod_index import PodKey, PodsByNode, moves_in_a_drain
from bigfleet.operator.nodes.topology_rules import Located, depends_on_others

#: How long room stays promised after its pod has left: until the pod's successor is bound and counts by itself.
PROMISE_SECONDS: Final = 30.0
#: Most that a forecast takes, so that it is never older. A drain that has begun waits no longer than that in all.
PREFLIGHT_SECONDS_MAX: Final = 10.0
#: How much of its grace a drain waits for its forecast, because those of other drains come first.
WAIT_SHARE: Final = 0.5
#: How long a forecast runs before other tasks have their turn: renewing the Lease takes several turns within 10 s.
SLICE_SECONDS: Final = 0.01
#: Nodes whose room is computed between two pauses: some milliseconds.
_NODES_A_STEP: Final = 250


@dataclass(slots=True)
class _Promise:
    """Room on one node for a pod that has to leave another."""

    pod: PodObject
    requests: Mapping[str, int]
    source: str
    target: str
    #: When the pod was first found to be gone; None while it is there.
    gone_seconds: float | None = None


@dataclass(slots=True)
class _Forecast:
    """Where the pods of a node would go, and those for which room was promised before and that need another place."""

    node: NodeObject
    moving: list[PodObject]
    redirected: list[_Promise]
    placement: PlacedPods


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
        #: Held in addition by one that has not begun, so that one that has waits for a single forecast only.
        self._turn_of_new = asyncio.Lock()

    async def judge(
        self,
        machine_id: str,
        node: NodeObject,
        *,
        leaving: Callable[[], Set[str]],
        deadline_seconds: float,
        is_begun: bool = False,
    ) -> str | None:
        """Return what `refusal` returns: one drain after the other, with pauses in which other tasks run.

        `deadline_seconds` is when the drain's grace ends, monotonic. Refuses and promises nothing if there is no
        forecast when `WAIT_SHARE` of the grace is over, at the earliest after `PREFLIGHT_SECONDS_MAX`; for a drain that
        has begun, after `PREFLIGHT_SECONDS_MAX`. If the node is gone or was made again when its turn comes, neither
        refuses nor promises: the drain of such a node ends by its UID.
        """
        asked_seconds = self._clock.monotonic_seconds()
        wait_seconds = PREFLIGHT_SECONDS_MAX
        if not is_begun:
            wait_seconds = max(wait_seconds, (deadline_seconds - asked_seconds) * WAIT_SHARE)
        async with contextlib.nullcontext() if is_begun else self._turn_of_new, self._turn:
            turn_seconds = self._clock.monotonic_seconds()
            until_seconds = min(asked_seconds + wait_seconds, turn_seconds + PREFLIGHT_SECONDS_MAX)
            while self._clock.monotonic_seconds() < until_seconds:
                present = self._nodes.node(node.metadata.name)
                if present is None or present.metadata.uid != node.metadata.uid:
                    return None
                steps = self._steps(present, leaving(), is_begun=is_begun)
                forecast = await self._in_slices(steps, until_seconds)
                if forecast is None:
                    break
                if forecast.placement.unplaced is not None:
                    return forecast.placement.unplaced.text
                if not self._is_outdated(forecast, leaving(), is_begun=is_begun):
                    self._promise(machine_id, forecast)
                    return None
        if until_seconds < asked_seconds + wait_seconds:
            return f"its forecast took longer than {PREFLIGHT_SECONDS_MAX:g} s"
        return f"its forecast, with those of other drains before it, took longer than {wait_seconds:.0f} s"

    async def _in_slices(self, steps: Generator[None, None, _Forecast], until_seconds: float) -> _Forecast | None:
        """Return the forecast, None once the time is over; other tasks run before each slice."""
        while self._clock.monotonic_seconds() < until_seconds:
            await self._clock.sleep(0)
            slice_seconds = self._clock.monotonic_seconds()
            try:
                while True:
                    next(steps)
                    if self._clock.monotonic_seconds() - slice_seconds >= SLICE_SECONDS:
                        break
            except StopIteration as end:
                forecast: _Forecast = end.value
                return forecast
        return None

    def refusal(self, machine_id: str, node: NodeObject, *, leaving: Set[str], is_begun: bool = False) -> str | None:
        """Return why the node's pods would not fit elsewhere; None accepts, and promises them their room.

        `leaving` are the names of all nodes that are drained or are about to be. Of a drain that has begun, pods that
        terminate need room as well: what takes their place may not be there yet. The text names the first pod that
        fits nowhere.
        """
        forecast = exhaust(self._steps(node, leaving, is_begun=is_begun))
        if forecast.placement.unplaced is not None:
            return forecast.placement.unplaced.text
        self._promise(machine_id, forecast)
        return None

    def _moving(self, node: NodeObject, *, is_begun: bool) -> list[PodObject]:
        pods = self._pods.on(node.metadata.name).pods.values()
        return [pod for pod in pods if moves_in_a_drain(pod) and (is_begun or not pod.is_terminating)]

    def _steps(self, node: NodeObject, leaving: Set[str], *, is_begun: bool) -> Generator[None, None, _Forecast]:
        self._prune()
        name = node.metadata.name
        away = {*leaving, name}
        moving = self._moving(node, is_begun=is_begun)
        # Pods that were to come here need another place; where others fit may depend on the pods that leave now.
        redirected = [
            promise
            for promise in self._all_promises()
            if promise.gone_seconds is None and (promise.target == name or depends_on_others(promise.pod))
        ]
        everyone = {pod.metadata.key: pod for pod in (*(p.pod for p in redirected), *moving)}
        placer = yield from self._fit(away, self._all_but(redirected))
        placement = yield from placer.steps(everyone.values(), size=share_of(node))
        return _Forecast(node, moving, redirected, placement)

    def _promise(self, machine_id: str, forecast: _Forecast) -> None:
        assigned = forecast.placement.assigned
        for promise in forecast.redirected:
            promise.target = assigned[promise.pod.metadata.key]
        self._promises[machine_id] = [
            _Promise(pod, requested_by(pod.spec), forecast.node.metadata.name, assigned[pod.metadata.key])
            for pod in forecast.moving
        ]

    def _is_outdated(self, forecast: _Forecast, leaving: Set[str], *, is_begun: bool) -> bool:
        """Return whether the node has other pods by now, or some room of the forecast is no longer there.

        Rules about other pods are not evaluated again.
        """
        name = forecast.node.metadata.name
        known = {pod.metadata.uid for pod in forecast.moving}
        if any(pod.metadata.uid not in known for pod in self._moving(forecast.node, is_begun=is_begun)):
            return True
        pods = {pod.metadata.key: pod for pod in (*(p.pod for p in forecast.redirected), *forecast.moving)}
        wanted = [(pods[key].spec, target) for key, target in forecast.placement.assigned.items()]
        targets = {target for _spec, target in wanted}
        if not targets.isdisjoint({*leaving, name}):
            return True
        rooms: dict[str, NodeRoom] = {}
        for target in targets:
            node = self._nodes.node(target)
            if node is None or not _takes_pods(node):
                return True
            rooms[target] = NodeRoom.of(node, self._pods.on(target))
        for promise in self._all_but(forecast.redirected):
            if promise.target in rooms:
                rooms[promise.target].take(promise.requests, host_ports(promise.pod.spec))
        for spec, target in wanted:
            room, requests, ports = rooms[target], requested_by(spec), host_ports(spec)
            if room.lacks(requests) is not None or taken_port(ports, room.ports) is not None:
                return True
            room.take(requests, ports)
        return False

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
        return exhaust(self._rooms(away, list(self._all_promises())))

    def _rooms(
        self, away: Set[str], promises: list[_Promise]
    ) -> Generator[None, None, tuple[dict[str, NodeRoom], dict[str, NodeObject], list[Located]]]:
        staying = {n.metadata.name: n for n in self._nodes.nodes() if n.metadata.name not in away}
        rooms = {}
        for position, name in enumerate(sorted(staying), 1):
            node = staying[name]
            if _takes_pods(node):
                rooms[name] = NodeRoom.of(node, self._pods.on(name))
            if position % _NODES_A_STEP == 0:
                yield
        promised: list[Located] = []
        for promise in promises:
            room = rooms.get(promise.target)
            if room is not None:
                room.take(promise.requests, host_ports(promise.pod.spec))
                promised.append((promise.pod, room.node))
        return rooms, staying, promised

    def _fit(self, away: Set[str], promises: list[_Promise]) -> Generator[None, None, PodPlacer]:
        rooms, staying, promised = yield from self._rooms(away, promises)

        def residents() -> Iterable[Located]:
            for name, node in staying.items():
                # A copy: the pods of a node may change between two steps.
                for pod in tuple(self._pods.on(name).pods.values()):
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

    def _all_but(self, redirected: Iterable[_Promise]) -> list[_Promise]:
        ids = {id(promise) for promise in redirected}
        return [promise for promise in self._all_promises() if id(promise) not in ids]

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
