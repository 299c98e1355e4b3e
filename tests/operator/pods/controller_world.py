"""A simulated API server with a pod controller on it, for tests at virtual time."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from bigfleet.operator.kubernetes.objects import CapacityRequestObject, PodObject
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
from bigfleet.operator.pods.controller import ClusterViews, PodController, ReconcileOutcome
from bigfleet.operator.pods.defaults import PenaltyDefaults
from bigfleet.operator.pods.unmanaged_nodes import reduced_node, reduced_upcoming_node
from bigfleet.sim.kernel.virtual_time import LoopClock
from bigfleet.sim.kubernetes.client import InMemoryApi
from bigfleet.sim.kubernetes.server import InMemoryApiServer
from tests.operator.pods.pod_cases import plain_manifest

#: Long enough for retries, for the collection of orphans, and for caches to be healthy again.
SETTLED_SECONDS = 300.0


class RecordedEvents:
    """The Events that the controller wrote."""

    def __init__(self) -> None:
        self.written: list[tuple[str, str, str]] = []
        self.accepts = True

    def warn(self, pod: PodObject, reason: str, message: str) -> bool:
        self.written.append((pod.metadata.name, reason, message))
        return self.accepts


class Counted:
    """How often a look at a pod ended in which way."""

    def __init__(self) -> None:
        self.outcomes: Counter[ReconcileOutcome] = Counter()

    def on_reconcile(self, outcome: ReconcileOutcome) -> None:
        self.outcomes[outcome] += 1


class ControllerProcess:
    """One process: caches that follow the server, and a controller that may lead."""

    def __init__(self, server: InMemoryApiServer, defaults: PenaltyDefaults | None, seed: int) -> None:
        self.clock = server.clock
        #: Each cache has a client of its own, so that one may fail alone.
        self.pods_api = InMemoryApi(server)
        self.requests_api = InMemoryApi(server)
        self.nodes_api = InMemoryApi(server)
        self.api = InMemoryApi(server)
        rng = random.Random(seed)
        self.pods = Reflector(self.pods_api, PODS, clock=self.clock, rng=rng)
        self.requests = Reflector(
            self.requests_api, CAPACITY_REQUESTS, clock=self.clock, rng=rng, label_selector=OWNED_BY_POD
        )
        self.claims = Reflector(self.api, PERSISTENT_VOLUME_CLAIMS, clock=self.clock, rng=rng)
        self.volumes = Reflector(self.api, PERSISTENT_VOLUMES, clock=self.clock, rng=rng)
        self.nodes = Reflector(self.nodes_api, NODES, clock=self.clock, rng=rng, transform=reduced_node)
        self.upcoming = Reflector(
            self.nodes_api, UPCOMING_NODES, clock=self.clock, rng=rng, transform=reduced_upcoming_node
        )
        self.events = RecordedEvents()
        self.counted = Counted()
        self.controller = PodController(
            self.api,
            ClusterViews(
                pods=self.pods,
                requests=self.requests,
                claims=self.claims,
                volumes=self.volumes,
                nodes=self.nodes,
                upcoming_nodes=self.upcoming,
            ),
            clock=self.clock,
            rng=rng,
            defaults=defaults,
            events=self.events,
            listener=self.counted,
            workers=4,
        )
        index = self.controller.index
        self.pods.add_listener(index.pods_listener)
        self.requests.add_listener(index.requests_listener)
        self.claims.add_listener(index.claims_listener)
        self.volumes.add_listener(index.volumes_listener)
        self.nodes.add_listener(self.controller.unmanaged.nodes_listener)
        self.upcoming.add_listener(self.controller.unmanaged.machines_listener)
        self._tasks: list[asyncio.Task[None]] = []
        self._leading: asyncio.Task[None] | None = None

    def start(self, *, leads: bool = True) -> None:
        caches = (self.pods, self.requests, self.claims, self.volumes, self.nodes, self.upcoming)
        self._tasks = [asyncio.create_task(cache.run()) for cache in caches]
        if leads:
            self.lead()

    def lead(self) -> None:
        self._leading = asyncio.create_task(self.controller.run())

    async def follow(self) -> None:
        """Lose the leadership."""
        if self._leading is not None:
            self._leading.cancel()
            await asyncio.gather(self._leading, return_exceptions=True)
            self._leading = None

    async def end(self) -> None:
        await self.follow()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class ControllerWorld:
    """One cluster and the process of its pod controller."""

    def __init__(self, defaults: PenaltyDefaults | None = None) -> None:
        self.clock = LoopClock()
        self.server = InMemoryApiServer(self.clock)
        self.user = InMemoryApi(self.server, user="person")
        self._defaults = defaults
        self._starts = 0
        self.process = ControllerProcess(self.server, defaults, 0)

    async def restart(self) -> None:
        """End the process and start another one."""
        await self.process.end()
        self._starts += 1
        self.process = ControllerProcess(self.server, self._defaults, self._starts)
        self.process.start()

    def put_pod(self, name: str = "web-0", *, metadata: Any = None, spec: Any = None, status: Any = None) -> PodObject:
        manifest = plain_manifest(metadata={"name": name} | (metadata or {}), spec=spec, status=status)
        if "uid" not in (metadata or {}):
            known = self.server.read(PODS, name, "shop")
            manifest["metadata"].pop("uid")
            if known is not None:
                manifest["metadata"]["uid"] = known.metadata.uid
        return self.server.put(PODS, manifest)

    def requests(self) -> list[CapacityRequestObject]:
        return self.server.read_all(CAPACITY_REQUESTS)

    @property
    def request(self) -> CapacityRequestObject:
        (only,) = self.requests()
        return only

    async def settle(self, seconds: float = SETTLED_SECONDS) -> None:
        await self.clock.sleep(seconds)


@asynccontextmanager
async def controller_world(
    defaults: PenaltyDefaults | None = None, *, prepare: Callable[[ControllerWorld], object] = lambda world: None
) -> AsyncIterator[ControllerWorld]:
    """Run a controller while the context lasts; `prepare` fills the cluster before it starts."""
    world = ControllerWorld(defaults)
    prepare(world)
    world.process.start()
    try:
        yield world
    finally:
        await world.process.end()


def spec_of(request: CapacityRequestObject) -> Any:
    """Return the spec as JSON, without defaults."""
    return msgspec.to_builtins(request.spec)
