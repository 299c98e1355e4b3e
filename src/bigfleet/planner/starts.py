"""Builds the fleets from which a search starts, and completes fleets so that first-fit-decreasing places every pod."""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from bigfleet.planner.arena import Fleet, Int
from bigfleet.planner.core import PLENTY, Core
from bigfleet.planner.greedy import fill, least_prices, size_order
from bigfleet.planner.leaders import kinds, leading_kinds, led_fleets, merged, within_stock
from bigfleet.planner.packing import PLACING, SEQUENCE, FirstFit

_SCALES: Final = (94, 99, 104, 109, 115, 122, 130)
_SLACKS: Final = (0, 4, 8, 12)
_GREEDY_ROUNDS: Final = 3
_ORDERS: Final = 8
_REPAIRS: Final = 3
_REPAIRS_OF_SEVERAL: Final = 16
#: Machines per pod from which on what is paid for anyway is taken piece by piece only.
_PAID_MOST: Final = 2


def greedy_fleets(core: Core, wanted: Int, stock: Int, rounds: int = _GREEDY_ROUNDS) -> Iterator[Fleet]:
    """Yield fleets of repriced greedy fills with several slacks, for so many pods of each part."""
    prices, order = least_prices(core, core.cost), size_order(core, [int(p) for p in np.flatnonzero(wanted)])
    for _ in range(rounds):
        charged = prices
        for slack in _SLACKS:
            supply = core.supply * (100 - slack) // 100
            for is_largest_first in (True, False):
                filled = fill(core, order, wanted, stock, core.cost, prices, supply, is_largest_first)
                if not filled.left.any():
                    yield filled.fleet
            if not slack:
                charged = filled.charged
        prices = np.maximum((prices + charged) // 2, 1)


def starting_fleets(core: Core, base: Fleet, wanted: Int, rounds: int = _GREEDY_ROUNDS) -> list[Fleet]:
    """Return fleets that add machines to a base for the wanted pods, sorted."""
    left_in_stock = stock_beside(core, base)
    found = {merged(base, fleet) for fleet in greedy_fleets(core, wanted, left_in_stock, rounds)}
    for group in leading_kinds(core, kinds(core), wanted):
        found.update(merged(base, fleet) for fleet in led_fleets(core, group, wanted, _SCALES))
    return sorted(fleet for fleet in found if within_stock(core, fleet))


def completed(core: Core, first_fit: FirstFit, fleets: Sequence[Fleet], orders: int = 1) -> list[Fleet]:
    """Return the fleets in which so many orders of first-fit-decreasing place all pods, sorted.

    Greedy machines are added where fleets lack some.
    """
    prices, order = least_prices(core, core.cost), size_order(core, range(len(core.parts)))
    found: set[Fleet] = set()
    pending = list(fleets)
    numbers, repairs = (SEQUENCE[:_ORDERS], _REPAIRS) if orders == 1 else (SEQUENCE, _REPAIRS_OF_SEVERAL)
    for _ in range(repairs + 1):
        if not pending:
            break
        grown = []
        for fleet, rest in zip(pending, first_fit.least_left(pending, numbers, orders), strict=True):
            if not rest.any():
                found.add(fleet)
                continue
            wanted = [p for p in order if rest[p]]
            more = fill(core, wanted, rest, stock_beside(core, fleet), core.cost, prices, core.supply)
            if more.counts:
                grown.append(merged(fleet, more.fleet))
        pending = sorted(set(grown))
    return sorted(found)


def fitting(core: Core, first_fit: FirstFit, fleets: Sequence[Fleet], orders: int = PLACING) -> list[Fleet]:
    """Return the fleets that so many orders fill, as claims and as a scheduler may place pods, the cheapest first.

    Greedy machines are added where fleets lack some.
    """
    found = completed(core, first_fit, fleets, orders)
    if core.as_scheduled is not None and first_fit.scheduler is not None:
        found = completed(core.as_scheduled, first_fit.scheduler, found, orders)
    return sorted((f for f in found if first_fit.fits(f, orders)), key=lambda fleet: (core.price(fleet), fleet))


def paid_anyway(core: Core) -> Fleet:
    """Return all machines that can be had for nothing: bare metal and reservations, as far as they are few."""
    columns = [c for c, each in enumerate(core.columns) if not each.is_held and not each.cost and each.stock < PLENTY]
    machines = sum(core.columns[c].stock for c in columns)
    if machines > _PAID_MOST * max(1, int(core.count.sum())):
        return ()
    return tuple((c, core.columns[c].stock) for c in columns)


def stock_beside(core: Core, fleet: Fleet) -> Int:
    """Return how many acquirable machines of each column are left beside a fleet; held ones are none."""
    stock = np.where(is_held(core), 0, core.stock)
    for column, count in fleet:
        stock[column] = max(0, int(stock[column]) - count)
    return stock


def is_held(core: Core) -> Int:
    """Return 1 for the columns of held machines, (C)."""
    return np.array([int(column.is_held) for column in core.columns], np.int64)
