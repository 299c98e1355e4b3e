"""Objects that an API server takes and that are an attack end nothing and claim no machine that is not theirs."""

import asyncio
import copy
from typing import Any

import pytest
from structlog.testing import capture_logs

from bigfleet.model.frames import NodeStateUpdate, NodeStatus
from bigfleet.model.states import MachineState
from bigfleet.operator.kubernetes.api import Resource
from bigfleet.operator.kubernetes.resources import CAPACITY_REQUESTS, MACHINE_ID, NODES, PODS, UPCOMING_NODES
from tests.operator.test_agent import World
from tests.operator.test_odd_objects import FAILURES, OBJECTS, check_running, start_pod_controller

pytestmark = pytest.mark.virtual_time

LONG_NAME = ".".join(["x" * 61] * 4)
MANIFESTS: dict[Resource[Any], dict[str, Any]] = dict(OBJECTS)


def changed(resource: Resource[Any], name: str, **parts: Any) -> dict[str, Any]:
    """Return an object of that name with some parts of its metadata or spec replaced."""
    found = copy.deepcopy(MANIFESTS[resource])
    found["metadata"] |= {"name": name, "uid": name, **parts.pop("metadata", {})}
    found.setdefault("spec", {}).update(parts)
    return found


def hostile() -> list[tuple[Resource[Any], dict[str, Any]]]:
    """Return one object of each attack."""
    tolerations = [{"key": f"k{number}", "operator": "Exists"} for number in range(10_000)]
    term = {"matchExpressions": [{"key": "zone", "operator": "In", "values": [f"z{n}" for n in range(1_000)]}]}
    affinity = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term] * 1_000}}
    }
    circle = [{"apiVersion": "v1", "kind": "Pod", "name": "circle", "uid": "circle", "controller": True}]
    old = {"deletionTimestamp": "1971-01-01T00:00:00Z", "finalizers": ["example.com/never"]}
    return [
        (PODS, changed(PODS, "tolerant", tolerations=tolerations, nodeName="")),
        (PODS, changed(PODS, "choosy", affinity=affinity, nodeName="")),
        (PODS, changed(PODS, "circle", metadata={"ownerReferences": circle}, nodeName="")),
        (PODS, changed(PODS, "gone", metadata=old)),
        (PODS, changed(PODS, LONG_NAME, nodeName="")),
        (CAPACITY_REQUESTS, changed(CAPACITY_REQUESTS, "labels", metadata={"labels": {"k": "v" * 1_000_000}})),
        (CAPACITY_REQUESTS, changed(CAPACITY_REQUESTS, "amount", resources={"cpu": "9223372036854775807E"})),
        (CAPACITY_REQUESTS, changed(CAPACITY_REQUESTS, "gone", metadata=old)),
        (CAPACITY_REQUESTS, changed(CAPACITY_REQUESTS, LONG_NAME)),
        (UPCOMING_NODES, changed(UPCOMING_NODES, "gone", metadata=old)),
    ]


async def test_hostile_objects_end_nothing() -> None:
    """Operator and pod controller go on."""
    world = World()
    with capture_logs() as logs:
        await world.start()
        await start_pod_controller(world)
        for resource, manifest in hostile():
            world.server.put(resource, manifest)
            await asyncio.sleep(5)
            check_running(world)
        await asyncio.sleep(700)
        check_running(world)
    await world.stop()
    assert [line for line in logs if line["event"] in FAILURES] == []


async def test_nodes_that_claim_a_machine_of_another_cluster_report_nothing_of_it() -> None:
    """Labels, annotations and provider ids may be written by all who write Nodes; the shard's frames decide."""
    world = World()
    stream = await world.start()
    stream.say(NodeStateUpdate(machine_id="m", cluster_id="blue", state=MachineState.CONFIGURED, provider_id="sim://m"))
    world.server.put(NODES, MANIFESTS[NODES])
    await asyncio.sleep(30)
    for number in range(3):
        claim = {MACHINE_ID: "other"}
        world.server.put(NODES, changed(NODES, f"claims-{number}", metadata={"labels": claim, "annotations": claim}))
    await asyncio.sleep(60)
    await world.stop()
    statuses = [frame for frame in stream.received if isinstance(frame, NodeStatus)]
    assert {(frame.machine_id, frame.node_name) for frame in statuses} == {("m", "n")}
