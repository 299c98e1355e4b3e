"""Computes how the input of each decision differs from that of the one before (docs/adr/0134).

It has its own copy of the columns, 25 bytes a machine, and references to the rows of demand. So it may read a view
while the loop continues, and needs the view only once. After `begin_anew` everything differs. A cycle that was left out
costs nothing but itself. This module must not change what it reads.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from bigfleet.engine.columns.store import Columns, ColumnSnapshot, Vocabulary
from bigfleet.engine.decision import Options
from bigfleet.engine.demand_order import ListedRows
from bigfleet.model.ids import MachineId
from bigfleet.model.need import Need
from bigfleet.recording.values import (
    DemandDelta,
    MachinesDelta,
    OptionsDelta,
    Rows,
    VocabularyDelta,
    columns_bytes,
    need_entry,
    options_delta,
    profile_entry,
    rows_bytes,
    shape_entry,
)

#: Ids that are compared at once where two numberings agree.
_RUN_MAX: Final = 65_536
_NONE: Final = np.zeros(0, np.int64)


class Tracker:
    """What was recorded last, and how the next differs."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget everything: the next differs from nothing."""
        self._vocabulary: Vocabulary | None = None
        #: How many entries of the vocabulary were written.
        self._shapes = self._offers = self._stamps = self._clusters = 0
        self._ids: list[MachineId] = []
        self._columns = Columns.empty(0)
        self._layout = self._generation = -1
        self._profiles: dict[str, int] = {}
        self._demand: Sequence[Need] = ()
        self._options: Options | None = None

    @property
    def is_fresh(self) -> bool:
        """Return whether nothing was recorded yet."""
        return self._vocabulary is None

    def knows(self, view: ColumnSnapshot) -> bool:
        """Return whether the view numbers what repeats as the one before; if not, everything is to be written again."""
        return self._vocabulary is None or self._vocabulary is view.vocabulary

    # ---- machines --------------------------------------------------------------------------------------------------

    def machines(self, view: ColumnSnapshot) -> MachinesDelta:
        """Return how the machines differ, and remember them.

        Cost: the rows that changed; one pass over the ids when some are new; one over the columns when that many views
        were left out that the changes are unknown.
        """
        gone, come = _NONE, _NONE
        rows: Rows | None = None
        if view.layout != self._layout:
            gone, come = differing_ids(self._ids, view.ids)
            self._renumber(gone, come, len(view.ids))
        else:
            rows = view.changed_since(self._generation)
        written = self._differing(view.columns, rows)
        self._columns.put(written, view.columns, written)
        ids = tuple(view.ids[row] for row in come.tolist())
        self._ids, self._layout, self._generation = view.ids, view.layout, view.generation
        return MachinesDelta(
            vocabulary=self._new_entries(view.vocabulary),
            gone=rows_bytes(gone),
            come=rows_bytes(come),
            ids=ids,
            rows=rows_bytes(written),
            columns=columns_bytes(view.columns, written),
        )

    def _renumber(self, gone: Rows, come: Rows, size: int) -> None:
        columns = Columns.empty(size)
        is_old, is_retained = np.ones(size, np.bool_), np.ones(len(self._ids), np.bool_)
        is_old[come] = False
        is_retained[gone] = False
        columns.put(is_old, self._columns, is_retained)
        self._columns = columns

    def _differing(self, columns: Columns, rows: Rows | None) -> Rows:
        """Return the rows that differ from the copy, looking at some or at all."""
        differs = np.zeros(len(columns.state) if rows is None else len(rows), np.bool_)
        for mine, theirs in zip(_as_numbers(self._columns), _as_numbers(columns), strict=True):
            # Half the time of an index, which does the same.
            differs |= mine != theirs if rows is None else mine.take(rows) != theirs.take(rows)
        found = np.flatnonzero(differs)
        return found if rows is None else rows[found]

    def _new_entries(self, vocabulary: Vocabulary) -> VocabularyDelta:
        """Return the entries that were not written yet. The lists grow meanwhile: what is there now is taken."""
        self._vocabulary = vocabulary
        # What others refer to was added first, so it is looked at last.
        clusters, stamps = vocabulary.clusters[self._clusters :], vocabulary.stamps[self._stamps :]
        offers, shapes = vocabulary.offers[self._offers :], vocabulary.shapes[self._shapes :]
        self._clusters += len(clusters)
        self._stamps += len(stamps)
        self._offers += len(offers)
        self._shapes += len(shapes)
        return VocabularyDelta(
            clusters=tuple(clusters),
            stamps=tuple(stamps),
            offers=tuple(offers),
            shapes=tuple(map(shape_entry, shapes)),
        )

    # ---- demand ----------------------------------------------------------------------------------------------------

    def demand(self, listed: Sequence[Need]) -> DemandDelta:
        """Return how the rows differ, and remember them.

        Cost: the rows that came or went; one look at each row's identity where the listing does not say which.
        """
        before, self._demand = self._demand, listed
        if listed is before:
            return DemandDelta()
        gone, come = _places(before, listed)
        profiles = []
        entries = []
        for place in come.tolist():
            need = listed[place]
            number = self._profiles.get(need.fingerprint)
            if number is None:
                number = self._profiles[need.fingerprint] = len(self._profiles)
                profiles.append(profile_entry(need.profile))
            entries.append(need_entry(need, number))
        return DemandDelta(profiles=tuple(profiles), gone=rows_bytes(gone), come=rows_bytes(come), rows=tuple(entries))

    # ---- options ---------------------------------------------------------------------------------------------------

    def options(self, options: Options) -> OptionsDelta:
        """Return how the options differ, and remember them."""
        before, self._options = self._options, options
        return options_delta(options, before)


