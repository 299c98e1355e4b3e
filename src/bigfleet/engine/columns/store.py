"""Keeps every machine as one row of a few integer columns, and hands out immutable views of them.

Rows stand in id order, so every order by id is an order of integers. Everything that repeats is interned once in the
`Vocabulary`: shapes, offers, stamps, clusters. A change costs the one row that it changes; a view costs the rows that
changed since the buffer that it recycles was filled, or one copy of the columns when an old view is still being read.
The shard's loop alone changes a store; an engine may read a view in another thread at the same time, because a view's
columns and the entries of the vocabulary that it refers to are never written again while it lives. This module does not
decide anything, and must never look at demand.
"""

import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import lt
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from bigfleet.engine.columns.row_lookup import Finder, halved, merged_ids
from bigfleet.engine.snapshot import Snapshot
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine, Stamp
from bigfleet.model.validation import ensure
from bigfleet.model.vector import Vector

#: The state column of a row whose machine was removed; the row goes away when rows are next merged.
REMOVED: Final = 0
#: Changed rows are remembered for so many views back; an older buffer is copied whole.
HISTORY_MAX: Final = 8
#: A vocabulary is made again from what is still used when it holds more than so many times what was used the last time,
#: and so many entries more: a purge costs as much as the entries that came since.
VOCABULARY_GROWTH_MAX: Final = 2
VOCABULARY_SPARE: Final = 50_000
#: New machines that wait for their rows; one more and all get theirs at once, some 30 ms of work in a large fleet.
WAITING_MAX: Final = 8192
#: Changed machines that wait to be written into the columns; one more and all are, together.
WRITTEN_MAX: Final = 4096
#: Bytes of a note.
NOTE_BYTES: Final = 16


class Shape(NamedTuple):
    """What matching looks at (docs/spec/model.md §9)."""

    instance_type: str
    zone: str
    labels: frozenset[tuple[str, str]]
    supply: frozenset[tuple[str, int]]


class Offer(NamedTuple):
    """What a machine costs."""

    capacity_type: int
    price_usd_per_hour: float
    interruption_probability: float


class Vocabulary:
    """Everything that repeats, numbered from 0 in order of first sight. Lists only ever grow: readers take a prefix."""

    def __init__(self) -> None:
        self.shapes: list[Shape] = []
        self.supplies: list[Vector] = []
        #: The supply of each shape, by number.
        self.supply_of_shape: list[int] = []
        self.offers: list[Offer] = []
        self.stamps: list[Stamp] = []
        #: Number 0 is the empty id: no cluster.
        self.clusters: list[str] = [""]
        self._shape_numbers: dict[Shape, int] = {}
        self._supply_numbers: dict[frozenset[tuple[str, int]], int] = {}
        self._supply_keys: list[frozenset[tuple[str, int]]] = []
        self._offer_numbers: dict[Offer, int] = {}
        self._stamp_numbers: dict[Stamp, int] = {}
        self._cluster_numbers: dict[str, int] = {"": 0}

    @property
    def size(self) -> int:
        """How many entries there are."""
        return len(self.shapes) + len(self.offers) + len(self.stamps) + len(self.clusters)

    def shape(self, machine: Machine) -> int:
        """Return the number of the machine's shape."""
        supply = frozenset(machine.supply.items())
        return self.add_shape(Shape(machine.instance_type, machine.zone, frozenset(machine.labels.items()), supply))

    def add_shape(self, shape: Shape) -> int:
        """Return the number of a shape."""
        number = self._shape_numbers.get(shape)
        if number is None:
            known = self._supply_numbers.setdefault(shape.supply, len(self.supplies))
            if known == len(self.supplies):
                self.supplies.append(dict(shape.supply))
                self._supply_keys.append(shape.supply)
            # Thousands of shapes differ in their labels alone.
            shape = shape._replace(supply=self._supply_keys[known])
            number = self._shape_numbers[shape] = len(self.shapes)
            self.supply_of_shape.append(known)
            self.shapes.append(shape)
        return number

    def offer(self, machine: Machine) -> int:
        """Return the number of the machine's offer."""
        return self.add_offer(
            Offer(int(machine.capacity_type), machine.price_usd_per_hour, machine.interruption_probability)
        )

    def add_offer(self, offer: Offer) -> int:
        """Return the number of an offer."""
        number = self._offer_numbers.setdefault(offer, len(self.offers))
        if number == len(self.offers):
            self.offers.append(offer)
        return number

    def stamp(self, machine: Machine) -> int:
        """Return the number of the machine's stamps."""
        return self.add_stamp(machine.stamp)

    def add_stamp(self, stamp: Stamp) -> int:
        """Return the number of stamps."""
        number = self._stamp_numbers.setdefault(stamp, len(self.stamps))
        if number == len(self.stamps):
            self.stamps.append(stamp)
        return number

    def cluster_numbers(self) -> Mapping[str, int]:
        """Return the numbers of the clusters; a live view."""
        return self._cluster_numbers

    def cluster(self, name: str) -> int:
        """Return the number of a cluster id."""
        number = self._cluster_numbers.setdefault(name, len(self.clusters))
        if number == len(self.clusters):
            self.clusters.append(name)
        return number


