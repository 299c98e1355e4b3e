"""Proposes cheaper fleets near a given one: removes machines, adds others, and completes what then has no place.

Choices follow a hash sequence, so equal problems see equal proposals.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from bigfleet.planner.core import PLENTY, Core
from bigfleet.planner.hashing import Picks
from bigfleet.planner.packing import FirstFit
from bigfleet.planner.simulate import Fleet, Int

_REMOVED: Final = (1, 1, 1, 2, 2, 3)
_ADDED: Final = (0, 0, 1, 1, 1, 2, 2, 3)
_TIMES_MAX: Final = 1 << 10


class Moves:
    """Proposes neighbours of fleets of one core."""

    def __init__(self, core: Core, first_fit: FirstFit, addable: Sequence[int], removable: Sequence[bool]) -> None:
        """Prepare for moves that add the columns `addable` and remove those marked `removable`."""
        self._core = core
        self._first_fit = first_fit
        self._addable = list(addable)
        self._removable = removable
        self._picks = Picks(len(core.columns) + 1)
        self._costs = [int(cost) for cost in core.cost]
        self._stock = [int(stock) for stock in core.stock]
        self._forbidden = (~core.may_claim).astype(np.int64)

    def neighbours(self, fleet: Fleet, value: int, wanted: int, numbers: Sequence[int]) -> list[Fleet]:
        """Return up to so many different fleets that cost less than `value`, cheapest first.

        Each places every pod by first-fit-decreasing in one of the orders `numbers`, or nearly so.
        """
        tried: set[Fleet] = {fleet}
        machines = [c for c, n in fleet for _ in range(n)]
        for _ in range(wanted):
            child = self._change(fleet, machines)
            if self._price(child) < value:
                tried.add(child)
        tried.discard(fleet)
        found = self._completed(sorted(tried), fleet, value, numbers)
        found.discard(fleet)
        return sorted(found, key=lambda f: (self._price(f), f))

    def _change(self, fleet: Fleet, machines: Sequence[int]) -> Fleet:
        counts = dict(fleet)
        picks = self._picks
        if machines:
            for _ in range(_REMOVED[picks.below(len(_REMOVED))]):
                column = machines[picks.below(len(machines))]
                if counts[column] and self._removable[column]:
                    counts[column] -= min(counts[column], self._several(counts[column]))
        for _ in range(_ADDED[picks.below(len(_ADDED))]):
            column_added = self._pick(machines)
            if column_added is not None:
                count = counts.get(column_added, 0)
                counts[column_added] = min(count + self._several(count), self._stock[column_added])
        return tuple(sorted((c, n) for c, n in counts.items() if n))

    def _several(self, count: int) -> int:
        """Return how many machines a change takes: mostly one, sometimes a part of those of the column."""
        pick = self._picks.below(6)
        return 1 + (count // 8 if pick == 4 else count // 3 if pick == 5 else 0)

    def _pick(self, machines: Sequence[int]) -> int | None:
        """Return a column to add: half of the time one of which the fleet has machines."""
        picks = self._picks
        if machines and picks.below(2):
            column = machines[picks.below(len(machines))]
            return column if not self._core.columns[column].is_held else None
        return self._addable[picks.below(len(self._addable))] if self._addable else None

    def _completed(self, children: Sequence[Fleet], like: Fleet, value: int, numbers: Sequence[int]) -> set[Fleet]:
        """Return the children that place every pod, those that do not with the cheapest machine that hosts the rest."""
        found: set[Fleet] = set()
        if not children:
            return found
        left = self._first_fit.least_left(children, numbers, like)
        grown: list[Fleet] = []
        for child, rest, (column, count) in zip(children, left, self._several_hosts(left), strict=True):
            if not rest.any():
                found.add(child)
            elif column >= 0:
                more = self._with(child, column, count)
                if more is not None and self._price(more) < value:
                    (found.add if count == 1 else grown.append)(more)
        if grown:
            left = self._first_fit.least_left(grown, numbers, like)
            for child, rest, column in zip(grown, left, self._hosts_of(left), strict=True):
                more = child if not rest.any() else self._with(child, column, 1) if column >= 0 else None
                if more is not None and self._price(more) < value:
                    found.add(more)
        return found

    def _with(self, fleet: Fleet, column: int, count: int) -> Fleet | None:
        counts = dict(fleet)
        counts[column] = counts.get(column, 0) + count
        return tuple(sorted(counts.items())) if counts[column] <= self._stock[column] else None

    def _hosts_of(self, left: Int) -> list[int]:
        """Return for each row of pods the cheapest addable column of which one machine may host them all, or -1."""
        core, columns = self._core, self._addable
        if not columns:
            return [-1] * len(left)
        hosts = (np.minimum(left, 1) @ self._forbidden[:, columns]) == 0
        needs = left @ core.request
        for d in range(needs.shape[1]):
            hosts &= needs[:, d][:, None] <= core.supply[columns, d][None, :]
        costs = np.where(hosts, core.cost[columns][None, :], PLENTY << 10)
        chosen = costs.argmin(axis=1)
        return [columns[int(c)] if hosts[n, c] else -1 for n, c in enumerate(chosen)]

    def _several_hosts(self, left: Int) -> list[tuple[int, int]]:
        """Return for each row of pods the column that hosts them at the least cost by volume, and how many machines.

        The column is -1 where no single one may host them all.
        """
        core, columns = self._core, self._addable
        if not columns:
            return [(-1, 0)] * len(left)
        hosts = (np.minimum(left, 1) @ self._forbidden[:, columns]) == 0
        needs = left @ core.request
        times = np.ones(hosts.shape, np.int64)
        for d in range(needs.shape[1]):
            np.maximum(times, -(-needs[:, d][:, None] // np.maximum(core.supply[columns, d], 1)[None, :]), out=times)
        costs = np.where(hosts, np.minimum(times, _TIMES_MAX) * core.cost[columns][None, :], PLENTY << 10)
        chosen = costs.argmin(axis=1)
        return [(columns[int(c)] if hosts[n, c] else -1, int(times[n, c])) for n, c in enumerate(chosen)]

    def _price(self, fleet: Fleet) -> int:
        return sum(self._costs[column] * count for column, count in fleet)
