"""Stores state between decisions, and which clusters must be recomputed (docs/adr/0111).

A cluster's credits depend on its own rows and machines, on whether free machines prove its folds, and, for gangs whose
choice of a domain free machines have a say in, on what is free. As long as none of that changed they hold. This module
must not keep what depends on other clusters' claims.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bigfleet.engine.columnar.arrays import Bytes, Int32s, Int64s, Memo
from bigfleet.engine.columnar.demand import ColumnarDemand, Followed
from bigfleet.engine.columnar.earmarks import Earmarks
from bigfleet.engine.columnar.folds import Arranged, Folded
from bigfleet.engine.columnar.segments import Segments, spans

Flags = npt.NDArray[np.bool_]


class Credits(NamedTuple):
    """What credit came to, row by row, before anything was acquired."""

    remaining: Int64s  # R x D
    want: Int64s  # R
    domain: Int32s  # R
    satisfiable: Bytes  # R
    is_open: Bytes  # R
    credit_from: Int64s  # R
    credit_to: Int64s  # R


@dataclass(slots=True, eq=False, kw_only=True)
class IncrementalState:
    """The rows, folds and credits of the last decision."""

    numbers: Int64s
    arranged: Arranged
    hidden: Int64s
    #: For each ask: whether a free machine proved the fold.
    by_free: Bytes
    #: Values of each topology key; another list means other numbers for domains.
    values: list[list[str]]
    scale_version: int
    folded: Folded
    row_start: Int64s
    parked: Bytes
    credits: Credits
    memo: Memo
    earmarks: Earmarks
    #: Credited machines in the order of their claims: rows say from where to where.
    credited: Int32s
    credited_used: int
    excess: "ExcessMachines"

    def holds_for(self, values: list[list[str]], scale_version: int) -> bool:
        """Return whether numbers still mean what they meant; topology keys may have been added."""
        same = all(mine is theirs for mine, theirs in zip(self.values, values, strict=False))
        return same and len(values) >= len(self.values) and scale_version == self.scale_version


@dataclass(slots=True, eq=False)
class ExcessMachines:
    """Configured machines that no row holds, by cluster."""

    machines: Int32s
    start: Int64s
    stop: Int64s
    used: int

    def grow(self, clusters: int) -> None:
        """Have an entry, empty at first, for each of so many clusters."""
        missing = np.zeros(max(0, clusters - len(self.start)), np.int64)
        self.start, self.stop = np.concatenate([self.start, missing]), np.concatenate([self.stop, missing])


def mark_changed_rows(previous: IncrementalState, arranged: Arranged, followed: Followed | None, fresh: Flags) -> None:
    """Mark the clusters whose rows are not, object for object and in the same order, those of the last decision."""
    old = previous.arranged
    if arranged is old:
        return
    if followed is not None and followed.before is previous.numbers:
        fresh[followed.clusters] = True
        return
    clusters = len(arranged.size)
    missing = np.zeros(clusters - len(old.size), np.int64)
    old_size, old_start = np.concatenate([old.size, missing]), np.concatenate([old.start, missing])
    is_same_size = arranged.size == old_size
    fresh |= ~is_same_size
    rows = np.flatnonzero(is_same_size[arranged.cluster])
    cluster = arranged.cluster[rows]
    differs = arranged.numbers[rows] != old.numbers[old_start[cluster] + rows - arranged.start[cluster]]
    fresh[cluster[differs]] = True


def mark_changed_proofs(
    previous: IncrementalState, by_free: Bytes, arranged: Arranged, demand: ColumnarDemand, fresh: Flags
) -> None:
    """Mark the clusters with gangs whose fold free machines prove now and did not, or the other way round."""
    known = min(len(by_free), len(previous.by_free))
    changed = np.zeros(len(by_free) + 1, np.bool_)
    changed[:known] = by_free[:known] != previous.by_free[:known]
    if changed.any():
        # The last entry answers for NO_ASK, which is -1.
        fresh[arranged.cluster[changed[demand.need_columns.folded_ask[arranged.numbers]]]] = True


def mark_changed_visibility(previous: IncrementalState, hidden: Int64s, segments: Segments, fresh: Flags) -> None:
    """Mark the clusters whose machines came into sight or left it."""
    if not np.array_equal(hidden, previous.hidden):
        places = segments.bound.place_of[np.setxor1d(hidden, previous.hidden)]
        fresh[segments.clusters_at(places[places >= 0])] = True


class Spliced(NamedTuple):
    """Rows of retained clusters and of clusters that were folded again, and where the retained ones stood."""

    folded: Folded
    row_start: Int64s
    #: The row's number in the last decision; not below the number of its rows for those folded again.
    source: Int64s


def splice(previous: IncrementalState, part: Folded, part_start: Int64s, fresh: Flags) -> Spliced:
    """Return the rows of all clusters: `part` has those of the fresh ones."""
    clusters = len(fresh)
    old_rows = len(previous.folded.local)
    old_size = np.bincount(previous.folded.cluster, minlength=clusters)
    missing = np.zeros(clusters - len(previous.row_start), np.int64)
    size = np.where(fresh, np.bincount(part.cluster, minlength=clusters), old_size)
    start = np.where(fresh, old_rows + part_start, np.concatenate([previous.row_start, missing]))
    source = spans(start, size)
    row_start = np.cumsum(size) - size
    if not fresh.any():
        return Spliced(previous.folded, row_start, source)
    return Spliced(previous.folded.followed_by(part).taken(source), row_start, source)
