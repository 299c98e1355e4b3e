"""Names the machine classes of a target composition and the composition itself.

A target composition says which machine classes, and how many of each, a cluster should hold. It is an input of a
decision, so that decisions stay pure and can be replayed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from bigfleet.model import labels as keys
from bigfleet.model.machine import Machine
from bigfleet.model.need import RowKey
from bigfleet.model.states import CapacityType


class ClassKey(NamedTuple):
    """What two machines of one class share, whatever their state.

    The price of a Spot class is 0: it changes while its machines serve, and a target must name the same machines before
    and after.
    """

    instance_type: str
    zone: str
    capacity_type: CapacityType
    price_usd_per_hour: float
    interruption_probability: float
    labels: tuple[tuple[str, str], ...]
    supply: tuple[tuple[str, int], ...]

    def attribute(self, key: str) -> str | None:
        """Return what a requirement on `key` is compared with, or None when it is absent."""
        if key == keys.INSTANCE_TYPE and self.instance_type:
            return self.instance_type
        if key == keys.ZONE and self.zone:
            return self.zone
        return dict(self.labels).get(key)


def class_key(machine: Machine) -> ClassKey:
    """Return the class of a machine."""
    return ClassKey(
        machine.instance_type,
        machine.zone,
        machine.capacity_type,
        0.0 if machine.capacity_type is CapacityType.SPOT else machine.price_usd_per_hour,
        machine.interruption_probability,
        tuple(sorted(machine.labels.items())),
        tuple(sorted(machine.supply.items())),
    )


@dataclass(frozen=True, slots=True)
class TargetClaim:
    """Pods of one shape on a run of machines of one class.

    Machines of a class are numbered from 0. The numbers say what is together on one machine; which machine it is
    follows from the precedence of the rows.
    """

    machine_class: ClassKey
    first: int
    machines: int
    #: (cluster, fingerprint, group) of the row, and the place among the shapes of the cluster's rows of this key, in
    #: list order.
    row: RowKey
    shape: int
    #: Pods on each of the machines.
    count: int


@dataclass(frozen=True, slots=True)
class Target:
    """What one cluster should hold, and a packing that shows that its pods fit."""

    #: Machines of each class in all, held ones included.
    counts: Mapping[ClassKey, int]
    claims: tuple[TargetClaim, ...] = ()
    #: Who leads the best composition of another type, and what it costs more, dollars an hour; None without one.
    runner_up: str = ""
    runner_up_costs_more_usd_per_hour: float | None = None
    #: Spot pools (instance type and zone) of which a limit allowed fewer machines than the lowest cost wants, sorted.
    limited_pools: tuple[str, ...] = ()
