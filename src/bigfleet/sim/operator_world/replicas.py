"""Runs the processes of an operator and of a pod controller: the real flows, as the commands wire them.

A process that ends by itself is started again after a while, as a Deployment does. What it wrote to the API server
outlives it. This module must not help a process further than its command does.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final

from prometheus_client import CollectorRegistry

from bigfleet.model.clock import Clock
from bigfleet.model.ids import ClusterId, IdSource
from bigfleet.operator.agent import AgentSettings, KubernetesAgent
from bigfleet.operator.bootstrap.service import StubBootstrapService
from bigfleet.operator.kubernetes.events import EventRecorder
from bigfleet.operator.kubernetes.lease import LeaderElector, LeadershipLost
from bigfleet.operator.kubernetes.reflector import Reflector
from bigfleet.operator.kubernetes.resources import (
    CAPACITY_REQUESTS,
    NODES,
    OWNED_BY_POD,
    PERSISTENT_VOLUME_CLAIMS,
    PERSISTENT_VOLUMES,
    PODS,
    UPCOMING_NODES,
)
from bigfleet.operator.metrics import OperatorMetrics
from bigfleet.operator.pods.controller import ClusterViews, PodController
from bigfleet.operator.ports import SessionDialer
from bigfleet.operator.views import OperatorViews
from bigfleet.sim.kernel.processes import Process
from bigfleet.sim.kernel.streams import Random
from bigfleet.sim.kubernetes.faults import ApiCall
from bigfleet.sim.observations import Observations
from bigfleet.sim.operator_world.watched_api import WatchedApi, WatchedApiServer
from bigfleet.sim.sites.cluster import SESSION

NAMESPACE: Final = "bigfleet"
OPERATOR: Final = "operator"
POD_CONTROLLER: Final = "pod-controller"
#: As in the commands.
_SYNC_SECONDS_MAX = 60.0
#: Longer than any fault that keeps an operator from announcing a machine.
UNMANAGED_AFTER_SECONDS = 120.0
#: A process that has ended is started again after as long as this at most.
_RESTART_SECONDS_MAX = 5.0
#: A leader's work must have ended so long after it may not lead any more (docs/spec/operator.md §1).
_STOP_SECONDS_MAX = 5.0


class ControllerReplica(ABC):
    """One place of a Deployment, and its process of the moment."""

    role: str

    def __init__(
        self,
        *,
        cluster: ClusterId,
        number: int,
        server: WatchedApiServer,
        clock: Clock,
        rng: Random,
        ids: IdSource,
        observations: Observations,
    ) -> None:
        self.cluster = cluster
        self.name = f"{self.role}-{cluster}-{number}"
        self.process = Process(self.name)
        self.process.kill()
        self.api: WatchedApi | None = None
        self.elector: LeaderElector | None = None
        #: The other processes of the same Deployment.
        self.others: list[ControllerReplica] = []
        #: When it is started again, if it is dead.
        self.back_seconds = 0.0
        #: When it went on after a pause: what was about to run then still runs.
        self.resumed_seconds = -1.0
        self._server = server
        self._clock = clock
        self._rng = rng
        self._ids = ids
        self._observations = observations

    @property
    def is_leader(self) -> bool:
        """Return whether its process of the moment lives and leads."""
        return self.process.is_alive and self.elector is not None and self.elector.is_leader

    def start(self) -> None:
        """Start a process that knows nothing but what the API server holds."""
        process = self.process = Process(self.name)
        api = self.api = WatchedApi(self._server, user=self.role, on_write=self._about_to_write)
        process.add_death_callback(api.vanish)
        self.elector = LeaderElector(
            api,
            namespace=NAMESPACE,
            name=f"bigfleet-{self.role}",
            host=self.name,
            ids=self._ids,
            clock=self._clock,
            rng=self._rng,
        )
        self._observations.note("start", self.name)
        process.spawn(self._live(process, api, self.elector), name=self.name)

    async def _live(self, process: Process, api: WatchedApi, elector: LeaderElector) -> None:
        reason = "its work was over"
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._work(tasks, api, elector)
        except* (LeadershipLost, TimeoutError) as group:
            reason = str(group.exceptions[0]) or "the caches were not read in time"
            self._observations.mark(f"a process of the {self.role} ended by itself")
        except* Exception as group:
            error: BaseException = group
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            reason = f"{type(error).__name__}: {error}"
            self._observations.breach("S0", f"{self.name} ended by {reason}")
        self._observations.note("end", self.name, reason)
        process.kill()
        self.back_seconds = self._clock.monotonic_seconds() + self._rng.uniform(0.5, _RESTART_SECONDS_MAX)

    @abstractmethod
    async def _work(self, tasks: asyncio.TaskGroup, api: WatchedApi, elector: LeaderElector) -> None:
        """Do what the command does; tasks of the group run beside it."""

    def _about_to_write(self, call: ApiCall) -> None:
        """Check that this process leads and no other does (K4)."""
        observations, now_seconds = self._observations, self._clock.monotonic_seconds()
        observations.checks["K4"] += 1
        observations.note("write", self.name, str(call))
        if now_seconds == self.resumed_seconds:
            return
        until_seconds = self.elector._leads_until_seconds if self.elector is not None else None
        if until_seconds is None or now_seconds > until_seconds + _STOP_SECONDS_MAX:
            observations.breach("K4", f"{self.name} does not lead, and begins to {call}")
        for other in self.others:
            if other.is_leader:
                observations.breach("K4", f"{other.name} leads, and {self.name} begins to {call}")


class OperatorReplica(ControllerReplica):
    """One `bigfleet operator`."""

    role = OPERATOR

    def __init__(self, *, make_dialer: Callable[[Process], SessionDialer], **given: Any) -> None:
        super().__init__(**given)
        self._make_dialer = make_dialer
        #: While it leads.
        self.agent: KubernetesAgent | None = None

    async def _work(self, tasks: asyncio.TaskGroup, api: WatchedApi, elector: LeaderElector) -> None:
        process = self.process
        self.agent = None
        views = OperatorViews(api, clock=self._clock, rng=self._rng)
        tasks.create_task(views.run())
        async with asyncio.timeout(_SYNC_SECONDS_MAX):
            await views.wait_synced()

        async def lead() -> None:
            agent = self.agent = KubernetesAgent(
                cluster=self.cluster,
                api=api,
                views=views,
                bootstrap=StubBootstrapService(),
                events=EventRecorder(api, component="bigfleet-operator", instance=self.name, clock=self._clock),
                dialer=self._make_dialer(process),
                metrics=OperatorMetrics(CollectorRegistry()),
                clock=self._clock,
                rng=self._rng,
                settings=AgentSettings(session=SESSION, status_workers=4, handler_workers=8),
            )
            await agent.run()

        await elector.run(lead)


class PodControllerReplica(ControllerReplica):
    """One `bigfleet pod-controller`."""

    role = POD_CONTROLLER

    async def _work(self, tasks: asyncio.TaskGroup, api: WatchedApi, elector: LeaderElector) -> None:
        def follow(resource: Any, selector: str = "") -> Reflector[Any]:
            return Reflector(api, resource, clock=self._clock, rng=self._rng, label_selector=selector)

        pods, requests = follow(PODS), follow(CAPACITY_REQUESTS, OWNED_BY_POD)
        claims, volumes = follow(PERSISTENT_VOLUME_CLAIMS), follow(PERSISTENT_VOLUMES)
        nodes, upcoming = follow(NODES), follow(UPCOMING_NODES)
        caches = (pods, requests, claims, volumes, nodes, upcoming)
        controller = PodController(
            api,
            ClusterViews(
                pods=pods, requests=requests, claims=claims, volumes=volumes, nodes=nodes, upcoming_nodes=upcoming
            ),
            clock=self._clock,
            rng=self._rng,
            workers=4,
            unmanaged_after_seconds=UNMANAGED_AFTER_SECONDS,
        )
        index = controller.index
        pods.add_listener(index.pods_listener)
        requests.add_listener(index.requests_listener)
        claims.add_listener(index.claims_listener)
        volumes.add_listener(index.volumes_listener)
        nodes.add_listener(controller.unmanaged.nodes_listener)
        upcoming.add_listener(controller.unmanaged.machines_listener)
        for cache in caches:
            tasks.create_task(cache.run())
        for cache in caches:
            await cache.wait_synced()
        while True:
            try:
                await elector.run(controller.run)
            except LeadershipLost:
                # As in the command: the next leader writes meanwhile.
                self._observations.mark("a pod controller lost its Lease")
