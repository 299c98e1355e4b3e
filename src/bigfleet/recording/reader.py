"""Reads a recording: every cycle with the machines, the demand and the options that it was decided on.

docs/adr/0134-a-recording-is-what-the-engine-saw.md. What is read equals what the engine was given: the same rows in the
same columns, the same numbers for repeated values, the same listing. Reading begins at the beginning of any file. It
stops at an incomplete record, and never decides.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from bigfleet import installed_version
from bigfleet.engine.columns.store import Columns, ColumnSnapshot, RowsById, Vocabulary
from bigfleet.engine.decision import Options
from bigfleet.engine.demand_order import ListedRows
from bigfleet.model.ids import MachineId
from bigfleet.model.profile import Profile
from bigfleet.recording.frames import Damage, Frame, FrameKind, Torn, Unpacker, WrongFile, frames
from bigfleet.recording.values import (
    FORMAT,
    CycleRecord,
    DemandDelta,
    MachinesDelta,
    RecordedOutcome,
    RecordingHead,
    VocabularyDelta,
    columns_of,
    need_of,
    options_of,
    profile_of,
    rows_of,
    shape_of,
)

#: Views back that say which rows changed, for readers that follow view by view.
_HISTORY_MAX: Final = 8
#: Raised for a record that BigFleet did not write, or that a later version wrote.
_WRONG: Final = (msgspec.MsgspecError, ValueError, IndexError, TypeError, KeyError)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCycle:
    """One cycle as it was recorded."""

    head: RecordingHead
    cycle: int
    at_unix_nanos: int
    is_timer: bool
    #: Cycles right before this one that were not recorded.
    missed: int
    #: Whether another process, or the same one from nothing, wrote what comes from here on.
    is_fresh: bool
    view: ColumnSnapshot
    demand: ListedRows
    options: Options
    #: None when the engine failed.
    outcome: RecordedOutcome | None


def read_recording(path: Path) -> Iterator[RecordedCycle | Torn]:
    """Yield the cycles of a file in order, and at the end what is left of a record that is not whole.

    Raises WrongFile, Damage (naming the byte), and OSError; everything before was yielded then.
    """
    with path.open("rb") as file:
        head: RecordingHead | None = None
        state, unpacker = _State(), Unpacker()
        for frame in frames(file):
            if isinstance(frame, Torn):
                yield frame
                return
            if frame.kind is FrameKind.HEAD:
                head, unpacker = _head_of(frame), Unpacker()
                continue
            if head is None:
                raise Damage(frame.start, "a cycle without a head before it")
            try:
                record = _CYCLES.decode(unpacker.cycle(frame))
                cycle = state.next(record, head)
            except _WRONG as error:
                raise Damage(frame.start, f"a record that makes no sense ({error})") from error
            yield cycle


def _head_of(frame: Frame) -> RecordingHead:
    try:
        head = _HEADS.decode(frame.content)
    except msgspec.MsgspecError as error:
        raise Damage(frame.start, f"a head that makes no sense ({error})") from error
    if head.format != FORMAT:
        raise WrongFile(
            f"records of format {head.format} from byte {frame.start:,} on, written by bigfleet {head.bigfleet}; this "
            f"version, bigfleet {installed_version()}, reads format {FORMAT}: replay it with the version that wrote it"
        )
    return head


_HEADS: Final = msgspec.msgpack.Decoder(RecordingHead)
_CYCLES: Final = msgspec.msgpack.Decoder(CycleRecord)


class _State:
    """What the last record left."""

    def __init__(self) -> None:
        self._layout = 0
        self._generation = 0
        self._restart()

    def _restart(self) -> None:
        self._vocabulary = Vocabulary()
        self._ids: list[MachineId] = []
        self._columns = Columns.empty(0)
        self._history: dict[int, npt.NDArray[np.int64]] = {}
        self._profiles: list[Profile] = []
        self._demand = ListedRows()
        self._options: Options | None = None

    def next(self, record: CycleRecord, head: RecordingHead) -> RecordedCycle:
        """Return the cycle of the next record. Raises one of `_WRONG`."""
        if record.is_fresh:
            self._restart()
        view = self._view(record.machines)
        self._demand = self._listing(record.demand)
        self._options = options_of(record.options, self._options)
        return RecordedCycle(
            head=head,
            cycle=record.cycle,
            at_unix_nanos=record.at_unix_nanos,
            is_timer=record.is_timer,
            missed=record.missed,
            is_fresh=record.is_fresh,
            view=view,
            demand=self._demand,
            options=self._options,
            outcome=record.outcome,
        )

    # ---- machines ------------------------------------------------------------------------------------------------

    def _view(self, delta: MachinesDelta) -> ColumnSnapshot:
        self._learn(delta.vocabulary)
        if delta.gone or delta.come:
            self._renumber(delta)
        rows = rows_of(delta.rows)
        if len(rows):
            written = columns_of(delta.columns, len(rows))
            self._columns = self._columns.copied()
            self._columns.put(rows, written, np.arange(len(rows)))
            self._check(written)
        self._generation += 1
        self._history[self._generation] = rows
        self._history.pop(self._generation - _HISTORY_MAX, None)
        return ColumnSnapshot(
            ids=self._ids,
            rows=RowsById(self._ids),
            columns=self._columns,
            vocabulary=self._vocabulary,
            layout=self._layout,
            generation=self._generation,
            history=dict(self._history),
        )

    def _learn(self, delta: VocabularyDelta) -> None:
        vocabulary = self._vocabulary
        for name in delta.clusters:
            vocabulary.cluster(name)
        for stamp in delta.stamps:
            vocabulary.add_stamp(stamp)
        for offer in delta.offers:
            vocabulary.add_offer(offer)
        for shape in delta.shapes:
            vocabulary.add_shape(shape_of(shape))

    def _renumber(self, delta: MachinesDelta) -> None:
        gone, come = rows_of(delta.gone), rows_of(delta.come)
        if len(come) != len(delta.ids):
            raise ValueError("as many new rows as ids are expected")
        is_retained = np.ones(len(self._ids), np.bool_)
        is_retained[gone] = False
        retained = int(is_retained.sum())
        is_old = np.ones(retained + len(come), np.bool_)
        is_old[come] = False
        former: Any = np.array([*self._ids, None], object)[:-1]
        ids: Any = np.empty(len(is_old), object)
        ids[come] = np.array([*delta.ids, None], object)[:-1]
        ids[is_old] = former[is_retained]
        columns = Columns.empty(len(is_old))
        columns.put(is_old, self._columns, is_retained)
        self._ids, self._columns = ids.tolist(), columns
        self._layout += 1
        self._history.clear()

    def _check(self, written: Columns) -> None:
        """Raise ValueError for numbers that stand for nothing."""
        vocabulary = self._vocabulary
        is_live = written.state != 0
        sizes = (
            (written.cluster, len(vocabulary.clusters)),
            (written.shape, len(vocabulary.shapes)),
            (written.offer, len(vocabulary.offers)),
            (written.stamp, len(vocabulary.stamps)),
        )
        for column, size in sizes:
            if ((column[is_live] < 0) | (column[is_live] >= size)).any():
                raise ValueError("a machine refers to what was never said")

    # ---- demand --------------------------------------------------------------------------------------------------

    def _listing(self, delta: DemandDelta) -> ListedRows:
        self._profiles.extend(map(profile_of, delta.profiles))
        gone, come = rows_of(delta.gone).tolist(), rows_of(delta.come).tolist()
        if not (gone or come):
            return self._demand
        if len(come) != len(delta.rows):
            raise ValueError("as many new places as rows are expected")
        left = set(gone)
        retained = iter([need for place, need in enumerate(self._demand) if place not in left])
        new = dict(zip(come, (need_of(row, self._profiles[row.profile]) for row in delta.rows), strict=True))
        size = len(self._demand) - len(left) + len(new)
        listed = [new[place] if place in new else next(retained) for place in range(size)]
        return self._demand.followed_by(listed, gone=gone, come=come)
