"""How drains of Nodes end: deadlines, force, withdrawal, restart (docs/spec/operator.md §7)."""

import asyncio
import json

import pytest

from bigfleet.model.frames import DrainOutcome
from bigfleet.model.states import MachineState
from bigfleet.operator.kubernetes.api import ApiError, JsonObject
from bigfleet.operator.kubernetes.resources import NODES, RECLAIM_ANNOTATION
from bigfleet.operator.nodes.drain_annotation import DrainAnnotation
from bigfleet.sim.kernel.virtual_time import START_UNIX_SECONDS
from bigfleet.sim.kubernetes.faults import ApiCall
from bigfleet.sim.kubernetes.rights import AccessRights, allow
from tests.operator.nodes.node_world import NodeWorld
from tests.operator.nodes.test_drain_executor import evicted, now

pytestmark = pytest.mark.virtual_time

DRAINING, CONFIGURED, IDLE = MachineState.DRAINING, MachineState.CONFIGURED, MachineState.IDLE


# ---- the deadline ------------------------------------------------------------------------------------------------


async def test_pods_that_never_end_expire_the_grace_with_their_names(world: NodeWorld) -> None:
    world.node("n", "m")
    names = [f"p{number:02d}" for number in range(12)]
    for name in names:
        world.pod(name, "n")
    world.kubelet.stubborn.update(names)
    operator = world.operator()
    operator.instruct("m", grace_seconds=60)
    result = await operator.result()

    assert result.outcome is DrainOutcome.GRACE_EXPIRED
    assert 60 <= now() <= 62
    assert result.message == f"12 pods were left: {', '.join(f'd/{name}' for name in names[:10])}, …"
    assert len(world.pod_names()) == 12


async def test_force_deletes_what_is_left_when_the_grace_ends(world: NodeWorld) -> None:
    world.node("n", "m")
    world.pod("blocked", "n", labels={"app": "db"})
    world.pod("stuck", "n")
    world.pod("daemon", "n", owner="DaemonSet")
    world.budget("db", {"app": "db"}, 0)
    world.kubelet.stubborn.add("stuck")
    operator = world.operator(force=True)
    operator.instruct("m", grace_seconds=60)
    await asyncio.sleep(55)
    assert world.pod_names() == ["blocked", "daemon", "stuck"]
    result = await operator.result()

    assert result.outcome is DrainOutcome.DRAINED
    assert result.message == "forced: 2 pods were left: d/blocked, d/stuck at the deadline, and were deleted"
    assert world.pod_names() == ["daemon"]
    assert operator.observer.ends == ["forced"]


async def test_force_without_the_right_fails_with_its_text(world: NodeWorld) -> None:
    world.node("n", "m")
    world.pod("p", "n")
    world.kubelet.stubborn.add("p")
    operator = world.operator(force=True)
    operator.api.rights = AccessRights((allow("get,list,watch,patch", "nodes,pods"), allow("create", "pods/eviction")))
    operator.instruct("m", grace_seconds=30)
    result = await operator.result()

    assert result.outcome is DrainOutcome.FAILED
    assert "delete pod d/p" in result.message


async def test_an_earlier_deadline_hastens_and_a_later_one_does_not(world: NodeWorld) -> None:
    world.node("n", "m")
    world.pod("p", "n")
    world.kubelet.stubborn.add("p")
    operator = world.operator()
    operator.instruct("m", grace_seconds=600)
    await asyncio.sleep(10)
    operator.instruct("m", grace_seconds=3000)
    await asyncio.sleep(10)
    operator.instruct("m", grace_seconds=40)
    await asyncio.sleep(1)
    assert '"deadline":"2026-01-01T00:01:00.' in (world.reclaim_of("n") or "")
    result = await operator.result()

    assert result.outcome is DrainOutcome.GRACE_EXPIRED
    assert 60 <= now() <= 63
    assert len(operator.results) == 1


