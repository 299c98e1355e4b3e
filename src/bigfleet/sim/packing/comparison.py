"""Computes what the packer would pay for the pods of some clusters on the machines of a fleet.

The packer may take every machine and every slot of the fleet but those that are Failed. Pods are whole, machines start
empty. Bare metal and reserved machines that exist are paid for whether they serve or not: using them costs nothing, and
they come first. All others cost their listed price.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from bigfleet.model.machine import Machine
from bigfleet.model.profile import Profile
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.model.vector import vector_key
from bigfleet.operator.requests import CapacityRequest, map_request
from bigfleet.sim.packing.packer import pack
from bigfleet.sim.packing.values import (
    PackingCluster,
    PackingOffer,
    PackingRequirement,
    PackingRow,
    PackingShape,
    PackingSpread,
)

#: A machine of these types is paid for while it exists, and ends when it is not needed.
_BY_THE_HOUR: Final = (CapacityType.ON_DEMAND, CapacityType.SPOT)


def rent_usd_per_hour(machine: Machine) -> float:
    """Return what using a machine costs beyond what is paid anyway."""
    is_paid_anyway = machine.capacity_type not in _BY_THE_HOUR and machine.state is not MachineState.SPECULATIVE
    return 0.0 if is_paid_anyway else machine.price_usd_per_hour


def paid_anyway_usd_per_hour(machine: Machine) -> float:
    """Return what a machine costs whether it serves or not."""
    is_there = machine.state not in (MachineState.SPECULATIVE, MachineState.FAILED)
    return machine.price_usd_per_hour - rent_usd_per_hour(machine) if is_there else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedCost:
    """What the packer takes for all clusters together."""

    #: Rent of what it takes, and the price of all that is paid anyway, taken or not.
    usd_per_hour: float
    machines: int
    #: Pods that it finds no machine for.
    unhosted: int


def packed_cost(requests: Mapping[str, Iterable[CapacityRequest]], machines: Iterable[Machine]) -> PackedCost:
    """Return what the packer takes for the pods of each cluster. Raises UnmappableRequest.

    Expected interruptions count when the packer picks a machine, not in the sum.
    """
    machines = list(machines)
    offers = offers_of(machines)
    purchases = pack(offers, [cluster_of(cluster, pods) for cluster, pods in requests.items()])
    taken = [offers[machine.offer] for purchase in purchases for machine in purchase.machines]
    return PackedCost(
        usd_per_hour=sum(map(paid_anyway_usd_per_hour, machines)) + sum(offer.price_usd_per_hour for offer in taken),
        machines=len(taken),
        unhosted=sum(sum(purchase.unhosted.values()) for purchase in purchases),
    )


def offers_of(machines: Iterable[Machine]) -> list[PackingOffer]:
    """Return the machines by class, ordered by price; Failed ones are left out."""
    classes: dict[object, Machine] = {}
    stock: Counter[object] = Counter()
    for machine in machines:
        if machine.state is MachineState.FAILED:
            continue
        what = (machine.instance_type, machine.zone, machine.capacity_type, tuple(sorted(machine.labels.items())))
        price = (rent_usd_per_hour(machine), machine.interruption_probability)
        kind = (*what, vector_key(machine.supply), *price)
        classes.setdefault(kind, machine)
        stock[kind] += 1
    ordered = sorted(classes.items(), key=lambda one: (rent_usd_per_hour(one[1]), one[1].id))
    return [
        PackingOffer(
            # Ties between classes are broken by position and by this.
            id=f"{number:06d}",
            instance_type=machine.instance_type,
            zone=machine.zone,
            capacity_type=machine.capacity_type.label,
            allocatable=machine.supply,
            price_usd_per_hour=rent_usd_per_hour(machine),
            stock=stock[kind],
            labels=machine.labels,
            interruption_probability=machine.interruption_probability,
            is_existing=rent_usd_per_hour(machine) == 0,
        )
        for number, (kind, machine) in enumerate(ordered)
    ]


def cluster_of(name: str, requests: Iterable[CapacityRequest]) -> PackingCluster:
    """Return the pods of a cluster as rows of shapes. Raises UnmappableRequest."""
    profiles: dict[tuple[str, str], Profile] = {}
    shapes: dict[tuple[str, str], Counter[tuple[tuple[tuple[str, int], ...], str, int]]] = {}
    for request in requests:
        mapped = map_request(request)
        row = (mapped.profile.fingerprint, mapped.group)
        profiles.setdefault(row, mapped.profile)
        shapes.setdefault(row, Counter())[(vector_key(mapped.vector), mapped.exclusion, mapped.max_per_machine)] += 1
    return PackingCluster(
        name,
        tuple(
            _row(f"{fingerprint}\0{group}", group, profiles[fingerprint, group], kinds)
            for (fingerprint, group), kinds in sorted(shapes.items(), key=lambda item: item[0])
        ),
    )


def _row(
    row_id: str, group: str, profile: Profile, kinds: Counter[tuple[tuple[tuple[str, int], ...], str, int]]
) -> PackingRow:
    return PackingRow(
        id=row_id,
        shapes=tuple(PackingShape(dict(resources), count, limit) for (resources, _, limit), count in kinds.items()),
        requirements=tuple(PackingRequirement(r.key, r.operator.label, r.values) for r in profile.requirements),
        spreads=tuple(PackingSpread(spread.topology_key, max(1, spread.skew_max), True) for spread in profile.spreads),
        priority=profile.priority,
        interruption_bucket=profile.interruption_bucket,
        reclamation_bucket=profile.reclamation_bucket,
        group=group,
    )
