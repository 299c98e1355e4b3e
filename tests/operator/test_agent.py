"""The agent of one cluster: an API server in memory, a scripted shard, virtual time, the rights of the manifests."""

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from bigfleet.model import frames
from bigfleet.model.frames import (
    BootstrapRequest,
    BootstrapResponse,
    DrainOutcome,
    DrainResult,
    NodeStateUpdate,
    NodeStatus,
    ReclaimInstruction,
    RollUp,
)
from bigfleet.model.ids import ClusterId
from bigfleet.model.states import MachineState
from bigfleet.operator.agent import AgentSettings, KubernetesAgent
from bigfleet.operator.bootstrap.service import StubBootstrapService
from bigfleet.operator.kubernetes.events import EventRecorder
from bigfleet.operator.kubernetes.resources import (
    AVAILABLE_CAPACITIES,
    CAPACITY_REQUESTS,
    DAEMON_SETS,
    MACHINE_ID,
    NODES,
    OWNED_BY_POD,
    PODS,
    UPCOMING_NODES,
)
from bigfleet.operator.metrics import OperatorMetrics
from bigfleet.operator.session import SessionSettings
from bigfleet.operator.views import OperatorViews
from bigfleet.sim.kernel.virtual_time import LoopClock
from bigfleet.sim.kubernetes.client import InMemoryApi
from bigfleet.sim.kubernetes.rights import AccessRights, rules_of_role
from bigfleet.sim.kubernetes.server import InMemoryApiServer
from tests.operator.fake_shard import FakeShard, FakeStream

pytestmark = pytest.mark.virtual_time

ROOT = Path(__file__).resolve().parents[2]
REPLICA_SET = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web", "uid": "web", "controller": True}


def granted_rights() -> AccessRights:
    """Return what deploy/kubernetes grants to the operator."""
    text = (ROOT / "deploy" / "kubernetes" / "base" / "operator-rights.yaml").read_text(encoding="utf-8")
    roles = [each for each in yaml.safe_load_all(text) if each["kind"] in ("Role", "ClusterRole")]
    return AccessRights(tuple(rule for role in roles for rule in rules_of_role(role)))