async def test_a_new_instruction_takes_the_place_of_the_old(world: NodeWorld) -> None:
    world.node("n", "m")
    world.pod("p", "n")
    world.kubelet.stubborn.add("p")
    operator = world.operator()
    operator.instruct("m", id="old", grace_seconds=600)
    await asyncio.sleep(10)
    operator.instruct("m", id="new", grace_seconds=30)
    result = await operator.result()

    assert (result.instruction_id, result.outcome) == ("new", DrainOutcome.GRACE_EXPIRED)
    annotation = json.loads(world.reclaim_of("n") or "")
    assert (annotation["instruction"], annotation["cordoned"]) == ("new", True)
    assert len(operator.results) == 1


# ---- withdrawal --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after_seconds", [0.0, 0.15, 0.3, 1.0, 4.0, 50.0, 100.0])
async def test_a_withdrawn_node_is_in_service_again_at_every_step(world: NodeWorld, after_seconds: float) -> None:
    """Before the patch, in the patch, during evictions, and after the result."""
    world.node("n", "m")
    world.pod("p", "n")
    world.kubelet.stubborn.add("p")
    operator = world.operator()
    operator.api.faults.latency_seconds = 0.1
    operator.instruct("m", grace_seconds=60)
    await asyncio.sleep(after_seconds)
    operator.see("m", CONFIGURED)
    await asyncio.sleep(30)

    assert not world.read_node("n").spec.unschedulable
    assert world.reclaim_of("n") is None
    asked = len(evicted(operator))
    await asyncio.sleep(600)
    assert len(evicted(operator)) == asked
    assert len(operator.results) == (after_seconds > 60)


async def test_a_withdrawal_is_shown_on_the_node(world: NodeWorld) -> None:
    world.node("n", "m")
    world.pod("p", "n")
    world.kubelet.stubborn.add("p")
    operator = world.operator()
    operator.instruct("m", grace_seconds=60)
    await asyncio.sleep(5)
    operator.see("m", CONFIGURED)
    await asyncio.sleep(5)

    assert [reason for _node, reason, _message in operator.events] == ["BigFleetDrain", "BigFleetDrainWithdrawn"]
    assert operator.observer.ends == ["withdrawn"]


async def test_a_node_that_a_person_cordoned_stays_cordoned(world: NodeWorld) -> None:
    world.node("n", "m", unschedulable=True)
    world.pod("p", "n")
    world.kubelet.stubborn.add("p")
    operator = world.operator()
    operator.instruct("m", id="old", grace_seconds=60)
    await asyncio.sleep(5)
    operator.instruct("m", id="new", grace_seconds=60)
    await asyncio.sleep(5)
    operator.see("m", CONFIGURED)
    await asyncio.sleep(5)

    assert world.read_node("n").spec.unschedulable
    assert world.reclaim_of("n") is None


async def test_a_withdrawal_waits_for_the_api_server(world: NodeWorld) -> None:
    world.node("n", "m")
    world.pod("p", "n")
    world.kubelet.stubborn.add("p")
    operator = world.operator()
    operator.instruct("m", grace_seconds=600)
    await asyncio.sleep(5)
    operator.api.faults.is_down = True
    operator.see("m", CONFIGURED)
    await asyncio.sleep(300)
    assert world.read_node("n").spec.unschedulable
    operator.api.faults.is_down = False
    await asyncio.sleep(61)

    assert not world.read_node("n").spec.unschedulable


async def test_a_lost_answer_to_the_cordon_does_not_leave_the_node_cordoned(world: NodeWorld) -> None:
    world.node("n", "m")
    operator = world.operator()
    operator.api.faults.lose_answer = lambda call: call.verb == "patch"
    operator.instruct("m", grace_seconds=60)
    await asyncio.sleep(0.5)
    operator.see("m", CONFIGURED)
    operator.api.faults.lose_answer = lambda call: False
    await asyncio.sleep(60)

    assert not world.read_node("n").spec.unschedulable
    assert world.reclaim_of("n") is None


