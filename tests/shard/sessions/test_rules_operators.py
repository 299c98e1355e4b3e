"""Operators that are slow, silent, gone or wrong cost themselves and nobody else (docs/spec/shard.md §4, §10, §15)."""

import asyncio
from dataclasses import replace

import pytest

from bigfleet.model.frames import BootstrapRequest, BootstrapResponse, Hello, NodeStateUpdate, NodeStatus
from bigfleet.model.states import MachineState
from bigfleet.shard.ports import ShardSettings
from bigfleet.shard.sessions.outbox import CloseReason
from bigfleet.shard.sessions.rollup_intake import ROWS_ON_LOOP_MAX
from tests.shard.sessions.test_demand import Apart
from tests.shard.world import FakeOperator, Offer, ScriptedProvider, World, machine, need

pytestmark = pytest.mark.virtual_time

S = MachineState


async def read() -> None:
    """Let the operators read what was sent."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.rule("shard 4/4")
async def test_a_slow_roll_up_does_not_hold_up_a_blob_of_the_same_session() -> None:
    """Roll-ups have a lane of their own; the answer to a bootstrap request finds its waiter at once (§4 point 3)."""
    provider = ScriptedProvider(synchronous=True)
    provider.add(machine("m1", S.IDLE))
    apart = Apart()
    apart.gate.set()
    world = World(provider, compute=apart)
    operator = world.connect("c1")
    operator.answer = None
    operator.report(need("c1", "4"))
    await world.step()
    lane = asyncio.create_task(world.shard.serve_rollups(operator.session))
    action = asyncio.create_task(world.shard.actuator.run_inline())
    await read()
    apart.gate.clear()
    many = Offer("c1", tuple(need("c1", "4", priority=n) for n in range(ROWS_ON_LOOP_MAX + 1)), 9)
    world.shard.sessions.receive_rollup(operator.session, many)
    await read()
    request = next(frame for frame in operator.frames if isinstance(frame, BootstrapRequest))
    answer = BootstrapResponse(request_id=request.request_id, user_data=b"#")
    world.shard.sessions.receive_bootstrap_response(operator.session, answer)
    await action

    assert world.outcomes() == [("Bootstrap", "m1", "success")]
    assert len(world.shard.intake.table.in_list_order()) == 1
    apart.gate.set()
    await read()
    assert len(world.shard.intake.table.in_list_order()) == ROWS_ON_LOOP_MAX + 1
    world.shard.stop_sessions()
    await lane


@pytest.mark.rule("shard 1/15")
async def test_nothing_is_said_of_supply_before_the_first_reconcile() -> None:
    """Neither hint nor verdict nor state: an unread inventory is not an empty one (§1)."""
    provider = ScriptedProvider()
    provider.add(machine("m1", S.IDLE))
    provider.list_fails = True
    world = World(provider)
    operator = world.connect("c1", "need-status", "drain-result")
    operator.report(need("c1", "8"))
    for _ in range(3):
        await world.cycle()
        await world.shard._clock.sleep(10)

    assert {type(frame).__name__ for frame in operator.frames} == {"Acknowledgement"}


@pytest.mark.rule("shard 10.3/2", "shard 10.3/3")
async def test_the_providers_node_name_goes_before_the_operators() -> None:
    """And an operator's before none (§10.3); other machines of the frame's fields are the machine's own."""
    provider = ScriptedProvider()
    bound = machine("m1", S.CONFIGURED, cluster="c1", allocatable={"cpu": "3"}, resources={"cpu": "4"})
    provider.add(bound)
    world = World(provider)
    operator = world.connect("c1")
    await world.cycle()
    status = NodeStatus(machine_id="m1", node_name="told", ready=True, observed_unix_nanos=1)
    world.shard.sessions.on_node_status(operator.session, status)
    names = []
    for changes in ({"price_usd_per_hour": 2.0, "zone": "zb"}, {"node_name": "declared"}):
        provider.add(replace(bound, **changes))
        await world.cycle()
        names.append(_last_state(operator).node_name)

    assert names == ["told", "declared"]
    shown = _last_state(operator)
    # The effective allocatable, never the shape of a replica.
    assert (shown.resources, shown.provider_id, shown.cluster_id) == ({"cpu": "3"}, "test://host-m1", "c1")


def _last_state(operator: FakeOperator) -> NodeStateUpdate:
    return [frame for frame in operator.frames if isinstance(frame, NodeStateUpdate)][-1]


@pytest.mark.rule("shard 10.3/3")
async def test_without_an_allocatable_the_resources_are_shown() -> None:
    """Both are the machine's, none is computed from a need."""
    provider = ScriptedProvider()
    provider.add(machine("m1", S.CONFIGURED, cluster="c1", allocatable={}, resources={"cpu": "8"}))
    world = World(provider)
    operator = world.connect("c1")
    await world.cycle()
    await read()

    assert _last_state(operator).resources == {"cpu": "8"}


