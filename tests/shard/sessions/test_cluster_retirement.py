"""Clusters that are gone are retired by order, and what is remembered of them ends (docs/spec/shard.md §4.3, §10.7)."""

import asyncio
from pathlib import Path

import pytest

from bigfleet.model.frames import Acknowledgement
from bigfleet.model.states import MachineState
from bigfleet.shard.ownership.retired_clusters import RETIRED_CLUSTERS_MAX, RetirementStore
from bigfleet.shard.ownership.state_file import StateFile
from bigfleet.shard.ports import ShardSettings
from bigfleet.shard.sessions.cluster_retirement import RefusalReason, RetirementRefused
from bigfleet.shard.sessions.outbox import CloseReason
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.shard.audit.audit_memory import MemoryAuditLog
from tests.shard.world import FakeOperator, ScriptedProvider, World, machine, need

pytestmark = pytest.mark.virtual_time

S = MachineState
DAY_SECONDS = 86_400
#: Longer than an operator may be away without a delay of reclaims.
AWAY_SECONDS = 601.0


async def world_of(
    machines: int, *, retirements: RetirementStore | None = None, provider: ScriptedProvider | None = None
) -> World:
    """Return a world after its first cycle, in which `c1` has as many machines and `c2` has one."""
    if provider is None:
        provider = ScriptedProvider()
        provider.add(*(machine(f"m{n}", S.CONFIGURED, cluster="c1") for n in range(machines)))
        provider.add(machine("other", S.CONFIGURED, cluster="c2"))
    world = World(provider, retirements=retirements, audit_log=MemoryAuditLog())
    await world.cycle()
    return world


def retire(world: World, cluster: str = "c1", *, force: bool = False, hold_seconds: int = DAY_SECONDS) -> None:
    """Retire a cluster as an administrator."""
    world.shard.retirement.retire(
        cluster, owner="bigfleet://admin", reason="decommissioned", force=force, hold_seconds=hold_seconds
    )


def leave(world: World, operator: FakeOperator) -> None:
    """End an operator's session."""
    world.shard.sessions.close(operator.session, CloseReason.GONE)


@pytest.mark.rule("shard 4.3/1")
async def test_a_silent_cluster_keeps_its_machines_until_it_is_retired() -> None:
    """Also one that has not reported since the shard started; machines of other clusters stay."""
    world = await world_of(3)
    await asyncio.sleep(30 * DAY_SECONDS)
    await world.settle()
    assert len(world.shard.inventory.bound_to("c1")) == 3

    retire(world)
    assert world.metric("retired_cluster_machines") == 3
    await world.settle(8)
    assert world.shard.inventory.bound_to("c1") == []
    assert world.shard.inventory.bound_to("c2") == ["other"]
    assert (world.metric("retired_clusters"), world.metric("retired_cluster_machines")) == (1, 0)


@pytest.mark.rule("shard 4.3/1")
async def test_demand_of_a_retired_cluster_ends_and_reclaims_stay_within_the_cap() -> None:
    """A cluster of 40 machines loses two per period at most, as by any other end of demand."""
    world = await world_of(40)
    operator = world.connect("c1")
    operator.report(need("c1", "160"))
    await world.cycle()
    leave(world, operator)
    await asyncio.sleep(AWAY_SECONDS)
    await world.cycle()
    assert len(world.shard.inventory.bound_to("c1")) == 40

    retire(world)
    assert world.shard.intake.table.rows_of("c1") == ()
    report = await world.step()
    assert report.enqueued == 2
    await world.settle(60)
    assert world.shard.inventory.bound_to("c1") == []


