"""Runs one pod controller process: rights, caches, leader election, HTTP, and a clean stop.

docs/spec/operator.md §1 and §11. A follower keeps its caches up to date and writes nothing. This module does not decide
anything.
"""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge

from bigfleet.cli.runtime import interpreter
from bigfleet.cli.runtime.failures import RunFault, one_line, root_cause
from bigfleet.cli.runtime.kubernetes import ClusterConnection, connect_cluster
from bigfleet.cli.runtime.service_notifier import ServiceNotifier
from bigfleet.cli.runtime.system import SystemClock, process_registry, serve_http, stop_on_signals, system_rng
from bigfleet.operator.kubernetes.access import RightsMonitor
from bigfleet.operator.kubernetes.endpoint import ApiEndpoint
from bigfleet.operator.kubernetes.events import EventRecorder, EventSeverity, reference_to
from bigfleet.operator.kubernetes.lease import LeadershipLost
from bigfleet.operator.kubernetes.objects import PodObject
from bigfleet.operator.kubernetes.reflector import Reflector
from bigfleet.operator.kubernetes.resources import (
    CAPACITY_REQUESTS,
    NODES,
    OWNED_BY_POD,
    PERSISTENT_VOLUME_CLAIMS,
    PERSISTENT_VOLUMES,
    POD_CONTROLLER_FIELD_MANAGER,
    PODS,
    PRIORITY_CLASSES,
    UPCOMING_NODES,
)
from bigfleet.operator.kubernetes.rights import pod_controller_rights
from bigfleet.operator.pods.controller import ClusterViews, PodController, ReconcileOutcome
from bigfleet.operator.pods.defaults import PenaltyDefaults
from bigfleet.operator.pods.unmanaged_nodes import reduced_node, reduced_upcoming_node

#: Writes that run when the process is stopped may take this long.
STOP_SECONDS: Final = 10.0
_PREFIX: Final = "bigfleet_unschedulable_pod_controller"

_log = structlog.get_logger("bigfleet.cli.pod_controller.command")


@dataclass(frozen=True, slots=True, kw_only=True)
class PodControllerProcessSettings:
    """One pod controller process: which API server, which namespace and lease, how much at a time."""

    endpoint: ApiEndpoint
    defaults: PenaltyDefaults = field(default_factory=PenaltyDefaults)
    # Each new pod takes two writes: 50 pods a second are 100.
    qps: float = 200.0
    burst: int = 400
    workers: int = 16
    cache_sync_seconds: float = 600.0
    unmanaged_after_seconds: float = 600.0
    #: None serves no HTTP.
    metrics_address: tuple[str, int] | None = None
    namespace: str
    lease_name: str


