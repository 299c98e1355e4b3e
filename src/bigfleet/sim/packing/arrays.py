"""Turns one cluster's demand and the classes of machines into arrays: requests, supplies, and which shape fits where.

Dimensions are those that some pod requests, and `pods`, of which every pod takes one. A class that does not declare
`pods` admits any number; a class that does not declare another dimension has none of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bigfleet.sim.packing.values import CPU, MEMORY, MILLI, PODS, PackingCluster, PackingOffer, PackingRow

Int = NDArray[np.int64]
Bool = NDArray[np.bool_]
Real = NDArray[np.float64]

#: Stands for "no limit" where an integer is needed: above any count of pods, far below where sums overflow.
UNLIMITED: Final = 1 << 40


@dataclass(frozen=True, slots=True)
class ShapeKey:
    """One shape of one row of the cluster, by position."""

    row: int
    shape: int


class ClusterArrays:
    """One cluster against the classes of an instance; S shapes, C classes, D dimensions."""

    def __init__(self, cluster: PackingCluster, offers: Sequence[PackingOffer]) -> None:
        self.cluster = cluster
        self.offers = offers
        self.keys = [ShapeKey(r, s) for r, row in enumerate(cluster.rows) for s in range(len(row.shapes))]
        shapes = [cluster.rows[key.row].shapes[key.shape] for key in self.keys]
        names = {name for shape in shapes for name, milli in shape.resources.items() if milli}
        self.dimensions = (CPU, MEMORY, PODS, *sorted(names - {CPU, MEMORY, PODS}))
        self.request: Int = np.array(
            [[MILLI if name == PODS else shape.resources.get(name, 0) for name in self.dimensions] for shape in shapes],
            np.int64,
        ).reshape(len(shapes), len(self.dimensions))
        self.count: Int = np.array([shape.count for shape in shapes], np.int64)
        self.limit: Int = np.array([shape.max_per_machine or UNLIMITED for shape in shapes], np.int64)
        rows = [cluster.rows[key.row] for key in self.keys]
        self.row: Int = np.array([key.row for key in self.keys], np.int64)
        self.priority: Int = np.array([row.priority for row in rows], np.int64)
        self.penalty: Real = np.array([row.penalty_dollars for row in rows], np.float64)
        self.allocatable = self._allocatable()
        self.supply: Int = np.maximum(self.allocatable - self._overhead(), 0)
        self.price: Real = np.array([offer.marginal_usd_per_hour for offer in offers], np.float64)
        self.probability: Real = np.array([offer.interruption_probability for offer in offers], np.float64)
        matches = {row.id: [offer.matches(row.requirements) for offer in offers] for row in cluster.rows}
        self.matches: Bool = np.array([matches[row.id] for row in rows], np.bool_).reshape(len(rows), len(offers))
        #: Pods of the shape that an empty machine of the class hosts, without regard to `limit`.
        self.fits: Int = np.where(self.matches, pods_that_fit(self.supply[None], self.request[:, None]), 0)

    def _allocatable(self) -> Int:
        values = [
            [offer.allocatable.get(name, UNLIMITED * MILLI if name == PODS else 0) for name in self.dimensions]
            for offer in self.offers
        ]
        return np.array(values, np.int64).reshape(len(self.offers), len(self.dimensions))

    def _overhead(self) -> Int:
        taken = np.zeros((len(self.offers), len(self.dimensions)), np.int64)
        for overhead in self.cluster.overheads:
            vector = [overhead.resources.get(name, 0) for name in self.dimensions]
            matching = [offer.matches(overhead.requirements) for offer in self.offers]
            taken[matching] += np.array(vector, np.int64)
        return taken

    def row_of(self, shape: int) -> PackingRow:
        """Return the row of a shape."""
        return self.cluster.rows[int(self.row[shape])]

    def domains(self, key: str) -> list[str | None]:
        """Return the value of a topology key on each class."""
        return [offer.attribute(key) for offer in self.offers]

    def interruption_cost(self, shape: int, counts: Int, classes: Int) -> Real:
        """Return what so many pods of the shape add on machines of the classes: probability × share × penalty, $/h.

        The share is the largest fraction of the machine's supply over the dimensions of the shape. A pinned row costs
        infinitely much on a class that may be interrupted, and nothing on the others.
        """
        probability = self.probability[classes]
        needed = self.request[shape] > 0
        supply = np.maximum(self.supply[classes][:, needed], 1)
        share = (counts[:, None] * self.request[shape][needed] / supply).max(axis=1)
        cost: Real = np.zeros(len(classes), np.float64)
        exposed = (probability > 0) & (counts > 0)
        penalty = float(self.penalty[shape])
        cost[exposed] = np.inf if np.isinf(penalty) else probability[exposed] * share[exposed] * penalty
        return cost


def pods_that_fit(free: Int, request: Int) -> Int:
    """Return how often the request fits into the free room, over the last axis; negative room hosts none."""
    fits = np.maximum(free, 0) // np.maximum(request, 1)
    result: Int = np.where(request > 0, fits, UNLIMITED).min(axis=-1)
    return result


def class_positions(offers: Sequence[PackingOffer]) -> Mapping[str, int]:
    """Return the position of each class by id."""
    return {offer.id: position for position, offer in enumerate(offers)}


def even_split(count: int, parts: int, offset: int = 0) -> list[int]:
    """Return so many shares that sum to the count and differ by at most 1; the larger ones begin at `offset`."""
    if not parts:
        return []
    base, rest = divmod(count, parts)
    return [base + (((index - offset) % parts) < rest) for index in range(parts)]
