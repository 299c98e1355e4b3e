"""Stores the current machines of a shard (docs/spec/model.md §3).

Every insert and update is checked against the invariant; a record that breaks it is refused and the last good one
stays. The same change goes to the columns that the engine decides on (ADR 0110), so the cost of a snapshot grows with
the changes. Machines are stored in parts (`bigfleet.shard.inventory.machine_record`) and assembled on request. Only the
shard's loop touches it; other threads read immutable snapshots of it. It never sorts or copies the machines.
"""

import math
from collections import Counter
from collections.abc import Iterator, KeysView, Sequence, Set
from itertools import compress, islice, repeat
from typing import Final

import numpy as np
import numpy.typing as npt

from bigfleet.engine.columns.objects import machine_at, resources_of, snapshot_of
from bigfleet.engine.columns.store import NOTE_BYTES, Columns, ColumnSnapshot, ColumnStore
from bigfleet.engine.snapshot import Snapshot
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine, invariant_fault
from bigfleet.model.states import MachineState, is_legal_transition
from bigfleet.model.validation import ensure
from bigfleet.shard.inventory.host_texts import PickedTexts
from bigfleet.shard.inventory.machine_record import (
    Binding,
    InventoryRecord,
    Keeper,
    NumberedBinding,
    NumberedFacts,
    Picked,
    binding_of,
)
from bigfleet.shard.inventory.packed_records import PackedRecords

#: So many machines are assembled and compared at one validation; the indexes are compared as a whole.
VALIDATED_MAX: Final = 50


_NO_DIGEST: Final = bytes(NOTE_BYTES)


