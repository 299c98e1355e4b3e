"""Maintains one segment per cluster of bound and creating machines, in the order in which rows use them.

A cluster whose machines changed gets a new segment at the end of the room; the others stay where they are, and so does
what was noted about them. This module must not drop or prefer a machine: docs/spec/model.md §3 and
docs/spec/aggregates.md §5.2 give the order.
"""

import numpy as np
import numpy.typing as npt

from bigfleet.engine.columnar.arrays import CONFIGURED, CONFIGURING, CREATING, FREE, BoundMachines, Int32s, Int64s
from bigfleet.engine.columnar.kernels.sweeps import merge_runs
from bigfleet.engine.columnar.sorting import sort_by
from bigfleet.engine.columnar.tables import VocabularyTables
from bigfleet.engine.columns.store import ColumnSnapshot

_PARTS = 3
_CREATING = 2
#: Room beyond what is in use, so that some clusters can move before everything is laid out again.
_SPARE_MIN = 4096


def spans(starts: Int64s, sizes: Int64s) -> Int64s:
    """Return the places of several stretches, one after the other."""
    total = int(sizes.sum())
    offsets = np.cumsum(sizes) - sizes
    places: Int64s = np.arange(total) + np.repeat(starts - offsets, sizes)
    return places


class Segments:
    """The segments of one view; `follow` makes them those of a later one.

    Invariants: each bound or Creating machine stands in exactly one segment, that of its cluster or of the cluster it
    is recorded for; `bound.place_of` is -1 for all others.
    """

    def __init__(self, view: ColumnSnapshot, tables: VocabularyTables) -> None:
        state = view.columns.state
        is_bound = (state == CONFIGURED) | (state == CONFIGURING)
        machines = np.flatnonzero(is_bound | (state == CREATING)).astype(np.int32)
        machines, cluster, part = _placed(machines, view, tables)
        order = _whole_order(machines, cluster, part, view, tables)
        machines = machines[order]
        count = len(machines)
        capacity = count + max(count // 2, _SPARE_MIN)
        clusters = len(tables.clusters)
        sizes = np.bincount(cluster * _PARTS + part, minlength=_PARTS * clusters).astype(np.int64)
        stops = np.cumsum(sizes)
        self.bound = BoundMachines(
            machines=np.empty(capacity, np.int32),
            shapes=np.empty(capacity, np.int32),
            pairs=np.empty(capacity, np.int32),
            held=np.empty(capacity, np.int32),
            place_of=np.full(len(view.ids), -1, np.int32),
            start=np.concatenate([[0], stops[_PARTS - 1 : -1 : _PARTS]]).astype(np.int64),
            configuring=np.ascontiguousarray(stops[0::_PARTS]),
            creating=np.ascontiguousarray(stops[1::_PARTS]),
            stop=np.ascontiguousarray(stops[2::_PARTS]),
        )
        self.used = 0
        self._write(machines, view, tables)

    def follow(
        self, view: ColumnSnapshot, tables: VocabularyTables, changed: npt.NDArray[np.integer]
    ) -> npt.NDArray[np.integer]:
        """Bring the segments up to a view in which some rows changed; returns the clusters whose segments are new."""
        self.grow(len(tables.clusters))
        bound = self.bound
        owner_of_place = bound.place_of[changed]
        left = self.clusters_at(owner_of_place[owner_of_place >= 0])
        bound.place_of[changed] = -1
        state = view.columns.state[changed]
        is_placed = (state == CONFIGURED) | (state == CONFIGURING)
        is_placed |= state == CREATING
        arrived, arrived_cluster, _ = _placed(changed[is_placed].astype(np.int32), view, tables)
        is_moved = np.zeros(len(bound.start), np.bool_)
        is_moved[left] = is_moved[arrived_cluster] = True
        moved = np.flatnonzero(is_moved)
        if len(moved) == 0:
            return moved
        standing = bound.machines[spans(bound.start[moved], bound.stop[moved] - bound.start[moved])]
        standing = standing[bound.place_of[standing] >= 0]
        machines, cluster, part = _placed(np.concatenate([standing, arrived]), view, tables)
        order = _merged_order(machines, cluster, part, len(standing), view, tables)
        machines, cluster, part = machines[order], cluster[order], part[order]
        if self.used + len(machines) > len(bound.machines):
            self._compact(moved, len(machines))
            bound = self.bound
        sizes = np.bincount(np.searchsorted(moved, cluster) * _PARTS + part, minlength=_PARTS * len(moved))
        stops = self.used + np.cumsum(sizes)
        bound.start[moved] = np.concatenate([[self.used], stops[_PARTS - 1 : -1 : _PARTS]])
        bound.configuring[moved] = stops[0::_PARTS]
        bound.creating[moved] = stops[1::_PARTS]
        bound.stop[moved] = stops[2::_PARTS]
        self._write(machines, view, tables)
        return moved

    def clusters_at(self, places: Int32s) -> Int64s:
        """Return the cluster of each place in use."""
        bound = self.bound
        filled = np.flatnonzero(bound.stop > bound.start)
        filled = filled[np.argsort(bound.start[filled])]
        return filled[np.searchsorted(bound.start[filled], places, "right") - 1]

    def _write(self, machines: Int32s, view: ColumnSnapshot, tables: VocabularyTables) -> None:
        bound, start = self.bound, self.used
        stop = self.used = start + len(machines)
        bound.machines[start:stop] = machines
        bound.shapes[start:stop] = view.columns.shape[machines]
        bound.pairs[start:stop] = tables.stamp_pair[view.columns.stamp[machines]]
        bound.held[start:stop] = FREE
        bound.place_of[machines] = np.arange(start, stop)

    def grow(self, clusters: int) -> None:
        """Have a segment, empty at first, for each of so many clusters."""
        missing = clusters - len(self.bound.start)
        if missing > 0:
            none = np.zeros(missing, np.int64)
            bound = self.bound
            self.bound = bound._replace(
                **{
                    name: np.concatenate([getattr(bound, name), none])
                    for name in ("start", "configuring", "creating", "stop")
                }
            )

    def _compact(self, dropped: npt.NDArray[np.integer], room: int) -> None:
        """Lay the segments out again without gaps, except for some clusters', and make room for more."""
        old = self.bound
        sizes = old.stop - old.start
        sizes[dropped] = 0
        places = spans(old.start, sizes)
        count = len(places)
        capacity = count + room + max((count + room) // 2, _SPARE_MIN)
        columns = {}
        for name in ("machines", "shapes", "pairs", "held"):
            columns[name] = np.empty(capacity, np.int32)
            columns[name][:count] = getattr(old, name)[places]
        start = np.cumsum(sizes) - sizes
        self.bound = old._replace(
            **columns,
            start=start,
            configuring=start + np.minimum(old.configuring - old.start, sizes),
            creating=start + np.minimum(old.creating - old.start, sizes),
            stop=start + sizes,
        )
        self.bound.place_of[columns["machines"][:count]] = np.arange(count)
        self.used = count


def _placed(
    machines: Int32s, view: ColumnSnapshot, tables: VocabularyTables
) -> tuple[Int32s, Int64s, npt.NDArray[np.integer]]:
    """Return the machines that belong to a segment, the cluster of each, and its part of the segment."""
    columns = view.columns
    state = columns.state[machines]
    is_creating = state == CREATING
    cluster = tables.cluster_of[columns.cluster[machines]].astype(np.int64)
    belongs = is_creating | (cluster != 0)
    if is_creating.any():
        cluster[is_creating] = tables.stamp_intended[columns.stamp[machines[is_creating]]]
    part = np.where(is_creating, _CREATING, state == CONFIGURING)
    if belongs.all():
        return machines, cluster, part
    return machines[belongs], cluster[belongs], part[belongs]


def _merged_order(
    machines: Int32s,
    cluster: Int64s,
    part: npt.NDArray[np.integer],
    standing: int,
    view: ColumnSnapshot,
    tables: VocabularyTables,
) -> Int64s:
    """Return the order of some machines, of which those that were standing come in it: cluster, part, keep-priority or
    (pair, id).
    """
    offer, stamp = view.columns.offer[machines], view.columns.stamp[machines]
    is_creating = part == _CREATING
    group = cluster * _PARTS + part
    first = np.where(is_creating, tables.stamp_pair[stamp], tables.offer_price[offer])
    second = np.where(is_creating, 0.0, -tables.stamp_reclamation[stamp])
    keys = machines, second, first, group
    arrived = standing + np.lexsort([key[standing:] for key in keys])
    merged = np.empty(len(machines), np.int64)
    runs = np.concatenate([np.arange(standing), arrived])
    merge_runs(group[runs], first[runs], second[runs], machines[runs], standing, merged)
    order: Int64s = runs[merged]
    return order


def _whole_order(
    machines: Int32s,
    cluster: Int64s,
    part: npt.NDArray[np.integer],
    view: ColumnSnapshot,
    tables: VocabularyTables,
) -> npt.NDArray[np.integer]:
    """The same order of machines given by id, by counting where that is possible."""
    offer, stamp = view.columns.offer[machines], view.columns.stamp[machines]
    first, second = tables.price_rank[offer], tables.reclamation_rank[stamp]
    is_creating = part == _CREATING
    if is_creating.any():
        first = np.where(is_creating, tables.stamp_pair[stamp], first)
        second = np.where(is_creating, 0, second)
    return sort_by([cluster * _PARTS + part, first, second], np.arange(len(machines)))
