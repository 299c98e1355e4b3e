"""Reads the rows of a demand into columns, each row and each shape once.

The columns depend on neither machines nor options, so that they hold for as long as the demand is the same.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from bigfleet.engine.shapes.state import PODS
from bigfleet.model.need import Need
from bigfleet.model.profile import Profile
from bigfleet.model.shapes import DemandShape
from bigfleet.model.vector import Vector

Rows = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

#: Stands for a limit that there is not.
NO_LIMIT: Final = 1 << 62
#: Rows that are read in one go. A call of NumPy keeps the interpreter until it is done: with 8 shapes a row some
#: milliseconds.
SLICE_ROWS: Final = 1024


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RowsInColumns:
    """Rows of a demand, those of a cluster in list order, and their shapes: waiting ones after the others of a row."""

    #: Rows of the demand, and the place of each of these among them.
    needs: Sequence[Need]
    places: Rows
    #: The place of each in the demand; those of a cluster ascend.
    positions: Rows
    #: Different profiles, and which of them each row has.
    profiles: Sequence[Profile]
    profile: Rows
    #: Clusters in the order of their first row, and which of them each row is of.
    clusters: Sequence[str]
    cluster: Rows
    #: Whether the row says of which pods it consists.
    has_pods: Bools
    #: Where the shapes of each row begin, and where the last ones end; how many of them are not waiting.
    first: Rows
    running: Rows
    #: Of each shape: its pods, the most of them on one machine, and what a pod requests, as a place in `resources`.
    counts: Rows
    limits: Rows
    number: Rows
    resources: Sequence[Vector]
    #: Every resource that a row names, names ascending, `pods` last.
    names: tuple[str, ...]


def row_columns(needs: Sequence[Need], positions: Sequence[int] | None = None) -> RowsInColumns:
    """Read rows, which are in list order; without positions they are the whole demand."""
    requests = ValueNumbers()
    has_pods, sizes, running, counts, limits, number = columns_with(needs, requests)
    cluster, of_clusters = _numbered([need.cluster for need in needs])
    profile, of_profiles = _numbered([need.profile.fingerprint for need in needs])
    different = requests.vectors_from(0)
    return RowsInColumns(
        needs=needs,
        places=np.arange(len(needs)),
        positions=np.arange(len(needs)) if positions is None else np.array(positions, np.int64),
        profiles=[needs[place].profile for place in of_profiles.tolist()],
        profile=profile,
        clusters=[needs[place].cluster for place in of_clusters.tolist()],
        cluster=cluster,
        has_pods=has_pods,
        first=firsts(sizes),
        running=running,
        counts=counts,
        limits=limits,
        number=number,
        resources=different,
        names=in_order(_named(needs, different)),
    )


class ShapeColumns(NamedTuple):
    """Rows and their shapes; see `RowsInColumns`."""

    has_pods: Bools
    #: Shapes of each row.
    sizes: Rows
    running: Rows
    counts: Rows
    limits: Rows
    number: Rows

    @classmethod
    def joined(cls, parts: Iterable["ShapeColumns"]) -> "ShapeColumns":
        """Return the rows of each part, at least one, one part after the other."""
        return cls._make(map(np.concatenate, zip(*parts, strict=True)))

    def of_rows(self, places: Rows) -> "ShapeColumns":
        """Return some rows, each with its shapes."""
        sizes = self.sizes[places]
        starts = (np.cumsum(self.sizes) - self.sizes)[places]
        shapes = np.arange(int(sizes.sum())) + np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)
        of_shapes = (column[shapes] for column in (self.counts, self.limits, self.number))
        return ShapeColumns(self.has_pods[places], sizes, self.running[places], *of_shapes)


def columns_with(needs: Sequence[Need], requests: "ValueNumbers") -> ShapeColumns:
    """Read rows and their shapes; `requests` numbers what pods request."""
    running: list[tuple[DemandShape, ...]] = [need.shapes for need in needs]
    waiting = [need.waiting for need in needs]
    is_waiting = any(waiting)
    given = [a + b for a, b in zip(running, waiting, strict=True)] if is_waiting else running
    shapes = list(chain.from_iterable(given))
    sizes, are_running = _lengths(given), _lengths(running)
    has_pods = sizes > 0
    if is_waiting:
        # Rows of which nothing runs; all of their pods may wait.
        for place in np.flatnonzero(has_pods & (are_running == 0)).tolist():
            has_pods[place] = not needs[place].aggregate
    limits = np.fromiter([shape.max_per_machine for shape in shapes], np.int64, len(shapes))
    limits[limits == 0] = NO_LIMIT
    counts = np.fromiter([shape.count for shape in shapes], np.int64, len(shapes))
    # The names, then the amounts: equal only for equal resources that are named in the same order.
    resources = [shape.resources for shape in shapes]
    number = requests.numbers_of([(*each, *each.values()) for each in resources])
    return ShapeColumns(has_pods, sizes, are_running, counts, limits, number)


def names_of(needs: Sequence[Need]) -> tuple[str, ...]:
    """Return `RowsInColumns.names` of rows, without reading more of them."""
    return in_order(names_with(needs))


def names_with(needs: Sequence[Need]) -> set[str]:
    """Return every resource that a row names."""
    found: set[str] = set()
    for some in in_slices(needs):
        resources = [shape.resources for need in some for shape in need.shapes]
        resources += [shape.resources for need in some if need.waiting for shape in need.waiting]
        found |= _named(some, resources)
    return found


def in_slices(needs: Sequence[Need]) -> Iterator[Sequence[Need]]:
    """Yield rows a slice at a time; other threads can run in between."""
    for first in range(0, len(needs), SLICE_ROWS):
        yield needs[first : first + SLICE_ROWS]


def _named(needs: Sequence[Need], resources: Iterable[Vector]) -> set[str]:
    return set().union(*resources, *[need.aggregate for need in needs], *[need.min_unit for need in needs])


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Return names in their order, `pods` last."""
    return (*sorted(set(names) - {PODS}), PODS)


def firsts(sizes: npt.NDArray[Any]) -> Rows:
    """Return where each of some consecutive runs begins, and where the last one ends."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)))


def _lengths(parts: Sequence[Sequence[object]]) -> Rows:
    return np.fromiter(map(len, parts), np.int64, len(parts))


class ValueNumbers(dict[Hashable, int]):
    """Numbers values from 0 as they are first asked for."""

    def __missing__(self, value: Hashable) -> int:
        number = self[value] = len(self)
        return number

    def numbers_of(self, values: Sequence[Hashable]) -> Rows:
        """Return a number for each value, equal for equal ones."""
        return np.fromiter(map(self.__getitem__, values), np.int64, len(values))

    def vectors_from(self, first: int) -> list[Vector]:
        """Return the vectors that have numbers from `first` on, whose names and then amounts are the values."""
        last_ones = islice(reversed(self), len(self) - first)
        keys = [key for key in last_ones if isinstance(key, tuple)][::-1]
        return [dict(zip(key[: len(key) // 2], key[len(key) // 2 :], strict=True)) for key in keys]


def _numbered(values: Sequence[Hashable]) -> tuple[Rows, Rows]:
    """Return a number for each value, equal for equal ones and ascending by first place; and these places."""
    numbers = ValueNumbers().numbers_of(values)
    return numbers, np.flatnonzero(np.diff(np.maximum.accumulate(numbers), prepend=-1))
