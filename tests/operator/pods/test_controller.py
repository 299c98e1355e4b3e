"""How the pod controller keeps one CapacityRequest for each pod: changes, people, failures, restarts."""

import asyncio
from typing import Any

import pytest

from bigfleet.operator.kubernetes.api import ApiError, JsonObject
from bigfleet.operator.kubernetes.resources import (
    CAPACITY_REQUESTS,
    EVICTIONS,
    OWNED_BY_POD,
    PERSISTENT_VOLUME_CLAIMS,
    PERSISTENT_VOLUMES,
    PODS,
)
from bigfleet.operator.pods.controller import REFUSED_REASON, ReconcileOutcome
from bigfleet.operator.pods.defaults import ClassPenalties, PenaltyDefaults
from bigfleet.sim.kubernetes.faults import fail_times
from bigfleet.sim.kubernetes.kinds import kind_key
from tests.operator.pods.controller_world import ControllerWorld, controller_world, spec_of

pytestmark = pytest.mark.virtual_time

UNAVAILABLE = ApiError(503, "ServiceUnavailable", "the server is busy")


def resources(cpu: str) -> dict[str, Any]:
    return {"containers": [{"name": "main", "resources": {"requests": {"cpu": cpu}}}]}


async def test_a_pod_gets_one_request_that_it_owns() -> None:
    async with controller_world() as world:
        pod = world.put_pod()
        await world.settle(5)
        request = world.request
        (owner,) = list(request.metadata.owner_references or [])

        assert request.metadata.key == ("shop", f"cr-{pod.metadata.uid}")
        assert request.metadata.labels == {OWNED_BY_POD: pod.metadata.uid}
        assert (owner.kind, owner.name, owner.uid, owner.controller) == ("Pod", "web-0", pod.metadata.uid, True)
        assert request.status.phase == "Pending"
        assert spec_of(request)["resources"] == {"cpu": "1"}


async def test_pods_that_were_there_before_the_start_get_requests() -> None:
    async with controller_world(prepare=lambda world: [world.put_pod(f"web-{n}") for n in range(20)]) as world:
        await world.settle(30)

        assert len(world.requests()) == 20


async def test_a_request_is_written_by_the_field_manager_of_the_pod_controller() -> None:
    async with controller_world() as world:
        world.put_pod()
        await world.settle(5)
        record = world.server.store.get(kind_key(CAPACITY_REQUESTS), world.request.metadata.key)

        assert record is not None
        assert ("bigfleet-pod-controller", True) in {(owner.name, owner.applies) for owner in record.owners}


async def test_a_pod_has_its_request_also_while_it_runs() -> None:
    async with controller_world() as world:
        world.put_pod()
        await world.settle(5)
        before = world.request
        world.put_pod(spec={"nodeName": "n1"}, status={"phase": "Running"})
        await world.settle(5)

        assert world.request.metadata.resource_version == before.metadata.resource_version


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
async def test_a_pod_that_has_ended_loses_its_request(phase: str) -> None:
    async with controller_world() as world:
        world.put_pod()
        await world.settle(5)
        world.put_pod(status={"phase": phase})
        await world.settle(2)

        assert world.requests() == []
        assert world.process.counted.outcomes[ReconcileOutcome.CR_DELETED] == 1


async def test_a_pod_that_is_evicted_loses_its_request_while_it_still_ends() -> None:
    async with controller_world() as world:
        world.put_pod(spec={"nodeName": "n1"}, status={"phase": "Running"})
        await world.settle(5)
        eviction: JsonObject = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": "web-0", "namespace": "shop"},
            "deleteOptions": {"gracePeriodSeconds": 600},
        }
        await world.user.create(EVICTIONS, eviction, namespace="shop", name="web-0")
        await world.settle(5)

        assert world.server.read(PODS, "web-0", "shop") is not None
        assert world.requests() == []


async def test_a_pod_that_is_being_deleted_keeps_its_request() -> None:
    async with controller_world() as world:
        world.put_pod(spec={"nodeName": "n1"}, status={"phase": "Running"})
        await world.settle(5)
        before = world.request
        await world.user.delete(PODS, "web-0", namespace="shop", grace_seconds=600)
        await world.settle(60)

        assert world.server.read(PODS, "web-0", "shop") is not None
        assert world.request == before

        world.server.remove(PODS, "web-0", "shop")
        await world.settle(30)

        assert world.requests() == []


