"""Which pods have no CapacityRequest because they run on Nodes that BigFleet did not provide."""

from typing import Any

import pytest

from bigfleet.operator.kubernetes.api import ApiError
from bigfleet.operator.kubernetes.resources import CAPACITY_REQUESTS, MACHINE_ID, NODES, UPCOMING_NODES
from bigfleet.operator.kubernetes.timestamps import rfc3339
from bigfleet.operator.pods.controller import SCHEDULING_SECONDS, UNMANAGED_AFTER_SECONDS, ReconcileOutcome
from tests.operator.pods.controller_world import ControllerWorld, controller_world

pytestmark = pytest.mark.virtual_time

RUNNING: dict[str, Any] = {"spec": {"nodeName": "n1"}, "status": {"phase": "Running"}}
UNAVAILABLE = ApiError(503, "ServiceUnavailable", "the server is busy")
#: Both are long before the simulated world begins.
EARLIER, LATER = "2020-01-01T00:00:00Z", "2020-01-02T00:00:00Z"
SETTLED_SECONDS = 5.0


def put_node(
    world: ControllerWorld, name: str = "n1", *, created: str = EARLIER, spec: Any = None, **metadata: Any
) -> None:
    world.server.put(NODES, {"metadata": {"name": name, "creationTimestamp": created} | metadata, "spec": spec or {}})


def put_machine(
    world: ControllerWorld,
    name: str = "un-m1",
    *,
    created: str = EARLIER,
    provider_id: str = "",
    node: str = "",
    phase: str = "Provisioning",
) -> None:
    status: dict[str, Any] = {"phase": phase, "providerID": provider_id}
    if node:
        status["nodeRef"] = {"kind": "Node", "name": node}
    world.server.put(UPCOMING_NODES, {"metadata": {"name": name, "creationTimestamp": created}, "status": status})


def pod_on_unmanaged_node(world: ControllerWorld) -> None:
    put_node(world)
    world.put_pod(**RUNNING)


async def test_a_pod_on_a_node_that_bigfleet_did_not_provide_gets_no_request() -> None:
    async with controller_world(prepare=pod_on_unmanaged_node) as world:
        await world.settle(60)

        assert world.requests() == []
        assert world.process.events.written == []


async def test_pods_on_a_young_node_count_because_it_may_be_a_machine_that_nothing_names_yet() -> None:
    """An operator that cannot write announces no machine, and its Node joins all the same."""
    async with controller_world() as world:
        put_node(world, created=rfc3339(world.clock.unix_nanos()))
        world.put_pod(**RUNNING)
        await world.settle(UNMANAGED_AFTER_SECONDS - 10)
        assert len(world.requests()) == 1
        await world.settle(20)

        assert world.requests() == []


async def test_a_pod_that_the_scheduler_puts_on_such_a_node_at_once_never_has_a_request() -> None:
    async with controller_world(prepare=put_node) as world:
        world.put_pod()
        await world.settle(SCHEDULING_SECONDS / 2)
        assert world.requests() == []

        world.put_pod(**RUNNING)
        await world.settle(60)
        assert world.requests() == []
        assert world.process.counted.outcomes[ReconcileOutcome.CR_CREATED] == 0


async def test_a_pod_that_the_scheduler_does_not_place_gets_its_request_soon() -> None:
    async with controller_world(prepare=put_node) as world:
        world.put_pod()
        await world.settle(SCHEDULING_SECONDS + 0.5)

        assert len(world.requests()) == 1


async def test_a_pod_that_the_scheduler_puts_on_such_a_node_later_loses_its_request() -> None:
    async with controller_world(prepare=put_node) as world:
        world.put_pod()
        await world.settle(30)
        assert len(world.requests()) == 1

        world.put_pod(**RUNNING)
        await world.settle(1)
        assert world.requests() == []


@pytest.mark.parametrize("mark", [None, {MACHINE_ID: "m1"}], ids=["no Node", "only Nodes of BigFleet"])
async def test_without_unmanaged_nodes_capacity_is_requested_at_once(mark: dict[str, str] | None) -> None:
    async with controller_world() as world:
        if mark is not None:
            put_node(world, labels=mark)
        await world.settle(5)
        world.put_pod()
        await world.settle(0.5)

        assert len(world.requests()) == 1


async def test_a_pod_that_is_no_longer_bound_there_gets_its_request_again() -> None:
    async with controller_world(prepare=pod_on_unmanaged_node) as world:
        await world.settle(SETTLED_SECONDS)
        world.server.remove(NODES, "n1")
        await world.settle(2)

        assert len(world.requests()) == 1


