"""Of machines that are alike, the one whose node is the emptiest is reclaimed."""

import pytest

from bigfleet.model.frames import DrainOutcome
from bigfleet.model.states import MachineState
from tests.shard.cycle.test_pods import pods
from tests.shard.world import FakeOperator, ScriptedProvider, World, machine

S = MachineState
AFTER_SECONDS = 60.0
CYCLE_SECONDS = 10.0

pytestmark = pytest.mark.virtual_time


def shrunk(**cpu: str) -> tuple[World, FakeOperator]:
    """Return a shard with these Configured machines of c1 and what runs on their nodes; c1 needs one less."""
    provider = ScriptedProvider(synchronous=True)
    provider.add(*(machine(name, S.CONFIGURED, cluster="c1") for name in cpu))
    world = World(provider, reclaim_after_seconds=AFTER_SECONDS)
    operator = world.connect("c1")
    operator.report(pods("c1", ("4", len(cpu) - 1)))
    return world, operator


async def cycles(world: World, operator: FakeOperator, count: int, **cpu: str) -> None:
    """Run cycles ten seconds apart, with what runs on the nodes."""
    for number in range(count):
        for name, amount in cpu.items():
            operator.saw(name, at_unix_nanos=number + 1, cpu=amount)
        await world.cycle()
        await world.shard._clock.sleep(CYCLE_SECONDS)


async def test_the_emptiest_machine_is_reclaimed_whatever_its_id() -> None:
    cpu = {"m0": "3", "m1": "0", "m2": "4"}
    world, operator = shrunk(**cpu)
    await cycles(world, operator, 9, **cpu)

    assert [(kind, one) for kind, one, _ in world.outcomes()] == [("Reclaim", "m1")]


async def test_without_reports_of_nodes_the_last_one_by_id_is_reclaimed() -> None:
    world, operator = shrunk(m0="", m1="", m2="")
    await cycles(world, operator, 9)

    assert [(kind, one) for kind, one, _ in world.outcomes()] == [("Reclaim", "m2")]


async def test_pods_that_come_and_go_do_not_begin_the_delay_again() -> None:
    """The machine that is excess stays it while another one is less than two quarters emptier."""
    world, operator = shrunk(m0="", m1="", m2="")
    for number in range(10):
        await cycles(world, operator, 1, m0="3", m1="4", m2="2" if number % 2 else "4")

    assert [(kind, one) for kind, one, _ in world.outcomes()] == [("Reclaim", "m2")]


async def test_a_machine_whose_pods_fit_nowhere_gives_way_to_the_next_emptiest() -> None:
    """Without this the cluster would pay for it until its hold of ten minutes is over."""
    cpu = {"m0": "3", "m1": "1", "m2": "4"}
    world, operator = shrunk(**cpu)
    operator.drain = (DrainOutcome.WOULD_NOT_FIT, 0.0)
    await cycles(world, operator, 9, **cpu)
    assert world.outcomes() == [("Reclaim", "m1", "would_not_fit")]

    operator.drain = (DrainOutcome.DRAINED, 0.0)
    await cycles(world, operator, 9, **cpu)
    assert world.outcomes()[1:] == [("Reclaim", "m0", "success")]


async def test_a_machine_that_stays_for_a_short_row_does_not_keep_another_one_from_leaving() -> None:
    """m1 is empty, and stays because a pod of its row fits nowhere: it hosts what ran on the one that leaves."""
    web, poisoned = pods("c1", ("4", 2)), pods("c1", ("64", 1), priority=50)
    provider = ScriptedProvider(synchronous=True)
    for name, need in (("m0", web), ("m1", poisoned), ("m2", web)):
        provider.add(machine(name, S.CONFIGURED, cluster="c1", assigned_need_fingerprint=need.fingerprint))
    world = World(provider, reclaim_after_seconds=AFTER_SECONDS)
    operator = world.connect("c1")
    operator.report(web, poisoned)
    await cycles(world, operator, 12, m0="4", m1="0", m2="4")

    assert [(kind, one) for kind, one, _ in world.outcomes()] == [("Reclaim", "m2")]
