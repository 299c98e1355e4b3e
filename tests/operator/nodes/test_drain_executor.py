"""Draining Nodes: cordon, evictions, budgets, deadlines, force, withdrawal, restart (docs/spec/operator.md §7)."""

import asyncio
import json

import pytest

from bigfleet.model.frames import DrainOutcome
from bigfleet.model.states import MachineState
from bigfleet.operator.kubernetes.api import NO_SUCH_PATH, ApiError
from bigfleet.operator.kubernetes.resources import NODES, PODS, RECLAIM_ANNOTATION
from bigfleet.sim.kubernetes.faults import ApiCall, fail_times
from bigfleet.sim.kubernetes.rights import AccessRights, allow
from tests.operator.nodes.node_world import BUDGET, NodeWorld, Operator

pytestmark = pytest.mark.virtual_time

DRAINING, CONFIGURED, IDLE = MachineState.DRAINING, MachineState.CONFIGURED, MachineState.IDLE


def now() -> float:
    return asyncio.get_running_loop().time()


def evicted(operator: Operator) -> list[str]:
    return [call.name for call in operator.api.calls if call.resource == "pods/eviction"]


# ---- begin -------------------------------------------------------------------------------------------------------


async def test_a_node_is_cordoned_and_annotated_in_one_patch(world: NodeWorld) -> None:
    world.node("n", "m")
    world.pod("p", "n")
    operator = world.operator()
    operator.instruct("m", id="i-1", grace_seconds=60, preemptor_priority=7, reason="preempt")
    await asyncio.sleep(1)

    node = world.read_node("n")
    assert node.spec.unschedulable
    assert json.loads((node.metadata.annotations or {})[RECLAIM_ANNOTATION]) == {
        "instruction": "i-1",
        "machine": "m",
        "deadline": "2026-01-01T00:01:00.000Z",
        "reason": "preempt",
        "cordoned": True,
        "priority": 7,
    }
    assert [call.verb for call in operator.api.calls if call.resource == "nodes"] == ["get", "patch"]


async def test_the_event_on_the_node_says_who_takes_it_and_why(world: NodeWorld) -> None:
    world.node("n", "m")
    operator = world.operator()
    operator.instruct("m", preemptor_priority=7, reason="preempt")
    await operator.result()

    ((name, reason, message),) = operator.events
    assert (name, reason) == ("n", "BigFleetDrain")
    assert "priority 7" in message
    assert "reason preempt" in message


async def test_a_node_without_pods_is_drained_at_once(world: NodeWorld) -> None:
    world.node("n", "m")
    operator = world.operator()
    operator.instruct("m")

    assert (await operator.result()).outcome is DrainOutcome.DRAINED
    assert now() < 2


async def test_no_grace_is_half_a_minute(world: NodeWorld) -> None:
    world.node("n", "m")
    world.kubelet.stubborn.add("p")
    world.pod("p", "n")
    operator = world.operator()
    operator.instruct("m", grace_seconds=0)
    result = await operator.result()

    assert result.outcome is DrainOutcome.GRACE_EXPIRED
    assert 29 <= now() <= 32


async def test_a_patch_that_finds_a_changed_node_reads_it_again(world: NodeWorld) -> None:
    world.node("n", "m")
    operator = world.operator()
    refused = ApiError(409, "Conflict", "the object has been modified")
    operator.api.faults.refuse = fail_times(2, refused, verb="patch", resource="nodes")
    operator.instruct("m")

    assert (await operator.result()).outcome is DrainOutcome.DRAINED
    assert world.read_node("n").spec.unschedulable


async def test_a_node_that_cannot_be_patched_in_time_expires(world: NodeWorld) -> None:
    world.node("n", "m")
    operator = world.operator()
    operator.api.faults.is_down = True
    operator.instruct("m", grace_seconds=60)
    result = await operator.result()

    assert result.outcome is DrainOutcome.GRACE_EXPIRED
    assert "could not be cordoned" in result.message
    assert not world.read_node("n").spec.unschedulable


