"""What a run proves and what it tells: verdicts, skips, streams of draws, call logs, slots."""

import random
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from bigfleet.cli.conformance.view import print_summary
from bigfleet.conformance.behaviour import Behaviour
from bigfleet.conformance.calls import CALLS_RETAINED_MAX
from bigfleet.conformance.catalogue import BY_ID
from bigfleet.conformance.draws import BehaviourDraws
from bigfleet.conformance.expecting import Broken
from bigfleet.conformance.in_process import ClientSite, OneSite
from bigfleet.conformance.lab import side_by_side
from bigfleet.conformance.ports import (
    ABSENT,
    Answer,
    Delete,
    Drain,
    List,
    MachineSeen,
    Request,
    SiteFault,
    SiteMissing,
    Status,
)
from bigfleet.conformance.profiles import ConformanceProfile, Lane
from bigfleet.conformance.runner import BehaviourOutcome, ConformanceReport, Plan, Result, Verdict, verdict_of
from bigfleet.conformance.slots import Slots
from bigfleet.model.states import MachineState
from bigfleet.provider.backends.fake import FakeBackend
from tests.conformance.bench import (
    Bent,
    LaneSites,
    Making,
    RestartedSite,
    StagedBackend,
    bent,
    certified,
    plan_of,
)

CORE, CLOUD = BY_ID["LIFE-1"], BY_ID["LIFE-8"]
BOTH = frozenset({ConformanceProfile.CORE, ConformanceProfile.CLOUD})


class Unused:
    """A client that nobody asks."""

    async def call(self, request: Request) -> Answer:
        raise AssertionError("nobody asks")


UNUSED = Unused()


def results(*pairs: tuple[Behaviour, BehaviourOutcome]) -> tuple[Result, ...]:
    return tuple(Result(behaviour=behaviour, outcome=outcome) for behaviour, outcome in pairs)


@pytest.mark.parametrize(
    ("ended", "verdict"),
    [
        (results((CORE, BehaviourOutcome.PASSED), (CLOUD, BehaviourOutcome.PASSED)), Verdict.CERTIFIED),
        (results((CORE, BehaviourOutcome.PASSED), (CLOUD, BehaviourOutcome.FAILED)), Verdict.FAILED),
        (results((CORE, BehaviourOutcome.PASSED), (CLOUD, BehaviourOutcome.SKIPPED)), Verdict.INCOMPLETE),
        (results((CORE, BehaviourOutcome.PASSED), (CLOUD, BehaviourOutcome.NOT_RUN)), Verdict.INCOMPLETE),
        (results((CORE, BehaviourOutcome.SKIPPED), (CLOUD, BehaviourOutcome.FAILED)), Verdict.FAILED),
        (results((CORE, BehaviourOutcome.PASSED)), Verdict.INCOMPLETE),
        ((), Verdict.INCOMPLETE),
    ],
    ids=[
        "all passed",
        "one failed",
        "one skipped",
        "one left out",
        "failed beats skipped",
        "a profile unproven",
        "none",
    ],
)
def test_the_verdict_follows_from_the_results(ended: tuple[Result, ...], verdict: Verdict) -> None:
    assert verdict_of(BOTH, ended) is verdict


def test_what_only_leaves_out_has_no_result_and_certifies_nothing() -> None:
    report = certified(Plan(profiles=BOTH, only=frozenset({"EDGE-8"})))

    assert [r.behaviour.id for r in report.results if r.outcome is BehaviourOutcome.PASSED] == ["EDGE-8"]
    assert {r.outcome for r in report.results} == {BehaviourOutcome.PASSED, BehaviourOutcome.NOT_RUN}
    assert report.verdict is Verdict.INCOMPLETE


def test_a_starved_run_is_a_set_up_error() -> None:
    with pytest.raises(SiteFault, match="63 SPECULATIVE slots, 64 are needed"):
        certified(making=Making(backend=lambda _count: FakeBackend(63)))


class Silence(Bent):
    """Answers nothing but Get and List."""

    async def before(self, request: Request) -> Request | Answer:
        if getattr(request, "token", None) is None:
            return request
        return Answer(status=Status.UNAVAILABLE, details="gone")


def test_a_failure_tells_seed_expectation_and_the_last_calls() -> None:
    report = certified(Plan(profiles=BOTH, seed=7, only=frozenset({"LIFE-1"})), making=Making(clients=bent(Silence)))

    (failed,) = [result for result in report.results if result.outcome is BehaviourOutcome.FAILED]
    assert report.plan.seed == 7
    assert failed.reason == "Create: OK; seen: UNAVAILABLE: gone"
    assert "Create(" in failed.calls[-1]
    assert "UNAVAILABLE" in failed.calls[-1]


