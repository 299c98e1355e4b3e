"""Waiting pods make the fleet grow by what they need, once until the machine acquired for them has joined or failed."""

import asyncio
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from bigfleet.engine.decision import Placement, RowResult
from bigfleet.model.frames import CAPABILITY_DRAIN_RESULT, CAPABILITY_NODE_STATUS
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need
from bigfleet.model.shapes import DemandShape
from bigfleet.model.states import MachineState
from bigfleet.model.vector import parse_vector
from bigfleet.shard.cycle.waiting_growth import BACKOFF_SECONDS_MAX, SETTLE_SECONDS, WaitingGrowth
from bigfleet.shard.ports import ShardSettings
from tests.operator.demand.objects import HandClock
from tests.shard.cycle.test_pods import pods
from tests.shard.world import FakeOperator, ScriptedProvider, World, machine

S = MachineState
CYCLE_SECONDS = 10.0

pytestmark = pytest.mark.virtual_time


def waiting(count: int, cpu: str = "2") -> Need:
    """Return a row of one pod that runs and of pods that the scheduler cannot place."""
    return replace(pods("c1", ("1", 1)), waiting=(DemandShape(parse_vector({"cpu": cpu}), count),))


def fleet(machines: int, *capabilities: str, synchronous: bool = True) -> tuple[World, FakeOperator]:
    """Return a shard with Idle machines of 4 cpu that reclaims at once, and its operator."""
    provider = ScriptedProvider(synchronous=synchronous)
    provider.add(*(machine(f"m{number}", S.IDLE) for number in range(machines)))
    world = World(provider, settings=ShardSettings(reclaim_cap_fraction=0.0))
    return world, world.connect("c1", CAPABILITY_DRAIN_RESULT, *capabilities)


def configured(world: World) -> int:
    return sum(known.state is S.CONFIGURED for known in world.provider.records.values())


async def cycles(world: World, seconds: float) -> list[int]:
    """Cycle every ten seconds; return the Configured machines after each cycle."""
    found = []
    for _ in range(int(seconds / CYCLE_SECONDS)):
        await world.cycle()
        found.append(configured(world))
        await asyncio.sleep(CYCLE_SECONDS)
    return found


@pytest.mark.rule("shard 9.9/1")
@pytest.mark.parametrize(("count", "machines"), [(1, 2), (2, 2), (3, 3), (4, 3)])
async def test_pods_that_wait_get_what_they_need_and_no_more_before_it_has_joined(count: int, machines: int) -> None:
    """One machine for the pod that runs; two waiting pods fit on each further one."""
    world, operator = fleet(8, CAPABILITY_NODE_STATUS)
    operator.report(pods("c1", ("1", 1)))
    await cycles(world, 20)
    operator.report(waiting(count), at_unix_nanos=2)

    assert await cycles(world, 600) == [machines] * 60


@pytest.mark.rule("shard 9.9/1")
async def test_after_the_node_has_joined_the_scheduler_has_a_minute_and_then_another_is_acquired() -> None:
    world, operator = fleet(8, CAPABILITY_NODE_STATUS)
    operator.report(waiting(1, "3500m"))
    assert set(await cycles(world, 60)) == {2}
    joined = [known.id for known in world.provider.records.values() if known.state is S.CONFIGURED]
    assert all(operator.saw(each) for each in joined)

    found = await cycles(world, SETTLE_SECONDS + 2 * CYCLE_SECONDS)
    # The former one serves nobody and goes; the new one waits for its node.
    assert found[: int(SETTLE_SECONDS / CYCLE_SECONDS)] == [2] * int(SETTLE_SECONDS / CYCLE_SECONDS)
    actions = [kind for kind, _machine, _outcome in world.outcomes()]
    assert (actions.count("Bootstrap"), actions.count("Reclaim")) == (3, 1)


async def test_a_machine_that_waits_for_its_pods_is_kept_until_they_run_or_are_gone() -> None:
    """When they run, the row has them among its shapes; when they are gone, the machine is excess."""
    world, operator = fleet(8, CAPABILITY_NODE_STATUS)
    operator.report(waiting(1, "3500m"))
    await cycles(world, 60)
    operator.report(pods("c1", ("1", 1), ("3500m", 1)), at_unix_nanos=2)
    assert await cycles(world, 60) == [2] * 6
    operator.report(pods("c1", ("1", 1)), at_unix_nanos=3)
    await cycles(world, 60)

    assert configured(world) == 1


