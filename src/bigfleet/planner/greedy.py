"""Fills machines greedily: the machine that gives the most for its price first, with prices that are corrected.

A part's price is first what it costs on its best column: cost × largest share of the machine that one pod takes. The
column is chosen whose cost is least per sum of prices of what it hosts, filled largest first. After a round each part's
price moves half-way to what it was really charged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from bigfleet.planner.arena import Fleet, Int
from bigfleet.planner.core import PLENTY, Core

#: Denominator of shares and of slack.
WHOLE: Final = 1 << 20
_SHARE_BITS: Final = 40
_COST_MAX: Final = 1 << 42
_RATIO_BITS: Final = 16


def shares(core: Core) -> Int:
    """Return the largest share that one pod takes of a machine, over the dimensions, in parts of WHOLE, (P, C).

    Where a part may not claim a column its share is PLENTY.
    """
    result = np.ones((len(core.parts), len(core.columns)), np.int64)
    for d in range(core.request.shape[1]):
        most = max(int(core.request[:, d].max(initial=0)), int(core.supply[:, d].max(initial=0)))
        shift = max(0, most.bit_length() - _SHARE_BITS)
        wants, has = core.request[:, d] >> shift, np.maximum(core.supply[:, d] >> shift, 1)
        np.maximum(result, -(-wants[:, None] * WHOLE // has[None, :]), out=result)
    masked: Int = np.where(core.may_claim, result, PLENTY)
    return masked


def least_prices(core: Core, costs: Int) -> Int:
    """Return what one pod of each part costs on its best column, at least 1, (P)."""
    if not len(core.columns):
        return np.ones(len(core.parts), np.int64)
    share = shares(core)
    charged = np.where(share < PLENTY, np.minimum(costs, _COST_MAX)[None, :] * np.minimum(share, WHOLE), PLENTY << 20)
    least: Int = np.maximum(charged.min(axis=1) >> 20, 1)
    return least


@dataclass(frozen=True, slots=True)
class Filled:
    """A fleet, what each part was charged on it, and what found no place."""

    counts: Mapping[int, int]
    charged: Int
    left: Int
    #: Columns with the number of machines that are filled alike, and the pods by part on each of them.
    runs: Sequence[tuple[int, int, Mapping[int, int]]] = ()

    @property
    def fleet(self) -> Fleet:
        """The counts in the form of a fleet."""
        return tuple(sorted((c, n) for c, n in self.counts.items() if n))


def size_order(core: Core, members: Sequence[int]) -> list[int]:
    """Return parts by their largest share of the demand, descending, ties by position."""
    demand = [max(1, int(total)) for total in core.demand]
    key = {
        p: -max((int(w) * WHOLE // whole for w, whole in zip(core.request[p], demand, strict=True)), default=0)
        for p in members
    }
    return sorted(members, key=lambda p: (key[p], p))


def fill(
    core: Core,
    order: Sequence[int],
    wanted: Int,
    stock: Int,
    costs: Int,
    prices: Int,
    supply: Int,
    is_largest_first: bool = False,
) -> Filled:
    """Buy machines until every wanted pod has a place or no column hosts what is left.

    `order` is the order of parts within a machine, `supply` what a machine offers here (its supply less slack). With
    `is_largest_first` each machine hosts the first part of the order that is left: large pods then share their machines
    with small ones, as long as there are small ones.
    """
    left, stock = wanted.copy(), stock.copy()
    counts: dict[int, int] = {}
    runs: list[tuple[int, int, Mapping[int, int]]] = []
    paid, hosted = np.zeros(len(core.parts), np.int64), np.zeros(len(core.parts), np.int64)
    costs = np.clip(costs, 1, _COST_MAX)
    while True:
        pending = [p for p in order if left[p]]
        usable: Int = np.flatnonzero(
            (stock > 0) & core.may_claim[pending[:1] if is_largest_first else pending].any(axis=0)
        ).astype(np.int64)
        if not len(usable):
            break
        takes = core.kernels.patterns(core, pending, left, usable, supply)
        value = prices[pending] @ takes
        ratio = np.where(value > 0, (value << _RATIO_BITS) // costs[usable], -1)
        best = int(ratio.argmax())
        if ratio[best] < 0:
            break
        column, take = int(usable[best]), takes[:, best]
        some = take > 0
        times = int(min(int(stock[column]), int((left[pending][some] // take[some]).min())))
        left[pending] -= take * times
        stock[column] -= times
        counts[column] = counts.get(column, 0) + times
        runs.append((column, times, {p: int(n) for p, n in zip(pending, take, strict=True) if n}))
        whole = max(1, int(value[best]))
        paid[pending] += prices[pending] * take * times * min(int(costs[column]) * 1024 // whole, 1 << 20) // 1024
        hosted[pending] += take * times
    charged = np.where(hosted > 0, paid // np.maximum(hosted, 1), prices)
    return Filled(counts, np.maximum(charged, 1), left, runs)


def cheapest_fill(core: Core, members: Sequence[int], stock: Mapping[int, int]) -> dict[int, int] | None:
    """Return machines by column that host some parts alone, or None where the stock does not suffice."""
    wanted = np.zeros(len(core.parts), np.int64)
    wanted[list(members)] = core.count[list(members)]
    have = np.zeros(len(core.columns), np.int64)
    for column, count in stock.items():
        have[column] = count
    prices = least_prices(core, core.cost)
    filled = fill(core, size_order(core, members), wanted, have, core.cost, prices, core.supply)
    return None if filled.left.any() else dict(filled.counts)
