"""Simulates the kubelets of many machines: registers Nodes, renews their Leases, and reports pods as running or ended.

One object serves all nodes of a cluster with one watch of pods. It never schedules a pod and never evicts one.
`remove_node` and `silence_node` end its work for a machine.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

import structlog

from bigfleet.demo.kubernetes.fake_node import (
    NODE_LEASE_NAMESPACE,
    FakeNode,
    lease_body,
    node_body,
    node_conditions,
    run_seconds,
    running_status,
    succeeded_status,
    termination_seconds,
)
from bigfleet.model.clock import Clock
from bigfleet.model.ids import Rng
from bigfleet.operator.kubernetes.api import ApiError, JsonObject, KubernetesApi, PatchKind
from bigfleet.operator.kubernetes.objects import PodObject
from bigfleet.operator.kubernetes.reflector import Reflector
from bigfleet.operator.kubernetes.resources import LEASES, NODES, PODS

FIELD_MANAGER: Final = "bigfleet-fake-kubelet"
#: Pods that are bound to some node; the API server selects them.
_BOUND: Final = "spec.nodeName!="
_RETRY_SECONDS: Final = 1.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeletSettings:
    """How fast the machines do what they do."""

    #: Less than a third of the Lease's 40 s.
    heartbeat_seconds: float = 10.0
    #: From the binding of a pod until it runs.
    start_seconds: float = 0.0
    #: A pod that is being deleted ends after its grace period, but not later than this.
    termination_seconds_max: float = 0.5
    #: Requests that are under way at once.
    requests_max: int = 16


class _Step(Enum):
    """What a kubelet does to a pod; each but RESTORE happens once in a pod's life."""

    START = "start"
    #: Report as Ready again a pod that the node controller reported as not Ready while the heartbeats were late.
    RESTORE = "restore"
    FINISH = "finish"
    TERMINATE = "terminate"


@dataclass(slots=True)
class _NodeRun:
    """One machine that was added."""

    node: FakeNode
    ready: bool = False
    #: Whether its Node has been created.
    joined: bool = False
    #: Whether it is cut off: it reports nothing and its pods stay as they are.
    silent: bool = False
    #: Whether it has vanished: it reports nothing again, not even what is being repeated.
    removed: bool = False
    #: When its Lease was last renewed.
    renewed_seconds: float = 0.0
    join: asyncio.Task[None] | None = None
    #: Held while its Node or Lease is written, so that a write never lands after their deletion.
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(slots=True)
class _PodRun:
    """One pod that is bound to a node, as last seen."""

    pod: PodObject
    steps: dict[_Step, asyncio.Task[None]] = field(default_factory=dict)


def next_step(pod: PodObject) -> _Step | None:
    """Return what a kubelet does with a pod of its node now."""
    if pod.is_terminating:
        return _Step.TERMINATE
    if pod.is_finished:
        return None
    if pod.status.phase != "Running":
        return _Step.START
    if any(each.type == "Ready" and each.status == "False" for each in pod.status.conditions or ()):
        return _Step.RESTORE
    return None if run_seconds(pod) is None else _Step.FINISH


