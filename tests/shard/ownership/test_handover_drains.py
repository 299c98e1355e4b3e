"""A shard drains machines for others and may die anywhere (docs/spec/coordinator.md §9)."""

from dataclasses import replace
from typing import Any

import pytest

from bigfleet.model.ids import MachineId
from bigfleet.model.states import MachineState
from bigfleet.shard.ownership.handover import DoesNotApply, MayYetSucceed
from bigfleet.shard.ports import ShardSettings
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.shard.ownership.handover_shard import (
    OTHER,
    THIRD,
    Dies,
    HandoverShard,
    drain,
    instruction,
    release,
    serve,
)

pytestmark = pytest.mark.virtual_time
S = MachineState
ZONE = "topology.kubernetes.io/zone"
DAY_SECONDS = 86_400.0


# ---- draining for others -----------------------------------------------------------------------------------------


@pytest.mark.rule("coordinator 7.4/2")
async def test_both_gates_of_a_drain_are_strict(make: Any) -> None:
    """Less urgent work, and work that is cheaper to interrupt: $1024 is bucket 13."""
    shard = make()
    serve(shard, "cheap", priority=100, interruption=0.5)
    serve(shard, "middling", priority=650_000, interruption=2)
    serve(shard, "dear", priority=100, interruption=1024)
    serve(shard, "urgent", priority=700_000, interruption=0)
    await shard.read()

    done = await shard.handover.carry_out(instruction(drain(9, priority=700_000)))

    assert done.machine_ids == ("cheap", "middling")
    actions = {each.action.machine_id: each.action for each in shard.world.shard.ledger.history}
    assert {name: action.grace_seconds for name, action in actions.items()} == {"cheap": 30, "middling": 600}
    assert all(action.reason == "coordinator.1-1" for action in actions.values())
    assert set(shard.file.reservations) == {"cheap", "middling"}


async def test_no_more_are_drained_than_asked_for_and_none_that_has_not_joined_or_is_not_named(make: Any) -> None:
    shard = make()
    for name in ("a", "b", "c", "d"):
        serve(shard, name, priority=1)
    await shard.read()
    shard.unjoined = {"a"}

    one = await shard.handover.carry_out(instruction(drain(1), 1))
    named = await shard.handover.carry_out(instruction(replace(drain(9), machine_ids=(MachineId("d"),)), 2))

    assert (one.machine_ids, named.machine_ids) == (("b",), ("d",))
    with pytest.raises(DoesNotApply, match="no machine serves less urgent work"):
        await shard.handover.carry_out(instruction(drain(9, priority=1), 3))


@pytest.mark.rule("shard 9.3/13", "coordinator 9.5/1")
async def test_a_drained_machine_waits_for_its_shard_and_goes_to_no_other(make: Any) -> None:
    shard = make()
    serve(shard, "a", priority=1)
    await shard.read()
    await shard.handover.carry_out(instruction(drain(1), 1))
    shard.handover.tend()
    assert not shard.file.reservations[MachineId("a")].is_ready
    await shard.world.shard.actuator.run_inline()
    shard.provider.settle()
    await shard.read()

    shard.handover.tend()
    kept = shard.file.reservations[MachineId("a")]
    assert (kept.is_ready, kept.to_shard, kept.instance_type) == (True, OTHER, "t4")
    with pytest.raises(DoesNotApply, match="a is reserved for shard-1"):
        await shard.handover.carry_out(instruction(release("a", to=THIRD), 2))
    done = await shard.handover.carry_out(instruction(release("a"), 3))

    assert done.machine_ids == ("a",)
    assert not shard.file.reservations


async def ready(shard: HandoverShard) -> None:
    serve(shard, "a", priority=1)
    await shard.read()
    await shard.handover.carry_out(instruction(drain(1)))
    await shard.world.shard.actuator.run_inline()
    shard.provider.settle()
    await shard.read()
    shard.handover.tend()


@pytest.mark.rule("shard 9.3/13", "coordinator 9.5/1")
async def test_a_reservation_ends_after_ten_report_cycles(make: Any) -> None:
    shard = make()
    await ready(shard)

    await LoopClock().sleep(299)
    shard.handover.tend()
    assert set(shard.file.reservations) == {"a"}
    await LoopClock().sleep(2)
    shard.handover.tend()
    assert not shard.file.reservations


@pytest.mark.rule("coordinator 9.5/1", "coordinator 12/18")
async def test_a_reservation_outlives_the_process_and_not_its_time(make: Any) -> None:
    shard = make()
    await ready(shard)
    await LoopClock().sleep(200)
    shard.start()
    await shard.read()

    shard.handover.tend()
    assert set(shard.file.reservations) == {"a"}
    await LoopClock().sleep(101)
    shard.handover.tend()
    assert not shard.file.reservations


async def test_a_drain_that_died_with_its_process_is_queued_again_or_given_up(make: Any) -> None:
    shard = make()
    serve(shard, "a", priority=1)
    await shard.read()
    told = instruction(drain(1))
    await shard.handover.carry_out(told)
    shard.start()
    await shard.read()

    assert (await shard.handover.carry_out(told)).machine_ids == ("a",)
    assert shard.handover_host.is_busy(MachineId("a"))

    shard.start()
    await shard.read()
    shard.handover.tend()
    assert not shard.file.reservations


@pytest.mark.rule("coordinator 9.5/1")
@pytest.mark.parametrize("place", [0, 1])
async def test_wherever_a_donor_dies_in_a_drain_at_most_that_drain_is_lost(make: Any, place: int) -> None:
    shard = make()
    serve(shard, "a", priority=1)
    await shard.read()
    shard.dies_at = place
    with pytest.raises(Dies):
        await shard.handover.carry_out(instruction(drain(1)))
    shard.start()
    await shard.read()

    assert (await shard.handover.carry_out(instruction(drain(1)))).machine_ids == ("a",)
    assert shard.handover_host.is_busy(MachineId("a"))
    assert set(shard.file.reservations) == {"a"}


async def test_a_drain_without_room_in_the_queue_reserves_nothing(make: Any) -> None:
    shard = make(settings=ShardSettings(execute_concurrency_max=1))
    for name in ("a", "b", "c"):
        serve(shard, name, priority=1)
    await shard.read()

    done = await shard.handover.carry_out(instruction(drain(3), 1))
    assert len(done.machine_ids) == 2
    assert set(shard.file.reservations) == set(done.machine_ids)
    with pytest.raises(MayYetSucceed, match="the action queue has no room"):
        await shard.handover.carry_out(instruction(drain(3), 2))