def _as_numbers(columns: Columns) -> tuple[npt.NDArray[np.integer], ...]:
    """Return columns that compare bit for bit: two NaN are the same, zeros of two signs are not."""
    state, cluster, shape, offer, stamp, idle_since_seconds = columns
    return state, cluster, shape, offer, stamp, idle_since_seconds.view(np.int64)


def differing_ids(old: list[MachineId], new: list[MachineId]) -> tuple[Rows, Rows]:
    """Return the places of ids that only the old list has, and of those that only the new one has; both ascend.

    Where both agree they are compared in long runs: ids that stay are the same objects.
    """
    if not old or not new:
        return np.arange(len(old)), np.arange(len(new))
    gone: list[int] = []
    come: list[int] = []
    left, right = 0, 0
    while left < len(old) and right < len(new):
        run = _common_run(old, left, new, right)
        left += run
        right += run
        if left < len(old) and right < len(new):
            if old[left] < new[right]:
                gone.append(left)
                left += 1
            else:
                come.append(right)
                right += 1
    gone.extend(range(left, len(old)))
    come.extend(range(right, len(new)))
    return np.array(gone, np.int64), np.array(come, np.int64)


def _common_run(old: list[MachineId], left: int, new: list[MachineId], right: int) -> int:
    """Return how many ids are equal from two places on."""
    equal, step = 0, 1
    most = min(len(old) - left, len(new) - right)
    while equal < most:
        step = min(step, most - equal)
        at, to = left + equal, right + equal
        if old[at : at + step] == new[to : to + step]:
            equal += step
            step = min(2 * step, _RUN_MAX)
        elif step == 1:
            break
        else:
            step //= 2
    return equal


def _places(before: Sequence[Need], listed: Sequence[Need]) -> tuple[Rows, Rows]:
    """Return the places of rows that went and of rows that came; the others are the same objects in the same order."""
    if isinstance(before, ListedRows) and isinstance(listed, ListedRows) and listed.since is before.moment:
        return np.array(listed.gone, np.int64), np.array(listed.come, np.int64)
    old = np.fromiter(map(id, before), np.int64, len(before))
    new = np.fromiter(map(id, listed), np.int64, len(listed))
    is_retained, is_old = np.isin(old, new), np.isin(new, old)
    if not np.array_equal(old[is_retained], new[is_old]):
        return np.arange(len(before)), np.arange(len(listed))
    gone, come = np.flatnonzero(~is_retained), np.flatnonzero(~is_old)
    return gone, come
