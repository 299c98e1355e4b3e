"""What a reader is shown of the last finished cycle: every row as it was reported, met or not, and why not.

docs/spec/shard.md §10.7 and §12. Built beside the old view and swapped by reference: a reader never stops a cycle and
a cycle never changes what a reader is streaming. Nothing here decides.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import IntEnum

from bigfleet.engine.decision import Decision, Options, ParkingKey, RowResult
from bigfleet.engine.matching import Fit, Shapes
from bigfleet.engine.parking import parking_key
from bigfleet.engine.snapshot import Snapshot
from bigfleet.model import vector
from bigfleet.model.need import Need, RowKey
from bigfleet.model.states import TRANSITIONAL_STATES, MachineState
from bigfleet.model.vector import Vector

#: Matching machines are counted up to this (docs/spec/engine.md §12).
MATCHING_MAX = 256


class UnmetReason(IntEnum):
    """Why a row is short. The numbers are those of the wire; 0 is met."""

    UNSPECIFIED = 0
    PRIORITY_STARVED = 1
    NO_MATCHING_SUPPLY = 2
    TOPOLOGY_UNSATISFIABLE = 3
    PREEMPTION_EXHAUSTED = 4
    BOOTSTRAP_REFUSED = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchingSupply:
    """How many machines could host the row's min unit, whatever their claims; each up to `MATCHING_MAX`."""

    idle: int
    configured: int
    speculative: int

    @property
    def is_capped(self) -> bool:
        """Say whether a count stopped at the maximum."""
        return max(self.idle, self.configured, self.speculative) >= MATCHING_MAX

    @property
    def total(self) -> int:
        """All of them."""
        return self.idle + self.configured + self.speculative


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedView:
    """One reported row and what became of it."""

    need: Need
    #: What is short after Phase 1; empty when the row is met.
    residual: Vector
    claimed_machines: int
    bootstraps: int
    provisions: int
    #: Same rows that did not fold.
    domain: str
    satisfiable: bool
    parked: bool
    parked_age_cycles: int
    unmet_age_cycles: int
    reason: UnmetReason
    #: Unmet rows only.
    matching: MatchingSupply | None
    victims: int
    freed: Vector

    @property
    def satisfied(self) -> bool:
        """Say whether nothing is short."""
        return not self.residual


