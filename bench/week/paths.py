"""Draws what happens to a fleet from a seed: demand, prices, stockouts and losses, equal in every mode.

docs/spec/benchmarks.md, "A week with exchanges". Each path has a stream of its own, so that no decision can move
another path. Times are whole minutes from the beginning.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from bigfleet.model import labels
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.profile import Operator, Requirement
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.operator.requests import CapacityRequest, penalty_bucket
from bigfleet.sim.kernel.streams import Streams
from bigfleet.sim.pods.scheduler import Template

MINUTES_PER_DAY: Final = 24 * 60
ZONES: Final = ("a", "b")
#: Pods change so often, and each pool's price, at an offset of its own.
DEMAND_STEP_MINUTES: Final = 60
PRICE_STEP_MINUTES: Final = 240
#: Share of a type's on-demand price: where spot prices return to, and their bounds.
SPOT_SHARE: Final = 0.38
SPOT_SHARE_MIN: Final = 0.2
SPOT_SHARE_MAX: Final = 1.1
#: Of the log of a spot price: its part of the way back in each step, and the deviation of a step.
SPOT_RETURN: Final = 0.2
SPOT_DEVIATION: Final = 0.22
#: Of a spot machine, declared and true, within an hour.
INTERRUPTIONS_PER_HOUR: Final = 0.002
#: Spot pools are sold out so often, and so long.
STOCKOUTS_PER_DAY: Final = 0.35
STOCKOUT_MINUTES: Final = (60, 360)
#: Share of a pool's machines that are interrupted when it is sold out.
STOCKOUT_INTERRUPTS: Final = 0.15
FAILURES_PER_DAY: Final = 0.02
#: Deviation of the noise of a workload's log size, and how much of it the next step has.
NOISE: Final = 0.04
NOISE_KEPT: Final = 0.8


@dataclass(frozen=True, slots=True)
class MachineType:
    """A type of machines, with its on-demand price."""

    name: str
    cpu: int
    memory_gib: int
    usd_per_hour: float


TYPES: Final = (
    MachineType("m4", 4, 16, 0.192),
    MachineType("m8", 8, 32, 0.384),
    MachineType("c8", 8, 16, 0.34),
    MachineType("r8", 8, 64, 0.504),
)


@dataclass(frozen=True, slots=True)
class Pool:
    """Machines of one type, zone and capacity type."""

    kind: MachineType
    zone: str
    capacity_type: CapacityType

    @property
    def name(self) -> str:
        """Return the id that its machines begin with."""
        return f"{self.kind.name}-{self.zone}-{self.capacity_type.label.lower()}"

    @property
    def is_spot(self) -> bool:
        """Return whether its price moves, and its machines are interrupted."""
        return self.capacity_type is CapacityType.SPOT

    def machine(self, number: int, usd_per_hour: float) -> Machine:
        """Return one of its machines on offer."""
        kind = self.kind
        return Machine(
            id=MachineId(f"{self.name}-{number:03d}"),
            state=MachineState.SPECULATIVE,
            instance_type=kind.name,
            zone=self.zone,
            capacity_type=self.capacity_type,
            # What the node's own processes take is left out.
            allocatable={"cpu": f"{kind.cpu * 1000 - 160}m", "memory": f"{kind.memory_gib * 960}Mi", "pods": "58"},
            price_usd_per_hour=usd_per_hour,
            interruption_probability=INTERRUPTIONS_PER_HOUR if self.is_spot else 0.0,
        )


POOLS: Final = tuple(
    Pool(kind, zone, capacity_type)
    for kind in TYPES
    for zone in ZONES
    for capacity_type in (CapacityType.ON_DEMAND, CapacityType.SPOT)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Pods that are alike, and how their number follows the day."""

    name: str
    cpu: str
    memory: str
    #: On average, for a cluster of usual size.
    pods: int
    #: Share of the average by which the number rises at the cluster's peak; below 0 it peaks at night.
    swing: float
    #: Dollars of an interruption, and of a reclamation.
    interruption: str = "0"
    reclamation: str = "0"
    #: Runs only in so many hours around the lowest point of the day; 0 always runs.
    night_hours: int = 0


WORKLOADS: Final = (
    Workload(name="web", cpu="1", memory="2Gi", pods=18, swing=0.5),
    Workload(name="api", cpu="2", memory="6Gi", pods=10, swing=0.4),
    Workload(name="cache", cpu="1500m", memory="14Gi", pods=3, swing=0.1, interruption="0.5", reclamation="0.5"),
    Workload(name="worker", cpu="3", memory="5Gi", pods=4, swing=-0.4),
    Workload(name="store", cpu="2", memory="13Gi", pods=2, swing=0.0, interruption="4", reclamation="4"),
    Workload(name="batch", cpu="3500m", memory="6Gi", pods=2, swing=0.0, night_hours=5),
)


class Loss(Enum):
    """Why a machine is lost."""

    FAILURE = "failure"
    INTERRUPTION = "interruption"


@dataclass(frozen=True, slots=True)
class Paths:
    """Everything that happens from outside, by minute."""

    clusters: tuple[str, ...]
    minutes: int
    #: Pods by cluster, then workload, for each step of demand.
    demand: Mapping[str, Mapping[str, Sequence[int]]]
    #: Changes of price by minute; minute 0 has every pool's.
    prices: Mapping[int, Sequence[tuple[Pool, float]]]
    #: Minutes (from, to) in which a pool has nothing on offer.
    stockouts: Mapping[Pool, Sequence[tuple[int, int]]]
    #: By minute; of machines that are there at that time.
    losses: Mapping[int, Sequence[tuple[str, Loss]]]
    templates: Mapping[str, Mapping[str, Template]] = field(default_factory=dict)

    def pods_at(self, cluster: str, minute: int) -> dict[str, int]:
        """Return how many pods of each workload a cluster has."""
        step = minute // DEMAND_STEP_MINUTES
        return {name: counts[step] for name, counts in self.demand[cluster].items()}

    def is_sold_out(self, pool: Pool, minute: int) -> bool:
        """Return whether a pool has nothing on offer."""
        return any(first <= minute < end for first, end in self.stockouts[pool])


