"""Selects the machines that are drained for a row that free ones could not serve: Phase 2.

Only an assigned priority strictly below the row's makes a victim; penalties rank victims and never make one. What the
row itself, an equal or a higher row holds in this cycle is never touched. Partial preemption stands.
"""

from collections.abc import Iterator, Sequence

from bigfleet.engine.decision import Weights
from bigfleet.engine.matching import Fit
from bigfleet.engine.reference.pool import CandidatePool
from bigfleet.engine.reference.rows import Allocations, DemandRow
from bigfleet.engine.reference.spread import SpreadPick, spread_picks
from bigfleet.model import vector
from bigfleet.model.machine import Machine

#: The wider the gap, the shorter the warning: (gap that must be exceeded, seconds).
GRACE_SECONDS_BY_GAP = ((900_000, 10), (500_000, 30), (100_000, 120))
GRACE_SECONDS_DEFAULT = 600
#: Below these a term of the score would only grow without saying more.
DRAIN_SECONDS_FLOOR = 1.0
PENALTY_DOLLARS_FLOOR = 0.01


def grace_seconds(gap: int) -> int:
    """Return the notice that a victim gets, by the exact gap of the priorities."""
    return next((seconds for limit, seconds in GRACE_SECONDS_BY_GAP if gap > limit), GRACE_SECONDS_DEFAULT)


def score_terms(
    *,
    row_priority: int,
    assigned_priority: int,
    interruption_dollars: float,
    reclamation_dollars: float,
    drain_seconds: float,
    weights: Weights,
) -> tuple[float, float, float, float]:
    """Return the priority, drain, interruption and reclamation terms; an infinite penalty contributes 0."""
    return (
        float(max(0, row_priority - assigned_priority)) * weights.priority,
        (1 / max(DRAIN_SECONDS_FLOOR, drain_seconds)) * weights.drain,
        (1 / max(PENALTY_DOLLARS_FLOOR, interruption_dollars)) * weights.interruption,
        (1 / max(PENALTY_DOLLARS_FLOOR, reclamation_dollars)) * weights.reclamation,
    )


class Victims:
    """Every machine that a kind of row may ask for, best first; claims are looked at when a row comes."""

    def __init__(self, pool: CandidatePool, *, drain_seconds: float, weights: Weights) -> None:
        self._pool = pool
        self._drain_seconds = drain_seconds
        self._weights = weights
        self._ranked: dict[Fit, Sequence[Machine]] = {}

    def terms(self, row_priority: int, machine: Machine) -> tuple[float, float, float, float]:
        """Return the terms of the machine's score for a row of that priority."""
        return score_terms(
            row_priority=row_priority,
            assigned_priority=machine.assigned_priority,
            interruption_dollars=machine.assigned_interruption_penalty_dollars,
            reclamation_dollars=machine.assigned_reclamation_penalty_dollars,
            drain_seconds=self._drain_seconds,
            weights=self._weights,
        )

    def score(self, row_priority: int, machine: Machine) -> float:
        """Return the score: the terms added from left to right."""
        priority, drain, interruption, reclamation = self.terms(row_priority, machine)
        return priority + drain + interruption + reclamation

    def ranked(self, fit: Fit) -> Sequence[Machine]:
        """Return the Configured machines that fit and have a lower priority: score descending, id."""
        known = self._ranked.get(fit)
        if known is None:
            priority = fit.profile.priority
            lower = [
                machine
                for machine in self._pool.fitting(self._pool.configured, fit)
                if machine.assigned_priority < priority
            ]
            known = self._ranked[fit] = sorted(lower, key=lambda m: (-self.score(priority, m), m.id))
        return known


def may_preempt(row: DemandRow) -> bool:
    """Return whether a short row looks for victims: it is not parked and knows where it wants machines."""
    return not row.need.parked and not (row.is_same and row.domain is None)


def count_coming(row: DemandRow, allocations: Allocations) -> None:
    """Subtract what drains for the row already: it only reduces what Phase 2 still looks for."""
    shapes = _allowed_shapes(row, allocations)
    for machine in allocations.pool.coming(row.need):
        if (
            machine.id not in allocations.taken
            and allocations.pool.shapes.of[machine.id] in shapes
            and vector.is_useful(machine.supply, row.remaining)
        ):
            allocations.take(row, machine, row.coming)


def pick_victims(row: DemandRow, allocations: Allocations, victims: Victims) -> list[SpreadPick]:
    """Take victims until nothing remains or none is left; returns the spread's picks, empty for other rows."""
    spread = row.need.profile.strict_spread
    if spread is None:
        for machine in possible_victims(row, allocations, victims):
            if not row.remaining:
                break
            if vector.is_useful(machine.supply, row.remaining):
                allocations.take(row, machine, row.victims)
        return []
    ranked = list(possible_victims(row, allocations, victims))
    place = {machine.id: position for position, machine in enumerate(ranked)}
    picks = spread_picks(
        ranked,
        spread=spread,
        held=[*row.claimed, *row.coming],
        remaining=row.remaining,
        preference=lambda machine, domain: (place[machine.id], domain),
    )
    for pick in picks:
        allocations.take(row, pick.machine, row.victims)
    return picks


def possible_victims(row: DemandRow, allocations: Allocations, victims: Victims) -> Iterator[Machine]:
    """Yield, best first, what the row may take: allowed, not taken, and not held by a row that it may not disturb."""
    shapes, shape_of = _allowed_shapes(row, allocations), allocations.pool.shapes.of
    precedence = row.need.profile.precedence
    for machine in victims.ranked(row.fit):
        if shape_of[machine.id] not in shapes or machine.id in allocations.taken:
            continue
        holder = allocations.claims.get(machine.id)
        if holder is None or holder.need.profile.precedence < precedence:
            yield machine


def _allowed_shapes(row: DemandRow, allocations: Allocations) -> frozenset[int]:
    spread = row.need.profile.strict_spread
    if spread is None:
        return row.shapes
    return frozenset(allocations.pool.shapes.values(row.shapes, spread.topology_key))
