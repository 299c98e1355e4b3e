"""A running shard under instructions: what it decides with, shows, records and goes on doing (docs/spec/shard.md)."""

import json
from dataclasses import replace
from typing import Any

import pytest

from bigfleet.engine.decision import Action, ActionKind
from bigfleet.model.frames import Acknowledgement, ReclaimInstruction
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.instructions import AssignDomain
from bigfleet.model.ownership import Domain, RowKind
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.shard.outcomes import ActionOutcome
from bigfleet.shard.ownership.handover import MayYetSucceed
from bigfleet.shard.ownership.ownership import Ownership
from bigfleet.shard.ports import Listing, OversizedRecord, ShardSettings
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.shard.ownership.handover_shard import OTHER, HandoverShard, adopt, drain, idle, instruction, release, serve
from tests.shard.world import need

pytestmark = pytest.mark.virtual_time
S = MachineState
DAY_SECONDS = 86_400.0


def ownership_of(shard: HandoverShard) -> Ownership:
    ownership = shard.world.shard.ownership
    assert ownership is not None
    return ownership


async def told(shard: HandoverShard, payload: Any, sequence: int = 1) -> Any:
    """Let the shard that runs carry an instruction out."""
    return await ownership_of(shard).handover.carry_out(instruction(payload, sequence))


async def kept_for_another(shard: HandoverShard, **machine_facts: Any) -> None:
    """Let the shard drain machine `a` for another one, until it is Idle."""
    serve(shard, "a", priority=1)
    shard.provider.records["a"] = replace(shard.provider.records["a"], **machine_facts)
    await shard.world.cycle()
    await told(shard, drain(1))
    await shard.world.settle(2)
    assert shard.world.state("a") is S.IDLE


# ---- what is kept for another ----------------------------------------------------------------------------------------


@pytest.mark.rule("shard 3/14", "shard 10.5/8", "shard 11.3/3", "shard 14/11")
async def test_a_machine_that_is_kept_for_another_shard_serves_no_row_and_is_offered_to_nobody(make: Any) -> None:
    shard = make()
    await kept_for_another(shard)
    operator = shard.world.connect("web")
    operator.report(need("web", "4"))

    for _ in range(3):
        await shard.world.cycle()

    assert shard.world.state("a") is S.IDLE
    assert [hint.available_count for hint in operator.hints()] == [0]
    report = shard.world.shard.report()
    assert report is not None
    assert (report.summary.idle, report.summary.free_machines) == ((), 1)
    assert shard.world.metric("machines_reserved") == 1


@pytest.mark.rule("shard 3/14")
async def test_when_nobody_fetched_it_in_time_it_serves_again(make: Any) -> None:
    shard = make()
    await kept_for_another(shard)
    shard.world.connect("web").report(need("web", "4"))

    await LoopClock().sleep(10 * 30 + 1)
    await shard.world.settle()

    assert shard.world.state("a") is S.CONFIGURED
    assert shard.world.metric("machines_reserved") == 0


@pytest.mark.rule("shard 9.4/4")
async def test_a_machine_that_is_kept_for_another_shard_is_never_deleted(make: Any) -> None:
    """Neither by the engine, after any time, nor by an action that was decided before."""
    shard = make(settings=ShardSettings(report_interval_seconds=DAY_SECONDS))
    await kept_for_another(shard, capacity_type=CapacityType.ON_DEMAND)
    shard.world.connect("web").report()

    await LoopClock().sleep(DAY_SECONDS)
    await shard.world.cycle()
    deleting = Action(
        kind=ActionKind.DELETE, machine_id=MachineId("a"), cluster=ClusterId(""), reason="phase3.idle_release"
    )
    shard.world.shard.actuator.enqueue((deleting,), 99)
    await shard.world.shard.actuator.run_inline()

    assert shard.world.outcomes()[-1] == ("Delete", "a", ActionOutcome.STALE.value)
    assert not [call for call in shard.provider.calls if call[0] == "delete"]


# ---- what comes and goes ---------------------------------------------------------------------------------------------


@pytest.mark.rule("shard 3/13")
async def test_a_finished_adoption_wakes_a_cycle_that_uses_the_machine(make: Any) -> None:
    shard = make()
    operator = shard.world.connect("web")
    operator.report(need("web", "4"))
    await shard.world.cycle()
    shard.world.shard._trigger._wakeup.clear()
    come = idle("n")
    shard.provider.add(*come)

    await told(shard, adopt(come))
    assert shard.world.shard._trigger._wakeup.is_set()
    await shard.world.cycle(is_timer=False)

    assert [call[:2] for call in shard.provider.calls] == [("configure", "n")]
    assert shard.world.metric("ownership_machines", relation="adopted") == 1


