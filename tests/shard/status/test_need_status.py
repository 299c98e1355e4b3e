"""What an operator is told of its needs: which are unmet, by how much and why, and when (docs/spec/shard.md §10.7)."""

import asyncio
from dataclasses import replace

import pytest

from bigfleet.model.frames import (
    CAPABILITY_NEED_STATUS,
    BootstrapRequest,
    BootstrapResponse,
    NeedStatus,
    NeedStatusUpdate,
    NodeStateUpdate,
    UnmetReason,
)
from bigfleet.model.labels import ZONE
from bigfleet.model.need import Need
from bigfleet.model.profile import Operator, Profile, Requirement, SpreadMode, TopologySpread
from bigfleet.model.states import MachineState
from bigfleet.model.vector import parse_vector
from bigfleet.shard.ports import ShardSettings
from bigfleet.shard.sessions.outbox import CloseReason
from bigfleet.shard.status.need_status import ROWS_MAX
from tests.shard.world import FakeOperator, ScriptedProvider, World, machine, need

pytestmark = pytest.mark.virtual_time

S = MachineState


def gang(cpu: str, group: str) -> Need:
    """Return a gang of 1 cpu pods in one zone, of type t4."""
    quantities = {"cpu": cpu}
    profile = Profile(requirements=(Requirement(ZONE, Operator.SAME),), priority=100)
    return Need(
        cluster=need("c1", "1").cluster,
        profile=profile,
        aggregate=parse_vector(quantities),
        min_unit=parse_vector({"cpu": "1"}),
        group=group,
    )


async def judged(*rows: Need, idle: int = 1, cycles: int = 1) -> tuple[World, FakeOperator]:
    """Return a world in which c1's rows have been judged, and its operator."""
    world = World(ScriptedProvider())
    world.provider.add(*(machine(f"m{i}", S.IDLE) for i in range(idle)))
    operator = world.connect("c1", CAPABILITY_NEED_STATUS)
    operator.report(*rows)
    for _ in range(cycles):
        await world.cycle()
        await asyncio.sleep(10)
    return world, operator


def reasons(update: NeedStatusUpdate) -> list[tuple[str, UnmetReason]]:
    """Return (group, reason) of each row."""
    return [(row.group, row.reason) for row in update.rows]


@pytest.mark.rule("shard 10.7/2")
async def test_unmet_rows_are_told_with_what_they_lack_and_met_ones_are_not() -> None:
    short, met = need("c1", "6", priority=50), need("c1", "4", priority=100)
    _world, operator = await judged(short, met)
    (update,) = operator.verdicts()

    assert update.rows == (
        NeedStatus(
            fingerprint=short.fingerprint,
            group="",
            residual={"cpu": "6"},
            reason=UnmetReason.PRIORITY_STARVED,
            age_cycles=1,
            message="matching machines are held by equal or higher priority",
        ),
    )
    assert (update.cycle, update.rollup_timestamp_unix_nanos, update.truncated) == (1, 1, False)


async def test_demand_that_is_met_or_gone_is_said_so_by_an_empty_list() -> None:
    """Absence of a row means met; a verdict without rows is no silence."""
    _world, met = await judged(need("c1", "4"))
    _world, empty = await judged()

    assert [[update.rows for update in operator.verdicts()] for operator in (met, empty)] == [[()], [()]]


async def test_highest_priority_comes_first() -> None:
    rows = [need("c1", "400", priority=priority) for priority in (50, 200, 100)]
    _world, operator = await judged(*rows)
    told = [row.fingerprint for row in operator.verdicts()[0].rows]

    assert told == [rows[1].fingerprint, rows[2].fingerprint, rows[0].fingerprint]


@pytest.mark.rule("shard 10.7/2")
async def test_a_folded_row_is_told_as_the_gangs_that_were_reported() -> None:
    """As many fully met, in list order, as the covered amount pays for; the next one in part."""
    # One machine of 4 cpu, folded gangs of 3 cpu each: the first is met, the second lacks two, the third all.
    _world, operator = await judged(gang("3", "a"), gang("3", "b"), gang("3", "c"))
    (update,) = operator.verdicts()

    assert [(row.group, row.residual["cpu"]) for row in update.rows] == [("b", "2"), ("c", "3")]
    assert {row.fingerprint for row in update.rows} == {gang("3", "a").fingerprint}


