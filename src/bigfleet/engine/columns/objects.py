"""Turns columns back into the objects that the reference engine reads.

Used to replay a decision, and for inputs that do not fit the columns' integers. What no decision reads is not stored in
columns: host, node name and last error are placeholders here, which is why nothing may report such a machine to anybody
but an engine.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from operator import attrgetter
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np

from bigfleet.engine.bulk import made_at_once
from bigfleet.engine.columns.store import REMOVED, ColumnSnapshot, Shape, Vocabulary
from bigfleet.engine.snapshot import Snapshot
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import Machine, Stamp
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.model.vector import Vector, parse_vector


def snapshot_of(view: ColumnSnapshot) -> Snapshot:
    """Return the view as an object snapshot, the very one that it was made of when there is one."""
    if view.source is not None:
        return view.source
    columns, idle_since = view.columns, {}
    rows = np.flatnonzero(columns.state != REMOVED).tolist()
    machines = machines_at(view, rows, resources_of(view.vocabulary))
    for row, machine in zip(rows, machines, strict=True):
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


def machines_at(view: ColumnSnapshot, rows: Sequence[int], resources: Sequence[Mapping[str, str]]) -> list[Machine]:
    """Return `machine_at` of some rows, in a third of the time when there are many."""
    columns, vocabulary = view.columns, view.vocabulary
    at = np.array(rows, np.int64)
    number = columns.shape[at].tolist()
    shapes = [vocabulary.shapes[each] for each in number]
    offers = [vocabulary.offers[each] for each in columns.offer[at].tolist()]
    stamps = [vocabulary.stamps[each] for each in columns.stamp[at].tolist()]
    supply_of = {each: vocabulary.supply_of_shape[each] for each in set(number)}
    supplies = {supply: parse_vector(resources[supply]) for supply in set(supply_of.values())}
    kinds = {
        each: _Kind(resources[supply], labels_of(vocabulary.shapes[each]), supplies[supply])
        for each, supply in supply_of.items()
    }
    of_shape = [kinds[each] for each in number]
    slots: dict[str, Iterable[object]] = {name: repeat(value) for name, value in _ABSENT.items()}
    slots.update(
        id=[view.ids[row] for row in rows],
        state=[_STATES[each] for each in columns.state[at].tolist()],
        cluster=[ClusterId(vocabulary.clusters[each]) for each in columns.cluster[at].tolist()],
        instance_type=[shape.instance_type for shape in shapes],
        zone=[shape.zone for shape in shapes],
        capacity_type=[_CAPACITY_TYPES[offer.capacity_type] for offer in offers],
        resources=[kind.resources for kind in of_shape],
        labels=[kind.labels for kind in of_shape],
        supply=[kind.supply for kind in of_shape],
        price_usd_per_hour=[offer.price_usd_per_hour for offer in offers],
        interruption_probability=[offer.interruption_probability for offer in offers],
    )
    slots.update({name: list(map(attrgetter(name), stamps)) for name in Stamp._fields})
    return made_at_once(Machine, len(rows), slots)


class _Kind(NamedTuple):
    """What machines of one shape have in common."""

    resources: Mapping[str, str]
    labels: Mapping[str, str]
    supply: Vector


_STATES: Final[Mapping[int, MachineState]] = {int(state): state for state in MachineState}
_CAPACITY_TYPES: Final[Mapping[int, CapacityType]] = {int(each): each for each in CapacityType}
#: What no decision reads.
_ABSENT: Final[Mapping[str, object]] = {
    name: getattr(Machine(id=MachineId(""), state=MachineState.SPECULATIVE), name)
    for name in ("host", "allocatable", "last_error", "node_name")
}


def example_of(vocabulary: Vocabulary, number: int) -> Machine:
    """Return a machine that stands for all of a shape: its id is the shape's number, and its state means nothing."""
    shape = vocabulary.shapes[number]
    supply = vocabulary.supplies[vocabulary.supply_of_shape[number]]
    return Machine(
        id=MachineId(str(number)),
        state=MachineState.SPECULATIVE,
        instance_type=shape.instance_type,
        zone=shape.zone,
        resources={name: f"{milli}m" for name, milli in supply.items()},
        labels=dict(shape.labels),
    )