def paths_of(seed: int, *, minutes: int, clusters: int, slots: int) -> Paths:
    """Return the paths of a seed for so many clusters, and so many machines in each pool."""
    streams = Streams(seed)
    names = tuple(f"c{number}" for number in range(clusters))
    stockouts = {pool: _stockouts(streams, pool, minutes) for pool in POOLS}
    return Paths(
        clusters=names,
        minutes=minutes,
        demand={name: _demand(streams, name, number / clusters, minutes) for number, name in enumerate(names)},
        prices=_prices(streams, minutes),
        stockouts=stockouts,
        losses=_losses(streams, minutes, slots, stockouts),
        templates={name: {each.name: _template(each) for each in WORKLOADS} for name in names},
    )


def _template(workload: Workload) -> Template:
    request = CapacityRequest(
        id="",
        resources={"cpu": workload.cpu, "memory": workload.memory},
        requirements=(Requirement(labels.INSTANCE_TYPE, Operator.EXISTS),),
        priority=100,
        interruption_bucket=penalty_bucket(workload.interruption),
        reclamation_bucket=penalty_bucket(workload.reclamation),
    )
    return Template.of(workload.name, workload.name, request)


def _demand(streams: Streams, cluster: str, phase: float, minutes: int) -> dict[str, list[int]]:
    """Return the pods of each workload; `phase` is the part of a day by which the cluster's peak is later."""
    size = streams.of(f"size/{cluster}").uniform(0.8, 1.2)
    found: dict[str, list[int]] = {}
    for workload in WORKLOADS:
        draws, noise, counts = streams.of(f"demand/{cluster}/{workload.name}"), 0.0, []
        for step in range(minutes // DEMAND_STEP_MINUTES + 1):
            noise = NOISE_KEPT * noise + draws.gauss(0.0, NOISE * math.sqrt(1 - NOISE_KEPT**2))
            wave = math.sin(2 * math.pi * (step * DEMAND_STEP_MINUTES / MINUTES_PER_DAY - phase))
            pods = size * workload.pods * (1 + workload.swing * wave) * math.exp(noise)
            if workload.night_hours and wave > -math.cos(math.pi * workload.night_hours / 24):
                pods = 0
            counts.append(round(pods))
        found[workload.name] = counts
    return found


def _prices(streams: Streams, minutes: int) -> dict[int, list[tuple[Pool, float]]]:
    found: dict[int, list[tuple[Pool, float]]] = {}
    for pool in POOLS:
        on_demand = pool.kind.usd_per_hour
        if not pool.is_spot:
            found.setdefault(0, []).append((pool, on_demand))
            continue
        draws = streams.of(f"price/{pool.name}")
        usual, low, high = (math.log(share) for share in (SPOT_SHARE, SPOT_SHARE_MIN, SPOT_SHARE_MAX))
        # Far from the beginning of the walk.
        value = usual + draws.gauss(0.0, SPOT_DEVIATION / math.sqrt(2 * SPOT_RETURN))
        minute, next_minute = 0, draws.randrange(1, PRICE_STEP_MINUTES // DEMAND_STEP_MINUTES + 1) * DEMAND_STEP_MINUTES
        while minute <= minutes:
            value = min(high, max(low, value))
            found.setdefault(minute, []).append((pool, round(on_demand * math.exp(value), 4)))
            value += SPOT_RETURN * (usual - value) + draws.gauss(0.0, SPOT_DEVIATION)
            minute, next_minute = next_minute, next_minute + PRICE_STEP_MINUTES
    return found


def _stockouts(streams: Streams, pool: Pool, minutes: int) -> list[tuple[int, int]]:
    if not pool.is_spot:
        return []
    draws, found = streams.of(f"stockouts/{pool.name}"), []
    at = draws.expovariate(STOCKOUTS_PER_DAY) * MINUTES_PER_DAY
    while at < minutes:
        end = at + draws.randint(*STOCKOUT_MINUTES)
        found.append((math.floor(at), math.floor(end)))
        at = end + draws.expovariate(STOCKOUTS_PER_DAY) * MINUTES_PER_DAY
    return found


def _losses(
    streams: Streams, minutes: int, slots: int, stockouts: Mapping[Pool, Sequence[tuple[int, int]]]
) -> dict[int, list[tuple[str, Loss]]]:
    found: dict[int, list[tuple[str, Loss]]] = {}
    for pool in POOLS:
        rates = [(Loss.FAILURE, FAILURES_PER_DAY)]
        if pool.is_spot:
            rates.append((Loss.INTERRUPTION, INTERRUPTIONS_PER_HOUR * 24))
        for number in range(slots):
            machine_id = f"{pool.name}-{number:03d}"
            draws = streams.of(f"losses/{machine_id}")
            for cause, per_day in rates:
                at = draws.expovariate(per_day) * MINUTES_PER_DAY
                while at < minutes:
                    found.setdefault(math.ceil(at), []).append((machine_id, cause))
                    at += draws.expovariate(per_day) * MINUTES_PER_DAY
            for first, _end in stockouts[pool]:
                if draws.random() < STOCKOUT_INTERRUPTS:
                    found.setdefault(first, []).append((machine_id, Loss.INTERRUPTION))
    return found
