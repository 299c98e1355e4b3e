"""Packs pods onto fleets by first-fit-decreasing in several orders.

The orders are those that simple schedulers and packers use: pods by cpu, memory, largest share, sum of shares or the
scarcest dimension, with and without what few machines host first, on machines from the smallest or from the largest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from bigfleet.planner.core import Core
from bigfleet.planner.simulate import Fleet, Int

#: Keys by which parts are ordered (see `_sizes`); each with and without the parts first that few columns match, and
#: each with machines from the smallest and from the largest.
KEYS: Final = 5
#: The orders by how often they fit fleets that some order fits.
SEQUENCE: Final = (12, 4, 0, 14, 6, 16, 8, 2, 18, 10, 13, 15, 7, 1, 19, 3, 17, 5, 9, 11)
_BATCH: Final = 1 << 15
_KNOWN: Final = 4096
_SHARE_BITS: Final = 24


@dataclass(frozen=True, slots=True)
class Packed:
    """A packing of one fleet; M machines in the order of the fleet's columns."""

    #: Pods of each part on each machine, (P, M).
    on: Int
    #: Pods of each part without a place, (P).
    left: Int


class FirstFit:
    """Packs fleets of one core."""

    def __init__(self, core: Core) -> None:
        """Prepare the prices by which leftovers are compared."""
        self._core = core
        self._matches = core.matches & (core.may_claim | ~core.may_run)
        self._prices = np.where(core.may_claim, core.cost[None, :], 0).max(axis=1, initial=1)
        self._scheduler = None if core.as_scheduled is None else FirstFit(core.as_scheduled)
        self._ranks: dict[tuple[int, ...], tuple[tuple[list[int], Int], ...]] = {}
        self._supplies = [tuple(each) for each in core.supply.tolist()]
        self._orders: dict[tuple[Fleet, int], list[int]] = {}

    def order(self, fleet: Fleet, number: int) -> list[int]:
        """Return the parts in the order that a number stands for, for the machines of a fleet."""
        if (fleet, number) not in self._orders:
            if len(self._orders) > _KNOWN:
                self._orders.clear()
            columns = [c for c, _ in fleet]
            counts = np.array([n for _, n in fleet], np.int64)
            total = (self._core.supply[columns] * counts[:, None]).sum(axis=0)
            self._orders[fleet, number] = part_order(self._core, number, total, self._matches[:, columns] @ counts)
        return self._orders[fleet, number]

    def left(self, fleets: Sequence[Fleet], numbers: Sequence[int], like: Fleet | None = None) -> Int:
        """Return the pods of each part without a place, by fleet and order, (F, N, P).

        The orders of parts and machines suit the fleet `like`, which saves time, or each fleet itself.
        """
        core = self._core
        result = np.zeros((len(fleets), len(numbers), len(core.parts)), np.int64)
        size = max((sum(n for _, n in fleet) for fleet in fleets), default=1)
        step = max(1, _BATCH // (max(1, size) * len(numbers)))
        for at in range(0, len(fleets), step):
            some = fleets[at : at + step]
            if like is None:
                rows = [(fleet, number) for fleet in some for number in numbers]
                machines, orders = self._machines(rows), [self.order(*row) for row in rows]
            else:
                machines, orders = (
                    self._machines_like(some, numbers, like),
                    [self.order(like, n) for n in numbers] * len(some),
                )
            left, _ = core.kernels.place(core, machines, orders, False)
            result[at : at + len(some)] = left.reshape(len(some), len(numbers), -1)
        return result

    def least_left(self, fleets: Sequence[Fleet], numbers: Sequence[int], like: Fleet | None = None) -> Int:
        """Return the pods without a place, (F, P), in the order that leaves the cheapest ones."""
        left = self.left(fleets, numbers, like)
        chosen = (left @ self._prices).argmin(axis=1)
        result: Int = left[np.arange(len(fleets)), chosen]
        return result

    def fits(self, fleets: Sequence[Fleet], numbers: Sequence[int] = SEQUENCE) -> list[bool]:
        """Return whether some order places every pod, for each fleet: as claims, and as a scheduler may place them."""
        fits = [bool((left.sum(axis=1) == 0).any()) for left in self.left(fleets, numbers)]
        if self._scheduler is not None:
            fits = [each and self._scheduler.fits([fleet])[0] for each, fleet in zip(fits, fleets, strict=True)]
        return fits

    def pack(self, fleet: Fleet, numbers: Sequence[int] = SEQUENCE) -> Packed:
        """Return the packing of the order that leaves the fewest pods without a place, the first of equals.

        The orders are those of the fleet itself: sizes relative to its supply, matches among its machines.
        """
        found: Packed | None = None
        for number in numbers:
            left, on = self._core.kernels.place(
                self._core, self._machines([(fleet, number)]), [self.order(fleet, number)], True
            )
            if found is None or left.sum() < found.left.sum():
                found = Packed(self._unsorted(fleet, number, on[0]), left[0])
            if not found.left.any():
                break
        assert found is not None, "there is at least one order"
        return found

    def _rank(self, fleet: Fleet, number: int) -> tuple[list[int], Int]:
        """Return the place of each column by size, and the columns by size, in the direction of a number.

        Ascending for numbers with bit 1, descending for the others. Size is the sum over the dimensions of the supply
        relative to the largest machine of the fleet.
        """
        largest = tuple(map(max, zip(*(self._supplies[c] for c, _ in fleet), strict=True)))
        if largest not in self._ranks:
            sizes = fractions(self._core.supply, np.array(largest, np.int64)).sum(axis=1)
            orders = (np.argsort(-sizes, kind="stable"), np.argsort(sizes, kind="stable"))
            self._ranks[largest] = tuple((np.argsort(each, kind="stable").tolist(), each) for each in orders)
        return self._ranks[largest][(number & 2) // 2]

    def _sorted(self, fleet: Fleet, number: int) -> list[tuple[int, int]]:
        """Return a fleet's columns with counts in the direction of a number."""
        rank, _ = self._rank(fleet, number)
        return sorted(fleet, key=lambda each: rank[each[0]])

    def _machines(self, rows: Sequence[tuple[Fleet, int]]) -> Int:
        size = max(1, *(sum(n for _, n in fleet) for fleet, _ in rows))
        columns = np.full((len(rows), size), len(self._core.columns), np.int64)
        for r, (fleet, number) in enumerate(rows):
            pairs = self._sorted(fleet, number)
            machines = np.repeat(np.array([c for c, _ in pairs], np.int64), np.array([n for _, n in pairs], np.int64))
            columns[r, : len(machines)] = machines
        return columns

    def _machines_like(self, fleets: Sequence[Fleet], numbers: Sequence[int], like: Fleet) -> Int:
        """Return the machines of each fleet in each order, sorted by the sizes that suit one of them."""
        counts = np.zeros((len(fleets), len(self._core.columns)), np.int64)
        for f, fleet in enumerate(fleets):
            for column, count in fleet:
                counts[f, column] = count
        total = counts.sum(axis=1)
        size = max(1, int(total.max(initial=0)))
        columns = np.full((len(fleets), len(numbers), size), len(self._core.columns), np.int64)
        is_machine = np.arange(size)[None, :] < total[:, None]
        for n, number in enumerate(numbers):
            _, order = self._rank(like, number)
            columns[:, n][is_machine] = np.repeat(np.tile(order, len(fleets)), counts[:, order].ravel())
        return columns.reshape(len(fleets) * len(numbers), size)

    def _unsorted(self, fleet: Fleet, number: int, on: Int) -> Int:
        starts, at = {}, 0
        for column, count in self._sorted(fleet, number):
            starts[column] = at
            at += count
        places = [starts[column] + n for column, count in fleet for n in range(count)]
        result: Int = on[:, places]
        return result


def part_order(core: Core, number: int, total: Int, hosts: Int) -> list[int]:
    """Return parts in the order of a number: by a size descending, for even numbers those with few hosts first."""
    shares = fractions(core.request, total)
    cpu = 0
    memory = min(1, core.request.shape[1] - 1)
    match number // 4 % KEYS:
        case 0:
            size = shares.max(axis=1, initial=0)
        case 1:
            size = core.request[:, cpu]
        case 2:
            size = core.request[:, memory]
        case 3:
            size = shares.sum(axis=1)
        case _:
            size = shares[:, int((shares * core.count[:, None]).sum(axis=0).argmax())]
    first = hosts if number & 1 == 0 else np.zeros(len(size), np.int64)
    rows = np.array([core.problem.shapes[part.shape].row for part in core.parts], np.int64)
    return [int(p) for p in np.lexsort((np.arange(len(size)), rows, -size, first))]


def fractions(amounts: Int, wholes: Int) -> Int:
    """Return amounts (N, D) as fractions of wholes (D), in parts of 2^24."""
    result = np.zeros_like(amounts)
    for d, whole in enumerate(int(each) for each in wholes):
        shift = max(0, max(whole, int(amounts[:, d].max(initial=0))).bit_length() - (62 - _SHARE_BITS))
        result[:, d] = ((amounts[:, d] >> shift) << _SHARE_BITS) // max(1, whole >> shift)
    return result
