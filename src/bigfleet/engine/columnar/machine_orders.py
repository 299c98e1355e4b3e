"""Maintains the orders in which the phases scan the machines, and updates them for each view.

docs/spec/model.md §3, docs/spec/aggregates.md §5.2. Orders depend on the view alone: which machines a decision may not
see is the caller's business. What changed between two views costs what it touches; where that is not known everything
is sorted again. This module must not drop or prefer a machine.
"""

import numpy as np
import numpy.typing as npt

from bigfleet.engine.columnar.arrays import CONFIGURED, DRAINING, IDLE, SPECULATIVE, Bytes, Floats, Int32s, Int64s
from bigfleet.engine.columnar.kernels.sweeps import merge_order
from bigfleet.engine.columnar.segments import Segments
from bigfleet.engine.columnar.sorting import sort_by
from bigfleet.engine.columnar.tables import VocabularyTables, ranks
from bigfleet.engine.columns.store import ColumnSnapshot
from bigfleet.model.penalty import bucket_upper_dollars

#: More changed rows than this share of all are cheaper to sort again.
_CHANGED_SHARE = 8


class Orders:
    """The orders of one view, each made when it is first asked for."""

    def __init__(self, view: ColumnSnapshot, tables: VocabularyTables) -> None:
        self._tables = tables
        self.view = view
        self.segments = Segments(view, tables)
        state = view.columns.state
        self.idle = self._sorted_by(tables.offer_price, np.flatnonzero(state == IDLE))
        self._sort_coming()
        self._buckets: list[int] = []
        self._lines: dict[bytes, int] = {}
        #: Line of `speculative` for each bucket in use; buckets that order alike share one.
        self.line_of: dict[int, int] = {}
        self.speculative: Int32s = np.zeros((1, 0), np.int32)
        self._configured: Int32s | None = None
        self._free_counts: Int64s | None = None

    @property
    def configured(self) -> Int32s:
        """Configured machines, ids ascending."""
        if self._configured is None:
            found = np.flatnonzero(self.view.columns.state == CONFIGURED)
            self._configured = found.astype(np.int32)
        return self._configured

    def follow(self, view: ColumnSnapshot) -> npt.NDArray[np.integer] | None:
        """Bring the orders up to a later view; returns the clusters whose bound or coming machines changed.

        None when the way from the one view to the other is not known, or too long: then nothing was done.
        """
        old = self.view
        changed = view.changed_since(old.generation) if view.layout == old.layout else None
        if changed is None or len(changed) > len(view.ids) // _CHANGED_SHARE:
            return None
        moved = self.segments.follow(view, self._tables, changed)
        was, now = old.columns.state[changed], view.columns.state[changed]
        repriced = old.columns.offer[changed] != view.columns.offer[changed]
        self._follow_free(view, changed, was, now, repriced)
        if self._free_counts is not None:
            size = max(len(self._free_counts), len(self._tables.supply_of))
            gone, come = _free_shape_counts(old, changed, size), _free_shape_counts(view, changed, size)
            self._free_counts = np.pad(self._free_counts, (0, size - len(self._free_counts))) - gone + come
        self.view = view
        if ((was == DRAINING) | (now == DRAINING)).any():
            self._sort_coming()
        self._configured = None
        return moved

    def _follow_free(
        self,
        view: ColumnSnapshot,
        changed: npt.NDArray[np.integer],
        was: Bytes,
        now: Bytes,
        repriced: npt.NDArray[np.bool_],
    ) -> None:
        for state in (IDLE, SPECULATIVE):
            leaves = changed[(was == state) & ((now != state) | repriced)]
            joins = changed[(now == state) & ((was != state) | repriced)].astype(np.int32)
            if len(leaves) == 0 and len(joins) == 0:
                continue
            is_dropped = np.zeros(len(view.ids), np.uint8)
            is_dropped[leaves] = 1
            offer = view.columns.offer
            if state == IDLE:
                self.idle = _merged(self.idle, is_dropped, len(leaves), joins, offer, self._tables.offer_price)
            elif self._buckets:
                costs = self._line_costs()
                if costs is None:
                    self._buckets = []
                    continue
                lines = [
                    _merged(line, is_dropped, len(leaves), joins, offer, cost)
                    for line, cost in zip(self.speculative, costs, strict=True)
                ]
                self.speculative = np.array(lines, np.int32)

    def _sort_coming(self) -> None:
        columns = self.view.columns
        draining = np.flatnonzero(columns.state == DRAINING)
        wanted = self._tables.stamp_for[columns.stamp[draining]]
        draining, wanted = draining[wanted >= 0], wanted[wanted >= 0]
        #: Draining machines with a preemptor, by (preemptor, id), and the preemptor of each.
        self.coming = draining[np.argsort(wanted, kind="stable")].astype(np.int32)
        self.coming_for: Int64s = np.sort(wanted)

    def _sorted_by(self, cost_of_offer: Floats, rows: npt.NDArray[np.integer]) -> Int32s:
        return sort_by([ranks(cost_of_offer)[self.view.columns.offer[rows]]], rows)

    def _cost(self, bucket: int) -> Floats:
        price, probability = self._tables.offer_price, self._tables.offer_probability
        cost = price.copy()
        risky = probability != 0
        cost[risky] = price[risky] + probability[risky] * max(0.0, bucket_upper_dollars(bucket))
        return cost

    def _line_costs(self) -> list[Floats] | None:
        """Return the costs that each line is ordered by; None when buckets that share a line no longer order alike."""
        costs: list[Floats | None] = [None] * len(self.speculative)
        rank_of: dict[int, bytes] = {}
        for bucket, line in self.line_of.items():
            cost = self._cost(bucket)
            rank = ranks(cost).tobytes()
            if costs[line] is None:
                costs[line] = cost
                rank_of[line] = rank
            elif rank_of[line] != rank:
                return None
        return [cost for cost in costs if cost is not None]

    def use_buckets(self, buckets: list[int]) -> None:
        """Make the orders of Speculative machines for some interruption buckets, one line for all that order alike."""
        if self._buckets and set(buckets) <= set(self._buckets):
            return
        rows = np.flatnonzero(self.view.columns.state == SPECULATIVE)
        self.line_of = {}
        known: dict[bytes, int] = {}
        lines: list[Int32s] = []
        for bucket in buckets:
            cost = self._cost(bucket)
            line = self.line_of[bucket] = known.setdefault(ranks(cost).tobytes(), len(lines))
            if line == len(lines):
                lines.append(self._sorted_by(cost, rows))
        self._buckets = buckets
        self.speculative = np.array(lines, np.int32).reshape(len(lines), len(rows))

    def free_counts(self, hidden: npt.NDArray[np.integer]) -> Int64s:
        """Return per shape how many machines are Idle or Speculative and not hidden; hidden rows differ."""
        if self._free_counts is None:
            everything = np.arange(len(self.view.ids))
            self._free_counts = _free_shape_counts(self.view, everything, len(self._tables.supply_of))
        if len(hidden) == 0:
            return self._free_counts
        return self._free_counts - _free_shape_counts(self.view, hidden, len(self._free_counts))


def _free_shape_counts(view: ColumnSnapshot, rows: npt.NDArray[np.integer], shapes: int) -> Int64s:
    state = view.columns.state[rows]
    free = rows[(state == IDLE) | (state == SPECULATIVE)]
    return np.bincount(view.columns.shape[free], minlength=shapes).astype(np.int64, copy=False)


def _merged(
    order: Int32s,
    is_dropped: Bytes,
    dropped: int,
    joins: Int32s,
    offer: Int32s,
    cost_of_offer: Floats,
) -> Int32s:
    joins = joins[np.lexsort((joins, cost_of_offer[offer[joins]]))]
    merged = np.empty(len(order) - dropped + len(joins), np.int32)
    merge_order(np.ascontiguousarray(order), is_dropped, joins, offer, cost_of_offer, merged)
    return merged