class FakeKubelet:
    """The kubelets of all machines of one cluster.

    Nodes may be added and removed at any time on the loop of `run`. Requests that fail are repeated every second.
    """

    def __init__(self, api: KubernetesApi, *, clock: Clock, rng: Rng, settings: KubeletSettings | None = None) -> None:
        self._api = api
        self._clock = clock
        self._settings = settings or KubeletSettings()
        self._nodes: dict[str, _NodeRun] = {}
        #: Every bound pod, by node and UID, also of nodes that are not ours yet.
        self._pods: dict[str, dict[str, _PodRun]] = {}
        self._slots = asyncio.Semaphore(self._settings.requests_max)
        self._bound_pods = Reflector(api, PODS, clock=clock, rng=rng, field_selector=_BOUND)
        self._bound_pods.add_listener(self)

    @property
    def nodes(self) -> dict[str, FakeNode]:
        """The machines that were added and not removed, by name."""
        return {name: run.node for name, run in self._nodes.items()}

    async def run(self) -> None:
        """Serve all nodes until this is cancelled; the Nodes and pods stay in the cluster then."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._bound_pods.run(), name="fake-kubelet-pods")
                tasks.create_task(self._send_heartbeats(), name="fake-kubelet-heartbeats")
        finally:
            pending = [run.join for run in self._nodes.values() if run.join is not None]
            pending += [step for pods in self._pods.values() for run in pods.values() for step in run.steps.values()]
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    # ---- machines

    def add_node(self, node: FakeNode) -> None:
        """Let a machine boot: its Node appears and becomes Ready as `node` says. Raises ValueError for a known name."""
        if node.name in self._nodes:
            raise ValueError(f"node {node.name} was added already")
        run = self._nodes[node.name] = _NodeRun(node)
        run.join = asyncio.create_task(self._join(run), name=f"fake-kubelet-join-{node.name}")

    async def remove_node(self, name: str, *, delete_objects: bool = True) -> None:
        """Let a machine vanish; return when its Node, its Lease and its pods are deleted.

        In a cloud the cloud provider deletes the Node and garbage collection its pods; without `delete_objects` they
        stay. An unknown name is ignored.
        """
        run = self._nodes.pop(name, None)
        if run is None:
            return
        run.removed = True
        async with run.writing:
            if run.join is not None:
                run.join.cancel()
        pods = self._pods.get(name, {})
        for each in pods.values():
            _cancel(each)
        if not delete_objects:
            return
        await self._until_done(lambda: self._api.delete(NODES, name))
        await self._until_done(lambda: self._api.delete(LEASES, name, namespace=NODE_LEASE_NAMESPACE))
        await asyncio.gather(*(self._until_done(self._delete_call(each.pod)) for each in list(pods.values())))

    def silence_node(self, name: str) -> None:
        """Cut a machine off: no heartbeats, and its pods stay as they are. The controller manager finds it later."""
        run = self._nodes[name]
        run.silent = True
        for each in self._pods.get(name, {}).values():
            _cancel(each)

    async def restore_node(self, name: str) -> None:
        """Reconnect a machine that was silent, with the readiness that it had."""
        run = self._nodes[name]
        run.silent = False
        await self.set_ready(name, ready=run.ready)
        self._serve_pods_of(name)

    async def set_ready(self, name: str, *, ready: bool) -> None:
        """Report a machine as Ready or not Ready."""
        run = self._nodes[name]
        run.ready = ready
        body: JsonObject = {"status": {"conditions": node_conditions(ready=ready, unix_nanos=self._clock.unix_nanos())}}
        await self._write(run, lambda: self._api.patch(NODES.status, name, body, kind=PatchKind.STRATEGIC))

    async def _join(self, run: _NodeRun) -> None:
        node = run.node
        if node.joins_after_seconds is None:
            return
        await self._clock.sleep(node.joins_after_seconds)
        run.ready = node.ready_after_seconds == 0
        await self._write(run, lambda: self._register(run))
        await self._write(run, lambda: self._renew(node.name))
        run.renewed_seconds = self._clock.monotonic_seconds()
        run.joined = True
        self._serve_pods_of(node.name)
        if node.ready_after_seconds:
            await self._clock.sleep(node.ready_after_seconds)
            await self.set_ready(node.name, ready=True)

    async def _register(self, run: _NodeRun) -> None:
        """Create the Node, or bring one that exists to what the machine says, as a kubelet that restarts does."""
        body = node_body(run.node, ready=run.ready, unix_nanos=self._clock.unix_nanos())
        try:
            await self._api.create(NODES, body)
        except ApiError as error:
            if not error.is_conflict:
                raise
            await self._api.patch(NODES, run.node.name, {"metadata": body["metadata"], "spec": body["spec"]})
            await self._api.patch(NODES.status, run.node.name, {"status": body["status"]}, kind=PatchKind.STRATEGIC)

    async def _send_heartbeats(self) -> None:
        while True:
            await self._clock.sleep(self._settings.heartbeat_seconds)
            alive = [run for run in self._nodes.values() if run.joined and not run.silent]
            await asyncio.gather(*(self._send_heartbeat(run) for run in alive))

    async def _send_heartbeat(self, run: _NodeRun) -> None:
        try:
            async with run.writing, self._slots:
                if not run.removed:
                    await self._renew(run.node.name)
                    await self._restore_if_late(run)
        except ApiError as error:
            log.debug("cluster.node_heartbeat_failed", node=run.node.name, error=str(error))

    async def _restore_if_late(self, run: _NodeRun) -> None:
        """Report the machine again if it was silent for so long that the node controller may have given it up."""
        now_seconds = self._clock.monotonic_seconds()
        if now_seconds - run.renewed_seconds > 3 * self._settings.heartbeat_seconds:
            await self._register(run)
            self._serve_pods_of(run.node.name)
        run.renewed_seconds = now_seconds

    async def _write(self, run: _NodeRun, call: Callable[[], Awaitable[object]]) -> None:
        """Repeat a request about a machine until it succeeds or the machine vanishes."""
        async with run.writing:
            await self._until_done(call, is_wanted=lambda: not run.removed)

    async def _renew(self, name: str) -> None:
        body = lease_body(name, unix_nanos=self._clock.unix_nanos())
        await self._api.apply(LEASES, name, body, namespace=NODE_LEASE_NAMESPACE, field_manager=FIELD_MANAGER)

    # ---- pods

    def put(self, stored: PodObject, former: PodObject | None) -> None:
        """Hear of a pod that was added or has changed: this is an ObjectListener of all bound pods."""
        if not stored.spec.node_name:
            return
        pods = self._pods.setdefault(stored.spec.node_name, {})
        run = pods.setdefault(stored.metadata.uid, _PodRun(stored))
        run.pod = stored
        self._serve(run)

    def remove(self, former: PodObject) -> None:
        """Hear that a pod is gone."""
        pods = self._pods.get(former.spec.node_name, {})
        run = pods.pop(former.metadata.uid, None)
        if run is not None:
            _cancel(run)
        if not pods:
            self._pods.pop(former.spec.node_name, None)

    def _serve_pods_of(self, name: str) -> None:
        for run in self._pods.get(name, {}).values():
            self._serve(run)

    def _serve(self, run: _PodRun) -> None:
        """Begin the next step of a pod, unless it has been begun or its machine does nothing."""
        node = self._nodes.get(run.pod.spec.node_name)
        step = next_step(run.pod)
        if node is None or node.silent or not node.joined or step is None or step in run.steps:
            return
        if step is _Step.RESTORE and not node.ready:
            return
        delay_seconds = self._delay_seconds(run.pod, step)
        if delay_seconds is None:
            return
        if step is _Step.TERMINATE:
            _cancel(run)
        run.steps[step] = asyncio.create_task(self._take(run, step, delay_seconds))

    def _delay_seconds(self, pod: PodObject, step: _Step) -> float | None:
        if step is _Step.START:
            return self._settings.start_seconds
        if step is _Step.RESTORE:
            return 0.0
        if step is _Step.FINISH:
            return run_seconds(pod)
        return termination_seconds(pod, self._settings.termination_seconds_max)

    async def _take(self, run: _PodRun, step: _Step, delay_seconds: float) -> None:
        await self._clock.sleep(delay_seconds)
        pod = run.pod
        if step is _Step.TERMINATE:
            await self._until_done(self._delete_call(pod))
            return
        status = succeeded_status if step is _Step.FINISH else running_status
        body = status(pod, unix_nanos=self._clock.unix_nanos())
        name, namespace = pod.metadata.name, pod.metadata.namespace
        await self._until_done(
            lambda: self._api.patch(PODS.status, name, body, namespace=namespace, kind=PatchKind.STRATEGIC)
        )
        if step is _Step.RESTORE:
            del run.steps[step]

    def _delete_call(self, pod: PodObject) -> Callable[[], Awaitable[None]]:
        """Return the deletion of a pod, which is final: its machine is done with it."""
        metadata = pod.metadata

        async def delete() -> None:
            try:
                await self._api.delete(
                    PODS, metadata.name, namespace=metadata.namespace, uid=metadata.uid, grace_seconds=0
                )
            except ApiError as error:
                # The pod is gone, and another one has its name.
                if not error.is_conflict:
                    raise

        return delete

    async def _until_done(
        self, call: Callable[[], Awaitable[object]], *, is_wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Repeat a request until it succeeds, until it is not wanted, or until its object does not exist."""
        while is_wanted():
            try:
                async with self._slots:
                    await call()
            except ApiError as error:
                if error.is_not_found:
                    return
                if not (error.is_transient or error.is_conflict):
                    log.warning("cluster.kubelet_request_refused", error=str(error))
                await self._clock.sleep(error.retry_after_seconds or _RETRY_SECONDS)
            else:
                return


def _cancel(run: _PodRun) -> None:
    """End the steps of a pod that have not been completed; they may be begun again."""
    for step, task in list(run.steps.items()):
        if not task.done():
            task.cancel()
            del run.steps[step]