async def test_each_reason_has_a_sentence() -> None:
    """No machine of that type, a gang that no zone can hold, and a lower priority beside a higher one."""
    other = replace(need("c1", "4"), group="", profile=Profile(requirements=(Requirement("x", Operator.EXISTS),)))
    _world, operator = await judged(other, gang("40", "big"))
    (update,) = operator.verdicts()

    assert dict(reasons(update)) == {
        "": UnmetReason.NO_MATCHING_SUPPLY,
        "big": UnmetReason.TOPOLOGY_UNSATISFIABLE,
    }
    assert [row.message for row in update.rows] == [
        "no single domain can hold the whole group",
        "no machine of the fleet matches the requirements and holds the largest request",
    ]


async def test_a_spread_over_a_label_that_no_machine_has_says_so_until_one_has_it() -> None:
    """Also while nothing else of the row changes."""
    profile = Profile(spreads=(TopologySpread("rack", 1, SpreadMode.DO_NOT_SCHEDULE),), priority=100)
    world, operator = await judged(replace(need("c1", "4"), profile=profile), idle=1, cycles=3)
    (row,) = operator.verdicts()[-1].rows
    assert row.reason is UnmetReason.TOPOLOGY_UNSATISFIABLE
    assert row.message == "no machine that could host it has the label rack of its topology spread"

    other = machine("other", S.CONFIGURED, cluster="c2", assigned_priority=500, labels={"rack": "r"})
    world.provider.add(other)
    world.connect("c2").report(need("c2", "4", priority=500))
    for _ in range(3):
        await asyncio.sleep(10)
        await world.cycle()
    (row,) = operator.verdicts()[-1].rows
    assert row.reason is UnmetReason.PRIORITY_STARVED


async def test_a_parked_gang_says_that_it_is_parked() -> None:
    _world, operator = await judged(gang("40", "big"), cycles=10)
    (row,) = operator.verdicts()[-1].rows

    assert (row.parked, row.reason, row.age_cycles) == (True, UnmetReason.TOPOLOGY_UNSATISFIABLE, 10)
    assert "tried again" in row.message


@pytest.mark.rule("shard 9.2/15", "shard 11.1/7", "shard 15/17")
async def test_a_refused_bootstrap_carries_the_operators_own_words() -> None:
    world, operator = await judged(idle=1)
    operator.answer = lambda request: BootstrapResponse(request_id=request.request_id, error="no template for t4")
    operator.report(need("c1", "4"), at_unix_nanos=2)
    await world.cycle()
    await asyncio.sleep(10)
    await world.cycle()
    (row,) = operator.verdicts()[-1].rows

    assert any(isinstance(frame, BootstrapRequest) for frame in operator.frames)
    assert (row.reason, row.residual) == (UnmetReason.BOOTSTRAP_REFUSED, {"cpu": "4"})
    assert row.message == "the operator cannot bootstrap it: no template for t4"
    assert (
        world.metric("shortfalls"),
        world.metric("shortfall_rows", **{"reason": row.reason.label, "class": "batch"}),
    ) == (
        0,
        1,
    )


@pytest.mark.rule("shard 10.7/1", "shard 10.7/3")
async def test_a_verdict_comes_again_when_the_judged_roll_up_is_a_newer_one() -> None:
    """Also when that one says the same: its requests may be others."""
    world, operator = await judged(need("c1", "4"))
    operator.report(need("c1", "4"), at_unix_nanos=2)
    await world.cycle()
    await asyncio.sleep(10)
    await world.cycle()

    assert [update.rollup_timestamp_unix_nanos for update in operator.verdicts()] == [1, 2]


