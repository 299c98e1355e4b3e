"""Sorts the machines of one view into the orders in which the phases walk them (docs/spec/engine.md §1.3, §5.2).

Rows are in id order, so a key of (rank, row) packed into one integer is the whole order. Orders depend on the view
alone: which machines a decision may not see is the caller's business. Nothing here may drop or prefer a machine.
"""

import numpy as np
import numpy.typing as npt

from bigfleet.engine.columnar.arrays import Int32s, Int64s
from bigfleet.engine.columnar.store import ColumnSnapshot
from bigfleet.engine.columnar.tables import Tables, ranks
from bigfleet.model.penalty import bucket_upper_dollars
from bigfleet.model.states import MachineState

_PACKED_BITS_MAX = 62
_DIGIT_BITS = 16


def sort_by(columns: list[Int64s], rows: npt.NDArray[np.integer]) -> Int32s:
    """Return `rows`, given ascending, sorted by the columns, most significant first, then by row."""
    if len(rows) < 2:
        return rows.astype(np.int32)
    widths = [int(column.max()).bit_length() for column in columns]
    row_bits = int(rows[-1]).bit_length()
    if sum(widths) == 0:
        return rows.astype(np.int32)
    if max(widths) <= _DIGIT_BITS:
        return rows[_digit_order(columns, widths)].astype(np.int32)
    if sum(widths) + row_bits > _PACKED_BITS_MAX:
        return rows[np.lexsort(columns[::-1])].astype(np.int32)
    key = np.zeros(len(rows), np.int64)
    for column, width in zip(columns, widths, strict=True):
        key <<= width
        key |= column
    key <<= row_bits
    key |= rows
    key.sort()
    return (key & ((1 << row_bits) - 1)).astype(np.int32)


def _digit_order(columns: list[Int64s], widths: list[int]) -> Int64s:
    """Return the stable order of the columns, as many of them at a time as make one digit of a radix sort.

    NumPy sorts integers of 16 bits by counting, three times faster than it compares longer ones.
    """
    digits = [np.zeros(len(columns[0]), np.int64)]
    bits = 0
    for column, width in zip(reversed(columns), reversed(widths), strict=True):
        if bits + width > _DIGIT_BITS:
            digits.append(np.zeros(len(column), np.int64))
            bits = 0
        digits[-1] |= column << bits
        bits += width
    order = np.argsort(digits[0].astype(np.uint16), kind="stable")
    for digit in digits[1:]:
        order = order[np.argsort(digit[order].astype(np.uint16), kind="stable")]
    return order


class Orders:
    """The orders of one view, each made when it is first asked for."""

    def __init__(self, view: ColumnSnapshot, tables: Tables) -> None:
        self._tables = tables
        columns = view.columns
        self._columns = columns
        self.clusters = len(view.vocabulary.clusters)
        state = columns.state
        #: Machines of each state, ids ascending.
        self.idle_by_id = np.flatnonzero(state == MachineState.IDLE).astype(np.int32)
        self.configured = np.flatnonzero(state == MachineState.CONFIGURED).astype(np.int32)
        self.speculative_by_id = np.flatnonzero(state == MachineState.SPECULATIVE).astype(np.int32)
        self._price_rank = ranks(tables.offer_price)
        self.idle = self._by_price(self.idle_by_id)
        self._sort_bound(np.flatnonzero(state == MachineState.CONFIGURING))
        self._sort_stamped(
            np.flatnonzero(state == MachineState.CREATING), np.flatnonzero(state == MachineState.DRAINING)
        )
        self._buckets: list[int] = []
        #: Line of `speculative` for each bucket in use; buckets that order alike share one.
        self.line_of: dict[int, int] = {}
        self.speculative: Int32s = np.zeros((1, len(self.speculative_by_id)), np.int32)

    def _by_price(self, rows: Int32s) -> Int32s:
        return sort_by([self._price_rank[self._columns.offer[rows]]], rows)

    def _sort_bound(self, configuring: npt.NDArray[np.integer]) -> None:
        """Lay out bound machines: cluster by cluster Configured, then Configuring, each in keep-priority order."""
        columns = self._columns
        is_bound = np.zeros(len(columns.state), np.bool_)
        is_bound[self.configured] = True
        is_bound[configuring] = True
        is_bound &= columns.cluster != 0
        rows = np.flatnonzero(is_bound)
        part = columns.cluster[rows].astype(np.int64) * 2 + (columns.state[rows] == MachineState.CONFIGURING)
        reclamation = ranks(-self._tables.stamp_reclamation)
        self.bound = sort_by([part, self._price_rank[columns.offer[rows]], reclamation[columns.stamp[rows]]], rows)
        #: Shape, and pair of the stamps, of each bound machine, in the same order.
        self.bound_shapes: Int32s = columns.shape[self.bound]
        self.bound_pairs: Int32s = self._tables.stamp_pair[columns.stamp[self.bound]]
        sizes = np.bincount(part, minlength=2 * self.clusters)
        #: Where each cluster's Configured part starts (even places), and its Configuring part (odd ones).
        self.bound_starts: Int64s = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    def _sort_stamped(self, creating: npt.NDArray[np.integer], draining: npt.NDArray[np.integer]) -> None:
        pair = self._tables.stamp_pair[self._columns.stamp[creating]].astype(np.int64)
        self.creating = sort_by([pair], creating)
        self.creating_pair = np.sort(pair)
        wanted = self._tables.stamp_for[self._columns.stamp[draining]]
        draining, wanted = draining[wanted >= 0], wanted[wanted >= 0]
        self.coming = draining[np.argsort(wanted, kind="stable")].astype(np.int32)
        self.coming_for = np.sort(wanted)

    def use_buckets(self, buckets: list[int]) -> None:
        """Make the orders of Speculative machines for some interruption buckets, one line for all that order alike."""
        if buckets == self._buckets:
            return
        tables, rows = self._tables, self.speculative_by_id
        offers = self._columns.offer[rows]
        used = np.unique(offers)
        price, probability = tables.offer_price[used], tables.offer_probability[used]
        risky = probability != 0
        known: dict[bytes, int] = {}
        lines: list[Int32s] = []
        for bucket in buckets:
            cost = price.copy()
            cost[risky] = price[risky] + probability[risky] * max(0.0, bucket_upper_dollars(bucket))
            rank = ranks(cost)
            line = self.line_of[bucket] = known.setdefault(rank.tobytes(), len(lines))
            if line == len(lines):
                lines.append(sort_by([rank[np.searchsorted(used, offers)]], rows))
        self._buckets = buckets
        self.speculative = np.array(lines, np.int32).reshape(len(lines), len(rows))