@pytest.mark.parametrize(
    ("metadata", "spec"),
    [
        ({"annotations": {"kubernetes.io/config.mirror": "x"}}, {}),
        ({"ownerReferences": [{"kind": "DaemonSet", "name": "logs", "uid": "u", "controller": True}]}, {}),
        ({}, {"schedulingGates": [{"name": "quota"}]}),
        ({"deletionTimestamp": "2026-01-01T00:00:00Z"}, {}),
    ],
    ids=["mirror pod", "DaemonSet", "scheduling gate", "being deleted"],
)
async def test_a_pod_that_is_excluded_gets_no_request(metadata: Any, spec: Any) -> None:
    async with controller_world() as world:
        world.put_pod(metadata=metadata, spec=spec)
        await world.settle(30)

        assert world.requests() == []
        assert world.process.counted.outcomes[ReconcileOutcome.EXCLUDED] >= 1


async def test_a_pod_gets_its_request_when_its_last_gate_is_removed() -> None:
    async with controller_world() as world:
        world.put_pod(spec={"schedulingGates": [{"name": "quota"}]})
        await world.settle(5)
        world.put_pod()
        await world.settle(5)

        assert len(world.requests()) == 1


async def test_a_pod_of_another_owner_than_a_daemon_set_gets_a_request() -> None:
    owners = [
        {"kind": "DaemonSet", "name": "d", "uid": "d"},
        {"kind": "Job", "name": "j", "uid": "j", "controller": True},
    ]
    async with controller_world() as world:
        world.put_pod(metadata={"ownerReferences": owners})
        await world.settle(5)

        assert len(world.requests()) == 1


# ---- changes ----------------------------------------------------------------------------------------------------


async def test_the_request_follows_a_pod_that_is_resized() -> None:
    async with controller_world() as world:
        world.put_pod()
        await world.settle(5)
        world.put_pod(spec=resources("3"))
        await world.settle(5)

        assert spec_of(world.request)["resources"] == {"cpu": "3"}
        assert world.process.counted.outcomes[ReconcileOutcome.CR_UPDATED] == 1


async def test_a_penalty_comes_and_goes_with_its_annotation() -> None:
    defaults = PenaltyDefaults({"high": ClassPenalties(reclamation_penalty="7")})
    async with controller_world(defaults) as world:
        world.put_pod(
            metadata={"annotations": {"bigfleet.lucy.sh/interruption-penalty": "20"}},
            spec={"priorityClassName": "high"},
        )
        await world.settle(5)
        spec = world.request.spec
        assert (spec.interruption_penalty, spec.reclamation_penalty) == ("20", "7")

        world.put_pod(spec={"priorityClassName": "high"})
        await world.settle(5)
        spec = world.request.spec
        assert (spec.interruption_penalty, spec.reclamation_penalty) == (None, "7")


async def test_a_change_that_the_request_does_not_depend_on_writes_nothing() -> None:
    async with controller_world() as world:
        world.put_pod()
        await world.settle(5)
        before = len(world.process.api.calls)
        world.put_pod(status={"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]})
        await world.settle(5)

        assert [call for call in list(world.process.api.calls)[before:] if call.verb in ("patch", "create")] == []


async def test_equal_quantities_in_another_spelling_are_left_as_they_are() -> None:
    async with controller_world() as world:
        world.put_pod(spec=resources("1500m"))
        await world.settle(5)
        body: JsonObject = {"spec": {"resources": {"cpu": "1.5"}}}
        await world.user.patch(CAPACITY_REQUESTS, world.request.metadata.name, body, namespace="shop")
        await world.settle(5)

        assert spec_of(world.request)["resources"] == {"cpu": "1.5"}


async def test_a_request_asks_for_the_zone_of_a_volume_once_it_is_bound() -> None:
    claim = {"metadata": {"name": "data", "namespace": "shop"}, "spec": {}}
    terms = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]
    async with controller_world() as world:
        world.put_pod(spec={"volumes": [{"name": "d", "persistentVolumeClaim": {"claimName": "data"}}]})
        world.server.put(PERSISTENT_VOLUME_CLAIMS, claim)
        await world.settle(5)
        assert [each.key for each in world.request.spec.requirements or ()] == ["node.kubernetes.io/instance-type"]

        world.server.put(PERSISTENT_VOLUME_CLAIMS, claim | {"spec": {"volumeName": "pv"}})
        await world.settle(5)
        assert [each.key for each in world.request.spec.requirements or ()] == ["node.kubernetes.io/instance-type"]

        affinity = {"nodeAffinity": {"required": {"nodeSelectorTerms": terms}}}
        world.server.put(PERSISTENT_VOLUMES, {"metadata": {"name": "pv"}, "spec": affinity})
        await world.settle(5)
        assert [each.key for each in world.request.spec.requirements or ()] == ["zone"]

        world.server.remove(PERSISTENT_VOLUMES, "pv")
        await world.settle(5)
        assert [each.key for each in world.request.spec.requirements or ()] == ["node.kubernetes.io/instance-type"]


async def test_a_pod_whose_affinity_cannot_be_expressed_has_no_request_and_an_event() -> None:
    terms = [{"matchExpressions": [{"key": "cores", "operator": "Gt", "values": ["8"]}]}]
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}
    async with controller_world() as world:
        world.put_pod(spec={"affinity": affinity})
        await world.settle(5)

        assert world.requests() == []
        assert [(name, reason) for name, reason, _ in world.process.events.written] == [
            ("web-0", "UnsupportedAffinity")
        ]
        assert world.process.counted.outcomes[ReconcileOutcome.UNSUPPORTED] == 1


