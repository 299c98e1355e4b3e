"""Bounds the cost of any answer from below, by a linear program in which machines are divisible and shared (HiGHS).

Variables: machines of each class, and pods of each shape on each class. Pods cost their expected interruptions, a
machine costs its price at the margin. Constraints: every pod that some machine hosts has a place; no dimension of a
class is overfull; no class hosts more pods of a shape than its machines would one by one, `max_per_machine` included.
Relaxed, so that the bound stays below every answer: whole machines, domains of gangs, strict spreads, and the stock of
classes that can be created. Existing machines have their stock.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array

from bench.quality.values import Instance
from bigfleet.sim.packing.arrays import Bool, ClusterArrays, Int, Real

#: The constraint on pods one by one is left out where whole pods fill at least this share of an empty machine.
_WELL_FILLED: Final = 0.95
_TOLERANCE: Final = 1e-9


class BoundFault(Exception):
    """The solver found no answer; the message names the instance and says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Classes:
    """Classes of one cluster that are worth looking at; K of them."""

    #: Position of one class of each group in the offers, (K,).
    position: Int
    #: Machines in each group, (K,).
    stock: Int
    #: Whether the group's machines are there and limited, (K,).
    is_existing: Bool
    #: Pods of each shape that one machine hosts, limits included, (S, K).
    fits: Int


def usable(arrays: ClusterArrays) -> Bool:
    """Return where each shape may run, pinned rows on machines without interruptions alone, (S, C)."""
    exposed = np.isinf(arrays.penalty)[:, None] & (arrays.probability > 0)
    result: Bool = (arrays.fits > 0) & ~exposed
    return result


def grouped(arrays: ClusterArrays) -> Classes:
    """Return the classes with equal ones counted together; classes that host no shape are left out."""
    may = usable(arrays)
    fits = np.where(may, np.minimum(arrays.fits, arrays.limit[:, None]), 0)
    groups: dict[object, int] = {}
    positions: list[int] = []
    stock: list[int] = []
    for position, offer in enumerate(arrays.offers):
        if not may[:, position].any():
            continue
        key = (
            offer.is_existing,
            arrays.supply[position].tobytes(),
            float(arrays.price[position]),
            float(arrays.probability[position]),
            may[:, position].tobytes(),
        )
        place = groups.setdefault(key, len(stock))
        if place == len(stock):
            stock.append(0)
            positions.append(position)
        stock[place] += offer.stock
    return Classes(
        position=np.array(positions, np.int64),
        stock=np.array(stock, np.int64),
        is_existing=np.array([arrays.offers[p].is_existing for p in positions], np.bool_),
        fits=fits[:, positions].reshape(len(arrays.keys), len(positions)),
    )


def kept(arrays: ClusterArrays, classes: Classes, *, is_divisible: bool) -> Classes:
    """Return the classes without those that another one replaces at no higher cost.

    One machine is replaced by one machine of the other class, or by any fraction or number when machines are divisible.
    Only classes that can be created replace others: their stock is not limited.
    """
    position = classes.position
    supply = arrays.supply[position].astype(np.float64)
    price, probability = arrays.price[position], arrays.probability[position]
    fits = classes.fits.T.astype(np.float64)
    # Pods that no class hosts say nothing about any class.
    share = _shares(arrays, position)
    alive = np.ones(len(position), np.bool_)
    for other in np.argsort(price, kind="stable"):
        if not alive[other] or classes.is_existing[other]:
            continue
        with np.errstate(divide="ignore", invalid="ignore"):
            factor = np.maximum(_most(supply / supply[other]), _most(fits / fits[other]))
        if not is_divisible:
            factor = np.where(factor <= 1 + _TOLERANCE, 1.0, np.inf)
        cheaper = factor * price[other] <= price * (1 + _TOLERANCE)
        calmer = (probability[other] * share[other] <= probability[:, None] * share + _TOLERANCE).all(axis=1)
        replaced = alive & cheaper & calmer & ~classes.is_existing
        replaced[other] = False
        alive &= ~replaced
    return Classes(
        position=position[alive],
        stock=classes.stock[alive],
        is_existing=classes.is_existing[alive],
        fits=classes.fits[:, alive],
    )


def _most(ratio: Real) -> Real:
    """Return the largest ratio of each line; 0 ÷ 0 asks for nothing."""
    result: Real = np.nan_to_num(ratio, nan=0.0, posinf=np.inf).max(axis=1, initial=0.0)
    return result


def _shares(arrays: ClusterArrays, position: Int) -> Real:
    """Return the share that one pod takes of a machine of each class, (K, S)."""
    supply = np.maximum(arrays.supply[position].astype(np.float64), 1.0)
    shares: Real = (arrays.request[None] / supply[:, None]).max(axis=2, initial=0.0)
    return shares


