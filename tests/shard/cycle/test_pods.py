"""A shard decides over pods when rows say which pods they consist of."""

import asyncio
from typing import Any

import pytest

from bigfleet.engine.parking import PARK_AFTER_CYCLES
from bigfleet.model.frames import CAPABILITY_NEED_STATUS, UnmetReason
from bigfleet.model.ids import ClusterId
from bigfleet.model.labels import ZONE
from bigfleet.model.need import Need, amounts_of
from bigfleet.model.profile import Operator, Profile, Requirement
from bigfleet.model.shapes import DemandShape
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.model.vector import families, parse_vector
from bigfleet.rpc.servers.explain import Explainer
from tests.shard.world import ScriptedProvider, World, machine

S = MachineState

pytestmark = pytest.mark.virtual_time


def pods(cluster: str, *shapes: tuple[str, int], priority: int = 100, **changes: Any) -> Need:
    """Return a row of pods, each shape as (cpu, count)."""
    found = tuple(DemandShape(parse_vector({"cpu": cpu}), count, 0) for cpu, count in shapes)
    amounts = amounts_of(found, aggregate={}, min_unit={})
    facts: dict[str, Any] = {
        "cluster": ClusterId(cluster),
        "profile": Profile(priority=priority),
        "aggregate": amounts.aggregate,
        "min_unit": amounts.min_unit,
        "shapes": amounts.shapes,
        "families": families({"cpu": "1"}),
    }
    return Need(**(facts | changes))


async def test_rows_of_one_cluster_share_a_machine() -> None:
    provider = ScriptedProvider(synchronous=True)
    provider.add(*(machine(f"m{number}", S.IDLE) for number in range(3)))
    world = World(provider)
    operator = world.connect("c1", CAPABILITY_NEED_STATUS)
    operator.report(pods("c1", ("500m", 3)), pods("c1", ("1", 2), priority=200))
    await world.settle()

    assert [world.state(f"m{number}") for number in range(3)] == [S.CONFIGURED, S.IDLE, S.IDLE]
    assert operator.verdicts()[-1].rows == ()


async def test_an_operator_hears_that_machines_are_on_their_way() -> None:
    """Both rows share one machine; until it serves, their pods are pending and ask for no other."""
    provider = ScriptedProvider()
    provider.add(machine("m0", S.IDLE))
    world = World(provider)
    operator = world.connect("c1", CAPABILITY_NEED_STATUS)
    low, high = pods("c1", ("500m", 3)), pods("c1", ("1", 2), priority=200)
    operator.report(low, high)
    await world.settle()

    both = {(low.fingerprint, ""), (high.fingerprint, "")}
    assert (set(operator.verdicts()[-1].coming), operator.verdicts()[-1].rows) == (both, ())

    provider.settle("m0")
    await asyncio.sleep(10)
    await world.settle()
    assert world.state("m0") is S.CONFIGURED
    assert (operator.verdicts()[-1].coming, operator.verdicts()[-1].rows) == ((), ())


async def test_a_pod_that_no_machine_can_host_harms_no_other() -> None:
    """The row keeps its machines, and its operator hears which dimension, what was wanted and what there is."""
    provider = ScriptedProvider(synchronous=True)
    provider.add(*(machine(f"m{number}", S.IDLE) for number in range(3)))
    world = World(provider)
    operator = world.connect("c1", CAPABILITY_NEED_STATUS)
    operator.report(pods("c1", ("500m", 16)))
    await world.settle()
    operator.report(pods("c1", ("500m", 16), ("1000", 1)), at_unix_nanos=2)
    # Verdicts keep a distance in time.
    await asyncio.sleep(10)
    await world.settle()

    assert [world.state(f"m{number}") for number in range(3)] == [S.CONFIGURED, S.CONFIGURED, S.IDLE]
    (row,) = operator.verdicts()[-1].rows
    assert (row.reason, row.residual) == (UnmetReason.REQUEST_TOO_LARGE, {"cpu": "1k"})
    assert row.message == "1 pod wants cpu 1k, the largest machine for it has 4"


async def test_a_row_without_shapes_and_one_with_shapes_are_decided_together() -> None:
    provider = ScriptedProvider(synchronous=True)
    provider.add(*(machine(f"m{number}", S.IDLE) for number in range(3)))
    world = World(provider)
    plain = pods("c2", ("1", 4), shapes=())
    world.connect("c1").report(pods("c1", ("2", 2)))
    world.connect("c2").report(plain)
    await world.settle()

    assert sorted(world.machine(f"m{number}").cluster for number in range(3)) == ["", "c1", "c2"]


