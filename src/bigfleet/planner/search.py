"""Searches the fleet with the least completed cost: starts, then moves, judged by simulations."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from bigfleet.planner.core import Core
from bigfleet.planner.greedy import fill, least_prices, size_order
from bigfleet.planner.leaders import kinds, leading_kinds, led_fleets, merged, within_stock
from bigfleet.planner.moves import Moves
from bigfleet.planner.packing import SEQUENCE, FirstFit
from bigfleet.planner.simulate import Fleet
from bigfleet.planner.valuation import Valuation

_SCALES: Final = (94, 99, 104, 109, 115, 122, 130)
_SLACKS: Final = (0, 4, 8, 12)
_GREEDY_ROUNDS: Final = 3
_VALIDATION: Final = 1000
_CHECKED: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much the planner tries; every number is a count, none is a time."""

    #: Rounds of moves.
    rounds: int = 24
    #: Proposals of a round, and how many of them are simulated.
    proposals: int = 100
    simulated: int = 40
    #: Orders of the queue in a round; each round has orders of its own, so that no fleet is fitted to a few of them.
    orders: int = 3
    #: Orders in the final comparison, and fleets that take part in it.
    validation_orders: int = 6
    validated: int = 8


def greedy_fleets(core: Core) -> Iterator[Fleet]:
    """Yield the fleets of repriced greedy fills with several slacks."""
    prices, order = least_prices(core, core.cost), size_order(core, range(len(core.parts)))
    for _ in range(_GREEDY_ROUNDS):
        charged = prices
        for slack in _SLACKS:
            filled = fill(core, order, core.count, core.stock, core.cost, prices, core.supply * (100 - slack) // 100)
            if not filled.left.any():
                yield filled.fleet
            if not slack:
                charged = filled.charged
        prices = np.maximum((prices + charged) // 2, 1)


def starts(core: Core) -> list[Fleet]:
    """Return the fleets from which the search starts, sorted."""
    found = set(greedy_fleets(core))
    for group in leading_kinds(core, kinds(core), core.count):
        found.update(led_fleets(core, group, core.count, _SCALES))
    return sorted(fleet for fleet in found if within_stock(core, fleet))


def completed(core: Core, moves: Moves, fleets: Sequence[Fleet]) -> list[Fleet]:
    """Return fleets with greedy machines for what has no place by first-fit-decreasing."""
    left = moves.least_left(fleets, SEQUENCE[:8])
    prices, order = least_prices(core, core.cost), size_order(core, range(len(core.parts)))
    found = []
    for fleet, rest in zip(fleets, left, strict=True):
        if rest.any():
            more = fill(core, [p for p in order if rest[p]], rest, core.stock, core.cost, prices, core.supply)
            fleet = merged(fleet, more.fleet)
        found.append(fleet)
    return found


@dataclass(frozen=True, slots=True)
class Found:
    fleet: Fleet
    value: int
    lost_millipods: int


def search(core: Core, effort: Effort, trace=None) -> Found | None:
    first_fit, valuation = FirstFit(core), Valuation(core)
    addable = [c for c, column in enumerate(core.columns) if not column.is_held]
    moves = Moves(core, first_fit, addable, [not column.is_held for column in core.columns])
    fleets = starts(core)
    values, _ = valuation.values(fleets, range(2))
    ranked = sorted(range(len(fleets)), key=lambda n: (values[n], fleets[n]))[:32]
    fleets = sorted(set(completed(core, moves, [fleets[n] for n in ranked])))
    fleets = [f for f in fleets if within_stock(core, f)]
    values, _ = valuation.values(fleets, range(2))
    ranked = sorted(range(len(fleets)), key=lambda n: (values[n], fleets[n]))
    ok = [n for n, f in zip(ranked, first_fit.fits([fleets[n] for n in ranked]), strict=True) if f]
    if not ok:
        return None
    best, value = fleets[ok[0]], values[ok[0]]
    history = [fleets[n] for n in ok[:2]]
    if trace: trace('start',value,len(fleets),len(ok))
    for r in range(effort.rounds):
        orders = range(10 + r * effort.orders, 10 + (r + 1) * effort.orders)
        numbers = [SEQUENCE[(3 * r + k) % 9] for k in range(3)]
        machines = max(1, sum(n for _, n in best))
        proposals = min(effort.proposals, max(24, (1 << 16) // (machines * len(numbers))))
        simulated = min(effort.simulated, max(8, (1 << 13) // (machines * effort.orders)))
        children = moves.neighbours(best, value, proposals, numbers)[:simulated]
        both = [best, *children]
        values, _ = valuation.values(both, orders)
        ranked = sorted(range(len(both)), key=lambda n: (values[n], both[n]))
        ranked = ranked[: ranked.index(0) + 1]
        chosen = 0
        top = ranked[:_CHECKED]
        for n, f in zip(top, first_fit.fits([both[n] for n in top]), strict=True):
            if n == 0 or f:
                chosen = n
                break
        best, value = both[chosen], values[chosen]
        if best not in history:
            history.append(best)
        if trace and r%6==5: trace(r,value,len(children))
    final = history[-effort.validated :]
    values, lost = valuation.values(final, range(_VALIDATION, _VALIDATION + effort.validation_orders))
    n = min(range(len(final)), key=lambda n: (values[n], final[n]))
    return Found(final[n], values[n], lost[n])
