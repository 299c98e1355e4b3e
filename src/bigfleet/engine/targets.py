"""Names the machine classes of a target composition and the composition itself.

A target composition says which machine classes, and how many of each, a cluster should hold. It is an input of a
decision, so that decisions stay pure and can be replayed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from bigfleet.model.machine import Machine
from bigfleet.model.states import CapacityType


class ClassKey(NamedTuple):
    """What two machines of one class share, whatever their state."""

    instance_type: str
    zone: str
    capacity_type: CapacityType
    price_usd_per_hour: float
    interruption_probability: float
    labels: tuple[tuple[str, str], ...]
    supply: tuple[tuple[str, int], ...]


def class_key(machine: Machine) -> ClassKey:
    """Return the class of a machine."""
    return ClassKey(
        machine.instance_type,
        machine.zone,
        machine.capacity_type,
        machine.price_usd_per_hour,
        machine.interruption_probability,
        tuple(sorted(machine.labels.items())),
        tuple(sorted(machine.supply.items())),
    )


@dataclass(frozen=True, slots=True)
class Target:
    """What one cluster should hold."""

    #: Machines of each class in all, held ones included.
    counts: Mapping[ClassKey, int]
