"""Holds the values of an evaluation: demand, supply, instances, and what a candidate answers.

Demand and supply are those of `bigfleet.sim.packing.values`, which shares nothing with the engine.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from bigfleet.sim.packing import values as packing
from bigfleet.sim.packing.values import CPU as CPU
from bigfleet.sim.packing.values import MEMORY as MEMORY
from bigfleet.sim.packing.values import MILLI as MILLI
from bigfleet.sim.packing.values import PINNED_BUCKET as PINNED_BUCKET
from bigfleet.sim.packing.values import PODS as PODS
from bigfleet.sim.packing.values import PackingCluster as PackingCluster
from bigfleet.sim.packing.values import PackingOverhead as PackingOverhead
from bigfleet.sim.packing.values import PackingRequirement as PackingRequirement
from bigfleet.sim.packing.values import PackingRow as PackingRow
from bigfleet.sim.packing.values import PackingShape as PackingShape
from bigfleet.sim.packing.values import PackingSpread as PackingSpread
from bigfleet.sim.packing.values import Vec as Vec

#: Milli-units of one MiB.
MIB: Final = 1024 * 1024 * MILLI

#: Machines that are paid for whether they serve or not.
PAID_CAPACITY_TYPES: Final = frozenset({"BareMetal", "Reserved"})


class Start(Enum):
    """Where a candidate begins."""

    NOTHING = "nothing"
    #: After ten steps of changing demand, each of which came to rest.
    STEPS = "steps"


class Scheduler(Enum):
    """Which scoring strategy of kube-scheduler's NodeResourcesFit places the pods."""

    LEAST_ALLOCATED = "least-allocated"
    MOST_ALLOCATED = "most-allocated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer(packing.PackingOffer):
    """A class of machines; bare metal and reservations are paid for whether they serve or not."""

    @property
    def marginal_usd_per_hour(self) -> float:
        """What using one machine costs beyond what is paid anyway: 0 for bare metal and reservations."""
        return 0.0 if self.capacity_type in PAID_CAPACITY_TYPES else self.price_usd_per_hour


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One problem: supply, and the demand of each step; the last step is what is judged."""

    family: str
    size: str
    seed: int
    offers: tuple[Offer, ...]
    #: Each step's clusters, same clusters in the same order; "from nothing" uses the last step alone.
    steps: tuple[tuple[PackingCluster, ...], ...]

    @property
    def name(self) -> str:
        """Family, size and seed, such as `F1/medium/3`."""
        return f"{self.family}/{self.size}/{self.seed}"

    @property
    def clusters(self) -> tuple[PackingCluster, ...]:
        """The demand that is judged."""
        return self.steps[-1]

    @property
    def pods(self) -> int:
        """Number of pods that is judged."""
        return sum(cluster.pods for cluster in self.clusters)

    def demands(self, start: Start) -> tuple[tuple[PackingCluster, ...], ...]:
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
