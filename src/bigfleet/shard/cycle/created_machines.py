"""Remembers as what each machine is created for a cluster, and finds those that become another class.

A Create may refine resources, labels and price (docs/spec/provider.md §2). The composition that a machine was acquired
for names its former class: without a correction the machine fills no place of it, and one more is acquired. This module
does not change a composition.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from bigfleet.engine.columns.store import ColumnSnapshot
from bigfleet.engine.decision import Decision
from bigfleet.engine.targets import ClassKey
from bigfleet.model.ids import MachineId
from bigfleet.model.states import CapacityType, MachineState

#: States in which a machine may fill a place of a composition.
_OF_USE: Final = frozenset(
    {MachineState.CREATING, MachineState.IDLE, MachineState.CONFIGURING, MachineState.CONFIGURED}
)
#: A machine that was acquired longer ago and is not in creation is forgotten: its action was not carried out. With the
#: default timeouts an action waits in the queue for less than half of that.
ACQUIRED_SECONDS: Final = 600.0


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
    #: When a decision acquired it last, seconds; None once it was seen in creation.
    acquired_seconds: float | None


class CreatedMachines:
    """The machines that are being created for clusters. One call at a time; it may be in any thread."""

    def __init__(self) -> None:
        #: At most one for each machine of the shard.
        self._creations: dict[MachineId, _Creation] = {}
        #: Of the view of the last call of `follow`; None before one.
        self._classes: SnapshotClasses | None = None
        #: The machines that the decision on that view creates, by cluster.
        self._acquired: list[tuple[str, tuple[MachineId, ...]]] = []

    def __len__(self) -> int:
        return len(self._creations)

    def clear(self) -> None:
        """Forget all machines."""
        self._creations.clear()
        self._classes = None
        self._acquired = []

    def follow(self, view: ColumnSnapshot, now_seconds: float) -> list[ClassChange]:
        """Look at the machines before a decision; return the changes of class since the last call.

        Only machines that differ from the last view are looked at, if the view knows which they are. Else the cost is a
        lookup for each remembered machine, tens of milliseconds for ten thousand: call it off the event loop.
        """
        self._remember(now_seconds)
        before, classes, state = self._classes, SnapshotClasses(view), view.columns.state
        self._classes = classes
        rows = None if before is None else _changed_rows(before.view, view)
        if rows is None:
            found = [(machine_id, view.rows.get(machine_id)) for machine_id in self._creations]
            rows = np.flatnonzero(state == int(MachineState.CREATING))
        else:
            ids = view.ids
            found = [(ids[row], row) for row in rows.tolist() if ids[row] in self._creations]
            rows = rows[state[rows] == int(MachineState.CREATING)]
        changes = [change for machine_id, row in found for change in self._seen(machine_id, row, classes)]
        # Those that a decision before a restart acquired, too.
        for row in rows.tolist():
            cluster = view.vocabulary.stamps[int(view.columns.stamp[row])].intended_cluster
            if cluster:
                self._creations[view.ids[row]] = _Creation(cluster, classes.at(row), None)
        return changes

    def decided(self, decision: Decision) -> None:
        """Note what the decision on the last view creates. The next call of `follow` looks it up."""
        self._acquired = [(result.need.cluster, result.provisions) for result in decision.rows if result.provisions]

    def _remember(self, now_seconds: float) -> None:
        """Remember what the last decision creates, and forget what no decision has created for a while."""
        classes, acquired, self._acquired = self._classes, self._acquired, []
        if classes is not None:
            for cluster, machine_id in ((cluster, each) for cluster, machine_ids in acquired for each in machine_ids):
                row = classes.view.rows.get(machine_id)
                if row is not None:
                    self._creations[machine_id] = _Creation(cluster, classes.at(row), now_seconds)
        from_seconds = now_seconds - ACQUIRED_SECONDS
        late = [
            machine_id
            for machine_id, known in self._creations.items()
            if known.acquired_seconds is not None and known.acquired_seconds < from_seconds
        ]
        for machine_id in late:
            del self._creations[machine_id]

    def _seen(self, machine_id: MachineId, row: int | None, classes: "SnapshotClasses") -> Iterator[ClassChange]:
        """Yield the change of class of one machine, if there is one; forget a machine that was created or is gone."""
        view = classes.view
        known = self._creations[machine_id]
        state = -1 if row is None else int(view.columns.state[row])
        if state == MachineState.SPECULATIVE and known.acquired_seconds is not None:
            return
        if state != MachineState.CREATING:
            del self._creations[machine_id]
        if row is None or state not in _OF_USE:
            return
        owner = view.vocabulary.clusters[int(view.columns.cluster[row])]
        after = classes.at(row)
        if state == MachineState.CREATING:
            self._creations[machine_id] = _Creation(known.cluster, after, None)
        if owner in ("", known.cluster) and after != known.machine_class:
            yield ClassChange(known.cluster, known.machine_class, after)


def _changed_rows(before: ColumnSnapshot, view: ColumnSnapshot) -> npt.NDArray[np.int64] | None:
    """Return the rows that differ between two views; None when not known."""
    # Views with the same list of ids are of one store and of one layout.
    return view.changed_since(before.generation) if view.ids is before.ids else None


class SnapshotClasses:
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
