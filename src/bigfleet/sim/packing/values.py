"""Holds the demand and the supply that the packer works on.

Quantities are integers in milli-units (memory in thousandths of a byte), as everywhere in the project. Matching is
implemented a second time on purpose: a comparison that shared the engine's matching would share its mistakes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from bigfleet.model import labels as keys

PODS: Final = "pods"
CPU: Final = "cpu"
MEMORY: Final = "memory"
MILLI: Final = 1000

PINNED_BUCKET: Final = 27

Vec = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class PackingRequirement:
    """One node selector requirement, with the operator names of Kubernetes and `Same`."""

    key: str
    operator: str
    values: tuple[str, ...] = ()

    def holds(self, value: str | None) -> bool:
        """Return whether a node with this value of the key (None: without it) satisfies the requirement."""
        match self.operator:
            case "In":
                return value in self.values
            case "NotIn":
                return value not in self.values
            case "Exists":
                return value is not None
            case "DoesNotExist":
                return value is None
            case "Same":
                return value is not None and (not self.values or value in self.values)
        raise ValueError(f"requirement on {self.key}: unknown operator {self.operator!r}")


@dataclass(frozen=True, slots=True)
class PackingSpread:
    """One topology spread constraint; strict is DoNotSchedule."""

    key: str
    skew_max: int
    is_strict: bool


@dataclass(frozen=True, slots=True)
class PackingShape:
    """Pods of one request; `pods` is implied and never part of `resources`."""

    resources: Vec
    count: int
    #: Pods of this shape that one machine may host; 0 is no limit.
    max_per_machine: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingRow:
    """One row of demand."""

    id: str
    shapes: tuple[PackingShape, ...]
    requirements: tuple[PackingRequirement, ...] = ()
    spreads: tuple[PackingSpread, ...] = ()
    priority: int = 0
    #: Ordinals of docs/spec/model.md section 6.
    interruption_bucket: int = 1
    reclamation_bucket: int = 1
    group: str = ""

    @property
    def pods(self) -> int:
        """Number of pods."""
        return sum(shape.count for shape in self.shapes)

    @property
    def penalty_dollars(self) -> float:
        """Cost of one interruption in dollars, infinite for a pinned row: the upper bound of the bucket."""
        if self.interruption_bucket == PINNED_BUCKET:
            return math.inf
        if self.interruption_bucket >= 3:
            return float(2 ** (self.interruption_bucket - 3))
        return 0.5 if self.interruption_bucket == 2 else 0.0

    @property
    def same_key(self) -> str | None:
        """Topology key within one value of which all pods must run, or None."""
        return next((r.key for r in self.requirements if r.operator == "Same"), None)

    @property
    def strict_spread(self) -> PackingSpread | None:
        """The strict spread, or None; a gang has none, because it runs in one domain."""
        if self.same_key is not None:
            return None
        return next((spread for spread in self.spreads if spread.is_strict), None)


@dataclass(frozen=True, slots=True)
class PackingOverhead:
    """What DaemonSets take on every node that matches."""

    resources: Vec
    requirements: tuple[PackingRequirement, ...] = ()


@dataclass(frozen=True, slots=True)
class PackingCluster:
    """One cluster's demand; ids of rows differ within it."""

    id: str
    rows: tuple[PackingRow, ...]
    overheads: tuple[PackingOverhead, ...] = ()

    @property
    def pods(self) -> int:
        """Number of pods."""
        return sum(row.pods for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingOffer:
    """A class of machines, equal in everything but the id."""

    id: str
    instance_type: str
    zone: str
    #: BareMetal, Reserved, OnDemand or Spot.
    capacity_type: str
    #: What pods and DaemonSets share.
    allocatable: Vec
    price_usd_per_hour: float
    #: Machines of the class that there are or could be.
    stock: int
    labels: Mapping[str, str] = field(default_factory=dict)
    #: Per hour.
    interruption_probability: float = 0.0
    #: The machines are there and idle; otherwise each must be created.
    is_existing: bool = False

    @property
    def marginal_usd_per_hour(self) -> float:
        """What using one machine costs beyond what is paid anyway: here the whole price."""
        return self.price_usd_per_hour

    def attribute(self, key: str) -> str | None:
        """Return the value of a node label, or None."""
        if key == keys.INSTANCE_TYPE:
            return self.instance_type
        if key == keys.ZONE:
            return self.zone
        if key == keys.CAPACITY_TYPE:
            return self.capacity_type
        return self.labels.get(key)

    def matches(self, requirements: tuple[PackingRequirement, ...]) -> bool:
        """Return whether every requirement holds on this class."""
        return all(requirement.holds(self.attribute(requirement.key)) for requirement in requirements)

    def machine_id(self, number: int) -> str:
        """Return the id of the class's machine of that number, from 0."""
        return f"{self.id}-{number:05d}"


@dataclass(frozen=True, slots=True)
class Bought:
    """One machine with the pods that it hosts."""

    #: Position in the offers.
    offer: int
    #: Pods by position of the shape.
    pods: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Purchase:
    """Machines for one cluster, in the order in which they were taken."""

    machines: tuple[Bought, ...]
    #: Price at the margin and expected interruptions.
    usd_per_hour: float
    #: Pods by position of the shape that no machine with stock left could take.
    unhosted: Mapping[int, int] = field(default_factory=dict)