async def test_a_new_instruction_during_a_withdrawal_wins(world: NodeWorld) -> None:
    world.node("n", "m")
    world.pod("p", "n")
    world.kubelet.stubborn.add("p")
    operator = world.operator()
    operator.api.faults.latency_seconds = 0.1
    operator.instruct("m", id="old", grace_seconds=60)
    await asyncio.sleep(5)
    operator.see("m", CONFIGURED)
    await asyncio.sleep(0.15)
    operator.see("m", DRAINING)
    operator.instruct("m", id="new", grace_seconds=60)
    await asyncio.sleep(10)

    assert world.read_node("n").spec.unschedulable
    annotation = json.loads(world.reclaim_of("n") or "")
    assert (annotation["instruction"], annotation["cordoned"]) == ("new", True)


async def test_a_machine_that_is_gone_ends_its_drain_and_leaves_the_annotation(world: NodeWorld) -> None:
    world.node("n", "m")
    world.pod("p", "n")
    world.kubelet.stubborn.add("p")
    operator = world.operator()
    operator.instruct("m", grace_seconds=60)
    await asyncio.sleep(5)
    operator.see("m", IDLE)
    await asyncio.sleep(600)

    assert operator.results == []
    assert world.reclaim_of("n") is not None
    assert world.read_node("n").spec.unschedulable


async def test_a_machine_that_serves_again_under_its_old_node_is_uncordoned(world: NodeWorld) -> None:
    world.node("n", "m")
    operator = world.operator()
    operator.instruct("m", grace_seconds=60)
    await operator.result()
    operator.see("m", IDLE)
    await asyncio.sleep(100)
    operator.see("m", CONFIGURED)
    await asyncio.sleep(5)

    assert not world.read_node("n").spec.unschedulable
    assert world.reclaim_of("n") is None


async def test_a_cordon_that_arrives_after_the_withdrawal_is_taken_back(world: NodeWorld) -> None:
    """A request that was given up may take effect late."""
    node = world.node("n", "m")
    operator = world.operator()
    operator.see("m", CONFIGURED)
    await asyncio.sleep(5)
    late = DrainAnnotation(
        instruction="i", machine="m", deadline_seconds=START_UNIX_SECONDS + 60.0, reason="reclaim", cordoned=True
    )
    metadata: JsonObject = {"uid": node.metadata.uid, "annotations": {RECLAIM_ANNOTATION: late.text()}}
    await operator.api.patch(NODES, "n", {"metadata": metadata, "spec": {"unschedulable": True}})
    await asyncio.sleep(5)

    assert not world.read_node("n").spec.unschedulable
    assert world.reclaim_of("n") is None


# ---- restart -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after_seconds", [0.0, 0.15, 0.3, 1.0, 4.0, 20.0, 44.0])
async def test_a_restart_at_every_step_ends_in_the_same_result(world: NodeWorld, after_seconds: float) -> None:
    """The shard sends the instruction again in the next session, with what is left."""
    world.node("n", "m")
    world.pod("slow", "n")
    world.pod("stuck", "n")
    world.kubelet.stubborn.add("stuck")
    first = world.operator()
    first.api.faults.latency_seconds = 0.1
    first.instruct("m", grace_seconds=60)
    await asyncio.sleep(after_seconds)
    await first.stop()
    await asyncio.sleep(1)
    second = world.operator()
    await asyncio.sleep(5)
    second.instruct("m", grace_seconds=60 - int(now()))
    second.see("m", DRAINING)
    result = await second.result()

    assert (result.instruction_id, result.machine_id) == ("i", "m")
    assert result.outcome is DrainOutcome.GRACE_EXPIRED
    assert result.message == "1 pod was left: d/stuck"
    assert 58 <= now() <= 62


async def test_a_resumed_drain_needs_no_shard_and_keeps_its_deadline(world: NodeWorld) -> None:
    world.node("n", "m")
    world.pod("p", "n")
    world.kubelet.stubborn.add("p")
    first = world.operator()
    first.instruct("m", grace_seconds=60, preemptor_priority=7)
    await asyncio.sleep(10)
    await first.stop()
    await asyncio.sleep(20)
    second = world.operator()
    (record,) = [second.table.get("m")]
    assert record is not None
    assert (record.instruction_id, record.preemptor_priority, record.node) == ("i", 7, "n")
    result = await second.result()

    assert result.outcome is DrainOutcome.GRACE_EXPIRED
    assert 60 <= now() <= 62
    assert second.table.results() == [result]


