"""Builds the families of services: F1 on-demand, F2 spot, F7 many small clusters, F8 adversarial.

A service is a Deployment: one row with one shape, unless the family says otherwise. Its cpu comes from {100m … 4}, its
memory from 1 to 8 GiB a core, its pods from a Pareto distribution that is scaled to the size; five priorities, five
penalty buckets, 15 % pinned to a zone. Every node carries DaemonSets of 120m and 250 MiB in three pods.
"""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Final

from bench.quality.catalogue import Data, InstanceType
from bench.quality.values import (
    CPU,
    MEMORY,
    MIB,
    MILLI,
    PINNED_BUCKET,
    PODS,
    Offer,
    PackingCluster,
    PackingOverhead,
    PackingRequirement,
    PackingRow,
    PackingShape,
    PackingSpread,
)
from bigfleet.demo.trace import GPU_MILLI
from bigfleet.model import labels as keys

ZONES: Final = ("z1", "z2", "z3")
PRIORITIES: Final = (0, 100, 500, 1000, 2000)
#: $0, $4, $64, $1,024 and pinned.
PENALTY_BUCKETS: Final = (1, 5, 9, 13, PINNED_BUCKET)
CPU_MILLI: Final = (100, 250, 500, 1000, 2000, 4000)
DEPLOYMENTS: Final = 40
#: Per hour: about 5, 15 and 30 % a month.
INTERRUPTION_LEVELS: Final = (0.00007, 0.00022, 0.0005)
SPOT_PERCENT: Final = 35
#: Pods of a cluster and clusters, by size.
SERVICES: Final = {"small": (200, 1), "medium": (1_000, 1), "large": (1_500, 3)}
SMALL_CLUSTERS: Final = {"small": 12, "medium": 60, "large": 200}

IMPOSSIBLE_CPU_MILLI: Final = 1000 * MILLI

AMD64: Final = PackingRequirement(keys.ARCH, "In", ("amd64",))
OVERHEAD: Final = PackingOverhead({CPU: 120, MEMORY: 250 * MIB, PODS: 3 * MILLI})


def stock_of(pods: int) -> int:
    """Return how many machines of a class and zone are on offer: more than any sensible answer takes."""
    return 40 + pods // 5


def on_demand(types: Sequence[InstanceType], stock: int, zones: Sequence[str] = ZONES) -> list[Offer]:
    """Return the amd64 types in every zone, on demand."""
    return [
        Offer(
            id=f"od-{kind.name}-{zone}",
            instance_type=kind.name,
            zone=zone,
            capacity_type="OnDemand",
            allocatable=kind.allocatable(),
            price_usd_per_hour=kind.usd_per_hour,
            stock=stock,
            labels=node_labels(kind),
        )
        for zone in zones
        for kind in types
        if kind.architecture == "amd64"
    ]


