"""Keeps every machine as one row of a few integer columns, and hands out immutable views of them.

Rows stand in id order, so every order by id is an order of integers. Everything that repeats is interned once in the
`Vocabulary`: shapes, offers, stamps, clusters. A change costs the one row that it changes; a view costs the rows that
changed since the buffer that it recycles was filled, or one copy of the columns when an old view is still being read.
The shard's loop alone changes a store; an engine may read a view in another thread at the same time, because a view's
columns and the entries of the vocabulary that it refers to are never written again while it lives. Nothing here
decides anything, and nothing here may ever look at demand.
"""

import weakref
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from bigfleet.engine.snapshot import Snapshot
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine, PreemptedFor
from bigfleet.model.vector import Vector

#: The state column of a row whose machine was removed; the row goes away when rows are next merged.
REMOVED: Final = 0
#: Changed rows are remembered for so many views back; an older buffer is copied whole.
HISTORY_MAX: Final = 8
#: A vocabulary with more entries than this per machine, and this many, is made anew from what is still used.
VOCABULARY_PER_MACHINE_MAX: Final = 8
VOCABULARY_SPARE: Final = 100_000


class Shape(NamedTuple):
    """What matching looks at (docs/spec/engine.md §3)."""

    instance_type: str
    zone: str
    labels: frozenset[tuple[str, str]]
    supply: frozenset[tuple[str, int]]


class Offer(NamedTuple):
    """What a machine costs."""

    capacity_type: int
    price_usd_per_hour: float
    interruption_probability: float


