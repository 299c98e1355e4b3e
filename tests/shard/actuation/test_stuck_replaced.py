"""Machines whose creation or configuration never ends: their rows are served by others (docs/spec/shard.md §9.5)."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from bigfleet.model.frames import CAPABILITY_NEED_STATUS, UnmetReason
from bigfleet.model.machine import Machine
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.shard.actuation.stuck_transitions import REPLACED_MIN
from bigfleet.shard.sessions.outbox import CloseReason
from tests.shard.cycle.test_pods import pods
from tests.shard.world import ScriptedProvider, World, machine

S = MachineState
#: Between two cycles.
STEP_SECONDS = 60.0

pytestmark = pytest.mark.virtual_time


@dataclass
class NeverEnds(ScriptedProvider):
    """Accepts every call; of some types and states transitions do not end."""

    hanging: set[tuple[str, MachineState]] = field(default_factory=set)

    def hangs(self, record: Machine) -> bool:
        return (record.instance_type, record.state) in self.hanging

    def settle(self, *machine_ids: str) -> None:
        names: Iterable[str] = machine_ids or tuple(self.records)
        ending = [name for name in names if not self.hangs(self.records[name])]
        if ending:
            super().settle(*ending)

    def made(self, kind: str) -> list[str]:
        """Return the machines of a type that were created, in order, each once."""
        names = [name for method, name, _sequence in self.calls if method == "create" and name.startswith(kind)]
        return list(dict.fromkeys(names))


def offer(provider: ScriptedProvider, kind: str, price: float, count: int = 40) -> None:
    """Offer machines of 4 cpu."""
    fields: dict[str, Any] = {"instance_type": kind, "price_usd_per_hour": price}
    fields["capacity_type"] = CapacityType.ON_DEMAND
    provider.add(*(machine(f"{kind}-{number:02d}", S.SPECULATIVE, **fields) for number in range(count)))


async def run(world: World, provider: ScriptedProvider, seconds: float) -> None:
    """Cycle every minute, transitions ending in between."""
    for _ in range(int(seconds / STEP_SECONDS)):
        await world.cycle()
        provider.settle()
        await world.shard._clock.sleep(STEP_SECONDS)


def served(provider: ScriptedProvider, cluster: str) -> list[str]:
    """Return the types of the machines that serve a cluster."""
    found = [each for each in provider.records.values() if each.state is S.CONFIGURED and each.cluster == cluster]
    return sorted(each.instance_type for each in found)


HANGING = [pytest.param(S.CREATING, 1200, id="creating"), pytest.param(S.CONFIGURING, 900, id="configuring")]


@pytest.mark.rule("shard 9.5/8")
@pytest.mark.parametrize(("state", "bound_seconds"), HANGING)
async def test_a_row_is_served_by_another_pool_when_its_machines_get_stuck(
    state: MachineState, bound_seconds: int
) -> None:
    """Its pods waited for ever for machines that never came; another pool had machines that work."""
    provider = NeverEnds(hanging={("cheap", state)})
    offer(provider, "cheap", 1.0)
    offer(provider, "costly", 2.0)
    world = World(provider)
    world.connect("c1").report(pods("c1", ("3", 2)))
    await run(world, provider, bound_seconds)
    assert served(provider, "c1") == []
    await run(world, provider, 480)
    assert served(provider, "c1") == ["costly", "costly"]
    assert world.metric("machines_stuck", state=state.label) == 2

    await run(world, provider, 6 * 3600)
    assert served(provider, "c1") == ["costly", "costly"]
    assert len(provider.made("cheap")) == 2


@pytest.mark.rule("shard 9.5/8")
@pytest.mark.parametrize(("state", "_bound_seconds"), HANGING)
async def test_a_stuck_machine_that_comes_after_all_serves_or_is_given_back(
    state: MachineState, _bound_seconds: int
) -> None:
    provider = NeverEnds(hanging={("cheap", state)})
    offer(provider, "cheap", 1.0)
    offer(provider, "costly", 2.0)
    world = World(provider)
    world.connect("c1").report(pods("c1", ("3", 2)))
    await run(world, provider, 1800)
    provider.hanging.clear()
    await run(world, provider, 3 * 3600)
    assert len(served(provider, "c1")) == 2
    assert len([each for each in provider.records.values() if each.state is not S.SPECULATIVE]) == 2
    assert world.metric("machines_stuck", state=state.label) == 0


@pytest.mark.rule("shard 9.5/8")
@pytest.mark.parametrize(("state", "_bound_seconds"), HANGING)
async def test_without_another_pool_few_machines_are_tried_and_the_row_is_short_with_the_reason(
    state: MachineState, _bound_seconds: int
) -> None:
    """One at a time, after growing waits."""
    provider = NeverEnds(hanging={("cheap", state)})
    offer(provider, "cheap", 1.0)
    world = World(provider)
    operator = world.connect("c1", CAPABILITY_NEED_STATUS)
    operator.report(pods("c1", ("3", 1)))
    await run(world, provider, 1800)
    reason = UnmetReason.STOCKOUT if state is S.CREATING else UnmetReason.BOOTSTRAP_FAILED
    assert [row.reason for row in operator.verdicts()[-1].rows] == [reason]
    await run(world, provider, 12 * 3600 - 1800)
    assert 3 <= len(provider.made("cheap")) <= 14

    provider.hanging.clear()
    await run(world, provider, 2 * 3600)
    assert served(provider, "c1") == ["cheap"]
    assert operator.verdicts()[-1].rows == ()


@pytest.mark.rule("shard 9.5/8")
async def test_an_idle_machine_replaces_a_stuck_one_that_is_paid_for() -> None:
    """Bare metal has no pool: the machine by itself is left out."""
    provider = NeverEnds(hanging={("metal-a", S.CONFIGURING)})
    provider.add(machine("m1", S.IDLE, instance_type="metal-a"), machine("m2", S.IDLE, instance_type="metal-b"))
    world = World(provider)
    world.connect("c1").report(pods("c1", ("3", 1)))
    await run(world, provider, 600)
    assert (world.state("m1"), served(provider, "c1")) == (S.CONFIGURING, [])
    await run(world, provider, 600)
    assert (world.state("m1"), served(provider, "c1")) == (S.CONFIGURING, ["metal-b"])


@pytest.mark.rule("shard 9.5/8")
async def test_waiting_pods_get_another_machine_when_theirs_is_stuck() -> None:
    provider = NeverEnds(hanging={("cheap", S.CREATING)})
    offer(provider, "cheap", 1.0)
    offer(provider, "costly", 2.0)
    world = World(provider)
    row = pods("c1", ("3", 1))
    world.connect("c1").report(replace(row, shapes=(), waiting=row.shapes))
    await run(world, provider, 1800)
    assert served(provider, "c1") == ["costly"]


@pytest.mark.rule("shard 9.5/8")
async def test_nothing_replaces_a_machine_whose_operator_is_away() -> None:
    """It is stuck because nothing can configure it; another one could not be configured either."""
    provider = NeverEnds(hanging={("cheap", S.CONFIGURING)})
    offer(provider, "cheap", 1.0)
    offer(provider, "costly", 2.0)
    world = World(provider)
    operator = world.connect("c1")
    operator.report(pods("c1", ("3", 1)))
    await run(world, provider, 60)
    world.shard.sessions.close(operator.session, CloseReason.GONE)
    await run(world, provider, 3 * 3600)
    assert (provider.made("costly"), len(provider.made("cheap"))) == ([], 1)


@pytest.mark.rule("shard 9.5/8")
async def test_a_provider_that_ends_nothing_gets_no_second_order_for_everything() -> None:
    """At most ten machines, or a twentieth of those that serve, are replaced at a time."""
    provider = NeverEnds(hanging={("cheap", S.CREATING), ("costly", S.CREATING)})
    offer(provider, "cheap", 1.0, count=60)
    offer(provider, "costly", 2.0, count=60)
    world = World(provider)
    world.connect("c1").report(pods("c1", ("3", 30)))
    await run(world, provider, 6 * 3600)
    assert (len(provider.made("cheap")), len(provider.made("costly"))) == (30, REPLACED_MIN)

    provider.hanging.clear()
    await run(world, provider, 3 * 3600)
    assert len(served(provider, "c1")) == 30
    assert len([each for each in provider.records.values() if each.state is not S.SPECULATIVE]) == 30
