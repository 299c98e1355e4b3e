"""Packs pods onto fleets by first-fit-decreasing in several orders.

The orders are those that simple schedulers and packers use: pods by cpu, memory, largest share, sum of shares or the
scarcest dimension, with and without what few machines host first, on machines from the smallest or from the largest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from bigfleet.planner.arena import Fleet, Int
from bigfleet.planner.core import Core
from bigfleet.planner.hashing import queue_ranks

#: Keys by which parts are ordered (see `_sizes`); each with and without the parts first that few columns match, and
#: each with machines from the smallest and from the largest.
KEYS: Final = 5
#: The orders by how often they fit fleets that some order fits.
SEQUENCE: Final = (12, 4, 0, 14, 6, 16, 8, 2, 18, 10, 13, 15, 7, 1, 19, 3, 17, 5, 9, 11)
#: Orders that put the parts with the highest penalties first, on the machines that are interrupted least.
CAREFUL: Final = (20, 22)
#: Orders that have to place every pod of a fleet.
PLACING: Final = 4
_KNOWN: Final = 4096
_SHARE_BITS: Final = 24
_PRICE_MAX: Final = 1 << 38


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
        #: What leftovers are compared by, (P).
        self.prices = np.where(core.may_claim, np.minimum(core.cost, _PRICE_MAX)[None, :], 0).max(axis=1, initial=1)
        #: The same for the core as the scheduler sees it; None where that is no difference.
        self.scheduler = None if core.as_scheduled is None else FirstFit(core.as_scheduled)
        self._ranks: dict[tuple[int, ...], tuple[list[int], ...]] = {}
        self._last_ranks: tuple[Fleet, tuple[list[int], ...]] | None = None
        self._supplies = [tuple(each) for each in core.supply.tolist()]
        self._orders: dict[tuple[Fleet, int], list[int]] = {}
        self._last: tuple[Fleet, PartSizes] | None = None

    def order(self, fleet: Fleet, number: int) -> list[int]:
        """Return the parts in the order that a number stands for, for the machines of a fleet."""
        if (fleet, number) not in self._orders:
            if len(self._orders) > _KNOWN:
                self._orders.clear()
            self._orders[fleet, number] = self._measured(fleet).order(number)
        return self._orders[fleet, number]

    def _measured(self, fleet: Fleet) -> "PartSizes":
        """Return the sizes of the parts on a fleet; the last one asked for is at hand."""
        if self._last is None or self._last[0] != fleet:
            columns = [c for c, _ in fleet]
            counts = np.array([n for _, n in fleet], np.int64)
            # The supply of many large machines does not fit 64 bits.
            total = [sum(n * self._supplies[c][d] for c, n in fleet) for d in range(self._core.supply.shape[1])]
            self._last = fleet, PartSizes(self._core, total, self._matches[:, columns] @ counts)
        return self._last[1]

    def least_left(self, fleets: Sequence[Fleet], numbers: Sequence[int], orders: int = 1) -> Int:
        """Return the pods without a place, (F, P), in the order that leaves the cheapest ones.

        With several `orders` it is the worst of so many best ones: where it leaves none, so many orders place all.
        """
        core = self._core
        result = np.zeros((len(fleets), len(numbers), len(core.parts)), np.int64)
        for f, fleet in enumerate(fleets):
            machines = self._machines([(fleet, number) for number in numbers])
            result[f], _ = core.kernels.place(core, machines, [self.order(fleet, number) for number in numbers], False)
        chosen = np.argsort(result @ self.prices, axis=1, kind="stable")[:, orders - 1]
        least: Int = result[np.arange(len(fleets)), chosen]
        return least

    def fits(self, fleet: Fleet, least: int = PLACING) -> bool:
        """Return whether so many orders place every pod: as claims, and as a scheduler may place them.

        A single order may do so by luck, because of how it breaks ties; another packer breaks them otherwise.
        """
        placing = 0
        for first in range(0, len(SEQUENCE), PLACING):
            placing += len(self.placing(fleet, SEQUENCE[first : first + PLACING]))
            if placing >= least:
                return self.scheduler is None or self.scheduler.fits(fleet, least)
            if placing + len(SEQUENCE) - first - PLACING < least:
                break
        return False

    def placing(self, fleet: Fleet, numbers: Sequence[int] = SEQUENCE) -> list[int]:
        """Return the orders that place every pod as claims."""
        orders = [self.order(fleet, number) for number in numbers]
        left, _ = self._core.kernels.place(self._core, self._machines([(fleet, n) for n in numbers]), orders, False)
        return [number for number, rest in zip(numbers, left, strict=True) if not rest.any()]

    def pack(self, fleet: Fleet, numbers: Sequence[int] = SEQUENCE) -> Packed:
        """Return the packing of the order that leaves the fewest pods without a place, the first of equals.

        The orders are those of the fleet itself: sizes relative to its supply, matches among its machines. Where
        interruptions cost something, all orders are tried and of equals the one counts in which they cost least.
        """
        core = self._core
        is_risky = any(core.risk[c] for c, _ in fleet)
        found: tuple[tuple[int, int], Packed] | None = None
        for number in (*CAREFUL, *numbers) if is_risky else numbers:
            left, on = core.kernels.place(core, self._machines([(fleet, number)]), [self.order(fleet, number)], True)
            packed = Packed(self._unsorted(fleet, number, on[0]), left[0])
            rank = (int(left.sum()), core.interruptions(fleet, packed.on) if is_risky else 0)
            if found is None or rank < found[0]:
                found = rank, packed
            if not is_risky and not left.any():
                break
        assert found is not None, "there is at least one order"
        return found[1]

    def ranks(self, fleet: Fleet, number: int) -> list[int]:
        """Return the place of each column by size, as suits a fleet, in the direction of a number.

        Ascending for numbers with bit 1, descending for the others. Size is the sum over the dimensions of the supply
        relative to the largest machine of the fleet. Many numbers are asked for one fleet in a row.
        """
        if self._last_ranks is None or self._last_ranks[0] != fleet:
            largest = tuple(map(max, zip(*(self._supplies[c] for c, _ in fleet), strict=True)))
            if largest not in self._ranks:
                sizes = fractions(self._core.supply, np.array(largest, np.int64)).sum(axis=1)
                orders = (np.argsort(-sizes, kind="stable"), np.argsort(sizes, kind="stable"))
                self._ranks[largest] = tuple(np.argsort(each, kind="stable").tolist() for each in orders)
            self._last_ranks = fleet, self._ranks[largest]
        return self._last_ranks[1][(number & 2) // 2]

    def _sorted(self, fleet: Fleet, number: int) -> list[tuple[int, int]]:
        """Return a fleet's columns with counts in the direction of a number."""
        rank = self.ranks(fleet, number)
        if number in CAREFUL:
            return sorted(fleet, key=lambda each: (int(self._core.risk[each[0]]), rank[each[0]]))
        return sorted(fleet, key=lambda each: rank[each[0]])

    def _machines(self, rows: Sequence[tuple[Fleet, int]]) -> Int:
        size = max(1, *(sum(n for _, n in fleet) for fleet, _ in rows))
        columns = np.full((len(rows), size), len(self._core.columns), np.int64)
        for r, (fleet, number) in enumerate(rows):
            pairs = self._sorted(fleet, number)
            machines = np.repeat(np.array([c for c, _ in pairs], np.int64), np.array([n for _, n in pairs], np.int64))
            columns[r, : len(machines)] = machines
        return columns

    def _unsorted(self, fleet: Fleet, number: int, on: Int) -> Int:
        starts, at = {}, 0
        for column, count in self._sorted(fleet, number):
            starts[column] = at
            at += count
        places = [starts[column] + n for column, count in fleet for n in range(count)]
        result: Int = on[:, places]
        return result


