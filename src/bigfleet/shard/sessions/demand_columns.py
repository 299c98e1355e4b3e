"""Reads the rows of a demand table into columns when they arrive, so that a decision does not have to.

If a cluster has many rows, a caller off the event loop reads them. A decision reads the rows that have not been read
yet.
"""

from array import array
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import Final

import numpy as np

from bigfleet.engine.shapes.columns.listed import NUMBERS_MAX, ArrivedRows, ListedColumns, RowNumbers
from bigfleet.model.need import Need

#: Rows of one cluster that are read as they are taken in, which takes up to some milliseconds; more are left unread.
ROWS_AT_ONCE_MAX: Final = 256
#: Clusters that are numbered beyond twice those that have rows, before they are numbered again.
SPARE_CLUSTERS: Final = 1000


class DemandReader:
    """The columns of a demand table's rows.

    Nothing is read before a row says of which pods it consists: decisions over aggregates do not use these columns.
    """

    def __init__(self) -> None:
        self._numbers = RowNumbers(Lock())
        #: Of all and only the clusters with rows, from the first row with shapes on.
        self._blocks: dict[str, ArrivedRows] = {}
        #: Whether a row with shapes has come; before, no row says pods.
        self.is_reading = False
        self._clusters: list[str] = []
        self._number_of: dict[str, int] = {}
        #: The number of the cluster of each row, in list order; None until the columns are wanted of another order.
        self._cluster: array[int] | None = None

    def replace(self, cluster: str, needs: Sequence[Need], others: Iterable[tuple[str, Sequence[Need]]]) -> None:
        """Take in a cluster's rows, in list order, in the place of its former ones; `others` are all other rows."""
        if not needs:
            self._blocks.pop(cluster, None)
            return
        if not self.is_reading:
            if not any(need.shapes or need.waiting for need in needs):
                return
            self.is_reading = True
            self._blocks = {name: ArrivedRows(self._numbers, tuple(rows)) for name, rows in others}
        elif self._has_spare_numbers():
            self._numbers = RowNumbers(Lock())
            self._blocks = {name: ArrivedRows(self._numbers, rows.needs) for name, rows in self._blocks.items()}
        rows = self._blocks[cluster] = ArrivedRows(self._numbers, tuple(needs), self._blocks.get(cluster))
        if len(needs) <= ROWS_AT_ONCE_MAX:
            rows.read_unless_busy()

    def unread_rows_of(self, cluster: str) -> ArrivedRows | None:
        """Return a cluster's rows where a decision would have to read them; None where there is nothing to read."""
        rows = self._blocks.get(cluster)
        return None if rows is None or rows.is_read else rows

    def _has_spare_numbers(self) -> bool:
        """Return whether most of many numbers are no longer used, so that all rows should be numbered again."""
        size = self._numbers.size
        return size > NUMBERS_MAX and size > NUMBERS_MAX + 2 * sum(rows.shapes for rows in self._blocks.values())

    def reorder(self) -> None:
        """Forget the order of the rows: many of them have come or gone."""
        self._cluster = None

    def delete(self, place: int) -> None:
        """Have no row at a place of the list."""
        if self._cluster is not None:
            del self._cluster[place]

    def insert(self, place: int, need: Need) -> None:
        """Have a row at a place of the list."""
        if self._cluster is not None:
            self._cluster.insert(place, self._number(need.cluster))

    def listed(self, needs: Iterable[Need]) -> ListedColumns | None:
        """Return the columns of all rows, in the order in which they are given; None while no row has shapes."""
        if not self.is_reading or not self._blocks:
            return None
        if self._cluster is None or self._has_spare_clusters():
            self._clusters, self._number_of = [], {}
            self._cluster = array("i", [self._number(need.cluster) for need in needs])
        cluster = np.array(self._cluster, np.int32)
        return ListedColumns(self._numbers, dict(self._blocks), list(self._clusters), cluster)

    def _has_spare_clusters(self) -> bool:
        """Return whether most of the numbered clusters have no rows, so that all rows should be numbered again."""
        return len(self._clusters) > 2 * len(self._blocks) + SPARE_CLUSTERS

    def _number(self, cluster: str) -> int:
        number = self._number_of.setdefault(cluster, len(self._clusters))
        if number == len(self._clusters):
            self._clusters.append(cluster)
        return number
