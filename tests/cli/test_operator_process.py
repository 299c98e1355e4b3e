"""The process of the operator on a simulated API server: what is missing, what fails, a clean stop."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import structlog
from prometheus_client import CollectorRegistry

from bigfleet.cli.operator import process
from bigfleet.cli.operator.process import serve_operator
from bigfleet.cli.operator.process_settings import OperatorProcessSettings
from bigfleet.cli.operator.token_mode import TokenMode
from bigfleet.cli.runtime.failures import RunFault
from bigfleet.model.ids import ClusterId
from bigfleet.operator.demand.demand import DemandView
from bigfleet.operator.kubernetes.api import ApiError
from bigfleet.operator.kubernetes.endpoint import ApiEndpoint
from bigfleet.operator.kubernetes.resources import CAPACITY_REQUESTS, LEASES, NODES
from bigfleet.operator.nodes.matching import NodeMatcher
from bigfleet.sim.kernel.virtual_time import LoopClock
from bigfleet.sim.kubernetes.client import InMemoryApi
from bigfleet.sim.kubernetes.server import InMemoryApiServer
from tests.operator.fake_shard import FakeShard

pytestmark = pytest.mark.virtual_time

PROCESS = OperatorProcessSettings(
    cluster=ClusterId("blue"),
    shard_address="shard:7780",
    kubeconfig=None,
    namespace="fleet",
    lease_name="lease",
    metrics_address=None,
    qps=50.0,
    burst=100,
    rollup_interval_seconds=10.0,
    status_workers=2,
    handler_workers=2,
    bootstrap_template=None,
    bootstrap_ttl_seconds=3600,
    token_mode=TokenMode.NONE,
    service_account=None,
    drain_force=False,
    tls=None,
)


class ProcessWorld:
    """One cluster and its shard; the operator's process runs as a function."""

    def __init__(self) -> None:
        self.server = InMemoryApiServer(LoopClock())
        self.shard = FakeShard()
        self.stop = asyncio.Event()
        self.api = InMemoryApi(self.server)
        self.readiness: Callable[[], str] = lambda: "not started"

    @asynccontextmanager
    async def connect(self, *_endpoint: Any, **_limits: Any) -> AsyncIterator[InMemoryApi]:
        yield self.api

    @asynccontextmanager
    async def serve_http(
        self, _address: Any, _registry: CollectorRegistry, readiness: Callable[[], str]
    ) -> AsyncIterator[None]:
        self.readiness = readiness
        yield

    def start(self) -> "asyncio.Task[int]":
        return asyncio.get_running_loop().create_task(serve_operator(PROCESS, {}))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> ProcessWorld:
    made = ProcessWorld()
    endpoint = ApiEndpoint(server="http://api", source="the simulation")
    monkeypatch.setattr("bigfleet.cli.runtime.interpreter.settle", lambda: None)
    monkeypatch.setattr("bigfleet.cli.runtime.kubernetes.HttpKubernetesApi", made.connect)
    monkeypatch.setattr(process, "SystemClock", LoopClock)
    monkeypatch.setattr(process, "find_endpoint", lambda *_: endpoint)
    monkeypatch.setattr(process, "serve_http", made.serve_http)
    monkeypatch.setattr(process, "stop_on_signals", lambda: made.stop)
    monkeypatch.setattr(process, "GrpcSessionDialer", lambda *_: made.shard)
    return made


async def test_a_process_leads_reports_and_stops_cleanly(world: ProcessWorld) -> None:
    with structlog.testing.capture_logs() as logs:
        running = world.start()
        await world.shard.stream()
        await asyncio.sleep(30)
        assert world.readiness() == ""
        world.stop.set()
        assert await running == 0
    events = [each["event"] for each in logs if each["log_level"] == "info"]
    released = world.server.read(LEASES, "lease", "fleet")

    assert events == ["operator.ready", "operator.leadership_acquired", "session.opened", "session.ended"]
    assert released is not None
    assert not released.spec.holder_identity


async def test_custom_resources_that_are_not_installed_are_named(world: ProcessWorld) -> None:
    world.server.unserved.add((CAPACITY_REQUESTS.group, CAPACITY_REQUESTS.plural))
    with pytest.raises(RunFault, match="install the custom resources of BigFleet"):
        await world.start()


async def test_what_was_not_read_in_time_is_named(world: ProcessWorld) -> None:
    running = world.start()
    await asyncio.sleep(0)
    world.api.faults.refuse = lambda call: (
        ApiError(503, "ServiceUnavailable", "busy") if call.resource == "nodes" else None
    )
    with pytest.raises(RunFault, match="was not read completely within 60 s: nodes"):
        await running


@pytest.mark.parametrize(
    ("owner", "method"), [(NodeMatcher, "put"), (DemandView, "roll_up")], ids=["a listener", "the leader's work"]
)
async def test_a_process_that_cannot_go_on_names_the_cause_and_logs_where_it_was(
    world: ProcessWorld, monkeypatch: pytest.MonkeyPatch, owner: type, method: str
) -> None:
    def fail(*_arguments: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(owner, method, fail)
    with structlog.testing.capture_logs() as logs:
        running = world.start()
        await world.shard.stream()
        world.server.put(NODES, {"metadata": {"name": "n"}})
        with pytest.raises(RunFault) as caught:
            await running

    assert str(caught.value) == "the operator stopped by itself: ZeroDivisionError('planted')"
    assert [each["event"] for each in logs if each.get("exc_info")] == ["operator.failed"]
