"""Values fleets: what the machines cost, and what it costs to complete the pods that the scheduler leaves over."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from bigfleet.planner.arena import Fleet, Int
from bigfleet.planner.core import Core, pods_that_fit
from bigfleet.planner.greedy import least_prices

#: Lost pods of a thousand beyond which each costs LOST_WEIGHT times as much again.
LOST_PER_MILLE: Final = 2
LOST_LEAST: Final = 150
LOST_WEIGHT: Final = 3
#: A column with stock for this part of the pods can be bought to complete a fleet.
_COMPLETING: Final = 8
_COST_MAX: Final = 1 << 42
#: Queues that are cached; all are dropped before there would be more, unless one call needs more.
_QUEUES_KNOWN: Final = 64


class Valuation:
    """Judges fleets of one core, and counts the effort."""

    def __init__(self, core: Core) -> None:
        """Prepare what completing a pod of each part costs."""
        self._core = core
        self._queues: dict[int, Int] = {}
        #: Pods placed in simulations.
        self.steps = 0
        costs = np.clip(core.cost, 1, _COST_MAX)
        is_open = core.stock >= max(1, int(core.count.sum()) // _COMPLETING)
        if is_open.any():
            costs = np.where(is_open, costs, np.maximum(costs, int(costs[is_open].max())))
        self._unit = least_prices(core, costs)
        one = np.where(core.may_claim, costs[None, :], _COST_MAX).min(axis=1, initial=_COST_MAX)
        # The first lost pod of an order needs a machine for itself, the others share.
        self._first = np.maximum(one - self._unit, 0)
        #: No slack protects a pod of which even the largest machine hosts one only: its loss is costed, not counted.
        #: A limit of pods per machine does not count: more machines protect such a pod.
        hosts = np.where(core.may_claim, pods_that_fit(core.supply, core.request), 0)
        self._is_protected = hosts.max(axis=1, initial=0) > 1
        self._allowed = max(int(core.count[self._is_protected].sum()) * LOST_PER_MILLE, LOST_LEAST)

    def values(self, fleets: Sequence[Fleet], orders: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the value of each fleet, and its protected pods lost on average, in thousandths."""
        if not fleets:
            return [], []
        lost = self._core.kernels.simulate(self._core, fleets, self._queues_of(orders))
        self.steps += len(fleets) * len(orders) * int(self._core.count.sum())
        completing = lost @ self._unit + (np.minimum(lost, 1) * self._first).max(axis=2, initial=0)
        millipods = (lost * self._is_protected).sum(axis=(1, 2)) * 1000 // len(orders)
        extra = completing.sum(axis=1) // len(orders)
        over = np.maximum(millipods - self._allowed, 0)
        extra += extra // np.maximum(millipods, 1) * over * LOST_WEIGHT
        values = [self._core.price(fleet) + int(more) for fleet, more in zip(fleets, extra, strict=True)]
        return values, [int(each) for each in millipods]

    def _queues_of(self, orders: Sequence[int]) -> list[Int]:
        if missing := [order for order in orders if order not in self._queues]:
            if len(self._queues) + len(missing) > _QUEUES_KNOWN:
                self._queues.clear()
                missing = list(orders)
            self._queues.update(zip(missing, self._core.arena.queues(missing), strict=True))
        return [self._queues[order] for order in orders]
