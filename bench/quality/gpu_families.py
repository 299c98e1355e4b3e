"""Builds the families with GPUs, paid machines and gangs: F3 trace on its nodes, F4 trace on EC2, F5 mixed, F6 gangs.

A GPU is `gpu-milli`, an extended resource of the node, as the scheduler sees it: 1000 is one whole GPU.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Final

from bench.quality.catalogue import Data, model_counts
from bench.quality.families import AMD64, OVERHEAD, SERVICES, ZONES, is_gpu, on_demand, service_clusters, stock_of
from bench.quality.values import (
    CPU,
    MEMORY,
    MIB,
    MILLI,
    PODS,
    Offer,
    PackingCluster,
    PackingRequirement,
    PackingRow,
    PackingShape,
)
from bigfleet.demo.trace import GPU_MILLI, PRIORITY_BY_QOS, TracePod
from bigfleet.model import labels as keys

TRACE_PODS: Final = {"small": 250, "medium": 1_500, "large": 5_000}
CLOUD_TRACE_PODS: Final = {"small": 150, "medium": 800, "large": 3_000}
#: The cloud's models that stand in for those of the trace.
CLOUD_MODELS: Final = {
    "P100": "T4",
    "T4": "T4",
    "V100M16": "V100",
    "V100M32": "V100",
    "A10": "A10G",
    "G2": "A10G",
    "G3": "A10G",
}
RACKS: Final = 6
#: Above every service: services that came first would spread over the gangs' machines, which no purchase prevents.
GANG_PRIORITY: Final = 3000
GANGS: Final = {"small": 3, "medium": 8, "large": 8}


def f3(rng: Random, size: str, data: Data) -> tuple[list[Offer], list[PackingCluster]]:
    """Return random pods of the trace on the trace's own nodes, which are there and cost nothing."""
    offers = []
    for (model, gpus, cpu_milli, memory_mib), count in model_counts(data.nodes):
        given = {CPU: cpu_milli, MEMORY: memory_mib * MIB, PODS: 110 * MILLI}
        labels = {keys.ARCH: "amd64"}
        if gpus:
            given[GPU_MILLI] = gpus * MILLI * MILLI
            labels[keys.GPU_PRODUCT] = model
        kind = f"{model or 'cpu'}-{gpus}g-{cpu_milli // 1000}c-{memory_mib // 1024}Gi"
        offers.append(
            Offer(
                id=f"node-{kind}",
                instance_type=kind,
                zone=ZONES[0],
                capacity_type="BareMetal",
                allocatable=given,
                price_usd_per_hour=0.0,
                stock=count,
                labels=labels,
                is_existing=True,
            )
        )
    return offers, [PackingCluster("c0", trace_rows(_sample(rng, data.pods, TRACE_PODS[size]), {}))]


def f4(rng: Random, size: str, data: Data) -> tuple[list[Offer], list[PackingCluster]]:
    """Return random pods of the trace on the catalogue's types, on demand."""
    pods = _sample(rng, data.pods, CLOUD_TRACE_PODS[size])
    offers = on_demand(data.types, stock_of(len(pods)))
    return offers, [PackingCluster("c0", trace_rows(pods, CLOUD_MODELS), (OVERHEAD,))]


def _sample(rng: Random, pods: Sequence[TracePod], number: int) -> list[TracePod]:
    return rng.sample([pod for pod in pods if pod.lives], min(number, sum(pod.lives for pod in pods)))


def trace_rows(pods: Sequence[TracePod], models: dict[str, str]) -> tuple[PackingRow, ...]:
    """Return the rows of trace pods: one per GPU requirement and priority, one shape per distinct request.

    `models` renames GPU models; a model that it does not name keeps its name. A pod with any GPU requires that there
    is a model at all, as `bigfleet.demo.trace` writes it.
    """
    grouped: defaultdict[tuple[tuple[str, ...] | None, int], Counter[tuple[tuple[str, int], ...]]] = defaultdict(
        Counter
    )
    for pod in pods:
        gpu_milli = pod.gpus * pod.gpu_milli
        resources = {CPU: pod.cpu_milli, MEMORY: pod.memory_mib * MIB}
        if gpu_milli:
            resources[GPU_MILLI] = gpu_milli * MILLI
        wanted = tuple(sorted({models.get(model, model) for model in pod.gpu_models}))
        key = (wanted if gpu_milli or wanted else None, PRIORITY_BY_QOS[pod.qos])
        grouped[key][tuple(sorted((name, milli) for name, milli in resources.items() if milli))] += 1
    rows = []
    for (models_wanted, priority), shapes in sorted(grouped.items(), key=lambda one: (one[0][1], one[0][0] or ())):
        requirements = () if models_wanted is None else (_gpu_requirement(models_wanted),)
        name = "cpu" if models_wanted is None else f"gpu-{'-'.join(models_wanted) or 'any'}"
        rows.append(
            PackingRow(
                id=f"{name}-{priority}",
                shapes=tuple(
                    PackingShape(dict(request), count) for request, count in sorted(shapes.items()) if request
                ),
                requirements=requirements,
                priority=priority,
            )
        )
    return tuple(rows)