@pytest.mark.parametrize(
    "mark",
    [
        {"labels": {MACHINE_ID: "m1"}},
        {"annotations": {MACHINE_ID: "m1"}},
        {"spec": {"providerID": "sim://zone/m1"}},
        {"spec": {"providerID": "sim:///other/spelling/m1"}},
    ],
    ids=["label", "annotation", "equal provider id", "equal last part"],
)
async def test_a_node_that_is_tied_to_a_machine_counts(mark: dict[str, Any]) -> None:
    def prepare(world: ControllerWorld) -> None:
        put_machine(world, provider_id="sim://zone/m1", node="another")
        put_node(world, **mark)
        world.put_pod(**RUNNING)

    async with controller_world(prepare=prepare) as world:
        await world.settle(60)

        assert len(world.requests()) == 1


async def test_a_number_at_the_end_of_a_provider_id_ties_no_node() -> None:
    def prepare(world: ControllerWorld) -> None:
        put_machine(world, provider_id="azure:///scale-sets/a/0", node="another")
        put_node(world, spec={"providerID": "azure:///scale-sets/b/0"})
        world.put_pod(**RUNNING)

    async with controller_world(prepare=prepare) as world:
        await world.settle(60)

        assert world.requests() == []


async def test_a_node_that_an_upcoming_node_names_counts() -> None:
    def prepare(world: ControllerWorld) -> None:
        put_machine(world, node="n1")
        put_node(world)
        world.put_pod(**RUNNING)

    async with controller_world(prepare=prepare) as world:
        await world.settle(60)

        assert len(world.requests()) == 1


@pytest.mark.parametrize(("created", "counts"), [(EARLIER, False), ("2020-01-01T12:00:00Z", True), (LATER, True)])
async def test_a_node_that_may_be_an_awaited_machine_counts(created: str, *, counts: bool) -> None:
    """Its label may come later than its pods, or never: a machine without a Node could be this one."""

    def prepare(world: ControllerWorld) -> None:
        put_machine(world, created="2020-01-01T12:00:00Z")
        put_node(world, created=created)
        world.put_pod(**RUNNING)

    async with controller_world(prepare=prepare) as world:
        await world.settle(60)

        assert len(world.requests()) == int(counts)


async def test_when_the_awaited_machine_has_its_node_the_others_stop_counting() -> None:
    def prepare(world: ControllerWorld) -> None:
        put_machine(world)
        put_node(world, created=LATER)
        world.put_pod(**RUNNING)

    async with controller_world(prepare=prepare) as world:
        await world.settle(SETTLED_SECONDS)
        assert len(world.requests()) == 1

        put_machine(world, node="another", phase="Ready")
        await world.settle(SETTLED_SECONDS)
        assert world.requests() == []


@pytest.mark.parametrize("phase", ["Failed", "Drained"])
async def test_no_node_is_awaited_for_a_machine_that_serves_no_need(phase: str) -> None:
    def prepare(world: ControllerWorld) -> None:
        put_machine(world, phase=phase)
        put_node(world, created=LATER)
        world.put_pod(**RUNNING)

    async with controller_world(prepare=prepare) as world:
        await world.settle(60)

        assert world.requests() == []


async def test_a_node_that_lost_its_label_still_counts() -> None:
    async with controller_world(prepare=lambda world: put_node(world, labels={MACHINE_ID: "m1"})) as world:
        world.put_pod(**RUNNING)
        await world.settle(5)
        before = world.request
        put_node(world, uid=world.server.raw(NODES, "n1")["metadata"]["uid"])
        await world.settle(60)

        assert world.request == before


async def test_another_node_under_the_same_name_is_judged_anew() -> None:
    async with controller_world(prepare=lambda world: put_node(world, labels={MACHINE_ID: "m1"})) as world:
        world.put_pod(**RUNNING)
        await world.settle(5)
        world.server.remove(NODES, "n1")
        put_node(world)
        await world.settle(SETTLED_SECONDS)

        assert world.requests() == []


async def test_a_node_that_is_labelled_late_gets_the_requests_of_its_pods() -> None:
    async with controller_world(prepare=pod_on_unmanaged_node) as world:
        await world.settle(SETTLED_SECONDS)
        assert world.requests() == []

        put_node(world, uid=world.server.raw(NODES, "n1")["metadata"]["uid"], labels={MACHINE_ID: "m1"})
        await world.settle(2)
        assert len(world.requests()) == 1


