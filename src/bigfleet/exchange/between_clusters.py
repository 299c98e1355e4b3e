"""Finds machines that are paid for anyway and save more in another cluster than it costs to do without them.

docs/spec/exchange.md §4.1. The taker is searched as if the machines were Idle and nothing else were on offer: the
dearest rented machines that they make superfluous are what the move saves. The giver is planned without the machines:
what it would acquire is what the move costs. Both parts pass the gate together. All of it is pure.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final, NamedTuple

from bigfleet.engine.shapes.choice import RELEASABLE
from bigfleet.engine.shapes.fleet import DecisionState
from bigfleet.engine.targets import ClassKey
from bigfleet.exchange.assessment import FleetAssessment, FleetAssessor
from bigfleet.exchange.plausibility import per_unit
from bigfleet.exchange.questions import ExchangeContext, taker_question
from bigfleet.exchange.search import by_class, find_exchanges, packs, priced
from bigfleet.exchange.values import (
    SECONDS_PER_HOUR,
    ClusterExchanges,
    ExchangeKind,
    ExchangePart,
    ExchangeProposal,
    ExchangeQuestion,
    GateTerms,
    HeldMachine,
    WaitReason,
    total_usd,
)
from bigfleet.planner.plan import plan
from bigfleet.planner.problem import NANO, ProblemFault

#: Machine classes of which pairs are made, and givers and takers of each.
CLASSES_MAX: Final = 8
GIVERS_MAX: Final = 8
TAKERS_MAX: Final = 8
#: Pairs that are searched at once for a whole fleet.
FLEET_PAIRS_MAX: Final = 64
#: Proposals of the own cluster that stand against a move: they would come first, and change what a move saves.
_MAY_COME: Final = (None, WaitReason.BUDGET, WaitReason.NO_STOCK, WaitReason.FORECAST)


@dataclass(frozen=True, slots=True)
class ClusterSide:
    """What one cluster could give and take."""

    cluster: str
    #: Classes that are paid for anyway, of which it could give a machine, ascending.
    spare: tuple[ClassKey, ...]
    #: Price by the hour of a cpu, or of what usually comes with it: the cheapest on offer, infinite without an offer.
    offered_usd_per_unit: float
    #: The same of the dearest rented machine that may go; 0 without one.
    rented_usd_per_unit: float


class Pair(NamedTuple):
    """A cluster that could give machines of a class, and one that could take them."""

    giver: str
    taker: str
    machine_class: ClassKey


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveQuestion:
    """What a search needs to know of one pair; equal questions have equal answers."""

    giver: ExchangeQuestion
    machine_class: ClassKey
    #: Machines of the class and nothing else are on offer.
    taker: ExchangeQuestion


# ---- which clusters ----------------------------------------------------------------------------------------------


def side_of(question: ExchangeQuestion, exchanges: ClusterExchanges) -> ClusterSide | None:
    """Return what a cluster could give and take; None while it is blocked or has an exchange of its own to do."""
    part = _own_part(question)
    is_own_first = any(each.waits_for in _MAY_COME for each in exchanges.proposals)
    if part is None or question.whole is None or exchanges.blocked is not None or is_own_first:
        return None
    whole = zip(question.whole.keys, question.whole.problem.classes, strict=True)
    on_offer = {key for key, of in whole if of.stock is None or of.stock}
    spare, offered, rented = [], math.inf, 0.0
    for kind, of, held in zip(part.kinds, part.problem.classes, part.held, strict=True):
        is_rented = kind.key.capacity_type in RELEASABLE
        supply = dict(zip(part.problem.dimensions, of.supply, strict=True))
        if held and not is_rented and kind.key not in on_offer:
            spare.append(kind.key)
        if held and is_rented:
            rented = max(rented, per_unit(of.held_cost / NANO, supply) or 0.0)
        if of.stock is None or of.stock:
            offered = min(offered, per_unit(of.cost / NANO, supply) or 0.0)
    return ClusterSide(question.cluster, tuple(sorted(set(spare))), offered, rented)


def pairs_of(sides: Iterable[ClusterSide]) -> list[Pair]:
    """Return the pairs that may save anything, those with the largest difference of prices first.

    The prices are of what is rented and of what is on offer; what pods make of it only a search finds out.
    """
    known = {side.cluster: side for side in sides}
    givers: defaultdict[ClassKey, list[ClusterSide]] = defaultdict(list)
    for side in known.values():
        for key in side.spare:
            givers[key].append(side)
    takers = [side for side in known.values() if side.rented_usd_per_unit > 0]
    takers.sort(key=lambda side: (-side.rented_usd_per_unit, side.cluster))
    found = []
    for key in sorted(givers)[:CLASSES_MAX]:
        cheapest = sorted(givers[key], key=lambda side: (side.offered_usd_per_unit, side.cluster))
        for giver in cheapest[:GIVERS_MAX]:
            others = (side.cluster for side in takers if side.cluster != giver.cluster)
            found += [Pair(giver.cluster, taker, key) for taker in islice(others, TAKERS_MAX)]

    def rank(pair: Pair) -> tuple[float, Pair]:
        return known[pair.giver].offered_usd_per_unit - known[pair.taker].rented_usd_per_unit, pair

    return sorted(found, key=rank)


def move_question(
    fleet: DecisionState, context: ExchangeContext, giver: ExchangeQuestion, pair: Pair
) -> MoveQuestion | None:
    """Return the question of a pair; None if the giver has no machine of the class that may go.

    `fleet` has both clusters, before Phase 1, and is not changed.
    """
    part = _own_part(giver)
    held = () if part is None else _held(part, pair.machine_class)
    if not held or pair.taker not in fleet.clusters:
        return None
    taker_machines = len(fleet.clusters[pair.taker].hosts)
    settings = context.settings
    most = min(settings.budget(giver.machines), settings.budget(taker_machines))
    ids = [each.id for each in held[:most]]
    taker = taker_question(fleet, context, giver=pair.giver, taker=pair.taker, machine_ids=ids)
    return MoveQuestion(giver=giver, machine_class=pair.machine_class, taker=taker)


def best_moves(moves: Iterable[tuple[str, ExchangeProposal]]) -> dict[str, ExchangeProposal]:
    """Return the moves to show, by giver: the best first, and no cluster in two of them. `moves` have their givers."""

    def rank(each: tuple[str, ExchangeProposal]) -> tuple[bool, float, str, str, tuple[str, ...]]:
        giver, move = each
        return move.waits_for is not None, -move.gate.saving_usd_per_hour, giver, move.taker, move.machine_ids

    found: dict[str, ExchangeProposal] = {}
    used: set[str] = set()
    for giver, move in sorted(moves, key=rank):
        if not used & {giver, move.taker}:
            used |= {giver, move.taker}
            found[giver] = move
    return found


def moves_of(
    fleet: DecisionState,
    context: ExchangeContext,
    questions: Sequence[ExchangeQuestion],
    answers: Sequence[ClusterExchanges],
) -> dict[str, ExchangeProposal]:
    """Return the moves to show of a whole fleet, by giver, with the answers to the questions of its clusters."""
    by_cluster = {question.cluster: question for question in questions}
    sides = [side for asked, answer in zip(questions, answers, strict=True) if (side := side_of(asked, answer))]
    found = []
    for pair in pairs_of(sides)[:FLEET_PAIRS_MAX]:
        asked = move_question(fleet, context, by_cluster[pair.giver], pair)
        move = None if asked is None else find_move(asked)
        if move is not None:
            found.append((pair.giver, move))
    return best_moves(found)


def with_move(exchanges: ClusterExchanges, move: ExchangeProposal | None) -> ClusterExchanges:
    """Return the exchanges of a giver with its move as the last one."""
    return exchanges if move is None else replace(exchanges, proposals=(*exchanges.proposals, move))


# ---- one pair ----------------------------------------------------------------------------------------------------


def find_move(asked: MoveQuestion) -> ExchangeProposal | None:
    """Return the move of a pair, of as many machines as both budgets allow, or of one; None if none saves anything."""
    part = _own_part(asked.giver)
    if part is None:
        return None
    best: ExchangeProposal | None = None
    for taken in _taker_parts(asked):
        count = by_class(taken.comes)[asked.machine_class]
        try:
            given = _without(part, asked.machine_class, count)
        except ProblemFault:
            return None
        if given is None:
            continue
        move = _move(asked, part, given, taken)
        if move.waits_for is None:
            return move
        if move.gate.saving_usd_per_hour > 0 and best is None:
            best = move
    return best


def _taker_parts(asked: MoveQuestion) -> Iterator[ExchangeProposal]:
    """Yield what the taker would do with all machines that may come, then with one of them."""
    for limit in (None, 1):
        question = asked.taker if limit is None else _limited(asked.taker, limit)
        found = find_exchanges(question).proposals
        if not found or found[0].waits_for is not None:
            continue
        yield found[0]
        if sum(count for _, count in found[0].comes) == 1:
            return


def _limited(question: ExchangeQuestion, most: int) -> ExchangeQuestion:
    """Return the question with so many machines of each class on offer."""
    parts = []
    for part in question.parts:
        classes = tuple(replace(of, stock=min(of.stock or 0, most)) for of in part.problem.classes)
        parts.append(replace(part, problem=replace(part.problem, classes=classes)))
    return replace(question, parts=tuple(parts))


@dataclass(frozen=True, slots=True)
class _Given:
    """What a giver is worth with machines and without them."""

    machines: tuple[HeldMachine, ...]
    #: By class.
    comes: tuple[int, ...]
    before: FleetAssessment
    after: FleetAssessment


def _without(part: ExchangePart, machine_class: ClassKey, count: int) -> _Given | None:
    """Return the cheapest fleet that the planner finds without so many machines of a class; None without one.

    All that stays is free, so that nothing but what comes is weighed.
    """
    number = _number(part, machine_class)
    assert number is not None, "a giver holds machines of the class"
    held = tuple(len(machines) for machines in part.held)
    left = tuple(has - (count if c == number else 0) for c, has in enumerate(held))
    if left[number] < 0:
        return None
    free = replace(part.problem, classes=tuple(replace(of, held_cost=0) for of in part.problem.classes))
    classes = tuple(replace(of, held=has) for of, has in zip(free.classes, left, strict=True))
    target = plan(replace(free, classes=classes))
    if target.unhosted:
        return None
    assessor = FleetAssessor(replace(free, may_exchange=True))
    # What simple packers cannot fill, although the decision did, counts without interruptions.
    unpacked = FleetAssessment(price=0, interruptions=0, lost_millipods=0)
    before = assessor.assess(held, (0,) * len(held)) or unpacked
    after = assessor.assess(left, target.added)
    if after is None or after.lost_millipods > max(before.lost_millipods, target.lost_millipods):
        return None
    return _Given(part.held[number][:count], target.added, before, after)


def _move(asked: MoveQuestion, part: ExchangePart, given: _Given, taken: ExchangeProposal) -> ExchangeProposal:
    settings, giver = asked.giver.settings, asked.giver
    number = _number(part, asked.machine_class)
    assert number is not None, "a giver holds machines of the class"
    waves = math.ceil(len(given.machines) / settings.budget(giver.machines))
    comes_usd = sum(of.cost * n for of, n in zip(part.problem.classes, given.comes, strict=True)) / NANO
    # What the taker rents is paid for until the machines have left the giver, serve, and its own drains are over.
    until_idle_seconds = settings.excess_seconds + settings.drain_seconds * (waves + 1) / 2
    waiting_usd = taken.gate.goes_usd_per_hour * (until_idle_seconds + settings.boot_seconds) / SECONDS_PER_HOUR
    gate = GateTerms(
        goes_usd_per_hour=taken.gate.goes_usd_per_hour,
        comes_usd_per_hour=comes_usd + taken.gate.comes_usd_per_hour,
        interruptions_before_usd_per_hour=given.before.interruptions / NANO
        + taken.gate.interruptions_before_usd_per_hour,
        interruptions_after_usd_per_hour=given.after.interruptions / NANO + taken.gate.interruptions_after_usd_per_hour,
        boot_usd=comes_usd * settings.boot_seconds / SECONDS_PER_HOUR + taken.gate.boot_usd,
        double_running_usd=taken.gate.double_running_usd + waiting_usd,
        reclamation_usd=total_usd((*(each.reclamation_usd for each in given.machines), taken.gate.reclamation_usd)),
        settings=settings,
    )
    comes = priced(part, given.comes)
    waits_for = gate.wait_reason
    if waits_for is None and giver.whole is not None:
        goes = Counter({asked.machine_class: len(given.machines)})
        waits_for = None if packs(giver.whole, goes, by_class(comes)) else WaitReason.DOES_NOT_PACK
    return ExchangeProposal(
        kind=ExchangeKind.BETWEEN_CLUSTERS,
        is_gang=False,
        goes=((part.kinds[number], len(given.machines)),),
        comes=comes,
        machine_ids=tuple(sorted(each.id for each in given.machines)),
        waves=waves,
        gate=gate,
        waits_for=waits_for,
        taker=asked.taker.cluster,
        taker_part=taken,
    )


def _own_part(question: ExchangeQuestion) -> ExchangePart | None:
    """Return the part of all machines that move one by one: those of gangs do not."""
    return next((part for part in question.parts if not part.is_whole), None)


def _number(part: ExchangePart, machine_class: ClassKey) -> int | None:
    """Return the place of the class of which the cluster holds machines."""
    numbered = enumerate(zip(part.kinds, part.held, strict=True))
    return next((n for n, (kind, held) in numbered if kind.key == machine_class and held), None)


def _held(part: ExchangePart, machine_class: ClassKey) -> tuple[HeldMachine, ...]:
    number = _number(part, machine_class)
    return () if number is None else part.held[number]
