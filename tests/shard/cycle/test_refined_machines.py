"""A machine whose facts are refined at Create fills the place for which it was acquired; no other is bought."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from bigfleet.model.states import CapacityType, MachineState
from bigfleet.shard.ports import ShardSettings
from tests.shard.cycle.test_composition_plans import Workers
from tests.shard.cycle.test_pods import pods
from tests.shard.world import ScriptedProvider, World, machine

S = MachineState
HOST = "topology.bigfleet/physical-host"

pytestmark = pytest.mark.virtual_time


@dataclass
class RefiningProvider(ScriptedProvider):
    """Knows more of a machine while it has a host: its host, and what `refined` says."""

    refined: Mapping[str, Any] = field(default_factory=dict)
    #: What each slot was offered as.
    slots: dict[str, Any] = field(default_factory=dict)

    def _become(self, machine_id: str, state: MachineState) -> None:
        is_on_host = self.records[machine_id].host.is_present
        super()._become(machine_id, state)
        record = self.records[machine_id]
        if record.host.is_present and not is_on_host:
            self.slots[machine_id] = record
            labels = {**record.labels, HOST: f"h-{machine_id}"}
            self.records[machine_id] = replace(record, **{"labels": labels, **self.refined})
        elif is_on_host and not record.host.is_present:
            self.records[machine_id] = replace(self.slots[machine_id], state=state, host=record.host)


def calls(provider: ScriptedProvider) -> Counter[str]:
    return Counter(method for method, _machine, _sequence in provider.calls)


async def run(world: World, seconds: float) -> None:
    """Run a cycle every 10 s; the provider ends its transitions in between."""
    for _ in range(int(seconds / 10)):
        await world.settle(1)
        await asyncio.sleep(10)


@pytest.mark.rule("shard 4.1/3")
@pytest.mark.parametrize("synchronous", [False, True], ids=["asynchronous", "synchronous"])
@pytest.mark.parametrize(
    "refined",
    [{}, {"price_usd_per_hour": 0.9}, {"allocatable": {"cpu": "3500m", "memory": "15Gi"}}],
    ids=["labels", "price", "allocatable"],
)
async def test_constant_demand_buys_nothing_again_when_a_created_machine_is_refined(
    refined: Mapping[str, Any], synchronous: bool
) -> None:
    provider = RefiningProvider(synchronous=synchronous, refined=refined)
    provider.add(*(machine(f"s{n}", S.SPECULATIVE) for n in range(10)))
    world = World(provider)
    world.connect("c1").report(pods("c1", ("3", 1)))
    await run(world, 1800)

    assert calls(provider) == {"create": 1, "configure": 1}
    assert Counter(each.state for each in provider.records.values()) == {S.CONFIGURED: 1, S.SPECULATIVE: 9}


@pytest.mark.rule("shard 4.1/3")
async def test_a_scale_up_of_many_refined_machines_buys_each_once() -> None:
    """They become Idle one after the other; each of them is another class, for each has another host."""
    provider = RefiningProvider()
    kind = CapacityType.ON_DEMAND
    provider.add(*(machine(f"s{n}", S.SPECULATIVE, capacity_type=kind) for n in range(20)))
    world = World(provider)
    operator = world.connect("c1")
    operator.report(pods("c1", ("3", 2)))
    await run(world, 300)
    operator.report(pods("c1", ("3", 8)), at_unix_nanos=2)
    for _ in range(20):
        await world.cycle()
        creating = sorted(name for name, each in provider.records.items() if each.state is S.CREATING)
        provider.settle(*creating[:1], *(n for n, each in provider.records.items() if each.state is S.CONFIGURING))
        await asyncio.sleep(10)
    await run(world, 1800)

    assert calls(provider) == {"create": 8, "configure": 8}
    assert Counter(each.state for each in provider.records.values()) == {S.CONFIGURED: 8, S.SPECULATIVE: 12}


@pytest.mark.rule("shard 4.1/3")
async def test_a_plan_that_was_begun_before_a_machine_was_refined_counts_the_machine() -> None:
    provider = RefiningProvider()
    provider.add(*(machine(f"s{n}", S.SPECULATIVE) for n in range(10)))
    world = World(provider, plan_workers=Workers(25.0), settings=ShardSettings(plan_wait_seconds=3600.0))
    operator = world.connect("c1")
    operator.report(pods("c1", ("3", 1)))
    await world.cycle()
    await asyncio.sleep(30)
    await world.cycle()
    assert provider.state("s0") is S.CREATING
    operator.report(pods("c1", ("3", 2)), at_unix_nanos=2)
    await world.cycle()
    await run(world, 1800)

    assert calls(provider) == {"create": 2, "configure": 2}
    assert Counter(each.state for each in provider.records.values()) == {S.CONFIGURED: 2, S.SPECULATIVE: 8}
    await world.shard.plans.close()
