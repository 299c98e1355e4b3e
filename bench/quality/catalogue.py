"""Supplies instance types, prices and GPU pods: from files when a data directory is given, by arithmetic otherwise.

Files: `<data>/ec2-catalog/*.csv` with the columns instance_type, vcpu, memory_gib, gpus, gpu_model,
on_demand_usd_per_hour, architecture; `<data>/gpu-cluster-trace-2023/` with the node list and the pod list that
`bigfleet.demo.trace` reads.

Allocatable follows a kubelet: cpu less 6 % of the first core, 1 % of the second, 0.5 % of the next two and 0.25 % of
the rest; memory less 5 % for hypervisor and kernel, 255 MiB, 11 MiB per pod of the pods limit and 100 MiB of eviction
threshold. The pods limit is 8, 29, 58, 58 for 1, 2, 4 and 8 cores, 110 below 30 cores and 250 above.
"""

import csv
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.quality.values import CPU, MEMORY, MIB, MILLI, PODS
from bigfleet.demo.trace import GPU_MILLI, TraceFault, TraceNode, TracePod, read_nodes, read_pods

CATALOGUE_COLUMNS: Final = (
    "instance_type",
    "vcpu",
    "memory_gib",
    "gpus",
    "gpu_model",
    "on_demand_usd_per_hour",
    "architecture",
)
CATALOGUE_FOLDER: Final = "ec2-catalog"
TRACE_FOLDER: Final = "gpu-cluster-trace-2023"
NODES_FILE: Final = "openb_node_list_all_node.csv"
PODS_FILE: Final = "openb_pod_list_default.csv"


