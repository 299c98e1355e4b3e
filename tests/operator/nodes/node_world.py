"""One cluster for tests of the operator's node side: an API server in memory, its caches, a kubelet, and the parts.

Caches follow the server after `LAG_SECONDS`, as watches do. Pods that terminate are gone after `dwell_seconds`.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from bigfleet.model.frames import DrainResult, NodeStateUpdate, NodeStatus, ReclaimInstruction
from bigfleet.model.states import MachineState
from bigfleet.operator.drains import DrainTable
from bigfleet.operator.kubernetes.api import Resource
from bigfleet.operator.kubernetes.objects import KubernetesObject, NodeObject, PodObject
from bigfleet.operator.kubernetes.resources import (
    AVAILABLE_CAPACITIES,
    NODES,
    PODS,
    RECLAIM_ANNOTATION,
    UPCOMING_NODES,
)
from bigfleet.operator.kubernetes.views import ObjectListener
from bigfleet.operator.nodes.available_capacity import AvailableCapacities
from bigfleet.operator.nodes.budgets import DisruptionBudgets
from bigfleet.operator.nodes.drain_executor import DrainExecutor
from bigfleet.operator.nodes.evictions import EvictionAnswer
from bigfleet.operator.nodes.matching import NodeMatcher
from bigfleet.operator.nodes.pod_index import PodsByNode
from bigfleet.operator.nodes.preflight import Preflight
from bigfleet.operator.nodes.statuses import NodeStatuses
from bigfleet.operator.nodes.upcoming_nodes import UpcomingNodes
from bigfleet.operator.work_queue import WorkQueue
from bigfleet.sim.kernel.virtual_time import LoopClock
from bigfleet.sim.kubernetes.client import InMemoryApi
from bigfleet.sim.kubernetes.kinds import kind_key
from bigfleet.sim.kubernetes.server import InMemoryApiServer
from bigfleet.sim.kubernetes.store import StoredChange

T = TypeVar("T", bound=KubernetesObject)

LAG_SECONDS = 0.05
BUDGET = Resource(
    group="policy",
    version="v1",
    plural="poddisruptionbudgets",
    kind="PodDisruptionBudget",
    namespaced=True,
    type=KubernetesObject,
)


class FollowedView(Generic[T]):
    """A cache of one kind: an ObjectView that follows the server and calls its listeners."""

    def __init__(self, server: InMemoryApiServer, resource: Resource[T]) -> None:
        self._server = server
        self._resource = resource
        self._objects: dict[tuple[str, str], T] = {}
        self._listeners: list[ObjectListener[T]] = []
        self._coming: deque[StoredChange] = deque()
        self._held: list[StoredChange] = []
        self.is_paused = False
        server.store.subscribe(kind_key(resource), self._hear)
        for found in server.read_all(resource):
            self._objects[found.metadata.key] = found

    is_synced = True

    def failing_seconds(self) -> float:
        return 0.0

    def get(self, name: str, namespace: str = "") -> T | None:
        return self._objects.get((namespace, name))

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._objects.values()))

    def __len__(self) -> int:
        return len(self._objects)

    def add(self, listener: ObjectListener[T]) -> None:
        self._listeners.append(listener)
        for found in self._objects.values():
            listener.put(found, None)

    def resume(self) -> None:
        """Deliver what was held back while `is_paused`."""
        self.is_paused = False
        held, self._held = self._held, []
        for change in held:
            self._deliver(change)

    def relist(self) -> None:
        """Go on with a list, as after a lost connection: what came and went while `is_paused` is never shown."""
        held, self._held, self.is_paused = self._held, [], False
        newest = {self._object(change).metadata.key: change for change in held}
        for key, change in newest.items():
            if change.after is not None or key in self._objects:
                self._deliver(change)

    def _hear(self, change: StoredChange) -> None:
        # A watch keeps its order; timers of the same moment do not.
        self._coming.append(change)
        asyncio.get_running_loop().call_later(LAG_SECONDS, lambda: self._deliver(self._coming.popleft()))

    def _deliver(self, change: StoredChange) -> None:
        if self.is_paused:
            self._held.append(change)
            return
        found = self._object(change)
        former = self._objects.pop(found.metadata.key, None)
        if change.after is None:
            for listener in self._listeners:
                listener.remove(former or found)
            return
        self._objects[found.metadata.key] = found
        for listener in self._listeners:
            listener.put(found, former)

    def _object(self, change: StoredChange) -> T:
        given = change.after or change.before
        assert given is not None
        return self._server.decode(self._resource, given)


class Kubelet:
    """Ends pods that terminate."""

    def __init__(self, server: InMemoryApiServer) -> None:
        self._server = server
        self.dwell_seconds = 1.0
        #: Names of pods that never end.
        self.stubborn: set[str] = set()
        server.store.subscribe(kind_key(PODS), self._hear)

    def _hear(self, change: StoredChange) -> None:
        if change.after is None or "deletionTimestamp" not in change.after["metadata"]:
            return
        if change.before is not None and "deletionTimestamp" in change.before["metadata"]:
            return
        metadata = change.after["metadata"]
        if metadata["name"] not in self.stubborn:
            asyncio.get_running_loop().call_later(
                self.dwell_seconds, self._end, metadata["namespace"], metadata["name"]
            )

    def _end(self, namespace: str, name: str) -> None:
        if self._server.read(PODS, name, namespace) is not None:
            self._server.remove(PODS, name, namespace)


class CountingObserver:
    """Counts ends of drains and answers to evictions."""

    def __init__(self) -> None:
        self.ends: list[str] = []
        self.answers: list[str] = []

    def drain_ended(self, outcome: str, seconds: float) -> None:
        assert seconds >= 0
        self.ends.append(outcome)

    def eviction(self, answer: EvictionAnswer) -> None:
        self.answers.append(answer.value)


class Operator:
    """The node side of one operator process; what its session would do, `instruct` and `see` do."""

    def __init__(self, server: InMemoryApiServer, *, force: bool = False, seed: int = 1) -> None:
        self.clock = LoopClock()
        self.api = InMemoryApi(server)
        self.rng = random.Random(seed)
        self.sent: list[NodeStatus] = []
        self.results: list[DrainResult] = []
        self.events: list[tuple[str, str, str]] = []
        self.observer = CountingObserver()
        self.table = DrainTable()
        self.queue = WorkQueue(clock=self.clock, rng=self.rng, workers=8)
        self.matcher = NodeMatcher(api=self.api, queue=self.queue, clock=self.clock)
        self.pods = PodsByNode()
        #: What else hears statuses and results.
        self.on_status: Callable[[NodeStatus], None] = lambda status: None
        self.on_result: Callable[[DrainResult], None] = lambda result: None
        self.statuses = NodeStatuses(nodes=self.matcher, pods=self.pods, clock=self.clock, send=self._send)
        self.upcoming = UpcomingNodes(api=self.api, nodes=self.matcher, queue=self.queue, clock=self.clock)
        self.hints_view = FollowedView(server, AVAILABLE_CAPACITIES)
        self.hints = AvailableCapacities(api=self.api, stored=self.hints_view, queue=self.queue, clock=self.clock)
        self.budgets = DisruptionBudgets(api=self.api, clock=self.clock)
        self.preflight = Preflight(nodes=self.matcher, pods=self.pods, clock=self.clock)
        self.drains = DrainExecutor(
            api=self.api,
            nodes=self.matcher,
            pods=self.pods,
            budgets=self.budgets,
            preflight=self.preflight,
            clock=self.clock,
            rng=self.rng,
            finished=self._finished,
            on_event=lambda node, reason, message: self.events.append((node.metadata.name, reason, message)),
            observer=self.observer,
            force=force,
        )
        self.nodes_view = FollowedView(server, NODES)
        self.pods_view = FollowedView(server, PODS)
        self.upcoming_view = FollowedView(server, UPCOMING_NODES)
        self.nodes_view.add(self.matcher)
        self.pods_view.add(self.pods)
        self.upcoming_view.add(self.upcoming)
        self.resumed = self.drains.resume()
        for drain in self.resumed:
            self.table.resume(drain)
        self._tasks = [asyncio.create_task(part.run()) for part in (self.queue, self.statuses, self.hints, self.drains)]

    async def stop(self) -> None:
        """End the process."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for view in (self.nodes_view, self.pods_view, self.upcoming_view, self.hints_view):
            view.is_paused = True

    def see(self, machine_id: str, state: MachineState, **fields: Any) -> None:
        """Hear a machine's state as a session does."""
        update = NodeStateUpdate(**{"machine_id": machine_id, "cluster_id": "c", "state": state, **fields})
        ended = self.table.observe(machine_id, state)
        if ended is not None:
            self.drains.end(ended, withdrawn=state is MachineState.CONFIGURED)
        self.matcher.node_state(update)
        self.drains.node_state(update)
        self.upcoming.node_state(update)

    def resync(self, *machine_ids: str) -> None:
        """Hear that these machines are all."""
        named = frozenset(machine_ids)
        for ended in self.table.forget_all_but(named):
            self.drains.end(ended, withdrawn=False)
        for part in (self.matcher, self.drains, self.upcoming):
            part.resynced(named)
        self.sent.extend(self.statuses.all())

    def instruct(self, *machine_ids: str, id: str = "i", grace_seconds: int = 60, **fields: Any) -> None:
        """Hear a reclaim instruction; it preempts unless said otherwise, so that no preflight is made."""
        instruction = ReclaimInstruction(
            instruction_id=id,
            nodes=tuple(fields.pop("nodes", machine_ids)),
            machine_ids=machine_ids,
            provider_ids=tuple(fields.pop("provider_ids", [""] * len(machine_ids))),
            grace_seconds=grace_seconds,
            **{"preemptor_priority": 100, "reason": "preempt", **fields},
        )
        for record in self.table.begin(instruction, now_seconds=self.clock.monotonic_seconds()):
            self.upcoming.drain_started(record)
            self.drains.start(record)

    def outcomes(self) -> dict[str, tuple[str, str]]:
        """Return how the drains ended, by machine."""
        return {result.machine_id: (result.outcome.name, result.message) for result in self.results}

    async def result(self, count: int = 1) -> DrainResult:
        """Return the `count`-th result once it is here; an hour is enough for every drain."""
        for _ in range(3600 * 2):
            if len(self.results) >= count:
                return self.results[count - 1]
            await asyncio.sleep(0.5)
        raise AssertionError(f"{len(self.results)} results after an hour")

    def _send(self, status: NodeStatus) -> None:
        self.sent.append(status)
        self.on_status(status)

    def _finished(self, result: DrainResult) -> None:
        self.on_result(result)
        if self.table.finish(result):
            self.results.append(result)
            self.upcoming.drain_finished(result)


