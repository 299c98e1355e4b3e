"""A voluntary reclaim that its operator answers with WOULD_NOT_FIT leaves the machine in service for a hold time."""

from itertools import pairwise

import pytest

from bigfleet.model.frames import DrainOutcome
from bigfleet.model.states import MachineState
from tests.shard.world import ScriptedProvider, World, at, machine, need

S = MachineState
HELD = "m1"

pytestmark = pytest.mark.virtual_time


def excess_world() -> World:
    """Return a shard with one machine that c1 needs and one that it does not."""
    provider = ScriptedProvider(synchronous=True)
    provider.add(*(machine(f"m{number}", S.CONFIGURED, cluster="c1") for number in range(2)))
    return World(provider)


@pytest.mark.rule("shard 9.3/14")
async def test_the_machine_stays_configured_and_the_provider_is_not_called() -> None:
    """The operator is shown the machine as Configured again, which ends the instruction."""
    world = excess_world()
    operator = world.connect("c1")
    operator.drain = (DrainOutcome.WOULD_NOT_FIT, 1.0)
    operator.report(need("c1", "4"))
    await world.cycle()

    assert (world.state(HELD), world.machine(HELD).cluster, world.provider.calls) == (S.CONFIGURED, "c1", [])
    assert operator.states(HELD)[-2:] == [S.DRAINING, S.CONFIGURED]
    assert world.outcomes() == [("Reclaim", HELD, "would_not_fit")]
    assert world.metric("drain_results_total", outcome="would_not_fit") == 1


@pytest.mark.rule("shard 9.3/14")
async def test_it_is_held_for_ten_minutes_doubled_to_two_hours() -> None:
    """Per machine, and shown with the reason."""
    world = excess_world()
    operator = world.connect("c1")
    operator.drain = (DrainOutcome.WOULD_NOT_FIT, 0.0)
    operator.report(need("c1", "4"))
    clock, asked = world.shard._clock, []
    for _ in range(60 * 7):
        before = len(world.outcomes())
        await world.cycle()
        if len(world.outcomes()) > before:
            asked.append(clock.monotonic_seconds())
        await clock.sleep(60)

    waits = [round((later - earlier) / 60) for earlier, later in pairwise(asked)]
    assert waits == [10, 20, 40, 80, 120, 120]
    assert world.metric("reclaim_held_machines") == 1
    until_unix_nanos, why = world.shard.guardrails.delay_of(at(world, HELD))
    assert (until_unix_nanos > clock.unix_nanos(), why) == (True, "would_not_fit")
    assert world.shard.guardrails.delay_of(at(world, "m0")) == (0, "")


@pytest.mark.rule("shard 9.3/14")
async def test_it_serves_again_at_once_and_is_reclaimed_when_its_pods_fit() -> None:
    """The hold binds reclaims alone."""
    world = excess_world()
    operator = world.connect("c1")
    operator.drain = (DrainOutcome.WOULD_NOT_FIT, 0.0)
    operator.report(need("c1", "4"))
    await world.cycle()
    operator.report(need("c1", "8"))
    await world.cycle()
    assert (world.shard.view.needs[0].satisfied, world.shard.view.needs[0].bootstraps) == (True, 0)

    operator.drain = (DrainOutcome.DRAINED, 0.0)
    operator.report(need("c1", "4"))
    await world.shard._clock.sleep(600)
    await world.cycle()
    assert world.state(HELD) is S.IDLE


@pytest.mark.rule("shard 9.3/14")
async def test_a_preemption_does_not_ask_whether_pods_fit() -> None:
    """The answer counts like a failed drain: the provider is called at once."""
    provider = ScriptedProvider(synchronous=True)
    provider.add(machine("low", S.CONFIGURED, cluster="c2", assigned_priority=1))
    world = World(provider)
    world.connect("c1").report(need("c1", "4", priority=1_000_000))
    world.connect("c2").drain = (DrainOutcome.WOULD_NOT_FIT, 0.0)
    await world.cycle()

    assert (world.state("low"), world.outcomes()) == (S.IDLE, [("Preempt", "low", "success")])
