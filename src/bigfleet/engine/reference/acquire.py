"""Acquires machines for rows: the second half of Phase 1 (docs/spec/aggregates.md §5.4, §5.5).

Idle machines come before Speculative ones, however cheap; within a state the cheapest comes first. A row that is
parked, or a Same row without a domain, takes nothing. This module must not give a machine back or prefer a row over one
that is processed earlier.
"""

from collections.abc import Sequence

from bigfleet.engine.reference.rows import Allocations, DemandRow
from bigfleet.engine.reference.spread import SpreadPick, spread_picks
from bigfleet.model import vector
from bigfleet.model.machine import Machine
from bigfleet.model.states import MachineState


def may_acquire(row: DemandRow) -> bool:
    """Return whether the row may take machines that it does not hold yet."""
    return not row.need.parked and not (row.is_same and row.domain is None)


def acquire_from(row: DemandRow, allocations: Allocations, state: MachineState) -> list[SpreadPick]:
    """Claim machines of one state, Idle or Speculative, until nothing remains; returns the picks of a strict spread."""
    fitting = allocations.pool.idle_fitting if state is MachineState.IDLE else allocations.pool.speculative_fitting
    if row.need.profile.strict_spread is not None:
        return _acquire_spread(row, allocations, fitting(row.fit))
    _acquire_plain(row, allocations, fitting(row.fit))
    return []


def _acquire_plain(row: DemandRow, allocations: Allocations, machines: Sequence[Machine]) -> None:
    shape_of = allocations.pool.shapes.of
    for machine in machines:
        if not row.remaining:
            return
        if (
            machine.id not in allocations.claims
            and shape_of[machine.id] in row.shapes
            and vector.is_useful(machine.supply, row.remaining)
        ):
            allocations.claim(row, machine)


def cheapest_domain(machine: Machine, domain: str) -> tuple[float, str]:
    """Order the offers of open domains: price of the machine, then the domain's value."""
    return (machine.price_usd_per_hour, domain)


def _acquire_spread(row: DemandRow, allocations: Allocations, machines: Sequence[Machine]) -> list[SpreadPick]:
    spread = row.need.profile.strict_spread
    assert spread is not None, "the row has no strict spread"
    picks = spread_picks(
        (machine for machine in machines if machine.id not in allocations.claims),
        spread=spread,
        held=row.claimed,
        remaining=row.remaining,
        preference=cheapest_domain,
    )
    for pick in picks:
        allocations.claim(row, pick.machine)
    return picks
