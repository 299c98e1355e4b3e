"""Packs pods the way Karpenter does: first-fit-decreasing, and the cheapest class that hosts the batch.

Pods come by cpu, then memory, both descending. They first take existing machines that cost nothing more. Then machines
are bought one after the other: the batch takes every remaining pod, in order, for which some class still hosts the
whole batch; of the classes that host it the one with the least price and expected interruptions is bought. That equals
first-fit over open batches, because a later batch never takes what an earlier one has room for.

As a careful user of node pools would set it up, there are three passes, each of which first fills the room that the
passes before left: pods that ask for GPUs; pods that must not be interrupted, or had better not be; all others.
Machines with GPUs are bought for the first pass alone. Gangs come before all, each in the domain where it costs least;
strict spreads are split evenly over domains.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from bigfleet.sim.packing.arrays import UNLIMITED, Bool, ClusterArrays, Int, even_split, pods_that_fit
from bigfleet.sim.packing.values import CPU, MEMORY, PODS, Bought, PackingCluster, PackingOffer, Purchase

#: Resources that every machine has.
_COMMON: Final = frozenset({CPU, MEMORY, PODS, "ephemeral-storage"})


@dataclass(frozen=True, slots=True)
class _Item:
    shape: int
    count: int
    #: Which classes may host it, (C,).
    allowed: Bool


@dataclass(slots=True)
class _Open:
    """A machine that has been taken, with the room that is left."""

    offer: int
    room: list[int]
    pods: dict[int, int]


@dataclass(frozen=True, slots=True)
class _Found:
    """A purchase, and the stock that it leaves."""

    purchase: Purchase
    stock: Int

    @property
    def rank(self) -> tuple[int, float]:
        """Pods left over, then cost: the lower the better."""
        return sum(self.purchase.unhosted.values()), self.purchase.usd_per_hour


class Packer:
    """Buys for one cluster from a stock that it lowers; several clusters share the stock."""

    def __init__(self, arrays: ClusterArrays, stock: Int) -> None:
        self._arrays = arrays
        self._stock = stock
        pinned = np.isinf(arrays.penalty)[:, None]
        self._allowed: Bool = (arrays.fits > 0) & ~(pinned & (arrays.probability > 0))
        #: Classes with a resource that most pods do not ask for, such as GPUs.
        self._is_special: Bool = np.array([len(offer.allocatable.keys() - _COMMON) > 0 for offer in arrays.offers])
        special = [place for place, name in enumerate(arrays.dimensions) if name not in _COMMON]
        #: Shapes that ask for such a resource.
        self._wants_special: Bool = np.any(arrays.request[:, special] > 0, axis=1)
        self._price_order = np.lexsort((-arrays.request[:, 1], -arrays.request[:, 0]))

    def buy(self, counts: Int) -> Purchase:
        """Return machines for so many pods of each shape, and lower the stock by them.

        Two choices of a careful user are tried, and the cheapest purchase with the fewest pods left over is returned:
        from which penalty on rows are kept off machines that may be interrupted; and how many of the types with GPUs,
        the dearest of those that would be bought first, are left out of the pools.
        """
        stock = self._stock.copy()
        best: _Found | None = None
        for keeps_off in self._penalty_limits(counts):
            left_out: Bool = np.zeros(len(stock), np.bool_)
            found = self._found(counts, keeps_off, stock, left_out)
            last = found
            while (dearest := self._dearest_special(last.purchase)) is not None:
                left_out = left_out | dearest
                last = self._found(counts, keeps_off, stock, left_out)
                if last.rank[0] > found.rank[0]:
                    break
                found = min(found, last, key=lambda one: one.rank)
            if best is None or found.rank < best.rank:
                best = found
        assert best is not None, "there is at least one way"
        self._stock[:] = best.stock
        return best.purchase

    def _found(self, counts: Int, keeps_off: float, stock: Int, left_out: Bool) -> "_Found":
        self._stock[:] = np.where(left_out, 0, stock)
        purchase = self._buy(counts, keeps_off)
        return _Found(purchase, np.where(left_out, stock, self._stock))

    def _dearest_special(self, purchase: Purchase) -> Bool | None:
        """Return the classes of the dearest type with GPUs that was bought, or None where none was."""
        offers = self._arrays.offers
        bought = {machine.offer for machine in purchase.machines if self._is_special[machine.offer]}
        bought = {offer for offer in bought if not offers[offer].is_existing}
        if not bought:
            return None
        dearest = max(bought, key=lambda offer: (offers[offer].price_usd_per_hour, offers[offer].instance_type))
        kind = offers[dearest].instance_type
        return np.array([offer.instance_type == kind and not offer.is_existing for offer in offers], np.bool_)

    def _penalty_limits(self, counts: Int) -> list[float]:
        """Return the penalties from which on rows are kept off machines that may be interrupted; infinite first."""
        arrays = self._arrays
        if not (arrays.probability > 0).any():
            return [np.inf]
        wanted = {float(penalty) for penalty in arrays.penalty[counts > 0] if penalty > 0}
        return sorted({np.inf, *wanted}, reverse=True)

    def _buy(self, counts: Int, keeps_off: float) -> Purchase:
        arrays = self._arrays
        left = counts.copy()
        taken: list[_Open] = []
        for row in self._gang_rows(counts):
            taken += self._buy_gang(row, left)
        exposed = arrays.penalty >= keeps_off
        passes: list[list[_Item]] = [[], [], []]
        for shape in self._price_order.tolist():
            if left[shape] and arrays.row_of(shape).same_key is None:
                number = 0 if self._wants_special[shape] else 1 if exposed[shape] else 2
                allowed = self._allowed[shape]
                if exposed[shape]:
                    allowed = allowed & (arrays.probability == 0)
                passes[number] += self._items(shape, int(left[shape]), allowed)
        for items in passes:
            remaining = [item.count for item in items]
            self._fill(taken, items, remaining)
            taken += self._pack(items, remaining)
            for item, still in zip(items, remaining, strict=True):
                left[item.shape] -= item.count - still
        bought = tuple(Bought(machine.offer, machine.pods) for machine in taken)
        return Purchase(
            machines=bought,
            usd_per_hour=float(sum(self.cost(machine) for machine in bought)),
            unhosted={int(shape): int(left[shape]) for shape in np.flatnonzero(left)},
        )

    def cost(self, machine: Bought) -> float:
        """Return the price at the margin and the expected interruptions of a machine, $/h."""
        classes = np.array([machine.offer], np.int64)
        extra = sum(
            float(self._arrays.interruption_cost(shape, np.array([count], np.int64), classes)[0])
            for shape, count in machine.pods.items()
        )
        return float(self._arrays.price[machine.offer]) + extra

    def _gang_rows(self, counts: Int) -> list[int]:
        """Return the gangs' rows, higher priority first, then larger first."""
        arrays = self._arrays
        rows = {int(arrays.row[s]) for s in np.flatnonzero(counts) if arrays.row_of(int(s)).same_key is not None}
        return sorted(
            rows,
            key=lambda row: (-arrays.cluster.rows[row].priority, -int(counts[arrays.row == row].sum()), row),
        )

    def _items(self, shape: int, count: int, allowed: Bool) -> list[_Item]:
        spread = self._arrays.row_of(shape).strict_spread
        if spread is None:
            return [_Item(shape, count, allowed)]
        masks = _masks(self._arrays.domains(spread.key), allowed & (self._stock > 0))
        shares = even_split(count, len(masks), shape)
        return [
            _Item(shape, share, allowed & mask) for mask, share in zip(masks.values(), shares, strict=True) if share
        ]

    def _buy_gang(self, row: int, left: Int) -> list[_Open]:
        arrays = self._arrays
        key = arrays.cluster.rows[row].same_key
        assert key is not None, "a gang has a Same requirement"
        shapes = [s for s in self._price_order.tolist() if arrays.row[s] == row and left[s]]
        usable = np.logical_or.reduce(self._allowed[shapes]) & (self._stock > 0)
        best: tuple[float, list[_Open], Int] | None = None
        stock = self._stock.copy()
        for mask in _masks(arrays.domains(key), usable).values():
            self._stock[:] = stock
            items = [_Item(s, int(left[s]), self._allowed[s] & mask) for s in shapes]
            remaining = [item.count for item in items]
            found = self._pack(items, remaining)
            cost = sum(self.cost(Bought(machine.offer, machine.pods)) for machine in found)
            if not any(remaining) and (best is None or cost < best[0]):
                best = (cost, found, self._stock.copy())
        self._stock[:] = stock
        if best is None:
            return []
        self._stock[:] = best[2]
        left[shapes] = 0
        return best[1]

    def _pack(self, items: Sequence[_Item], remaining: list[int]) -> list[_Open]:
        """Take free machines first, then buy; lower `remaining` and the stock."""
        taken = self._take_free(items, remaining)
        for first in range(len(items)):
            while remaining[first]:
                batch = self._batch(items, remaining, first)
                if batch is None:
                    # No class with stock hosts this shape alone.
                    break
                taken.append(batch)
        return taken

    def _take_free(self, items: Sequence[_Item], remaining: list[int]) -> list[_Open]:
        """Fill existing machines that cost nothing: those with fewer resources first, so that GPUs are kept."""
        arrays = self._arrays
        free = [c for c, offer in enumerate(arrays.offers) if offer.is_existing and arrays.price[c] == 0]
        taken: list[_Open] = []
        for position in sorted(free, key=lambda c: (len(arrays.offers[c].allocatable), arrays.offers[c].id)):
            while self._stock[position] > 0 and any(remaining):
                machine = _Open(position, arrays.supply[position].tolist(), {})
                self._fill([machine], items, remaining)
                if not machine.pods:
                    break
                self._stock[position] -= 1
                taken.append(machine)
        return taken

    def _fill(self, machines: Sequence[_Open], items: Sequence[_Item], remaining: list[int]) -> None:
        """Put what fits into the room that is left, pod order within machine order."""
        arrays = self._arrays
        wanted = [arrays.request[item.shape].tolist() for item in items]
        for machine in machines:
            for index, item in enumerate(items):
                if not remaining[index] or not item.allowed[machine.offer]:
                    continue
                count = min(
                    remaining[index],
                    int(arrays.limit[item.shape]) - machine.pods.get(item.shape, 0),
                    *(have // want for have, want in zip(machine.room, wanted[index], strict=True) if want),
                )
                if count > 0:
                    remaining[index] -= count
                    machine.pods[item.shape] = machine.pods.get(item.shape, 0) + count
                    machine.room = [have - want * count for have, want in zip(machine.room, wanted[index], strict=True)]

    def _batch(self, items: Sequence[_Item], remaining: list[int], first: int) -> _Open | None:
        """Take the next batch from `remaining`, or return None when no class with stock hosts its first pod."""
        arrays = self._arrays
        usable = items[first].allowed & (self._stock > 0)
        if not self._wants_special[items[first].shape] and (usable & ~self._is_special).any():
            usable = usable & ~self._is_special
        classes = np.flatnonzero(usable)
        if not len(classes):
            return None
        free = arrays.supply[classes].copy()
        pods: dict[int, int] = {}
        for index in range(first, len(items)):
            if not remaining[index]:
                continue
            item = items[index]
            room = np.where(item.allowed[classes], pods_that_fit(free, arrays.request[item.shape]), 0)
            limit = int(arrays.limit[item.shape]) - pods.get(item.shape, 0)
            count = min(int(room.max()), remaining[index], limit)
            if count <= 0:
                continue
            hosts = room >= count
            classes, free = classes[hosts], free[hosts] - count * arrays.request[item.shape]
            pods[item.shape] = pods.get(item.shape, 0) + count
            remaining[index] -= count
        cost = arrays.price[classes].copy()
        for shape, count in pods.items():
            cost += arrays.interruption_cost(shape, np.full(len(classes), count, np.int64), classes)
        chosen = int(np.argmin(cost))
        self._stock[classes[chosen]] -= 1
        return _Open(int(classes[chosen]), free[chosen].tolist(), pods)


def _masks(domains: Sequence[str | None], usable: Bool) -> dict[str, Bool]:
    """Return which classes lie in each domain that has a usable class, domains in name order."""
    named = sorted({domain for domain, is_usable in zip(domains, usable, strict=True) if is_usable and domain})
    return {name: np.array([domain == name for domain in domains], np.bool_) for name in named}


def stock_of(offers: Sequence[PackingOffer]) -> Int:
    """Return the stock of each class."""
    return np.array([min(offer.stock, UNLIMITED) for offer in offers], np.int64)


def pack(offers: Sequence[PackingOffer], clusters: Sequence[PackingCluster]) -> list[Purchase]:
    """Return the packer's fleet for each cluster, in their order, from one stock."""
    stock = stock_of(offers)
    return [
        Packer(arrays, stock).buy(arrays.count) for cluster in clusters for arrays in (ClusterArrays(cluster, offers),)
    ]