class PodControllerMetrics:
    """Counts how looks at pods end (docs/spec/operator.md §13)."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._reconciles = Counter(
            f"{_PREFIX}_reconciles", "Looks at a pod, by how they ended.", ["outcome"], registry=registry
        )
        for outcome in ReconcileOutcome:
            self._reconciles.labels(outcome.value)
        self.leader = Gauge(f"{_PREFIX}_leader", "1 while this process leads.", registry=registry)
        self.rights_missing = Gauge(
            f"{_PREFIX}_rights_missing", "Rights that the process lacks, as last reviewed.", registry=registry
        )
        self.backlog = Gauge(f"{_PREFIX}_backlog", "Pods that wait to be looked at.", registry=registry)
        self.unmanaged_nodes = Gauge(
            f"{_PREFIX}_unmanaged_nodes", "Nodes whose pods have no requests.", registry=registry
        )

    def on_reconcile(self, outcome: ReconcileOutcome) -> None:
        """Count one look at a pod."""
        self._reconciles.labels(outcome.value).inc()


class RecordedPodEvents:
    """Writes the Events of pods with an EventRecorder."""

    def __init__(self, recorder: EventRecorder) -> None:
        self._recorder = recorder

    def warn(self, pod: PodObject, reason: str, message: str) -> bool:
        """Record a Warning Event; say whether it will be written."""
        return self._recorder.record(reference_to(PODS, pod), EventSeverity.WARNING, reason, message)


class _Parts:
    """The caches and the controller on them."""

    def __init__(
        self, connection: ClusterConnection, process: PodControllerProcessSettings, registry: CollectorRegistry
    ) -> None:
        clock, rng = SystemClock(), system_rng()
        api, host = connection.api, socket.gethostname()
        pods = Reflector(api, PODS, clock=clock, rng=rng)
        requests = Reflector(api, CAPACITY_REQUESTS, clock=clock, rng=rng, label_selector=OWNED_BY_POD)
        claims = Reflector(api, PERSISTENT_VOLUME_CLAIMS, clock=clock, rng=rng)
        volumes = Reflector(api, PERSISTENT_VOLUMES, clock=clock, rng=rng)
        nodes = Reflector(api, NODES, clock=clock, rng=rng, transform=reduced_node)
        upcoming = Reflector(api, UPCOMING_NODES, clock=clock, rng=rng, transform=reduced_upcoming_node)
        self.caches: tuple[Reflector[Any], ...] = (pods, requests, claims, volumes, nodes, upcoming)
        self.recorder = EventRecorder(api, component=POD_CONTROLLER_FIELD_MANAGER, instance=host, clock=clock)
        self.metrics = PodControllerMetrics(registry)
        self.controller = PodController(
            api,
            ClusterViews(
                pods=pods, requests=requests, claims=claims, volumes=volumes, nodes=nodes, upcoming_nodes=upcoming
            ),
            clock=clock,
            rng=rng,
            defaults=process.defaults,
            events=RecordedPodEvents(self.recorder),
            listener=self.metrics,
            workers=process.workers,
            unmanaged_after_seconds=process.unmanaged_after_seconds,
        )
        index = self.controller.index
        pods.add_listener(index.pods_listener)
        requests.add_listener(index.requests_listener)
        claims.add_listener(index.claims_listener)
        volumes.add_listener(index.volumes_listener)
        self.rights = RightsMonitor(
            connection.election_api,
            pod_controller_rights(process.namespace),
            forbidden=connection.forbidden,
            clock=clock,
            on_review=self.metrics.rights_missing.set,
        )
        nodes.add_listener(self.controller.unmanaged.nodes_listener)
        upcoming.add_listener(self.controller.unmanaged.machines_listener)
        self.elector = connection.elector(namespace=process.namespace, lease_name=process.lease_name)
        self.metrics.leader.set_function(lambda: float(self.elector.is_leader))
        self.metrics.backlog.set_function(lambda: float(self.controller.backlog))
        self.metrics.unmanaged_nodes.set_function(lambda: float(len(self.controller.unmanaged)))

    def why_waiting(self) -> str:
        """Say which caches have not been read, "" when all have."""
        waiting = [cache.resource.label for cache in self.caches if not cache.is_synced]
        return f"reading {', '.join(waiting)}" if waiting else ""


async def serve_pod_controller(process: PodControllerProcessSettings) -> int:
    """Run until a signal stops it; return the exit code. Raises RunFault when it cannot start or fails."""
    notifier = ServiceNotifier.from_environment(os.environ, os.getpid())
    interpreter.settle()
    stop = stop_on_signals()
    registry = process_registry()
    async with connect_cluster(
        process.endpoint,
        clock=SystemClock(),
        user_agent=POD_CONTROLLER_FIELD_MANAGER,
        qps=process.qps,
        burst=process.burst,
    ) as connection:
        parts = _Parts(connection, process, registry)
        async with (
            serve_http(process.metrics_address, registry, parts.why_waiting),
            notifier.reporting(parts.why_waiting, stop),
        ):
            await _until(stop, _checked(connection, process))
            if not stop.is_set():
                _log.info(
                    "operator.pod_controller_started", server=process.endpoint.source, namespace=process.namespace
                )
                await _run(parts, process, stop)
    _log.info("operator.pod_controller_stopped")
    return 0


async def _checked(connection: ClusterConnection, process: PodControllerProcessSettings) -> None:
    """Look for what is missing in the cluster. Raises RunFault naming all of it."""
    await connection.check(pod_controller_rights(process.namespace), (CAPACITY_REQUESTS, UPCOMING_NODES))
    classes = await connection.ask(lambda: connection.api.list_page(PRIORITY_CLASSES, limit=0))
    for name in process.defaults.unknown_classes(found.metadata.name for found in classes.items):
        advice = "correct --priority-class-defaults, or create the PriorityClass"
        _log.warning("operator.priority_class_unknown", priority_class=name, advice=advice)


async def _until(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Run some work, but no longer than until the stop."""
    working = asyncio.create_task(work)
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        await _cancelled(working, stopping)


async def _cancelled(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _run(parts: _Parts, process: PodControllerProcessSettings, stop: asyncio.Event) -> None:
    """Follow the cluster, and write while this process leads, until the stop."""
    clock = SystemClock()
    flows: list[Coroutine[Any, Any, None]] = [cache.run() for cache in parts.caches]
    flows += [parts.recorder.run(), parts.rights.run(), interpreter.collect_when_due(clock)]
    async with _background(flows) as background:
        await _until(stop, _synced(parts, process.cache_sync_seconds, background))
        if stop.is_set():
            return
        leading = asyncio.create_task(_lead(parts), name="leading")
        stopping = asyncio.create_task(stop.wait(), name="stop")
        try:
            await asyncio.wait((leading, stopping, *background), return_when=asyncio.FIRST_COMPLETED)
            parts.controller.stop()
            if parts.elector.is_leader:
                # The writes that run finish, and the Lease is released.
                await asyncio.wait((leading,), timeout=STOP_SECONDS)
        finally:
            await _cancelled(stopping, leading)
        for task in (leading, *background):
            failure = None if task.cancelled() or not task.done() else task.exception()
            if failure is not None:
                _log.error("operator.pod_controller_failed", exc_info=failure)
                cause = one_line(repr(root_cause(failure)))
                raise RunFault(f"the pod controller stopped by itself: {cause}") from failure


@asynccontextmanager
async def _background(flows: list[Coroutine[Any, Any, None]]) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Run flows while the context lasts."""
    tasks = [asyncio.create_task(flow) for flow in flows]
    try:
        yield tasks
    finally:
        await _cancelled(*tasks)


async def _synced(parts: _Parts, seconds_max: float, background: list[asyncio.Task[None]]) -> None:
    """Return once all caches have been read. Raises RunFault when that takes too long."""
    reading: asyncio.Future[Any] = asyncio.gather(*(cache.wait_synced() for cache in parts.caches))
    ended: list[asyncio.Future[Any]] = [reading, *background]
    try:
        await asyncio.wait(ended, timeout=seconds_max, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done() and not any(task.done() for task in background):
            raise RunFault(
                f"{parts.why_waiting()}: not finished within --cache-sync-timeout {seconds_max:g} s;"
                " look at the log for refused requests, or allow more time"
            )
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def _lead(parts: _Parts) -> None:
    """Lead whenever this process is elected; return after `PodController.stop`."""
    while True:
        try:
            await parts.elector.run(parts.controller.run)
        except LeadershipLost:
            # It is logged where it happened; the next leader writes meanwhile.
            continue
        return
