"""A coordinator that is gone changes no decision of a shard, however long (docs/spec/coordinator.md §12)."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bigfleet.coordinator.ephemeral_state import ReportAnswer
from bigfleet.link.client import CALL_SECONDS, Client, NotAnswered
from bigfleet.link.inbox import Inbox
from bigfleet.link.report_source import LinkCounts, ShardReportSource
from bigfleet.link.reporter import CoordinatorLink
from bigfleet.model.shard_report import ShardReport
from bigfleet.model.states import MachineState
from bigfleet.shard.ownership.state_file import StateFile
from bigfleet.shard.ports import RefusalKind, ShardSettings
from bigfleet.sim.kernel.virtual_time import LoopClock, run_virtual
from tests.engine.proof import in_proportion
from tests.shard.world import FakeOperator, ScriptedProvider, World, machine, need

S = MachineState
MACHINES = [f"m{number}" for number in range(8)]


class Absent:
    """Coordinators of which none answers any more: refused at once, or only after a call's time."""

    def __init__(self, answers: int, *, hangs: bool) -> None:
        self.answers = answers
        self.hangs = hangs
        self.asked = 0

    async def addresses(self, name: str) -> Sequence[str]:
        return (name,)

    async def report(self, address: str, report: ShardReport) -> ReportAnswer:
        self.asked += 1
        if self.asked <= self.answers:
            return ReportAnswer(term=3)
        if self.hangs:
            await LoopClock().sleep(CALL_SECONDS)
        raise NotAnswered(f"UNAVAILABLE: {address}")


@asynccontextmanager
async def linked(world: World, file: Any, coordinators: Absent) -> AsyncIterator[CoordinatorLink]:
    """Run a shard's link beside it."""
    ownership = world.shard.ownership
    assert ownership is not None
    counts = LinkCounts(world.shard.metrics, LoopClock())
    reporter = CoordinatorLink(
        shard_id=world.shard.shard_id,
        epoch=world.shard.epoch,
        advertised_address="here:7780",
        interval_seconds=30.0,
        source=ShardReportSource(world.shard, file, provider_address="provider:9100"),
        inbox=Inbox(ownership.handover, accepted_term=file.accepted_term, on_answer=counts.answered),
        client=Client(["a:1", "b:1"], coordinators, LoopClock(), on_redirect=counts.redirected),
        clock=LoopClock(),
        on_report=counts.reported,
    )
    running = asyncio.create_task(reporter.run())
    try:
        yield reporter
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


#: A cluster that wants nothing any more is believed at once.
SETTINGS = ShardSettings(execute_concurrency_max=4, empty_rollup_guard=False)


class Twin:
    """One of two shards to which the same happens."""

    def __init__(self, **more: Any) -> None:
        self.world = World(ScriptedProvider(), settings=SETTINGS, **more)
        for name in MACHINES[:4]:
            self.world.provider.add(machine(name, S.IDLE))
        self.operators: dict[str, FakeOperator] = {}

    def happens(self, event: tuple[Any, ...]) -> None:
        provider = self.world.provider
        match event:
            case ("wants", cluster, cpu, priority):
                if cluster not in self.operators:
                    self.operators[cluster] = self.world.connect(cluster)
                self.operators[cluster].report(*([need(cluster, str(cpu), priority=priority)] if cpu else []))
            case ("settles",):
                provider.settle()
            case ("comes", name):
                provider.records.setdefault(name, machine(name, S.IDLE))
            case ("goes", name):
                provider.records.pop(name, None)
            case ("refuses", method, name):
                provider.refusals[(method, name)] = [RefusalKind.REFUSED]
            case ("is down", is_down):
                provider.list_fails = is_down

    def account(self) -> object:
        """Return everything that a shard has decided, when, and what came of it."""
        shard = self.world.shard
        actions = [
            (each.action, each.decided_cycle, each.decided_unix_nanos, each.executed_cycle, each.outcome_label)
            for each in shard.ledger.history
        ]
        return actions, {each.id: each for each in shard.inventory}, shard.cycle, shard.report(), shard.is_ready


_EVENTS = st.one_of(
    st.tuples(
        st.just("wants"), st.sampled_from(["web", "db"]), st.integers(0, 6).map(lambda n: 4 * n), st.integers(1, 900)
    ),
    st.tuples(st.just("settles")),
    st.tuples(st.sampled_from(["comes", "goes"]), st.sampled_from(MACHINES)),
    st.tuples(st.just("refuses"), st.sampled_from(["configure", "drain"]), st.sampled_from(MACHINES)),
    st.tuples(st.just("is down"), st.booleans()),
)


#: A course in which there is much to do.
BUSY = [
    (30, ("wants", "web", 12, 100)),
    (60, ("settles",)),
    (30, ("wants", "db", 16, 900)),
    (400, ("settles",)),
    (400, ("wants", "db", 0, 100)),
    (400, ("settles",)),
]


@pytest.mark.rule("shard 15/28", "shard 16/6", "coordinator 8/7", "coordinator 12/1")
@settings(max_examples=in_proportion(16, least=2), deadline=None)
@example(course=BUSY, answers=2, hangs=True)
@example(course=[(each, ("settles",)) for each in (1, 1, 334, 4)], answers=0, hangs=True)
@given(
    course=st.lists(st.tuples(st.integers(1, 400), _EVENTS), min_size=3, max_size=12),
    answers=st.integers(0, 4),
    hangs=st.booleans(),
)
def test_a_shard_whose_coordinator_is_gone_decides_as_one_that_has_none(
    course: Any, answers: int, hangs: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Action by action and moment by moment, whatever happens meanwhile; only the reports differ."""

    async def run() -> int:
        coordinators = Absent(answers, hangs=hangs)
        directory: Path = tmp_path_factory.mktemp("shard")
        with StateFile.open(directory, shard_id="shard-0", clock=LoopClock()) as file:
            alone, orphan = Twin(), Twin(ownership_file=file.ownership)
            async with linked(orphan.world, file.ownership, coordinators):
                running = [asyncio.create_task(each.world.shard.run()) for each in (alone, orphan)]
                for seconds, event in course:
                    for each in (alone, orphan):
                        each.happens(event)
                    # Never at the very moment at which the two do something: one of them would be first.
                    await LoopClock().sleep(seconds + 0.001)
                    assert alone.account() == orphan.account()
                for task in running:
                    task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.gather(*running)
            assert orphan.world.metric("reports_total", outcome="ok") == min(answers, coordinators.asked)
            if course is BUSY:
                kinds = {each.action.kind.label for each in orphan.world.shard.ledger.history}
                assert kinds == {"Bootstrap", "Preempt", "Reclaim"}
        return coordinators.asked

    assert run_virtual(run) > 0


async def _exchange_with(coordinators: Absent, directory: Path) -> World:
    with StateFile.open(directory, shard_id="shard-0", clock=LoopClock()) as file:
        world = World(ownership_file=file.ownership)
        async with linked(world, file.ownership, coordinators) as reporter:
            await world.cycle()
            await LoopClock().sleep(3600)
            assert reporter.cycle == 120
    return world


@pytest.mark.rule("shard 15/28", "coordinator 8/7")
@pytest.mark.virtual_time
async def test_reports_that_fail_are_counted_and_go_on_at_their_pace(tmp_path: Path) -> None:
    world = await _exchange_with(Absent(2, hangs=False), tmp_path)

    assert world.metric("reports_total", outcome="ok") == 2
    assert world.metric("reports_total", outcome="error") == 118
    assert world.metric("report_last_success_timestamp_seconds") > 0
    assert world.metric("cycle_failures_total") == 0
