"""What the shard hears of Nodes: at once when they change, at most every 30 s for what their pods request."""

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from bigfleet.model.frames import NodeStatus
from bigfleet.model.states import MachineState
from bigfleet.operator.kubernetes.resources import NODES, PODS
from bigfleet.rpc.wire.amounts import RESOURCE_NAMES_MAX
from bigfleet.rpc.wire.convert_session import operator_frame_from_bytes, operator_frame_to_wire
from tests.operator.nodes.node_world import NodeWorld, Operator

pytestmark = pytest.mark.virtual_time

CONFIGURED = MachineState.CONFIGURED


def said(operator: Operator) -> list[tuple[str, str, bool]]:
    return [(status.machine_id, status.node_name, status.ready) for status in operator.sent]


async def test_a_node_that_joins_gets_ready_and_goes_is_reported_at_once(world: NodeWorld) -> None:
    operator = world.operator()
    operator.see("m", CONFIGURED)
    world.node("n", "m", ready=False)
    await asyncio.sleep(1)
    world.node("n", "m")
    await asyncio.sleep(1)
    world.server.remove(NODES, "n")
    await asyncio.sleep(1)

    assert said(operator) == [("m", "n", False), ("m", "n", True), ("m", "", False)]


async def test_a_node_of_no_machine_of_the_shard_is_none_of_its_business(world: NodeWorld) -> None:
    world.node("stranger")
    world.node("n", "m")
    operator = world.operator()
    await asyncio.sleep(60)
    assert operator.sent == []
    operator.see("m", CONFIGURED)

    assert said(operator) == [("m", "n", True)]


async def test_a_heartbeat_says_nothing_new(world: NodeWorld) -> None:
    world.node("n", "m")
    operator = world.operator()
    operator.see("m", CONFIGURED)
    for beat in range(5):
        world.node("n", "m", annotations={"beat": str(beat)})
        await asyncio.sleep(10)

    assert len(operator.sent) == 1


async def test_what_pods_request_is_added_up_exactly_and_finished_ones_left_out(world: NodeWorld) -> None:
    world.node("n", "m")
    world.pod("a", "n", cpu="250m")
    world.pod("b", "n", cpu="1")
    world.pod("done", "n", cpu="5", phase="Succeeded")
    world.pod("daemon", "n", cpu="100m", owner="DaemonSet")
    world.pod("elsewhere", "o", cpu="7")
    world.pod("waiting", cpu="9")
    operator = world.operator()
    operator.see("m", CONFIGURED)

    (status,) = operator.sent
    assert (dict(status.requested), status.pods) == ({"cpu": "1350m"}, 3)


async def test_changes_of_pods_are_coalesced_to_one_status_in_thirty_seconds(world: NodeWorld) -> None:
    world.node("n", "m")
    operator = world.operator()
    operator.see("m", CONFIGURED)
    for number in range(120):
        world.pod(f"p{number}", "n", cpu="10m")
        await asyncio.sleep(1)
    await asyncio.sleep(60)

    loads = [status.pods for status in operator.sent]
    assert len(loads) <= 1 + 180 / 30
    assert loads == sorted(loads)
    assert (loads[0], loads[-1], dict(operator.sent[-1].requested)) == (0, 120, {"cpu": "1200m"})


async def test_a_load_that_is_back_where_it_was_is_not_reported(world: NodeWorld) -> None:
    world.node("n", "m")
    operator = world.operator()
    operator.see("m", CONFIGURED)
    world.pod("p", "n")
    await asyncio.sleep(1)
    world.server.remove(PODS, "p", "d")
    await asyncio.sleep(120)

    assert len(operator.sent) == 1


async def test_after_a_resync_all_are_reported_those_without_a_node_too(world: NodeWorld) -> None:
    world.node("n", "m")
    world.node("a", "twice")
    world.node("b", "twice")
    operator = world.operator()
    for machine in ("m", "lost", "twice"):
        operator.see(machine, CONFIGURED)
    operator.see("booting", MachineState.CONFIGURING)
    operator.sent.clear()
    operator.resync("m", "lost", "twice", "booting")

    assert said(operator) == [("lost", "", False), ("m", "n", True)]


async def test_nothing_more_is_said_of_a_machine_that_left(world: NodeWorld) -> None:
    world.node("n", "m")
    operator = world.operator()
    operator.see("m", CONFIGURED)
    operator.resync()
    operator.sent.clear()
    world.pod("p", "n")
    await asyncio.sleep(120)

    assert operator.sent == []
    assert operator.statuses.all() == []


async def test_each_status_says_when_it_was_observed(world: NodeWorld) -> None:
    world.node("n", "m")
    operator = world.operator()
    await asyncio.sleep(5)
    operator.see("m", CONFIGURED)

    assert operator.sent == [
        NodeStatus(machine_id="m", node_name="n", ready=True, observed_unix_nanos=operator.clock.unix_nanos())
    ]


async def test_a_pod_that_requests_too_many_resources_costs_its_node_some_of_their_names(world: NodeWorld) -> None:
    """The shard ends the session of a cluster whose frame names more resources than it takes."""
    world.node("n", "m")
    world.pod("gpu", "n", containers=[container("zzz.example.com/gpu")])
    world.pod("sprawling", "n", containers=[container(*(f"example.com/r{number:02d}" for number in range(40)))])
    operator = world.operator()
    with capture_logs() as logs:
        operator.see("m", CONFIGURED)
        world.pod("more", "n")
        await asyncio.sleep(60)

    assert len(operator.sent) == 2
    for status in operator.sent:
        assert operator_frame_from_bytes(operator_frame_to_wire(status).SerializeToString(), None) == status
        assert len(status.requested) == RESOURCE_NAMES_MAX
        assert status.requested["zzz.example.com/gpu"] == "1"
    assert [status.requested["cpu"] for status in operator.sent] == ["2", "3"]
    (entry,) = [each for each in logs if each["event"] == "operator.status_resources_left_out"]
    assert (entry["node"], entry["count"]) == ("n", 10)


def container(*resources: str) -> dict[str, Any]:
    """Return a container that requests 1 CPU, and 1 of each resource."""
    return {"name": "main", "resources": {"requests": dict.fromkeys(("cpu", *resources), "1")}}
