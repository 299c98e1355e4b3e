"""How long provisioning and each phase take, and that each first sight counts once (docs/spec/shard.md §11.2, §14)."""

import asyncio
from dataclasses import replace

import pytest

from bigfleet.engine.folding import folded_profile
from bigfleet.model.labels import ZONE
from bigfleet.model.need import Need
from bigfleet.model.profile import Operator, Profile, Requirement
from bigfleet.model.states import MachineState
from bigfleet.model.vector import parse_vector
from bigfleet.shard.status.latency import ProvisioningLatency
from tests.shard.world import ScriptedProvider, World, machine, need

pytestmark = pytest.mark.virtual_time

S = MachineState


def samples(world: World, name: str = "provisioning_latency_seconds") -> tuple[int, float]:
    """Return how many samples there are, and their sum."""
    return int(world.metric(f"{name}_count")), round(world.metric(f"{name}_sum"), 6)


async def bound_after(world: World, seconds: float) -> None:
    """Cycle, let the provider take its time, and observe what it did."""
    await world.cycle()
    await asyncio.sleep(seconds)
    world.provider.settle()
    await world.cycle()


@pytest.mark.rule("shard 11.2/1")
async def test_latency_runs_from_the_first_roll_up_to_the_configured_machine() -> None:
    world = World(ScriptedProvider())
    world.provider.add(machine("m0", S.IDLE))
    world.connect("c1").report(need("c1", "4"))
    await asyncio.sleep(7)
    await bound_after(world, 30)

    assert samples(world) == (1, 37)


@pytest.mark.rule("shard 9.1/4", "shard 11.2/1")
async def test_a_synchronous_provider_gives_the_same_sample() -> None:
    """The sample hangs on the transition, not on who observed it."""
    world = World(ScriptedProvider(synchronous=True))
    world.provider.add(machine("m0", S.IDLE))
    world.connect("c1").report(need("c1", "4"))
    await asyncio.sleep(7)
    await world.cycle()

    assert (samples(world), samples(world, "configure_phase_seconds")[0]) == ((1, 7), 1)


@pytest.mark.rule("shard 11.2/1")
async def test_several_machines_of_one_need_give_one_sample() -> None:
    world = World(ScriptedProvider())
    world.provider.add(*(machine(f"m{i}", S.IDLE) for i in range(3)))
    world.connect("c1").report(need("c1", "12"))
    await bound_after(world, 10)

    assert samples(world) == (1, 10)


@pytest.mark.rule("shard 11.2/2")
@pytest.mark.parametrize("content", ["changed", "the same"])
async def test_the_next_roll_up_that_still_asks_counts_anew(content: str) -> None:
    """From that roll-up on, whether or not its bytes are new."""
    world = World(ScriptedProvider())
    world.provider.add(*(machine(f"m{i}", S.IDLE) for i in range(2)))
    operator = world.connect("c1")
    operator.report(need("c1", "4"))
    await bound_after(world, 10)
    world.provider.records["m0"] = machine("m0", S.IDLE)
    await asyncio.sleep(100)
    operator.report(need("c1", "4" if content == "the same" else "3"))
    await bound_after(world, 5)

    assert samples(world) == (2, 15)


@pytest.mark.rule("shard 11.2/2")
async def test_a_need_that_left_and_came_back_starts_at_its_return() -> None:
    world = World(ScriptedProvider())
    operator = world.connect("c1")
    operator.report(need("c1", "4"))
    await asyncio.sleep(100)
    operator.report()
    operator.report(need("c1", "4"))
    world.provider.add(machine("m0", S.IDLE))
    await bound_after(world, 20)

    assert samples(world) == (1, 20)


@pytest.mark.rule("shard 4/7")
async def test_a_held_roll_up_changes_no_first_sight() -> None:
    """Stamps follow the accepted demand."""
    world = World(ScriptedProvider())
    operator = world.connect("c1")
    rows = [need("c1", "4", priority=priority) for priority in range(100, 112)]
    operator.report(*rows)
    await asyncio.sleep(50)
    assert operator.report() == "held"
    world.provider.add(machine("m0", S.IDLE))
    await bound_after(world, 10)

    assert samples(world) == (1, 60)


async def test_a_folded_gang_is_measured_by_its_members_first_sight() -> None:
    """The machine carries the folded fingerprint; the earliest of the gangs behind it counts."""
    seen: list[float] = []
    latency = ProvisioningLatency(seen.append)
    profile = Profile(requirements=(Requirement(ZONE, Operator.SAME),), priority=100)
    gang = Need(cluster=need("c1", "1").cluster, profile=profile, aggregate=parse_vector({"cpu": "2"}), group="g")
    latency.demand_taken("c1", [gang], 100.0)
    stamp = {"cluster": "c1", "assigned_need_fingerprint": folded_profile(profile).fingerprint}
    before = machine("m0", S.CONFIGURING, **stamp)
    after = replace(before, state=S.CONFIGURED)
    for seconds in (130.0, 140.0):
        latency.changed(before, after, seconds)

    assert seen == [30.0]


@pytest.mark.rule("shard 2/5", "shard 11.2/2")
async def test_a_machine_for_nobodys_need_gives_no_sample() -> None:
    """As after a restart: what the provider finishes was asked for in another life."""
    world = World(ScriptedProvider())
    world.provider.add(machine("m0", S.CONFIGURING, cluster="c1", assigned_need_fingerprint="p=1"))
    await bound_after(world, 10)

    assert (world.state("m0"), samples(world), samples(world, "configure_phase_seconds")) == (
        S.CONFIGURED,
        (0, 0),
        (0, 0),
    )


@pytest.mark.rule("shard 9.1/4")
async def test_each_phase_is_timed_from_state_to_state() -> None:
    """Creating to Idle, Configuring to Configured, Draining to Idle."""
    world = World(ScriptedProvider())
    world.provider.add(machine("m0", S.SPECULATIVE))
    operator = world.connect("c1")
    operator.report(need("c1", "4"))
    await bound_after(world, 10)
    await asyncio.sleep(20)
    world.provider.settle()
    await world.cycle()
    operator.report()
    await world.cycle()
    await asyncio.sleep(40)
    world.provider.settle()
    await world.cycle()

    assert [samples(world, f"{phase}_phase_seconds") for phase in ("create", "configure", "drain")] == [
        (1, 10),
        (1, 20),
        (1, 45),
    ]


async def test_a_phase_that_failed_gives_no_sample() -> None:
    world = World(ScriptedProvider())
    world.provider.add(machine("m0", S.IDLE))
    world.connect("c1").report(need("c1", "4"))
    await world.cycle()
    world.provider.fail("m0", "no power")
    await world.cycle()

    assert samples(world, "configure_phase_seconds") == (0, 0)
