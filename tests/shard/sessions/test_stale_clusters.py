"""When a cluster counts as silent, and that nothing follows from it (docs/spec/shard.md §10.7)."""

import asyncio

import pytest
import structlog

from bigfleet.model.states import MachineState
from bigfleet.shard.ports import ShardSettings
from bigfleet.shard.sessions.outbox import CloseReason
from tests.shard.world import ScriptedProvider, World, machine, need

pytestmark = pytest.mark.virtual_time

S = MachineState
ALERT_SECONDS = 600.0


def world_with(*clusters: str) -> World:
    """Return a world with one machine bound to each cluster."""
    world = World(ScriptedProvider(), settings=ShardSettings(cluster_silence_seconds=ALERT_SECONDS))
    world.provider.add(*(machine(f"m-{name}", S.CONFIGURED, cluster=name) for name in clusters))
    return world


async def silent_after(world: World, seconds: float) -> tuple[float, set[str]]:
    """Let time pass, cycle, and return gauge and clusters."""
    await asyncio.sleep(seconds)
    await world.cycle()
    return world.metric("clusters_silent"), set(world.shard.publisher.silence.silent)


@pytest.mark.rule("shard 10.7/4")
async def test_a_cluster_with_machines_that_never_called_is_silent_after_the_alert() -> None:
    """Counted from its first sight."""
    world = world_with("c1")
    await world.cycle()

    assert await silent_after(world, ALERT_SECONDS) == (0, set())
    assert await silent_after(world, 1) == (1, {"c1"})


@pytest.mark.rule("shard 12/12")
async def test_a_missed_cluster_is_shown_as_away_and_after_the_alert_as_silent() -> None:
    """Since the same moment; with a session it is neither."""
    world = world_with("c1")
    await world.cycle()
    views = world.shard.session_views
    away = views.of("c1")
    await silent_after(world, ALERT_SECONDS + 1)
    silent = views.of("c1")
    world.connect("c1")
    connected = views.of("c1")

    assert away is not None
    assert silent is not None
    assert connected is not None
    assert (away.state, silent.state, connected.state) == ("away", "silent", "connected")
    assert away.since_unix_nanos == silent.since_unix_nanos < connected.since_unix_nanos


@pytest.mark.rule("shard 10.7/4")
async def test_a_cluster_with_demand_alone_matters_too() -> None:
    world = world_with()
    operator = world.connect("c1")
    operator.report(need("c1", "4"))
    await world.cycle()
    world.shard.sessions.close(operator.session, CloseReason.GONE)

    assert await silent_after(world, ALERT_SECONDS + 1) == (1, {"c1"})


async def test_a_session_ends_the_silence_and_its_end_starts_it_anew() -> None:
    """From the moment at which the session ended, not from the next cycle."""
    world = world_with("c1")
    await world.cycle()
    await silent_after(world, ALERT_SECONDS + 1)
    operator = world.connect("c1")
    heard = await silent_after(world, 1)
    world.shard.sessions.close(operator.session, CloseReason.GONE)
    early = await silent_after(world, ALERT_SECONDS)
    late = await silent_after(world, 1)

    assert (heard, early, late) == ((0, set()), (0, set()), (1, {"c1"}))


async def test_a_cluster_without_demand_and_machines_is_nobodys_business() -> None:
    world = world_with()
    operator = world.connect("c1")
    operator.report()
    world.shard.sessions.close(operator.session, CloseReason.GONE)

    assert await silent_after(world, ALERT_SECONDS + 1) == (0, set())


@pytest.mark.rule("shard 10.7/4")
async def test_silence_is_logged_once_and_changes_nothing() -> None:
    """Its demand stands and its machines stay."""
    world = world_with("c1")
    operator = world.connect("c1")
    operator.report(need("c1", "8"))
    await world.cycle()
    world.shard.sessions.close(operator.session, CloseReason.GONE)
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            await silent_after(world, ALERT_SECONDS)

    assert [line["cluster"] for line in logs if line["event"] == "cluster.went_silent"] == ["c1"]
    assert (world.state("m-c1"), len(world.shard.intake.table.rows_of("c1"))) == (S.CONFIGURED, 1)
