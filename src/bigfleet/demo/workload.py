"""Generates the demand of the demonstration: what each simulated cluster wants at each virtual second.

Three archetypes per cluster rise and fall: services that an interruption hurts, batch that does not mind, and GPU
inference. A second's demand is a function of (seed, cluster, second) alone, so that a run resumes anywhere. Peaks are
sized so that `bigfleet.demo.fleet`'s default machines can always carry all of it; the workload must never ask for more.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bigfleet.model import labels
from bigfleet.model.penalty import FREE, bucket_for_dollars
from bigfleet.model.profile import Operator, Requirement
from bigfleet.operator.requests import CapacityRequest

#: Share of each kind of machine that all clusters together may ask for at their peaks; the rest is room for
#: interruptions, stockouts and drains.
PEAK_SHARE: Final = 0.7
GPU: Final = "nvidia.com/gpu"
#: How long noon takes to go round all groups: two minutes of a demonstration at its usual speed.
DAY_SECONDS: Final = 7200.0
#: How much noon is above midnight, as an exponent: of three groups the one that has noon wants three quarters of all.
NOON_SHARPNESS: Final = 1.2

_NO_GPU = (Requirement(labels.GPU_PRODUCT, Operator.DOES_NOT_EXIST),)
_ANY_GPU = (Requirement(labels.GPU_PRODUCT, Operator.EXISTS),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Archetype:
    """One kind of pod and how many of it a cluster runs over time."""

    name: str
    resources: Mapping[str, str]
    requirements: tuple[Requirement, ...]
    priority: int
    interruption_bucket: int
    reclamation_bucket: int
    #: It runs on machines with GPUs, or on those without.
    on_gpus: bool
    #: Pods that the smallest machine of its kind holds.
    pods_per_machine: int
    #: Share of its kind of machines, of all that the clusters may ask for.
    machine_share: float
    #: Length of one rise and fall.
    period_seconds: float
    #: Lowest demand as a share of the peak.
    floor: float


#: CPU pods exclude machines with GPUs, as a taint would: otherwise the cheapest row would sit on the dearest hardware.
ARCHETYPES: Final = (
    Archetype(
        name="service",
        resources={"cpu": "2", "memory": "7Gi"},
        requirements=_NO_GPU,
        priority=1000,
        interruption_bucket=bucket_for_dollars(8),
        reclamation_bucket=bucket_for_dollars(2),
        on_gpus=False,
        pods_per_machine=7,
        machine_share=0.55,
        period_seconds=3600.0,
        floor=0.4,
    ),
    Archetype(
        name="batch",
        resources={"cpu": "1", "memory": "3Gi"},
        requirements=_NO_GPU,
        priority=100,
        interruption_bucket=FREE,
        reclamation_bucket=FREE,
        on_gpus=False,
        pods_per_machine=15,
        machine_share=0.45,
        period_seconds=1500.0,
        floor=0.0,
    ),
    Archetype(
        name="inference",
        resources={"cpu": "4", "memory": "24Gi", GPU: "1"},
        requirements=_ANY_GPU,
        priority=5000,
        interruption_bucket=bucket_for_dollars(64),
        reclamation_bucket=bucket_for_dollars(16),
        on_gpus=True,
        pods_per_machine=4,
        machine_share=1.0,
        period_seconds=5400.0,
        floor=0.25,
    ),
)


def peak_pods(archetype: Archetype, *, machines: int, clusters: float) -> int:
    """Return the most pods that one of so many equal clusters runs, given how many machines of its kind there are.

    Whole machines only: a row never shares a machine, so the peaks of all rows add up to at most `PEAK_SHARE`. A
    cluster with a larger part of it all than others is one of fewer.
    """
    return int(machines * PEAK_SHARE * archetype.machine_share / clusters) * archetype.pods_per_machine


def level(seed: int, cluster: str, archetype: Archetype, second: float) -> float:
    """Return the demand as a share of the peak, in [floor, 1]: a wave of its own phase, bent by a slow random walk."""
    phase = _draw(seed, cluster, archetype.name, "phase")
    wave = 0.5 + 0.5 * math.sin(2 * math.pi * (second / archetype.period_seconds + phase))
    return _bent(seed, cluster, archetype, second, wave)


def _bent(seed: int, cluster: str, archetype: Archetype, second: float, wave: float) -> float:
    position = second / (2 * archetype.period_seconds)
    before = _draw(seed, cluster, archetype.name, f"walk-{math.floor(position)}")
    after = _draw(seed, cluster, archetype.name, f"walk-{math.floor(position) + 1}")
    walk = before + (after - before) * (position - math.floor(position))
    return archetype.floor + (1 - archetype.floor) * (0.7 * wave + 0.3 * walk)


def daylight(group: int, groups: int, second: float) -> float:
    """Return a group's part of what all groups may want at a second; the parts of all groups add up to 1."""

    def light(number: int) -> float:
        noon = (number + 0.5) / groups
        return math.exp(NOON_SHARPNESS * math.cos(2 * math.pi * (second / DAY_SECONDS - noon)))

    return light(group) / sum(map(light, range(groups)))