class DataFault(Exception):
    """Data that cannot be used; the message names file, line, value and remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceType:
    """One type that a cloud sells."""

    name: str
    vcpu: int
    memory_gib: int
    gpus: int
    gpu_model: str
    usd_per_hour: float
    architecture: str

    @property
    def pods_max(self) -> int:
        """Pods that the kubelet admits."""
        return {1: 8, 2: 29, 4: 58, 8: 58}.get(self.vcpu, 110 if self.vcpu < 30 else 250)

    def allocatable(self) -> dict[str, int]:
        """Return what pods and DaemonSets share, milli-units, with the pods limit and the shares of GPUs."""
        reserved_milli_cores = 60 + 10 * (self.vcpu > 1) + 5 * min(2, max(0, self.vcpu - 2))
        reserved_milli_cores += (5 * max(0, self.vcpu - 4) + 1) // 2
        memory_mib = self.memory_gib * 1024 * 95 // 100 - 255 - 11 * self.pods_max - 100
        given = {
            CPU: self.vcpu * MILLI - reserved_milli_cores,
            MEMORY: memory_mib * MIB,
            PODS: self.pods_max * MILLI,
        }
        if self.gpus:
            given[GPU_MILLI] = self.gpus * MILLI * MILLI
        return given


@dataclass(frozen=True, slots=True)
class Data:
    """Everything that instances are made of."""

    types: tuple[InstanceType, ...]
    nodes: tuple[TraceNode, ...]
    pods: tuple[TracePod, ...]
    #: Whether it was read from files; two kinds of data give two kinds of instances.
    is_synthetic: bool


def load(folder: Path | None) -> Data:
    """Return the data of a folder, or the synthetic data without one. Raises DataFault."""
    if folder is None:
        return Data(synthetic_types(), synthetic_nodes(), synthetic_pods(), is_synthetic=True)
    catalogues = sorted((folder / CATALOGUE_FOLDER).glob("*.csv"))
    if not catalogues:
        raise DataFault(f"{folder / CATALOGUE_FOLDER}: no CSV file; put the catalogue there, or leave --data out")
    try:
        nodes = read_nodes(folder / TRACE_FOLDER / NODES_FILE)
        pods = read_pods(folder / TRACE_FOLDER / PODS_FILE)
    except TraceFault as error:
        raise DataFault(str(error)) from error
    return Data(read_catalogue(catalogues[0]), nodes, pods, is_synthetic=False)


def read_catalogue(path: Path) -> tuple[InstanceType, ...]:
    """Return the types of a CSV file in its order. Raises DataFault."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = [column for column in CATALOGUE_COLUMNS if column not in (reader.fieldnames or ())]
            if missing:
                raise DataFault(
                    f"{path}:1: column {missing[0]} is missing; the header must have every one of "
                    f"{', '.join(CATALOGUE_COLUMNS)}"
                )
            types = tuple(_type_of(path, reader.line_num, cells) for cells in reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataFault(f"{path}: cannot be read as CSV ({error}); name a UTF-8 file with commas") from error
    if not types:
        raise DataFault(f"{path}: no types after the header; a catalogue needs at least one")
    return types


def _type_of(path: Path, line: int, cells: dict[str, str]) -> InstanceType:
    def number(column: str, least: float) -> float:
        text = cells[column] or ""
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not least <= value < 1e9:
            raise DataFault(f"{path}:{line}: {column}: {text!r} is not a number from {least:g}; correct the cell")
        return value

    return InstanceType(
        name=cells["instance_type"],
        vcpu=int(number("vcpu", 1)),
        memory_gib=int(number("memory_gib", 1)),
        gpus=int(number("gpus", 0)),
        gpu_model=cells["gpu_model"],
        usd_per_hour=number("on_demand_usd_per_hour", 0),
        architecture=cells["architecture"],
    )


# ---- synthetic ---------------------------------------------------------------------------------------------------

_VCPUS: Final = (2, 4, 8, 16, 32, 48, 64, 96)


def synthetic_types() -> tuple[InstanceType, ...]:
    """Return families × sizes: c, m, r with 2, 4, 8 GiB a core in two generations, and three GPU families.

    Prices are linear: $0.034 a core and $0.0044 a GiB in generation 1, a tenth less in generation 2; a GPU costs its
    model's price beside what its cores and memory cost.
    """
    types = []
    for family, gib_per_core in (("c", 2), ("m", 4), ("r", 8)):
        for generation, percent in ((1, 100), (2, 90)):
            for vcpu in _VCPUS:
                usd = (0.034 * vcpu + 0.0044 * gib_per_core * vcpu) * percent / 100
                types.append(_synthetic(f"{family}{generation}.{vcpu}", vcpu, gib_per_core * vcpu, 0, "", usd))
    for model, per_gpu, sizes in (("T4", 0.30, (1, 4, 8)), ("V100", 2.4, (1, 4, 8)), ("A10G", 0.80, (1, 4, 8))):
        for gpus in sizes:
            vcpu = 12 * gpus
            usd = 0.034 * vcpu + 0.0044 * 4 * vcpu + per_gpu * gpus
            types.append(_synthetic(f"g-{model.lower()}.{gpus}", vcpu, 4 * vcpu, gpus, model, usd))
    return tuple(types)


def _synthetic(name: str, vcpu: int, memory_gib: int, gpus: int, model: str, usd: float) -> InstanceType:
    return InstanceType(
        name=name,
        vcpu=vcpu,
        memory_gib=memory_gib,
        gpus=gpus,
        gpu_model=model,
        usd_per_hour=round(usd, 5),
        architecture="amd64",
    )


def synthetic_nodes() -> tuple[TraceNode, ...]:
    """Return 300 nodes: of ten, two without GPUs, four with 8, three with 2 and one with 4."""
    kinds = (
        *((32_000, 262_144, 0, ""), (96_000, 524_288, 0, "")),
        *((96_000, 393_216, 8, "G2"),) * 4,
        *((104_000, 524_288, 2, "T4"),) * 3,
        (32_000, 131_072, 4, "V100M16"),
    )
    return tuple(
        TraceNode(name=f"node-{n:04d}", cpu_milli=cpu, memory_mib=memory, gpus=gpus, gpu_model=model)
        for n in range(300)
        for cpu, memory, gpus, model in (kinds[n % len(kinds)],)
    )


def synthetic_pods() -> tuple[TracePod, ...]:
    """Return 2,000 pods: of twenty, three want no GPU, ten a share of one, five a whole one, one four and one eight."""
    wants = (
        *((4_000, 16_384, 0, 0), (8_000, 16_384, 0, 0), (2_000, 8_192, 0, 0)),
        *((3_152, 3_840, 1, share) for share in (100, 210, 250, 330, 400, 450, 460, 500, 500, 810)),
        *((8_000, 30_720, 1, 1000), (12_000, 16_384, 1, 1000), (6_000, 12_288, 1, 1000)),
        *((11_400, 49_152, 1, 1000), (4_000, 15_258, 1, 1000)),
        *((44_000, 120_000, 4, 1000), (88_000, 327_680, 8, 1000)),
    )
    qos = ("LS", "BE", "LS", "Burstable")
    return tuple(
        TracePod(
            name=f"pod-{n:04d}",
            cpu_milli=cpu,
            memory_mib=memory,
            gpus=gpus,
            gpu_milli=share,
            gpu_models=("T4",) if gpus == 1 and n % 50 == 7 else (),
            qos=qos[n % len(qos)],
            creation_second=60 * n,
            deletion_second=None,
        )
        for n in range(2_000)
        for cpu, memory, gpus, share in (wants[(7 * n) % len(wants)],)
    )


def model_counts(nodes: tuple[TraceNode, ...]) -> list[tuple[tuple[str, int, int, int], int]]:
    """Return how many nodes there are of each (GPU model, GPUs, cpu milli, memory MiB), sorted."""
    return sorted(Counter((n.gpu_model, n.gpus, n.cpu_milli, n.memory_mib) for n in nodes).items())
