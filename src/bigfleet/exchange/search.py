"""Searches exchanges of one cluster: from what it holds towards the planner's composition, in steps that pay.

docs/spec/exchange.md §4. The planner chooses the machines of a part from nothing. Held machines count slightly less
than their price, so that few of them go. The difference is cut into steps: machines that come, and the dearest held
ones that their room makes superfluous. Each step is assessed by the planner's packing and its simulated scheduler, at
true prices.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from bigfleet.compositions.problems import hosts_all
from bigfleet.engine.targets import ClassKey
from bigfleet.exchange.assessment import FleetAssessment, FleetAssessor
from bigfleet.exchange.values import (
    PROPOSALS_MAX,
    SECONDS_PER_HOUR,
    BlockReason,
    ClusterExchanges,
    ExchangeKind,
    ExchangePart,
    ExchangeProposal,
    ExchangeQuestion,
    ExchangeSettings,
    GateTerms,
    MachineKind,
    WaitReason,
    WholeCluster,
    total_usd,
)
from bigfleet.planner.composition import Composition
from bigfleet.planner.plan import plan
from bigfleet.planner.problem import NANO, Problem, ProblemFault

_Counts = tuple[int, ...]


def find_exchanges(question: ExchangeQuestion) -> ClusterExchanges:
    """Return the exchanges of a cluster, whole gangs first; equal questions give equal answers."""
    answer = ClusterExchanges(
        cluster=question.cluster,
        machines=question.machines,
        cost_usd_per_hour=question.cost_usd_per_hour,
        excluded=question.excluded,
        blocked=question.blocked,
    )
    if question.blocked is not None:
        return answer
    budget = question.settings.budget(question.machines)
    try:
        found = [proposal for part in question.parts for proposal in _of_part(part, question.settings, budget)]
    except ProblemFault:
        return replace(answer, blocked=BlockReason.TOO_LARGE)
    return replace(answer, proposals=tuple(_within(found[:PROPOSALS_MAX], budget, question.whole)))


def _within(
    proposals: Sequence[ExchangeProposal], budget: int, whole: WholeCluster | None
) -> Iterator[ExchangeProposal]:
    """Yield the proposals; those beyond the budget wait, and those after which the cluster cannot be packed.

    The first that is ready may take all of the budget, in waves.
    """
    used = 0
    goes, comes = Counter[ClassKey](), Counter[ClassKey]()
    for proposal in proposals:
        wanted = min(budget, len(proposal.machine_ids))
        if proposal.waits_for is not None:
            yield proposal
            continue
        if used + wanted > budget:
            yield replace(proposal, waits_for=WaitReason.BUDGET)
            continue
        goes_then, comes_then = goes + by_class(proposal.goes), comes + by_class(proposal.comes)
        if whole is not None and not packs(whole, goes_then, comes_then):
            yield replace(proposal, waits_for=WaitReason.DOES_NOT_PACK)
            continue
        used, goes, comes = used + wanted, goes_then, comes_then
        yield proposal


def packs(whole: WholeCluster, goes: Counter[ClassKey], comes: Counter[ClassKey]) -> bool:
    """Return whether the planner finds a place for every pod of the cluster once these machines went and came.

    A part may be packed while the whole is not: what is excluded stays as the decision filled it, which the planner
    cannot always do again. An exchange needs a composition of the whole before anything drains.
    """
    problem = whole.after(goes, comes)
    return problem is not None and hosts_all(problem, plan(problem))


def by_class(kinds: Sequence[tuple[MachineKind, int]]) -> Counter[ClassKey]:
    """Return how many machines of each class these are."""
    found: Counter[ClassKey] = Counter()
    for kind, machines in kinds:
        found[kind.key] += machines
    return found


def _of_part(part: ExchangePart, settings: ExchangeSettings, budget: int) -> Iterator[ExchangeProposal]:
    if not any(part.held):
        return
    if part.is_whole:
        yield from _whole(part, settings, budget)
        return
    target = plan(_discounted(part.problem, settings))
    held = tuple(len(machines) for machines in part.held)
    # What is paid for anyway saves nothing when it goes.
    goes = tuple(
        max(0, has - stays) if kind.held_cost else 0
        for has, stays, kind in zip(held, target.retained, part.problem.classes, strict=True)
    )
    if not any(goes):
        # The part has less room than the planner wants, so every held machine is a candidate; the steps decide.
        goes = tuple(has if kind.held_cost else 0 for has, kind in zip(held, part.problem.classes, strict=True))
    # A machine that goes while an equal one comes would save nothing.
    pairs = tuple(
        min(gone, added) if _is_same(part.problem, c) else 0
        for c, (gone, added) in enumerate(zip(goes, target.added, strict=True))
    )
    goes, comes = _less(goes, pairs), _less(target.added, pairs)
    if any(goes) and any(comes) and not target.unhosted:
        yield from _Steps(part, settings, budget, held, target).run(goes, comes)


def _is_same(problem: Problem, number: int) -> bool:
    """Return whether machines of the class that come cost at least what those cost that go."""
    kind = problem.classes[number]
    return kind.cost >= kind.held_cost


def _discounted(problem: Problem, settings: ExchangeSettings) -> Problem:
    """Return the problem with held machines cheaper by the least share that an exchange must save."""
    remaining = 1 - settings.saving_fraction_min
    classes = tuple(replace(kind, held_cost=int(kind.held_cost * remaining)) for kind in problem.classes)
    return replace(problem, classes=classes, may_exchange=True)


@dataclass(frozen=True, slots=True)
class _Step:
    """Machines that come and go, by class, with what the part is worth before and after."""

    comes: _Counts
    goes: _Counts
    before: FleetAssessment
    after: FleetAssessment


class _Steps:
    """Cuts the way from what a part holds to a target into steps."""

    def __init__(
        self, part: ExchangePart, settings: ExchangeSettings, budget: int, held: _Counts, target: Composition
    ) -> None:
        self._part, self._settings, self._budget = part, settings, budget
        self._assessor = FleetAssessor(replace(part.problem, may_exchange=True))
        # The planner chose the target in other orders, in which it looks better than in those of the assessor.
        assessed = self._assessor.assess(target.retained, target.added)
        lost_millipods = 0 if assessed is None else assessed.lost_millipods
        self._lost_millipods_allowed = max(target.lost_millipods, lost_millipods)
        self._held, self._added = held, (0,) * len(held)

    def run(self, goes: _Counts, comes: _Counts) -> Iterator[ExchangeProposal]:
        """Yield proposals that pay one after the other, and the first that does not, if it would save anything."""
        before = self._assessor.assess(self._held, self._added) or self._unpacked()
        for _ in range(PROPOSALS_MAX):
            if not any(comes) or not any(goes):
                return
            step, proposal = self._next(before, goes, comes)
            if step is None or proposal is None:
                return
            yield proposal
            if proposal.waits_for is not None:
                return
            self._held, self._added = _less(self._held, step.goes), _plus(self._added, step.comes)
            goes, comes, before = _less(goes, step.goes), _less(comes, step.comes), step.after

    def _unpacked(self) -> FleetAssessment:
        """Return what is known of held machines that simple packers cannot fill, although the decision did.

        Interruptions count 0, so that no saving of them is promised.
        """
        costs = (kind.held_cost * count for kind, count in zip(self._part.problem.classes, self._held, strict=True))
        return FleetAssessment(price=sum(costs), interruptions=0, lost_millipods=0)

    def _next(
        self, before: FleetAssessment, goes: _Counts, comes: _Counts
    ) -> tuple[_Step | None, ExchangeProposal | None]:
        """Return the smallest step that pays, else the best that saves anything."""
        best: tuple[_Step, ExchangeProposal] | None = None
        taken = (0,) * len(comes)
        while any(left := _less(comes, taken)):
            number = max(range(len(left)), key=lambda c: (left[c] * self._weight(c), -c) if left[c] else (-1, -c))
            taken = tuple(n + (min(self._budget, left[c]) if c == number else 0) for c, n in enumerate(taken))
            dropped, after = self._superfluous(before, goes, taken)
            if after is None or not any(dropped):
                continue
            step = _Step(taken, dropped, before, after)
            proposal = _proposal(self._part, self._settings, self._budget, step, gone=self._gone())
            if proposal.waits_for is None:
                return step, proposal
            saving = proposal.gate.saving_usd_per_hour
            if saving > 0 and (best is None or saving > best[1].gate.saving_usd_per_hour):
                best = step, proposal
        return (None, None) if best is None else best

    def _weight(self, number: int) -> int:
        return 1 + self._part.problem.classes[number].cost

    def _gone(self) -> _Counts:
        return tuple(len(machines) - left for machines, left in zip(self._part.held, self._held, strict=True))

    def _superfluous(
        self, before: FleetAssessment, goes: _Counts, taken: _Counts
    ) -> tuple[_Counts, FleetAssessment | None]:
        """Return the held machines that may go when `taken` have come, the dearest first, and what is left is worth."""
        added = _plus(self._added, taken)
        dropped, found = (0,) * len(goes), None
        dearest = sorted(
            (c for c, n in enumerate(goes) if n), key=lambda c: (-self._part.problem.classes[c].held_cost, c)
        )
        for number in dearest:
            low, high = 0, goes[number]
            # Most steps drop as many as they may, and the bisection needs no further look then.
            middle = high
            while low < high:
                trial = tuple(middle if c == number else n for c, n in enumerate(dropped))
                after = self._assessor.assess(_less(self._held, trial), added)
                if after is not None and self._has_slack(before, after):
                    low, found = middle, after
                else:
                    high = middle - 1
                middle = (low + high + 1) // 2
            dropped = tuple(low if c == number else n for c, n in enumerate(dropped))
        return dropped, found

    def _has_slack(self, before: FleetAssessment, after: FleetAssessment) -> bool:
        return after.lost_millipods <= max(before.lost_millipods, self._lost_millipods_allowed)


def _whole(part: ExchangePart, settings: ExchangeSettings, budget: int) -> Iterator[ExchangeProposal]:
    """Yield the exchange of all machines of a part for machines on offer, if it would save anything."""
    problem = part.problem
    held = tuple(len(machines) for machines in part.held)
    none = (0,) * len(held)
    # Without offers the gang's domain is the one in which it runs.
    here = replace(problem, classes=tuple(replace(kind, stock=0) for kind in problem.classes))
    before = FleetAssessor(here).assess(held, none)
    free = replace(problem, classes=tuple(replace(kind, held=0, held_use=()) for kind in problem.classes))
    target = plan(free)
    if before is None or target.unhosted or not any(target.added):
        return
    price = sum(kind.cost * count for kind, count in zip(problem.classes, target.added, strict=True))
    after = FleetAssessment(
        price=price, interruptions=max(0, target.cost - price), lost_millipods=target.lost_millipods
    )
    proposal = _proposal(part, settings, budget, _Step(target.added, held, before, after), gone=none)
    if proposal.gate.saving_usd_per_hour > 0:
        yield proposal


def _proposal(
    part: ExchangePart, settings: ExchangeSettings, budget: int, step: _Step, *, gone: _Counts
) -> ExchangeProposal:
    """Return the proposal of a step; of each class so many machines have gone before."""
    machines = [
        machine
        for held, first, count in zip(part.held, gone, step.goes, strict=True)
        for machine in held[first : first + count]
    ]
    waves = math.ceil(len(machines) / budget)
    goes_usd = sum(part.problem.classes[c].held_cost * n for c, n in enumerate(step.goes)) / NANO
    comes_usd = sum(part.problem.classes[c].cost * n for c, n in enumerate(step.comes)) / NANO
    # Of waves that follow each other the first ends after one drain, the last after all of them.
    double_seconds = settings.excess_seconds + settings.drain_seconds * (waves + 1) / 2
    gate = GateTerms(
        goes_usd_per_hour=goes_usd,
        comes_usd_per_hour=comes_usd,
        interruptions_before_usd_per_hour=step.before.interruptions / NANO,
        interruptions_after_usd_per_hour=step.after.interruptions / NANO,
        boot_usd=comes_usd * settings.boot_seconds / SECONDS_PER_HOUR,
        double_running_usd=goes_usd * double_seconds / SECONDS_PER_HOUR,
        reclamation_usd=total_usd(machine.reclamation_usd for machine in machines),
        settings=settings,
    )
    return ExchangeProposal(
        kind=ExchangeKind.of(len(machines), sum(step.comes)),
        is_gang=part.is_whole,
        goes=priced(part, step.goes),
        comes=priced(part, step.comes),
        machine_ids=tuple(sorted(machine.id for machine in machines)),
        waves=waves,
        gate=gate,
        waits_for=gate.wait_reason,
    )


def priced(part: ExchangePart, counts: _Counts) -> tuple[tuple[MachineKind, int], ...]:
    """Return the kinds of which there are machines, the dearest first."""
    found = [(part.kinds[c], count) for c, count in enumerate(counts) if count]
    return tuple(sorted(found, key=lambda each: (-each[0].price_usd_per_hour, each[0].instance_type, each[0].zone)))


def _less(counts: _Counts, others: _Counts) -> _Counts:
    return tuple(count - other for count, other in zip(counts, others, strict=True))


def _plus(counts: _Counts, others: _Counts) -> _Counts:
    return tuple(count + other for count, other in zip(counts, others, strict=True))