async def test_a_node_that_may_not_be_cordoned_ends_the_drain_at_its_deadline(world: NodeWorld) -> None:
    world.node("n", "m")
    operator = world.operator()
    operator.api.rights = AccessRights((allow("get,list,watch", "nodes,pods"),))
    operator.instruct("m")
    result = await operator.result()

    assert result.outcome is DrainOutcome.GRACE_EXPIRED
    assert "Node n could not be cordoned in time" in result.message
    assert "patch" in result.message


# ---- which node --------------------------------------------------------------------------------------------------


async def test_a_machine_without_a_node_is_reported_at_once(world: NodeWorld) -> None:
    operator = world.operator()
    operator.instruct("m")

    assert operator.outcomes()["m"][0] == "NODE_NOT_FOUND"


async def test_two_nodes_that_fit_are_named_and_left_alone(world: NodeWorld) -> None:
    world.node("a", "m")
    world.node("b", "m")
    world.pod("p", "a")
    operator = world.operator()
    operator.instruct("m")
    outcome, message = operator.outcomes()["m"]
    await asyncio.sleep(120)

    assert outcome == "FAILED"
    assert message.startswith("ambiguous")
    assert "a, b" in message
    assert world.pod_names() == ["p"]
    assert not world.read_node("a").spec.unschedulable


async def test_one_node_is_not_drained_for_two_machines_at_once(world: NodeWorld) -> None:
    world.node("n", "m")
    world.kubelet.stubborn.add("p")
    world.pod("p", "n")
    operator = world.operator()
    operator.instruct("m", id="i-1")
    operator.instruct("other", id="i-2", provider_ids=[""], nodes=["n"])
    await asyncio.sleep(1)

    # The Node carries the label of `m`: its name alone does not make it the other machine's.
    assert operator.outcomes() == {
        "other": ("NODE_NOT_FOUND", "no Node fits machine other, provider id ''"),
    }


async def test_a_node_that_is_being_drained_for_another_machine_is_ambiguous(world: NodeWorld) -> None:
    world.node("n", "m", provider_id="p://x/other")
    world.kubelet.stubborn.add("p")
    world.pod("p", "n")
    operator = world.operator()
    operator.instruct("m", id="i-1")
    operator.instruct("other", id="i-2", provider_ids=["p://x/other"])
    await asyncio.sleep(1)

    assert operator.outcomes() == {"other": ("FAILED", "ambiguous: Node n is being drained for machine m")}


async def test_a_node_that_goes_before_it_is_cordoned_is_not_found(world: NodeWorld) -> None:
    world.node("n", "m")
    operator = world.operator()
    operator.nodes_view.is_paused = True
    world.server.remove(NODES, "n")
    operator.instruct("m")

    assert (await operator.result()).outcome is DrainOutcome.NODE_NOT_FOUND


async def test_another_node_of_the_same_name_is_never_touched(world: NodeWorld) -> None:
    world.node("n", "m")
    operator = world.operator()
    operator.nodes_view.is_paused = True
    world.server.remove(NODES, "n")
    world.node("n", "another")
    operator.instruct("m")

    assert (await operator.result()).outcome is DrainOutcome.NODE_NOT_FOUND
    assert not world.read_node("n").spec.unschedulable


async def test_a_node_that_goes_during_the_drain_is_drained_once_its_pods_are_gone(world: NodeWorld) -> None:
    world.node("n", "m")
    world.kubelet.stubborn.add("p")
    world.pod("p", "n")
    operator = world.operator()
    operator.instruct("m", grace_seconds=600)
    await asyncio.sleep(5)
    world.server.remove(NODES, "n")
    await asyncio.sleep(20)
    assert operator.results == []
    world.server.remove(PODS, "p", "d")

    assert (await operator.result()).outcome is DrainOutcome.DRAINED