class NodeWorld:
    """The cluster and its operators, one after the other."""

    def __init__(self) -> None:
        self.server = InMemoryApiServer(LoopClock())
        self.kubelet = Kubelet(self.server)
        self._operators: list[Operator] = []

    def operator(self, **settings: Any) -> Operator:
        """Start an operator on what is there."""
        operator = Operator(self.server, **settings)
        self._operators.append(operator)
        return operator

    async def stop(self) -> None:
        for operator in self._operators:
            await operator.stop()

    # ---- objects

    def node(self, name: str, machine: str = "", **fields: Any) -> NodeObject:
        """Put a Node that is Ready; `machine` is its machine-id label."""
        return self.server.put(NODES, node_body(name, machine, **fields))

    def pod(self, name: str, node: str = "", **fields: Any) -> PodObject:
        """Put a running pod of namespace `d`."""
        return self.server.put(PODS, pod_body(name, node, **fields))

    def budget(
        self,
        name: str,
        labels: Mapping[str, str],
        max_unavailable: int,
        *,
        desired_healthy: int | None = None,
        expected_pods: int = 0,
        disruptions_allowed: int = 0,
        **fields: str,
    ) -> None:
        """Put a PodDisruptionBudget; `fields` are of its spec, the others are what its controller last wrote."""
        spec = {"selector": {"matchLabels": dict(labels)}, "maxUnavailable": max_unavailable, **fields}
        written = {
            "desiredHealthy": desired_healthy, "expectedPods": expected_pods, "disruptionsAllowed": disruptions_allowed,
        }  # fmt: skip
        status = {} if desired_healthy is None else {"status": written}
        self.server.put(BUDGET, {"metadata": {"name": name, "namespace": "d"}, "spec": spec, **status})

    def read_node(self, name: str) -> NodeObject:
        node = self.server.read(NODES, name)
        assert node is not None
        return node

    def pod_names(self) -> list[str]:
        return [pod.metadata.name for pod in self.server.read_all(PODS)]

    def reclaim_of(self, name: str) -> str | None:
        return (self.read_node(name).metadata.annotations or {}).get(RECLAIM_ANNOTATION)


