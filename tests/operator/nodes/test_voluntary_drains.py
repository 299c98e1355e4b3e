"""Voluntary reclaims: a Node whose pods would not fit elsewhere is not touched; preemption does not ask."""

import asyncio
from typing import Any

import pytest

from bigfleet.model.frames import DrainOutcome
from bigfleet.model.states import MachineState
from bigfleet.operator.kubernetes.resources import NODES, PODS
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.operator.nodes.node_world import NodeWorld, pod_body

pytestmark = pytest.mark.virtual_time

VOLUNTARY: dict[str, Any] = {"preemptor_priority": 0, "reason": "reclaim"}


async def test_a_node_whose_pods_fit_nowhere_is_not_touched(world: NodeWorld) -> None:
    world.node("n", "m")
    world.node("small", allocatable={"cpu": "1", "pods": "9"})
    world.pod("p", "n", cpu="2")
    before = world.read_node("n").metadata.resource_version
    operator = world.operator()
    operator.instruct("m", **VOLUNTARY)
    result = await operator.result()
    operator.see("m", MachineState.CONFIGURED)
    await asyncio.sleep(120)

    assert result.outcome is DrainOutcome.WOULD_NOT_FIT
    assert "d/p" in result.message
    assert "too little cpu" in result.message
    assert world.read_node("n").metadata.resource_version == before
    assert operator.events == []
    assert operator.observer.ends == ["would_not_fit"]


async def test_a_node_whose_pods_fit_is_drained(world: NodeWorld) -> None:
    world.node("n", "m")
    world.node("o")
    world.pod("p", "n")
    operator = world.operator()
    operator.instruct("m", **VOLUNTARY)

    assert (await operator.result()).outcome is DrainOutcome.DRAINED


@pytest.mark.parametrize(
    "fields", [{"preemptor_priority": 1, "reason": "reclaim"}, {"preemptor_priority": 0, "reason": "unjoined"}]
)
async def test_only_voluntary_reclaims_ask_whether_pods_fit(world: NodeWorld, fields: dict[str, Any]) -> None:
    world.node("n", "m")
    world.pod("p", "n")
    operator = world.operator()
    operator.instruct("m", **fields)

    assert (await operator.result()).outcome is DrainOutcome.DRAINED


async def test_nodes_that_are_drained_at_once_do_not_count_each_others_room(world: NodeWorld) -> None:
    for name in ("a", "b"):
        world.node(name, f"m-{name}")
        world.pod(f"p-{name}", name, cpu="4")
    world.node("c", allocatable={"cpu": "4", "pods": "9"})
    operator = world.operator()
    operator.instruct("m-a", "m-b", **VOLUNTARY)
    await operator.result(2)

    assert sorted(outcome for outcome, _text in operator.outcomes().values()) == ["DRAINED", "WOULD_NOT_FIT"]