@pytest.mark.rule("shard 10.5/8", "shard 11.3/3")
async def test_what_came_lately_serves_here_and_is_not_reported_as_giveable(make: Any) -> None:
    shard = make(*idle("old"))
    await shard.world.cycle()
    shard.provider.add(*idle("n"))
    await told(shard, adopt(idle("n")))
    operator = shard.world.connect("web")
    operator.report(need("web", "4", priority=1), need("web", "5"))

    async def offered() -> int:
        await shard.world.step()
        report = shard.world.shard.report()
        assert report is not None
        return sum(row.count for row in report.summary.idle)

    operator.report()
    assert await offered() == 1
    await LoopClock().sleep(8 * 30 + 1)
    assert await offered() == 2


async def test_a_machine_that_was_given_up_is_not_touched_though_it_was_decided_on(make: Any) -> None:
    """A decision of before finds its machine gone, and does nothing."""
    shard = make(*idle("a", "b"))
    await shard.world.cycle()
    shard.world.connect("web").report(need("web", "8"))
    await shard.world.step()
    queued = {record.action.machine_id for record in shard.world.shard.ledger.history}
    assert queued == {"a", "b"}
    with pytest.raises(MayYetSucceed, match="has an action under way"):
        await told(shard, release("a"))

    await shard.world.settle()
    assert {shard.world.state(name) for name in queued} == {S.CONFIGURED}


async def test_only_what_no_row_was_decided_for_is_given_up_by_a_selector(make: Any) -> None:
    shard = make(*idle("a", "b", "c", "d"), settings=ShardSettings(execute_concurrency_max=1))
    shard.world.connect("web").report(need("web", "4"))
    await shard.world.step()
    (claimed,) = shard.world.shard._claimed()

    done = await told(shard, release(count=99))

    assert len(done.machine_ids) == 2
    assert claimed not in done.machine_ids
    assert sorted(set(shard.holds()) | set(done.machine_ids)) == ["a", "b", "c", "d"]


async def test_nothing_is_given_up_before_a_cycle_has_said_what_is_needed_here(make: Any) -> None:
    shard = make(*idle("a", "b"))
    await shard.read()

    with pytest.raises(MayYetSucceed, match="not read yet"):
        await told(shard, release("a"))
    await shard.world.cycle()
    assert (await told(shard, release("a"))).machine_ids == ("a",)


# ---- what is shown and recorded --------------------------------------------------------------------------------------


@pytest.mark.rule("shard 10.1/8")
async def test_the_hello_of_a_shard_tells_the_term_that_it_has_accepted(make: Any) -> None:
    shard = make()
    await ownership_of(shard).handover.accept_term(7)
    shard.start()

    operator = shard.world.connect("web")
    await shard.world.cycle()

    (hello,) = [each for each in operator.frames if isinstance(each, Acknowledgement) and each.echo == "hello"]
    assert (hello.coordinator_term, hello.shard_epoch) == (7, shard.world.shard.epoch)


@pytest.mark.rule("shard 9.3/13")
async def test_an_operator_is_told_that_a_machine_goes_to_another_shard(make: Any) -> None:
    shard = make()
    serve(shard, "a", priority=1)
    operator = shard.world.connect("web")
    operator.report(need("web", "4"))
    await shard.world.cycle()

    await told(shard, drain(1))
    await shard.world.settle(1)

    (instructed,) = [frame for frame in operator.frames if isinstance(frame, ReclaimInstruction)]
    assert (instructed.reason, instructed.machine_ids) == ("cross_shard_preempt", ("a",))


@pytest.mark.rule("shard 13/11")
async def test_every_call_that_an_instruction_asked_for_is_in_the_audit_log_with_its_id(make: Any) -> None:
    shard = make(*idle("b", "c"))
    serve(shard, "a", priority=1)
    await shard.world.cycle()
    await told(shard, drain(1), 4)
    await shard.world.settle(1)
    await told(shard, release("b"), 5)

    records = [json.loads(line) for line in shard.audit_log.lines]
    assert [(each["kind"], each["machine"], each["reason"]) for each in records] == [
        ("Preempt", "a", "coordinator.1-4"),
        ("FenceTouch", "b", "coordinator.1-5"),
    ]
    assert [each["token_sequence"] for each in records] == [call[2] for call in shard.provider.calls]