async def test_a_finding_is_announced_once_and_again_when_it_changes() -> None:
    def anti(*keys: str) -> dict[str, Any]:
        terms = [{"topologyKey": key, "labelSelector": {"matchLabels": {"app": "web"}}} for key in keys]
        return {"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}}

    async with controller_world() as world:
        world.put_pod(spec=anti("zone", "rack"))
        await world.settle(5)
        world.put_pod(spec=anti("zone", "rack"), metadata={"annotations": {"a": "b"}})
        await world.settle(5)
        ((_, reason, message),) = world.process.events.written
        assert reason == "UnsupportedAntiAffinity"
        assert "zone" in message
        assert "rack" in message

        world.put_pod(spec=anti("zone"))
        await world.settle(5)
        assert len(world.process.events.written) == 2


async def test_an_event_that_was_not_taken_is_offered_again() -> None:
    async with controller_world() as world:
        world.process.events.accepts = False
        world.put_pod(spec={"resourceClaims": [{"name": "gpu"}]})
        await world.settle(5)
        offered = len(world.process.events.written)
        world.process.events.accepts = True
        await world.settle(1300)

        assert offered >= 1
        assert len(world.process.events.written) == offered + 1


# ---- people -----------------------------------------------------------------------------------------------------


async def test_a_request_that_a_person_deleted_comes_back() -> None:
    async with controller_world() as world:
        world.put_pod()
        await world.settle(5)
        before = world.request
        await world.user.delete(CAPACITY_REQUESTS, before.metadata.name, namespace="shop")
        await world.settle(5)

        assert world.request.metadata.uid != before.metadata.uid
        assert world.request.status.phase == "Pending"


async def test_what_a_person_writes_into_a_request_is_reverted() -> None:
    async with controller_world() as world:
        world.put_pod()
        await world.settle(5)
        before = world.request
        body: JsonObject = {"spec": {"priority": 9, "interruptionPenalty": "5", "resources": {"memory": "1Gi"}}}
        await world.user.patch(CAPACITY_REQUESTS, before.metadata.name, body, namespace="shop")
        await world.settle(5)

        assert world.request.spec == before.spec


async def test_a_label_that_a_person_removed_comes_back() -> None:
    async with controller_world() as world:
        pod = world.put_pod()
        await world.settle(5)
        body: JsonObject = {"metadata": {"labels": {OWNED_BY_POD: None}}}
        await world.user.patch(CAPACITY_REQUESTS, world.request.metadata.name, body, namespace="shop")
        await world.settle(5)

        assert world.request.metadata.labels == {OWNED_BY_POD: pod.metadata.uid}


async def test_a_copy_of_a_request_under_another_name_is_deleted() -> None:
    async with controller_world() as world:
        pod = world.put_pod()
        await world.settle(5)
        name = world.request.metadata.name
        copy = world.server.raw(CAPACITY_REQUESTS, name, "shop")
        labels = {OWNED_BY_POD: pod.metadata.uid}
        copy["metadata"] = {"name": "copy", "namespace": "shop", "labels": labels}
        world.server.put(CAPACITY_REQUESTS, copy)
        await world.settle(5)

        assert [each.metadata.name for each in world.requests()] == [name]


async def test_requests_of_others_are_left_alone() -> None:
    async with controller_world() as world:
        spec = {"priority": 0, "resources": {"cpu": "1"}}
        world.server.put(CAPACITY_REQUESTS, {"metadata": {"name": "mine", "namespace": "shop"}, "spec": spec})
        await world.settle(700)

        assert [each.metadata.name for each in world.requests()] == ["mine"]


async def test_an_acknowledged_request_stays_acknowledged() -> None:
    async with controller_world() as world:
        world.put_pod()
        await world.settle(5)
        body: JsonObject = {"status": {"phase": "Acknowledged"}}
        await world.user.patch(CAPACITY_REQUESTS.status, world.request.metadata.name, body, namespace="shop")
        world.put_pod(spec=resources("2"))
        await world.settle(700)

        assert spec_of(world.request)["resources"] == {"cpu": "2"}
        assert world.request.status.phase == "Acknowledged"


async def test_the_phase_is_not_set_on_a_request_that_another_has_acknowledged_meanwhile() -> None:
    """The operator writes between the creation and the write of the phase."""
    async with controller_world() as world:
        seen: list[str] = []

        def acknowledge(call: Any) -> None:
            if call.resource.endswith("/status") and not seen:
                seen.append(call.name)
                stored = world.server.raw(CAPACITY_REQUESTS, call.name, "shop")
                world.server.put(CAPACITY_REQUESTS, stored | {"status": {"phase": "Acknowledged"}})

        world.process.api.faults.refuse = acknowledge
        world.put_pod()
        await world.settle(30)

        assert seen == [world.request.metadata.name]
        assert world.request.status.phase == "Acknowledged"


# ---- pods that are gone -----------------------------------------------------------------------------------------


async def test_the_request_of_a_pod_that_is_gone_is_left_to_the_garbage_collector_first() -> None:
    async with controller_world() as world:
        world.put_pod()
        await world.settle(5)
        world.server.remove(PODS, "web-0", "shop")
        await world.settle(2)
        assert len(world.requests()) == 1

        world.server.collect_garbage()
        await world.settle(10)
        assert world.requests() == []
        assert [call for call in world.process.api.calls if call.verb == "delete"] == []


async def test_the_request_of_a_pod_that_vanished_while_nobody_watched_is_deleted() -> None:
    async with controller_world() as world:
        world.put_pod()
        await world.settle(5)
        await world.process.end()
        world.server.remove(PODS, "web-0", "shop")
        await world.restart()
        await world.settle(30)

        assert world.requests() == []


async def test_nothing_is_deleted_before_the_pods_have_been_read() -> None:
    async with controller_world() as world:
        world.put_pod()
        await world.settle(5)
        await world.process.end()
        world.server.remove(PODS, "web-0", "shop")
        await world.restart()
        world.process.pods_api.faults.refuse = fail_times(1_000_000, UNAVAILABLE)
        await world.settle(600)
        assert len(world.requests()) == 1

        world.process.pods_api.faults.refuse = lambda call: None
        await world.settle(120)
        assert world.requests() == []


async def test_nothing_is_deleted_while_the_pods_are_not_followed() -> None:
    """The request names a pod that the cache does not have: it may have come since the watch broke."""
    async with controller_world() as world:
        await world.settle(5)
        world.process.pods_api.faults.is_down = True
        world.server.drop_watches()
        await world.settle(60)
        pod = world.put_pod("new")
        labels = {OWNED_BY_POD: pod.metadata.uid}
        metadata = {"name": f"cr-{pod.metadata.uid}", "namespace": "shop", "labels": labels}
        spec = {"priority": 0, "resources": {"cpu": "1"}}
        made = world.server.put(CAPACITY_REQUESTS, {"metadata": metadata, "spec": spec})
        await world.settle(600)
        assert world.request.metadata.uid == made.metadata.uid

        world.process.pods_api.faults.is_down = False
        await world.settle(120)
        assert world.request.metadata.uid == made.metadata.uid


async def test_a_request_whose_pod_lives_at_the_server_stays_although_the_cache_does_not_have_it() -> None:
    """A watch that says nothing looks healthy for a while; the server is asked before anything is deleted."""
    async with controller_world() as world:
        await world.settle(5)
        world.process.pods_api.faults.is_hanging = True
        pod = world.put_pod("new")
        owner = {"apiVersion": "v1", "kind": "Pod", "name": "new", "uid": pod.metadata.uid, "controller": True}
        metadata = {
            "name": f"cr-{pod.metadata.uid}",
            "namespace": "shop",
            "labels": {OWNED_BY_POD: pod.metadata.uid},
            "ownerReferences": [owner],
        }
        spec = {"priority": 0, "resources": {"cpu": "1"}}
        made = world.server.put(CAPACITY_REQUESTS, {"metadata": metadata, "spec": spec})
        await world.settle(20)

        assert world.process.controller.index.pod(pod.metadata.uid) is None
        assert world.process.pods.failing_seconds() == 0
        assert world.request.metadata.uid == made.metadata.uid


# ---- failures ---------------------------------------------------------------------------------------------------


async def test_a_busy_server_is_asked_again() -> None:
    async with controller_world() as world:
        world.process.api.faults.refuse = fail_times(5, UNAVAILABLE, verb="patch")
        world.put_pod()
        await world.settle(60)

        assert len(world.requests()) == 1
        assert world.process.counted.outcomes[ReconcileOutcome.ERROR] == 5


async def test_a_lost_answer_makes_no_second_request() -> None:
    async with controller_world() as world:
        lost = [True, True, True]
        world.process.api.faults.lose_answer = lambda call: call.verb == "patch" and bool(lost) and lost.pop()
        for n in range(3):
            world.put_pod(f"web-{n}")
        await world.settle(60)

        assert len(world.requests()) == 3
        assert {each.status.phase for each in world.requests()} == {"Pending"}


async def test_the_pause_of_the_server_is_honoured() -> None:
    busy = ApiError(429, "TooManyRequests", "slow down", retry_after_seconds=40.0)
    async with controller_world() as world:
        world.process.api.faults.refuse = fail_times(1, busy, verb="patch")
        world.put_pod()
        await world.settle(39)
        assert world.requests() == []
        await world.settle(5)
        assert len(world.requests()) == 1


async def test_a_request_that_the_server_refuses_is_announced_and_harms_no_other_pod() -> None:
    refused = ApiError(422, "Invalid", "spec.resources: Invalid value")
    async with controller_world() as world:
        bad = world.put_pod("bad")
        world.process.api.faults.refuse = lambda call: refused if call.name == f"cr-{bad.metadata.uid}" else None
        for n in range(5):
            world.put_pod(f"web-{n}")
        await world.settle(30)

        assert len(world.requests()) == 5
        ((name, reason, message),) = world.process.events.written
        assert (name, reason) == ("bad", REFUSED_REASON)
        assert "spec.resources: Invalid value; no capacity is requested for this pod" in message


async def test_a_pod_that_breaks_the_mapping_harms_no_other_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    from bigfleet.operator.pods import controller
    from bigfleet.operator.pods.mapping import map_pod

    def breaking(pod: Any, **rest: Any) -> Any:
        if pod.metadata.name == "bad":
            raise ZeroDivisionError
        return map_pod(pod, **rest)

    monkeypatch.setattr(controller, "map_pod", breaking)
    async with controller_world() as world:
        for name in ("a", "bad", "z"):
            world.put_pod(name)
        await world.settle(30)

        assert len(world.requests()) == 2


async def test_the_request_of_a_pod_that_cannot_be_read_stays_as_it_is() -> None:
    """An object that could not be decoded has nothing but its metadata in the caches."""
    async with controller_world() as world:
        world.put_pod()
        await world.settle(5)
        before = world.request
        world.put_pod(spec={"containers": []})
        await world.settle(30)

        assert world.request == before


# ---- leadership -------------------------------------------------------------------------------------------------


async def test_a_follower_writes_nothing_and_catches_up_when_it_leads() -> None:
    async with controller_world() as world:
        await world.settle(5)
        await world.process.follow()
        world.put_pod("a")
        world.put_pod("b")
        await world.settle(60)
        assert world.requests() == []
        assert world.process.controller.backlog == 0

        world.process.lead()
        await world.settle(5)
        assert len(world.requests()) == 2


async def test_a_stop_lets_writes_that_run_finish() -> None:
    async with controller_world() as world:
        await world.settle(5)
        await world.process.follow()
        world.process.api.faults.latency_seconds = 3.0
        world.put_pod()
        running = asyncio.create_task(world.process.controller.run())
        await world.settle(1)
        world.process.controller.stop()
        await running

        assert world.request.status.phase == "Pending"


async def test_a_stop_before_the_caches_are_read_ends_the_run() -> None:
    world = ControllerWorld()
    world.process.pods_api.faults.is_down = True
    world.process.start(leads=False)
    running = asyncio.create_task(world.process.controller.run())
    await world.settle(5)
    world.process.controller.stop()
    await world.settle(5)

    assert running.done()
    await world.process.end()
