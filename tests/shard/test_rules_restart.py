"""What the next process makes of what the last one left, and two processes of one id (docs/spec/shard.md §2, §15)."""

import asyncio

import pytest

from bigfleet.model.frames import ECHO_RESYNC, Acknowledgement, NodeStateUpdate
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.shard.ports import ShardSettings
from tests.shard.world import ScriptedProvider, World, machine, need

pytestmark = pytest.mark.virtual_time

S = MachineState


@pytest.mark.rule("shard 2/3")
async def test_idle_time_starts_again_at_discovery() -> None:
    """A restarted shard holds an idle machine for ten minutes of its own."""
    provider = ScriptedProvider(synchronous=True)
    provider.add(machine("od", S.IDLE, capacity_type=CapacityType.ON_DEMAND))
    first = World(provider)
    await first.cycle()
    await first.shard._clock.sleep(590)
    second = World(provider, epoch=2)
    await second.cycle()
    await second.shard._clock.sleep(599)
    await second.cycle()
    assert provider.calls == []

    await second.shard._clock.sleep(1)
    await second.cycle()
    assert [call[0] for call in provider.calls] == ["delete"]


@pytest.mark.rule("shard 2/2", "shard 2/4", "shard 2/5", "shard 15/2")
async def test_a_restart_knows_bindings_and_no_demand() -> None:
    """Inventory, cluster and stamps come from List; roll-ups, ages and the ledger start again."""
    provider = ScriptedProvider()
    provider.add(machine("m1", S.IDLE), machine("m2", S.IDLE, instance_type="t8"))
    first = World(provider)
    operator = first.connect("c1")
    rows = (need("c1", "4", priority=700, group="g"), need("c1", "400", priority=5))
    operator.report(*rows)
    await first.settle()
    assert first.shard.shortfall_ledger[rows[1].fingerprint].age_cycles == 5

    second = World(provider, epoch=2)
    await second.cycle()
    bound = second.machine("m1")
    assert (bound.state, bound.cluster, bound.assigned_priority, bound.assigned_group) == (S.CONFIGURED, "c1", 700, "g")
    assert bound.assigned_need_fingerprint == rows[0].fingerprint
    assert (second.shard.intake.reported, second.shard.shortfall_ledger, second.outcomes()) == (set(), {}, [])

    second.connect("c1").report(*rows)
    await second.settle()
    assert second.shard.shortfall_ledger[rows[1].fingerprint].age_cycles == 5
    assert {kind for kind, *_rest in second.outcomes()} == set()


@pytest.mark.rule("shard 9.3/12", "shard 15/1")
async def test_a_drain_that_waited_when_the_process_died_is_decided_afresh() -> None:
    """The provider shows Configured: the cluster sees that, nothing is drained before its roll-up, then again."""
    provider = ScriptedProvider()
    provider.add(machine("m1", S.CONFIGURED, cluster="c1"))
    first = World(provider)
    gone = first.connect("c1")
    gone.drain = None
    gone.report()
    workers = asyncio.create_task(first.shard.actuator.run())
    await first.step()
    await first.shard._clock.sleep(5)
    assert (first.state("m1"), provider.calls) == (S.DRAINING, [])
    workers.cancel()
    await asyncio.gather(workers, return_exceptions=True)

    second = World(provider, epoch=2)
    operator = second.connect("c1")
    for _ in range(3):
        await second.cycle()
    assert (second.outcomes(), operator.states("m1")[-1]) == ([], S.CONFIGURED)
    operator.report()
    await second.cycle()
    assert second.outcomes() == [("Reclaim", "m1", "success")]


@pytest.mark.rule("shard 15/8")
async def test_a_call_of_unknown_end_is_not_made_twice_by_the_next_process() -> None:
    """The binding is in the provider's record, whatever the process that asked for it has heard."""
    provider = ScriptedProvider()
    provider.add(machine("m1", S.IDLE), machine("m2", S.IDLE))
    provider.lost_answers.add(("configure", "m1"))
    first = World(provider)
    first.connect("c1").report(need("c1", "4"))
    await first.cycle()
    second = World(provider, epoch=2)
    second.connect("c1").report(need("c1", "4"))
    await second.settle()

    assert [call[:2] for call in provider.calls] == [("configure", "m1")]
    assert (second.state("m1"), second.state("m2")) == (S.CONFIGURED, S.IDLE)


@pytest.mark.rule("shard 2/10", "shard 15/4")
async def test_of_two_processes_with_two_disks_the_older_is_fenced_machine_by_machine() -> None:
    """Where the newer one has called, the older one's machine becomes Failed in its own memory, and nowhere else."""
    provider = ScriptedProvider(synchronous=True)
    provider.add(machine("m1", S.IDLE), machine("m2", S.IDLE, zone="zb"))
    older, newer = World(provider, epoch=1_000), World(provider, epoch=2_000)
    for world in (older, newer):
        world.connect("c1")
        await world.cycle()
    operator = newer.connect("c1")
    operator.report(need("c1", "4"))
    await newer.cycle()
    assert newer.outcomes() == [("Bootstrap", "m1", "success")]

    # The older one has not read the provider since: it takes both machines for Idle.
    listing = provider.view(b"")
    provider.list_fails = True
    older.connect("c1").report(need("c1", "8"))
    await older.cycle()
    provider.list_fails = False
    assert older.outcomes() == [("Bootstrap", "m1", "fenced"), ("Bootstrap", "m2", "success")]
    assert (older.state("m1"), older.metric("fenced_total")) == (S.FAILED, 1)
    assert (provider.state("m1"), newer.state("m1"), len(listing.records)) == (S.CONFIGURED, S.CONFIGURED, 2)


@pytest.mark.rule("shard 10.3/4")
async def test_a_replaced_session_s_successor_sees_what_there_is() -> None:
    """Without a session a state frame is dropped; the resync of the next one repairs it (§10.3)."""
    provider = ScriptedProvider()
    provider.add(machine("m1", S.CONFIGURED, cluster="c1"))
    world = World(provider)
    await world.cycle()
    provider.add(machine("m1", S.CONFIGURED, cluster="c1", allocatable={"cpu": "3"}))
    await world.cycle()
    operator = world.connect("c1")
    for _ in range(8):
        await asyncio.sleep(0)

    shown = [frame for frame in operator.frames if isinstance(frame, NodeStateUpdate)]
    assert [(frame.machine_id, frame.resources) for frame in shown] == [("m1", {"cpu": "3"})]
    last = operator.frames[-1]
    assert isinstance(last, Acknowledgement)
    assert last.echo == ECHO_RESYNC


@pytest.mark.rule("shard 2/5")
async def test_what_a_queue_held_is_derived_again() -> None:
    """Ledger and queue are nobody's memory: the next process decides the same from what it sees."""
    provider = ScriptedProvider(synchronous=True)
    provider.add(*(machine(f"m{number}", S.IDLE) for number in range(4)))
    first = World(provider, settings=ShardSettings(execute_concurrency_max=1))
    first.connect("c1").report(need("c1", "16"))
    report = await first.step()
    assert (report.enqueued, provider.calls) == (2, [])

    second = World(provider, epoch=2)
    second.connect("c1").report(need("c1", "16"))
    await second.cycle()
    assert [each.state for each in second.shard.inventory] == [S.CONFIGURED] * 4
