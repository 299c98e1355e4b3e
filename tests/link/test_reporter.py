"""What is reported when, and what becomes of the answer (docs/spec/coordinator.md §8, points 1, 3 to 8)."""

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
import structlog

from bigfleet.coordinator.ephemeral_state import ReportAnswer
from bigfleet.link.inbox import DoesNotApply, Inbox, MayYetSucceed
from bigfleet.link.reporter import CoordinatorLink, ReportOutcome, ReportSnapshot
from bigfleet.model.ids import ClusterId, MachineId, ShardId
from bigfleet.model.instructions import AssignDomain, Instruction, InstructionOutcome
from bigfleet.model.machine import HostRef, Machine
from bigfleet.model.ownership import Base, Domain, Owned, OwnershipVersion
from bigfleet.model.shard_report import Holding, ShardReport, ShardSummary
from bigfleet.model.states import MachineState
from bigfleet.shard.ownership.handover import HandoverDone
from bigfleet.sim.kernel.virtual_time import LoopClock

pytestmark = pytest.mark.virtual_time
GIVEN = Machine(id=MachineId("m"), state=MachineState.IDLE, host=HostRef("p", "m"), labels={"a": "b"})


class Link:
    """A reporter between a scripted leader and a scripted shard; both roles are played here."""

    def __init__(self) -> None:
        self.owned = Owned(base=Base.DOMAINS)
        self.clusters = frozenset({ClusterId("web")})
        #: Answers in order; the last one repeats. None is no answer.
        self.answers: list[ReportAnswer | None] = [ReportAnswer(term=1)]
        self.reports: list[tuple[float, ShardReport]] = []
        self.done: list[str] = []
        self.terms: list[int] = []
        self.fails: dict[str, Exception] = {}
        self.outcomes: list[ReportOutcome] = []
        self.inbox = Inbox(self, accepted_term=0)
        leader: Any = self
        self.reporter = CoordinatorLink(
            shard_id=ShardId("shard-0"),
            epoch=4,
            advertised_address="here:7780",
            interval_seconds=30.0,
            source=self,
            inbox=self.inbox,
            client=leader,
            clock=LoopClock(),
            on_report=self.outcomes.append,
        )

    async def send(self, report: ShardReport) -> ReportAnswer | None:
        self.reports.append((LoopClock().monotonic_seconds(), report))
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def snapshot(self) -> ReportSnapshot:
        return ReportSnapshot(
            summary=ShardSummary(), shortfalls=(), clusters=self.clusters, holding=Holding(owned=self.owned)
        )

    async def accept_term(self, term: int) -> None:
        if "accept" in self.fails:
            raise self.fails["accept"]
        self.terms.append(term)

    async def confirm(self, machine_ids: Iterable[MachineId]) -> None:
        self.done += [f"confirm {each}" for each in machine_ids]

    async def carry_out(self, instruction: Instruction) -> HandoverDone | None:
        if instruction.instruction_id in self.fails:
            raise self.fails[instruction.instruction_id]
        self.done.append(instruction.instruction_id)
        return HandoverDone(machine_ids=(GIVEN.id,), machines=(GIVEN,))

    async def run_for(self, seconds: float) -> None:
        task = asyncio.create_task(self.reporter.run())
        await LoopClock().sleep(seconds)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def moments(self) -> list[float]:
        return [at for at, _report in self.reports]

    def last(self) -> ShardReport:
        return self.reports[-1][1]


def told(*sequences: int, term: int = 1, answer_term: int = 0) -> ReportAnswer:
    instructions = tuple(
        Instruction(
            instruction_id=f"{term}-{each}",
            version=OwnershipVersion(term, each),
            payload=AssignDomain(Domain("zone", "a")),
        )
        for each in sequences
    )
    return ReportAnswer(term=answer_term or term, instructions=instructions)


@pytest.mark.rule("shard 1/21", "coordinator 8/1")
async def test_one_report_goes_at_the_start_and_then_one_at_each_interval() -> None:
    link = Link()

    await link.run_for(95)

    assert link.moments() == [0, 30, 60, 90]
    assert [report.cycle for _at, report in link.reports] == [1, 2, 3, 4]
    assert (link.last().epoch, link.last().address, link.last().echoed_term) == (4, "here:7780", 1)


@pytest.mark.rule("coordinator 8/1")
async def test_answers_to_instructions_do_not_wait_for_the_interval() -> None:
    link = Link()
    link.answers = [told(1, 2), ReportAnswer(term=1)]

    await link.run_for(35)

    assert link.moments() == [0, 1, 31]
    acks = link.reports[1][1].acks
    assert [(ack.instruction_id, ack.outcome) for ack in acks] == [
        ("1-1", InstructionOutcome.ACCEPTED),
        ("1-2", InstructionOutcome.ACCEPTED),
    ]
    assert acks[0].machines == (GIVEN,)
    assert not link.last().acks


