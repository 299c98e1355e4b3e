"""Packs pods the way Karpenter does: first-fit-decreasing, and the cheapest class that hosts the batch.

Pods come by cpu, then memory, both descending. They first take free room: machines that are held, and existing machines
that cost nothing more. Then machines are bought one after the other: the batch takes every remaining pod, in order, for
which some class still hosts the whole batch; of the classes that host it the one with the least price and expected
interruptions is bought. That equals first-fit over open batches, because a later batch never takes what an earlier one
has room for. Gangs are packed alone, in the domain where they cost least; strict spreads are split evenly over domains.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.quality.arrays import UNLIMITED, Bool, ClusterArrays, Int, pods_that_fit
from bench.quality.placement import even_split
from bench.quality.values import Cluster, Instance, Offer


@dataclass(frozen=True, slots=True)
class Bought:
    """One machine with the pods that it hosts."""

    #: Position in the offers.
    offer: int
    #: Pods by position of the shape.
    pods: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Purchase:
    """Machines for one cluster, in the order in which they were taken."""

    machines: tuple[Bought, ...]
    #: Price at the margin and expected interruptions.
    usd_per_hour: float
    #: Pods by position of the shape that no machine with stock left could take.
    unhosted: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Item:
    shape: int
    count: int
    #: Which classes may host it, (C,).
    allowed: Bool


class Packer:
    """Buys for one cluster from a stock that it lowers; several clusters share the stock."""

    def __init__(self, arrays: ClusterArrays, stock: Int) -> None:
        self._arrays = arrays
        self._stock = stock
        #: Without regard to prices: where each shape may run.
        self._allowed: Bool = (arrays.fits > 0) & ~(np.isinf(arrays.penalty)[:, None] & (arrays.probability > 0))

    def buy(self, counts: Int) -> Purchase:
        """Return machines for so many pods of each shape, and lower the stock by them."""
        arrays = self._arrays
        bought: list[Bought] = []
        left = counts.copy()
        for row in self._gang_rows(counts):
            bought += self._buy_gang(row, left)
        order = np.lexsort((-arrays.request[:, 1], -arrays.request[:, 0]))
        items: list[_Item] = []
        for shape in order:
            if left[shape] and arrays.row_of(int(shape)).same_key is None:
                items += self._items(int(shape), int(left[shape]))
        bought += self._pack(items, left)
        return Purchase(
            machines=tuple(bought),
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

    def _items(self, shape: int, count: int) -> list[_Item]:
        spread = self._arrays.row_of(shape).strict_spread
        if spread is None:
            return [_Item(shape, count, self._allowed[shape])]
        domains = self._arrays.domains(spread.key)
        masks = _masks(domains, self._allowed[shape] & (self._stock > 0))
        shares = even_split(count, len(masks), shape)
        return [
            _Item(shape, share, self._allowed[shape] & mask)
            for mask, share in zip(masks.values(), shares, strict=True)
            if share
        ]

    def _buy_gang(self, row: int, left: Int) -> list[Bought]:
        arrays = self._arrays
        key = arrays.cluster.rows[row].same_key
        assert key is not None, "a gang has a Same requirement"
        shapes = [int(s) for s in np.flatnonzero((arrays.row == row) & (left > 0))]
        shapes.sort(key=lambda s: (-int(arrays.request[s, 0]), -int(arrays.request[s, 1]), s))
        usable = np.logical_or.reduce(self._allowed[shapes]) & (self._stock > 0)
        best: tuple[float, list[Bought], Int] | None = None
        stock = self._stock.copy()
        for mask in _masks(arrays.domains(key), usable).values():
            self._stock[:] = stock
            trial = left.copy()
            found = self._pack([_Item(s, int(left[s]), self._allowed[s] & mask) for s in shapes], trial)
            cost = sum(self.cost(machine) for machine in found)
            if not trial[shapes].any() and (best is None or cost < best[0]):
                best = (cost, found, self._stock.copy())
        self._stock[:] = stock
        if best is None:
            return []
        self._stock[:] = best[2]
        left[shapes] = 0
        return best[1]

    def _pack(self, items: Sequence[_Item], left: Int) -> list[Bought]:
        """Take free machines first, then buy; lower `left` and the stock."""
        remaining = [item.count for item in items]
        bought = self._fill_free(items, remaining)
        first = 0
        while True:
            while first < len(items) and not remaining[first]:
                first += 1
            if first == len(items):
                break
            batch = self._batch(items, remaining, first)
            if batch is None:
                # No class with stock hosts this shape alone.
                first += 1
                continue
            bought.append(batch)
        for machine in bought:
            for shape, count in machine.pods.items():
                left[shape] -= count
        return bought

    def _fill_free(self, items: Sequence[_Item], remaining: list[int]) -> list[Bought]:
        """Fill existing machines that cost nothing: those with fewer dimensions first, so that GPUs are kept."""
        arrays = self._arrays
        dimensions = (arrays.supply > 0).sum(axis=1)
        free = [c for c, offer in enumerate(arrays.offers) if offer.is_existing and arrays.price[c] == 0]
        filled: list[Bought] = []
        for position in sorted(free, key=lambda c: (int(dimensions[c]), arrays.offers[c].id)):
            while self._stock[position] > 0 and any(remaining):
                pods = self._fill_one(position, items, remaining)
                if not pods:
                    break
                self._stock[position] -= 1
                filled.append(Bought(position, pods))
        return filled

    def _fill_one(self, position: int, items: Sequence[_Item], remaining: list[int]) -> dict[int, int]:
        room = [int(milli) for milli in self._arrays.supply[position]]
        pods: dict[int, int] = {}
        for index, item in enumerate(items):
            if not remaining[index] or not item.allowed[position]:
                continue
            wanted = self._arrays.request[item.shape].tolist()
            count = min(
                remaining[index],
                int(self._arrays.limit[item.shape]) - pods.get(item.shape, 0),
                *(have // want for have, want in zip(room, wanted, strict=True) if want),
            )
            if count > 0:
                remaining[index] -= count
                pods[item.shape] = pods.get(item.shape, 0) + count
                room = [have - want * count for have, want in zip(room, wanted, strict=True)]
        return pods

    def _batch(self, items: Sequence[_Item], remaining: list[int], first: int) -> Bought | None:
        """Take the next batch from `remaining`, or return None when no class with stock hosts its first pod."""
        arrays = self._arrays
        classes = np.flatnonzero(items[first].allowed & (self._stock > 0))
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
        chosen = int(classes[int(np.argmin(cost))])
        self._stock[chosen] -= 1
        return Bought(chosen, pods)


def _masks(domains: Sequence[str | None], usable: Bool) -> dict[str, Bool]:
    """Return which classes lie in each domain that has a usable class, domains in name order."""
    named = sorted({domain for domain, is_usable in zip(domains, usable, strict=True) if is_usable and domain})
    return {name: np.array([domain == name for domain in domains], np.bool_) for name in named}


def stock_of(offers: Sequence[Offer]) -> Int:
    """Return the stock of each class."""
    return np.array([min(offer.stock, UNLIMITED) for offer in offers], np.int64)


def pack(instance: Instance, clusters: Sequence[Cluster] | None = None) -> list[Purchase]:
    """Return the packer's fleet for each cluster, in their order, from one stock."""
    stock = stock_of(instance.offers)
    return [
        Packer(arrays, stock).buy(arrays.count)
        for cluster in (instance.clusters if clusters is None else clusters)
        for arrays in (ClusterArrays(cluster, instance.offers),)
    ]
