"""Reads the rows of a demand into columns as they arrive, cluster by cluster.

A demand table has each cluster's rows read once, when it takes them in, and hands the columns over with its listing. A
decision then joins the columns of the clusters that it decides on, and reads the rows that no one has read before.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Final, Protocol, overload

import numpy as np
import numpy.typing as npt

from bigfleet.engine.shapes.columns.rows import (
    Rows,
    RowsInColumns,
    ShapeColumns,
    ValueNumbers,
    columns_with,
    firsts,
    in_slices,
    names_with,
)
from bigfleet.engine.shapes.columns.sorting import stable_order
from bigfleet.model.need import Need
from bigfleet.model.profile import Profile
from bigfleet.model.vector import Vector

#: Profiles and requests that are numbered before the numbers begin again, if most of them are no longer used.
NUMBERS_MAX: Final = 100_000


class ReadingLock(Protocol):
    """Lets one thread at a time read; `threading.Lock` is one. The engine itself makes no threads."""

    def acquire(self, blocking: bool = True) -> bool: ...

    def release(self) -> None: ...


class RowNumbers:
    """Numbers different profiles and requests; numbers are never taken back."""

    def __init__(self, lock: ReadingLock) -> None:
        """Have no numbers yet; a reader holds the lock."""
        self.lock = lock
        self.profiles: list[Profile] = []
        self.resources: list[Vector] = []
        self._of_profiles, self._of_requests = ValueNumbers(), ValueNumbers()

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.profiles) + len(self.resources)

    def read(self, needs: Sequence[Need], former: "RowBlock | None" = None) -> "RowBlock":
        """Return the rows of a cluster, which are in list order; rows of `former` are not read again.

        Cost: the rows that are not the very objects that stand in `former`, and a look at the others.
        """
        if former is None:
            return self._read(needs)
        known = dict(zip(map(id, former.needs), range(len(former.needs)), strict=True))
        place = np.fromiter(map(known.get, map(id, needs), repeat(-1)), np.int64, len(needs))
        missing = np.flatnonzero(place < 0)
        added = self._read([needs[each] for each in missing.tolist()])
        place[missing] = len(former.needs) + np.arange(len(missing))
        columns = ShapeColumns.joined((former.columns, added.columns)).of_rows(place)
        profile = np.concatenate((former.profile, added.profile))[place]
        names = added.names | former.names if len(missing) == len(needs) - len(former.needs) else names_with(needs)
        return RowBlock(tuple(needs), columns, profile, frozenset(names))

    def _read(self, needs: Sequence[Need]) -> "RowBlock":
        parts = [self._read_slice(some) for some in in_slices(needs)] or [self._read_slice(needs)]
        return RowBlock(
            needs=tuple(needs),
            columns=ShapeColumns.joined(columns for columns, _, _ in parts),
            profile=np.concatenate([profile for _, profile, _ in parts]),
            names=frozenset[str]().union(*[names for _, _, names in parts]),
        )

    def _read_slice(self, needs: Sequence[Need]) -> tuple[ShapeColumns, Rows, set[str]]:
        """Return the columns of rows, the numbers of their profiles, and every resource that they name."""
        columns = columns_with(needs, self._of_requests)
        self.resources += self._of_requests.vectors_from(len(self.resources))
        profile = self._of_profiles.numbers_of([need.profile.fingerprint for need in needs])
        for need, number in zip(needs, profile.tolist(), strict=True):
            if number == len(self.profiles):
                self.profiles.append(need.profile)
        return columns, profile, names_with(needs)


@dataclass(frozen=True, slots=True, eq=False)
class RowBlock:
    """The rows of one cluster in list order; see `RowsInColumns`."""

    needs: tuple[Need, ...]
    columns: ShapeColumns
    profile: Rows
    names: frozenset[str]


class ArrivedRows:
    """The rows of one cluster in list order, which are read once, by the first of its callers; any thread may call."""

    def __init__(self, numbers: RowNumbers, needs: tuple[Need, ...], former: "ArrivedRows | None" = None) -> None:
        """Read nothing. What is read of `former`, the cluster's rows before, need not be read again."""
        self.needs = needs
        self._numbers = numbers
        self._block: RowBlock | None = None
        self._former: RowBlock | None = None if former is None else former._block or former._former

    @property
    def is_read(self) -> bool:
        """Whether the rows are read."""
        return self._block is not None

    @property
    def shapes(self) -> int:
        """How many shapes were read."""
        return 0 if self._block is None else len(self._block.columns.number)

    def read(self) -> RowBlock:
        """Return the rows in columns. While another thread reads with the same numbers, the caller waits."""
        if self._block is None:
            self._numbers.lock.acquire()
            return self._read_and_release()
        return self._block

    def read_unless_busy(self) -> None:
        """Read the rows, unless another thread reads with the same numbers: then they stay unread."""
        if self._numbers.lock.acquire(blocking=False):
            self._read_and_release()

    def _read_and_release(self) -> RowBlock:
        try:
            if self._block is None:
                self._block = self._numbers.read(self.needs, self._former)
                self._former = None
            return self._block
        finally:
            self._numbers.lock.release()


