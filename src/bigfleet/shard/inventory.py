"""The machines that a shard knows, as its loop sees them at this moment (docs/spec/engine.md §1.3).

Every insert and update passes the invariant; a record that breaks it is refused and the last good one stays. The same
change goes to the columns that the engine decides from (ADR 0110), so that a snapshot costs what has changed. It is
touched by the shard's loop alone; other threads read immutable snapshots of it. It never sorts or copies the machines.
"""

from collections.abc import Iterator, Mapping, Set
from types import MappingProxyType

from bigfleet.engine.columnar.store import ColumnSnapshot, ColumnStore
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine, invariant_fault
from bigfleet.model.states import MachineState, is_legal_transition


class InventoryRefusal(Exception):
    """An operation that the inventory does not take; `reason` is exists, unknown, transition or a broken invariant."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Inventory:
    """Machines by id, with the moments of their last transitions.

    Invariants: all and only machines that pass `invariant_fault`; a machine has an idle-since stamp if and only if it
    is Idle; every machine has a state-since stamp; the index by cluster holds all and only machines with a cluster; the
    columns hold the same machines with the same stamps.
    """

    def __init__(self) -> None:
        self._machines: dict[MachineId, Machine] = {}
        self._idle_since_seconds: dict[MachineId, float] = {}
        #: Of all and only the machines whose stamp is not `_first_unix_nanos`, which the first List gives to most.
        self._state_since_unix_nanos: dict[MachineId, int] = {}
        self._first_unix_nanos: int | None = None
        #: A dict without values takes about half of what a set of that many takes.
        self._by_cluster: dict[str, dict[MachineId, None]] = {}
        self._store = ColumnStore()
        self._changed: set[MachineId] = set()
        #: The newest snapshot that was taken, perhaps older than the present; other threads may read it.
        self.latest_snapshot = self._store.snapshot()

    def __len__(self) -> int:
        return len(self._machines)

    def __contains__(self, machine_id: object) -> bool:
        return machine_id in self._machines

    def __iter__(self) -> Iterator[Machine]:
        return iter(self._machines.values())

    def get(self, machine_id: str) -> Machine | None:
        """Return the machine, or None when it is not known."""
        return self._machines.get(MachineId(machine_id))

    @property
    def machines(self) -> Mapping[MachineId, Machine]:
        """A read-only live view by id."""
        return MappingProxyType(self._machines)

    @property
    def clusters(self) -> Set[str]:
        """The clusters that any machine carries; a live view."""
        return self._by_cluster.keys()

    def bound_to(self, cluster: str) -> list[MachineId]:
        """Return the ids of the machines that carry this cluster, ascending."""
        return sorted(self._by_cluster.get(cluster, ()))

    def idle_since_seconds(self, machine_id: MachineId) -> float | None:
        """Return the monotonic second at which the machine became Idle, None when it is not Idle."""
        return self._idle_since_seconds.get(machine_id)

    def state_since_unix_nanos(self, machine_id: MachineId) -> int:
        """Return when this process first saw the machine in its state; 0 when it is not known."""
        if machine_id not in self._machines:
            return 0
        return self._state_since_unix_nanos.get(machine_id, self._first_unix_nanos or 0)

    def insert(self, machine: Machine, *, now_seconds: float, now_unix_nanos: int = 0) -> None:
        """Add a machine. Raises InventoryRefusal when the id exists or the record breaks the invariant."""
        if machine.id in self._machines:
            raise InventoryRefusal("exists", f"{machine.id}: a machine with this id exists already")
        self._replace(machine, None, now_seconds, now_unix_nanos)

    def apply(self, machine: Machine, *, now_seconds: float, now_unix_nanos: int = 0) -> Machine:
        """Replace a machine by a driven transition or an update, and return what it was before.

        Raises InventoryRefusal when it is unknown, the transition is not in the table, or the invariant is broken.
        """
        before = self._known(machine.id)
        if not is_legal_transition(before.state, machine.state):
            raise InventoryRefusal(
                "transition", f"{machine.id}: {before.state.label} to {machine.state.label} is no legal transition"
            )
        self._replace(machine, before, now_seconds, now_unix_nanos)
        return before

    def observe(self, machine: Machine, *, now_seconds: float, now_unix_nanos: int = 0) -> Machine:
        """Replace a machine by what its provider reports, whatever the table says, and return what it was before.

        Raises InventoryRefusal when it is unknown or the invariant is broken.
        """
        before = self._known(machine.id)
        self._replace(machine, before, now_seconds, now_unix_nanos)
        return before

    def remove(self, machine_id: str) -> Machine:
        """Forget a machine and return it. Raises InventoryRefusal when it is unknown."""
        machine = self._known(MachineId(machine_id))
        del self._machines[machine.id]
        self._idle_since_seconds.pop(machine.id, None)
        self._state_since_unix_nanos.pop(machine.id, None)
        self._unbind(machine)
        self._store.remove(machine.id)
        self._changed.add(machine.id)
        return machine

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

    def _known(self, machine_id: MachineId) -> Machine:
        machine = self._machines.get(machine_id)
        if machine is None:
            raise InventoryRefusal("unknown", f"{machine_id}: no machine with this id is known")
        return machine

    def _replace(self, machine: Machine, before: Machine | None, now_seconds: float, now_unix_nanos: int) -> None:
        fault = invariant_fault(machine)
        if fault is not None:
            raise InventoryRefusal(fault[0].value, f"{machine.id}: {fault[1]}")
        if before is None or before.state is not machine.state:
            if self._first_unix_nanos is None:
                self._first_unix_nanos = now_unix_nanos
            if now_unix_nanos == self._first_unix_nanos:
                self._state_since_unix_nanos.pop(machine.id, None)
            else:
                self._state_since_unix_nanos[machine.id] = now_unix_nanos
            if machine.state is MachineState.IDLE:
                self._idle_since_seconds[machine.id] = now_seconds
            else:
                self._idle_since_seconds.pop(machine.id, None)
        if before is not None and before.cluster != machine.cluster:
            self._unbind(before)
        if machine.cluster:
            self._by_cluster.setdefault(machine.cluster, {})[machine.id] = None
        self._machines[machine.id] = machine
        self._store.insert(machine, self._idle_since_seconds.get(machine.id))
        self._changed.add(machine.id)

    def _unbind(self, machine: Machine) -> None:
        members = self._by_cluster.get(machine.cluster)
        if members is not None:
            members.pop(machine.id, None)
            if not members:
                del self._by_cluster[machine.cluster]