class World:
    """One cluster and its shard."""

    def __init__(self) -> None:
        self.clock = LoopClock()
        self.server = InMemoryApiServer(self.clock)
        self.shard = FakeShard()
        self.registry = CollectorRegistry()
        self.tasks: list[asyncio.Task[None]] = []

    async def start(self) -> FakeStream:
        """Start an operator process; return its session once the first roll-up has arrived."""
        api = InMemoryApi(self.server, user="operator", rights=granted_rights())
        views = OperatorViews(api, clock=self.clock, rng=random.Random(1))
        self.tasks.append(asyncio.create_task(views.run()))
        await views.wait_synced()
        self.registry = CollectorRegistry()
        agent = KubernetesAgent(
            cluster=ClusterId("blue"),
            api=api,
            views=views,
            bootstrap=StubBootstrapService(),
            events=EventRecorder(api, component="bigfleet-operator", instance="here", clock=self.clock),
            dialer=self.shard,
            metrics=OperatorMetrics(self.registry),
            clock=self.clock,
            rng=random.Random(2),
            settings=AgentSettings(session=SessionSettings()),
        )
        self.tasks.append(asyncio.create_task(agent.run()))
        stream = await self.shard.stream(len(self.shard.streams) + 1)
        await stream.wait_for(RollUp)
        return stream

    async def stop(self) -> None:
        """Kill the process."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.tasks.clear()

    def add_request(self, name: str, cpu: str = "1", **spec: Any) -> None:
        labels = {OWNED_BY_POD: f"uid-{name}"}
        body = {
            "metadata": {"name": name, "namespace": "default", "labels": labels},
            "spec": {"priority": 0, "resources": {"cpu": cpu, "memory": "1Gi"}, **spec},
        }
        self.server.put(CAPACITY_REQUESTS, body)

    def add_node(self, name: str, machine: str, *, cpu: str = "8") -> None:
        self.server.put(
            NODES,
            {
                "metadata": {"name": name, "labels": {MACHINE_ID: machine}, "annotations": {MACHINE_ID: machine}},
                "spec": {"providerID": f"sim://{machine}"},
                "status": {
                    "allocatable": {"cpu": cpu, "memory": "32Gi", "pods": "110"},
                    "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}],
                },
            },
        )

    def add_pod(self, name: str, node: str) -> None:
        self.server.put(
            PODS,
            {
                "metadata": {"name": name, "namespace": "default", "ownerReferences": [REPLICA_SET]},
                "spec": {
                    "nodeName": node,
                    "containers": [{"name": "c", "resources": {"requests": {"cpu": "1", "memory": "1Gi"}}}],
                },
                "status": {"phase": "Running"},
            },
        )

    def figure(self, name: str, labels: Mapping[str, str] | None = None) -> float | None:
        return self.registry.get_sample_value(f"bigfleet_operator_{name}", dict(labels or {}))


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    yield world
    await world.stop()


def configured(machine: str) -> NodeStateUpdate:
    return NodeStateUpdate(
        machine_id=machine,
        cluster_id="blue",
        state=MachineState.CONFIGURED,
        provider_id=f"sim://{machine}",
        resources={"cpu": "8", "memory": "32Gi"},
    )


async def test_requests_become_rows_and_are_acknowledged_on_the_shards_word(world: World) -> None:
    for number in range(3):
        world.add_request(f"web-{number}")
    stream = await world.start()

    (roll_up,) = stream.of(RollUp)[:1]
    assert isinstance(roll_up, RollUp)
    (need,) = roll_up.needs
    assert [(shape.resources["cpu"], shape.count) for shape in need.shapes] == [(1000, 3)]
    await world.clock.sleep(2)
    assert {each.status.phase for each in world.server.read_all(CAPACITY_REQUESTS)} <= {"", "Pending"}

    stream.say(
        frames.Acknowledgement(echo=frames.ECHO_ROLLUP, rollup_timestamp_unix_nanos=roll_up.timestamp_unix_nanos)
    )
    await world.clock.sleep(5)

    assert {each.status.phase for each in world.server.read_all(CAPACITY_REQUESTS)} == {"Acknowledged"}
    assert world.figure("capacity_requests", {"state": "acknowledged"}) == 3
    assert world.figure("rollup_acks_total", {"result": "accepted"}) == 1


async def test_daemon_sets_are_overheads_of_the_roll_up(world: World) -> None:
    containers = [{"name": "c", "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}}}]
    world.server.put(
        DAEMON_SETS,
        {
            "metadata": {"name": "agent", "namespace": "kube-system"},
            "spec": {"template": {"spec": {"containers": containers}}},
        },
    )
    stream = await world.start()

    (roll_up,) = stream.of(RollUp)[:1]
    assert isinstance(roll_up, RollUp)
    assert [overhead.resources["cpu"] for overhead in roll_up.overheads] == [100]


async def test_a_bound_machine_is_an_upcoming_node_and_its_node_is_reported(world: World) -> None:
    stream = await world.start()
    stream.say(configured("m-1"))
    stream.say(frames.Acknowledgement(echo=frames.ECHO_RESYNC))
    await world.clock.sleep(2)
    world.add_node("node-1", "m-1")

    status = await stream.wait_for(NodeStatus, len(stream.of(NodeStatus)) + 1)

    assert isinstance(status, NodeStatus)
    assert (status.machine_id, status.node_name, status.ready) == ("m-1", "node-1", True)
    await world.clock.sleep(2)
    (upcoming,) = world.server.read_all(UPCOMING_NODES)
    assert (upcoming.spec.machine_id, upcoming.status.phase) == ("m-1", "Ready")
    assert world.figure("upcoming_nodes", {"phase": "Ready"}) == 1


async def test_a_preempted_machine_is_drained_and_the_shard_hears_it(world: World) -> None:
    world.add_node("node-1", "m-1")
    world.add_pod("web", "node-1")
    stream = await world.start()
    stream.say(configured("m-1"))
    stream.say(frames.Acknowledgement(echo=frames.ECHO_RESYNC))
    await world.clock.sleep(2)
    stream.say(
        ReclaimInstruction(
            instruction_id="i-1",
            nodes=("node-1",),
            machine_ids=("m-1",),
            provider_ids=("sim://m-1",),
            grace_seconds=60,
            preemptor_priority=100,
            reason="preempt",
        )
    )
    await world.clock.sleep(3)
    (node,) = world.server.read_all(NODES)
    assert node.spec.unschedulable
    (pod,) = world.server.read_all(PODS)
    assert pod.metadata.deletion_timestamp is not None
    await InMemoryApi(world.server).delete(PODS, "web", namespace="default", grace_seconds=0)

    result = await stream.wait_for(DrainResult)

    assert isinstance(result, DrainResult)
    assert (result.machine_id, result.outcome) == ("m-1", DrainOutcome.DRAINED)
    await world.clock.sleep(2)
    assert world.figure("drains_total", {"outcome": "drained"}) == 1
    assert world.figure("evictions_total", {"result": "accepted"}) == 1


async def test_a_voluntary_reclaim_of_pods_that_fit_nowhere_else_touches_nothing(world: World) -> None:
    world.add_node("node-1", "m-1")
    world.add_pod("web", "node-1")
    stream = await world.start()
    stream.say(configured("m-1"))
    stream.say(frames.Acknowledgement(echo=frames.ECHO_RESYNC))
    await world.clock.sleep(2)
    stream.say(
        ReclaimInstruction(
            instruction_id="i-1",
            nodes=("node-1",),
            machine_ids=("m-1",),
            provider_ids=("sim://m-1",),
            grace_seconds=60,
        )
    )

    result = await stream.wait_for(DrainResult)

    assert isinstance(result, DrainResult)
    assert result.outcome is DrainOutcome.WOULD_NOT_FIT
    (node,) = world.server.read_all(NODES)
    assert not node.spec.unschedulable


async def test_a_forecast_says_whether_pods_would_fit_and_touches_nothing(world: World) -> None:
    """The question of a shard before an exchange: with the node that is to come the pods fit, without it not."""
    world.add_node("node-1", "m-1")
    world.add_node("node-2", "m-2", cpu="1")
    for number in range(2):
        world.add_pod(f"web-{number}", "node-1")
    stream = await world.start()
    for machine_id in ("m-1", "m-2"):
        stream.say(configured(machine_id))
    stream.say(frames.Acknowledgement(echo=frames.ECHO_RESYNC))
    await world.clock.sleep(2)
    coming = frames.ComingNodes(count=1, labels={}, resources={"cpu": "4", "memory": "8Gi"})
    answers = []
    for number, comes in enumerate(((), (coming,))):
        stream.say(frames.DrainForecastRequest(request_id=f"r{number}", machine_ids=("m-1",), comes=comes))
        answers.append(await stream.wait_for(frames.DrainForecast, number + 1))

    refused, fits = answers
    assert isinstance(refused, frames.DrainForecast)
    assert (refused.outcome, refused.machine_id) == (frames.ForecastOutcome.WOULD_NOT_FIT, "m-1")
    assert refused.message.startswith("pod default/web-1 fits on no other node: it requests cpu 1, memory 1Gi")
    assert fits == frames.DrainForecast(request_id="r1", outcome=frames.ForecastOutcome.FITS)
    assert not any(node.spec.unschedulable for node in world.server.read_all(NODES))


async def test_a_drain_outlives_its_process(world: World) -> None:
    world.add_node("node-1", "m-1")
    world.add_pod("web", "node-1")
    stream = await world.start()
    stream.say(configured("m-1"))
    stream.say(frames.Acknowledgement(echo=frames.ECHO_RESYNC))
    await world.clock.sleep(2)
    stream.say(
        ReclaimInstruction(
            instruction_id="i-1",
            nodes=("node-1",),
            machine_ids=("m-1",),
            provider_ids=("sim://m-1",),
            grace_seconds=600,
            preemptor_priority=100,
            reason="preempt",
        )
    )
    await world.clock.sleep(3)
    await world.stop()
    second = await world.start()
    await InMemoryApi(world.server).delete(PODS, "web", namespace="default", grace_seconds=0)

    result = await second.wait_for(DrainResult)

    assert isinstance(result, DrainResult)
    assert (result.instruction_id, result.outcome) == ("i-1", DrainOutcome.DRAINED)


async def test_bootstrap_requests_are_answered_while_the_api_server_is_away(world: World) -> None:
    stream = await world.start()
    world.server.go_down()
    stream.say(BootstrapRequest(request_id="r-1", cluster_id="blue", machine_id="m-1"))

    answer = await stream.wait_for(BootstrapResponse)

    assert isinstance(answer, BootstrapResponse)
    assert answer.user_data.startswith(b"#cloud-config")


async def test_no_roll_up_is_built_from_a_view_that_has_been_failing_for_a_minute(world: World) -> None:
    world.add_request("web-0")
    stream = await world.start()
    world.server.go_down()
    await world.clock.sleep(90)
    before = len(stream.of(RollUp))
    await world.clock.sleep(120)

    assert len(stream.of(RollUp)) == before
    skipped = world.figure("rollups_total", {"result": "skipped_unsynced"})
    assert skipped is not None
    assert skipped > 0


async def test_hints_are_shown_and_expire(world: World) -> None:
    stream = await world.start()
    stream.say(
        frames.AvailableCapacity(
            fingerprint="f",
            requirements=(),
            resources={"cpu": "8"},
            available_count=3,
            confidence=frames.Confidence.HIGH,
            price_usd_per_hour=0.25,
        )
    )
    await world.clock.sleep(3)
    (hint,) = world.server.read_all(AVAILABLE_CAPACITIES)
    assert (hint.spec.availability, hint.spec.available_count, str(hint.spec.cost)) == ("High", 3, "0.25")

    await world.clock.sleep(17 * 60)

    assert world.server.read_all(AVAILABLE_CAPACITIES) == []


async def test_a_machine_is_shown_while_hundreds_of_hints_wait_to_be_written(world: World) -> None:
    """Each request takes half a second, so the hints take minutes; at most two are written at the same time."""
    stream = await world.start()
    world.server.faults.latency_seconds = 0.5
    for number in range(500):
        stream.say(
            frames.AvailableCapacity(
                fingerprint=f"f{number}",
                requirements=(),
                resources={"cpu": "8"},
                available_count=3,
                confidence=frames.Confidence.HIGH,
                price_usd_per_hour=0.25,
            )
        )
    stream.say(configured("m1"))
    await world.clock.sleep(5)

    assert len(world.server.read_all(UPCOMING_NODES)) == 1
    assert 0 < len(world.server.read_all(AVAILABLE_CAPACITIES)) <= 2 * 5
