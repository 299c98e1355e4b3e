"""What operators are told of free capacity: how much, how sure, at what price, how often (docs/spec/shard.md §10.5)."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from bigfleet.model.frames import AvailableCapacity, Confidence
from bigfleet.model.labels import INSTANCE_TYPE, ZONE
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need
from bigfleet.model.profile import Operator, Requirement
from bigfleet.model.states import MachineState
from bigfleet.model.vector import parse_vector
from bigfleet.shard.ports import ShardSettings
from bigfleet.shard.sessions.outbox import CloseReason
from bigfleet.shard.status.capacity_hints import REFRESH_SECONDS
from tests.shard.world import FakeOperator, ScriptedProvider, World, machine, need

pytestmark = pytest.mark.virtual_time

S = MachineState


def told(hint: AvailableCapacity) -> tuple[int, str, float]:
    """Return what a hint says."""
    return hint.available_count, hint.confidence.name, hint.price_usd_per_hour


def big(need_: Need, cpu: str) -> Need:
    """Return the row with a larger min unit."""
    return replace(need_, min_unit=parse_vector({"cpu": cpu}))


def shard_of(*machines: Machine, **settings: Any) -> World:
    """Return a world that carries out nothing, so that what is free stays free."""
    world = World(ScriptedProvider(), settings=ShardSettings(actuation_paused=True, **settings))
    world.provider.add(*machines)
    return world


async def hints_for(world: World, *rows: Need) -> FakeOperator:
    """Connect cluster c1 with rows and cycle once."""
    operator = world.connect("c1")
    operator.report(*rows)
    await world.cycle()
    return operator


#: No row takes a machine that it does not want: 1 millicore is covered by the first one.
SMALL = need("c1", "1m")

OFFERS: dict[str, tuple[tuple[Machine, ...], tuple[int, str, float]]] = {
    "one is claimed, two idle ones are left, the cheaper priced": (
        (
            machine("a", S.IDLE, price_usd_per_hour=0.5),
            machine("b", S.IDLE, price_usd_per_hour=3.0),
            machine("c", S.IDLE, price_usd_per_hour=2.0),
        ),
        (2, "HIGH", 2.0),
    ),
    "idle ones are priced though a slot is cheaper, and both count": (
        (
            machine("a", S.IDLE, price_usd_per_hour=0.1),
            machine("b", S.IDLE, price_usd_per_hour=2.0),
            machine("s", S.SPECULATIVE, price_usd_per_hour=1.0),
        ),
        (2, "HIGH", 2.0),
    ),
    "slots alone are less sure": (
        (machine("a", S.IDLE), machine("s", S.SPECULATIVE, price_usd_per_hour=0.7)),
        (1, "MEDIUM", 0.7),
    ),
    "nothing is left": ((machine("a", S.IDLE),), (0, "NONE", 0.0)),
    "other types do not count": (
        (machine("a", S.IDLE), machine("b", S.IDLE, instance_type="other")),
        (0, "NONE", 0.0),
    ),
    "machines that are in use do not count": (
        (machine("a", S.IDLE), machine("b", S.CONFIGURED, cluster="c2"), machine("f", S.FAILED, last_error="x")),
        (0, "NONE", 0.0),
    ),
}


@pytest.mark.rule("shard 10.5/1")
@pytest.mark.parametrize("name", OFFERS)
async def test_a_hint_says_what_is_left_how_sure_and_at_what_price(name: str) -> None:
    """After the decision: what Phase 1 claimed is gone."""
    machines, expected = OFFERS[name]
    operator = await hints_for(shard_of(*machines), SMALL)

    assert [told(hint) for hint in operator.hints()] == [expected]


@pytest.mark.rule("shard 10.5/3")
async def test_a_hint_carries_requirements_fingerprint_and_the_priced_machines_allocatable() -> None:
    world = shard_of(machine("a", S.IDLE), machine("b", S.IDLE))
    (hint,) = (await hints_for(world, SMALL)).hints()

    assert (hint.fingerprint, hint.requirements) == (SMALL.fingerprint, SMALL.profile.requirements)
    assert hint.resources == {"cpu": "4", "memory": "16Gi"}


@pytest.mark.rule("shard 10.5/2")
async def test_a_machine_must_hold_the_largest_min_unit_of_the_fingerprints_rows() -> None:
    """There is one hint per fingerprint, whatever the number of its rows."""
    world = shard_of(machine("a", S.IDLE), machine("b", S.IDLE, allocatable={"cpu": "64"}))
    gang = replace(big(SMALL, "8"), group="g")
    operator = await hints_for(world, SMALL, gang)

    assert [told(hint)[:2] for hint in operator.hints()] == [(0, "NONE")]


@pytest.mark.rule("shard 10.5/2")
async def test_same_asks_for_the_key_and_an_allowed_value() -> None:
    """In which single domain they are does not matter to a hint; one of za or zb the gang has claimed itself."""
    requirements = (Requirement(INSTANCE_TYPE, Operator.IN, ("t4",)), Requirement(ZONE, Operator.SAME, ("za", "zb")))
    profile = replace(SMALL.profile, requirements=requirements)
    world = shard_of(*(machine(f"m{zone}", S.IDLE, zone=zone) for zone in ("za", "zb", "zc", "")))
    row = replace(SMALL, profile=profile, aggregate=parse_vector({"cpu": "400"}), group="g")
    operator = await hints_for(world, row)

    assert [told(hint)[:2] for hint in operator.hints()] == [(1, "HIGH")]


@pytest.mark.rule("shard 10.5/1")
async def test_a_pending_machine_is_not_on_offer() -> None:
    """Neither before nor after the provider shows that it is on its way."""
    world = World(ScriptedProvider())
    world.provider.add(*(machine(f"m{i}", S.IDLE) for i in range(3)))
    operator = world.connect("c1")
    operator.report(need("c1", "4"))
    await world.step()
    await asyncio.sleep(6)
    await world.cycle()
    await world.cycle()

    assert [told(hint)[0] for hint in operator.hints()] == [2]


@pytest.mark.rule("shard 10.5/5")
async def test_an_unchanged_hint_is_repeated_after_five_minutes_and_not_before() -> None:
    world = shard_of(machine("a", S.IDLE), machine("b", S.IDLE))
    operator = await hints_for(world, SMALL)
    await asyncio.sleep(REFRESH_SECONDS - 1)
    await world.cycle()
    before = len(operator.hints())
    await asyncio.sleep(1)
    await world.cycle()
    await asyncio.sleep(REFRESH_SECONDS)
    await world.cycle()

    assert (before, len(operator.hints())) == (1, 3)


@pytest.mark.rule("shard 10.5/5")
async def test_a_changed_hint_waits_for_the_interval_and_then_says_the_latest() -> None:
    """What changed there and back again is not told at all."""
    world = shard_of(machine("a", S.IDLE), machine("b", S.IDLE), available_capacity_interval_seconds=5.0)
    operator = await hints_for(world, SMALL)
    world.provider.add(machine("c", S.IDLE))
    await world.cycle()
    early = len(operator.hints())
    world.provider.add(machine("d", S.IDLE))
    await asyncio.sleep(5)
    await world.cycle()
    del world.provider.records["d"]
    await world.cycle()
    world.provider.add(machine("d", S.IDLE))
    await asyncio.sleep(5)
    await world.cycle()

    assert (early, [told(hint)[0] for hint in operator.hints()]) == (1, [1, 3])


@pytest.mark.rule("shard 10.5/5")
async def test_counts_that_change_by_little_in_every_cycle_wait_for_the_repetition() -> None:
    """A machine less in each cycle: eight hints in five minutes, eight when a quarter is gone at once."""
    world = shard_of(*(machine(f"m{number:03d}", S.IDLE) for number in range(200)))
    operator = await hints_for(world, *(need("c1", "1m", priority=priority) for priority in range(100, 108)))
    sent = []
    for number in range(199, 170, -1):
        world.provider.fail(f"m{number:03d}", "broken")
        await asyncio.sleep(10)
        await world.cycle()
    sent.append(len(operator.hints()))
    for number in range(170, 110, -1):
        world.provider.fail(f"m{number:03d}", "broken")
    await asyncio.sleep(6)
    await world.cycle()
    sent.append(len(operator.hints()))

    assert sent == [8, 16]


@pytest.mark.rule("shard 10.5/6")
async def test_a_new_session_hears_everything_and_the_others_nothing() -> None:
    world = shard_of(*(machine(f"m{i}", S.IDLE) for i in range(4)))
    first, other = world.connect("c1"), world.connect("c2")
    first.report(SMALL)
    other.report(need("c2", "1m"))
    await world.cycle()
    world.shard.sessions.close(first.session, CloseReason.GONE)
    await world.cycle()
    again = world.connect("c1")
    await world.cycle()

    assert (len(first.hints()), len(again.hints()), len(other.hints())) == (1, 1, 1)


@pytest.mark.rule("shard 1/15")
async def test_nothing_is_said_before_the_first_inventory() -> None:
    world = shard_of(machine("a", S.IDLE))
    world.provider.list_fails = True
    operator = await hints_for(world, SMALL)
    unread = len(operator.hints())
    world.provider.list_fails = False
    await world.cycle()

    assert (unread, len(operator.hints())) == (0, 1)


async def test_a_need_that_left_is_told_no_more() -> None:
    world = shard_of(machine("a", S.IDLE), machine("b", S.IDLE))
    operator = await hints_for(world, SMALL)
    operator.report()
    await asyncio.sleep(2 * REFRESH_SECONDS)
    await world.cycle()

    assert len(operator.hints()) == 1


@pytest.mark.rule("shard 10.5/7")
async def test_many_hints_leave_half_of_the_outbox_to_others() -> None:
    """What found no room follows in later cycles, each hint once; nothing overflows."""
    world = shard_of(machine("a", S.IDLE), outbox_frames_max=16)
    rows = [need("c1", "1m", priority=priority) for priority in range(100, 150)]
    operator = world.connect("c1")
    operator.report(*rows)
    for _ in range(9):
        await world.cycle()

    assert sorted(hint.fingerprint for hint in operator.hints()) == sorted(row.fingerprint for row in rows)
    assert operator.session.outbox.dropped == 0


@pytest.mark.rule("shard 10.4/3")
async def test_frames_that_were_dropped_are_made_up_for() -> None:
    """After an overflow the operator hears its hints again."""
    world = shard_of(machine("a", S.IDLE), machine("b", S.IDLE), outbox_frames_max=16)
    operator = await hints_for(world, SMALL)
    (hint,) = operator.hints()
    for number in range(40):
        operator.session.outbox.put(replace(hint, fingerprint=f"{number}"))
    await world.cycle()
    await world.cycle()

    assert sum(told_hint.fingerprint == SMALL.fingerprint for told_hint in operator.hints()) == 2


@pytest.mark.rule("shard 10.5/1")
def test_low_is_never_said() -> None:
    """The three that are said are all but LOW and the unspecified one."""
    said = {expected[1] for _machines, expected in OFFERS.values()}

    assert said == {confidence.name for confidence in Confidence} - {"LOW", "UNSPECIFIED"}