def node_body(
    name: str,
    machine: str = "",
    *,
    ready: bool = True,
    provider_id: str = "",
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    unschedulable: bool = False,
    taints: list[dict[str, str]] | None = None,
    allocatable: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return a Node as JSON: 8 cpu, 32Gi and 110 pods unless said otherwise."""
    tied = {"bigfleet.lucy.sh/machine-id": machine} if machine else {}
    return {
        "metadata": {
            "name": name,
            "labels": {"kubernetes.io/hostname": name, **tied, **(labels or {})},
            "annotations": {**tied, **(annotations or {})},
        },
        "spec": {
            **({"providerID": provider_id} if provider_id else {}),
            **({"unschedulable": True} if unschedulable else {}),
            **({"taints": taints} if taints else {}),
        },
        "status": {
            "allocatable": dict(allocatable or {"cpu": "8", "memory": "32Gi", "pods": "110"}),
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        },
    }


def pod_body(
    name: str,
    node: str = "",
    *,
    cpu: str = "1",
    owner: str = "ReplicaSet",
    phase: str = "Running",
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    grace_seconds: int = 30,
    ready: bool = False,
    **spec: Any,
) -> dict[str, Any]:
    """Return a pod of namespace `d` as JSON; further keywords are parts of its spec."""
    return {
        "metadata": {
            "name": name,
            "namespace": "d",
            "labels": dict(labels or {}),
            "annotations": dict(annotations or {}),
            "ownerReferences": [
                {"apiVersion": "apps/v1", "kind": owner, "name": "o", "uid": "owner", "controller": True}
            ],
        },
        "spec": {
            "containers": [{"name": "main", "resources": {"requests": {"cpu": cpu}}}],
            **({"nodeName": node} if node else {}),
            "terminationGracePeriodSeconds": grace_seconds,
            **spec,
        },
        "status": {"phase": phase, **({"conditions": [{"type": "Ready", "status": "True"}]} if ready else {})},
    }
