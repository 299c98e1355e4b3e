"""Voluntary reclaims and disruption budgets: a machine is not taken with a pod that its budget does not let go."""

import asyncio
from typing import Any

import pytest

from bigfleet.model.frames import DrainOutcome
from bigfleet.model.states import MachineState
from bigfleet.operator.kubernetes.api import ApiError
from bigfleet.sim.kubernetes.faults import fail_times
from tests.operator.nodes.node_world import BUDGET, NodeWorld, Operator

pytestmark = pytest.mark.virtual_time

VOLUNTARY: dict[str, Any] = {"preemptor_priority": 0, "reason": "reclaim", "grace_seconds": 600}
DB = {"app": "db"}


def now() -> float:
    return asyncio.get_running_loop().time()


def guarded(world: NodeWorld, *names: str) -> None:
    """Put machine m with node n, room elsewhere, and Ready pods of the application db on n."""
    world.node("n", "m")
    world.node("o")
    for name in names:
        world.pod(name, "n", labels=DB, ready=True)


def evictions(operator: Operator) -> list[str]:
    return operator.observer.answers


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(("desired_healthy", "expected_pods"), [(1, 1), (3, 3), (2, 1)])
async def test_a_node_with_a_pod_that_its_budget_never_lets_go_is_not_touched(
    world: NodeWorld, desired_healthy: int, expected_pods: int, force: bool
) -> None:
    """Its other pods would be evicted for nothing, again after each hold of the machine."""
    guarded(world, "p")
    world.pod("other", "n")
    world.budget("db", DB, 0, desired_healthy=desired_healthy, expected_pods=expected_pods)
    before = world.read_node("n").metadata.resource_version
    operator = world.operator(force=force)
    operator.instruct("m", **VOLUNTARY)
    result = await operator.result()

    assert result.outcome is DrainOutcome.WOULD_NOT_FIT
    assert result.message == (
        "pod d/p can never be evicted: "
        f"the disruption budget db wants {desired_healthy} healthy pods of {expected_pods}"
    )
    assert now() < 1
    assert world.read_node("n").metadata.resource_version == before
    assert evictions(operator) == []


async def test_a_node_with_a_pod_of_two_budgets_is_not_touched(world: NodeWorld) -> None:
    """The API server evicts no such pod."""
    guarded(world, "p")
    for name in ("one", "two"):
        world.budget(name, DB, 1, desired_healthy=0, expected_pods=1, disruptions_allowed=1)
    operator = world.operator()
    operator.instruct("m", **VOLUNTARY)
    result = await operator.result()

    assert result.outcome is DrainOutcome.WOULD_NOT_FIT
    assert "the disruption budgets one, two select it" in result.message
    assert not world.read_node("n").spec.unschedulable


@pytest.mark.parametrize(
    ("labels", "ready", "desired_healthy", "expected_pods", "allowed"),
    [
        ({"app": "web"}, True, 1, 1, 0),
        (DB, False, 1, 1, 0),
        (DB, True, 0, 1, 0),
        (DB, True, 1, 1, 1),
    ],
    ids=["not selected", "not ready", "lets one go", "has one more for now"],
)
async def test_a_budget_that_may_let_its_pods_go_holds_no_drain_up_before_it_begins(
    world: NodeWorld, labels: dict[str, str], ready: bool, desired_healthy: int, expected_pods: int, allowed: int
) -> None:
    world.node("n", "m")
    world.node("o")
    world.pod("p", "n", labels=labels, ready=ready)
    world.pod("surge", "o", labels=labels, ready=ready)
    status: dict[str, Any] = {
        "desired_healthy": desired_healthy,
        "expected_pods": expected_pods,
        "disruptions_allowed": allowed,
    }
    world.budget("db", DB, 1, unhealthyPodEvictionPolicy="AlwaysAllow", **status)
    operator = world.operator()
    operator.instruct("m", **VOLUNTARY)

    assert (await operator.result()).outcome is DrainOutcome.DRAINED