def _draw(*about: object) -> float:
    """Return a number in [0, 1) that depends on what it is about, not on the order of draws."""
    digest = hashlib.sha256("\0".join(map(str, about)).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


class WorkloadReplay:
    """The workload of some clusters and what it last asked for."""

    def __init__(
        self,
        *,
        seed: int,
        clusters: Sequence[str],
        cpu_machines: int,
        gpu_machines: int,
        groups: Sequence[Sequence[str]] = (),
    ) -> None:
        """Without groups, or with one, every cluster has its own waves; with several, each cluster lies in one."""
        self._seed = seed
        self._clusters = tuple(clusters)
        self._machines = {True: gpu_machines, False: cpu_machines}
        self._groups = len(groups)
        #: The group of each cluster and how many clusters it has; none without groups.
        self._group_of = {
            cluster: (number, len(group)) for number, group in enumerate(groups) for cluster in group if len(groups) > 1
        }
        #: Pods alive by (cluster, archetype name), as of the last `advance`.
        self._alive: dict[tuple[str, str], int] = {}

    def pods(self, cluster: str, archetype: Archetype, second: float) -> int:
        """Return how many pods of an archetype the cluster wants at a second."""
        machines = self._machines[archetype.on_gpus]
        if cluster not in self._group_of:
            peak = peak_pods(archetype, machines=machines, clusters=len(self._clusters))
            return round(level(self._seed, cluster, archetype, second) * peak)
        # The wave is the day itself: a cluster that rested at noon would leave nothing to see.
        group, clusters = self._group_of[cluster]
        peak = peak_pods(archetype, machines=machines, clusters=clusters / daylight(group, self._groups, second))
        return round(_bent(self._seed, cluster, archetype, second, 1.0) * peak)

    def advance(self, second: float) -> dict[str, tuple[list[CapacityRequest], list[str]]]:
        """Move to a second; return (requests that came, ids that went) by cluster, clusters that changed only."""
        changes: dict[str, tuple[list[CapacityRequest], list[str]]] = {}
        for cluster in self._clusters:
            came: list[CapacityRequest] = []
            went: list[str] = []
            for archetype in ARCHETYPES:
                before = self._alive.get((cluster, archetype.name), 0)
                now = self._alive[(cluster, archetype.name)] = self.pods(cluster, archetype, second)
                came += [_request(archetype, number) for number in range(before, now)]
                went += [_pod_name(archetype, number) for number in range(now, before)]
            if came or went:
                changes[cluster] = (came, went)
        return changes


def _request(archetype: Archetype, number: int) -> CapacityRequest:
    return CapacityRequest(
        id=_pod_name(archetype, number),
        resources=archetype.resources,
        requirements=archetype.requirements,
        priority=archetype.priority,
        interruption_bucket=archetype.interruption_bucket,
        reclamation_bucket=archetype.reclamation_bucket,
    )


def _pod_name(archetype: Archetype, number: int) -> str:
    return f"{archetype.name}-{number}"