@dataclass(frozen=True, slots=True, kw_only=True)
class DecidedOn:
    """What a cycle decided on and what each row got, so that it can be asked afterwards why; held by reference."""

    snapshot: Snapshot
    #: In list order.
    demand: Sequence[Need]
    options: Options
    #: In the order of the folded list.
    rows: Sequence[RowResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleView:
    """The last finished cycle; cycle 0 means that nothing was computed yet, not that there is no demand."""

    cycle: int = 0
    #: Wall clock at which the cycle took its view of demand and machines.
    computed_at_unix_nanos: int = 0
    #: Priority descending, arrival, cluster, then list order.
    needs: tuple[NeedView, ...] = ()
    #: None before the first cycle has finished.
    decided_on: DecidedOn | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewContext:
    """What a view needs beside the decision."""

    cycle: int
    computed_at_unix_nanos: int
    snapshot: Snapshot
    #: The rows that were decided on, in list order.
    demand: Sequence[Need]
    #: Those of the decision.
    options: Options
    #: After the decision.
    parking_ages: Mapping[ParkingKey, int]
    row_ages: Mapping[RowKey, int]
    #: Rows, as decided on, whose operator cannot bootstrap them.
    refused: Set[RowKey]


def build_view(decision: Decision, context: ViewContext) -> CycleView:
    """Return the view of a cycle; a folded row is split over the rows that it was folded from."""
    supply = _Supply(context.snapshot)
    needs = [view for result in decision.rows for view in _views_of(result, context, supply)]
    # Equal rows may stand twice in a roll-up, so it is the object that has a place.
    places = {id(need): place for place, need in enumerate(context.demand)}
    needs.sort(key=lambda view: places[id(view.need)])
    return CycleView(
        cycle=context.cycle,
        computed_at_unix_nanos=context.computed_at_unix_nanos,
        needs=tuple(needs),
        decided_on=DecidedOn(
            snapshot=context.snapshot, demand=context.demand, options=context.options, rows=decision.rows
        ),
    )


def short_of(result: RowResult, short: Vector, *, is_refused: bool, snapshot: Snapshot) -> Vector:
    """Return what a row really lacks: `short`, and what it was given anew if its operator cannot bootstrap it."""
    acquired = (*result.bootstraps, *result.provisions)
    if not is_refused or not acquired:
        return short
    kept = result.held
    for machine_id in acquired:
        kept = vector.subtract(kept, snapshot.machines[machine_id].supply)
    return vector.subtract(result.need.aggregate, kept)


def split_residual(members: Sequence[Need], covered: Vector) -> Iterator[tuple[Need, Vector]]:
    """Yield each member with what it lacks: in list order, as many met as the covered amount pays for."""
    left = covered
    for member in members:
        residual = vector.subtract(member.aggregate, left)
        left = vector.subtract(left, member.aggregate)
        yield member, residual


def _views_of(result: RowResult, context: ViewContext, supply: "_Supply") -> Iterator[NeedView]:
    is_refused = result.need.key in context.refused
    short = short_of(result, result.deficit, is_refused=is_refused, snapshot=context.snapshot)
    covered = vector.subtract(result.need.aggregate, short)
    for position, (member, residual) in enumerate(split_residual(result.members, covered)):
        is_first = position == 0
        matching, reason = None, UnmetReason.UNSPECIFIED
        if residual:
            matching, elsewhere = supply.matching(member)
            reason = _reason(result, is_refused=is_refused, has_supply=elsewhere or matching.total > 0)
        yield NeedView(
            need=member,
            residual=residual,
            claimed_machines=len(result.claimed) if is_first else 0,
            bootstraps=len(result.bootstraps) if is_first else 0,
            provisions=len(result.provisions) if is_first else 0,
            domain=result.domain,
            satisfiable=result.satisfiable,
            parked=result.need.parked,
            parked_age_cycles=context.parking_ages.get(parking_key(member), 0),
            unmet_age_cycles=context.row_ages.get(member.key, 0),
            reason=reason,
            matching=matching,
            victims=len(result.victims) if is_first else 0,
            freed=result.freed if is_first else vector.ZERO,
        )


def _reason(result: RowResult, *, is_refused: bool, has_supply: bool) -> UnmetReason:
    """Return the first reason that holds (docs/spec/shard.md §12)."""
    if is_refused:
        return UnmetReason.BOOTSTRAP_REFUSED
    is_same = result.need.profile.same_key is not None
    if is_same and (not result.satisfiable or result.need.parked):
        return UnmetReason.TOPOLOGY_UNSATISFIABLE
    if result.victims:
        return UnmetReason.PREEMPTION_EXHAUSTED
    if has_supply or result.claimed:
        return UnmetReason.PRIORITY_STARVED
    return UnmetReason.NO_MATCHING_SUPPLY


class _Supply:
    """Counts the machines that could host a row, once per profile and min unit."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._shapes: Shapes | None = None
        #: Machines of each shape by state.
        self._counts: dict[MachineState, Counter[int]] = {}
        self._known: dict[Fit, tuple[MatchingSupply, bool]] = {}

    def matching(self, need: Need) -> tuple[MatchingSupply, bool]:
        """Return the counts, and whether a machine on its way from one state to another would fit as well."""
        if self._shapes is None:
            # Most cycles leave nothing short, and then nobody asks.
            self._shapes = Shapes(self._snapshot.machines.values())
            for machine in self._snapshot.machines.values():
                self._counts.setdefault(machine.state, Counter())[self._shapes.of[machine.id]] += 1
        fit = self._shapes.fit(need.profile, need.min_unit)
        known = self._known.get(fit)
        if known is None:
            counts = MatchingSupply(
                idle=self._count(fit, MachineState.IDLE),
                configured=self._count(fit, MachineState.CONFIGURED),
                speculative=self._count(fit, MachineState.SPECULATIVE),
            )
            known = self._known[fit] = counts, any(self._count(fit, state) for state in TRANSITIONAL_STATES)
        return known

    def _count(self, fit: Fit, state: MachineState) -> int:
        counts = self._counts.get(state, Counter())
        shapes = fit.shapes if len(fit.shapes) < len(counts) else counts
        number = 0
        for shape in shapes:
            if shape in fit.shapes:
                number += counts.get(shape, 0)
                if number >= MATCHING_MAX:
                    return MATCHING_MAX
        return number