async def test_a_node_that_is_made_again_during_the_drain_fails_it(world: NodeWorld) -> None:
    world.node("n", "m")
    world.kubelet.stubborn.add("p")
    world.pod("p", "n")
    operator = world.operator()
    operator.instruct("m", grace_seconds=600)
    await asyncio.sleep(5)
    world.server.remove(NODES, "n")
    world.node("n", "m")
    result = await operator.result()

    assert result.outcome is DrainOutcome.FAILED
    assert "made again" in result.message


# ---- evictions ---------------------------------------------------------------------------------------------------


async def test_pods_that_do_not_move_do_not_hold_up_a_drain(world: NodeWorld) -> None:
    world.node("n", "m")
    world.pod("daemon", "n", owner="DaemonSet")
    world.pod("mirror", "n", annotations={"kubernetes.io/config.mirror": "x"})
    world.pod("done", "n", phase="Succeeded")
    world.pod("failed", "n", phase="Failed")
    world.pod("web", "n")
    world.pod("elsewhere", "other")
    operator = world.operator()
    operator.instruct("m")

    assert (await operator.result()).outcome is DrainOutcome.DRAINED
    assert evicted(operator) == ["web"]


async def test_a_terminating_pod_is_awaited_and_not_evicted_again(world: NodeWorld) -> None:
    world.kubelet.dwell_seconds = 25.0
    world.node("n", "m")
    world.pod("p", "n")
    operator = world.operator()
    operator.instruct("m", grace_seconds=600)
    result = await operator.result()

    assert result.outcome is DrainOutcome.DRAINED
    assert now() >= 25
    assert evicted(operator) == ["p"]


async def test_at_most_ten_pods_of_a_node_are_evicted_at_a_time(world: NodeWorld) -> None:
    world.node("n", "m")
    for number in range(35):
        world.pod(f"p{number}", "n")
    operator = world.operator()
    operator.api.faults.latency_seconds = 0.1
    begun: list[float] = []

    def note(call: ApiCall) -> ApiError | None:
        if call.resource == "pods/eviction":
            begun.append(now())
        return None

    operator.api.faults.refuse = note
    operator.instruct("m", grace_seconds=600)
    result = await operator.result()

    assert result.outcome is DrainOutcome.DRAINED
    assert [begun.count(moment) for moment in sorted(set(begun))] == [10, 10, 10, 5]


@pytest.mark.parametrize(("own_seconds", "sent_seconds"), [(30, None), (60, None), (3600, 61), (0, None)])
async def test_a_pods_own_grace_is_cut_to_what_is_left(
    world: NodeWorld, own_seconds: int, sent_seconds: int | None
) -> None:
    world.node("n", "m")
    world.kubelet.dwell_seconds = 5.0
    world.pod("p", "n", grace_seconds=own_seconds)
    operator = world.operator()
    operator.instruct("m", grace_seconds=61)
    await asyncio.sleep(1)

    found = world.server.read_all(PODS)
    if own_seconds == 0:
        assert found == []
        return
    granted = world.server.raw(PODS, "p", "d")["metadata"]["deletionGracePeriodSeconds"]
    assert granted == (sent_seconds or own_seconds)


async def test_a_budget_that_opens_late_delays_the_drain_and_is_not_bypassed(world: NodeWorld) -> None:
    world.node("n", "m")
    world.pod("p", "n", labels={"app": "db"})
    world.budget("db", {"app": "db"}, 0)
    operator = world.operator()
    operator.instruct("m", grace_seconds=600)
    await asyncio.sleep(100)
    assert world.pod_names() == ["p"]
    asked = len(evicted(operator))
    world.server.remove(BUDGET, "db", "d")
    result = await operator.result()

    assert result.outcome is DrainOutcome.DRAINED
    # Again after 5 s, as the server names no other time.
    assert 12 <= asked <= 21
    assert set(operator.observer.answers) == {"budget", "accepted"}


#: A budget that lets the API server evict everything: its controller has not seen that pods are gone.
BEHIND = 100


