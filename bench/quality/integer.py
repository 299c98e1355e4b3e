"""Searches the best fleet of whole machines for small instances, by columns: a class with the pods that it hosts.

Every column is a real packing of one machine, so every answer is a real fleet. Columns are made by greedy packing of
all classes at once, guided by the prices of pods that the linear program over the columns so far gives; a mixed-integer
program (HiGHS) then picks machines. The answer is the best that this effort found: an upper bound of the optimum, never
a proof. A cluster with gangs or strict spreads keeps the packer's answer: columns of single machines cannot tie pods
together. Effort is counted in rounds of columns and in nodes of the search, so that equal arguments give equal answers
unless the guard of seconds ends the search.
"""

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csc_array, vstack

from bench.quality.bound import grouped, kept, usable
from bench.quality.values import Instance
from bigfleet.sim.packing.arrays import ClusterArrays, Int, Real, pods_that_fit
from bigfleet.sim.packing.packer import Packer, stock_of
from bigfleet.sim.packing.values import Bought

PODS_MAX: Final = 300
ROUNDS: Final = 12
NODES: Final = 400
#: Columns that the search picks from, those first that the linear program likes best.
COLUMNS: Final = 600
#: Columns that each class has among them at least, where it has as many.
COLUMNS_OF_A_CLASS: Final = 4
#: The search ends when no answer can be better than the best found by more than this.
GAP: Final = 0.001
#: Ends a search that its nodes do not end; an answer that it ends is not reproducible, and says so.
SECONDS_MAX: Final = 60.0
#: How strongly a shape's price is weighed against its size, per way of making columns.
_POWERS: Final = (0.0, 0.5, 1.0, 2.0)


@dataclass(frozen=True, slots=True)
class BestFound:
    """The cheapest fleet found."""

    usd_per_hour: float
    #: Whether the guard of seconds ended a search.
    is_timed_out: bool


def best_integer(instance: Instance, effort: int = 1) -> BestFound:
    """Return the best fleet found for an instance, at most the packer's cost; pods that nothing hosts are left out."""
    stock = stock_of(instance.offers)
    total, is_timed_out = 0.0, False
    for cluster in instance.clusters:
        arrays = ClusterArrays(cluster, instance.offers)
        search = _Search(arrays, stock, effort)
        total += search.run()
        is_timed_out |= search.is_timed_out
    return BestFound(total, is_timed_out)


