"""Whatever happens to pods, requests, watches and the controller: it ends with one request for each pod."""

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigfleet.operator.kubernetes.api import ApiError
from bigfleet.operator.kubernetes.objects import CapacityRequestSpec
from bigfleet.operator.kubernetes.resources import CAPACITY_REQUESTS, OWNED_BY_POD, PODS
from bigfleet.operator.pods.mapping import PodStanding, map_pod, request_name, standing_of
from bigfleet.sim.kernel.virtual_time import VirtualTimeLoop
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
STEPS = st.one_of(
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


def heal(world: ControllerWorld) -> None:
    world.server.come_up()
    for api in (world.process.api, world.process.pods_api, world.process.requests_api):
        api.faults.is_hanging = False
        api.faults.lose_answer = lambda call: False
        api.faults.refuse = lambda call: None


def assert_one_request_a_pod(world: ControllerWorld) -> None:
    """Each pod that has a request has one, with the spec of its mapping; nothing else has one."""
    wanted = {}
    for pod in world.server.read_all(PODS):
        if standing_of(pod) is PodStanding.REQUESTS:
            spec = map_pod(pod).spec
            if spec is not None:
                wanted[(pod.metadata.namespace, request_name(pod.metadata.uid))] = spec
    # One whose label was removed and whose pod is gone belongs to the garbage collector of the cluster.
    labelled = [request for request in world.requests() if OWNED_BY_POD in (request.metadata.labels or {})]
    stored = {request.metadata.key: request for request in labelled}

    assert stored.keys() == wanted.keys()
    for key, spec in wanted.items():
        assert stored[key].spec == msgspec.convert(spec, CapacityRequestSpec)
        assert stored[key].status.phase == "Pending"
        assert [owner.uid for owner in stored[key].metadata.owner_references or ()] == [key[1].removeprefix("cr-")]


async def live_through(steps: list[tuple[tuple[str, str, str], float]]) -> None:
    world = ControllerWorld()
    world.process.start()
    try:
        for (what, name, kind), pause_seconds in steps:
            await take(world, what, name, kind)
            if pause_seconds:
                await world.clock.sleep(pause_seconds)
        heal(world)
        # A client notices after minutes that a connection is dead.
        await world.settle(900)
        assert_one_request_a_pod(world)
        before = world.server.store.version
        await world.settle(700)
        assert world.server.store.version == before, "a controller at rest writes nothing"
    finally:
        await world.process.end()


@given(st.lists(st.tuples(STEPS, PAUSES), max_size=14))
@settings(max_examples=60)
def test_any_course_ends_with_one_request_for_each_pod(steps: list[tuple[tuple[str, str, str], float]]) -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(live_through(steps))


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
