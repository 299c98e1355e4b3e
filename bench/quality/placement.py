"""Places pods on given machines by first-fit-decreasing in several orders, and keeps the best.

Pods of one shape are equal, so first-fit of a whole shape is one pass over the machines: each takes what fits until no
pod is left. Gangs come first, the largest first, each in the domain with the least room that holds it; a strict spread
is split evenly over the domains that have matching machines. Both are stricter than needed, never laxer.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from bigfleet.sim.packing.arrays import Bool, ClusterArrays, Int, Real, even_split, pods_that_fit

#: Names of the orders of pods; each is tried with machines by ascending and by descending size.
POD_ORDERS: Final = ("cpu", "memory", "largest share", "sum of shares", "scarcest dimension")


@dataclass(frozen=True, slots=True)
class Part:
    """Pods of one shape that are confined to some machines."""

    shape: int
    count: int
    #: Which machines may host them, or None for every one that matches.
    allowed: Bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where pods run; M machines, S shapes."""

    #: Pods of each shape on each machine, (S, M).
    on: Int
    #: Pods of each shape without a place, (S,).
    lost: Int
    #: Domain that each gang's row got, by position of the row; absent where it does not fit as a whole.
    domain_of_row: Mapping[int, str]

    @property
    def pods_lost(self) -> int:
        """Pods without a place."""
        return int(self.lost.sum())


class Machines:
    """Machines of one cluster by class, with the arrays that placing needs."""

    def __init__(self, arrays: ClusterArrays, classes: Sequence[int]) -> None:
        self.arrays = arrays
        self.classes: Int = np.array(classes, np.int64)
        self.supply: Int = arrays.supply[self.classes]
        self.matches: Bool = arrays.matches[:, self.classes]

    def __len__(self) -> int:
        return len(self.classes)

    def domains(self, key: str) -> list[str | None]:
        """Return each machine's value of a topology key."""
        of_class = self.arrays.domains(key)
        return [of_class[position] for position in self.classes]

    def hosts(self, avoid_interruption: bool) -> Bool:
        """Return which machines each shape may use, (S, M); pinned rows may be kept off those that are interrupted."""
        if not avoid_interruption:
            return self.matches
        exposed = np.isinf(self.arrays.penalty)[:, None] & (self.arrays.probability[self.classes] > 0)
        result: Bool = self.matches & ~exposed
        return result

    def shares(self) -> Real:
        """Return each shape's request as a fraction of all supply by dimension, (S, D)."""
        total = np.maximum(self.supply.astype(np.float64).sum(axis=0), 1.0)
        shares: Real = self.arrays.request / total
        return shares


def place(machines: Machines, counts: Int | None = None, avoid_interruption: bool = False) -> Placement:
    """Return the placement of the order that leaves the fewest pods without a place, the first of equals.

    `counts` are pods by shape, all by default. With `avoid_interruption` pinned rows use no machine that may be
    interrupted: what a decision must respect and a scheduler does not know.
    """
    counts = machines.arrays.count if counts is None else counts
    best: Placement | None = None
    for order, bins in _orders(machines, machines.hosts(avoid_interruption)):
        found = _place_in_order(machines, counts, order, bins, avoid_interruption)
        if best is None or found.pods_lost < best.pods_lost:
            best = found
        if not best.pods_lost:
            break
    assert best is not None, "there is at least one order"
    return best


def _orders(machines: Machines, allowed: Bool) -> Iterator[tuple[Int, Int]]:
    """Yield (shapes in order, machines in order); all ties go to the lower position."""
    shares = machines.shares()
    # A pod that no machine hosts says nothing about what is scarce.
    counts = np.where(machines.arrays.fits.max(axis=1, initial=0) > 0, machines.arrays.count, 0)
    scarce = int(np.argmax((shares * counts[:, None]).sum(axis=0))) if len(shares) else 0
    keys = {
        "cpu": machines.arrays.request[:, 0].astype(np.float64),
        "memory": machines.arrays.request[:, 1].astype(np.float64),
        "largest share": shares.max(axis=1, initial=0.0),
        "sum of shares": shares.sum(axis=1),
        "scarcest dimension": shares[:, scarce],
    }
    # What only few machines may host comes before what fits anywhere.
    hosts = allowed.sum(axis=1)
    size = (machines.supply / np.maximum(machines.supply.max(axis=0, initial=1), 1)).sum(axis=1)
    for name in POD_ORDERS:
        for first in (np.zeros(len(hosts), np.int64), hosts):
            order = np.lexsort((-keys[name], first))
            for bins in (np.argsort(size, kind="stable"), np.argsort(-size, kind="stable")):
                yield order, bins