@pytest.mark.rule("shard 14/11")
async def test_machines_that_moved_are_counted_by_where_they_are(make: Any) -> None:
    shard = make(*idle("a", "b", "c"))
    await shard.world.cycle()
    await told(shard, release("a"), 1)
    await told(shard, release("b"), 2)
    await ownership_of(shard).handover.confirm([MachineId("b")])
    await told(shard, adopt(idle("n")), 3)
    await shard.world.cycle()

    counts = {kind: shard.world.metric("ownership_machines", relation=kind.value) for kind in RowKind}
    assert set(counts.values()) == {1.0}
    assert shard.world.metric("ownership_machines", relation="foreign") == 2


# ---- pause, dry run, full disk ---------------------------------------------------------------------------------------


@pytest.mark.rule("shard 6/21")
@pytest.mark.parametrize("settings", [ShardSettings(actuation_paused=True), ShardSettings(dry_run=True)])
async def test_what_needs_no_call_is_carried_out_under_pause_and_dry_run(make: Any, settings: ShardSettings) -> None:
    shard = make(*idle("a", "b"), settings=settings)
    serve(shard, "bound", priority=1)
    await shard.world.cycle()

    await told(shard, AssignDomain(Domain("topology.kubernetes.io/zone", "za")), 1)
    assert (await told(shard, adopt(idle("n")), 2)).machine_ids == ("n",)
    for number, payload in enumerate((release("a"), drain(1)), start=3):
        with pytest.raises(MayYetSucceed):
            await told(shard, payload, number)
    await shard.world.cycle()

    assert not shard.provider.calls
    assert not shard.world.shard.ownership_filter.reserved
    assert {"a", "b", "bound"} <= set(shard.holds())


@pytest.mark.rule("shard 2/13", "shard 15/26")
async def test_a_full_disk_fails_instructions_and_cycles_go_on(make: Any) -> None:
    shard = make(*idle("a", "b"))
    await kept_for_another(shard)
    shard.file._connection.execute("PRAGMA query_only = ON")
    shard.world.connect("web").report(need("web", "8"))

    await LoopClock().sleep(10 * 30 + 1)
    await shard.world.settle()
    with pytest.raises(MayYetSucceed, match="make room"):
        await told(shard, adopt(idle("n")), 2)

    assert {shard.world.state(name) for name in ("b", "a")} >= {S.CONFIGURED}
    assert shard.world.metric("cycle_failures_total") == 0
    # What could not be written did not happen: the machine is kept until the disk takes it.
    assert shard.world.shard.ownership_filter.reserved == {"a"}
    shard.file._connection.execute("PRAGMA query_only = OFF")
    await shard.world.cycle()
    assert not shard.world.shard.ownership_filter.reserved


async def test_a_shard_that_is_told_nothing_has_no_row_and_writes_nothing(make: Any) -> None:
    shard = make(*idle("a", "b"))
    changes_before = shard.file._connection.total_changes
    shard.world.connect("web").report(need("web", "4"))

    await shard.world.settle()

    assert shard.file._connection.total_changes == changes_before
    assert OTHER not in repr(shard.owned)


@pytest.mark.rule("shard 5.3/5", "shard 5.3/13")
async def test_a_bound_machine_of_a_domain_stays_when_its_record_is_too_large(make: Any) -> None:
    """The record is rejected; its zone was not read, so that it does not say whose the machine is."""
    shard = make()
    serve(shard, "a", priority=1)
    shard.provider.records["a"] = replace(shard.provider.records["a"], zone="za")
    await told(shard, AssignDomain(Domain("topology.kubernetes.io/zone", "za")))
    await shard.world.cycle()
    assert shard.world.state("a") is S.CONFIGURED

    records = [each for each in (await shard.provider.list(b"")).records if each.machine.id != "a"]
    oversized = OversizedRecord.of(MachineId("a"), 200_000)
    shard.provider.listings.append(Listing(records=[*records, oversized], revision=b""))
    await shard.world.cycle()

    assert "a" in shard.holds()
    assert shard.world.state("a") is S.CONFIGURED
    assert shard.world.metric("machines_rejected_total", reason="limits") == 1