class KeepsHosts(Bent):
    """Refuses every Delete of an IDLE machine."""

    async def before(self, request: Request) -> Request | Answer:
        return Answer(status=Status.ABORTED) if isinstance(request, Delete) else request


def test_a_behaviour_whose_machine_cannot_be_handed_back_has_not_passed() -> None:
    report = certified(Plan(profiles=BOTH, only=frozenset({"LIFE-1"})), making=Making(clients=bent(KeepsHosts)))

    (failed,) = [result for result in report.results if result.outcome is BehaviourOutcome.FAILED]
    assert "was not handed back: Delete: OK; seen: ABORTED" in failed.reason


class TakesOne(Bent):
    """Takes one call that is out of position, late in a long row of them."""

    calls = 0

    async def after(self, request: Request, answer: Answer) -> Answer:
        self.calls += isinstance(request, Drain) and request.token != ABSENT
        return Answer(status=Status.OK) if self.calls == 190 else answer


def test_the_call_log_is_bounded() -> None:
    plan = Plan(profiles=BOTH, only=frozenset({"FUZZ-1"}))
    report = certified(plan, making=Making(clients=bent(TakesOne)))

    (failed,) = [result for result in report.results if result.outcome is BehaviourOutcome.FAILED]
    assert len(failed.calls) == CALLS_RETAINED_MAX


def drawn(plan: Plan) -> list[str]:
    """Return the calls of FUZZ-1 on a provider that fails it at the end."""
    report = certified(plan, making=Making(clients=bent(TakesOne)))
    (failed,) = [result for result in report.results if result.outcome is BehaviourOutcome.FAILED]
    return [
        line.rpartition("token=")[2].partition(":")[2].partition(")")[0] for line in failed.calls if "Drain(" in line
    ]


def test_a_behaviour_draws_from_its_own_stream() -> None:
    alone = drawn(Plan(profiles=BOTH, seed=3, only=frozenset({"FUZZ-1"})))
    again = drawn(Plan(profiles=BOTH, seed=3, only=frozenset({"EDGE-8", "FUZZ-1"})))
    other = drawn(Plan(profiles=BOTH, seed=4, only=frozenset({"FUZZ-1"})))

    assert alone == again
    assert alone != other


async def test_lanes_that_start_their_provider_are_missing_in_process() -> None:
    sites = OneSite(ClientSite((UNUSED, UNUSED)))
    for lane in (Lane.DURABLE, Lane.FAULT):
        with pytest.raises(SiteMissing, match="start their provider themselves"):
            await sites.open(lane)


def test_fault_slots_are_set_apart() -> None:
    def machine(id: str, **labels: str) -> MachineSeen:
        return MachineSeen(
            id=id, state=MachineState.SPECULATIVE, labels={f"conformance.fault/{k}": v for k, v in labels.items()}
        )

    slots = Slots.found_in([machine("b"), machine("f", create="error"), machine("a")])

    assert slots.free == ["a", "b"]
    assert slots.faulty == {"create=error": ["f"]}
    assert slots.take_faulty("create=error", BehaviourDraws(random.Random(1))) == "f"


def test_a_report_counts_every_outcome() -> None:
    report = ConformanceReport(
        plan=Plan(profiles=BOTH),
        targets={},
        results=results((CORE, BehaviourOutcome.PASSED), (CLOUD, BehaviourOutcome.SKIPPED)),
    )

    assert (
        report.count(BehaviourOutcome.PASSED),
        report.count(BehaviourOutcome.SKIPPED),
        report.count(BehaviourOutcome.FAILED),
    ) == (1, 1, 0)


def test_each_profile_has_a_verdict_of_its_own() -> None:
    """One that fails, or that was not run, takes nothing from another."""
    asked = BOTH | {ConformanceProfile.DELTA}
    outcomes = results((CORE, BehaviourOutcome.PASSED), (CLOUD, BehaviourOutcome.FAILED))
    report = ConformanceReport(plan=Plan(profiles=asked), targets={}, results=outcomes)
    console = Console(file=StringIO(), width=120)
    print_summary(report, console)

    assert report.verdict is Verdict.FAILED
    assert report.verdicts == {
        ConformanceProfile.CORE: Verdict.CERTIFIED,
        ConformanceProfile.CLOUD: Verdict.FAILED,
        ConformanceProfile.DELTA: Verdict.INCOMPLETE,
    }
    assert isinstance(console.file, StringIO)
    last = console.file.getvalue().splitlines()[-1]
    assert last == "core: CERTIFIED, cloud: FAILED, delta (BigFleet's own): INCOMPLETE"