@pytest.mark.parametrize("desired_healthy", [1, 2, 3])
async def test_a_budget_whose_status_is_behind_is_kept_by_the_pods_that_are_there(
    world: NodeWorld, desired_healthy: int
) -> None:
    for number in range(2):
        world.node(f"n{number}", f"m{number}")
        for pod in range(2):
            world.pod(f"p{number}{pod}", f"n{number}", labels={"app": "db"}, ready=True)
    world.budget("db", {"app": "db"}, BEHIND, desired_healthy=desired_healthy)
    operator = world.operator()
    operator.instruct("m0", "m1", grace_seconds=600)
    await asyncio.sleep(100)

    assert len(world.pod_names()) == desired_healthy
    assert len(evicted(operator)) == 4 - desired_healthy
    assert set(operator.observer.answers) == {"budget", "accepted"}
    for number in range(4):
        world.pod(f"new-{number}", "", labels={"app": "db"})
        world.pod(f"new-{number}", "elsewhere", labels={"app": "db"}, ready=True)
    await operator.result(2)
    assert operator.outcomes() == {"m0": ("DRAINED", ""), "m1": ("DRAINED", "")}


async def test_a_pod_that_is_not_ready_or_not_selected_is_evicted_beside_a_budget_that_is_behind(
    world: NodeWorld,
) -> None:
    world.node("n", "m")
    world.pod("ready", "n", labels={"app": "db"}, ready=True)
    world.pod("broken", "n", labels={"app": "db"})
    world.pod("other", "n", labels={"app": "web"}, ready=True)
    world.budget("db", {"app": "db"}, BEHIND, desired_healthy=1, unhealthyPodEvictionPolicy="AlwaysAllow")
    operator = world.operator()
    operator.instruct("m", grace_seconds=600)
    await asyncio.sleep(60)

    assert world.pod_names() == ["ready"]


async def test_an_eviction_that_was_refused_leaves_the_pod_in_the_count(world: NodeWorld) -> None:
    """And a server that cannot list budgets is asked again; nothing is evicted meanwhile."""
    world.node("n", "m")
    for name in ("a", "b"):
        world.pod(name, "n", labels={"app": "db"}, ready=True)
    world.budget("db", {"app": "db"}, BEHIND, desired_healthy=1)
    operator = world.operator()
    refused = ApiError(500, "InternalError", "not now")
    operator.api.faults.refuse = fail_times(2, refused, resource="poddisruptionbudgets.policy")
    operator.instruct("m", grace_seconds=600)
    await asyncio.sleep(3)
    assert evicted(operator) == []
    operator.api.faults.refuse = fail_times(1, refused, resource="pods/eviction")
    await asyncio.sleep(60)

    assert len(world.pod_names()) == 1


async def test_an_eviction_that_was_cancelled_leaves_the_pod_in_the_count(world: NodeWorld) -> None:
    """Its drain was withdrawn before the request reached the server; a later drain has all that the budget allows."""
    for number, names in enumerate(("a", "b", "cd")):
        world.node(f"n{number}", f"m{number}")
        for name in names:
            world.pod(name, f"n{number}", labels={"app": "db"}, ready=True)
    world.budget("db", {"app": "db"}, BEHIND, desired_healthy=3)
    operator = world.operator()
    operator.api.faults.latency_seconds = 5.0
    operator.instruct("m0", id="1", grace_seconds=60)
    # Two requests for the cordon, and one for the budgets; the eviction is under way.
    await asyncio.sleep(17)
    assert evicted(operator) == ["a"]
    operator.see("m0", CONFIGURED)
    operator.api.faults.latency_seconds = 0.0
    operator.instruct("m1", id="2", grace_seconds=60)
    result = await operator.result()

    assert (result.machine_id, result.outcome) == ("m1", DrainOutcome.DRAINED)
    assert world.pod_names() == ["a", "c", "d"]