class PartSizes:
    """The sizes of a core's parts by which the orders sort them."""

    def __init__(self, core: Core, total: Sequence[int], hosts: Int) -> None:
        """Measure the parts on a fleet with `total` supply, of which `hosts` machines match each part, (P)."""
        shares = fractions(core.request, total)
        memory = min(1, core.request.shape[1] - 1)
        scarcest = int((shares * core.count[:, None]).sum(axis=0).argmax())
        largest, whole = shares.max(axis=1, initial=0), shares.sum(axis=1)
        self._sizes = (largest, core.request[:, 0], core.request[:, memory], whole, shares[:, scarcest])
        self._penalty, self._hosts = core.penalty, hosts

    def order(self, number: int) -> list[int]:
        """Return the parts in the order of a number: by a size descending; for even ones those with few hosts first."""
        size = self._sizes[number // 4 % KEYS]
        if number in CAREFUL:
            first = -self._penalty
        else:
            first = self._hosts if number & 1 == 0 else np.zeros(len(size), np.int64)
        # Each order breaks ties in its own way: many pods are equal in what it looks at, and a fleet that packs in one
        # arrangement of them alone packs by luck.
        order: list[int] = np.lexsort((queue_ranks(len(size), number), -size, first)).tolist()
        return order


def fractions(amounts: Int, wholes: Int | Sequence[int]) -> Int:
    """Return amounts (N, D) as fractions of wholes (D), in parts of 2^24."""
    result = np.zeros_like(amounts)
    for d, whole in enumerate(int(each) for each in wholes):
        shift = max(0, max(whole, int(amounts[:, d].max(initial=0))).bit_length() - (62 - _SHARE_BITS))
        result[:, d] = ((amounts[:, d] >> shift) << _SHARE_BITS) // max(1, whole >> shift)
    return result