@pytest.mark.rule("shard 15/14")
async def test_an_operator_that_is_gone_loses_nothing_by_its_silence() -> None:
    """Its demand stands and nothing is reclaimed, for however long; a drain under way goes on (§15)."""
    provider = ScriptedProvider(synchronous=True)
    provider.add(*(machine(f"m{number}", S.IDLE) for number in range(3)))
    world = World(provider)
    operator = world.connect("c1")
    operator.report(need("c1", "8"))
    await world.settle()
    world.shard.sessions.close(operator.session, CloseReason.GONE)
    for _ in range(20):
        await world.cycle()
        await world.shard._clock.sleep(3600)

    assert [each.cluster for each in world.shard.inventory if each.state is S.CONFIGURED] == ["c1", "c1"]
    assert len(world.shard.intake.table.in_list_order()) == 1
    assert {kind for kind, *_rest in world.outcomes()} == {"Bootstrap"}


@pytest.mark.rule("shard 15/15")
async def test_an_operator_that_hangs_on_blobs_costs_other_clusters_nothing() -> None:
    """They get their machines in the same cycle; the silent one's are Idle again after the timeout (§15)."""
    provider = ScriptedProvider(synchronous=True)
    provider.add(*(machine(f"m{number}", S.IDLE) for number in range(6)))
    world = World(provider, settings=ShardSettings(execute_concurrency_max=1))
    silent, other = world.connect("silent"), world.connect("other")
    silent.answer = None
    silent.report(need("silent", "12", priority=900))
    other.report(need("other", "12"))
    workers = asyncio.create_task(world.shard.actuator.run())
    for _ in range(4):
        await world.step()
        await world.shard._clock.sleep(5)
    served = [each.id for each in world.shard.inventory if each.cluster == "other" and each.state is S.CONFIGURED]
    assert len(served) == 3
    await world.shard._clock.sleep(30)

    assert sum(each.state is S.IDLE for each in world.shard.inventory) >= 2
    assert not any(each.cluster == "silent" and each.state is S.CONFIGURED for each in world.shard.inventory)
    workers.cancel()
    await asyncio.gather(workers, return_exceptions=True)


@pytest.mark.rule("shard 10.1/4", "shard 15/18")
async def test_frames_of_a_replaced_session_change_nothing() -> None:
    """Of two operators with one cluster id the newest wins (§15): the older one's roll-up is not taken."""
    world = World()
    older = world.connect("c1")
    lane = asyncio.create_task(world.shard.serve_rollups(older.session))
    newer = world.connect("c1")
    newer.report(need("c1", "4"))
    world.shard.sessions.receive_rollup(older.session, Offer("c1", (), 5))
    await read()
    await lane

    assert len(world.shard.intake.table.in_list_order()) == 1
    assert older.session.outbox.closed is CloseReason.REPLACED


@pytest.mark.rule("shard 10.4/1", "shard 15/16", "shard 16/5")
async def test_a_stream_that_takes_nothing_makes_nobody_wait() -> None:
    """The same cycles at the same times, with and without a session that never reads (§16)."""
    moments = []
    for reads in (True, False):
        provider = ScriptedProvider(synchronous=True)
        provider.add(*(machine(f"m{number}", S.CONFIGURED, cluster="deaf") for number in range(30)))
        world = World(provider, settings=ShardSettings(outbox_frames_max=16))
        if reads:
            world.connect("deaf", "none")
        else:
            world.shard.sessions.open(Hello(cluster_id="deaf"))
        started = world.shard._clock.monotonic_seconds()
        for price in range(5):
            provider.add(
                *(machine(f"m{n}", S.CONFIGURED, cluster="deaf", labels={"price": str(price)}) for n in range(30))
            )
            await world.cycle()
        moments.append(world.shard._clock.monotonic_seconds() - started)

    assert moments == [0, 0]


@pytest.mark.rule("shard 11.1/6")
async def test_a_row_that_victims_cover_is_no_shortfall_and_is_shown_as_short() -> None:
    """Picked now or still draining (§11.1)."""
    provider = ScriptedProvider()
    provider.add(machine("m1", S.IDLE))
    world = World(provider)
    low, high = world.connect("low"), world.connect("high")
    low.report(need("low", "4", priority=10))
    await world.settle()
    low.drain = None
    high.report(need("high", "4", priority=1000))
    workers = asyncio.create_task(world.shard.actuator.run())
    seen = []
    for _ in range(3):
        await world.step()
        await world.shard._clock.sleep(1)
        row = next(view for view in world.shard.view.needs if view.need.cluster == "high")
        seen.append((row.satisfied, row.unmet_age_cycles, high_key_in_ledger(world)))

    assert seen == [(False, 0, False)] * 3
    workers.cancel()
    await asyncio.gather(workers, return_exceptions=True)


def high_key_in_ledger(world: World) -> bool:
    """Return whether the row of the cluster high is in the fleet ledger."""
    return need("high", "4", priority=1000).fingerprint in world.shard.shortfall_ledger
