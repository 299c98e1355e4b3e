"""Proposes cheaper fleets near a given one: removes machines, adds others, and completes what then has no place.

Choices follow a hash sequence, so equal problems see equal proposals.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from bigfleet.planner.arena import Fleet, Int
from bigfleet.planner.core import Core
from bigfleet.planner.packing import FirstFit
from bigfleet.planner.starts import is_fixed

_COST_MAX: Final = 1 << 42


class FleetMoves:
    """Proposes neighbours of fleets of one core."""

    def __init__(self, core: Core, first_fit: FirstFit) -> None:
        """Prepare for moves that add and remove machines that are not fixed."""
        self._core = core
        self._first_fit = first_fit
        self._state = np.array([len(core.columns) + 1], np.int64)
        self._cost = np.minimum(core.cost, _COST_MAX)
        self._removable = 1 - is_fixed(core)
        self._addable = np.flatnonzero(self._removable).astype(np.int64)

    def neighbours(self, fleet: Fleet, value: int, wanted: int, most: int, numbers: Sequence[int]) -> list[Fleet]:
        """Return different fleets that cost less than `value`, cheapest first: `most` out of those of so many trials.

        Each places every pod by first-fit-decreasing in one of the orders `numbers`, or nearly so.
        """
        from bigfleet.planner.compiled import propose

        core = self._core
        before = np.zeros(len(core.columns), np.int64)
        for column, count in fleet:
            before[column] = count
        found = np.empty((wanted, len(before)), np.int64)
        number = propose(
            self._state,
            before,
            np.repeat(np.arange(len(before)), before),
            np.flatnonzero(before),
            self._addable,
            self._removable,
            core.stock,
            self._cost,
            min(value, _COST_MAX << 20),
            np.array([self._first_fit.order(fleet, n) for n in numbers], np.int64),
            np.array([self._first_fit.ranks(fleet, n) for n in numbers], np.int64),
            core.request,
            core.supply,
            core.fits,
            core.count,
            core.demand,
            self._first_fit.prices,
            found,
        )
        some = found[:number]
        # The keys are the bytes of the rows, read by one call. Of equal fleets the first proposed one stays.
        dearest_first = np.argsort(some @ core.cost, kind="stable")[::-1]
        keys = some[dearest_first].view(np.dtype((np.void, before.nbytes))).ravel().tolist()
        different = dict(zip(keys, dearest_first.tolist(), strict=True))
        different.pop(before.tobytes(), None)
        chosen = probed(list(different.values())[::-1], most)
        return [_fleet(some[n]) for n in chosen]


def _fleet(counts: Int) -> Fleet:
    columns = np.flatnonzero(counts)
    return tuple(zip(columns.tolist(), counts[columns].tolist(), strict=True))


def probed(places: Sequence[int], most: int) -> list[int]:
    """Return at most so many of the places, evenly over their order."""
    if len(places) <= most:
        return list(places)
    return [places[n * len(places) // most] for n in range(most)]