@pytest.mark.rule("shard 4.3/3", "shard 4.3/4")
async def test_a_connected_cluster_is_retired_with_force_alone() -> None:
    """Its operator still drains, and its roll-ups are refused with a reason."""
    world = await world_of(1)
    operator = world.connect("c1", "drain-result", "need-status")
    assert operator.report(need("c1", "4")) == "accepted"
    with pytest.raises(RetirementRefused) as refused:
        retire(world)
    assert refused.value.reason is RefusalReason.CONNECTED
    assert world.shard.retirement.records == {}

    retire(world, force=True)
    assert operator.report(need("c1", "4"), at_unix_nanos=2) == "retired"
    await world.settle(8)
    assert world.shard.inventory.bound_to("c1") == []
    assert world.metric("drains_without_session_total") == 0
    assert world.metric("rollups_total", result="retired") == 1
    errors = [frame.error for frame in operator.frames if isinstance(frame, Acknowledgement) and frame.error]
    assert len(errors) == 1
    assert "cluster c1 is retired by bigfleet://admin" in errors[0]


@pytest.mark.rule("shard 4.3/3", "shard 4.3/5")
async def test_an_operator_that_comes_back_gets_nothing_until_the_cluster_is_readmitted() -> None:
    """Its first roll-up after that is taken, and it acquires again."""
    world = await world_of(1)
    retire(world)
    await world.settle(8)
    operator = world.connect("c1")
    assert operator.report(need("c1", "4")) == "retired"
    await world.settle()
    assert world.shard.inventory.bound_to("c1") == []

    world.shard.retirement.readmit("c1", owner="bigfleet://admin")
    assert operator.report(need("c1", "4"), at_unix_nanos=2) == "accepted"
    await world.settle()
    assert len(world.shard.inventory.bound_to("c1")) == 1


@pytest.mark.rule("shard 4.3/5")
async def test_readmission_keeps_the_machines_that_are_left() -> None:
    """The cluster is as one that has not reported: nothing of it is reclaimed before it does."""
    world = await world_of(40)
    retire(world)
    await world.cycle()
    left = len(world.shard.inventory.bound_to("c1"))
    world.shard.retirement.readmit("c1", owner="")
    await world.settle(10)
    kept = len(world.shard.inventory.bound_to("c1"))
    # What was under way ends; nothing new begins.
    assert left - 2 <= kept <= left
    assert kept > 30


@pytest.mark.rule("shard 4.3/4")
async def test_a_cluster_that_nobody_knows_is_refused() -> None:
    """A wrong name changes nothing."""
    world = await world_of(1)
    for change in (lambda: retire(world, "c3"), lambda: world.shard.retirement.readmit("c1", owner="")):
        with pytest.raises(RetirementRefused) as refused:
            change()
        assert refused.value.reason is RefusalReason.UNKNOWN
    assert world.shard.retirement.records == {}


async def test_records_have_a_bound() -> None:
    """One more is refused until others end."""
    world = await world_of(1)
    for number in range(RETIRED_CLUSTERS_MAX):
        leave(world, world.connect(name := f"x{number}"))
        world.shard.intake.reported.add(name)
        retire(world, name)
    with pytest.raises(RetirementRefused) as refused:
        retire(world)
    assert refused.value.reason is RefusalReason.FULL


@pytest.mark.rule("shard 4.3/6")
async def test_a_record_ends_when_nothing_is_left_and_its_hold_is_over() -> None:
    """All memory of the cluster ends with it: maps and series."""
    world = await world_of(1)
    operator = world.connect("c1")
    operator.report(need("c1", "4"))
    leave(world, operator)
    retire(world, hold_seconds=DAY_SECONDS)
    await asyncio.sleep(AWAY_SECONDS)
    await world.settle(8)
    assert set(world.shard.retirement.records) == {"c1"}
    await asyncio.sleep(DAY_SECONDS)
    await world.cycle()

    assert world.shard.retirement.records == {}
    assert "c1" not in world.shard.intake.reported
    assert "c1" not in world.shard._rollups._last_rollups
    assert world.registry.get_sample_value("bigfleet_shard_rollup_quarantined", {"cluster": "c1"}) is None
    assert world.shard.session_views.clusters() == ["c2"]