@pytest.mark.rule("coordinator 8/3")
async def test_an_ack_is_said_until_a_report_with_it_was_acknowledged_and_stays_in_front() -> None:
    link = Link()
    link.answers = [
        told(1),
        None,
        told(2, answer_term=1),
        ReportAnswer(term=1, acknowledged=False),
        ReportAnswer(term=1),
    ]
    said = []
    for _ in range(6):
        await link.reporter.exchange()
        said.append([ack.instruction_id for ack in link.last().acks])

    assert said == [[], ["1-1"], ["1-1"], ["1-2"], ["1-2"], []]
    assert link.done == ["1-1", "1-2"]


async def test_what_is_owned_is_said_until_it_was_acknowledged_then_when_it_changes_or_is_asked_for() -> None:
    link = Link()
    link.answers = [
        None,
        ReportAnswer(term=1),
        ReportAnswer(term=1),
        ReportAnswer(term=1),
        ReportAnswer(term=1, want_ownership=True),
        ReportAnswer(term=1),
    ]
    says = []
    for number in range(7):
        if number == 3:
            link.owned = link.owned.assigned(Domain("zone", "a"))
        await link.reporter.exchange()
        says.append(link.last().holding is not None)
        assert (link.last().clusters is not None) is says[-1]

    # The first acknowledged one began a term, whose leader is told again.
    assert says == [True, True, True, True, False, True, False]


@pytest.mark.rule("shard 15/28", "coordinator 8/4", "coordinator 12/6")
async def test_an_answer_of_a_former_leader_is_dropped_whole() -> None:
    link = Link()
    link.answers = [told(1, term=5), told(7, term=3), told(7, term=3)]
    for _ in range(3):
        await link.reporter.exchange()

    assert link.done == ["5-1"]
    assert [ack.instruction_id for ack in link.last().acks] == ["5-1"]
    assert link.inbox.dropped_answers == 2
    assert link.outcomes == [ReportOutcome.OK, ReportOutcome.STALE_TERM, ReportOutcome.STALE_TERM]


@pytest.mark.rule("coordinator 8/4")
async def test_the_term_is_on_disk_before_anything_of_it_is_done() -> None:
    link = Link()
    link.fails["accept"] = MayYetSucceed("disk full")
    link.answers = [told(1)]

    await link.reporter.exchange()
    assert (link.done, link.inbox.accepted_term) == ([], 0)
    del link.fails["accept"]
    await link.reporter.exchange()
    assert (link.terms, link.done) == ([1], ["1-1"])


@pytest.mark.rule("coordinator 8/5")
async def test_a_redelivery_is_answered_alike_and_a_failure_runs_again() -> None:
    link = Link()
    link.fails = {"1-1": DoesNotApply("not here"), "1-2": MayYetSucceed("the kill switch is on")}
    link.answers = [told(1, 2, 3)]
    await link.reporter.exchange()
    link.fails = {}
    await link.reporter.exchange()
    await link.reporter.exchange()

    assert link.done == ["1-3", "1-2"]
    assert [(ack.instruction_id, ack.outcome, ack.reason) for ack in link.last().acks] == [
        ("1-1", InstructionOutcome.REJECTED_INVALID, "not here"),
        ("1-2", InstructionOutcome.ACCEPTED, ""),
        ("1-3", InstructionOutcome.ACCEPTED, ""),
    ]


async def test_records_that_a_leader_has_are_not_said_again_with_a_repeated_answer() -> None:
    link = Link()
    link.answers = [told(1)]
    said = []
    for _ in range(3):
        await link.reporter.exchange()
        said.append([(ack.machine_ids, len(ack.machines)) for ack in link.last().acks])

    assert said == [[], [(("m",), 1)], [(("m",), 0)]]
    assert link.done == ["1-1"]


@pytest.mark.rule("coordinator 8/4")
async def test_confirmations_come_before_instructions() -> None:
    link = Link()
    link.answers = [ReportAnswer(term=1, confirmed=(MachineId("m"),), instructions=told(1).instructions)]

    await link.reporter.exchange()

    assert link.done == ["confirm m", "1-1"]


@pytest.mark.rule("coordinator 8/6")
async def test_three_reports_that_are_not_taken_are_an_alarm() -> None:
    link = Link()
    link.answers = [ReportAnswer(term=1, acknowledged=False)]
    levels = []
    for _ in range(4):
        with structlog.testing.capture_logs() as logs:
            await link.reporter.exchange()
        levels.append([entry["log_level"] for entry in logs])

    assert levels == [["warning"], ["warning"], ["error"], ["warning"]]


@pytest.mark.rule("shard 15/28", "coordinator 8/7")
async def test_a_silent_coordinator_changes_nothing_but_that_acks_wait() -> None:
    link = Link()
    link.answers = [told(1), None]

    await link.run_for(1000)

    assert [ack.instruction_id for ack in link.last().acks] == ["1-1"]
    assert len(link.outcomes) > 30
    assert set(link.outcomes[1:]) == {ReportOutcome.ERROR}
    assert link.done == ["1-1"]


async def test_a_defect_in_telling_does_not_end_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link()
    snapshot = link.snapshot
    calls = iter([True, False])

    def broken() -> ReportSnapshot:
        if next(calls, False):
            raise RuntimeError("a defect")
        return snapshot()

    monkeypatch.setattr(link, "snapshot", broken)
    await link.run_for(35)

    assert link.moments() == [30]
