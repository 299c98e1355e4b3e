"""Defines what the phases ask of the machines of one decision, and answers it plainly from a snapshot.

`columns.machines` answers the same questions from columns, and remembers what did not change between two decisions.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Final, Protocol

from bigfleet.engine.decision import Options
from bigfleet.engine.matching import Shapes
from bigfleet.engine.reference.pool import RESERVABLE_STATES, is_set_aside, is_sold_out
from bigfleet.engine.reference.reclaim import hold_seconds_left
from bigfleet.engine.shapes.state import OfferState
from bigfleet.engine.snapshot import Snapshot
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.need import RowKey
from bigfleet.model.profile import Profile
from bigfleet.model.states import MachineState

#: Machines that host pods of a cluster, or will; in hosting order.
HELD: Final = (MachineState.CONFIGURED, MachineState.CONFIGURING, MachineState.CREATING)

#: (fingerprint, group) of the row that a machine in creation of unknown cluster was bought for.
OrphanKey = tuple[str, str]


class Machines(Protocol):
    """The machines of one decision. Machines that agree in type, zone, labels and supply are of one shape."""

    @property
    def known_shapes(self) -> frozenset[int]:
        """The shapes of all machines but those that failed or have not joined."""
        ...

    def example(self, shape: int) -> Machine:
        """Return a machine of the shape; only what makes up the shape may be read."""
        ...

    def shape_of(self, machine: Machine) -> int:
        """Return the number of the machine's shape."""
        ...

    def matching(self, profile: Profile) -> frozenset[int]:
        """Return the shapes that the profile matches, supply apart."""
        ...

    def offers(self) -> list[OfferState]:
        """Return new offers of what may be acquired, in the order of the lowest id of each."""
        ...

    def held_by(self, cluster: str) -> Sequence[Machine]:
        """Return the usable machines that host pods of the cluster, or will, ids ascending."""
        ...

    def orphans(self) -> dict[OrphanKey, list[Machine]]:
        """Return new lists of the usable machines in creation whose cluster is not known, each by id."""
        ...

    def configured(self) -> Iterator[Machine]:
        """Yield the Configured machines of all clusters that have joined, by id."""
        ...

    def configured_in(self, cluster: str) -> Sequence[Machine]:
        """Return the cluster's Configured machines, joined or not, in keep-priority order."""
        ...

    def excess_in(self, cluster: str, claimed: Set[str], short: Set[RowKey]) -> Sequence[MachineId]:
        """Return the cluster's Configured machines that nothing keeps, in keep-priority order.

        The stamp of a short row protects a machine, unless it has not joined.
        """
        ...

    def clusters_with_machines(self) -> Sequence[str]:
        """Return the clusters that have Configured machines, ids ascending."""
        ...

    def draining(self) -> Iterable[Machine]:
        """Return the machines that drain for a row, by id; those that may not be seen apart."""
        ...

    def releasable(self) -> Iterable[Machine]:
        """Return the Idle machines whose hold is over and that are not reserved, by id."""
        ...