#: One machine in numbers of the vocabulary, in the order of the columns: state, cluster, shape, offer, stamp, and since
#: when it is Idle, in seconds. A plain tuple: one is made for every machine that changes.
Numbers = tuple[int, int, int, int, int, float]
_CLUSTER: Final = 1


class RowsById(Mapping[MachineId, int]):
    """Rows by id, removed machines included: found by halving, because a table of all would take 70 bytes a machine."""

    __slots__ = ("_ids",)

    def __init__(self, ids: list[MachineId]) -> None:
        self._ids = ids

    def __getitem__(self, machine_id: MachineId) -> int:
        row = halved(self._ids, machine_id)
        if row is None:
            raise KeyError(machine_id)
        return row

    def __iter__(self) -> Iterator[MachineId]:
        return iter(self._ids)

    def __len__(self) -> int:
        return len(self._ids)


class Columns(NamedTuple):
    """One row per machine, ids ascending: 25 bytes a machine."""

    #: `MachineState`, `REMOVED` for a row whose machine is gone.
    state: npt.NDArray[np.uint8]
    cluster: npt.NDArray[np.int32]
    shape: npt.NDArray[np.int32]
    offer: npt.NDArray[np.int32]
    stamp: npt.NDArray[np.int32]
    #: Seconds at which the machine became Idle, NaN when not known.
    idle_since_seconds: npt.NDArray[np.float64]

    @classmethod
    def empty(cls, rows: int) -> "Columns":
        """Return columns of removed rows."""
        cluster, shape, offer, stamp = np.zeros((4, rows), np.int32)
        return cls(np.zeros(rows, np.uint8), cluster, shape, offer, stamp, np.full(rows, np.nan))

    def copied(self) -> "Columns":
        """Return columns of their own memory."""
        return Columns(
            self.state.copy(),
            self.cluster.copy(),
            self.shape.copy(),
            self.offer.copy(),
            self.stamp.copy(),
            self.idle_since_seconds.copy(),
        )

    def put(self, rows: npt.NDArray[Any], source: "Columns", source_rows: Any) -> None:
        """Overwrite some rows with rows of other columns."""
        self.state[rows] = source.state[source_rows]
        self.cluster[rows] = source.cluster[source_rows]
        self.shape[rows] = source.shape[source_rows]
        self.offer[rows] = source.offer[source_rows]
        self.stamp[rows] = source.stamp[source_rows]
        self.idle_since_seconds[rows] = source.idle_since_seconds[source_rows]

    def fill(self, rows: npt.NDArray[np.int64], machines: list[Numbers]) -> None:
        """Overwrite some rows with one machine each."""
        columns: tuple[npt.NDArray[Any], ...] = tuple(self)
        # Without machines there are no columns of them either.
        for column, values in zip(columns, zip(*machines, strict=True), strict=bool(machines)):
            column[rows] = values

    @property
    def bytes_per_machine(self) -> float:
        """Return what a machine takes in the columns."""
        return sum(column.nbytes for column in self) / max(1, len(self.state))


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ColumnSnapshot:
    """Every machine of one moment, in columns. Never written while anybody holds it."""

    ids: list[MachineId]
    #: Row of each id, removed machines included; equal for all views of one layout.
    rows: Mapping[MachineId, int]
    columns: Columns
    vocabulary: Vocabulary
    #: Equal numbers mean equal row numbering: rows are only ever renumbered when ids are added.
    layout: int
    #: Rises by one with each view of a store that differs from the one before.
    generation: int
    #: Rows that each of the last generations changed, by generation.
    history: Mapping[int, npt.NDArray[np.int64]]
    #: The object form of the same moment; None when the store was not made from one.
    source: Snapshot | None = None
    #: Where engines keep what they derive from this view alone.
    derived: dict[object, object] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)

    def changed_since(self, generation: int) -> npt.NDArray[np.int64] | None:
        """Return the rows that differ from an earlier view of the same layout, ascending; None when not known."""
        missing = range(generation + 1, self.generation + 1)
        if generation > self.generation or any(number not in self.history for number in missing):
            return None
        parts = [self.history[number] for number in missing]
        if len(parts) == 1:
            return parts[0]
        return np.unique(np.concatenate(parts)) if parts else np.zeros(0, np.int64)