async def test_a_past_deadline_ends_at_once(world: NodeWorld) -> None:
    world.node("n", "m")
    world.node("empty", "e")
    world.pod("p", "n")
    world.kubelet.stubborn.add("p")
    first = world.operator()
    first.instruct("m", "e", grace_seconds=60)
    await asyncio.sleep(5)
    await first.stop()
    await asyncio.sleep(1000)
    started = now()
    second = world.operator()
    await second.result(2)

    assert {machine: outcome for machine, (outcome, _text) in second.outcomes().items()} == {
        "m": "GRACE_EXPIRED",
        "e": "DRAINED",
    }
    assert now() - started <= 3
    assert evicted(second) == []


async def test_a_resumed_drain_forces_nothing_before_the_shard_has_named_it(world: NodeWorld) -> None:
    world.node("n", "m")
    world.pod("p", "n")
    world.kubelet.stubborn.add("p")
    first = world.operator(force=True)
    first.instruct("m", grace_seconds=60)
    await asyncio.sleep(5)
    await first.stop()
    await asyncio.sleep(1000)
    second = world.operator(force=True)
    await asyncio.sleep(1000)
    assert world.pod_names() == ["p"]
    assert second.results == []
    second.see("m", DRAINING)
    result = await second.result()

    assert (result.outcome, world.pod_names()) == (DrainOutcome.DRAINED, [])


async def test_a_drain_that_was_withdrawn_while_nobody_ran_is_withdrawn_then(world: NodeWorld) -> None:
    world.node("n", "m")
    world.pod("p", "n")
    world.kubelet.stubborn.add("p")
    first = world.operator(force=True)
    first.instruct("m", grace_seconds=60)
    await asyncio.sleep(5)
    await first.stop()
    await asyncio.sleep(1000)
    second = world.operator(force=True)
    await asyncio.sleep(1)
    second.see("m", CONFIGURED)
    await asyncio.sleep(5)

    assert not world.read_node("n").spec.unschedulable
    assert world.reclaim_of("n") is None
    assert world.pod_names() == ["p"]


async def test_an_annotation_that_cannot_be_read_drains_nothing(world: NodeWorld) -> None:
    for number, text in enumerate(["", "[]", "{", '{"instruction": "i"}', '{"deadline": 5}']):
        world.node(f"n{number}", annotations={RECLAIM_ANNOTATION: text})
    good = DrainAnnotation(
        instruction="i", machine="m", deadline_seconds=START_UNIX_SECONDS + 60.0, reason="reclaim", cordoned=True
    )
    world.node("good", annotations={RECLAIM_ANNOTATION: good.text()})
    operator = world.operator()
    await operator.result()

    assert list(operator.outcomes()) == ["m"]


async def test_two_nodes_with_one_machines_annotation_are_ambiguous(world: NodeWorld) -> None:
    drain = DrainAnnotation(
        instruction="i", machine="m", deadline_seconds=START_UNIX_SECONDS + 60.0, reason="reclaim", cordoned=True
    )
    for name in ("a", "b"):
        world.node(name, annotations={RECLAIM_ANNOTATION: drain.text()})
    world.pod("p", "a")
    operator = world.operator()
    result = await operator.result()

    assert result.outcome is DrainOutcome.FAILED
    assert "a, b" in result.message
    assert world.pod_names() == ["p"]


async def test_a_fault_of_the_operator_is_a_result_and_harms_no_other_drain(world: NodeWorld) -> None:
    world.node("a", "m")
    world.node("b", "o")
    operator = world.operator()

    def refuse(call: ApiCall) -> ApiError | None:
        if call.name == "a":
            raise ZeroDivisionError("a bug")
        return None

    operator.api.faults.refuse = refuse
    operator.instruct("m", "o", grace_seconds=60)
    await operator.result(2)

    assert operator.outcomes()["m"][0] == "FAILED"
    assert operator.outcomes()["o"][0] == "DRAINED"