@pytest.mark.rule("shard 4.3/6")
@pytest.mark.parametrize("obstacle", ["machine", "session"])
async def test_a_record_lasts_while_anything_of_the_cluster_is_left(obstacle: str) -> None:
    """Past its hold too: else a connected operator would buy again what was just reclaimed."""
    world = await world_of(1)
    if obstacle == "session":
        world.connect("c1")
    else:
        world.provider.records["m0"] = machine("m0", S.FAILED, cluster="c1")
    retire(world, force=True, hold_seconds=1)
    await world.settle(8)
    await asyncio.sleep(DAY_SECONDS)
    await world.cycle()
    assert set(world.shard.retirement.records) == {"c1"}


@pytest.mark.rule("shard 4.3/2")
async def test_a_retirement_is_durable(tmp_path: Path) -> None:
    """The next process goes on with it before anybody has reported."""
    with StateFile.open(tmp_path, shard_id="shard-0", clock=LoopClock()) as file:
        world = await world_of(40, retirements=file.retirements)
        retire(world)
        await world.cycle()
        provider, left = world.provider, len(world.shard.inventory.bound_to("c1"))
        before = file.retirements.records
    with StateFile.open(tmp_path, shard_id="shard-0", clock=LoopClock()) as file:
        assert file.retirements.records == before
        provider.marks.clear()
        world = await world_of(0, retirements=file.retirements, provider=provider)
        assert world.connect("c1").report(need("c1", "4")) == "retired"
        await world.settle(60)
        assert len(world.shard.inventory.bound_to("c1")) < left
        assert world.shard.inventory.bound_to("c1") == []


@pytest.mark.rule("shard 4.3/2")
async def test_a_retirement_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """Nothing was changed, in memory as on disk."""
    with StateFile.open(tmp_path, shard_id="shard-0", clock=LoopClock()) as file:
        world = await world_of(1, retirements=file.retirements)
        (tmp_path / "shard.db").unlink()
        with pytest.raises(RetirementRefused) as refused:
            retire(world)
        assert refused.value.reason is RefusalReason.NOT_WRITTEN
        assert world.shard.retirement.records == {}
        await world.settle()
        assert world.shard.inventory.bound_to("c1") == ["m0"]


@pytest.mark.rule("shard 4.3/6")
async def test_each_change_has_an_audit_record_with_its_owner() -> None:
    """In the chain of the actions."""
    world = await world_of(1)
    retire(world)
    world.shard.retirement.readmit("c1", owner="bigfleet://admin")
    log = world.shard.audit._log
    assert isinstance(log, MemoryAuditLog)
    found = [record for record in log.records if record["kind"].startswith("Cluster")]
    assert [(record["kind"], record["cluster"], record["owner"]) for record in found] == [
        ("ClusterRetire", "c1", "bigfleet://admin"),
        ("ClusterReadmit", "c1", "bigfleet://admin"),
    ]
    assert found[0]["reason"] == "decommissioned"


# ---- clusters that are gone by themselves ----------------------------------------------------------------------


@pytest.mark.rule("shard 10.7/5")
async def test_clusters_that_came_and_went_leave_nothing_behind() -> None:
    """A peer that opens sessions under a thousand names and reports nothing used to fill maps that never shrank."""
    world = World(ScriptedProvider(), settings=ShardSettings())
    await world.cycle()
    for number in range(1_000):
        operator = world.connect(f"x{number}")
        operator.report()
        leave(world, operator)
    assert len(world.shard.intake.reported) == 1_000
    await world.cycle()

    assert not world.shard.intake.reported
    assert not world.shard.intake._clusters
    assert not world.shard._rollups._last_rollups
    assert not world.shard.publisher._rollups
    assert world.shard.intake.reported_by_now() == frozenset()


@pytest.mark.rule("shard 10.7/5")
async def test_a_silent_cluster_with_demand_or_machines_is_not_forgotten() -> None:
    """Silence never means that there is no demand."""
    world = await world_of(1)
    demanding = world.connect("c3")
    demanding.report(need("c3", "4"))
    holding = world.connect("c1")
    holding.report()
    leave(world, demanding)
    leave(world, holding)
    await asyncio.sleep(30.0)
    await world.cycle()
    assert {"c1", "c3"} <= world.shard.intake.reported
