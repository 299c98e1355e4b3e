"""What a reader is shown of the last finished cycle: every row as it was reported, met or not, and why not.

docs/spec/shard.md §10.7 and §12. Built beside the old view and swapped by reference: a reader never stops a cycle and
a cycle never changes what a reader is streaming. Nothing here decides.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum

from bigfleet.engine.decision import Decision, ParkingKey, RowResult
from bigfleet.engine.matching import fits
from bigfleet.engine.parking import parking_key
from bigfleet.engine.snapshot import Snapshot
from bigfleet.model import vector
from bigfleet.model.need import Need, RowKey
from bigfleet.model.states import MachineState
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
class CycleView:
    """The last finished cycle; cycle 0 means that nothing was computed yet, not that there is no demand."""

    cycle: int = 0
    #: Wall clock at which the cycle took its view of demand and machines.
    computed_at_unix_nanos: int = 0
    #: Priority descending, arrival, cluster, then list order.
    needs: tuple[NeedView, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewContext:
    """What a view needs beside the decision."""

    cycle: int
    computed_at_unix_nanos: int
    snapshot: Snapshot
    parking_ages: Mapping[ParkingKey, int]
    row_ages: Mapping[RowKey, int]
    refusal_texts: Mapping[RowKey, str]


def build_view(decision: Decision, context: ViewContext) -> CycleView:
    """Return the view of a cycle; a folded row is split over the rows that it was folded from."""
    needs = [view for result in decision.rows for view in _views_of(result, context)]
    needs.sort(key=lambda view: (-view.need.profile.priority, view.need.arrival_unix_nanos, view.need.cluster))
    return CycleView(cycle=context.cycle, computed_at_unix_nanos=context.computed_at_unix_nanos, needs=tuple(needs))


def split_residual(members: tuple[Need, ...], covered: Vector) -> Iterator[tuple[Need, Vector]]:
    """Yield each member with what it lacks: in list order, as many met as the covered amount pays for."""
    left = covered
    for member in members:
        residual = vector.subtract(member.aggregate, left)
        left = vector.subtract(left, member.aggregate)
        yield member, residual


def _views_of(result: RowResult, context: ViewContext) -> Iterator[NeedView]:
    covered = vector.subtract(result.need.aggregate, result.deficit)
    for position, (member, residual) in enumerate(split_residual(result.members, covered)):
        is_first = position == 0
        matching = _matching(member, context.snapshot) if residual else None
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
            reason=_reason(result, member, matching, context) if matching is not None else UnmetReason.UNSPECIFIED,
            matching=matching,
            victims=len(result.victims) if is_first else 0,
            freed=result.freed if is_first else vector.ZERO,
        )


def _reason(result: RowResult, member: Need, matching: MatchingSupply, context: ViewContext) -> UnmetReason:
    """Return the first reason that holds (docs/spec/shard.md §12)."""
    if context.refusal_texts.get(member.key):
        return UnmetReason.BOOTSTRAP_REFUSED
    is_same = result.need.profile.same_key is not None
    if is_same and (not result.satisfiable or result.need.parked):
        return UnmetReason.TOPOLOGY_UNSATISFIABLE
    if result.victims:
        return UnmetReason.PREEMPTION_EXHAUSTED
    if matching.total or result.claimed:
        return UnmetReason.PRIORITY_STARVED
    return UnmetReason.NO_MATCHING_SUPPLY


def _matching(need: Need, snapshot: Snapshot) -> MatchingSupply:
    def count(state: MachineState) -> int:
        number = 0
        for machine in snapshot.of_state(state):
            if fits(need.profile, need.min_unit, machine):
                number += 1
                if number == MATCHING_MAX:
                    break
        return number

    return MatchingSupply(
        idle=count(MachineState.IDLE),
        configured=count(MachineState.CONFIGURED),
        speculative=count(MachineState.SPECULATIVE),
    )