async def test_the_last_row_with_shapes_gone_the_cycle_is_decided_over_aggregates_again() -> None:
    provider = ScriptedProvider(synchronous=True)
    provider.add(*(machine(f"m{number}", S.IDLE, capacity_type=CapacityType.ON_DEMAND) for number in range(3)))
    world = World(provider)
    operator = world.connect("c1")
    operator.report(pods("c1", ("2", 4)))
    await world.settle()
    before = [world.state(f"m{number}") for number in range(3)]
    operator.report(pods("c1", ("2", 4), shapes=()), at_unix_nanos=2)
    await world.settle()

    assert before == [world.state(f"m{number}") for number in range(3)] == [S.CONFIGURED, S.CONFIGURED, S.IDLE]


async def test_an_explanation_says_what_shares_a_machine() -> None:
    provider = ScriptedProvider(synchronous=True)
    provider.add(machine("m0", S.IDLE))
    world = World(provider)
    web = pods("c1", ("500m", 3))
    world.connect("c1").report(web, pods("c1", ("1", 2), priority=200))
    await world.settle()

    told = await Explainer(world.shard).need("c1", web.fingerprint, "")
    texts = [event.text for event in told.events]
    assert "3 of its 3 pods run on m0, which also serves row 1 of c1." in texts
    about = await Explainer(world.shard).machine("m0")
    assert any(event.text.startswith("It hosts 2 pods of row 1 of c1, 3 pods of row 2") for event in about.events)


async def test_a_gang_that_is_parked_by_its_age_can_be_inspected() -> None:
    """While it is parked the decision is made on another object than the reported row."""
    provider = ScriptedProvider(synchronous=True)
    provider.add(*(machine(f"m{number}", S.IDLE) for number in range(3)))
    world = World(provider)
    operator = world.connect("c1")
    profile = Profile(requirements=(Requirement(ZONE, Operator.SAME, ()),), priority=1)
    gang = pods("c1", ("4", 4), profile=profile, group="run-1")
    operator.report(pods("c1", ("500m", 3)), gang)
    for _ in range(PARK_AFTER_CYCLES + 3):
        await world.settle(1)

    needs = (await world.shard.inspect()).needs
    assert {view.need.group: view.parked for view in needs} == {"": False, "run-1": True}
    explained = await Explainer(world.shard).need("c1", gang.fingerprint, "run-1")
    assert explained.events


async def test_pods_without_requests_that_match_no_machine_are_a_shortfall() -> None:
    """They lack nothing but a place: the row is unmet, and counts as what the fleet lacks."""
    provider = ScriptedProvider(synchronous=True)
    provider.add(*(machine(f"m{number}", S.IDLE) for number in range(3)))
    world = World(provider)
    operator = world.connect("c1", CAPABILITY_NEED_STATUS)
    profile = Profile(requirements=(Requirement("disk", Operator.IN, ("ssd",)),), priority=100)
    operator.report(pods("c1", ("0", 3), profile=profile))
    await world.settle()

    (row,) = operator.verdicts()[-1].rows
    assert (row.reason, row.residual) == (UnmetReason.NO_MATCHING_SUPPLY, {"pods": "3"})
    (view,) = (await world.shard.inspect()).needs
    assert (view.satisfied, view.residual) == (False, {"pods": 3000})
    assert (world.metric("shortfalls"), len(world.shard.shortfall_ledger)) == (1, 1)


async def test_pods_without_requests_beyond_the_number_that_a_machine_takes_are_unmet() -> None:
    provider = ScriptedProvider(synchronous=True)
    provider.add(machine("m0", S.IDLE, allocatable={"cpu": "4", "pods": "2"}))
    world = World(provider)
    operator = world.connect("c1", CAPABILITY_NEED_STATUS)
    operator.report(pods("c1", ("1", 1), ("0", 3)))
    await world.settle()

    assert world.state("m0") is S.CONFIGURED
    (row,) = operator.verdicts()[-1].rows
    assert (row.reason, row.residual) == (UnmetReason.PRIORITY_STARVED, {"pods": "2"})