async def test_a_held_roll_up_is_not_the_one_that_is_judged() -> None:
    world, operator = await judged(*(need("c1", "1", priority=priority) for priority in range(100, 112)))
    assert operator.report(at_unix_nanos=2) == "held"
    await world.cycle()

    assert {update.rollup_timestamp_unix_nanos for update in operator.verdicts()} == {1}


@pytest.mark.rule("shard 10.7/1")
async def test_verdicts_come_at_most_every_five_seconds_and_the_last_word_is_not_lost() -> None:
    world, operator = await judged(need("c1", "4"))
    for seconds, stamp in ((0, 2), (2, 3), (2, 4), (2, 5)):
        await asyncio.sleep(seconds)
        operator.report(need("c1", "4"), at_unix_nanos=stamp)
        await world.cycle(is_timer=False)
    await asyncio.sleep(5)
    await world.cycle()

    assert [update.rollup_timestamp_unix_nanos for update in operator.verdicts()] == [1, 2, 5]


@pytest.mark.rule("shard 10.7/1")
async def test_an_operator_that_cannot_read_verdicts_gets_none() -> None:
    world = World(ScriptedProvider())
    operator = world.connect("c1")
    operator.report(need("c1", "4"))
    await world.cycle()

    assert operator.verdicts() == []


async def test_nobody_is_judged_before_its_roll_up() -> None:
    """What the shard does not know it does not judge."""
    world = World(ScriptedProvider())
    operator = world.connect("c1", CAPABILITY_NEED_STATUS)
    await world.cycle()

    assert operator.verdicts() == []


async def test_a_new_session_is_told_though_nothing_changed() -> None:
    world, operator = await judged(need("c1", "8"))
    world.shard.sessions.close(operator.session, CloseReason.GONE)
    again = world.connect("c1", CAPABILITY_NEED_STATUS)
    await world.cycle()

    assert [len(update.rows) for update in again.verdicts()] == [1]


async def test_a_verdict_lists_a_thousand_rows_and_says_that_there_are_more() -> None:
    rows = [need("c1", "4", priority=priority) for priority in range(1, ROWS_MAX + 6)]
    _world, operator = await judged(*rows, idle=1)
    (update,) = operator.verdicts()

    assert (len(update.rows), update.truncated) == (ROWS_MAX, True)
    assert update.rows[0].fingerprint == rows[-2].fingerprint


@pytest.mark.rule("shard 10.7/3", "shard 11.1/6")
async def test_a_row_that_victims_will_cover_is_unmet_but_no_shortfall() -> None:
    world = World(ScriptedProvider())
    low = need("c2", "4", priority=1)
    world.provider.add(
        machine("m0", S.CONFIGURED, cluster="c2", assigned_need_fingerprint=low.fingerprint, assigned_priority=1)
    )
    world.connect("c2").report(low)
    operator = world.connect("c1", CAPABILITY_NEED_STATUS)
    operator.report(need("c1", "4", priority=1_000_000))
    await world.cycle()
    (row,) = operator.verdicts()[0].rows

    assert (row.reason, row.age_cycles, world.metric("shortfalls")) == (UnmetReason.PREEMPTION_EXHAUSTED, 0, 0)
    assert row.message == "machines are being drained for it"


async def test_a_verdict_waits_for_room_in_the_outbox() -> None:
    """An operator that is slow to read loses nothing to it, and hears it once it has caught up."""
    world = World(ScriptedProvider(), settings=ShardSettings(outbox_frames_max=16, dry_run=True))
    operator = world.connect("c1", CAPABILITY_NEED_STATUS)
    await asyncio.sleep(1)
    outbox = operator.session.outbox
    for task in operator._tasks:
        task.cancel()
    operator.report(need("c1", "4"))
    for number in range(15):
        outbox.put(NodeStateUpdate(machine_id=f"m{number}", cluster_id="c1", state=S.CONFIGURED))
    await world.cycle()
    while_full = (len(outbox), outbox.dropped)
    while len(outbox):
        await outbox.next()
    await world.cycle()

    assert while_full == (16, 0)
    assert "needs" in outbox._by_key
