"""What a running shard says of itself, and how its metrics hear of the link (docs/spec/shard.md §11.3 and §14)."""

from pathlib import Path

import pytest

from bigfleet.link.inbox import Inbox
from bigfleet.link.report_source import LinkCounts, ShardReportSource
from bigfleet.link.reporter import ReportOutcome
from bigfleet.model.instructions import (
    AssignDomain,
    InstructionOutcome,
    Payload,
    ReassignSpeculative,
    Selector,
    UnassignDomain,
)
from bigfleet.model.ownership import Domain, RowKind
from bigfleet.model.states import MachineState
from bigfleet.shard import metrics
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.shard.ownership.handover_shard import ME, OTHER, HandoverShard, adopt, drain, instruction, release, serve
from tests.shard.world import machine, need

pytestmark = pytest.mark.virtual_time
S = MachineState


def speaker_of(shard: HandoverShard) -> ShardReportSource:
    return ShardReportSource(shard.world.shard, shard.file, provider_address="provider:9100")


@pytest.mark.rule("shard 11.3/4")
async def test_before_its_first_cycle_a_shard_says_what_it_owns_and_nothing_of_machines(tmp_path: Path) -> None:
    shard = HandoverShard(tmp_path, machine("a", S.IDLE))

    told = speaker_of(shard).snapshot()

    assert (told.summary.provider_address, told.summary.total_machines) == ("provider:9100", 0)
    assert (told.shortfalls, told.clusters, told.holding.owned) == ((), frozenset(), shard.owned)
    shard.close()


@pytest.mark.rule("shard 11.3/4")
async def test_a_shard_says_what_it_has_what_it_lacks_who_reported_and_what_moved(tmp_path: Path) -> None:
    shard = HandoverShard(tmp_path, machine("a", S.IDLE), machine("b", S.IDLE))
    serve(shard, "kept", priority=1)
    shard.world.connect("web").report(need("web", "12", priority=1), need("web", "99", priority=2_000_000))
    await shard.world.cycle()
    ownership = shard.world.shard.ownership
    assert ownership is not None
    await ownership.handover.carry_out(instruction(adopt([machine("n", S.IDLE)])))

    told = speaker_of(shard).snapshot()

    assert (told.summary.total_machines, sorted(told.clusters)) == (3, ["web"])
    assert [each.priority for each in told.shortfalls] == [2_000_000, 1]
    assert {each.kind for each in told.holding.owned.rows.values()} == {RowKind.ADOPTED}
    shard.close()


@pytest.mark.rule("shard 14/11")
async def test_reports_and_instructions_are_counted_by_what_became_of_them(tmp_path: Path) -> None:
    shard = HandoverShard(tmp_path)
    counts = LinkCounts(shard.world.shard.metrics, LoopClock())
    inbox = Inbox(shard.handover, accepted_term=0, on_answer=counts.answered)
    await shard.read()
    zone = Domain("zone", "a")
    payloads: list[Payload | None] = [
        AssignDomain(zone),
        UnassignDomain(zone),
        ReassignSpeculative(from_shard=ME, to_shard=OTHER, selector=Selector(count=1)),
        drain(1),
        release("unknown"),
        None,
    ]
    told = [instruction(payload, number) for number, payload in enumerate(payloads, start=1)]
    for _ in range(2):
        # What comes again is answered and not counted again.
        await inbox.take(1, (), told)
    for outcome in ReportOutcome:
        counts.reported(outcome)
    counts.redirected()

    def counted(kind: str, outcome: InstructionOutcome) -> float:
        return shard.world.metric("instructions_total", kind=kind, outcome=outcome.value)

    accepted, invalid = InstructionOutcome.ACCEPTED, InstructionOutcome.REJECTED_INVALID
    assert {kind for kind in metrics.INSTRUCTION_KINDS if counted(kind, accepted) == 1} == {
        "assign_domain",
        "unassign_domain",
    }
    assert {kind for kind in metrics.INSTRUCTION_KINDS if counted(kind, invalid) == 1} == {
        "reassign_speculative",
        "cross_shard_drain",
        "transfer_ownership",
        "unknown",
    }
    assert {shard.world.metric("reports_total", outcome=outcome) for outcome in metrics.REPORT_OUTCOMES} == {1.0}
    assert {each.value for each in ReportOutcome} | {"redirected"} == set(metrics.REPORT_OUTCOMES)
    assert shard.world.metric("report_last_success_timestamp_seconds") == LoopClock().unix_nanos() / 1e9
    shard.close()