@pytest.mark.rule("shard 9.9/1")
async def test_a_machine_that_fails_is_replaced() -> None:
    world, operator = fleet(8, CAPABILITY_NODE_STATUS)
    operator.report(waiting(1, "3500m"))
    await cycles(world, 60)
    lost = max(known.id for known in world.provider.records.values() if known.state is S.CONFIGURED)
    world.provider.fail(lost, "BACKEND: gone")
    await cycles(world, 30)

    assert (configured(world), world.state(lost)) == (2, S.FAILED)


async def test_an_operator_that_says_nothing_of_nodes_is_asked_for_a_minute_of_patience_too() -> None:
    world, operator = fleet(8)
    operator.report(waiting(1, "3500m"))

    found = await cycles(world, SETTLE_SECONDS)
    assert found == [2] * len(found)
    assert world.shard.waiting_growth.awaited


# ---- machines that were of no use -----------------------------------------------------------------------------------


def bootstraps(world: World) -> int:
    return [kind for kind, _machine, _outcome in world.outcomes()].count("Bootstrap")


async def cycles_with_joins(world: World, operator: FakeOperator, seconds: float) -> None:
    """Cycle every ten seconds; the node of each Configured machine is seen Ready at once."""
    seen: set[MachineId] = set()
    for _ in range(int(seconds / CYCLE_SECONDS)):
        await world.cycle()
        there = {known.id for known in world.provider.records.values() if known.state is S.CONFIGURED}
        for each in sorted(there - seen):
            operator.saw(each)
        seen = there
        await asyncio.sleep(CYCLE_SECONDS)


@pytest.mark.rule("shard 9.9/2")
async def test_pods_that_no_machine_helps_get_machines_ever_more_rarely() -> None:
    """At 0, 1, 3, 7, 15, 31 and 63 min, then every hour: only the scheduler knows why they do not run."""
    world, operator = fleet(8, CAPABILITY_NODE_STATUS)
    operator.report(waiting(2, "3500m"))
    counts = []
    for _ in range(4):
        await cycles_with_joins(world, operator, 3600)
        counts.append(bootstraps(world) - 1)

    # Two machines at each time, one for each pod.
    assert 10 <= counts[0] <= 12
    assert [later - former for former, later in pairwise(counts)] == [2, 2, 2]


@pytest.mark.rule("shard 9.9/2")
async def test_pods_that_are_placed_one_after_the_other_are_not_held_up() -> None:
    """Each machine is of use, and is followed by the next one after the scheduler's minute."""
    world, operator = fleet(16, CAPABILITY_NODE_STATUS)
    for placed in range(8):
        running = pods("c1", ("1", 1), ("3500m", placed)) if placed else pods("c1", ("1", 1))
        left = (DemandShape(parse_vector({"cpu": "3500m"}), 8 - placed, max_per_machine=0),)
        operator.report(replace(running, waiting=left), at_unix_nanos=placed + 1)
        await cycles_with_joins(world, operator, SETTLE_SECONDS + 3 * CYCLE_SECONDS)

    assert not world.shard.waiting_growth._backoffs


@pytest.mark.rule("shard 9.9/2")
async def test_progress_starts_the_waits_over() -> None:
    world, operator = fleet(16, CAPABILITY_NODE_STATUS)
    operator.report(waiting(3, "3500m"))
    await cycles_with_joins(world, operator, 600)
    before = bootstraps(world)
    await cycles_with_joins(world, operator, 120)
    assert bootstraps(world) == before

    # The machines of the next attempt help one pod.
    while bootstraps(world) == before:
        await cycles_with_joins(world, operator, CYCLE_SECONDS)
    placed = replace(waiting(2, "3500m"), **vars_of(pods("c1", ("1", 1), ("3500m", 1))))
    operator.report(placed, at_unix_nanos=2)
    before = bootstraps(world)
    await cycles_with_joins(world, operator, SETTLE_SECONDS + 3 * CYCLE_SECONDS)
    assert bootstraps(world) - before == 2


