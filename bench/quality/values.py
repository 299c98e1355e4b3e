"""Holds the values of an evaluation: demand, supply, instances, and what a candidate answers.

Quantities are integers in milli-units (memory in thousandths of a byte), as everywhere in the project. Matching is
written here a second time on purpose: a judge that shared the engine's matching would share its mistakes.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from bigfleet.model import labels as keys

PODS: Final = "pods"
CPU: Final = "cpu"
MEMORY: Final = "memory"
MILLI: Final = 1000
#: Milli-units of one MiB.
MIB: Final = 1024 * 1024 * MILLI

PINNED_BUCKET: Final = 27
#: Machines that are paid for whether they serve or not.
PAID_CAPACITY_TYPES: Final = frozenset({"BareMetal", "Reserved"})

Vec = Mapping[str, int]


class Start(Enum):
    """Where a candidate begins."""

    NOTHING = "nothing"
    #: After ten steps of changing demand, each of which came to rest.
    STEPS = "steps"


class Scheduler(Enum):
    """Which scoring strategy of kube-scheduler's NodeResourcesFit places the pods."""

    LEAST_ALLOCATED = "least-allocated"
    MOST_ALLOCATED = "most-allocated"


@dataclass(frozen=True, slots=True)
class Requirement:
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
class Spread:
    """One topology spread constraint; strict is DoNotSchedule."""

    key: str
    skew_max: int
    is_strict: bool


@dataclass(frozen=True, slots=True)
class Shape:
    """Pods of one request; `pods` is implied and never part of `resources`."""

    resources: Vec
    count: int
    #: Pods of this shape that one machine may host; 0 is no limit.
    max_per_machine: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of demand."""

    id: str
    shapes: tuple[Shape, ...]
    requirements: tuple[Requirement, ...] = ()
    spreads: tuple[Spread, ...] = ()
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
    def strict_spread(self) -> Spread | None:
        """The strict spread, or None; a gang has none, because it runs in one domain."""
        if self.same_key is not None:
            return None
        return next((spread for spread in self.spreads if spread.is_strict), None)


@dataclass(frozen=True, slots=True)
class Overhead:
    """What DaemonSets take on every node that matches."""

    resources: Vec
    requirements: tuple[Requirement, ...] = ()


@dataclass(frozen=True, slots=True)
class Cluster:
    """One cluster's demand; ids of rows differ within it."""

    id: str
    rows: tuple[Row, ...]
    overheads: tuple[Overhead, ...] = ()

    @property
    def pods(self) -> int:
        """Number of pods."""
        return sum(row.pods for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
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
        """What using one machine costs beyond what is paid anyway: 0 for bare metal and reservations."""
        return 0.0 if self.capacity_type in PAID_CAPACITY_TYPES else self.price_usd_per_hour

    def attribute(self, key: str) -> str | None:
        """Return the value of a node label, or None."""
        if key == keys.INSTANCE_TYPE:
            return self.instance_type
        if key == keys.ZONE:
            return self.zone
        if key == keys.CAPACITY_TYPE:
            return self.capacity_type
        return self.labels.get(key)

    def matches(self, requirements: tuple[Requirement, ...]) -> bool:
        """Return whether every requirement holds on this class."""
        return all(requirement.holds(self.attribute(requirement.key)) for requirement in requirements)

    def machine_id(self, number: int) -> str:
        """Return the id of the class's machine of that number, from 0."""
        return f"{self.id}-{number:05d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One problem: supply, and the demand of each step; the last step is what is judged."""

    family: str
    size: str
    seed: int
    offers: tuple[Offer, ...]
    #: Each step's clusters, same clusters in the same order; "from nothing" uses the last step alone.
    steps: tuple[tuple[Cluster, ...], ...]

    @property
    def name(self) -> str:
        """Family, size and seed, such as `F1/medium/3`."""
        return f"{self.family}/{self.size}/{self.seed}"

    @property
    def clusters(self) -> tuple[Cluster, ...]:
        """The demand that is judged."""
        return self.steps[-1]

    @property
    def pods(self) -> int:
        """Number of pods that is judged."""
        return sum(cluster.pods for cluster in self.clusters)

    def demands(self, start: Start) -> tuple[tuple[Cluster, ...], ...]:
        """Return the demands that a candidate lives through, in order."""
        return self.steps if start is Start.STEPS else self.steps[-1:]


# ---- what a candidate answers ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Claim:
    """Pods of one shape that a machine is meant to host."""

    row: str
    #: Position in the row's shapes.
    shape: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One machine that a cluster holds at rest."""

    machine_id: str
    #: Position in the instance's offers.
    offer: int
    cluster: str
    #: Empty where the candidate knows rows and no shapes.
    claims: tuple[Claim, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RowReport:
    """What the candidate says about one row."""

    cluster: str
    row: str
    is_satisfied: bool
    #: Pods by position of the shape that the candidate says have no machine; every pod of a row without shapes.
    short: Mapping[int, int] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A candidate's answer to one instance."""

    holdings: tuple[Holding, ...]
    rows: tuple[RowReport, ...]
    #: Whether the holdings carry claims, so that the claims checker applies.
    has_claims: bool
    #: Of the last step.
    cycles: int
    #: Of the last step: bindings, creations, reclaims, preemptions and releases.
    actions: int
    #: Of the last step: actions beyond the machines that differ between its beginning and its end.
    actions_unneeded: int
    #: CPU seconds of all decisions of the last step.
    engine_seconds: float
    #: Whether the last step came to rest within the cycles that it was given.
    is_at_rest: bool = True

    def by_cluster(self) -> Iterator[tuple[str, list[Holding]]]:
        """Yield each cluster that holds machines with its holdings, clusters in order of first appearance."""
        held: dict[str, list[Holding]] = {}
        for holding in self.holdings:
            held.setdefault(holding.cluster, []).append(holding)
        yield from held.items()
