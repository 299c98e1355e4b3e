"""Remembers as what each machine is created for a cluster, and finds those that become another class.

A Create may refine resources, labels and price (docs/spec/provider.md §2). The composition that a machine was acquired
for names its former class: without a correction the machine fills no place of it, and one more is acquired. This module
does not change a composition.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from bigfleet.engine.columns.store import ColumnSnapshot
from bigfleet.engine.decision import Decision
from bigfleet.engine.targets import ClassKey
from bigfleet.model.ids import MachineId
from bigfleet.model.states import CapacityType, MachineState

#: States in which a machine may fill a place of a composition.
_OF_USE: Final = frozenset(
    {MachineState.CREATING, MachineState.IDLE, MachineState.CONFIGURING, MachineState.CONFIGURED}
)


class ClassChange(NamedTuple):
    """One machine of a cluster that has become another class."""

    cluster: str
    before: ClassKey
    after: ClassKey


class _Creation(NamedTuple):
    """One machine that was acquired and does not exist yet."""

    cluster: str
    #: As which it counts in the composition of the cluster.
    machine_class: ClassKey
    #: Whether it was seen in creation, not only asked for.
    is_seen: bool


class CreatedMachines:
    """The machines that are being created for clusters. Touched by the shard's loop alone."""

    def __init__(self) -> None:
        #: At most one for each machine of the shard.
        self._creations: dict[MachineId, _Creation] = {}
        #: What the decision under way is made on; None between two decisions.
        self._classes: _ViewClasses | None = None

    def clear(self) -> None:
        """Forget all machines."""
        self._creations.clear()
        self._classes = None

    def follow(self, view: ColumnSnapshot) -> list[ClassChange]:
        """Look at the machines before a decision; return the changes of class since the last call."""
        self._classes = classes = _ViewClasses(view)
        changes = [change for machine_id in list(self._creations) for change in self._seen(machine_id, classes)]
        # Those that a decision before a restart acquired, too.
        columns, stamps = view.columns, view.vocabulary.stamps
        for row in np.flatnonzero(columns.state == int(MachineState.CREATING)).tolist():
            cluster = stamps[int(columns.stamp[row])].intended_cluster
            if cluster:
                self._creations[view.ids[row]] = _Creation(cluster, classes.at(row), is_seen=True)
        return changes

    def decided(self, decision: Decision) -> None:
        """Remember what the decision on the last view creates."""
        classes, self._classes = self._classes, None
        if classes is None:
            return
        for result in decision.rows:
            for machine_id in result.provisions:
                row = classes.view.rows.get(machine_id)
                if row is not None:
                    self._creations[machine_id] = _Creation(result.need.cluster, classes.at(row), is_seen=False)

    def _seen(self, machine_id: MachineId, classes: "_ViewClasses") -> Iterator[ClassChange]:
        """Yield the change of class of one machine, if there is one; forget a machine that was created or is gone."""
        view = classes.view
        known, row = self._creations[machine_id], view.rows.get(machine_id)
        state = -1 if row is None else int(view.columns.state[row])
        if state == MachineState.SPECULATIVE and not known.is_seen:
            return
        if state != MachineState.CREATING:
            del self._creations[machine_id]
        if row is None or state not in _OF_USE:
            return
        owner = view.vocabulary.clusters[int(view.columns.cluster[row])]
        after = classes.at(row)
        if owner in ("", known.cluster) and after != known.machine_class:
            yield ClassChange(known.cluster, known.machine_class, after)


class _ViewClasses:
    """The classes of one view's machines, each made once."""

    def __init__(self, view: ColumnSnapshot) -> None:
        self.view = view
        #: By the numbers of shape and offer.
        self._made: dict[tuple[int, int], ClassKey] = {}

    def at(self, row: int) -> ClassKey:
        """Return the class of the machine of a row: what `class_key` returns of the machine."""
        numbers = int(self.view.columns.shape[row]), int(self.view.columns.offer[row])
        found = self._made.get(numbers)
        if found is None:
            shape, offer = self.view.vocabulary.shapes[numbers[0]], self.view.vocabulary.offers[numbers[1]]
            capacity_type = CapacityType(offer.capacity_type)
            found = self._made[numbers] = ClassKey(
                shape.instance_type,
                shape.zone,
                capacity_type,
                0.0 if capacity_type is CapacityType.SPOT else offer.price_usd_per_hour,
                offer.interruption_probability,
                tuple(sorted(shape.labels)),
                tuple(sorted(shape.supply)),
            )
        return found