def vars_of(need: Need) -> dict[str, Any]:
    return {"shapes": need.shapes, "aggregate": need.aggregate, "min_unit": need.min_unit}


@pytest.mark.rule("shard 9.9/2")
async def test_pods_beyond_those_that_were_tried_get_their_machines_at_once() -> None:
    world, operator = fleet(16, CAPABILITY_NODE_STATUS)
    operator.report(waiting(2, "3500m"))
    await cycles_with_joins(world, operator, 600)
    before = bootstraps(world)
    operator.report(waiting(5, "3500m"), at_unix_nanos=2)
    await cycles_with_joins(world, operator, 30)

    assert bootstraps(world) - before == 3


@pytest.mark.rule("shard 9.9/2")
async def test_a_shape_that_is_gone_and_back_within_the_hour_is_no_progress() -> None:
    world, operator = fleet(8, CAPABILITY_NODE_STATUS)
    operator.report(waiting(1, "3500m"))
    await cycles_with_joins(world, operator, 600)
    before = bootstraps(world)
    operator.report(pods("c1", ("1", 1)), at_unix_nanos=2)
    await cycles_with_joins(world, operator, 60)
    operator.report(waiting(1, "3500m"), at_unix_nanos=3)
    await cycles_with_joins(world, operator, 120)
    assert bootstraps(world) == before

    operator.report(pods("c1", ("1", 1)), at_unix_nanos=4)
    await cycles_with_joins(world, operator, BACKOFF_SECONDS_MAX)
    operator.report(waiting(1, "3500m"), at_unix_nanos=5)
    await cycles_with_joins(world, operator, SETTLE_SECONDS + 4 * CYCLE_SECONDS)
    assert bootstraps(world) - before == 2


class Growth:
    """Growth of one row, whose decisions and machines a test makes."""

    def __init__(self, row: Need) -> None:
        self.clock = HandClock()
        self.machines: dict[MachineId, Machine] = {}
        self.growth = WaitingGrowth(
            clock=self.clock,
            machine_of=self.machines.get,
            has_joined=lambda _machine: True,
            has_failed=lambda _machine_id: False,
        )
        self.row = row
        (self.bounded,) = self.growth.reported("c1", [row])

    def decide(self, *names: str) -> None:
        """Give each machine to one waiting pod."""
        for name in names:
            self.machines.setdefault(MachineId(name), machine(name, S.CONFIGURING))
        placements = [Placement(MachineId(name), len(self.bounded.shapes), 1) for name in names]
        self.growth.decided([RowResult(need=self.bounded, members=(self.bounded,), placements=placements)])

    def configure(self, name: str) -> None:
        self.machines[MachineId(name)] = machine(name, S.CONFIGURED, cluster="c1")

    def pass_time(self, seconds: float) -> int:
        """Let time pass and return for how many pods machines are acquired then."""
        self.clock.seconds += seconds
        for _cluster, (row,) in self.growth.moved():
            self.bounded = row
        return sum(shape.count for shape in self.bounded.waiting)


@pytest.mark.rule("shard 9.9/2")
async def test_a_machine_that_boots_longer_belongs_to_its_attempt_and_stays_acquired() -> None:
    row = Growth(waiting(2, "3500m"))
    row.decide("a", "b")
    row.configure("a")
    row.configure("b")
    assert (row.pass_time(0), row.pass_time(SETTLE_SECONDS)) == (0, 2)

    row.decide("fast", "slow")
    row.configure("fast")
    assert row.pass_time(0) == 1
    row.decide("slow")
    assert row.pass_time(SETTLE_SECONDS) == 1, "the second attempt has failed, and one of its machines boots"

    row.decide("slow")
    row.configure("slow")
    row.pass_time(0)
    row.decide()
    row.pass_time(SETTLE_SECONDS)
    (backoff,) = row.growth._backoffs.values()
    assert backoff.failures == 2


async def test_without_waiting_pods_nothing_is_remembered() -> None:
    world, operator = fleet(3, CAPABILITY_NODE_STATUS)
    operator.report(waiting(1))
    await cycles(world, 30)
    operator.report(at_unix_nanos=2)
    await cycles(world, 20)

    growth = world.shard.waiting_growth
    assert (growth._given, growth._reported, set(growth.awaited)) == ({}, {}, set())
