"""Pods are placed one by one as the simulated scheduler places them, and those without a place are counted."""

import random
from typing import Any

import pytest

from bigfleet.model import labels
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import HostRef, Machine
from bigfleet.model.profile import Operator, Requirement
from bigfleet.model.states import MachineState
from bigfleet.operator.requests import CapacityRequest, CoLocation, Exclusion
from bigfleet.planner.problem import SchedulerOrder
from bigfleet.sim.pods.placement import PodCounts, count_unplaced
from bigfleet.sim.pods.scheduler import Node, Pod, Scheduler, Template


def machine(id: str, cpu: int, memory: str = "64Gi", zone: str = "z1", **attributes: str) -> Machine:
    return Machine(
        id=MachineId(id),
        state=MachineState.CONFIGURED,
        host=HostRef("p", id),
        cluster=ClusterId("c"),
        zone=zone,
        allocatable={"cpu": str(cpu), "memory": memory, "pods": "110"},
        labels=attributes,
    )


def pods(count: int, cpu: str, memory: str = "1Gi", *, name: str = "p", **more: Any) -> list[CapacityRequest]:
    resources = {"cpu": cpu, "memory": memory}
    return [CapacityRequest(id=f"{name}-{n}", resources=resources, **more) for n in range(count)]


def counted(*numbers: int) -> PodCounts:
    everything, unplaced, booting = numbers
    return PodCounts(pods=everything, unplaced=unplaced, booting=booting)


def test_a_fleet_that_is_too_small_leaves_the_pods_that_do_not_fit() -> None:
    """Worked by hand: a machine of 4 cpu takes one pod of 3 or two of 2, so two machines take four of the five."""
    assert count_unplaced(pods(5, "2"), machines=[machine("a", 4), machine("b", 4)]) == counted(5, 1, 0)
    assert count_unplaced(pods(3, "3"), machines=[machine("a", 4), machine("b", 4)]) == counted(3, 1, 0)
    assert count_unplaced(pods(3, "3"), machines=[]) == counted(3, 3, 0)
    assert count_unplaced([], machines=[machine("a", 4)]) == counted(0, 0, 0)


def test_capacity_that_suffices_in_sum_may_leave_pods_out() -> None:
    """Least-allocated spreads the small pods, so that no machine has 4 cpu left for the large one."""
    mixed = pods(2, "1", name="small") + pods(1, "4", name="large")

    assert count_unplaced(mixed, machines=[machine("a", 4), machine("b", 4)]) == counted(3, 1, 0)
    most = SchedulerOrder.MOST_ALLOCATED
    assert count_unplaced(mixed, machines=[machine("a", 4), machine("b", 4)], order=most) == counted(3, 0, 0)


def test_pods_that_fit_on_machines_that_boot_are_told_apart() -> None:
    kinds = pods(4, "3") + pods(1, "32", name="huge")

    assert count_unplaced(kinds, machines=[machine("a", 4)], booting=[machine("b", 8)]) == counted(5, 4, 2)


def test_higher_priorities_come_first_and_requirements_hold() -> None:
    gpu = (Requirement(labels.GPU_PRODUCT, Operator.EXISTS),)
    wanted = pods(1, "4", name="low") + pods(1, "4", name="high", priority=9, requirements=gpu)

    assert count_unplaced(wanted, machines=[machine("a", 4)]) == counted(2, 1, 0)
    assert count_unplaced(wanted, machines=[machine("a", 4, **{labels.GPU_PRODUCT: "T4"})]) == counted(2, 1, 0)
    assert count_unplaced(pods(3, "1", exclusion=Exclusion(group="g")), machines=[machine("a", 4)]) == counted(3, 2, 0)


def test_a_gang_stays_in_one_zone() -> None:
    gang = CoLocation(topology_key=labels.ZONE, namespace="n")
    machines = [machine("a", 4, zone="z1"), machine("b", 4, zone="z2"), machine("c", 4, zone="z2")]

    assert count_unplaced(pods(3, "4", co_location=gang), machines=machines) == counted(3, 1, 0)


def plainly_unplaced(requests: list[CapacityRequest], machines: list[Machine]) -> int:
    """Count with the scheduler alone: every pod looks at every node."""
    nodes: dict[str, Node] = {one.id: Node.of(one) for one in machines}
    scheduler = Scheduler(nodes)
    ordered = sorted(enumerate(requests), key=lambda item: (-item[1].priority, item[0]))
    left = 0
    for number, request in ordered:
        template = Template.of("", "", request)
        node = scheduler.node_for(template, ())
        if node is None:
            left += 1
        else:
            node.put(Pod(str(number), template, number, (0.0, number)))
    return left


@pytest.mark.parametrize("seed", range(40))
def test_the_short_way_places_as_the_scheduler_does(seed: int) -> None:
    draw = random.Random(seed)
    machines = [
        machine(f"m{n:02d}", draw.randint(2, 16), f"{draw.randint(4, 64)}Gi", disk=draw.choice("ab"))
        for n in range(draw.randint(1, 8))
    ]
    requests: list[CapacityRequest] = []
    for number in range(6):
        requirements = (Requirement("disk", Operator.IN, ("a",)),) if draw.random() < 0.3 else ()
        requests += pods(
            draw.randint(1, 8),
            str(draw.randint(1, 5)),
            f"{draw.randint(1, 16)}Gi",
            name=f"k{number}",
            priority=draw.randint(0, 1),
            requirements=requirements,
        )
    draw.shuffle(requests)

    assert count_unplaced(requests, machines=machines).unplaced == plainly_unplaced(requests, machines)