async def test_the_budgets_of_a_namespace_are_read_once_for_all_pods_that_they_block(world: NodeWorld) -> None:
    """With a request for each pod and attempt, large drains would delay every other request of the process."""
    for node in ("n0", "n1"):
        world.node(node, f"m-{node}")
        for number in range(10):
            world.pod(f"p-{node}-{number}", node, labels={"app": "db"}, ready=True)
    world.budget("db", {"app": "db"}, BEHIND, desired_healthy=20)
    operator = world.operator()
    operator.api.faults.latency_seconds = 0.1
    operator.instruct("m-n0", "m-n1", grace_seconds=600)
    await asyncio.sleep(60)

    assert len(operator.observer.answers) >= 120
    read = [call for call in operator.api.calls if call.resource == "poddisruptionbudgets.policy"]
    assert 5 <= len(read) <= 30


async def test_a_server_that_says_when_to_ask_again_is_asked_then(world: NodeWorld) -> None:
    world.node("n", "m")
    world.pod("p", "n")
    operator = world.operator()
    later = ApiError(429, "TooManyRequests", "later", causes=("DisruptionBudget",), retry_after_seconds=40.0)
    operator.api.faults.refuse = fail_times(1, later, resource="pods/eviction")
    operator.instruct("m", grace_seconds=600)
    await operator.result()

    assert 40 <= now() <= 50
    assert operator.observer.answers == ["budget", "accepted"]


async def test_a_pod_that_is_gone_or_another_is_not_waited_for(world: NodeWorld) -> None:
    world.node("n", "m")
    world.pod("gone", "n")
    world.pod("again", "n")
    operator = world.operator()
    operator.pods_view.is_paused = True
    world.server.remove(PODS, "gone", "d")
    world.server.remove(PODS, "again", "d")
    world.pod("again", "other")
    operator.instruct("m", grace_seconds=600)
    await asyncio.sleep(3)
    assert operator.observer.answers == ["gone", "gone"]
    operator.pods_view.resume()

    assert (await operator.result()).outcome is DrainOutcome.DRAINED
    assert world.pod_names() == ["again"]


@pytest.mark.parametrize("rights", [("get,list,watch,patch", "nodes,pods"), ("get,list,watch", "nodes,pods")])
async def test_a_voluntary_drain_that_stays_forbidden_leaves_the_machine_after_a_minute(
    world: NodeWorld, rights: tuple[str, str]
) -> None:
    """If it failed, the shard would take the machine with the pods on it."""
    world.node("n", "m")
    world.node("o")
    world.pod("p", "n")
    operator = world.operator()
    operator.api.rights = AccessRights((allow(*rights),))
    operator.instruct("m", grace_seconds=600, preemptor_priority=0, reason="reclaim")
    result = await operator.result()

    assert result.outcome is DrainOutcome.WOULD_NOT_FIT
    assert "the operator lacks a right: " in result.message
    assert "cannot" in result.message
    assert 60 <= now() < 100


async def test_a_preemption_that_stays_forbidden_waits_for_the_right_to_its_deadline(world: NodeWorld) -> None:
    world.node("n", "m")
    world.pod("p", "n")
    operator = world.operator()
    operator.api.rights = AccessRights((allow("get,list,watch,patch", "nodes,pods"),))
    operator.instruct("m", grace_seconds=600)
    result = await operator.result()

    assert result.outcome is DrainOutcome.GRACE_EXPIRED
    assert "1 pod was left: d/p; the operator lacks a right: evict pod d/p: " in result.message
    assert now() == pytest.approx(600, abs=5)


async def test_a_drain_goes_on_when_a_right_is_given_back(world: NodeWorld) -> None:
    world.node("n", "m")
    world.pod("p", "n")
    operator = world.operator()
    everything = operator.api.rights
    operator.api.rights = AccessRights((allow("get,list,watch,patch", "nodes,pods"),))
    operator.instruct("m", grace_seconds=600)
    await asyncio.sleep(200)
    assert operator.results == []
    operator.api.rights = everything

    assert (await operator.result()).outcome is DrainOutcome.DRAINED