def _place_in_order(machines: Machines, counts: Int, order: Int, bins: Int, avoid_interruption: bool) -> Placement:
    arrays = machines.arrays
    state = _State(machines, bins, avoid_interruption)
    domain_of_row: dict[int, str] = {}
    gangs = sorted(
        {int(arrays.row[s]) for s in range(len(counts)) if counts[s] and arrays.row_of(s).same_key is not None},
        key=lambda row: (-int((arrays.request[arrays.row == row] * counts[arrays.row == row][:, None]).max()), row),
    )
    for row in gangs:
        domain = state.place_gang(row, [int(s) for s in order if arrays.row[s] == row], counts)
        if domain is not None:
            domain_of_row[row] = domain
    in_gang = set(gangs)
    for shape in order:
        if int(arrays.row[shape]) in in_gang or not counts[shape]:
            continue
        for part in spread_parts(machines, int(shape), int(counts[shape])):
            state.put(part)
    return Placement(on=state.on, lost=counts - state.on.sum(axis=1), domain_of_row=domain_of_row)


class _State:
    """Free room while pods are placed."""

    def __init__(self, machines: Machines, bins: Int, avoid_interruption: bool) -> None:
        self._machines = machines
        self._bins = bins
        self._hosts = machines.hosts(avoid_interruption)
        self.free: Int = machines.supply.copy()
        self.on: Int = np.zeros((len(machines.arrays.keys), len(machines)), np.int64)

    def put(self, part: Part) -> int:
        """Place what fits of a part, first machine first; return how many pods were placed."""
        arrays = self._machines.arrays
        allowed = self._hosts[part.shape]
        if part.allowed is not None:
            allowed = allowed & part.allowed
        room = np.where(allowed, pods_that_fit(self.free, arrays.request[part.shape]), 0)
        # Parts of one shape never share a machine, so nothing of the shape is on it yet.
        room = np.minimum(room, arrays.limit[part.shape])
        # More than the part holds never matters, and the sum must not overflow.
        room = np.minimum(room, part.count)[self._bins]
        before = np.cumsum(room) - room
        taken = np.clip(part.count - before, 0, room)
        self.on[part.shape, self._bins] += taken
        self.free[self._bins] -= taken[:, None] * arrays.request[part.shape]
        return int(taken.sum())

    def place_gang(self, row: int, shapes: Sequence[int], counts: Int) -> str | None:
        """Place a whole gang in the domain with the least room that holds it; place nothing where none does."""
        key = self._machines.arrays.cluster.rows[row].same_key
        assert key is not None, "a gang has a Same requirement"
        domains = self._machines.domains(key)
        named = sorted({domain for domain in domains if domain is not None})
        masks = {name: np.array([domain == name for domain in domains], np.bool_) for name in named}
        by_room = sorted(named, key=lambda name: (float(self.free[masks[name]].astype(np.float64).sum()), name))
        free, on = self.free.copy(), self.on.copy()
        for name in by_room:
            if all(self.put(Part(s, int(counts[s]), masks[name])) == counts[s] for s in shapes):
                return name
            self.free, self.on = free.copy(), on.copy()
        return None


def spread_parts(machines: Machines, shape: int, count: int) -> list[Part]:
    """Split pods under a strict spread evenly over the domains with matching machines; others are one part."""
    spread = machines.arrays.row_of(shape).strict_spread
    if spread is None:
        return [Part(shape, count)]
    domains = machines.domains(spread.key)
    matching = machines.matches[shape]
    named = sorted(
        {domain for domain, matches in zip(domains, matching, strict=True) if matches and domain is not None}
    )
    return [
        Part(shape, share, np.array([domain == name for domain in domains], np.bool_))
        for name, share in zip(named, even_split(count, len(named), shape), strict=True)
        if share
    ]