def _gpu_requirement(models: tuple[str, ...]) -> PackingRequirement:
    return (
        PackingRequirement(keys.GPU_PRODUCT, "In", models) if models else PackingRequirement(keys.GPU_PRODUCT, "Exists")
    )


# ---- machines that are paid for ----------------------------------------------------------------------------------


def f5(rng: Random, size: str, data: Data) -> tuple[list[Offer], list[PackingCluster]]:
    """Return services and GPU rows on a mixed fleet.

    Bare metal has 60 % of the demand's cpu and reserved machines 20 %, the offers hold the rest. One in eight of the
    paid machines has GPUs; three GPU rows of low priority want about half of those GPUs.
    """
    clusters = service_clusters(rng, size)
    offers = on_demand(data.types, stock_of(SERVICES[size][0]))
    cpu_milli = sum(s.resources[CPU] * s.count for c in clusters for row in c.rows for s in row.shapes)
    paid = _paid(rng, offers, cpu_milli * 60 // 100, "BareMetal") + _paid(
        rng, offers, cpu_milli * 20 // 100, "Reserved"
    )
    gpus = sum(offer.allocatable[GPU_MILLI] // MILLI // MILLI * offer.stock for offer in paid if is_gpu(offer))
    changed = []
    for cluster in clusters:
        rows = tuple(_gpu_row(rng, n, max(1, gpus // (6 * len(clusters)))) for n in range(3))
        changed.append(replace(cluster, rows=(*cluster.rows, *rows)))
    return [*paid, *offers], changed


def _paid(rng: Random, offers: Sequence[Offer], cpu_milli: int, capacity_type: str) -> list[Offer]:
    """Return existing machines of 8 to 64 cores with about so much cpu in all, at least four."""
    plain = [o for o in offers if not is_gpu(o) and 7_000 <= o.allocatable[CPU] <= 64_000]
    gpu = [o for o in offers if is_gpu(o) and 7_000 <= o.allocatable[CPU] <= 64_000]
    counts: Counter[str] = Counter()
    left, number = cpu_milli, 0
    by_id = {offer.id: offer for offer in offers}
    while left > 0 or number < 4:
        offer = rng.choice(gpu if gpu and number % 8 == 3 else plain)
        counts[offer.id] += 1
        left -= offer.allocatable[CPU]
        number += 1
    return [
        replace(
            by_id[offer_id],
            id=f"{capacity_type.lower()}-{by_id[offer_id].instance_type}-{by_id[offer_id].zone}",
            capacity_type=capacity_type,
            price_usd_per_hour=0.0 if capacity_type == "BareMetal" else by_id[offer_id].price_usd_per_hour * 0.6,
            stock=count,
            is_existing=True,
        )
        for offer_id, count in sorted(counts.items())
    ]


def _gpu_row(rng: Random, number: int, gpus: int) -> PackingRow:
    cpu = rng.choice((2000, 4000))
    request = {CPU: cpu, MEMORY: 4 * cpu * 1024 // 1000 * MIB, GPU_MILLI: MILLI * MILLI}
    return PackingRow(
        id=f"gpu-{number}",
        shapes=(PackingShape(request, gpus),),
        requirements=(AMD64, PackingRequirement(keys.GPU_PRODUCT, "Exists")),
        priority=100,
        interruption_bucket=5,
        reclamation_bucket=3,
    )


# ---- gangs -------------------------------------------------------------------------------------------------------


def f6(rng: Random, size: str, data: Data) -> tuple[list[Offer], list[PackingCluster]]:
    """Return gangs in racks beside services: machines with four GPUs or more are offered in six racks, ten a rack.

    A gang has 2 to 8 pods of 4 or 8 GPUs and wants one rack; its GPUs fit an empty rack.
    """
    clusters = service_clusters(rng, size)
    plain = on_demand(data.types, stock_of(SERVICES[size][0]))
    offers = [offer for offer in plain if not is_gpu(offer)]
    racked = [o for o in plain if o.allocatable.get(GPU_MILLI, 0) >= 4 * MILLI * MILLI]
    for rack in range(RACKS):
        zone = ZONES[rack % len(ZONES)]
        offers += [
            replace(o, id=f"{o.id}-r{rack}", stock=10, labels={**o.labels, keys.RACK: f"rack-{rack}"})
            for o in racked
            if o.zone == zone
        ]
    changed = []
    for cluster in clusters:
        gangs = tuple(_gang(rng, n) for n in range(GANGS[size]))
        changed.append(replace(cluster, rows=(*cluster.rows, *gangs)))
    return offers, changed


def _gang(rng: Random, number: int) -> PackingRow:
    gpus, pods = rng.choice((4, 8)), rng.randint(2, 8)
    request = {CPU: 10 * gpus * MILLI, MEMORY: 40 * gpus * 1024 * MIB, GPU_MILLI: gpus * MILLI * MILLI}
    return PackingRow(
        id=f"gang-{number}",
        shapes=(PackingShape(request, pods),),
        requirements=(AMD64, PackingRequirement(keys.GPU_PRODUCT, "Exists"), PackingRequirement(keys.RACK, "Same")),
        priority=GANG_PRIORITY,
        interruption_bucket=9,
        reclamation_bucket=6,
        group=f"job-{number}",
    )