class WithoutCursors(Bent):
    """Answers every List in full, and names neither a revision nor what was removed."""

    async def before(self, request: Request) -> Request:
        return replace(request, since=b"") if isinstance(request, List) else request

    async def after(self, request: Request, answer: Answer) -> Answer:
        if answer.listing is None:
            return answer
        return replace(answer, listing=replace(answer.listing, revision=b"", removed_ids=(), tombstones=False))


def test_a_provider_without_cursors_is_certified_for_what_it_has() -> None:
    """They are BigFleet's own: what is asked for by default does without."""
    asked = BOTH | {ConformanceProfile.DELTA}
    report = certified(plan_of(asked), Making(clients=bent(WithoutCursors)))

    assert report.verdicts == {
        ConformanceProfile.CORE: Verdict.CERTIFIED,
        ConformanceProfile.CLOUD: Verdict.CERTIFIED,
        ConformanceProfile.DELTA: Verdict.FAILED,
    }


class NoSecondLane(LaneSites):
    """Starts nothing but the main provider."""

    async def open(self, lane: Lane) -> RestartedSite:
        if lane is not Lane.MAIN:
            raise SiteFault("it does not start")
        return await super().open(lane)


def test_a_later_lane_that_cannot_start_loses_nothing_of_the_earlier_ones() -> None:
    plan = plan_of(
        frozenset({ConformanceProfile.CORE, ConformanceProfile.DURABLE}), only=frozenset({"EDGE-8", "DUR-1"})
    )
    report = certified(plan, sites=NoSecondLane(Making(), plan.scale_count))

    ended = {result.behaviour.id: (result.outcome, result.reason) for result in report.results}
    assert ended["EDGE-8"] == (BehaviourOutcome.PASSED, "")
    assert ended["DUR-1"] == (BehaviourOutcome.NOT_RUN, "it does not start")
    assert report.faults == {Lane.DURABLE: "it does not start"}
    assert report.verdict is Verdict.INCOMPLETE


def test_a_first_lane_that_cannot_start_is_a_set_up_error() -> None:
    plan = plan_of(frozenset({ConformanceProfile.DURABLE, ConformanceProfile.FAULT}))
    with pytest.raises(SiteFault, match="it does not start"):
        certified(plan, sites=NoSecondLane(Making(), plan.scale_count))


def test_a_lane_that_nobody_named_is_skipped_and_certifies_nothing() -> None:
    sites = OneSite(ClientSite((UNUSED, UNUSED)))
    report = certified(plan_of(frozenset({ConformanceProfile.FAULT})), sites=sites)

    assert {result.outcome for result in report.results} == {BehaviourOutcome.SKIPPED}
    assert report.verdict is Verdict.INCOMPLETE


def test_a_fault_provider_without_its_slots_fails_and_says_which() -> None:
    making = Making(fault_backend=StagedBackend)
    report = certified(plan_of(frozenset({ConformanceProfile.FAULT}), only=frozenset({"FAULT-2"})), making)

    (failed,) = [result for result in report.results if result.outcome is BehaviourOutcome.FAILED]
    assert failed.reason == "no free slot with the label conformance.fault/create=error is left"


class Slides(Bent):
    """Breaks on every call about a machine that is bound."""

    async def after(self, request: Request, answer: Answer) -> Answer:
        if answer.machine is not None and answer.machine.cluster:
            raise RuntimeError("no machine like this")
        return answer


def test_a_client_that_breaks_fails_the_behaviour_and_the_run_goes_on() -> None:
    plan = plan_of(only=frozenset({"LIFE-1", "EDGE-8"}))
    report = certified(plan, Making(clients=bent(Slides)))

    ended = {result.behaviour.id: result for result in report.results if result.outcome is not BehaviourOutcome.NOT_RUN}
    assert ended["LIFE-1"].outcome is BehaviourOutcome.FAILED
    assert "no machine like this" in ended["LIFE-1"].reason
    assert ended["EDGE-8"].outcome is BehaviourOutcome.PASSED


async def test_flows_side_by_side_give_their_results_in_order_and_the_first_failure() -> None:
    async def give(number: int) -> int:
        if number < 0:
            raise Broken("numbers are not negative", str(number))
        return number

    assert await side_by_side([give(1), give(2)]) == [1, 2]
    with pytest.raises(Broken, match="not negative"):
        await side_by_side([give(1), give(-1)])
