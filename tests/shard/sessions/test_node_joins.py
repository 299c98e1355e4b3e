"""Which machines never joined their cluster, and what follows: nothing, a look, or a replacement (shard.md §10.6)."""

import asyncio
from typing import Any

import pytest

from bigfleet.model.frames import CAPABILITY_NODE_STATUS
from bigfleet.model.states import MachineState
from bigfleet.shard.ports import JoinGate, ShardSettings
from bigfleet.shard.sessions.node_joins import SESSION_SECONDS_MIN
from bigfleet.shard.sessions.outbox import CloseReason
from tests.shard.world import FakeOperator, ScriptedProvider, World, machine, need

pytestmark = pytest.mark.virtual_time

S = MachineState
DEADLINE_SECONDS = 900.0


def bound_world(gate: JoinGate = JoinGate.OBSERVE, machines: int = 1, idle: int = 0, **settings: Any) -> World:
    """Return a world with machines bound to c1."""
    world = World(ScriptedProvider(), settings=ShardSettings(join_gate=gate, **settings))
    row = need("c1", "4")
    stamp = {"assigned_need_fingerprint": row.fingerprint, "assigned_priority": 100}
    world.provider.add(*(machine(f"m{i}", S.CONFIGURED, cluster="c1", **stamp) for i in range(machines)))
    world.provider.add(*(machine(f"idle{i}", S.IDLE) for i in range(idle)))
    return world


async def connected(world: World, machines: int = 1) -> FakeOperator:
    """Connect an operator that tells of nodes and wants what is bound; cycle once."""
    operator = world.connect("c1", CAPABILITY_NODE_STATUS)
    operator.report(need("c1", str(4 * machines)))
    await world.cycle()
    return operator


def unjoined(world: World) -> tuple[int, list[str]]:
    """Return the gauge and the machines that are shown as unjoined."""
    return int(world.metric("machines_unjoined")), sorted(world.shard.publisher.joins.unjoined)


async def later(world: World, seconds: float) -> None:
    """Let time pass and cycle."""
    await asyncio.sleep(seconds)
    await world.cycle()


@pytest.mark.rule("shard 2/3", "shard 10.6/2")
async def test_a_machine_that_nobody_saw_ready_is_unjoined_after_the_deadline() -> None:
    """Counted from when it is Configured, here from its discovery."""
    world = bound_world()
    await connected(world)
    await later(world, DEADLINE_SECONDS)
    in_time = unjoined(world)
    await later(world, 1)

    assert (in_time, unjoined(world)) == ((0, []), (1, ["m0"]))


@pytest.mark.rule("shard 10.6/1")
async def test_a_machine_that_was_seen_ready_once_is_joined_for_good() -> None:
    """A later status without ready is shown, not judged."""
    world = bound_world()
    operator = await connected(world)
    joins = world.shard.publisher.joins
    before = joins.is_joined(world.machine("m0"))
    operator.saw("m0", at_unix_nanos=1)
    operator.saw("m0", ready=False, at_unix_nanos=2)
    await later(world, 2 * DEADLINE_SECONDS)

    assert (before, joins.is_joined(world.machine("m0")), unjoined(world)) == (False, True, (0, []))


async def test_a_node_that_is_not_ready_has_not_joined() -> None:
    world = bound_world()
    operator = await connected(world)
    operator.saw("m0", ready=False)
    await later(world, DEADLINE_SECONDS + 1)

    assert unjoined(world) == (1, ["m0"])


async def test_a_late_node_joins_after_all() -> None:
    world = bound_world()
    operator = await connected(world)
    await later(world, DEADLINE_SECONDS + 1)
    operator.saw("m0")
    await world.cycle()

    assert unjoined(world) == (0, [])


@pytest.mark.rule("shard 10.6/1")
async def test_a_node_seen_while_its_machine_is_configuring_has_joined() -> None:
    """It counts since the machine was bound, not since the provider says Configured."""
    world = World(ScriptedProvider(), settings=ShardSettings())
    world.provider.add(machine("m0", S.IDLE))
    operator = await connected(world)
    assert world.state("m0") is S.CONFIGURING
    operator.saw("m0")
    world.provider.settle()
    await later(world, 1)
    await later(world, DEADLINE_SECONDS + 1)

    assert (world.state("m0"), unjoined(world)) == (S.CONFIGURED, (0, []))


