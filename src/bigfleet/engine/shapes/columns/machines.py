"""Holds the machines of a decision in columns, updated from view to view at the cost of what changed.

Machines become objects when a phase looks at them. Everything that is stored only saves work.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Final, overload

import numpy as np
import numpy.typing as npt

from bigfleet.engine.columns.objects import example_of, machine_at, machines_at, resources_of
from bigfleet.engine.columns.sold_out import sold_out_rows
from bigfleet.engine.columns.store import REMOVED, Columns, ColumnSnapshot, Vocabulary
from bigfleet.engine.decision import Options
from bigfleet.engine.matching import Shapes
from bigfleet.engine.reference.reclaim import RELEASABLE
from bigfleet.engine.shapes.columns.sorting import stable_order
from bigfleet.engine.shapes.machines import HELD, OrphanKey, is_usable, probes_of
from bigfleet.engine.shapes.state import OfferState
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.need import RowKey
from bigfleet.model.profile import Profile
from bigfleet.model.states import CapacityType, MachineState

Rows = npt.NDArray[np.int64]

_FREE: Final = (MachineState.IDLE, MachineState.SPECULATIVE)
_NO_ROWS: Final[Rows] = np.zeros(0, np.int64)


class MachineIds(Sequence[MachineId]):
    """Machines of some rows of a view."""

    def __init__(self, ids: Sequence[MachineId], rows: Rows) -> None:
        """Look at nothing; `ids` are those of the view."""
        self._ids, self.rows = ids, rows

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, place: int) -> MachineId: ...
    @overload
    def __getitem__(self, place: slice) -> "MachineIds": ...
    def __getitem__(self, place: int | slice) -> "MachineId | MachineIds":
        if isinstance(place, slice):
            return MachineIds(self._ids, self.rows[place])
        return self._ids[int(self.rows[place])]

    def __iter__(self) -> Iterator[MachineId]:
        return iter([self._ids[row] for row in self.rows.tolist()])


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
        #: For each row, the number of the cluster whose pods the machine hosts; 0 for none.
        self._owners = np.zeros(len(view.ids), np.int32)
        self._owner_numbers: dict[str, int] = {}
        #: By number of the cluster, rows ascending; made when it is first asked for.
        self._held: dict[int, Rows] | None = None
        self._groups: list[tuple[int, Rows]] | None = None
        self._hidden = self._unjoined = self._probes = _NO_ROWS
        self._owners[:] = self._owners_of_all()
        self._look()

    # ---- following -----------------------------------------------------------------------------------------------

    def shows(self, view: ColumnSnapshot) -> bool:
        """Return whether these are known to be the machines of the view."""
        old = self._view
        if view.vocabulary is not old.vocabulary or view.layout != old.layout:
            return False
        changed = view.changed_since(old.generation)
        return changed is not None and not len(changed)

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
        is_free = np.isin(old.columns.state[changed], _FREE) | np.isin(view.columns.state[changed], _FREE)
        if is_free.any():
            self._groups = None
        self._view = view
        for row in changed.tolist():
            self._made.pop(row, None)
        before = self._owners[changed]
        self._owners[changed] = self._owners_of(changed)
        owners = set(np.concatenate((before, self._owners[changed])).tolist())
        self._hold_again(owners)
        differing = (options.unjoined ^ self._options.unjoined) | (options.leaving ^ self._options.leaving)
        for machine_id in differing | _refilled(options, self._options):
            row = view.rows.get(MachineId(machine_id))
            if row is not None:
                owners.add(int(self._owners[row]))
        names = ["", *self._owner_numbers]
        touched = {names[owner] for owner in owners if owner}
        self._options = options
        self._look()
        return touched

    def _owners_of(self, rows: Rows) -> npt.NDArray[np.int32]:
        """Return the numbers of the clusters whose pods some machines host."""
        columns, vocabulary = self._view.columns, self._view.vocabulary
        state, owners = columns.state[rows], np.zeros(len(rows), np.int32)
        creating = np.flatnonzero(state == MachineState.CREATING)
        bound = np.flatnonzero(np.isin(state, [int(s) for s in HELD if s is not MachineState.CREATING]))
        clusters, number = np.unique(columns.cluster[rows[bound]], return_inverse=True)
        owners[bound] = self._numbers_of(vocabulary.clusters[c] for c in clusters.tolist())[number]
        stamps, number = np.unique(columns.stamp[rows[creating]], return_inverse=True)
        owners[creating] = self._numbers_of(vocabulary.stamps[s].intended_cluster for s in stamps.tolist())[number]
        return owners

    def _numbers_of(self, names: Iterable[str]) -> npt.NDArray[np.int32]:
        known = self._owner_numbers
        return np.array([known.setdefault(name, len(known) + 1) for name in names], np.int32)

    def _owners_of_all(self) -> npt.NDArray[np.int32]:
        """Return what `_owners_of` does of all rows; clusters without machines have a number, too."""
        columns = self._view.columns
        numbers, state = self._numbers_of(self._view.vocabulary.clusters), columns.state
        is_bound = (state == MachineState.CONFIGURED) | (state == MachineState.CONFIGURING)
        owners = np.where(is_bound, numbers[columns.cluster], np.int32(0))
        creating = np.flatnonzero(state == MachineState.CREATING)
        owners[creating] = self._owners_of(creating)
        return owners

    def _held_of(self, cluster: str) -> Rows:
        """Return the rows of machines that host pods of a cluster, or will, joined or not, ascending."""
        number = self._owner_numbers.get(cluster, 0)
        if self._held is None:
            if not cluster and not (self._owners == number).any():
                # Machines in creation without a known cluster are rare.
                return _NO_ROWS
            order = stable_order(self._owners)
            first = np.cumsum(np.bincount(self._owners, minlength=len(self._owner_numbers) + 1))
            self._held = dict(enumerate(np.split(order, first[:-1])))
        return self._held.get(number, _NO_ROWS) if number else _NO_ROWS

    def _hold_again(self, owners: Iterable[int]) -> None:
        """Note again which machines host pods of some clusters."""
        if self._held is None:
            return
        wanted = np.array([owner for owner in owners if owner], np.int32)
        held = np.flatnonzero(np.isin(self._owners, wanted))
        order = np.argsort(self._owners[held], kind="stable")
        first = np.searchsorted(self._owners[held[order]], np.sort(wanted))
        self._held.update(zip(np.sort(wanted).tolist(), np.split(held[order], first[1:]), strict=bool(len(wanted))))

    def _look(self) -> None:
        """Bring up to date what every decision asks."""
        view, options = self._view, self._options
        vocabulary, columns = view.vocabulary, view.columns
        if len(vocabulary.shapes) > len(self._examples):
            self._matching.clear()
            self._resources = resources_of(vocabulary)
            self._examples = [example_of(vocabulary, number) for number in range(len(vocabulary.shapes))]
            self._shapes = Shapes(self._examples)
        unjoined = self._unjoined = self._rows_of(options.unjoined)
        is_known = (columns.state != REMOVED) & (columns.state != MachineState.FAILED)
        is_known[unjoined] = False
        counts = np.bincount(columns.shape[is_known], minlength=len(vocabulary.shapes))
        known = frozenset(np.flatnonzero(counts).tolist())
        if known != self.known_shapes:
            self.known_shapes = known
        hidden = np.union1d(
            sold_out_rows(view, options), self._rows_of({*options.unjoined, *options.reserved, *options.set_aside})
        )
        probes = self._rows_of(probes_of(options))
        if not np.array_equal(hidden, self._hidden) or not np.array_equal(probes, self._probes):
            self._hidden, self._probes, self._groups = hidden, probes, None

    def _rows_of(self, ids: Iterable[str]) -> Rows:
        found = (self._view.rows.get(MachineId(machine_id)) for machine_id in ids)
        return np.array(sorted(row for row in found if row is not None), np.int64)

    # ---- machines ------------------------------------------------------------------------------------------------

    @property
    def ids(self) -> Sequence[MachineId]:
        """The machine of each row of the view."""
        return self._view.ids

    @property
    def columns(self) -> Columns:
        """The columns of the view."""
        return self._view.columns

    @property
    def vocabulary(self) -> Vocabulary:
        """What the columns refer to."""
        return self._view.vocabulary

    @property
    def owners(self) -> npt.NDArray[np.int32]:
        """By row, the number of the cluster whose pods the machine hosts, or will; 0 for none."""
        return self._owners

    @property
    def has_unjoined(self) -> bool:
        """Return whether machines of the view have not joined."""
        return len(self._unjoined) > 0

    def rows_held_by(self, clusters: Sequence[str]) -> tuple[Rows, npt.NDArray[np.int32]]:
        """Return rows with those of `held_rows` of some clusters among them, those of a cluster ascending.

        Beside them it returns the place of the cluster by the number of its owner, -1 for all others.
        """
        cluster_of = np.full(len(self._owner_numbers) + 1, -1, np.int32)
        for place, name in enumerate(clusters):
            cluster_of[self._owner_numbers.get(name, 0)] = place
        cluster_of[0] = -1
        if 2 * len(clusters) < len(self._owner_numbers):
            return np.concatenate([_NO_ROWS, *(self.held_rows(name) for name in clusters)]), cluster_of
        rows = np.arange(len(self._owners))
        return np.delete(rows, self._unjoined) if len(self._unjoined) else rows, cluster_of

    def keep_ranks(self) -> Rows:
        """Return by number of the stamp what ascends as the assigned reclamation dollars descend."""
        stamps = self._view.vocabulary.stamps
        dollars = np.array([-stamp.assigned_reclamation_penalty_dollars for stamp in stamps], np.float64)
        return np.unique(dollars, return_inverse=True)[1].astype(np.int64)

    def row_of(self, machine_id: str) -> int | None:
        """Return the row of a machine, None for one that is not known."""
        return self._view.rows.get(MachineId(machine_id))

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
        groups = [(int(columns.shape[found[0]]), found) for found in self._apart(np.split(rows[order], starts[1:]))]
        return sorted(groups, key=lambda group: int(group[1][0]))

    def _apart(self, groups: Sequence[Rows]) -> Iterator[Rows]:
        """Yield the groups, with each probe of a withheld pool as a group of its own."""
        for rows in groups:
            is_probe = np.isin(rows, self._probes) if len(self._probes) else np.zeros(len(rows), np.bool_)
            if not is_probe.all():
                yield rows[~is_probe] if is_probe.any() else rows
            yield from np.split(rows[is_probe], np.arange(1, int(is_probe.sum()))) if is_probe.any() else ()

    def held_rows(self, cluster: str) -> Rows:
        """Return the rows of `held_by`."""
        rows = self._held_of(cluster) if cluster else _NO_ROWS
        return rows[~np.isin(rows, self._unjoined)] if len(self._unjoined) else rows

    def held_by(self, cluster: str) -> Sequence[Machine]:
        """Return the usable machines that host pods of the cluster, or will, ids ascending."""
        rows = self.held_rows(cluster).tolist()
        missing = [row for row in rows if row not in self._made]
        made = machines_at(self._view, missing, self._resources)
        self._made.update(zip(missing, made, strict=True))
        shapes = self._view.columns.shape[missing].tolist()
        self._shape_of.update(zip([machine.id for machine in made], shapes, strict=True))
        return [self._made[row] for row in rows]

    def orphans(self) -> dict[OrphanKey, list[Machine]]:
        """Return new lists of the usable machines in creation whose cluster is not known, each by id."""
        found: dict[OrphanKey, list[Machine]] = {}
        for row in self._held_of("").tolist():
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
        return [self.at(row) for row in self._in_keep_order(self._configured_rows(cluster)).tolist()]

    def excess_in(self, cluster: str, claimed: Set[str], short: Set[RowKey]) -> Sequence[MachineId]:
        """Return the cluster's Configured machines that nothing keeps, in keep-priority order."""
        ids, unjoined = self._view.ids, self._options.unjoined
        rows = self._configured_rows(cluster).tolist()
        found = [
            row
            for row in rows
            if ids[row] not in claimed and (not short or ids[row] in unjoined or self._stamp_of(row) not in short)
        ]
        return [ids[row] for row in self._in_keep_order(np.array(found, np.int64)).tolist()]

    def unclaimed_in(self, clusters: Sequence[str], claimed: Rows) -> list[MachineIds]:
        """Return the Configured machines of each cluster less some rows, in keep-priority order."""
        columns, ids = self._view.columns, self._view.ids
        held = [self._held_of(cluster) for cluster in clusters]
        rows, cluster = np.concatenate([_NO_ROWS, *held]), np.repeat(np.arange(len(held)), [len(each) for each in held])
        is_found = columns.state[rows] == MachineState.CONFIGURED
        is_claimed = np.zeros(len(ids), np.bool_)
        is_claimed[claimed] = True
        is_found &= ~is_claimed[rows]
        rows, cluster = rows[is_found], cluster[is_found]
        price, dollars = self._keep_keys(rows)
        order = np.lexsort((rows, -dollars, price, cluster))
        first = np.searchsorted(cluster, np.arange(1, len(held)))
        return [MachineIds(ids, part) for part in np.split(rows[order], first)] if held else []

    def _stamp_of(self, row: int) -> RowKey:
        columns, vocabulary = self._view.columns, self._view.vocabulary
        stamp = vocabulary.stamps[columns.stamp[row]]
        return (vocabulary.clusters[columns.cluster[row]], stamp.assigned_need_fingerprint, stamp.assigned_group)

    def _configured_rows(self, cluster: str) -> Rows:
        rows = self._held_of(cluster)
        is_configured: npt.NDArray[np.bool_] = self._view.columns.state[rows] == MachineState.CONFIGURED
        return rows[is_configured]

    def _in_keep_order(self, rows: Rows) -> Rows:
        """Return rows in the order of `keep_priority_key`."""
        price, dollars = self._keep_keys(rows)
        order: Rows = np.lexsort((rows, -dollars, price))
        return rows[order]

    def _keep_keys(self, rows: Rows) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Return the price and the reclamation dollars of each row."""
        columns, vocabulary = self._view.columns, self._view.vocabulary
        offers, offer = np.unique(columns.offer[rows], return_inverse=True)
        stamps, stamp = np.unique(columns.stamp[rows], return_inverse=True)
        price = np.array([vocabulary.offers[number].price_usd_per_hour for number in offers.tolist()], np.float64)
        penalties = [vocabulary.stamps[number].assigned_reclamation_penalty_dollars for number in stamps.tolist()]
        return price[offer], np.array(penalties, np.float64)[stamp]

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
