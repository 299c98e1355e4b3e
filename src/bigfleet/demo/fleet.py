"""Defines the machines of the demonstration: the default fleet by size, or the nodes of a trace as bare metal.

Both are pools in the format of the simulated provider's world file (docs/spec/provider.md §21).
`bigfleet.demo.workload` sizes its demand by `default_fleet`. A machine's id comes from its pool, so the order of pools
and their counts must depend on nothing but the arguments.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from bigfleet.demo.trace import GPU_MILLI, TraceNode
from bigfleet.demo.workload import GPU
from bigfleet.model import labels

REGION: Final = "sim-1"
ZONES: Final = ("sim-1a", "sim-1b", "sim-1c")
#: Letters of zones.
ZONES_MAX: Final = 26
#: With fewer machines a cluster's rows would not get a whole one each under the workload's peak share.
MACHINES_PER_CLUSTER_MIN: Final = 10
_MIB_PER_GIB: Final = 1024
_MILLI_PER_CORE: Final = 1000
_GPU_MILLI_PER_GPU: Final = 1000

Pool = dict[str, Any]


class DemoFleet(NamedTuple):
    """A fleet's pools and how many machines of each kind they hold."""

    pools: list[Pool]
    cpu_machines: int
    gpu_machines: int


class _Kind(NamedTuple):
    #: In the simulated provider's built-in catalogue, which knows the price and lets that of spot follow a random walk.
    instance_type: str
    allocatable: dict[str, str]
    labels: dict[str, str]


class _Mix(NamedTuple):
    capacity_type: str
    #: Of 120 machines.
    share: int


_GENERAL = _Kind("std.16x64", {"cpu": "15", "memory": "56Gi"}, {})
_GPU = _Kind("gpu-m.48x384", {"cpu": "46", "memory": "345Gi", GPU: "4"}, {})
#: One machine in so many has GPUs.
_GPU_EVERY: Final = 6
#: The mix of the simulated provider's own default fleet of 120.
_MIX: Final = (
    _Mix("bare_metal", 28),
    _Mix("reserved", 20),
    _Mix("on_demand", 48),
    _Mix("spot", 24),
)


def zones_named(count: int) -> tuple[str, ...]:
    """Return the names of so many zones of the region, `ZONES` for three."""
    assert 1 <= count <= ZONES_MAX, "a zone is a letter"
    return tuple(f"{REGION}{chr(ord('a') + number)}" for number in range(count))


def default_fleet(machines: int, zones: Sequence[str] = ZONES) -> DemoFleet:
    """Return a fleet of exactly so many machines in the default mix, spread evenly over the zones."""
    gpu_machines = machines // _GPU_EVERY
    cpu_machines = machines - gpu_machines
    pools: list[Pool] = []
    for kind, total in ((_GENERAL, cpu_machines), (_GPU, gpu_machines)):
        for mix, count in zip(_MIX, _apportion(total, [mix.share for mix in _MIX]), strict=True):
            pools += _spread(_pool(kind, mix), count, zones)
    return DemoFleet(pools, cpu_machines, gpu_machines)


def trace_fleet(nodes: Iterable[TraceNode]) -> DemoFleet:
    """Return the nodes as bare metal that is there from the start and costs nothing; equal shapes share a pool."""
    shapes = Counter((node.gpu_model, node.gpus, node.cpu_milli, node.memory_mib) for node in nodes)
    pools: list[Pool] = []
    gpu_machines = 0
    for (model, gpus, cpu_milli, memory_mib), count in sorted(shapes.items()):
        allocatable = {"cpu": f"{cpu_milli}m", "memory": f"{memory_mib}Mi"}
        node_labels = {labels.ARCH: "amd64"}
        if gpus:
            gpu_machines += count
            allocatable[GPU_MILLI] = str(gpus * _GPU_MILLI_PER_GPU)
            node_labels[labels.GPU_PRODUCT] = model
        pool: Pool = {
            "instance_type": instance_type_of(model=model, gpus=gpus, cpu_milli=cpu_milli, memory_mib=memory_mib),
            "capacity_type": "bare_metal",
            "fixed": True,
            "price_per_hour": 0.0,
            "interruption_probability": 0.0,
            "allocatable": allocatable,
            "resources": allocatable,
            "labels": node_labels,
        }
        pools += _spread(pool, count, ZONES)
    return DemoFleet(pools, sum(shapes.values()) - gpu_machines, gpu_machines)


def instance_type_of(*, model: str, gpus: int, cpu_milli: int, memory_mib: int) -> str:
    """Return a name that differs for different shapes, such as `gpu-g2-8x-96c-384g` or `cpu-32c-256g`."""
    cores, milli = divmod(cpu_milli, _MILLI_PER_CORE)
    cpu = f"{cpu_milli}m" if milli else f"{cores}c"
    gib, mib = divmod(memory_mib, _MIB_PER_GIB)
    memory = f"{memory_mib}mi" if mib else f"{gib}g"
    return f"gpu-{model.lower()}-{gpus}x-{cpu}-{memory}" if gpus else f"cpu-{cpu}-{memory}"


def _pool(kind: _Kind, mix: _Mix) -> Pool:
    return {
        "instance_type": kind.instance_type,
        "capacity_type": mix.capacity_type,
        "allocatable": kind.allocatable,
    }


def _spread(pool: Pool, count: int, zones: Sequence[str]) -> list[Pool]:
    """Return the pool once per zone with an even share of the machines; zones without any are left out."""
    shares = [count // len(zones) + (position < count % len(zones)) for position in range(len(zones))]
    return [{**pool, "zone": zone, "count": share} for zone, share in zip(zones, shares, strict=True) if share]


def _apportion(total: int, weights: Sequence[int]) -> list[int]:
    """Split a total by weights exactly: floors first, then one each to the largest remainders."""
    whole = sum(weights)
    parts = [total * weight // whole for weight in weights]
    remainders = sorted(range(len(weights)), key=lambda i: (-(total * weights[i] % whole), i))
    for position in remainders[: total - sum(parts)]:
        parts[position] += 1
    return parts
