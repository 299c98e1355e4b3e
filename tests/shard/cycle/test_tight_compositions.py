"""Machines whose nodes stay empty leave the composition: the scheduler packs better than the planner expected."""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from bigfleet.model.need import Need
from bigfleet.model.shapes import DemandShape
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.model.vector import parse_vector
from bigfleet.planner.composition import Composition
from bigfleet.planner.plan import plan
from bigfleet.planner.problem import Problem
from bigfleet.planner.search import Effort
from bigfleet.shard.cycle.composition_plans import ROOM_SECONDS
from bigfleet.shard.cycle.empty_nodes import SETTLE_SECONDS
from tests.shard.cycle.test_pods import pods
from tests.shard.world import FakeOperator, ScriptedProvider, World, machine

S = MachineState

pytestmark = pytest.mark.virtual_time


class GenerousWorkers:
    """Plan a machine more than the pods need wherever there is one on offer."""

    free = 4

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    async def plan(self, problem: Problem, effort: Effort) -> Composition:
        """Return the composition with room for the scheduler."""
        self.problems.append(problem)
        answer = plan(problem)
        added = list(answer.added)
        for number, of in enumerate(problem.classes):
            if (of.stock or 0) > added[number] and sum(added) + sum(answer.retained) < 4:
                added[number] += 1
                break
        return replace(answer, added=tuple(added))


class Fleet:
    """A cluster whose pods fill three machines of 4 cpu."""

    def __init__(self, *, reclaim_after_seconds: float = 0.0) -> None:
        provider = ScriptedProvider(synchronous=True)
        provider.add(*(machine(f"m{n}", S.SPECULATIVE, capacity_type=CapacityType.ON_DEMAND) for n in range(8)))
        self.workers = GenerousWorkers()
        self.world = World(provider, plan_workers=self.workers, reclaim_after_seconds=reclaim_after_seconds)
        self.operator: FakeOperator = self.world.connect("c1")
        self._second = 0

    def report(self, *rows: Need) -> None:
        self._second += 1
        self.operator.report(*rows, at_unix_nanos=self._second)

    async def run(self, seconds: float, cpu: dict[str, str], *, every: int = 10) -> None:
        """Let time pass, with the nodes of all Configured machines reported: by machine, what their pods request."""
        for _ in range(int(seconds / every)):
            self._second += 1
            for name in self.configured:
                self.operator.saw(name, at_unix_nanos=self._second, cpu=cpu.get(name, "0"))
            await self.world.settle(1)
            await asyncio.sleep(every)

    @property
    def configured(self) -> list[str]:
        return sorted(name for name, each in self.world.provider.records.items() if each.state is S.CONFIGURED)

    def calls(self) -> Counter[str]:
        return Counter(method for method, _machine, _sequence in self.world.provider.calls)

    def plans(self, outcome: str) -> float:
        return self.world.metric("plans_total", outcome=outcome)


#: Pods that fill three machines, and are placed on four.
DEMAND = pods("c1", ("1", 11), ("500m", 2))
#: What the pods of the machines request; m2 stays without.
LOADS = {"m0": "4", "m1": "4", "m3": "4"}


#: Four pods after a fall of demand, where the scheduler once put them; m3 hosts none.
SPREAD = {"m0": "2", "m1": "1", "m2": "1"}


async def started(*, reclaim_after_seconds: float = 0.0) -> Fleet:
    """Return a fleet that has a machine more than its 12 pods need."""
    fleet = Fleet(reclaim_after_seconds=reclaim_after_seconds)
    fleet.report(DEMAND)
    await fleet.run(30, {**LOADS, "m2": "1"})
    assert fleet.configured == ["m0", "m1", "m2", "m3"]
    return fleet


@pytest.mark.rule("shard 4.2/1")
async def test_a_machine_that_stays_empty_is_reclaimed_and_none_takes_its_place() -> None:
    fleet = await started()
    await fleet.run(SETTLE_SECONDS - 10, LOADS)
    assert fleet.configured == ["m0", "m1", "m2", "m3"]

    await fleet.run(300, LOADS)
    assert fleet.configured == ["m0", "m1", "m3"]
    assert (fleet.calls()["configure"], fleet.plans("tightened")) == (4, 1)


@pytest.mark.rule("shard 4.2/1")
async def test_an_empty_machine_keeps_no_other_machine_that_is_excess_already() -> None:
    """Demand falls, and one node of the four is empty by chance; the composition leaves out two of them."""
    fleet = await started(reclaim_after_seconds=600)
    fleet.report(pods("c1", ("1", 4)))
    await fleet.run(560, SPREAD)
    assert len(fleet.configured) == 4

    await fleet.run(1200, SPREAD)
    assert len(fleet.configured) == 2
    assert "m3" not in fleet.configured


async def test_little_change_of_demand_brings_it_not_back() -> None:
    fleet = await started()
    await fleet.run(200, LOADS)
    for _ in range(5):
        fleet.report(pods("c1", ("1", 11), ("500m", 1)))
        await fleet.run(60, LOADS)
        fleet.report(DEMAND)
        await fleet.run(60, LOADS)
    assert fleet.configured == ["m0", "m1", "m3"]
    assert fleet.calls()["configure"] == 4


@pytest.mark.rule("shard 4.2/1")
async def test_pods_that_wait_bring_room_back_for_an_hour() -> None:
    fleet = await started()
    await fleet.run(200, LOADS)
    waiting = replace(DEMAND, waiting=(DemandShape(parse_vector({"cpu": "1"}), 1, 0),))
    fleet.report(waiting)
    await fleet.run(60, LOADS)
    fleet.report(DEMAND)
    await fleet.run(600, LOADS, every=60)
    assert len(fleet.configured) == 4

    await fleet.run(ROOM_SECONDS, LOADS, every=120)
    assert len(fleet.configured) == 3


@pytest.mark.parametrize("load", ["4", "500m"])
async def test_a_machine_with_pods_stays(load: str) -> None:
    fleet = await started()
    await fleet.run(400, {**LOADS, "m2": load})
    assert len(fleet.configured) == 4
    assert fleet.plans("tightened") == 0


async def test_a_cluster_whose_operator_reports_no_loads_keeps_its_room() -> None:
    fleet = Fleet()
    fleet.report(DEMAND)
    await fleet.run(400, {})
    assert (len(fleet.configured), fleet.plans("tightened")) == (4, 0)


@pytest.mark.rule("shard 4.2/1")
async def test_pods_that_do_not_fit_on_the_rest_keep_the_machine() -> None:
    """What a node hosts is reported late: the sums say that it is needed."""
    fleet = await started()
    fleet.report(pods("c1", ("1", 16)))
    await fleet.run(400, LOADS)
    assert len(fleet.configured) == 4
    assert (fleet.plans("tightened"), fleet.plans("not_tightened")) == (0, 1)


async def test_a_cluster_that_is_short_keeps_its_room() -> None:
    """All eight machines are bound, and pods are still pending that fit on none of them."""
    fleet = await started()
    fleet.report(pods("c1", ("1", 11), ("500m", 2), ("3", 6)))
    await fleet.run(400, LOADS)
    assert len(fleet.configured) == 8
    assert fleet.plans("tightened") == 0


async def test_a_pod_that_no_machine_can_host_holds_no_other_machine() -> None:
    fleet = await started()
    fleet.report(DEMAND, pods("c1", ("64", 1), priority=200))
    await fleet.run(400, LOADS)
    assert fleet.configured == ["m0", "m1", "m3"]