async def test_a_long_retry_after_is_cut(world: NodeWorld) -> None:
    world.node("n", "m")
    world.pod("p", "n")
    operator = world.operator()
    busy = ApiError(429, "TooManyRequests", "later", retry_after_seconds=600.0)
    operator.api.faults.refuse = fail_times(1, busy, resource="pods/eviction")
    operator.instruct("m", grace_seconds=300)

    assert (await operator.result()).outcome is DrainOutcome.DRAINED
    assert now() < 90


async def test_a_load_balancer_without_an_api_server_ends_no_drain(world: NodeWorld) -> None:
    """It answers with 404 or 401 itself, which says nothing about the Node."""
    world.node("n", "m")
    world.pod("p", "n")
    operator = world.operator()
    for answer in (ApiError(404, NO_SUCH_PATH, "no backend"), ApiError(401, "Unauthorized", "Unauthorized")):
        operator.api.faults.refuse = fail_times(3, answer)
        operator.instruct("m", id=answer.reason, grace_seconds=600)
        await asyncio.sleep(1)
        assert operator.results == []

    assert (await operator.result()).outcome is DrainOutcome.DRAINED


async def test_an_api_server_that_refuses_everybody_while_it_starts_fails_no_drain(world: NodeWorld) -> None:
    world.node("n", "m")
    world.pod("p", "n")
    operator = world.operator()
    operator.api.faults.refuse = fail_times(4, ApiError(403, "Forbidden", "RBAC: no roles"))
    operator.instruct("m", grace_seconds=600)

    assert (await operator.result()).outcome is DrainOutcome.DRAINED


async def test_a_namespace_that_is_being_deleted_does_not_fail_the_drain(world: NodeWorld) -> None:
    world.node("n", "m")
    world.pod("p", "n")
    operator = world.operator()
    ending = ApiError(403, "Forbidden", "namespace d is being terminated", causes=("NamespaceTerminating",))
    operator.api.faults.refuse = fail_times(3, ending, resource="pods/eviction")
    operator.instruct("m", grace_seconds=600)

    assert (await operator.result()).outcome is DrainOutcome.DRAINED


async def test_a_cache_that_is_behind_does_not_make_a_node_empty(world: NodeWorld) -> None:
    world.node("n", "m")
    operator = world.operator()
    operator.pods_view.is_paused = True
    world.pod("late", "n")
    operator.instruct("m", grace_seconds=600)
    result = await operator.result()

    assert result.outcome is DrainOutcome.DRAINED
    assert evicted(operator) == ["late"]
    assert world.pod_names() == []


async def test_an_api_server_that_is_away_in_the_middle_is_waited_for(world: NodeWorld) -> None:
    world.node("n", "m")
    world.pod("web", "n")
    world.pod("db", "n", labels={"app": "db"})
    world.budget("db", {"app": "db"}, 0)
    operator = world.operator()
    operator.instruct("m", grace_seconds=600)
    await asyncio.sleep(5)
    operator.api.faults.is_down = True
    world.server.remove(BUDGET, "db", "d")
    await asyncio.sleep(200)
    assert operator.results == []
    assert world.pod_names() == ["db"]
    operator.api.faults.is_down = False

    assert (await operator.result()).outcome is DrainOutcome.DRAINED
    assert "error" in operator.observer.answers


async def test_a_server_that_never_answers_does_not_outlast_the_deadline(world: NodeWorld) -> None:
    world.node("n", "m")
    world.pod("p", "n")
    world.budget("all", {}, 0)
    operator = world.operator()
    operator.instruct("m", grace_seconds=60)
    await asyncio.sleep(3)
    operator.api.faults.is_hanging = True
    result = await operator.result()

    assert result.outcome is DrainOutcome.GRACE_EXPIRED
    assert now() < 75