@pytest.mark.parametrize("force", [False, True])
async def test_a_drain_that_a_budget_blocks_leaves_the_machine_after_half_of_its_grace(
    world: NodeWorld, force: bool
) -> None:
    """The shard takes a machine whose grace has expired, with the pods on it."""
    guarded(world, "p", "q")
    world.budget("db", DB, 0)
    operator = world.operator(force=force)
    operator.instruct("m", **VOLUNTARY)
    result = await operator.result()
    given_up = now()
    operator.see("m", MachineState.CONFIGURED)
    await asyncio.sleep(30)

    assert result.outcome is DrainOutcome.WOULD_NOT_FIT
    assert result.message.startswith("2 pods were left: d/p, d/q; not evicted: ")
    assert "disruption budget" in result.message
    assert given_up == pytest.approx(300, abs=10)
    assert world.pod_names() == ["p", "q"]
    assert not world.read_node("n").spec.unschedulable
    assert world.reclaim_of("n") is None


async def test_a_budget_that_opens_after_some_minutes_does_not_end_the_drain(world: NodeWorld) -> None:
    guarded(world, "p")
    world.budget("db", DB, 0)
    operator = world.operator()
    operator.instruct("m", **VOLUNTARY)
    await asyncio.sleep(280)
    world.server.remove(BUDGET, "db", "d")

    assert (await operator.result()).outcome is DrainOutcome.DRAINED


async def test_a_budget_that_lets_pods_go_one_after_the_other_has_until_the_end(world: NodeWorld) -> None:
    """A successor takes its time; what is left a minute before the end stays, and so does the machine."""
    names = [f"p{number}" for number in range(4)]
    guarded(world, *names)
    world.server.put(
        BUDGET,
        {"metadata": {"name": "db", "namespace": "d"}, "spec": {"selector": {"matchLabels": DB}, "minAvailable": 3}},
    )
    operator = world.operator()
    operator.instruct("m", **VOLUNTARY)

    async def replaces() -> None:
        for number in range(4):
            await asyncio.sleep(200)
            world.pod(f"new-{number}", "o", labels=DB, ready=True)

    task = asyncio.create_task(replaces())
    result = await operator.result()
    task.cancel()

    assert result.outcome is DrainOutcome.WOULD_NOT_FIT
    assert 540 <= now() < 560
    assert evictions(operator).count("accepted") == 3
    assert result.message.startswith("1 pod was left: d/p3")


async def test_pods_that_were_evicted_and_do_not_end_expire_the_grace(world: NodeWorld) -> None:
    guarded(world, "p")
    world.kubelet.stubborn.add("p")
    operator = world.operator()
    operator.instruct("m", **VOLUNTARY)

    assert (await operator.result()).outcome is DrainOutcome.GRACE_EXPIRED


async def test_a_resumed_drain_that_a_budget_blocks_leaves_the_machine(world: NodeWorld) -> None:
    guarded(world, "p")
    world.budget("db", DB, 0)
    first = world.operator()
    first.instruct("m", **VOLUNTARY)
    await asyncio.sleep(100)
    await first.stop()
    second = world.operator()

    assert (await second.result()).outcome is DrainOutcome.WOULD_NOT_FIT
    assert now() < 600


async def test_an_instruction_that_comes_again_does_not_begin_the_patience_again(world: NodeWorld) -> None:
    guarded(world, "p")
    world.budget("db", DB, 0)
    operator = world.operator()
    operator.instruct("m", **VOLUNTARY)
    for left_seconds in (550, 500, 450, 400, 350):
        await asyncio.sleep(50)
        operator.instruct("m", **{**VOLUNTARY, "grace_seconds": left_seconds})

    assert (await operator.result()).outcome is DrainOutcome.WOULD_NOT_FIT
    assert now() == pytest.approx(300, abs=10)


async def test_budgets_that_cannot_be_read_hold_no_drain_up_before_it_begins(world: NodeWorld) -> None:
    guarded(world, "p")
    operator = world.operator()
    busy = ApiError(503, "ServiceUnavailable", "later")
    operator.api.faults.refuse = fail_times(1, busy, resource="poddisruptionbudgets.policy")
    operator.instruct("m", **VOLUNTARY)

    assert (await operator.result()).outcome is DrainOutcome.DRAINED


async def test_a_preemption_waits_for_a_budget_to_its_deadline(world: NodeWorld) -> None:
    guarded(world, "p")
    world.budget("db", DB, 0, desired_healthy=1, expected_pods=1)
    operator = world.operator()
    operator.instruct("m", grace_seconds=600)
    result = await operator.result()

    assert result.outcome is DrainOutcome.GRACE_EXPIRED
    assert now() == pytest.approx(600, abs=5)
