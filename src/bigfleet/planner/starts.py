"""Builds the fleets from which a search starts, and completes fleets so that first-fit-decreasing places every pod.

A start is a greedy fleet, or a fleet led by one type: the number of its machines that demand needs, and others beside
them. Columns of one *kind* have equal supply and cost and differ in where they are: zones above all.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from bigfleet.planner.arena import Fleet, Int
from bigfleet.planner.core import PLENTY, Core
from bigfleet.planner.greedy import WHOLE, fill, least_prices, size_order
from bigfleet.planner.packing import PLACING, SEQUENCE, FirstFit

#: Leading kinds that are tried.
LEADERS: Final = 10
_SCALES: Final = (94, 99, 104, 109, 115, 122, 130)
_SLACKS: Final = (0, 4, 8, 12)
_GREEDY_ROUNDS: Final = 3
#: Orders of which one has to place every pod, and how often machines are added to that end.
_ORDERS: Final = 8
_REPAIRS: Final = 3
#: How often machines are added until several orders place every pod.
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


def packable(core: Core, first_fit: FirstFit, fleets: Sequence[Fleet], orders: int = PLACING) -> list[Fleet]:
    """Return the fleets that so many orders fill, as claims and as a scheduler may place pods, the cheapest first.

    Greedy machines are added where fleets lack some.
    """
    found = completed(core, first_fit, fleets, orders)
    if core.as_scheduled is not None and first_fit.scheduler is not None:
        found = completed(core.as_scheduled, first_fit.scheduler, found, orders)
    return sorted((f for f in found if first_fit.fits(f, orders)), key=lambda fleet: (core.price(fleet), fleet))


def paid_anyway(core: Core) -> Fleet:
    """Return all machines that can be had for nothing: bare metal and reservations, as far as they are few."""
    fixed = is_fixed(core)
    columns = [c for c, each in enumerate(core.columns) if not fixed[c] and not each.cost and each.stock < PLENTY]
    machines = sum(core.columns[c].stock for c in columns)
    if machines > _PAID_MOST * max(1, int(core.count.sum())):
        return ()
    return tuple((c, core.columns[c].stock) for c in columns)


def stock_beside(core: Core, fleet: Fleet) -> Int:
    """Return how many machines of each column may be added to a fleet; fixed ones are none."""
    stock = np.where(is_fixed(core), 0, core.stock)
    for column, count in fleet:
        stock[column] = max(0, int(stock[column]) - count)
    return stock


def held(core: Core) -> Fleet:
    """Return the fleet of what is held and stays: nothing when machines may be exchanged."""
    if core.problem.may_exchange:
        return ()
    return tuple((c, column.stock) for c, column in enumerate(core.columns) if column.is_held)


def is_held(core: Core) -> Int:
    """Return 1 for the columns of held machines, (C)."""
    return np.array([int(column.is_held) for column in core.columns], np.int64)


def is_fixed(core: Core) -> Int:
    """Return 1 for the columns of held machines that stay, (C).

    Where machines may be exchanged there are none: held machines are chosen as others are, at the price of what is
    held.
    """
    return np.zeros(len(core.columns), np.int64) if core.problem.may_exchange else is_held(core)


# ---- fleets led by one type ----------------------------------------------------------------------------------------


def kinds(core: Core) -> list[list[int]]:
    """Return the columns that are not fixed grouped by kind, in the order of their first columns."""
    groups: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    fixed = is_fixed(core)
    for c, column in enumerate(core.columns):
        if not fixed[c]:
            kind = core.problem.classes[column.machine_class]
            groups[tuple(core.supply[c].tolist()), int(core.cost[c]), kind.probability].append(c)
    return list(groups.values())


def leading_kinds(core: Core, groups: Sequence[Sequence[int]], wanted: Int, most: int = LEADERS) -> list[Sequence[int]]:
    """Return the kinds that host the wanted pods at the least cost by volume, best first."""
    ranked = []
    for n, group in enumerate(groups):
        hosts = core.may_claim[:, list(group)].any(axis=1)
        volume = _volume(core, group, np.where(hosts, wanted, 0))
        missing = int(wanted[~hosts].sum())
        if volume:
            ranked.append(
                (missing * WHOLE // max(1, int(wanted.sum())) // (WHOLE // 8), volume * _cost(core, group), n)
            )
    return [groups[n] for _, _, n in sorted(ranked)[:most]]


def _cost(core: Core, group: Sequence[int]) -> int:
    return max(1, int(core.cost[group[0]]))


def _volume(core: Core, group: Sequence[int], wanted: Int) -> int:
    """Return how many machines the wanted pods fill by volume, in parts of WHOLE."""
    demand = (core.request * wanted[:, None]).sum(axis=0)
    supply = core.supply[group[0]]
    return max((int(need) * WHOLE // max(1, int(has)) for need, has in zip(demand, supply, strict=True)), default=0)


def led_fleets(core: Core, group: Sequence[int], wanted: Int, scales: Sequence[int]) -> Iterator[Fleet]:
    """Yield fleets of one leading kind with its volume scaled by so many per cent, and greedy machines for the rest.

    The fraction of the last machine is filled by the cheapest machines that host as much; parts that do not fit the
    leader get machines of their own.
    """
    hosts = core.may_claim[:, list(group)].any(axis=1)
    mine = np.where(hosts, wanted, 0)
    volume, share = _volume(core, group, mine), _shares(core, group, mine)
    rest = _rest(core, np.where(hosts, 0, wanted))
    seen = set()
    for scale in scales:
        scaled = volume * scale // 100
        whole = -(-scaled // WHOLE)
        for machines in (whole - 1, whole, whole + 1):
            if machines < 1 or machines in seen:
                continue
            seen.add(machines)
            yield merged(spread_over(core, group, share, machines), rest)


def _rest(core: Core, wanted: Int) -> Fleet:
    if not wanted.any():
        return ()
    prices = np.maximum(core.cost.max(initial=1), 1) // np.maximum(core.fits.max(axis=1, initial=1), 1)
    members = [int(p) for p in np.flatnonzero(wanted)]
    return fill(
        core, size_order(core, members), wanted, core.stock, core.cost, np.maximum(prices, 1), core.supply
    ).fleet


def _shares(core: Core, columns: Sequence[int], wanted: Int) -> list[int]:
    """Return the part of the wanted pods that each column of a kind serves, relative to the others.

    What is confined to some of the columns counts for these, evenly, and the rest for all.
    """
    claims = core.may_claim[:, list(columns)] & (wanted > 0)[:, None]
    share = np.zeros(len(columns), np.int64)
    supply = np.maximum(core.supply[columns[0]], 1)
    demand = np.maximum((core.request * wanted[:, None]).sum(axis=0), 1)
    tight = max(range(len(supply)), key=lambda d: (int(demand[d]) * WHOLE // int(supply[d]), -d))
    for p in np.flatnonzero(claims.any(axis=1)):
        where = np.flatnonzero(claims[p])
        share[where] += int(core.request[p, tight]) * int(wanted[p]) * WHOLE // int(demand[tight]) // len(where)
    return [int(each) for each in share]


def spread_over(core: Core, columns: Sequence[int], share: Sequence[int], machines: int) -> Fleet:
    """Return so many machines of a kind, in each column by its share."""
    total = max(1, sum(share))
    counts = [min(int(core.stock[c]), machines * s // total) for c, s in zip(columns, share, strict=True)]
    # The largest remainders get the machines that are left; a column without stock gets none.
    order = sorted(range(len(columns)), key=lambda n: (-(machines * share[n] % total), n))
    while sum(counts) < machines:
        before = sum(counts)
        for n in order:
            if sum(counts) < machines and counts[n] < int(core.stock[columns[n]]):
                counts[n] += 1
        if sum(counts) == before:
            break
    return tuple((c, n) for c, n in sorted(zip(columns, counts, strict=True)) if n)


def merged(*fleets: Fleet) -> Fleet:
    """Return the sum of fleets."""
    counts: dict[int, int] = {}
    for fleet in fleets:
        for column, count in fleet:
            counts[column] = counts.get(column, 0) + count
    return tuple(sorted((column, count) for column, count in counts.items() if count))


def within_stock(core: Core, fleet: Fleet) -> bool:
    """Return whether no column is used beyond its stock."""
    return all(count <= min(int(core.stock[column]), PLENTY) for column, count in fleet)