class Stamp(NamedTuple):
    """What a machine was bound, bought or preempted for."""

    fingerprint: str
    group: str
    priority: int
    interruption_dollars: float
    reclamation_dollars: float
    intended_cluster: str
    preempted_for: PreemptedFor | None


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
        stamp = Stamp(
            machine.assigned_need_fingerprint,
            machine.assigned_group,
            machine.assigned_priority,
            machine.assigned_interruption_penalty_dollars,
            machine.assigned_reclamation_penalty_dollars,
            machine.intended_cluster,
            machine.preempted_for,
        )
        return self.add_stamp(stamp)

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

    def put(self, rows: npt.NDArray[Any], source: "Columns", source_rows: npt.NDArray[Any]) -> None:
        """Overwrite some rows with rows of other columns."""
        self.state[rows] = source.state[source_rows]
        self.cluster[rows] = source.cluster[source_rows]
        self.shape[rows] = source.shape[source_rows]
        self.offer[rows] = source.offer[source_rows]
        self.stamp[rows] = source.stamp[source_rows]
        self.idle_since_seconds[rows] = source.idle_since_seconds[source_rows]

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

    Invariants: rows are in id order once merged; `_rows` holds all and only ids that have a row; a machine that is
    waiting for its row is in `_waiting` alone.
    """

    def __init__(self) -> None:
        self.vocabulary = Vocabulary()
        self._ids: list[MachineId] = []
        self._rows: dict[MachineId, int] = {}
        self._columns = Columns.empty(0)
        self._waiting: dict[MachineId, tuple[Machine, float]] = {}
        self._removed = 0
        self._dirty: list[int] = []
        self._layout = 0
        self._generation = 0
        self._history: dict[int, npt.NDArray[np.int64]] = {}
        self._buffers: list[_Buffer] = []
        self._latest: ColumnSnapshot | None = None

    def __len__(self) -> int:
        return len(self._rows) - self._removed + len(self._waiting)

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot) -> "ColumnStore":
        """Build a store of the snapshot's machines. Cost: one pass over them in Python."""
        store = cls()
        since = snapshot.idle_since_seconds
        for machine in snapshot.machines.values():
            store.insert(machine, since.get(machine.id))
        return store

    def insert(self, machine: Machine, idle_since_seconds: float | None = None) -> None:
        """Add a machine, or replace the one with its id. O(1); new ids get their rows at the next view."""
        row = self._rows.get(machine.id)
        if row is None:
            self._waiting[machine.id] = (machine, np.nan if idle_since_seconds is None else idle_since_seconds)
            self._latest = None
            return
        self._removed -= int(self._columns.state[row] == REMOVED)
        self._write(row, machine, idle_since_seconds)
        self._touch(row)

    def update(self, machine: Machine, idle_since_seconds: float | None = None) -> None:
        """Replace a machine. O(1). Raises KeyError when its id is not known."""
        row = self._rows.get(machine.id)
        if machine.id not in self._waiting and (row is None or self._columns.state[row] == REMOVED):
            raise KeyError(machine.id)
        self.insert(machine, idle_since_seconds)

    def remove(self, machine_id: MachineId) -> None:
        """Forget a machine. O(1). Raises KeyError when it is not known."""
        if self._waiting.pop(machine_id, None) is not None:
            return
        row = self._rows[machine_id]
        if self._columns.state[row] == REMOVED:
            raise KeyError(machine_id)
        self._columns.state[row] = REMOVED
        self._columns.cluster[row] = 0
        self._columns.idle_since_seconds[row] = np.nan
        self._removed += 1
        self._touch(row)

    def snapshot(self, source: Snapshot | None = None) -> ColumnSnapshot:
        """Return a view of this moment; the same object while nothing changed.

        `source` is the object form of the same moment, when the caller has it at hand.
        """
        if self._latest is not None:
            return self._latest
        if self._waiting or self._removed > len(self._ids) // 4:
            self._merge()
        if self.vocabulary.size > VOCABULARY_PER_MACHINE_MAX * len(self._ids) + VOCABULARY_SPARE:
            self._forget_unused()
        changed = np.unique(np.array(self._dirty, np.int64))
        self._dirty.clear()
        self._generation += 1
        self._history[self._generation] = changed
        self._history.pop(self._generation - HISTORY_MAX, None)
        columns = self._published()
        view = ColumnSnapshot(
            ids=self._ids,
            rows=self._rows,
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

    def _forget_unused(self) -> None:
        """Number what machines still use in a new vocabulary; readers of older views keep the old one."""
        old, columns, new = self.vocabulary, self._columns, Vocabulary()
        live = columns.state != REMOVED
        parts: tuple[tuple[npt.NDArray[np.int32], Callable[[int], int]], ...] = (
            (columns.cluster, lambda number: new.cluster(old.clusters[number])),
            (columns.shape, lambda number: new.add_shape(old.shapes[number])),
            (columns.offer, lambda number: new.add_offer(old.offers[number])),
            (columns.stamp, lambda number: new.add_stamp(old.stamps[number])),
        )
        for column, number_anew in parts:
            used, place = np.unique(column[live], return_inverse=True)
            column[:] = 0
            column[live] = np.array([number_anew(number) for number in used.tolist()], np.int32)[place]
        self.vocabulary = new
        self._history.clear()
        self._buffers.clear()

    def _touch(self, row: int) -> None:
        self._dirty.append(row)
        self._latest = None

    def _write(self, row: int, machine: Machine, idle_since_seconds: float | None) -> None:
        columns, vocabulary = self._columns, self.vocabulary
        columns.state[row] = machine.state
        columns.cluster[row] = vocabulary.cluster(machine.cluster)
        columns.shape[row] = vocabulary.shape(machine)
        columns.offer[row] = vocabulary.offer(machine)
        columns.stamp[row] = vocabulary.stamp(machine)
        columns.idle_since_seconds[row] = np.nan if idle_since_seconds is None else idle_since_seconds

    def _published(self) -> Columns:
        """Return columns that equal the store's: a recycled buffer brought up to date, or a copy."""
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

    def _merge(self) -> None:
        """Give waiting machines their rows and drop removed ones; every row is numbered anew."""
        kept = np.flatnonzero(self._columns.state != REMOVED)
        old_ids = self._ids if len(kept) == len(self._ids) else [self._ids[row] for row in kept.tolist()]
        waiting = sorted(self._waiting)
        places = np.array([bisect_left(old_ids, machine_id) for machine_id in waiting], np.int64)
        new_rows = places + np.arange(len(waiting))
        total = len(old_ids) + len(waiting)
        is_old = np.ones(total, np.bool_)
        is_old[new_rows] = False
        columns = Columns.empty(total)
        columns.put(is_old, self._columns, kept)
        # Sorting two sorted runs is one merge.
        self._ids = sorted([*old_ids, *waiting])
        self._rows = {machine_id: row for row, machine_id in enumerate(self._ids)}
        self._columns = columns
        for row, machine_id in zip(new_rows.tolist(), waiting, strict=True):
            machine, since = self._waiting[machine_id]
            self._write(row, machine, since)
        self._waiting.clear()
        self._dirty.clear()
        self._history.clear()
        self._buffers.clear()
        self._removed = 0
        self._layout += 1


def column_snapshot(snapshot: Snapshot) -> ColumnSnapshot:
    """Return the columns of an object snapshot. Cost: one pass over the machines in Python."""
    return ColumnStore.from_snapshot(snapshot).snapshot(snapshot)