class InventoryRefusal(Exception):
    """An operation that the inventory does not take; `reason` is exists, unknown, transition or a broken invariant."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Inventory:
    """Machines by id, with the moments of their last transitions.

    Invariants: all and only machines that pass `invariant_fault`; a machine has an idle-since stamp if and only if it
    is Idle; every machine has a state-since stamp; `_members` counts all and only machines with a cluster; the columns
    hold the same machines with the same stamps.
    """

    def __init__(self) -> None:
        self._machines = PackedRecords()
        self._idle_since_seconds: dict[MachineId, float] = {}
        #: Of all and only the machines whose stamp is not `_first_unix_nanos`, which the first List gives to most.
        self._state_since_unix_nanos: dict[MachineId, int] = {}
        self._first_unix_nanos: int | None = None
        #: How many machines carry each cluster.
        self._members: dict[str, int] = {}
        self._store = ColumnStore()
        self._keeper = Keeper(self._store.vocabulary)
        self._changed: set[MachineId] = set()
        #: Where the next validation goes on.
        self._validated = 0
        #: Machines of the last validation, each with itself as columns hold it.
        self._as_in_columns: dict[MachineId, tuple[Machine, Machine]] = {}
        #: The newest snapshot that was taken, perhaps older than the present; other threads may read it.
        self.latest_snapshot = self._store.snapshot()

    def __len__(self) -> int:
        return len(self._machines)

    def __contains__(self, machine_id: object) -> bool:
        return machine_id in self._machines

    def lacking(self, ids: Sequence[MachineId]) -> npt.NDArray[np.bool_]:
        """Say of each of many machines whether it is not known."""
        return self._machines.lacking(ids)

    def equal(self, machines: Sequence[Machine]) -> npt.NDArray[np.bool_]:
        """Return for each of many machines whether it is known like this, but for stamps.

        False also where it is not known without a look at `record_of` the machine.
        """
        return self._machines.equal(machines)

    @property
    def insertions(self) -> int:
        """How many machines were added since the start; the same number twice means that none came between."""
        return self._machines.insertions

    def __iter__(self) -> Iterator[Machine]:
        return (record.machine(machine_id) for machine_id, record in self._machines.items())

    def get(self, machine_id: str) -> Machine | None:
        """Return the machine, made for the caller, or None when it is not known. Cost: some microseconds."""
        known = MachineId(machine_id)
        record = self._machines.find(known)
        return None if record is None else record.machine(known)

    def known(self, machine_id: MachineId) -> Machine:
        """Return the machine, made for the caller. Raises InventoryRefusal when it is unknown."""
        return self._known(machine_id).machine(machine_id)

    def record_of(self, machine_id: MachineId) -> InventoryRecord | None:
        """Return the record of a machine, None when it is not known."""
        return self._machines.find(machine_id)

    def state_of(self, machine_id: MachineId) -> MachineState | None:
        """Return the state of a machine, None when it is not known."""
        record = self._machines.find(machine_id)
        return None if record is None else record.state

    @property
    def ids(self) -> KeysView[MachineId]:
        """The machines that are known; a live view."""
        return self._machines.keys()

    @property
    def clusters(self) -> Set[str]:
        """The clusters that any machine carries; a live view."""
        return self._members.keys()

    def bound_to(self, cluster: str) -> list[MachineId]:
        """Return the ids of the machines that carry this cluster, ascending. Cost: one look at a column."""
        return self._store.ids_in(cluster) if cluster in self._members else []

    def count_bound_to(self, cluster: str) -> int:
        """Return how many machines carry this cluster."""
        return self._members.get(cluster, 0)

    def idle_since_seconds(self, machine_id: MachineId) -> float | None:
        """Return the monotonic second at which the machine became Idle, None when it is not Idle."""
        return self._idle_since_seconds.get(machine_id)

    def state_since_unix_nanos(self, machine_id: MachineId) -> int:
        """Return when this process first saw the machine in its state; 0 when it is not known."""
        if machine_id not in self._machines:
            return 0
        return self._state_since_unix_nanos.get(machine_id, self._first_unix_nanos or 0)

    def changed_at_unix_nanos(self, machine_id: MachineId) -> int | None:
        """Return when the machine entered its state; None if it was in it when this process first saw machines."""
        return self._state_since_unix_nanos.get(machine_id)

    def insert(self, machine: Machine, *, now_seconds: float, now_unix_nanos: int = 0) -> None:
        """Add a machine. Raises InventoryRefusal when the id exists or the record breaks the invariant."""
        if machine.id in self._machines:
            raise InventoryRefusal("exists", f"{machine.id}: a machine with this id exists already")
        self.replace(machine, None, now_seconds, now_unix_nanos)

    def apply(self, machine: Machine, *, now_seconds: float, now_unix_nanos: int = 0) -> InventoryRecord:
        """Replace a machine by a driven transition or an update, and return the record before.

        Raises InventoryRefusal when it is unknown, the transition is not in the table, or the invariant is broken.
        """
        before = self._known(machine.id)
        if not is_legal_transition(before.state, machine.state):
            raise InventoryRefusal(
                "transition", f"{machine.id}: {before.state.label} to {machine.state.label} is no legal transition"
            )
        self.replace(machine, before, now_seconds, now_unix_nanos)
        return before

    def observe(self, machine: Machine, *, now_seconds: float, now_unix_nanos: int = 0) -> InventoryRecord:
        """Replace a machine by what its provider reports, whatever the table says, and return the record before.

        Raises InventoryRefusal when it is unknown or the invariant is broken.
        """
        before = self._known(machine.id)
        self.replace(machine, before, now_seconds, now_unix_nanos)
        return before

    def remove(self, machine_id: str) -> InventoryRecord:
        """Forget a machine and return its record. Raises InventoryRefusal when it is unknown."""
        known = MachineId(machine_id)
        before = self._known(known)
        del self._machines[known]
        self._idle_since_seconds.pop(known, None)
        self._state_since_unix_nanos.pop(known, None)
        self._count(before.cluster, -1)
        self._store.remove(known)
        self._changed.add(known)
        return before

    def snapshot(self) -> ColumnSnapshot:
        """Return an immutable view of this moment in columns; the same object while nothing changed.

        Cost: the machines that changed since the view before, or a merge of all of them when some are new.
        """
        if self._changed:
            self.latest_snapshot = self._store.snapshot()
            self._changed = set()
        return self.latest_snapshot

    @property
    def changed_since_snapshot(self) -> Set[MachineId]:
        """The machines that were inserted, changed or removed since `latest_snapshot` was taken."""
        return self._changed

    # ---- many machines at once -------------------------------------------------------------------------------------

    def numbered_facts(self, machine: Machine) -> NumberedFacts:
        """Return the facts of a machine, in numbers of the present vocabulary."""
        return self._keeper.facts(machine, self._store.vocabulary)

    def numbered_binding(self, binding: Binding) -> NumberedBinding:
        """Return a binding, in numbers of the present vocabulary."""
        return self._keeper.binding(binding, self._store.vocabulary)

    def insert_many(
        self,
        ids: Sequence[MachineId],
        facts: Picked[NumberedFacts],
        bindings: Picked[NumberedBinding],
        texts: PickedTexts,
        digests: npt.NDArray[np.uint64],
        *,
        now_seconds: float,
        now_unix_nanos: int,
    ) -> None:
        """Add distinct machines that are not known and that hold the invariant, with the digests of their records.

        The numbers are those of the present vocabulary. Cost: one merge of all rows, and some microseconds a machine.
        """
        if self._first_unix_nanos is None:
            self._first_unix_nanos = now_unix_nanos
        if now_unix_nanos != self._first_unix_nanos:
            self._state_since_unix_nanos.update(zip(ids, repeat(now_unix_nanos)))
        states = np.array([binding.state for binding in bindings.values], np.uint8)[bindings.which]
        is_idle = states == MachineState.IDLE
        self._idle_since_seconds.update(zip(compress(ids, is_idle.tolist()), repeat(now_seconds)))
        members = np.bincount(bindings.which, minlength=len(bindings.values)).tolist()
        for binding, count in zip(bindings.values, members, strict=True):
            self._count(binding.binding.cluster, count)
        columns = Columns(
            state=states,
            cluster=np.array([binding.cluster for binding in bindings.values], np.int32)[bindings.which],
            shape=np.array([each.shape for each in facts.values], np.int32)[facts.which],
            offer=np.array([each.offer for each in facts.values], np.int32)[facts.which],
            stamp=np.array([binding.stamp for binding in bindings.values], np.int32)[bindings.which],
            idle_since_seconds=np.where(is_idle, now_seconds, math.nan),
        )
        self._store.add(ids, columns, digests)
        self._machines.add(
            ids,
            facts.spread([each.facts for each in facts.values]),
            bindings.spread([binding.binding for binding in bindings.values]),
            texts,
        )
        self._changed.update(ids)

    # ---- digests of records -----------------------------------------------------------------------------------------

    def note(self, machine_id: MachineId, digest: bytes) -> None:
        """Keep the digest of the record that says what is known of a machine, until anything of the machine changes."""
        self._store.note(machine_id, digest)

    def forget_note(self, machine_id: MachineId) -> None:
        """Forget the digest of a machine's record: the next record is read, also an equal one."""
        self._store.note(machine_id, _NO_DIGEST)

    def noted(self) -> npt.NDArray[np.uint64]:
        """Return the digest of each row as two integers, zeros for none; no rows when there is no digest."""
        return self._store.notes()

    def settle(self) -> None:
        """Give every machine a row, which may number them all again."""
        self._store.settle()

    @property
    def layout(self) -> int:
        """The numbering of the rows; only within one are row numbers the same."""
        return self._store.layout

    def row(self, machine_id: MachineId) -> int | None:
        """Return the row of a machine in the present layout, None when it has none."""
        return self._store.row(machine_id)

    def ids_without(self, rows: npt.NDArray[np.int64]) -> list[MachineId]:
        """Return the machines that have a row, but for some rows, ids ascending."""
        return self._store.rows_without(rows)

    def _known(self, machine_id: MachineId) -> InventoryRecord:
        record = self._machines.find(machine_id)
        if record is None:
            raise InventoryRefusal("unknown", f"{machine_id}: no machine with this id is known")
        return record

    def replace(
        self,
        machine: Machine,
        before: InventoryRecord | None,
        now_seconds: float,
        now_unix_nanos: int,
        binding: Binding | None = None,
    ) -> None:
        """Store a machine in place of the record that the caller has just read of it; None for a new machine.

        `binding` holds its stamps when they are not those of the machine; state and cluster are the same in both.
        Raises InventoryRefusal when the invariant is broken.
        """
        fault = invariant_fault(machine)
        if fault is not None:
            raise InventoryRefusal(fault[0].value, f"{machine.id}: {fault[1]}")
        machine_id, state = machine.id, machine.state
        former = None if before is None else before.binding
        if former is None or former.state is not state:
            if self._first_unix_nanos is None:
                self._first_unix_nanos = now_unix_nanos
            if now_unix_nanos == self._first_unix_nanos:
                self._state_since_unix_nanos.pop(machine_id, None)
            else:
                self._state_since_unix_nanos[machine_id] = now_unix_nanos
            if state is MachineState.IDLE:
                self._idle_since_seconds[machine_id] = now_seconds
            else:
                self._idle_since_seconds.pop(machine_id, None)
        former_cluster = "" if former is None else former.cluster
        if former_cluster != machine.cluster:
            self._count(former_cluster, -1)
            self._count(machine.cluster, 1)
        store = self._store
        since_seconds = self._idle_since_seconds[machine_id] if state is MachineState.IDLE else math.nan
        record, numbers = self._keeper.keep(machine, binding or binding_of(machine), since_seconds, store.vocabulary)
        self._machines[machine_id] = record
        store.put(machine_id, numbers)
        self._changed.add(machine_id)

    def validate(self) -> None:
        """Compare with the invariants every index, and the values of `VALIDATED_MAX` machines, the next ones each time.

        Raises InvariantBroken.
        """
        records, since = self._machines, self._idle_since_seconds
        idle = {machine_id for machine_id, record in records.items() if record.state is MachineState.IDLE}
        ensure(since.keys() == idle, "inventory: idle-since stamps are not those of Idle machines")
        ensure(self._state_since_unix_nanos.keys() <= records.keys(), "inventory: a state-since stamp of no machine")
        members = Counter(record.cluster for record in records.values() if record.cluster)
        ensure(self._members == members, f"inventory: counts {self._members}, and clusters carry {dict(members)}")
        self._store.validate()
        self._machines.validate()
        ensure(len(self._store) == len(records), "inventory: the columns hold other machines")
        first = self._validated if self._validated < len(records) else 0
        self._validated = first + VALIDATED_MAX
        machines = [records[each].machine(each) for each in islice(records, first, first + VALIDATED_MAX)]
        for machine in machines:
            fault = invariant_fault(machine)
            ensure(fault is None, f"inventory: {machine.id}: {fault}")
        if not self._changed:
            self._validate_columns(machines)

    def _validate_columns(self, machines: Sequence[Machine]) -> None:
        # Columns hold what decisions read; what they leave out, such as hosts, is left out on both sides. Most machines
        # are those of the last validation.
        before = self._as_in_columns
        others = [machine for machine in machines if before.get(machine.id, (None,))[0] != machine]
        rebuilt = snapshot_of(ColumnStore.from_snapshot(Snapshot.of(others)).snapshot()).machines if others else {}
        self._as_in_columns = {
            each.id: (each, rebuilt[each.id]) if each.id in rebuilt else before[each.id] for each in machines
        }
        view = self.latest_snapshot
        resources = resources_of(view.vocabulary)
        for machine in machines:
            row = view.rows[machine.id]
            shown, stamp = machine_at(view, row, resources), float(view.columns.idle_since_seconds[row])
            ensure(shown == self._as_in_columns[machine.id][1], f"inventory: the columns hold other values: {shown}")
            expected = self._idle_since_seconds.get(machine.id, math.nan)
            is_equal = math.isnan(stamp) if math.isnan(expected) else stamp == expected
            ensure(is_equal, f"inventory: the columns hold another stamp of {machine.id}: {stamp}, not {expected}")

    def _count(self, cluster: str, more: int) -> None:
        if cluster:
            self._members[cluster] = members = self._members.get(cluster, 0) + more
            if not members:
                del self._members[cluster]