class SnapshotMachines:
    """Answers from a snapshot, with one pass over all machines."""

    def __init__(self, snapshot: Snapshot, options: Options) -> None:
        self._snapshot, self._options = snapshot, options
        self._shapes = Shapes(snapshot.machines.values())
        self._held: defaultdict[str, list[Machine]] = defaultdict(list)
        self._orphans: defaultdict[OrphanKey, list[Machine]] = defaultdict(list)
        self._free: list[Machine] = []
        for machine in snapshot.machines.values():
            if is_usable(machine, options):
                self._file(machine)
        self.known_shapes = frozenset(
            self._shapes.of[m.id]
            for m in snapshot.machines.values()
            if m.state is not MachineState.FAILED and m.id not in options.unjoined
        )

    def _file(self, machine: Machine) -> None:
        if machine.state in (MachineState.IDLE, MachineState.SPECULATIVE):
            self._free.append(machine)
        elif machine.state in HELD:
            owner = owner_of(machine)
            if owner:
                self._held[owner].append(machine)
            else:
                self._orphans[(machine.assigned_need_fingerprint, machine.assigned_group)].append(machine)

    def example(self, shape: int) -> Machine:
        """Return a machine of the shape."""
        return self._shapes.examples[shape]

    def shape_of(self, machine: Machine) -> int:
        """Return the number of the machine's shape."""
        return self._shapes.of[machine.id]

    def matching(self, profile: Profile) -> frozenset[int]:
        """Return the shapes that the profile matches, supply apart."""
        return self._shapes.matching(profile)

    def offers(self) -> list[OfferState]:
        """Return new offers of what may be acquired, in the order of the lowest id of each."""
        groups: defaultdict[tuple[object, ...], list[Machine]] = defaultdict(list)
        probes = probes_of(self._options)
        for machine in self._free:
            key = (
                machine.id if machine.id in probes else "",
                machine.state,
                self._shapes.of[machine.id],
                machine.capacity_type,
                machine.price_usd_per_hour,
                machine.interruption_probability,
            )
            groups[key].append(machine)
        return [
            OfferState(example=found[0], shape=self._shapes.of[found[0].id], machines=found)
            for found in groups.values()
        ]

    def held_by(self, cluster: str) -> Sequence[Machine]:
        """Return the usable machines that host pods of the cluster, or will, ids ascending."""
        return self._held.get(cluster, ())

    def orphans(self) -> dict[OrphanKey, list[Machine]]:
        """Return new lists of the usable machines in creation whose cluster is not known, each by id."""
        return {key: list(machines) for key, machines in self._orphans.items()}

    def configured(self) -> Iterator[Machine]:
        """Yield the Configured machines of all clusters that have joined, by id."""
        for machine in self._snapshot.of_state(MachineState.CONFIGURED):
            if machine.id not in self._options.unjoined:
                yield machine

    def configured_in(self, cluster: str) -> Sequence[Machine]:
        """Return the cluster's Configured machines, joined or not, in keep-priority order."""
        return self._snapshot.of_cluster(cluster, MachineState.CONFIGURED)

    def excess_in(self, cluster: str, claimed: Set[str], short: Set[RowKey]) -> Sequence[MachineId]:
        """Return the cluster's Configured machines that nothing keeps, in keep-priority order."""
        unjoined = self._options.unjoined
        return [
            machine.id
            for machine in self.configured_in(cluster)
            if machine.id not in claimed and (machine.id in unjoined or stamp_of(machine) not in short)
        ]

    def clusters_with_machines(self) -> Sequence[str]:
        """Return the clusters that have Configured machines, ids ascending."""
        return sorted(c for c, state in self._snapshot.by_cluster if state is MachineState.CONFIGURED)

    def draining(self) -> Iterable[Machine]:
        """Return the machines that drain for a row, by id; those that may not be seen apart."""
        options = self._options
        for machine in self._snapshot.of_state(MachineState.DRAINING):
            is_hidden = machine.id in options.unjoined or machine.id in options.reserved
            if machine.preempted_for is not None and not is_hidden:
                yield machine

    def releasable(self) -> Iterable[Machine]:
        """Return the Idle machines whose hold is over and that are not reserved, by id."""
        for machine in self._snapshot.of_state(MachineState.IDLE):
            seconds_left = hold_seconds_left(machine, self._snapshot, self._options)
            if seconds_left is not None and seconds_left <= 0 and machine.id not in self._options.reserved:
                yield machine


def probes_of(options: Options) -> frozenset[str]:
    """Return the machines that clusters may acquire of pools that are withheld from them."""
    return frozenset(machine_id for each in options.withheld.values() for machine_id in each.probes)


def owner_of(machine: Machine) -> str:
    """Return the cluster that a held machine hosts pods of, "" when it is not known."""
    return machine.intended_cluster if machine.state is MachineState.CREATING else machine.cluster


def is_usable(machine: Machine, options: Options) -> bool:
    """Return whether any phase but the third may see the machine."""
    if machine.id in options.unjoined or is_sold_out(machine, options) or is_set_aside(machine, options):
        return False
    return machine.id not in options.reserved or machine.state not in RESERVABLE_STATES


def stamp_of(machine: Machine) -> RowKey:
    """Return the row that the machine was bound for."""
    return (machine.cluster, machine.assigned_need_fingerprint, machine.assigned_group)
