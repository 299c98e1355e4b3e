"""Builds fleets led by one type: the number of its machines that demand needs, and the rest beside them.

Columns of one *kind* have equal supply and cost and differ in where they are: zones above all.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from bigfleet.planner.arena import Fleet, Int
from bigfleet.planner.core import PLENTY, Core
from bigfleet.planner.greedy import WHOLE, fill, size_order

#: Leading kinds that are tried.
LEADERS: Final = 10


def kinds(core: Core) -> list[list[int]]:
    """Return the acquirable columns grouped by kind, in the order of their first columns."""
    groups: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for c, column in enumerate(core.columns):
        if not column.is_held:
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
