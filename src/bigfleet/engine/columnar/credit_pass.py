"""Runs the credit pass: recomputes changed clusters and reuses the others (docs/spec/aggregates.md §5.2, §5.3).

An unchanged gang that today's free machines would send to another domain ends the reuse for its cluster's later rows.
Where there is no room for it the pass is run again with the whole cluster fresh, and after a few such rounds with all
of them. This module must not acquire.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from bigfleet.engine.columnar.arrays import (
    FREE,
    HIDDEN,
    MODE_SAME,
    NO_DOMAIN,
    UNDECIDED,
    UNSETTLED,
    FleetArrays,
    Gangs,
    Int32s,
    Int64s,
    Memo,
    Replay,
    Rows,
    Scratch,
    Work,
)
from bigfleet.engine.columnar.earmarks import Earmarks, earmarks_of, start_replay
from bigfleet.engine.columnar.incremental_state import Credits, Flags, IncrementalState
from bigfleet.engine.columnar.kernels.credit import credit
from bigfleet.engine.columnar.segments import Segments, spans
from bigfleet.engine.columnar.setup import again, make_listings, statuses

#: Rounds after which every cluster is credited again.
ROUNDS_MAX: Final = 4
#: Domains that a gang is expected to touch, for the room of memos.
_MEMO_PER_GANG: Final = 16
_MEMO_SPARE: Final = 4096

#: Chooses a domain exactly: (row, gangs, work) → domain and whether it is satisfiable.
ChooseExactly = Callable[[int, Gangs, Work], tuple[int, bool]]


@dataclass(slots=True, eq=False, kw_only=True)
class Pass:
    """One credit pass and what it works on; `run` leaves it done."""

    fleet: FleetArrays
    rows: Rows
    gangs: Gangs
    scratch: Scratch
    segments: Segments
    order: Int32s
    hidden: Int64s
    #: Clusters to be credited from the start; grows while the pass runs.
    fresh: Flags
    previous: IncrementalState | None
    #: The row's number in the last decision, for rows of clusters that are not fresh.
    source: Int64s
    memo_room: int
    #: Under which fits are numbered as they are in the rows.
    fits_version: int
    choose_exactly: ChooseExactly
    #: Whether some domain was chosen outside the kernels: then the next decision may keep nothing.
    is_volatile: bool = False

    def run(self) -> tuple[Work, Memo, Earmarks]:
        """Credit all rows; returns what was written, the memos of open gangs, and what was earmarked."""
        for round_number in range(ROUNDS_MAX + 1):
            if self.previous is None or round_number == ROUNDS_MAX or not self._has_room(self.previous):
                self.previous = None
                self.fresh[:] = True
            work, memo, replay = self._round()
            self.fresh |= work.disputed != 0
            if not (work.disputed == UNSETTLED).any():
                return work, memo, earmarks_of(replay, self.gangs, self.rows, self.order, self.fits_version)
        raise AssertionError("a pass over fresh clusters disputes nothing")

    def _has_room(self, previous: IncrementalState) -> bool:
        return previous.credited_used + self._claims_max() <= len(previous.credited)

    def _claims_max(self) -> int:
        """Return how many machines fresh clusters can be credited with, those recorded for no cluster included."""
        bound = self.segments.bound
        sizes = bound.stop - bound.start
        return int(sizes[self.fresh].sum() + sizes[0])

    def _round(self) -> tuple[Work, Memo, Replay]:
        bound, rows = self.segments.bound, self.rows
        clear(self.segments, self.fresh, self.hidden)
        is_fresh = self.fresh[rows.cluster]
        rows.is_fresh[:] = is_fresh
        fresh = np.flatnonzero(is_fresh)
        listings, listing = make_listings(self.fleet, bound, rows, fresh)
        rows.listing[fresh] = listing
        work, memo = self._start(is_fresh)
        gangs, order, scratch = again(self.gangs), self.order, self.scratch
        earmarks = None if self.previous is None else self.previous.earmarks
        replay = start_replay(earmarks, gangs, rows, self.source, order, self.fits_version)
        place = 0
        while True:
            place = credit(self.fleet, bound, rows, listings, gangs, memo, work, scratch, replay, order, place)
            if place == len(order):
                break
            row = int(order[place])
            self.is_volatile = True
            work.domain[row], work.satisfiable[row] = self.choose_exactly(row, gangs, work)
        return work, memo, replay

    def _start(self, is_fresh: Flags) -> tuple[Work, Memo]:
        """Make room for what is written; rows of unchanged clusters begin where credit left them."""
        fleet, rows, previous = self.fleet, self.rows, self.previous
        machines, size, fits = len(fleet.shape), len(rows.mode), len(fleet.fits)
        memo_start, memo_stop = np.zeros((2, size), np.int64)
        fresh = np.flatnonzero(is_fresh)
        credits = self._uncredited(slice(None)) if len(fresh) == size else self._previous_credits(fresh)
        if previous is None:
            used, credited = 0, np.empty(2 * self.segments.used + 1, np.int32)
            memo = self._new_memo(memo_start, memo_stop)
        else:
            if len(fresh) < size:
                memo_start, memo_stop = (
                    previous.memo.start.take(self.source, mode="clip"),
                    previous.memo.stop.take(self.source, mode="clip"),
                )
                memo_start[fresh] = memo_stop[fresh] = 0
            used, credited = previous.credited_used, previous.credited
            memo = previous.memo._replace(start=memo_start, stop=memo_stop, size=previous.memo.size.copy())
        free = len(fleet.idle) + fleet.speculative.shape[1]
        work = Work(
            status=statuses(machines, self.hidden),
            taken=np.zeros(machines, np.uint8),
            earmarked=np.zeros(machines, np.uint8),
            **credits._asdict(),
            credited=credited,
            acquired=np.empty(free, np.int32),
            acquire_from=np.zeros(size, np.int64),
            acquire_to=np.zeros(size, np.int64),
            taken_row=np.empty(machines, np.int32),
            taken_machine=np.empty(machines, np.int32),
            taken_victim=np.empty(machines, np.uint8),
            lengths=np.array([used, 0, 0, used + self._claims_max()]),
            cursor_idle=np.zeros(fits, np.int64),
            cursor_speculative=np.zeros((len(fleet.speculative), fits), np.int64),
            disputed=np.zeros(len(self.fresh), np.uint8),
        )
        return work, memo

    def _previous_credits(self, fresh: Int64s) -> Credits:
        """Return what the rows begin with when only some are credited from the start."""
        assert self.previous is not None, "without a previous decision every row is new"
        # Numbers of fresh rows mean nothing: what they take is put right behind.
        credits = Credits._make(column.take(self.source, axis=0, mode="clip") for column in self.previous.credits)
        uncredited = self._uncredited(fresh)
        for name in Credits._fields:
            getattr(credits, name)[fresh] = getattr(uncredited, name)
        return credits

    def _uncredited(self, some: "Int64s | slice") -> Credits:
        """Return what rows begin with that are credited from the start."""
        rows = self.rows
        mode, none = rows.mode[some], np.zeros((2, len(rows.mode[some])), np.int64)
        return Credits(
            remaining=rows.aggregate[some].copy(),
            want=rows.mask[some].copy(),
            domain=np.where(mode == MODE_SAME, np.int32(UNDECIDED), np.int32(NO_DOMAIN)),
            satisfiable=np.ones(len(mode), np.uint8),
            is_open=np.zeros(len(mode), np.uint8),
            credit_from=none[0],
            credit_to=none[1],
        )

    def _new_memo(self, start: Int64s, stop: Int64s) -> Memo:
        room = max(self.memo_room, _MEMO_PER_GANG * int((self.rows.mode == MODE_SAME).sum()) + _MEMO_SPARE)
        dimensions = self.fleet.supply.shape[1]
        return Memo(
            start=start,
            stop=stop,
            domain=np.empty(room, np.int32),
            members=np.empty(room, np.int64),
            credit=np.empty((room, dimensions), np.int64),
            own=np.empty((room, dimensions), np.int64),
            size=np.zeros(2, np.int64),
        )


def clear(segments: Segments, fresh: Flags, hidden: Int64s) -> None:
    """Take every claim back that rows of fresh clusters have on what is bound; hidden machines stay hidden."""
    bound = segments.bound
    if fresh.all():
        bound.held[: segments.used] = FREE
    else:
        clusters = np.flatnonzero(fresh)
        bound.held[spans(bound.start[clusters], bound.stop[clusters] - bound.start[clusters])] = FREE
    places = bound.place_of[hidden]
    bound.held[places[places >= 0]] = HIDDEN


def credits_of(work: Work) -> Credits:
    """Return what credit came to, in memory of its own: acquiring writes on."""
    return Credits(*(getattr(work, name).copy() for name in Credits._fields))