class SlowClock(LoopClock):
    """A clock of a preflight in a large cluster: other tasks run for seconds before each of its slices."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds or 4.0)


@pytest.mark.parametrize(("grace_seconds", "drained"), [(600, 20), (60, 8)])
async def test_drains_wait_for_their_forecasts_for_half_of_their_grace(
    world: NodeWorld, grace_seconds: int, drained: int
) -> None:
    """The rest of it is for the evictions; a Node whose drain was refused is not touched."""
    machines = [f"m{number:02}" for number in range(20)]
    for machine in machines:
        world.node(machine, machine)
        world.pod(f"p-{machine}", machine, cpu="100m")
    world.node("z")
    operator = world.operator()
    operator.preflight._clock = SlowClock()
    operator.instruct(*machines, grace_seconds=grace_seconds, **VOLUNTARY)
    await operator.result(20)

    refused = {name: text for name, (outcome, text) in operator.outcomes().items() if outcome == "WOULD_NOT_FIT"}
    assert set(refused) == set(machines[drained:])
    assert all("took longer than 30 s" in text for text in refused.values())
    assert [name for name in machines if world.read_node(name).spec.unschedulable] == machines[:drained]
    assert operator.observer.ends.count("drained") == drained


async def test_a_node_that_was_made_again_before_its_forecast_is_not_touched(world: NodeWorld) -> None:
    world.node("n", "m")
    world.node("o")
    world.pod("p", "n")
    operator = world.operator()
    operator.preflight._clock = SlowClock()
    operator.instruct("m", grace_seconds=600, **VOLUNTARY)
    await asyncio.sleep(1)
    world.server.remove(NODES, "n")
    world.node("n", "m")

    assert (await operator.result()).outcome is DrainOutcome.NODE_NOT_FOUND
    assert not world.read_node("n").spec.unschedulable


async def test_a_refused_node_offers_its_room_again(world: NodeWorld) -> None:
    world.node("a", "m-a")
    world.node("b", "m-b")
    world.pod("large", "a", cpu="8")
    world.pod("small", "b", cpu="1")
    world.pod("other", "b", cpu="1")
    operator = world.operator()
    operator.instruct("m-a", id="1", **VOLUNTARY)
    assert (await operator.result()).outcome is DrainOutcome.WOULD_NOT_FIT
    operator.see("m-a", MachineState.CONFIGURED)
    world.server.remove(PODS, "large", "d")
    await asyncio.sleep(1)
    operator.instruct("m-b", id="2", **VOLUNTARY)

    assert (await operator.result(2)).outcome is DrainOutcome.DRAINED


async def test_a_resumed_drain_is_not_judged_again(world: NodeWorld) -> None:
    world.node("n", "m")
    world.node("o")
    world.pod("p", "n")
    world.kubelet.dwell_seconds = 20.0
    first = world.operator()
    first.instruct("m", **VOLUNTARY)
    await asyncio.sleep(5)
    await first.stop()
    world.pod("filler", "o", cpu="8")
    second = world.operator()

    assert (await second.result()).outcome is DrainOutcome.DRAINED


async def test_a_newer_instruction_goes_on_with_what_an_older_one_began(world: NodeWorld) -> None:
    world.node("n", "m")
    world.node("o")
    world.pod("p", "n")
    world.kubelet.dwell_seconds = 20.0
    operator = world.operator()
    operator.instruct("m", id="old", **VOLUNTARY)
    await asyncio.sleep(5)
    world.pod("filler", "o", cpu="8")
    await asyncio.sleep(1)
    operator.instruct("m", id="new", **VOLUNTARY)
    result = await operator.result()

    assert (result.instruction_id, result.outcome) == ("new", DrainOutcome.DRAINED)


async def test_room_for_the_pods_of_a_resumed_drain_is_promised_again(world: NodeWorld) -> None:
    """Otherwise another drain counts on it after a restart, and the pods of one of the two wait for a new machine."""
    world.node("a", "m-a", allocatable={"cpu": "4", "pods": "9"})
    world.node("b", "m-b", allocatable={"cpu": "4", "pods": "9"})
    world.node("c", allocatable={"cpu": "4", "pods": "9"})
    world.pod("p-a", "a", cpu="4")
    world.pod("p-b", "b", cpu="4")
    world.kubelet.stubborn.add("p-a")
    first = world.operator()
    first.instruct("m-a", id="1", grace_seconds=600, **VOLUNTARY)
    await asyncio.sleep(5)
    await first.stop()
    second = world.operator()
    await asyncio.sleep(1)
    second.instruct("m-b", id="2", **VOLUNTARY)
    result = await second.result()

    assert (result.machine_id, result.outcome) == ("m-b", DrainOutcome.WOULD_NOT_FIT)


async def test_a_pod_without_a_controller_holds_up_a_voluntary_drain_and_no_other(world: NodeWorld) -> None:
    world.node("n", "m")
    world.node("o")
    body = pod_body("p", "n")
    world.server.put(PODS, {**body, "metadata": {**body["metadata"], "ownerReferences": []}})
    operator = world.operator()
    operator.instruct("m", id="1", **VOLUNTARY)
    result = await operator.result()

    assert result.outcome is DrainOutcome.WOULD_NOT_FIT
    assert "pod d/p must not be evicted by a voluntary drain" in result.message
    assert not world.read_node("n").spec.unschedulable

    operator.see("m", MachineState.CONFIGURED)
    operator.instruct("m", id="2")
    assert (await operator.result(2)).outcome is DrainOutcome.DRAINED