@pytest.mark.rule("shard 10.6/1")
async def test_a_status_of_a_former_binding_counts_for_nothing() -> None:
    """A machine that comes back to the cluster starts again."""
    world = bound_world()
    operator = await connected(world)
    operator.saw("m0")
    world.provider.add(machine("m0", S.IDLE))
    await world.cycle()
    operator.lost("m0")
    await world.settle()
    await later(world, DEADLINE_SECONDS + 1)

    assert (world.state("m0"), unjoined(world)) == (S.CONFIGURED, (1, ["m0"]))


@pytest.mark.rule("shard 10.6/2")
@pytest.mark.parametrize("capabilities", [("drain-result",), ()], ids=["another capability", "none"])
async def test_an_operator_that_cannot_tell_is_not_judged(capabilities: tuple[str, ...]) -> None:
    world = bound_world()
    world.connect("c1", *(capabilities or ("nothing",))).report(need("c1", "4"))
    await world.cycle()
    await later(world, DEADLINE_SECONDS + 1)

    assert unjoined(world) == (0, [])


@pytest.mark.rule("shard 10.6/2")
async def test_a_session_must_have_stood_for_a_minute() -> None:
    """Without one nothing is judged; a fresh one first gets the time to tell what it sees."""
    world = bound_world()
    operator = await connected(world)
    await later(world, DEADLINE_SECONDS + 1)
    world.shard.sessions.close(operator.session, CloseReason.GONE)
    await world.cycle()
    silent = unjoined(world)
    await connected(world)
    await later(world, SESSION_SECONDS_MIN - 1)
    fresh = unjoined(world)
    await later(world, 1)

    assert (silent, fresh, unjoined(world)) == ((0, []), (0, []), (1, ["m0"]))


@pytest.mark.rule("shard 10.6/3")
async def test_observe_changes_no_decision() -> None:
    world = bound_world(idle=1)
    await connected(world)
    await later(world, DEADLINE_SECONDS + 1)
    await world.settle()

    assert (world.state("m0"), world.state("idle0")) == (S.CONFIGURED, S.IDLE)


@pytest.mark.rule("shard 10.6/3")
async def test_enforce_replaces_the_machine_and_reclaims_it() -> None:
    """It is no supply any more: its row takes another one, and reclaim lists it with the reason."""
    world = bound_world(JoinGate.ENFORCE, idle=1)
    await connected(world)
    await later(world, DEADLINE_SECONDS + 1)
    actions = {
        (record.action.kind.label, record.action.machine_id, record.action.reason)
        for record in world.shard.ledger.history
    }

    assert actions == {("Bootstrap", "idle0", "phase1.idle"), ("Reclaim", "m0", "phase3.unjoined")}


@pytest.mark.rule("shard 10.6/3")
async def test_enforce_stays_under_the_reclaim_cap() -> None:
    world = bound_world(JoinGate.ENFORCE, machines=40)
    await connected(world, machines=40)
    await asyncio.sleep(DEADLINE_SECONDS + 1)
    report = await world.cycle()

    assert (unjoined(world)[0], report.enqueued, report.capped) == (40, 2, 38)


@pytest.mark.rule("shard 10.6/3")
async def test_off_keeps_and_shows_nothing() -> None:
    world = bound_world(JoinGate.OFF)
    operator = await connected(world)
    operator.saw("m0")
    await later(world, DEADLINE_SECONDS + 1)
    joins = world.shard.publisher.joins

    assert (unjoined(world), joins.is_joined(world.machine("m0")), len(joins._missing)) == ((0, []), False, 0)


async def test_machines_that_leave_are_forgotten() -> None:
    """Nothing stays behind of a machine that is freed or gone."""
    world = bound_world(machines=3, removal_brake=False)
    await connected(world, machines=3)
    await later(world, DEADLINE_SECONDS + 1)
    del world.provider.records["m0"]
    world.provider.add(machine("m1", S.SPECULATIVE))
    world.provider.fail("m2", "broken")
    await world.step()
    joins = world.shard.publisher.joins
    await world.step()

    missing = [each for each in ("m0", "m1", "m2") if each in joins._missing]
    assert (unjoined(world), missing, len(joins._missing), joins._overdue) == ((0, []), ["m2"], 1, {})
