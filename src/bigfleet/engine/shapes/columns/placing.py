"""Places the groups of many clusters by first fit, on columns.

In step n, every cluster places its nth group. What it looks at are its first hosts in order: those that have claims and
room for what follows, then some without claims. These stand in a table with a row for each cluster, so that a step is
arithmetic on whole tables.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from bigfleet.engine.shapes.columns.demand import DemandColumns, Floats
from bigfleet.engine.shapes.columns.order import HostColumns, HostKind
from bigfleet.engine.shapes.columns.rows import NO_LIMIT, Bools, Rows, firsts
from bigfleet.engine.shapes.columns.sorting import stable_order

#: Steps after which hosts that have room for no later group are dropped, and others come.
_STEPS_TO_REFILL: Final = 4
#: Hosts without claims of a cluster that come at least; four times as many each time that this was not enough.
_HOSTS_AT_ONCE: Final = 4
#: Cells of a table up to which clusters of any sizes share it.
_CELLS_MAX: Final = 1 << 14
#: Rooms below are exact as floats, and so is every quotient, rounded down.
_FLOAT_MAX: Final = 1 << 52
#: Demand of a cluster that leaves a room without a limit far above what it requests.
_WANTED_MAX: Final = 1 << 50

_Table = npt.NDArray[Any]


class Claims(NamedTuple):
    """One claim in each place of the columns."""

    host: Rows
    group: Rows
    pods: Rows


def first_fit(hosts: HostColumns, demand: DemandColumns, wanted: Floats) -> Claims:
    """Return the claims of each group after those of the groups before it in its cluster.

    `wanted` has the whole demand of each cluster: (cluster, dimension).
    """
    sizes, groups = np.diff(hosts.first), np.diff(demand.first)
    access, is_allowed = access_of(hosts.kinds, demand)
    totals = hosts.totals
    is_limited = totals < NO_LIMIT
    most_wanted = wanted.max(initial=0.0, where=~is_limited.all(axis=0))
    if totals.max(initial=0, where=is_limited) < _FLOAT_MAX and most_wanted <= _WANTED_MAX:
        totals = np.where(is_limited, totals, _FLOAT_MAX).astype(np.float64)
    found = [Claims(*(np.zeros(0, np.int64) for _ in Claims._fields))]
    placed = np.flatnonzero((sizes > 0) & (groups > 0))
    # Tables of clusters of about one size are full.
    class_of = np.frexp(sizes[placed])[1] // 2
    if len(placed) * sizes.max(initial=0) <= _CELLS_MAX:
        class_of[:] = 0
    for each in np.unique(class_of).tolist():
        clusters = placed[class_of == each]
        placing = _Placing(_Steps(demand, clusters, access, totals.dtype), hosts, totals, is_allowed, clusters)
        found.extend(placing.claims())
    return Claims(*(np.concatenate(columns) for columns in zip(*found, strict=True)))


class _Steps:
    """The groups of some clusters, those of one step together; clusters stand in the order of their groups."""

    def __init__(self, demand: DemandColumns, clusters: Rows, access: Rows, dtype: npt.DTypeLike) -> None:
        first, sizes = demand.first[clusters], np.diff(demand.first)[clusters]
        row = np.repeat(np.arange(len(clusters)), sizes)
        step = np.arange(len(row)) - (np.cumsum(sizes) - sizes)[row]
        order = stable_order(step)
        #: Where the groups of each step begin, and where the last ones end.
        self.first: list[int] = firsts(np.bincount(step)).tolist()
        self.group = (first[row] + step)[order]
        self.access = access[self.group]
        self.left = demand.counts[self.group].astype(dtype)
        self.limits = demand.limits[self.group].astype(dtype)
        self.is_limited = bool((demand.limits[self.group] < NO_LIMIT).any())
        requests = np.ascontiguousarray(demand.requests[demand.number[self.group]].T, dtype)
        #: (dimension, group, 1). Where nothing is requested of a dimension, the divisor is 1, and `beyond` is added.
        self.requests: _Table = requests[:, :, None]
        self.divisors: _Table = np.maximum(self.requests, 1)
        self.beyond: _Table | None = None
        if requests.min() == 0:
            self.beyond = np.where(self.requests > 0, 0, _FLOAT_MAX).astype(dtype)
        #: The least request of each group and those after it in its cluster.
        self.least = requests.copy()
        for step_no in range(len(self.first) - 3, -1, -1):
            start, end, last = self.first[step_no : step_no + 3]
            here = self.least[:, start : start + last - end]
            np.minimum(here, self.least[:, end:last], out=here)

    def hosts_needed(self, step: int, clusters: int, totals: Floats) -> Rows:
        """Return about how many empty hosts the next steps take of each cluster; `totals` has those of one host."""
        found = np.zeros(clusters)
        for each in range(step, min(step + _STEPS_TO_REFILL, len(self.first) - 1)):
            start, end = self.first[each : each + 2]
            shares = self.requests[:, start:end, 0] / totals[:, : end - start]
            found[: end - start] += self.left[start:end] * shares.max(axis=0)
        needed: Rows = np.minimum(found, min(4 * float(found.mean()), float(_FLOAT_MAX))).astype(np.int64)
        needed += 1 + _HOSTS_AT_ONCE
        return needed


class _Tables(NamedTuple):
    """Hosts of some clusters in order, with a row for each cluster; where there is none, the rooms are 0."""

    host: Rows
    kind: Rows
    #: (dimension, cluster, place).
    rooms: _Table

    def of(self, rows: Rows | slice) -> "_Tables":
        """Return some rows: a view for a slice, else a copy."""
        return _Tables(self.host[rows], self.kind[rows], self.rooms[:, rows])

    @classmethod
    def empty(cls, rows: int, width: int, dimensions: int, dtype: npt.DTypeLike) -> "_Tables":
        """Return tables without hosts."""
        shape = (rows, width)
        return cls(np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros((dimensions, *shape), dtype))

    def move(self, cells: Rows, other: "_Tables", places: Rows) -> None:
        """Have the hosts of some places of others in some cells."""
        self.host.reshape(-1)[cells] = other.host.reshape(-1)[places]
        self.kind.reshape(-1)[cells] = other.kind.reshape(-1)[places]
        for mine, theirs in zip(self.rooms, other.rooms, strict=True):
            mine.reshape(-1)[cells] = theirs.reshape(-1)[places]


class _Placing:
    """Places the groups of some clusters, step by step."""

    def __init__(self, steps: _Steps, hosts: HostColumns, totals: _Table, is_allowed: Bools, clusters: Rows) -> None:
        self._steps = steps
        rooms = np.ascontiguousarray(totals.T)
        self._hosts = _Tables(np.arange(len(hosts.row)), hosts.kind, rooms)
        self._is_allowed = None if is_allowed.all() else is_allowed.astype(totals.dtype)
        #: Of each cluster: the first host without claims and without any behind it that has claims, and where the
        #: hosts of the cluster end.
        self._unused, self._end = hosts.first[clusters], hosts.first[clusters + 1]
        # That of the host in the middle stands for all of them.
        middle = (self._unused + self._end) // 2
        self._typical = np.maximum(rooms[:, middle].astype(np.float64), 1.0)
        self._tables = _Tables.empty(len(clusters), 0, len(rooms), totals.dtype)
        self._found: list[Claims] = []

    def claims(self) -> list[Claims]:
        """Return the claims of each step after those before it."""
        first = self._steps.first
        for step in range(len(first) - 1):
            clusters = first[step + 1] - first[step]
            rows = slice(0, clusters)
            tables = self._tables.of(rows)
            if step % _STEPS_TO_REFILL == 0:
                needed = self._steps.hosts_needed(step, clusters, self._typical)
                tables = self._tables = self._refilled(tables, step, rows, needed)
            if not self._place(step, tables, rows):
                self._place_others(step, clusters)
        return self._found

    def _place_others(self, step: int, clusters: int) -> None:
        """Go on with more hosts where the step's group has pods left."""
        start, most = self._steps.first[step], 4 * _HOSTS_AT_ONCE
        left = self._steps.left[start : start + clusters]
        rows = left.nonzero()[0]
        seen = self._seen(self._tables.of(rows), rows)
        while True:
            is_open = (left[rows] > 0) & (seen < self._end[rows])
            rows, seen = rows[is_open], seen[is_open]
            if not len(rows):
                return
            part = self._refilled(self._tables.of(rows), step, rows, seen - self._unused[rows] + most)
            self._place(step, part, rows, seen)
            seen, most = self._seen(part, rows), 4 * most
            self._put_back(part, rows, step)

    def _seen(self, tables: _Tables, rows: Rows) -> Rows:
        """Return where the hosts end that some clusters had in the tables."""
        found: Rows = np.maximum(tables.host.max(axis=1, initial=-1) + 1, self._unused[rows])
        return found

    def _put_back(self, part: _Tables, rows: Rows, step: int) -> None:
        """Have the hosts of some clusters as they are in `part`, in place of those that were there."""
        part = self._refilled(part, step, rows, 4 * _HOSTS_AT_ONCE)
        width, before = part.host.shape[1], self._tables.host.shape[1]
        if width > before:
            wider = _Tables.empty(len(self._tables.host), width, len(part.rooms), part.rooms.dtype)
            wider.host[:, :before], wider.kind[:, :before], wider.rooms[:, :, :before] = self._tables
            self._tables = wider
        host, kind, rooms = self._tables
        host[rows, :width], kind[rows, :width], rooms[:, rows, :width] = part
        rooms[:, rows, width:] = 0

    def _refilled(self, tables: _Tables, step: int, rows: Rows | slice, most: Rows | int) -> _Tables:
        """Return tables without the hosts that have room for nothing that follows, and with up to `most` unused ones.

        `rows` are those of the tables among the clusters of the step.
        """
        steps = self._steps
        start, end = steps.first[step : step + 2]
        unused, stop = self._unused[rows], self._end[rows]
        is_kept = (tables.rooms >= steps.least[:, start:end, None][:, rows]).all(axis=0)
        is_kept &= tables.host < unused[:, None]
        kept, width = is_kept.sum(axis=1), tables.host.shape[1]
        added = np.minimum(stop - unused, most)
        wide = int((kept + added).max())
        found = _Tables.empty(len(kept), wide, len(tables.rooms), tables.rooms.dtype)
        cells = is_kept.reshape(-1).nonzero()[0]
        row = cells // max(1, width)
        found.move(np.arange(len(cells)) + (row * wide - (np.cumsum(kept) - kept)[row]), tables, cells)
        row = np.repeat(np.arange(len(kept)), added)
        place = np.arange(len(row)) - (np.cumsum(added) - added)[row]
        found.move((np.arange(len(kept)) * wide + kept)[row] + place, self._hosts, unused[row] + place)
        return found

    def _place(self, step: int, tables: _Tables, rows: Rows | slice, seen: Rows | None = None) -> bool:
        """Place the step's groups of some clusters on their hosts in the tables, in order, from those of `seen` on.

        Return whether all of their pods have a place.
        """
        steps = self._steps
        start, end = steps.first[step : step + 2]
        left, requests = steps.left[start:end][rows], steps.requests[:, start:end][:, rows]
        rooms = tables.rooms if steps.beyond is None else tables.rooms + steps.beyond[:, start:end][:, rows]
        most = _quotients(rooms, steps.divisors[:, start:end][:, rows]).min(axis=0)
        if steps.is_limited:
            np.minimum(most, steps.limits[start:end][rows][:, None], out=most)
        np.minimum(most, left[:, None], out=most)
        if most.dtype.kind == "f":
            np.floor(most, out=most)
        if self._is_allowed is not None:
            numbers = tables.kind + (steps.access[start:end][rows] * self._is_allowed.shape[1])[:, None]
            most *= self._is_allowed.reshape(-1)[numbers]
        if seen is not None:
            most[tables.host < seen[:, None]] = 0
        sums = np.add.accumulate(most, axis=1)
        np.minimum(sums, left[:, None], out=sums)
        taken = sums.copy()
        taken[:, 1:] -= sums[:, :-1]
        cells = taken.reshape(-1).nonzero()[0]
        if not len(cells):
            return False
        tables.rooms[...] -= taken * requests
        row, host = cells // taken.shape[1], tables.host.reshape(-1)[cells]
        left -= sums[:, -1]
        steps.left[start:end][rows] = left
        # Of the hosts of a cluster the last one stays.
        unused = np.zeros(len(left), np.int64)
        unused[row] = host + 1
        self._unused[rows] = np.maximum(self._unused[rows], unused)
        group = steps.group[start:end][rows][row]
        self._found.append(Claims(host, group, taken.reshape(-1)[cells].astype(np.int64)))
        return not left.any()


def _quotients(rooms: _Table, each: _Table) -> _Table:
    """Return quotients, of integers rounded down."""
    found: _Table = rooms / each if rooms.dtype.kind == "f" else rooms // each
    return found


def access_of(kinds: Sequence[HostKind], demand: DemandColumns) -> tuple[Rows, Bools]:
    """Return a number for each group, and whether groups of a number may use hosts of a kind: (number, kind)."""
    shapes = np.array([kind.shape for kind in kinds], np.int64)
    is_risky = np.array([kind.can_be_interrupted for kind in kinds], np.bool_)
    is_coming = np.array([not kind.is_configured for kind in kinds], np.bool_)
    is_allowed = np.zeros((2 * len(demand.accesses), len(shapes)), np.bool_)
    for place, access in enumerate(demand.accesses):
        is_usable = np.isin(shapes, list(access.matching))
        if access.is_pinned:
            is_usable &= ~is_risky
        is_allowed[2 * place], is_allowed[2 * place + 1] = is_usable, is_usable & is_coming
    return 2 * demand.access + demand.is_waiting, is_allowed