class ClusterRows(Sequence[tuple[int, Need]]):
    """The rows of one cluster in list order, each with its place in the demand."""

    def __init__(self, places: Rows, needs: tuple[Need, ...]) -> None:
        """Make no pairs."""
        self.places, self.needs = places, needs

    def __len__(self) -> int:
        return len(self.needs)

    @overload
    def __getitem__(self, place: int) -> tuple[int, Need]: ...
    @overload
    def __getitem__(self, place: slice) -> "ClusterRows": ...
    def __getitem__(self, place: int | slice) -> "tuple[int, Need] | ClusterRows":
        if isinstance(place, slice):
            return ClusterRows(self.places[place], self.needs[place])
        return int(self.places[place]), self.needs[place]

    def __iter__(self) -> Iterator[tuple[int, Need]]:
        return zip(self.places.tolist(), self.needs, strict=True)


@dataclass(eq=False)
class ListedColumns:
    """The rows of one listing in columns, some of which may be unread as yet. Otherwise nothing in it is changed."""

    numbers: RowNumbers
    #: By cluster, those of all clusters with rows.
    blocks: Mapping[str, ArrivedRows]
    #: Clusters by number, and the number of the cluster of each row in list order.
    clusters: Sequence[str]
    cluster: npt.NDArray[np.int32]
    _order: Rows | None = field(default=None, init=False)
    _first: Rows | None = field(default=None, init=False)

    def names(self) -> Iterable[str]:
        """Return every resource that a row names."""
        return frozenset[str]().union(*{rows.read().names for rows in self.blocks.values()})

    def places(self) -> tuple[Rows, Rows]:
        """Return the places of all rows by the number of their cluster, and where those of each cluster begin."""
        if self._order is None or self._first is None:
            self._order = stable_order(self.cluster)
            self._first = firsts(np.bincount(self.cluster, minlength=len(self.clusters)))
        return self._order, self._first


class ClustersInList(Mapping[str, ClusterRows]):
    """The rows of each cluster of a listing, clusters in the order of their first row."""

    def __init__(self, listed: ListedColumns, needs: Sequence[Need], *, are_stamped: bool) -> None:
        """`needs` are all rows in list order; with `are_stamped`, some are others than those that were read."""
        self._listed, self._needs, self._are_stamped = listed, needs, are_stamped
        order, first = listed.places()
        known = np.flatnonzero(np.diff(first))
        known = known[np.argsort(order[first[known]])]
        #: The number of each cluster.
        self.numbers = {listed.clusters[number]: number for number in known.tolist()}
        self._rows: dict[str, ClusterRows] = {}

    def __getitem__(self, cluster: str) -> ClusterRows:
        rows = self._rows.get(cluster)
        if rows is None:
            number = self.numbers[cluster]
            order, first = self._listed.places()
            places = order[first[number] : first[number + 1]]
            if self._are_stamped:
                needs = tuple([self._needs[place] for place in places.tolist()])
            else:
                needs = self._listed.blocks[cluster].needs
            rows = self._rows[cluster] = ClusterRows(places, needs)
        return rows

    def columns_of(self, clusters: Collection[str], names: tuple[str, ...]) -> RowsInColumns:
        """Return the rows of some clusters, at least one, in columns; `names` are those of all rows."""
        wanted = {name: number for name, number in self.numbers.items() if name in clusters}
        return joined_columns(self._listed, self._needs, wanted, names)

    def __iter__(self) -> Iterator[str]:
        return iter(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)


def joined_columns(
    listed: ListedColumns, demand: Sequence[Need], of_clusters: Mapping[str, int], names: tuple[str, ...]
) -> RowsInColumns:
    """Return the rows of some clusters, at least one, of which the numbers are given; `names` are those of all rows."""
    order, first = listed.places()
    blocks = [listed.blocks[name].read() for name in of_clusters]
    sizes = [len(block.profile) for block in blocks]
    positions = np.concatenate([order[first[number] : first[number + 1]] for number in of_clusters.values()])
    needs, places = demand, positions
    if len(blocks) < len(listed.blocks):
        # What is stored of some clusters must not hold on to all rows.
        needs, places = tuple(chain.from_iterable(block.needs for block in blocks)), np.arange(len(positions))

    columns = ShapeColumns.joined(block.columns for block in blocks)
    return RowsInColumns(
        needs=needs,
        places=places,
        positions=positions,
        # Copies, because another thread may add to them.
        profiles=tuple(listed.numbers.profiles),
        profile=np.concatenate([block.profile for block in blocks]),
        clusters=list(of_clusters),
        cluster=np.repeat(np.arange(len(blocks)), sizes),
        has_pods=columns.has_pods,
        first=firsts(columns.sizes),
        running=columns.running,
        counts=columns.counts,
        limits=columns.limits,
        number=columns.number,
        resources=tuple(listed.numbers.resources),
        names=names,
    )
