"""The process of the pod controller on a simulated API server: rights, leadership, readiness, a clean stop."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from bigfleet.cli.pod_controller import process
from bigfleet.cli.pod_controller.process import PodControllerProcessSettings, serve_pod_controller
from bigfleet.cli.runtime.failures import RunFault
from bigfleet.cli.runtime.kubernetes import ELECTION_SUFFIX
from bigfleet.operator.kubernetes.api import ApiError
from bigfleet.operator.kubernetes.endpoint import ApiEndpoint
from bigfleet.operator.kubernetes.resources import CAPACITY_REQUESTS, EVENTS, LEASES, PODS
from bigfleet.operator.kubernetes.rights import pod_controller_rights
from bigfleet.operator.pods.controller import ReconcileOutcome
from bigfleet.operator.pods.defaults import ClassPenalties, PenaltyDefaults
from bigfleet.operator.pods.index import PodIndex
from bigfleet.sim.kernel.virtual_time import LoopClock
from bigfleet.sim.kubernetes.client import InMemoryApi
from bigfleet.sim.kubernetes.rights import AccessRights, rules_of_role
from bigfleet.sim.kubernetes.server import InMemoryApiServer
from tests.operator.pods.pod_cases import plain_manifest

pytestmark = pytest.mark.virtual_time

PROCESS = PodControllerProcessSettings(
    endpoint=ApiEndpoint(server="http://api", source="the simulation"),
    namespace="fleet",
    lease_name="lease",
    cache_sync_seconds=60,
    defaults=PenaltyDefaults({"high": ClassPenalties(reclamation_penalty="7")}),
)


class ProcessWorld:
    """One cluster; processes of the pod controller run in it as functions."""

    def __init__(self) -> None:
        self.server = InMemoryApiServer(LoopClock())
        self.stops: list[asyncio.Event] = []
        self.apis: list[InMemoryApi] = []
        self.registries: list[CollectorRegistry] = []
        self.readiness: list[Callable[[], str]] = []
        self.rules: Any = None

    @asynccontextmanager
    async def connect(self, *_endpoint: Any, user_agent: str, **_limits: Any) -> AsyncIterator[InMemoryApi]:
        api = InMemoryApi(self.server)
        if self.rules is not None:
            api = InMemoryApi(self.server, rights=AccessRights(rules_of_role({"rules": self.rules}, "")))
        if not user_agent.endswith(ELECTION_SUFFIX):
            self.apis.append(api)
        yield api

    @asynccontextmanager
    async def serve_http(
        self, _address: Any, registry: CollectorRegistry, readiness: Callable[[], str]
    ) -> AsyncIterator[None]:
        self.registries.append(registry)
        self.readiness.append(readiness)
        yield

    def stop_on_signals(self) -> asyncio.Event:
        self.stops.append(asyncio.Event())
        return self.stops[-1]

    def start(self) -> "asyncio.Task[int]":
        return asyncio.get_running_loop().create_task(serve_pod_controller(PROCESS))

    def put_pod(self, name: str) -> None:
        manifest = plain_manifest(metadata={"name": name}, spec={"priorityClassName": "high"})
        manifest["metadata"].pop("uid")
        self.server.put(PODS, manifest)

    @property
    def requests(self) -> int:
        return len(self.server.read_all(CAPACITY_REQUESTS))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> ProcessWorld:
    made = ProcessWorld()
    monkeypatch.setattr("bigfleet.cli.runtime.interpreter.settle", lambda: None)
    monkeypatch.setattr(process, "SystemClock", LoopClock)
    monkeypatch.setattr("bigfleet.cli.runtime.kubernetes.HttpKubernetesApi", made.connect)
    monkeypatch.setattr(process, "serve_http", made.serve_http)
    monkeypatch.setattr(process, "stop_on_signals", made.stop_on_signals)
    return made


async def test_a_process_leads_writes_and_stops_cleanly(world: ProcessWorld) -> None:
    world.put_pod("a")
    running = world.start()
    await asyncio.sleep(30)
    assert world.requests == 1
    assert world.server.read_all(CAPACITY_REQUESTS)[0].spec.reclamation_penalty == "7"
    assert world.readiness[0]() == ""
    lease = world.server.read(LEASES, "lease", "fleet")
    assert lease is not None
    assert lease.spec.holder_identity

    text = generate_latest(world.registries[0]).decode()
    assert 'bigfleet_unschedulable_pod_controller_reconciles_total{outcome="cr_created"} 1.0' in text
    assert "bigfleet_unschedulable_pod_controller_leader 1.0" in text

    world.stops[0].set()
    assert await running == 0
    released = world.server.read(LEASES, "lease", "fleet")
    assert released is not None
    assert not released.spec.holder_identity


async def test_every_outcome_is_exported_from_the_start(world: ProcessWorld) -> None:
    running = world.start()
    await asyncio.sleep(1)
    text = generate_latest(world.registries[0]).decode()
    for outcome in ReconcileOutcome:
        assert f'bigfleet_unschedulable_pod_controller_reconciles_total{{outcome="{outcome.value}"}} ' in text
    world.stops[0].set()
    await running


async def test_a_follower_is_ready_and_takes_over_at_once_when_the_leader_stops(world: ProcessWorld) -> None:
    leader = world.start()
    await asyncio.sleep(10)
    follower = world.start()
    await asyncio.sleep(10)
    world.put_pod("a")
    await asyncio.sleep(10)
    assert world.readiness[1]() == ""
    assert [call for call in world.apis[1].calls if call.verb == "patch"] == []

    world.stops[0].set()
    assert await leader == 0
    world.put_pod("b")
    await asyncio.sleep(10)
    assert world.requests == 2
    world.stops[1].set()
    assert await follower == 0


async def test_a_leader_that_loses_its_lease_leads_again_later(world: ProcessWorld) -> None:
    running = world.start()
    await asyncio.sleep(10)
    world.server.go_down()
    await asyncio.sleep(60)
    world.put_pod("a")
    world.server.come_up()
    await asyncio.sleep(120)
    assert world.requests == 1
    world.stops[0].set()
    assert await running == 0


async def test_missing_rights_are_all_named(world: ProcessWorld) -> None:
    world.rules = [
        {"apiGroups": [right.resource.group], "resources": [right.text("x").split()[1].split(".")[0]], "verbs": ["*"]}
        for right in pod_controller_rights("fleet")
        if right.resource.plural not in ("persistentvolumes", "leases")
    ] + [
        {"apiGroups": ["bigfleet.lucy.sh"], "resources": ["capacityrequests/status"], "verbs": ["*"]},
        {"apiGroups": ["authorization.k8s.io"], "resources": ["selfsubjectaccessreviews"], "verbs": ["create"]},
    ]
    with pytest.raises(RunFault) as caught:
        await world.start()

    text = str(caught.value)
    assert "list persistentvolumes; watch persistentvolumes" in text
    assert "update leases.coordination.k8s.io in namespace fleet" in text
    assert "capacityrequests" not in text


async def test_custom_resources_that_are_not_installed_are_named(world: ProcessWorld) -> None:
    world.server.unserved.add((CAPACITY_REQUESTS.group, CAPACITY_REQUESTS.plural))
    with pytest.raises(RunFault, match="install the custom resources of BigFleet"):
        await world.start()


async def test_a_server_that_is_down_at_start_is_named(world: ProcessWorld) -> None:
    world.server.go_down()
    with pytest.raises(RunFault, match=r"API server of the simulation: .*connection refused"):
        await world.start()


async def test_caches_that_are_not_read_in_time_are_named(world: ProcessWorld) -> None:
    running = world.start()
    await asyncio.sleep(0)
    world.apis[0].faults.refuse = lambda call: (
        ApiError(503, "ServiceUnavailable", "busy") if call.resource == "pods" else None
    )
    with pytest.raises(RunFault, match="reading pods: not finished within --cache-sync-timeout 60 s"):
        await running


async def test_a_stop_before_the_caches_are_read_is_clean(world: ProcessWorld) -> None:
    running = world.start()
    await asyncio.sleep(0)
    world.apis[0].faults.refuse = lambda call: (
        ApiError(503, "ServiceUnavailable", "busy") if call.resource == "pods" else None
    )
    await asyncio.sleep(10)
    assert "reading pods" in world.readiness[0]()
    world.stops[0].set()

    assert await running == 0


async def test_findings_become_events_of_the_pod(world: ProcessWorld) -> None:
    manifest = plain_manifest(spec={"resourceClaims": [{"name": "gpu"}]})
    world.server.put(PODS, manifest)
    running = world.start()
    await asyncio.sleep(20)
    (event,) = world.server.read_all(EVENTS, "shop")
    stored = world.server.raw(EVENTS, event.metadata.name, "shop")

    assert (stored["reason"], stored["type"]) == ("UnsupportedResourceClaims", "Warning")
    assert stored["involvedObject"]["name"] == "web-0"
    world.stops[0].set()
    await running


async def test_a_process_whose_caches_fail_ends_with_the_reason(
    world: ProcessWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that has missed a change would be wrong for ever; the next process reads everything."""

    def fail(_index: PodIndex, _stored: object, _former: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(PodIndex, "put_pod", fail)
    world.put_pod("a")
    with pytest.raises(RunFault, match=r"the pod controller stopped by itself: ZeroDivisionError\('planted'\)"):
        await world.start()