def lower_bound(instance: Instance) -> float:
    """Return what any answer that hosts every pod that can be hosted costs at least, $/h. Raises BoundFault."""
    arrays = [ClusterArrays(cluster, instance.offers) for cluster in instance.clusters]
    if not any(offer.marginal_usd_per_hour for offer in instance.offers):
        return 0.0
    if any(offer.is_existing for offer in instance.offers):
        return _solved(instance, arrays)
    return sum(_solved(instance, [one]) for one in arrays)


def _solved(instance: Instance, clusters: Sequence[ClusterArrays]) -> float:
    program = _Program()
    for arrays in clusters:
        program.add(arrays)
    return program.solve(instance.name)


class _Program:
    """Collects the sparse matrices of the linear program; clusters share existing machines alone."""

    def __init__(self) -> None:
        self._cost: list[float] = []
        self._upper: list[tuple[int, int, float]] = []
        self._upper_right: list[float] = []
        self._equal: list[tuple[int, int, float]] = []
        self._equal_right: list[float] = []
        #: Row of the stock constraint of an existing class, by its first position in the offers.
        self._stock_rows: dict[int, int] = {}

    def add(self, arrays: ClusterArrays) -> None:
        """Add one cluster."""
        classes = kept(arrays, _existing_apart(arrays), is_divisible=True)
        first = len(self._cost)
        self._cost += arrays.price[classes.position].tolist()
        for place in np.flatnonzero(classes.is_existing).tolist():
            row = self._stock_rows.get(int(classes.position[place]))
            if row is None:
                row = self._stock_rows[int(classes.position[place])] = self._row(float(classes.stock[place]))
            self._upper.append((row, first + place, 1.0))
        room = [[self._row(0.0) for _ in arrays.dimensions] for _ in classes.position]
        for place, position in enumerate(classes.position.tolist()):
            for dimension, milli in enumerate(arrays.supply[position].tolist()):
                self._upper.append((room[place][dimension], first + place, -float(milli > 0)))
        for shape in range(len(arrays.keys)):
            self._add_shape(arrays, classes, shape, first, room)

    def _add_shape(
        self, arrays: ClusterArrays, classes: Classes, shape: int, first: int, room: Sequence[Sequence[int]]
    ) -> None:
        places = np.flatnonzero(classes.fits[shape] > 0)
        count = int(arrays.count[shape])
        if not len(places) or not count:
            return
        one = np.ones(len(places), np.int64)
        extra = arrays.interruption_cost(shape, one, classes.position[places])
        self._equal_right.append(1.0)
        for place, cost in zip(places.tolist(), extra.tolist(), strict=True):
            # The variable is the fraction of the shape's pods, so that all numbers are near 1.
            column = len(self._cost)
            self._cost.append(cost * count)
            self._equal.append((len(self._equal_right) - 1, column, 1.0))
            supply = np.maximum(arrays.supply[classes.position[place]], 1)
            share = arrays.request[shape] / supply
            for dimension in np.flatnonzero(share).tolist():
                self._upper.append((room[place][dimension], column, float(share[dimension]) * count))
            fits = int(classes.fits[shape, place])
            if fits * float(share.max()) < _WELL_FILLED:
                row = self._row(0.0)
                self._upper += [(row, column, count / fits), (row, first + place, -1.0)]

    def _row(self, right: float) -> int:
        self._upper_right.append(right)
        return len(self._upper_right) - 1

    def solve(self, name: str) -> float:
        """Return the least cost."""
        if not self._equal_right:
            return 0.0
        columns = len(self._cost)
        answer: Any = linprog(
            self._cost,
            A_ub=_matrix(self._upper, len(self._upper_right), columns),
            b_ub=self._upper_right,
            A_eq=_matrix(self._equal, len(self._equal_right), columns),
            b_eq=self._equal_right,
            method="highs",
        )
        if answer.status != 0:
            raise BoundFault(f"{name}: the linear program was not solved ({' '.join(str(answer.message).split())})")
        return float(answer.fun)


def _existing_apart(arrays: ClusterArrays) -> Classes:
    """Return grouped classes with each existing class alone, so that clusters name the same stock."""
    groups = grouped(arrays)
    fits = np.where(usable(arrays), np.minimum(arrays.fits, arrays.limit[:, None]), 0)
    existing = [p for p, offer in enumerate(arrays.offers) if offer.is_existing and fits[:, p].any()]
    created = groups.position[~groups.is_existing].tolist()
    position = np.array([*existing, *created], np.int64)
    return Classes(
        position=position,
        stock=np.array([arrays.offers[p].stock for p in position], np.int64),
        is_existing=np.array([arrays.offers[p].is_existing for p in position], np.bool_),
        fits=fits[:, position].reshape(len(arrays.keys), len(position)),
    )


def _matrix(entries: Sequence[tuple[int, int, float]], rows: int, columns: int) -> Any:
    if not entries:
        return csr_array((rows, columns))
    row, column, value = zip(*entries, strict=True)
    return csr_array((value, (row, column)), shape=(rows, columns))
