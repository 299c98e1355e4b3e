"""Any course of pods, Nodes, requests, watches and the controller ends with one request for each pod that counts."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigfleet.operator.kubernetes.api import ApiError, JsonObject, Resource
from bigfleet.operator.kubernetes.objects import CapacityRequestSpec, PodObject
from bigfleet.operator.kubernetes.resources import (
    CAPACITY_REQUESTS,
    MACHINE_ID,
    NODES,
    OWNED_BY_POD,
    PODS,
    UPCOMING_NODES,
)
from bigfleet.operator.pods.mapping import PodStanding, map_pod, request_name, standing_of
from bigfleet.sim.kernel.virtual_time import VirtualTimeLoop
from tests.engine.proof import in_proportion
from tests.operator.pods.controller_world import ControllerWorld

POD_NAMES = ("a", "b", "c")
UNSUPPORTED: dict[str, Any] = {
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [{"key": "n", "operator": "Gt", "values": ["1"]}]}]
            }
        }
    }
}
KINDS_OF_PODS: dict[str, dict[str, Any]] = {
    "pending": {},
    "larger": {"spec": {"containers": [{"resources": {"requests": {"cpu": "3"}}}]}},
    "running": {"spec": {"nodeName": "n1"}, "status": {"phase": "Running"}},
    "ended": {"status": {"phase": "Succeeded"}},
    "gated": {"spec": {"schedulingGates": [{"name": "g"}]}},
    "mirror": {"metadata": {"annotations": {"kubernetes.io/config.mirror": "m"}}},
    "unsupported": {"spec": UNSUPPORTED},
}
#: What the Node n1 may be, and what the UpcomingNode of a machine may say.
KINDS_OF_NODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "labelled": {"metadata": {"labels": {MACHINE_ID: "m1"}}},
    "annotated": {"metadata": {"annotations": {MACHINE_ID: "m1"}}},
    "cordoned": {"spec": {"unschedulable": True}},
    "with provider id": {"spec": {"providerID": "sim://zone/m1"}},
}
KINDS_OF_MACHINES: dict[str, dict[str, Any]] = {
    "awaited": {"phase": "Provisioning"},
    "failed": {"phase": "Failed"},
    "joined": {"phase": "Ready", "nodeRef": {"kind": "Node", "name": "n1"}},
    "joined elsewhere": {"phase": "Ready", "nodeRef": {"kind": "Node", "name": "n2"}},
    "same provider id": {"phase": "Failed", "providerID": "sim://zone/m1"},
    "other spelling": {"phase": "Failed", "providerID": "m1"},
}
NODE_STEPS = st.one_of(
    st.tuples(st.just("put"), st.just("a"), st.sampled_from(["pending", "running"])),
    st.tuples(st.just("put node"), st.just("n1"), st.sampled_from(sorted(KINDS_OF_NODES))),
    st.tuples(st.just("replace node"), st.just("n1"), st.sampled_from(sorted(KINDS_OF_NODES))),
    st.tuples(st.just("put machine"), st.just("un-m1"), st.sampled_from(sorted(KINDS_OF_MACHINES))),
    st.tuples(st.just("remove machine"), st.just("un-m1"), st.just("")),
    st.tuples(st.just("nodes hang"), st.just(""), st.just("")),
    st.tuples(st.just("drop watches"), st.just(""), st.just("")),
    st.tuples(st.just("restart"), st.just(""), st.just("")),
    st.tuples(st.just("heal"), st.just(""), st.just("")),
)
STEPS = st.one_of(
    NODE_STEPS,
    st.tuples(st.just("put"), st.sampled_from(POD_NAMES), st.sampled_from(sorted(KINDS_OF_PODS))),
    st.tuples(st.just("remove"), st.sampled_from(POD_NAMES), st.just("")),
    st.tuples(st.just("delete request"), st.sampled_from(POD_NAMES), st.just("")),
    st.tuples(st.just("edit request"), st.sampled_from(POD_NAMES), st.just("")),
    st.tuples(st.just("restart"), st.just(""), st.just("")),
    st.tuples(st.just("change leader"), st.just(""), st.just("")),
    st.tuples(st.just("drop watches"), st.just(""), st.just("")),
    st.tuples(st.just("forget history"), st.just(""), st.just("")),
    st.tuples(st.just("down"), st.just(""), st.just("")),
    st.tuples(st.just("lose answers"), st.just(""), st.just("")),
    st.tuples(st.just("pods hang"), st.just(""), st.just("")),
    st.tuples(st.just("heal"), st.just(""), st.just("")),
)
PAUSES = st.sampled_from([0.0, 0.0, 0.3, 2.0, 8.0, 40.0])


async def take(world: ControllerWorld, what: str, name: str, kind: str) -> None:
    """Let one thing happen."""
    server, process = world.server, world.process
    match what:
        case "put":
            world.put_pod(name, **KINDS_OF_PODS[kind])
        case "remove" if server.read(PODS, name, "shop") is not None:
            server.remove(PODS, name, "shop")
        case "delete request" | "edit request":
            pod = server.read(PODS, name, "shop")
            key = request_name(pod.metadata.uid if pod is not None else "")
            if server.read(CAPACITY_REQUESTS, key, "shop") is None:
                return
            if what == "delete request":
                server.remove(CAPACITY_REQUESTS, key, "shop")
                return
            stored = server.raw(CAPACITY_REQUESTS, key, "shop")
            stored["spec"]["priority"] = 77
            stored["metadata"].pop("labels", None)
            server.put(CAPACITY_REQUESTS, stored)
        case "put node" | "replace node":
            if what == "replace node" and server.read(NODES, name) is not None:
                server.remove(NODES, name)
            put_with_identity(world, NODES, name, KINDS_OF_NODES[kind])
        case "put machine":
            put_with_identity(world, UPCOMING_NODES, name, {"status": KINDS_OF_MACHINES[kind]})
        case "remove machine" if server.read(UPCOMING_NODES, name) is not None:
            server.remove(UPCOMING_NODES, name)
        case "nodes hang":
            process.nodes_api.faults.is_hanging = True
        case "restart":
            await world.restart()
        case "change leader":
            await process.follow()
            process.lead()
        case "drop watches":
            server.drop_watches()
        case "forget history":
            server.store.compact()
            server.drop_watches()
        case "down":
            server.go_down()
        case "lose answers":
            process.api.faults.lose_answer = lambda call: call.verb in ("patch", "delete")
        case "pods hang":
            process.pods_api.faults.is_hanging = True
        case "heal":
            heal(world)


def put_with_identity(world: ControllerWorld, resource: Resource[Any], name: str, body: dict[str, Any]) -> None:
    """Store an object; one that is there already stays the same object."""
    known = world.server.read(resource, name)
    identity = {"name": name}
    if known is not None:
        identity |= {"uid": known.metadata.uid, "creationTimestamp": known.metadata.creation_timestamp or ""}
    world.server.put(resource, {**body, "metadata": {**body.get("metadata", {}), **identity}})


def heal(world: ControllerWorld) -> None:
    process = world.process
    world.server.come_up()
    for api in (process.api, process.pods_api, process.requests_api, process.nodes_api):
        api.faults.is_hanging = False
        api.faults.lose_answer = lambda call: False
        api.faults.refuse = lambda call: None


def has_its_place(world: ControllerWorld, pod: PodObject) -> bool:
    """Return whether a pod runs on a Node that BigFleet did not provide: the rule, stated once more."""
    node = world.server.read(NODES, pod.spec.node_name)
    if node is None or node.spec.unschedulable:
        return False
    if MACHINE_ID in (node.metadata.labels or {}) or MACHINE_ID in (node.metadata.annotations or {}):
        return False
    for machine in world.server.read_all(UPCOMING_NODES):
        status = machine.status
        if status.provider_id and node.spec.provider_id.endswith(status.provider_id):
            return False
        if status.node_ref is not None and status.node_ref.name == node.metadata.name:
            return False
        is_awaited = status.node_ref is None and status.phase != "Failed"
        announced, created = machine.metadata.creation_timestamp, node.metadata.creation_timestamp
        if is_awaited and (announced or "") <= (created or ""):
            return False
    return True


def wanted_requests(world: ControllerWorld) -> dict[tuple[str, str], JsonObject]:
    wanted = {}
    for pod in world.server.read_all(PODS):
        if standing_of(pod) is PodStanding.REQUESTS and not has_its_place(world, pod):
            spec = map_pod(pod).spec
            if spec is not None:
                wanted[(pod.metadata.namespace, request_name(pod.metadata.uid))] = spec
    return wanted


def assert_one_request_a_pod(world: ControllerWorld, *, may_be_more: bool) -> None:
    """Each pod that counts has one request, with the spec of its mapping; nothing else has one.

    With `may_be_more`, pods on a Node that was once BigFleet's may have one as well.
    """
    wanted = wanted_requests(world)
    # One whose label was removed and whose pod is gone belongs to the garbage collector of the cluster.
    labelled = [request for request in world.requests() if OWNED_BY_POD in (request.metadata.labels or {})]
    stored = {request.metadata.key: request for request in labelled}
    bound = {
        (pod.metadata.namespace, request_name(pod.metadata.uid))
        for pod in world.server.read_all(PODS)
        if pod.spec.node_name
    }

    assert stored.keys() - (bound if may_be_more else set()) == wanted.keys() - (bound if may_be_more else set())
    assert stored.keys() >= wanted.keys()
    for key, spec in wanted.items():
        assert stored[key].spec == msgspec.convert(spec, CapacityRequestSpec)
        assert stored[key].status.phase == "Pending"
        assert [owner.uid for owner in stored[key].metadata.owner_references or ()] == [key[1].removeprefix("cr-")]


async def live_through(
    steps: list[tuple[tuple[str, str, str], float]], prepare: Callable[[ControllerWorld], object] = lambda world: None
) -> None:
    world = ControllerWorld()
    prepare(world)
    world.process.start()
    try:
        for (what, name, kind), pause_seconds in steps:
            await take(world, what, name, kind)
            if pause_seconds:
                await world.clock.sleep(pause_seconds)
        heal(world)
        # A client notices after minutes that a connection is dead.
        await world.settle(900)
        assert_one_request_a_pod(world, may_be_more=True)
        # The next process knows the present alone.
        await world.restart()
        await world.settle(60)
        assert_one_request_a_pod(world, may_be_more=False)
        before = world.server.store.version
        await world.settle(700)
        assert world.server.store.version == before, "a controller at rest writes nothing"
    finally:
        await world.process.end()


@given(st.lists(st.tuples(STEPS, PAUSES), max_size=18))
@settings(max_examples=in_proportion(240))
def test_any_course_ends_with_one_request_for_each_pod(steps: list[tuple[tuple[str, str, str], float]]) -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(live_through(steps))


def on_unmanaged_node(world: ControllerWorld) -> None:
    put_with_identity(world, NODES, "n1", {})
    world.put_pod("a", **KINDS_OF_PODS["running"])


@given(st.lists(st.tuples(NODE_STEPS, PAUSES), min_size=1, max_size=8))
@settings(max_examples=in_proportion(600))
def test_any_course_of_nodes_and_machines_ends_with_the_requests_that_count(
    steps: list[tuple[tuple[str, str, str], float]],
) -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(live_through(steps, on_unmanaged_node))


@pytest.mark.virtual_time
async def test_a_living_pod_never_loses_its_request_while_the_server_comes_and_goes() -> None:
    world = ControllerWorld()
    world.process.start()
    for name in POD_NAMES:
        world.put_pod(name)
    await world.settle(10)
    uids = {request.metadata.uid for request in world.requests()}
    busy = ApiError(503, "ServiceUnavailable", "the server is busy")
    for _ in range(20):
        world.server.go_down()
        await world.settle(17)
        world.server.come_up()
        world.process.pods_api.faults.refuse = lambda call: busy if call.verb == "list" else None
        world.server.store.compact()
        world.server.drop_watches()
        await world.settle(9)
        world.process.pods_api.faults.refuse = lambda call: None
        await world.settle(23)
        assert {request.metadata.uid for request in world.requests()} == uids
    await world.process.end()

    assert len(uids) == 3