def spot(offers: Sequence[Offer]) -> list[Offer]:
    """Return the offers as spot at 0.35 of the price; the interruption level rotates over types and zones."""
    return [
        replace(
            offer,
            id=offer.id.replace("od-", "spot-", 1),
            capacity_type="Spot",
            price_usd_per_hour=round(offer.price_usd_per_hour * SPOT_PERCENT / 100, 6),
            interruption_probability=INTERRUPTION_LEVELS[(number * 7 // 5) % len(INTERRUPTION_LEVELS)],
        )
        for number, offer in enumerate(offers)
    ]


def node_labels(kind: InstanceType) -> dict[str, str]:
    """Return the labels of a type's nodes beside type, zone and capacity type."""
    labels = {keys.ARCH: kind.architecture}
    if kind.gpus:
        labels[keys.GPU_PRODUCT] = kind.gpu_model
    return labels


def pareto_counts(rng: Random, number: int, total: int) -> list[int]:
    """Return so many positive counts with a Pareto tail (alpha 1.2) that sum to about `total`."""
    weights = [min(rng.paretovariate(1.2), 30.0) for _ in range(number)]
    scale = total / sum(weights)
    return [max(1, round(weight * scale)) for weight in weights]


def request(rng: Random, cpu_milli: int | None = None) -> dict[str, int]:
    """Return one pod's cpu and memory."""
    cpu = cpu_milli if cpu_milli is not None else rng.choice(CPU_MILLI)
    gib_per_core = rng.uniform(1.0, 8.0)
    # In steps of 64 MiB, as people write requests.
    memory_mib = max(1, round(cpu * gib_per_core * 1024 / 1000 / 64)) * 64
    return {CPU: cpu, MEMORY: memory_mib * MIB}


def services(rng: Random, pods: int, number: int = DEPLOYMENTS, prefix: str = "app") -> list[PackingRow]:
    """Return the Deployments of one cluster."""
    rows = []
    for index, count in enumerate(pareto_counts(rng, number, pods)):
        pinned = (PackingRequirement(keys.ZONE, "In", (rng.choice(ZONES),)),) if rng.random() < 0.15 else ()
        rows.append(
            PackingRow(
                id=f"{prefix}-{index:03d}",
                shapes=(PackingShape(request(rng), count),),
                requirements=(AMD64, *pinned),
                priority=rng.choice(PRIORITIES),
                interruption_bucket=rng.choice(PENALTY_BUCKETS),
                reclamation_bucket=rng.choice((1, 3, 6)),
            )
        )
    return rows


def service_clusters(rng: Random, size: str) -> list[PackingCluster]:
    """Return the clusters of F1 at a size."""
    pods, clusters = SERVICES[size]
    return [PackingCluster(f"c{number}", tuple(services(rng, pods)), (OVERHEAD,)) for number in range(clusters)]


def f1(rng: Random, size: str, data: Data) -> tuple[list[Offer], list[PackingCluster]]:
    """Return services on demand."""
    return on_demand(data.types, stock_of(SERVICES[size][0])), service_clusters(rng, size)


def f2(rng: Random, size: str, data: Data) -> tuple[list[Offer], list[PackingCluster]]:
    """Return services on demand and on spot."""
    offers = on_demand(data.types, stock_of(SERVICES[size][0]))
    return [*offers, *spot(offers)], service_clusters(rng, size)


def f7(rng: Random, size: str, data: Data) -> tuple[list[Offer], list[PackingCluster]]:
    """Return many clusters of 5 to 30 pods in 2 to 6 Deployments."""
    clusters = [
        PackingCluster(f"c{n:03d}", tuple(services(rng, rng.randint(5, 30), rng.randint(2, 6))), (OVERHEAD,))
        for n in range(SMALL_CLUSTERS[size])
    ]
    return on_demand(data.types, stock_of(sum(cluster.pods for cluster in clusters))), clusters


# ---- adversarial -------------------------------------------------------------------------------------------------


def _with_rows(clusters: Sequence[PackingCluster], change: "dict[str, list[PackingRow]]") -> list[PackingCluster]:
    return [replace(cluster, rows=tuple(change.get(cluster.id, cluster.rows))) for cluster in clusters]


def f8a(rng: Random, size: str, data: Data) -> tuple[list[Offer], list[PackingCluster]]:
    """Return rows of two opposite shapes: 60 cpu and 400 GiB in one row."""
    offers, clusters = f1(rng, size, data)
    changed = {}
    for cluster in clusters:
        rows = list(cluster.rows)
        for index in range(4):
            count = max(1, rows[index].pods // 20)
            shapes = (
                PackingShape({CPU: 60 * MILLI, MEMORY: 4 * 1024 * MIB}, count),
                PackingShape({CPU: 1 * MILLI, MEMORY: 400 * 1024 * MIB}, count),
            )
            rows[index] = replace(rows[index], shapes=shapes)
        changed[cluster.id] = rows
    return offers, _with_rows(clusters, changed)


def f8b(rng: Random, size: str, data: Data) -> tuple[list[Offer], list[PackingCluster]]:
    """Return services where one impossible pod joins the largest row of each cluster."""
    offers, clusters = f1(rng, size, data)
    return offers, [with_impossible_pod(cluster) for cluster in clusters]


def with_impossible_pod(cluster: PackingCluster) -> PackingCluster:
    """Return the cluster with one pod of 1,000 cpu in its largest row: a typo for 1000m."""
    if not cluster.rows:
        return cluster
    largest = max(range(len(cluster.rows)), key=lambda index: (cluster.rows[index].pods, -index))
    rows = list(cluster.rows)
    typo = PackingShape({CPU: IMPOSSIBLE_CPU_MILLI, MEMORY: 1024 * MIB}, 1)
    rows[largest] = replace(rows[largest], shapes=(*rows[largest].shapes, typo))
    return replace(cluster, rows=tuple(rows))


def f8c(rng: Random, size: str, data: Data) -> tuple[list[Offer], list[PackingCluster]]:
    """Return services of which nearly all want one dimension: 16 GiB a core, above every ratio on offer."""
    offers, clusters = f1(rng, size, data)
    changed = {}
    for cluster in clusters:
        rows = []
        for row in cluster.rows:
            cpu = rng.choice((100, 250, 500, 1000))
            rows.append(
                replace(row, shapes=(PackingShape({CPU: cpu, MEMORY: cpu * 16 * 1024 // 1000 * MIB}, row.pods),))
            )
        changed[cluster.id] = rows
    return offers, _with_rows(clusters, changed)


def f8d(rng: Random, size: str, data: Data) -> tuple[list[Offer], list[PackingCluster]]:
    """Return a few rows of 64 shapes each."""
    pods, number = SERVICES[size]
    clusters = []
    for index in range(number):
        rows = []
        for row in services(rng, pods, max(2, pods // 250)):
            counts = pareto_counts(rng, 64, row.pods) if row.pods > 64 else [1] * row.pods
            rows.append(replace(row, shapes=tuple(PackingShape(request(rng), count) for count in counts)))
        clusters.append(PackingCluster(f"c{index}", tuple(rows), (OVERHEAD,)))
    return on_demand(data.types, stock_of(pods)), clusters


def f8e(rng: Random, size: str, data: Data) -> tuple[list[Offer], list[PackingCluster]]:
    """Return small pods on machines that admit at most 29 pods each."""
    offers, clusters = f1(rng, size, data)
    limited = [
        replace(offer, allocatable={**offer.allocatable, PODS: min(29 * MILLI, offer.allocatable[PODS])})
        for offer in offers
    ]
    changed = {
        cluster.id: [
            replace(row, shapes=tuple(PackingShape(request(rng, rng.choice((100, 250))), s.count) for s in row.shapes))
            for row in cluster.rows
        ]
        for cluster in clusters
    }
    return limited, _with_rows(clusters, changed)


def f8f(rng: Random, size: str, data: Data) -> tuple[list[Offer], list[PackingCluster]]:
    """Return services of which every second one allows one pod per machine."""
    offers, clusters = f1(rng, size, data)
    changed = {
        cluster.id: [
            replace(row, shapes=tuple(replace(shape, max_per_machine=1) for shape in row.shapes)) if n % 2 else row
            for n, row in enumerate(cluster.rows)
        ]
        for cluster in clusters
    }
    return offers, _with_rows(clusters, changed)


def f8g(rng: Random, size: str, data: Data) -> tuple[list[Offer], list[PackingCluster]]:
    """Return services of which every second one that is not pinned spreads strictly over zones, with a skew of 1."""
    offers, clusters = f1(rng, size, data)
    over_zones = (PackingSpread(keys.ZONE, 1, True),)
    changed = {
        cluster.id: [
            replace(row, spreads=over_zones) if n % 2 and row.requirements == (AMD64,) else row
            for n, row in enumerate(cluster.rows)
        ]
        for cluster in clusters
    }
    return offers, _with_rows(clusters, changed)


def is_gpu(offer: Offer) -> bool:
    """Return whether machines of the class have GPUs."""
    return offer.allocatable.get(GPU_MILLI, 0) > 0