class _Search:
    """The search for one cluster; `run` lowers the stock by what the answer takes."""

    def __init__(self, arrays: ClusterArrays, stock: Int, effort: int) -> None:
        self._arrays = arrays
        self._stock = stock
        self._effort = effort
        self.is_timed_out = False
        self._may = usable(arrays) & (stock > 0)
        classes = kept(arrays, grouped(arrays), is_divisible=False)
        #: Classes that columns are made for; the packer's own may be others.
        self._classes: Int = classes.position[stock[classes.position] > 0]
        self._columns: dict[tuple[int, tuple[tuple[int, int], ...]], float] = {}

    def run(self) -> float:
        """Return the cost of the best fleet."""
        arrays = self._arrays
        packer_stock = self._stock.copy()
        packer = Packer(arrays, packer_stock)
        purchase = packer.buy(arrays.count)
        wanted = arrays.count.copy()
        for shape, count in purchase.unhosted.items():
            wanted[shape] -= count
        if not wanted.any() or self._is_confined():
            self._stock[:] = packer_stock
            return purchase.usd_per_hour
        for machine in purchase.machines:
            self._add(packer, machine)
        prices = self._shares_as_prices(wanted)
        for _ in range(ROUNDS * self._effort):
            before = len(self._columns)
            self._grow(packer, prices, wanted)
            if len(self._columns) == before:
                break
            prices = self._prices(wanted)
        self._keep_best(prices, {(m.offer, tuple(sorted(m.pods.items()))) for m in purchase.machines})
        chosen = self._pick(wanted)
        if chosen is None or chosen[0] >= purchase.usd_per_hour:
            self._stock[:] = packer_stock
            return purchase.usd_per_hour
        for (offer, _), number in zip(self._columns, chosen[1], strict=True):
            self._stock[offer] -= number
        np.maximum(self._stock, 0, out=self._stock)
        return chosen[0]

    def _is_confined(self) -> bool:
        """Return whether a gang or a strict spread ties pods together, which columns of single machines cannot say."""
        rows = self._arrays.cluster.rows
        return any(row.same_key is not None or row.strict_spread is not None for row in rows)

    def _add(self, packer: Packer, machine: Bought) -> None:
        key = (machine.offer, tuple(sorted(machine.pods.items())))
        if key not in self._columns:
            self._columns[key] = packer.cost(machine)

    def _shares_as_prices(self, wanted: Int) -> Real:
        """Return a first price of each shape: its largest share of all that is wanted."""
        total = np.maximum((self._arrays.request * wanted[:, None]).sum(axis=0), 1)
        prices: Real = (self._arrays.request / total).max(axis=1)
        return prices

    def _grow(self, packer: Packer, prices: Real, wanted: Int) -> None:
        """Add columns: each class filled greedily, in several orders of shapes."""
        arrays = self._arrays
        supply = np.maximum(arrays.supply[self._classes].astype(np.float64), 1.0)
        largest = (arrays.request[None] / supply[:, None]).max(axis=2)
        size = np.maximum(np.median(largest, axis=0), 1e-12)
        for power in _POWERS:
            orders = [np.argsort(-prices / size**power, kind="stable")]
            # Classes of unlike ratio value shapes unlike: one order for each dimension's share as well.
            for dimension in range(len(arrays.dimensions)):
                share = arrays.request[:, dimension] / np.median(supply[:, dimension])
                orders.append(np.argsort(-prices / np.maximum(share, 1e-12) ** power, kind="stable"))
            for order in orders:
                self._fill_all(packer, order, wanted)

    def _fill_all(self, packer: Packer, order: Int, wanted: Int) -> None:
        arrays = self._arrays
        free = arrays.supply[self._classes].copy()
        taken = np.zeros((len(self._classes), len(arrays.keys)), np.int64)
        for shape in order.tolist():
            if not wanted[shape]:
                continue
            room = np.where(self._may[shape][self._classes], pods_that_fit(free, arrays.request[shape]), 0)
            count = np.minimum(room, min(int(wanted[shape]), int(arrays.limit[shape])))
            taken[:, shape] = count
            free -= count[:, None] * arrays.request[shape]
        for place, offer in enumerate(self._classes.tolist()):
            pods = {shape: int(taken[place, shape]) for shape in np.flatnonzero(taken[place]).tolist()}
            if pods:
                self._add(packer, Bought(offer, pods))

    def _matrix(self) -> Any:
        """Return pods of each shape by column, (S, columns)."""
        rows, columns, values = [], [], []
        for column, (_, pods) in enumerate(self._columns):
            for shape, count in pods:
                rows.append(shape)
                columns.append(column)
                values.append(count)
        return csc_array((values, (rows, columns)), shape=(len(self._arrays.keys), len(self._columns)))

    def _stock_matrix(self) -> tuple[Any, list[int]]:
        """Return which columns use each class, and the classes' stock."""
        offers = sorted({offer for offer, _ in self._columns})
        place = {offer: n for n, offer in enumerate(offers)}
        rows = [place[offer] for offer, _ in self._columns]
        matrix = csc_array((np.ones(len(rows)), (rows, np.arange(len(rows)))), shape=(len(offers), len(self._columns)))
        return matrix, [int(self._stock[offer]) for offer in offers]

    def _prices(self, wanted: Int) -> Real:
        """Return what one more pod of each shape costs over the columns so far: the duals of the linear program."""
        stock, limits = self._stock_matrix()
        pods = self._matrix()
        answer: Any = linprog(
            list(self._columns.values()),
            A_ub=_stacked(-pods, stock),
            b_ub=[*(-wanted).tolist(), *limits],
            method="highs",
        )
        if answer.status != 0:
            return self._shares_as_prices(wanted)
        duals: Real = -np.asarray(answer.ineqlin.marginals[: len(wanted)], np.float64)
        return duals

    def _keep_best(self, prices: Real, packed: set[tuple[int, tuple[tuple[int, int], ...]]]) -> None:
        """Keep the packer's columns, and those that cost least beyond the prices of their pods."""

        def excess(column: tuple[int, tuple[tuple[int, int], ...]]) -> float:
            return self._columns[column] - sum(float(prices[shape]) * count for shape, count in column[1])

        ranked = sorted((column for column in self._columns if column not in packed), key=lambda c: (excess(c), c))
        best: list[tuple[int, tuple[tuple[int, int], ...]]] = ranked[: COLUMNS * self._effort]
        by_class: Counter[int] = Counter(offer for offer, _ in best)
        for column in ranked[COLUMNS * self._effort :]:
            if by_class[column[0]] < COLUMNS_OF_A_CLASS:
                by_class[column[0]] += 1
                best.append(column)
        # The packer's answer stays possible, so the search always has one.
        self._columns = {column: self._columns[column] for column in [*sorted(packed), *best]}

    def _pick(self, wanted: Int) -> tuple[float, list[int]] | None:
        """Return the cost and how often each column is taken, or None where the search found nothing."""
        stock, limits = self._stock_matrix()
        with _quiet():
            answer: Any = milp(
                list(self._columns.values()),
                integrality=np.ones(len(self._columns)),
                bounds=Bounds(0, np.inf),
                constraints=[
                    LinearConstraint(self._matrix(), lb=wanted.astype(np.float64)),
                    LinearConstraint(stock, ub=np.array(limits, np.float64)),
                ],
                options={"node_limit": NODES * self._effort, "time_limit": SECONDS_MAX, "mip_rel_gap": GAP},
            )
        # Status 1 is a limit: of nodes or of seconds.
        self.is_timed_out = answer.status == 1 and "time" in str(answer.message).lower()
        if answer.x is None:
            return None
        taken = [round(value) for value in answer.x]
        costs = self._columns.values()
        return float(sum(cost * number for cost, number in zip(costs, taken, strict=True))), taken


@contextmanager
def _quiet() -> Iterator[None]:
    """Discard what the solver's own code prints to the standard output of the process."""
    sys.stdout.flush()
    kept_open, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept_open, 1)
        os.close(kept_open)
        os.close(nowhere)


def _stacked(*matrices: Any) -> Any:
    return vstack(matrices, format="csr")


def is_small(instance: Instance) -> bool:
    """Return whether the search is worth its effort."""
    return instance.pods <= PODS_MAX