@dataclass(slots=True, eq=False)
class _Buffer:
    columns: Columns
    generation: int
    #: The view that was made of the columns; they may be written again when it is gone.
    view: "weakref.ref[ColumnSnapshot]"


class ColumnStore:
    """The machines of a shard in columns.

    Invariants: rows are in id order; `_ids` holds all and only ids that have a row; a machine that is waiting for its
    row is in `_waiting` alone, and at most `WAITING_MAX` do.

    A row may carry a note of `NOTE_BYTES`, which says something of the machine as it stands: every change of the
    machine wipes it. Views do not show notes.
    """

    def __init__(self) -> None:
        self.vocabulary = Vocabulary()
        #: Entries of the vocabulary that were used when it was last made again; 0 before.
        self._used_entries = 0
        self._ids: list[MachineId] = []
        self._finder = Finder.of_none()
        self._columns = Columns.empty(0)
        #: Whether a view has the columns too, so that they must not be written.
        self._is_shown = False
        #: One pair of integers per row, zeros for no note; without rows until there is a note.
        self._notes = np.zeros((0, 2), np.uint64)
        #: What `add` took since rows were last merged: ids, columns and notes.
        self._added: list[tuple[Sequence[MachineId], Columns, npt.NDArray[np.uint64]]] = []
        self._waiting: dict[MachineId, Numbers] = {}
        #: What is to be written into which row: together at the next view, in a fraction of the time.
        self._written: dict[int, Numbers] = {}
        #: Notes of some of the waiting.
        self._waiting_notes: dict[MachineId, bytes] = {}
        self._removed = 0
        self._dirty: list[int] = []
        self._layout = 0
        self._generation = 0
        self._history: dict[int, npt.NDArray[np.int64]] = {}
        self._buffers: list[_Buffer] = []
        self._latest: ColumnSnapshot | None = None

    def __len__(self) -> int:
        self._write()
        return len(self._ids) - self._removed + len(self._waiting)

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot) -> "ColumnStore":
        """Build a store of the snapshot's machines. Cost: one pass over them in Python."""
        store = cls()
        since = snapshot.idle_since_seconds
        for machine in snapshot.machines.values():
            store.insert(machine, since.get(machine.id))
        return store

    @property
    def layout(self) -> int:
        """The numbering of the rows; it changes when machines get or lose theirs."""
        self._settle_added()
        return self._layout

    def insert(self, machine: Machine, idle_since_seconds: float | None = None) -> None:
        """Add a machine, or replace the one with its id. O(log n); new ids get their rows later, many at once."""
        vocabulary = self.vocabulary
        self.put(
            machine.id,
            (
                machine.state,
                vocabulary.cluster(machine.cluster),
                vocabulary.shape(machine),
                vocabulary.offer(machine),
                vocabulary.stamp(machine),
                np.nan if idle_since_seconds is None else idle_since_seconds,
            ),
        )

    def put(self, machine_id: MachineId, numbers: Numbers) -> None:
        """Add or replace a machine that is in numbers of the present vocabulary. O(log n)."""
        row = self.row(machine_id)
        if row is None:
            self._waiting[machine_id] = numbers
            self._waiting_notes.pop(machine_id, None)
            self._latest = None
            if len(self._waiting) > WAITING_MAX:
                self._merge()
            return
        written = self._written
        written[row] = numbers
        if len(self._notes):
            self._notes[row] = 0
        self._latest = None
        if len(written) > WRITTEN_MAX:
            self._write()

    def add(self, ids: Sequence[MachineId], columns: Columns, notes: npt.NDArray[np.uint64]) -> None:
        """Add distinct machines that are not known, in numbers of the present vocabulary, each with its note.

        Cost: with the next call of anything else, one merge of all that was added until then.
        """
        self._added.append((ids, columns, notes))
        self._latest = None

    def update(self, machine: Machine, idle_since_seconds: float | None = None) -> None:
        """Replace a machine. O(log n). Raises KeyError when its id is not known."""
        if machine.id not in self._waiting:
            self._live_row(machine.id)
        self.insert(machine, idle_since_seconds)

    def remove(self, machine_id: MachineId) -> None:
        """Forget a machine. O(log n). Raises KeyError when it is not known."""
        if self._waiting.pop(machine_id, None) is not None:
            self._waiting_notes.pop(machine_id, None)
            return
        row = self._live_row(machine_id)
        if row in self._written:
            self._write()
        self._unshare()
        self._columns.state[row] = REMOVED
        self._columns.cluster[row] = 0
        self._columns.idle_since_seconds[row] = np.nan
        if len(self._notes):
            self._notes[row] = 0
        self._removed += 1
        self._dirty.append(row)
        self._latest = None

    def ids_in(self, cluster: str) -> list[MachineId]:
        """Return the machines that carry a cluster, ids ascending. Cost: one look at the column."""
        number = self.vocabulary.cluster_numbers().get(cluster)
        if number is None:
            return []
        self._write()
        members = [self._ids[row] for row in np.flatnonzero(self._columns.cluster == number).tolist()]
        members += [machine_id for machine_id, numbers in self._waiting.items() if numbers[_CLUSTER] == number]
        return sorted(members)

    def note(self, machine_id: MachineId, content: bytes) -> None:
        """Keep a note of a machine until it changes. O(log n). Raises KeyError when it is not known."""
        if machine_id in self._waiting:
            self._waiting_notes[machine_id] = content
            return
        row = self._live_row(machine_id)
        if not len(self._notes):
            self._notes = np.zeros((len(self._ids), 2), np.uint64)
        self._notes[row] = np.frombuffer(content, np.uint64)

    def notes(self) -> npt.NDArray[np.uint64]:
        """Return each row's note as two integers, zeros for none; no rows when there is no note.

        The array is the store's own: it changes with the machines, and another layout has another one.
        """
        self._settle_added()
        return self._notes

    def settle(self) -> None:
        """Give every machine that has none its row."""
        self._settle_added()
        if self._waiting:
            self._merge()

    def rows_without(self, rows: npt.NDArray[np.int64]) -> list[MachineId]:
        """Return the machines that have a row, but for some rows, ids ascending."""
        self._write()
        is_left = self._columns.state != REMOVED
        is_left[rows] = False
        return [self._ids[row] for row in np.flatnonzero(is_left).tolist()]

    def row(self, machine_id: MachineId) -> int | None:
        """Return the machine's row in the present layout, None when it has none."""
        if self._added:
            self._settle_added()
        return self._finder.row(machine_id)

    def snapshot(self, source: Snapshot | None = None) -> ColumnSnapshot:
        """Return a view of this moment; the same object while nothing changed.

        `source` is the object form of the same moment, when the caller has it at hand.
        """
        if self._latest is not None:
            return self._latest
        self._write()
        if self._waiting or self._removed > len(self._ids) // 4:
            self._merge()
        if self.vocabulary.size > VOCABULARY_GROWTH_MAX * self._used_entries + VOCABULARY_SPARE:
            self._forget_unused()
        changed = np.unique(np.array(self._dirty, np.int64))
        self._dirty.clear()
        self._generation += 1
        self._history[self._generation] = changed
        self._history.pop(self._generation - HISTORY_MAX, None)
        # Both have one memory until the store writes again, which a fleet at rest does not.
        columns, self._is_shown = self._columns, True
        self._buffers = [buffer for buffer in self._buffers if buffer.columns is not columns]
        view = ColumnSnapshot(
            ids=self._ids,
            rows=RowsById(self._ids),
            columns=columns,
            vocabulary=self.vocabulary,
            layout=self._layout,
            generation=self._generation,
            history=dict(self._history),
            source=source,
        )
        self._buffers.append(_Buffer(columns, self._generation, weakref.ref(view)))
        self._latest = view
        return view

    def validate(self) -> None:
        """Compare everything with the invariants. Raises InvariantBroken."""
        self._settle_added()
        ids = self._ids
        ensure(all(map(lt, ids, ids[1:])), "columns: ids are not in order")
        ensure(len(ids) == len(self._columns.state), f"columns: {len(ids)} ids and {len(self._columns.state)} rows")
        ensure(self._waiting.keys().isdisjoint(ids), "columns: a machine has a row and waits for one")
        ensure(len(self._waiting) <= WAITING_MAX, f"columns: {len(self._waiting)} machines wait for a row")
        ensure(self._waiting_notes.keys() <= self._waiting.keys(), "columns: a note of a machine that does not wait")
        ensure(all(0 <= row < len(ids) for row in self._written), "columns: a row that does not exist is to be written")

    def _forget_unused(self) -> None:
        """Number what machines still use in a new vocabulary; readers of older views keep the old one."""
        self._unshare()
        old, columns, new = self.vocabulary, self._columns, Vocabulary()
        live = columns.state != REMOVED
        parts: tuple[tuple[npt.NDArray[np.int32], Callable[[int], int]], ...] = (
            (columns.cluster, lambda number: new.cluster(old.clusters[number])),
            (columns.shape, lambda number: new.add_shape(old.shapes[number])),
            (columns.offer, lambda number: new.add_offer(old.offers[number])),
            (columns.stamp, lambda number: new.add_stamp(old.stamps[number])),
        )
        for column, renumber in parts:
            used, place = np.unique(column[live], return_inverse=True)
            column[:] = 0
            column[live] = np.array([renumber(number) for number in used.tolist()], np.int32)[place]
        self.vocabulary, self._used_entries = new, new.size
        self._history.clear()
        self._buffers.clear()

    def _write(self) -> None:
        """Write what is to be written, new rows included."""
        self._settle_added()
        if not self._written:
            return
        self._unshare()
        rows = np.fromiter(self._written, np.int64, len(self._written))
        self._removed -= int(np.count_nonzero(self._columns.state[rows] == REMOVED))
        self._columns.fill(rows, list(self._written.values()))
        self._dirty.extend(self._written)
        self._written.clear()

    def _live_row(self, machine_id: MachineId) -> int:
        row = self.row(machine_id)
        if row is None or (row not in self._written and self._columns.state[row] == REMOVED):
            raise KeyError(machine_id)
        return row

    def _unshare(self) -> None:
        """Have columns that no view has."""
        if self._is_shown:
            self._columns, self._is_shown = self._equal_columns(), False

    def _equal_columns(self) -> Columns:
        """Return columns that equal the store's: those of a view that is gone, brought up to date, or a copy."""
        for buffer in self._buffers:
            missing = range(buffer.generation + 1, self._generation + 1)
            if buffer.view() is None and all(generation in self._history for generation in missing):
                self._buffers.remove(buffer)
                for generation in missing:
                    rows = self._history[generation]
                    buffer.columns.put(rows, self._columns, rows)
                return buffer.columns
        self._buffers = [buffer for buffer in self._buffers if buffer.view() is not None][-HISTORY_MAX:]
        return self._columns.copied()

    def _settle_added(self) -> None:
        """Give the machines that `add` took their rows: all in one merge, because each merge copies all rows."""
        if not self._added:
            return
        batches, self._added = self._added, []
        added_ids, added_columns, added_notes = zip(*batches, strict=True)
        ids, notes = list(chain.from_iterable(added_ids)), np.concatenate(added_notes)
        columns = Columns(*map(np.concatenate, zip(*added_columns, strict=True)))
        if not all(map(lt, ids, ids[1:])):
            added, order = columns, sorted(range(len(ids)), key=ids.__getitem__)
            ids, columns, notes = [ids[place] for place in order], Columns.empty(len(ids)), notes[order]
            columns.put(np.arange(len(ids)), added, order)
        self._insert(ids, columns, notes)

    def _merge(self) -> None:
        """Give waiting machines their rows and drop removed ones; every row is numbered again."""
        ids = sorted(self._waiting)
        columns, notes = Columns.empty(len(ids)), np.zeros((len(ids), 2), np.uint64)
        columns.fill(np.arange(len(ids)), [self._waiting[machine_id] for machine_id in ids])
        for row, machine_id in enumerate(ids if self._waiting_notes else ()):
            if content := self._waiting_notes.get(machine_id):
                notes[row] = np.frombuffer(content, np.uint64)
        has_notes = bool(self._waiting_notes)
        self._waiting.clear()
        self._waiting_notes.clear()
        self._insert(ids, columns, notes if has_notes else notes[:0])

    def _insert(self, new_ids: list[MachineId], new: Columns, new_notes: npt.NDArray[np.uint64]) -> None:
        """Give machines that have none their rows, ids ascending, and drop removed ones; no note is a note of none."""
        self._write()
        # A slice where all stay: most merges drop no row, and a slice copies nothing.
        retained: Any = np.flatnonzero(self._columns.state != REMOVED) if self._removed else slice(None)
        old_ids = [self._ids[row] for row in retained.tolist()] if self._removed else self._ids
        are_last = not old_ids or (len(new_ids) > 0 and old_ids[-1] < new_ids[0])
        places = [len(old_ids)] * len(new_ids) if are_last else [bisect_left(old_ids, each) for each in new_ids]
        self._ids = [*old_ids, *new_ids] if are_last else merged_ids(old_ids, new_ids, places)
        new_rows = np.array(places, np.int64) + np.arange(len(new_ids))
        is_old = np.ones(len(self._ids), np.bool_)
        is_old[new_rows] = False
        columns = Columns.empty(len(self._ids))
        columns.put(is_old, self._columns, retained)
        columns.put(new_rows, new, slice(None))
        if len(self._notes) or len(new_notes):
            notes = np.zeros((len(self._ids), 2), np.uint64)
            if len(self._notes):
                notes[is_old] = self._notes[retained]
            if len(new_notes):
                notes[new_rows] = new_notes
            self._notes = notes
        self._columns, self._is_shown = columns, False
        self._finder = self._finder.merged(self._ids, retained=retained, is_retained=is_old, new_rows=new_rows)
        self._dirty.clear()
        self._history.clear()
        self._buffers.clear()
        self._latest = None
        self._removed = 0
        self._layout += 1


def column_snapshot(snapshot: Snapshot) -> ColumnSnapshot:
    """Return the columns of an object snapshot. Cost: one pass over the machines in Python."""
    return ColumnStore.from_snapshot(snapshot).snapshot(snapshot)