async def test_cordoning_makes_the_pods_of_a_node_demand() -> None:
    """So that machines are there before a person drains it."""
    async with controller_world(prepare=pod_on_unmanaged_node) as world:
        await world.settle(SETTLED_SECONDS)
        uid = world.server.raw(NODES, "n1")["metadata"]["uid"]
        put_node(world, uid=uid, spec={"unschedulable": True})
        await world.settle(2)
        assert len(world.requests()) == 1

        put_node(world, uid=uid)
        await world.settle(SETTLED_SECONDS)
        assert world.requests() == []


async def test_a_pod_on_a_node_that_is_not_known_counts() -> None:
    async with controller_world() as world:
        world.put_pod(**RUNNING)
        await world.settle(60)

        assert len(world.requests()) == 1


async def test_nothing_is_deleted_while_the_watch_of_nodes_fails() -> None:
    async with controller_world(prepare=put_node) as world:
        world.put_pod()
        await world.settle(5)
        world.process.nodes_api.faults.refuse = lambda call: UNAVAILABLE
        world.server.drop_watches()
        await world.settle(5)
        world.put_pod(**RUNNING)
        await world.settle(120)
        assert len(world.requests()) == 1

        world.process.nodes_api.faults.refuse = lambda call: None
        await world.settle(60)
        assert world.requests() == []


async def test_a_failing_watch_of_nodes_creates_no_requests_either() -> None:
    async with controller_world(prepare=pod_on_unmanaged_node) as world:
        await world.settle(SETTLED_SECONDS)
        world.process.nodes_api.faults.refuse = lambda call: UNAVAILABLE
        world.server.drop_watches()
        # All pods are looked at again meanwhile.
        await world.settle(1300)

        assert world.requests() == []


async def test_before_a_deletion_the_api_server_is_asked_for_the_node() -> None:
    async with controller_world(prepare=put_node) as world:
        world.put_pod()
        await world.settle(5)
        # The caches hear of no change any more, and do not notice.
        world.process.nodes_api.faults.is_hanging = True
        put_node(world, uid=world.server.raw(NODES, "n1")["metadata"]["uid"], labels={MACHINE_ID: "m1"})
        world.put_pod(**RUNNING)
        await world.settle(30)

        assert len(world.requests()) == 1


async def test_the_api_server_is_asked_once_for_the_pods_of_a_node() -> None:
    async with controller_world(prepare=put_node) as world:
        for number in range(20):
            world.put_pod(f"web-{number}")
        await world.settle(5)
        for number in range(20):
            world.put_pod(f"web-{number}", **RUNNING)
        await world.settle(SETTLED_SECONDS)
        asked = [call for call in world.process.api.calls if call.verb == "get" and call.resource == "nodes"]

        assert world.requests() == []
        # The workers that look at pods of the Node at the same time ask each.
        assert len(asked) <= 4


async def test_only_the_pods_of_a_node_that_changed_are_looked_at() -> None:
    def prepare(world: ControllerWorld) -> None:
        for number in range(10):
            put_node(world, f"n{number}", labels={MACHINE_ID: f"m{number}"} if number else {})
            world.put_pod(f"web-{number}", spec={"nodeName": f"n{number}"}, status={"phase": "Running"})

    async with controller_world(prepare=prepare) as world:
        await world.settle(SETTLED_SECONDS)
        before = world.process.counted.outcomes.total()
        put_node(world, "n0", uid=world.server.raw(NODES, "n0")["metadata"]["uid"], labels={MACHINE_ID: "m0"})
        await world.settle(5)

        assert len(world.requests()) == 10
        # Its pod, and the pod again when its new request is seen.
        assert world.process.counted.outcomes.total() - before <= 2


async def test_a_request_that_a_person_makes_for_such_a_pod_is_deleted() -> None:
    async with controller_world(prepare=pod_on_unmanaged_node) as world:
        await world.settle(SETTLED_SECONDS)
        pod = world.put_pod(**RUNNING)
        world.server.put(
            CAPACITY_REQUESTS,
            {
                "metadata": {
                    "name": f"cr-{pod.metadata.uid}",
                    "namespace": "shop",
                    "labels": {"bigfleet.lucy.sh/owned-by-pod": pod.metadata.uid},
                },
                "spec": {"priority": 1, "resources": {"cpu": "1"}},
            },
        )
        await world.settle(SETTLED_SECONDS)

        assert world.requests() == []
