"""Holds the machines of a decision in columns, updated from view to view at the cost of what changed.

Machines become objects when a phase looks at them. Everything that is stored only saves work.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, overload

import numpy as np
import numpy.typing as npt

from bigfleet.engine.columns.objects import example_of, machine_at, resources_of
from bigfleet.engine.columns.sold_out import sold_out_rows
from bigfleet.engine.columns.store import REMOVED, ColumnSnapshot
from bigfleet.engine.decision import Options
from bigfleet.engine.matching import Shapes
from bigfleet.engine.reference.reclaim import RELEASABLE
from bigfleet.engine.shapes.machines import HELD, OrphanKey, is_usable
from bigfleet.engine.shapes.state import OfferState
from bigfleet.engine.snapshot import keep_priority_key
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.profile import Profile
from bigfleet.model.states import CapacityType, MachineState

Rows = npt.NDArray[np.int64]

_FREE: Final = (MachineState.IDLE, MachineState.SPECULATIVE)
_NO_ROWS: Final[Rows] = np.zeros(0, np.int64)


class _MachinesAt(Sequence[Machine]):
    """Machines of some rows, made when looked at."""

    def __init__(self, machines: "ColumnMachines", rows: Rows) -> None:
        self._machines, self._rows = machines, rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, place: int) -> Machine: ...
    @overload
    def __getitem__(self, place: slice) -> "_MachinesAt": ...
    def __getitem__(self, place: int | slice) -> "Machine | _MachinesAt":
        if isinstance(place, slice):
            return _MachinesAt(self._machines, self._rows[place])
        return self._machines.at(int(self._rows[place]))


class ColumnMachines:
    """The machines of one view; `follow` makes it those of a later one."""

    def __init__(self, view: ColumnSnapshot, options: Options) -> None:
        self._view, self._options = view, options
        self._made: dict[int, Machine] = {}
        self._shape_of: dict[MachineId, int] = {}
        self._examples: list[Machine] = []
        self._resources = resources_of(view.vocabulary)
        self._shapes = Shapes(())
        self.known_shapes: frozenset[int] = frozenset()
        self._matching: dict[str, frozenset[int]] = {}
        self._held: dict[str, set[int]] = {}
        self._owner: dict[int, str] = {}
        self._groups: list[tuple[int, Rows]] | None = None
        self._hidden = _NO_ROWS
        self._own_all()
        self._look()

    # ---- following -----------------------------------------------------------------------------------------------

    def follow(self, view: ColumnSnapshot, options: Options) -> set[str] | None:
        """Become the machines of a later view; return the clusters of which any machine changed.

        None, with nothing done, when what changed between the views is not known.
        """
        old = self._view
        if view.vocabulary is not old.vocabulary or view.layout != old.layout:
            return None
        changed = view.changed_since(old.generation)
        if changed is None:
            return None
        touched: set[str] = set()
        is_free = np.isin(old.columns.state[changed], _FREE) | np.isin(view.columns.state[changed], _FREE)
        if is_free.any():
            self._groups = None
        self._view = view
        for row in changed.tolist():
            self._made.pop(row, None)
            owner = self._owner.pop(row, None)
            if owner is not None:
                touched.add(owner)
                self._held[owner].discard(row)
            if view.columns.state[row] in HELD:
                touched.add(self._own(row))
        for machine_id in (options.unjoined ^ self._options.unjoined) | _refilled(options, self._options):
            row = view.rows.get(MachineId(machine_id))
            if row is not None and row in self._owner:
                touched.add(self._owner[row])
        self._options = options
        self._look()
        return touched

    def _own_all(self) -> None:
        """Note whose pods every machine hosts."""
        columns, vocabulary = self._view.columns, self._view.vocabulary
        creating = np.flatnonzero(columns.state == MachineState.CREATING)
        bound = np.flatnonzero(np.isin(columns.state, [int(s) for s in HELD if s is not MachineState.CREATING]))
        for row in creating.tolist():
            self._own(row)
        order = np.argsort(columns.cluster[bound], kind="stable")
        numbers, starts = np.unique(columns.cluster[bound][order], return_index=True)
        for number, rows in zip(numbers.tolist(), np.split(bound[order], starts[1:]), strict=bool(len(numbers))):
            owner, found = str(vocabulary.clusters[number]), rows.tolist()
            self._owner.update(dict.fromkeys(found, owner))
            self._held.setdefault(owner, set()).update(found)

    def _own(self, row: int) -> str:
        """Note whose pods the machine hosts, and return it."""
        columns, vocabulary = self._view.columns, self._view.vocabulary
        if columns.state[row] == MachineState.CREATING:
            owner = str(vocabulary.stamps[columns.stamp[row]].intended_cluster)
        else:
            owner = str(vocabulary.clusters[columns.cluster[row]])
        self._owner[row] = owner
        self._held.setdefault(owner, set()).add(row)
        return owner

    def _look(self) -> None:
        """Bring up to date what every decision asks."""
        view, options = self._view, self._options
        vocabulary, columns = view.vocabulary, view.columns
        if len(vocabulary.shapes) > len(self._examples):
            self._matching.clear()
            self._resources = resources_of(vocabulary)
            self._examples = [example_of(vocabulary, number) for number in range(len(vocabulary.shapes))]
            self._shapes = Shapes(self._examples)
        unjoined = self._rows_of(options.unjoined)
        is_known = (columns.state != REMOVED) & (columns.state != MachineState.FAILED)
        is_known[unjoined] = False
        counts = np.bincount(columns.shape[is_known], minlength=len(vocabulary.shapes))
        known = frozenset(np.flatnonzero(counts).tolist())
        if known != self.known_shapes:
            self.known_shapes = known
        hidden = np.union1d(
            sold_out_rows(view, options), self._rows_of({*options.unjoined, *options.reserved, *options.set_aside})
        )
        if not np.array_equal(hidden, self._hidden):
            self._hidden, self._groups = hidden, None

    def _rows_of(self, ids: Iterable[str]) -> Rows:
        found = (self._view.rows.get(MachineId(machine_id)) for machine_id in ids)
        return np.array(sorted(row for row in found if row is not None), np.int64)

    # ---- machines ------------------------------------------------------------------------------------------------

    def at(self, row: int) -> Machine:
        """Return the machine of a row of the view."""
        machine = self._made.get(row)
        if machine is None:
            machine = self._made[row] = machine_at(self._view, row, self._resources)
            self._shape_of[machine.id] = int(self._view.columns.shape[row])
        return machine

    def example(self, shape: int) -> Machine:
        """Return a machine of the shape; only what makes up the shape may be read."""
        return self._examples[shape]

    def shape_of(self, machine: Machine) -> int:
        """Return the number of the machine's shape."""
        return self._shape_of[machine.id]

    def matching(self, profile: Profile) -> frozenset[int]:
        """Return the shapes that the profile matches, supply apart."""
        found = self._matching.get(profile.fingerprint)
        if found is None:
            found = self._matching[profile.fingerprint] = self._shapes.matching(profile)
        return found

    def offers(self) -> list[OfferState]:
        """Return new offers of what may be acquired, in the order of the lowest id of each."""
        if self._groups is None:
            self._groups = self._grouped()
        return [
            OfferState(example=self.at(int(rows[0])), shape=shape, machines=_MachinesAt(self, rows))
            for shape, rows in self._groups
        ]

    def _grouped(self) -> list[tuple[int, Rows]]:
        """Return the rows of free machines that are alike, by the first row of each; rows ascending."""
        columns, vocabulary = self._view.columns, self._view.vocabulary
        rows = np.flatnonzero(np.isin(columns.state, [int(s) for s in _FREE])).astype(np.int64)
        if len(self._hidden):
            rows = rows[[is_usable(self.at(int(row)), self._options) for row in rows]]
        if not len(rows):
            return []
        offers = np.int64(len(vocabulary.offers))
        is_idle = (columns.state[rows] == MachineState.IDLE).astype(np.int64)
        kinds = (columns.shape[rows].astype(np.int64) * offers + columns.offer[rows]) * 2 + is_idle
        order = np.argsort(kinds, kind="stable")
        starts = np.flatnonzero(np.diff(kinds[order], prepend=-1))
        groups = [(int(columns.shape[found[0]]), found) for found in np.split(rows[order], starts[1:])]
        return sorted(groups, key=lambda group: int(group[1][0]))

    def held_by(self, cluster: str) -> Sequence[Machine]:
        """Return the usable machines that host pods of the cluster, or will, ids ascending."""
        machines = [self.at(row) for row in sorted(self._held.get(cluster, ()))] if cluster else []
        unjoined = self._options.unjoined
        return [machine for machine in machines if machine.id not in unjoined] if unjoined else machines

    def orphans(self) -> dict[OrphanKey, list[Machine]]:
        """Return new lists of the usable machines in creation whose cluster is not known, each by id."""
        found: dict[OrphanKey, list[Machine]] = {}
        for row in sorted(self._held.get("", ())):
            machine = self.at(row)
            if machine.id not in self._options.unjoined:
                key = (machine.assigned_need_fingerprint, machine.assigned_group)
                found.setdefault(key, []).append(machine)
        return found

    def configured(self) -> Iterator[Machine]:
        """Yield the Configured machines of all clusters that have joined, by id."""
        for row in np.flatnonzero(self._view.columns.state == MachineState.CONFIGURED).tolist():
            machine = self.at(row)
            if machine.id not in self._options.unjoined:
                yield machine

    def configured_in(self, cluster: str) -> Sequence[Machine]:
        """Return the cluster's Configured machines, joined or not, in keep-priority order."""
        state = self._view.columns.state
        rows = [row for row in self._held.get(cluster, ()) if state[row] == MachineState.CONFIGURED]
        return sorted((self.at(row) for row in rows), key=keep_priority_key)

    def clusters_with_machines(self) -> Sequence[str]:
        """Return the clusters that have Configured machines, ids ascending."""
        columns = self._view.columns
        counts = np.bincount(columns.cluster[columns.state == MachineState.CONFIGURED], minlength=1)
        counts[0] = 0
        return sorted(self._view.vocabulary.clusters[number] for number in np.flatnonzero(counts).tolist())

    def draining(self) -> Iterator[Machine]:
        """Yield the machines that drain for a row, by id; those that may not be seen apart."""
        hidden = self._options.unjoined | self._options.reserved
        for row in np.flatnonzero(self._view.columns.state == MachineState.DRAINING).tolist():
            machine = self.at(row)
            if machine.preempted_for is not None and machine.id not in hidden:
                yield machine

    def releasable(self) -> Iterator[Machine]:
        """Yield the Idle machines whose hold is over and that are not reserved, by id."""
        view, options = self._view, self._options
        kinds = [CapacityType(offer.capacity_type) for offer in view.vocabulary.offers]
        holds = [options.hold_seconds.get(kind, 0.0) if kind in RELEASABLE else 0.0 for kind in kinds]
        rows = np.flatnonzero(view.columns.state == MachineState.IDLE)
        hold = np.array(holds or [0.0])[view.columns.offer[rows]]
        left = hold - (options.now_seconds - view.columns.idle_since_seconds[rows])
        for row in rows[(hold > 0) & (left <= 0)].tolist():
            machine = self.at(row)
            if machine.id not in options.reserved:
                yield machine


def _refilled(options: Options, before: Options) -> set[str]:
    """Return the machines whose fullness differs."""
    if options.fullness is before.fullness:
        return set()
    return {machine_id for machine_id, _ in options.fullness.items() ^ before.fullness.items()}
