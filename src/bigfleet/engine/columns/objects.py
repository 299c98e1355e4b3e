"""Turns columns back into the objects that the reference engine reads.

Used to replay a decision, and for inputs that do not fit the columns' integers. What no decision reads is not stored in
columns: host, node name and last error are placeholders here, which is why nothing may report such a machine to anybody
but an engine.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

import numpy as np

from bigfleet.engine.columns.store import REMOVED, ColumnSnapshot, Shape, Vocabulary
from bigfleet.engine.snapshot import Snapshot
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.states import CapacityType, MachineState


def snapshot_of(view: ColumnSnapshot) -> Snapshot:
    """Return the view as an object snapshot, the very one that it was made of when there is one."""
    if view.source is not None:
        return view.source
    columns, resources = view.columns, resources_of(view.vocabulary)
    machines, idle_since = [], {}
    for row in np.flatnonzero(columns.state != REMOVED).tolist():
        machine = machine_at(view, row, resources)
        machines.append(machine)
        since = float(columns.idle_since_seconds[row])
        if not np.isnan(since):
            idle_since[machine.id] = since
    return Snapshot.of(machines, idle_since)


def resources_of(vocabulary: Vocabulary) -> list[Mapping[str, str]]:
    """Return the resources of each supply, by number, as a provider writes them."""
    return [MappingProxyType({name: f"{milli}m" for name, milli in supply.items()}) for supply in vocabulary.supplies]


@lru_cache(maxsize=4096)
def labels_of(shape: Shape) -> Mapping[str, str]:
    """Return the labels of a shape; machines share them."""
    return MappingProxyType(dict(shape.labels))


def machine_at(view: ColumnSnapshot, row: int, resources: Sequence[Mapping[str, str]]) -> Machine:
    """Return the machine of a row; `resources` are those of the view's vocabulary, or of a later state of it."""
    columns, vocabulary = view.columns, view.vocabulary
    shape_number = int(columns.shape[row])
    shape = vocabulary.shapes[shape_number]
    offer, stamp = vocabulary.offers[columns.offer[row]], vocabulary.stamps[columns.stamp[row]]
    return Machine(
        id=view.ids[row],
        state=MachineState(int(columns.state[row])),
        cluster=ClusterId(vocabulary.clusters[columns.cluster[row]]),
        instance_type=shape.instance_type,
        zone=shape.zone,
        capacity_type=CapacityType(offer.capacity_type),
        resources=resources[vocabulary.supply_of_shape[shape_number]],
        labels=labels_of(shape),
        price_usd_per_hour=offer.price_usd_per_hour,
        interruption_probability=offer.interruption_probability,
        assigned_priority=stamp.assigned_priority,
        assigned_interruption_penalty_dollars=stamp.assigned_interruption_penalty_dollars,
        assigned_reclamation_penalty_dollars=stamp.assigned_reclamation_penalty_dollars,
        assigned_need_fingerprint=stamp.assigned_need_fingerprint,
        assigned_group=stamp.assigned_group,
        intended_cluster=stamp.intended_cluster,
        preempted_for=stamp.preempted_for,
    )


def example_of(vocabulary: Vocabulary, number: int) -> Machine:
    """Return a machine of a shape that stands for all of them; only what makes up the shape has a meaning."""
    shape = vocabulary.shapes[number]
    supply = vocabulary.supplies[vocabulary.supply_of_shape[number]]
    return Machine(
        id=MachineId(""),
        state=MachineState.SPECULATIVE,
        instance_type=shape.instance_type,
        zone=shape.zone,
        resources={name: f"{milli}m" for name, milli in supply.items()},
        labels=dict(shape.labels),
    )
