"""Reads a cluster trace (nodes and pods as CSV) and replays it: the live requests of each trace second, by cluster.

The columns are those of the public GPU cluster trace (docs/quick-start.md). A pod lives in [creation, deletion). A pod
whose deletion is not after its creation never lives; one without a deletion never ends. Nodes become a fleet in
`bigfleet.demo.fleet`. A row that cannot be read is never skipped: the reader names it and stops.
"""

import csv
import hashlib
import io
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from bigfleet.files.bounded import CONFIGURATION_BYTES_MAX, read_bounded
from bigfleet.model import labels
from bigfleet.model.profile import Operator, Requirement
from bigfleet.operator.requests import CapacityRequest

if TYPE_CHECKING:
    from _csv import Reader

GPU_MILLI: Final = "gpu-milli"
#: Bounds a quantity: far above any machine, far below where exact sums would saturate.
AMOUNT_MAX: Final = 10**12
ROWS_MAX: Final = 1_000_000

#: What a quality-of-service class is worth: latency-sensitive and guaranteed pods before burstable before best effort.
PRIORITY_BY_QOS: Final[Mapping[str, int]] = MappingProxyType(
    {"LS": 1000, "Guaranteed": 1000, "Burstable": 500, "BE": 100}
)
NODE_COLUMNS: Final = ("sn", "cpu_milli", "memory_mib", "gpu", "model")
POD_COLUMNS: Final = (
    "name",
    "cpu_milli",
    "memory_mib",
    "num_gpu",
    "gpu_milli",
    "gpu_spec",
    "qos",
    "creation_time",
    "deletion_time",
)


class TraceFault(ValueError):
    """A trace file that cannot be used; the message names file, line, column, value and remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceNode:
    """One physical node."""

    name: str
    cpu_milli: int
    memory_mib: int
    gpus: int
    #: "" for a node without GPUs.
    gpu_model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TracePod:
    """One pod and when it lived, in trace seconds."""

    name: str
    cpu_milli: int
    memory_mib: int
    gpus: int
    #: Share of one GPU, in thousandths; the pod wants `gpus` times as much.
    gpu_milli: int
    #: Models that will do; empty is any.
    gpu_models: tuple[str, ...]
    qos: str
    creation_second: int
    #: None: it outlives the trace.
    deletion_second: int | None

    @property
    def lives(self) -> bool:
        """Return whether there is any second at which the pod lives."""
        return self.deletion_second is None or self.deletion_second > self.creation_second


def read_nodes(path: Path) -> tuple[TraceNode, ...]:
    """Return the nodes of a CSV file in its order. Raises TraceFault."""
    nodes = []
    names: dict[str, int] = {}
    for row in _rows(path, NODE_COLUMNS):
        node = TraceNode(
            name=row.unique("sn", names),
            cpu_milli=row.integer("cpu_milli", least=1),
            memory_mib=row.integer("memory_mib", least=1),
            gpus=row.integer("gpu"),
            gpu_model=row.text("model"),
        )
        if node.gpus and not node.gpu_model:
            raise row.fault("model", f"the node has {node.gpus} GPUs and no model; write the model's name")
        nodes.append(node)
    if not nodes:
        raise TraceFault(f"{path}: no nodes after the header; a fleet needs at least one")
    return tuple(nodes)


def read_pods(path: Path) -> tuple[TracePod, ...]:
    """Return the pods of a CSV file in its order. Raises TraceFault."""
    pods = []
    names: dict[str, int] = {}
    for row in _rows(path, POD_COLUMNS):
        pods.append(
            TracePod(
                name=row.unique("name", names),
                cpu_milli=row.integer("cpu_milli"),
                memory_mib=row.integer("memory_mib"),
                gpus=row.integer("num_gpu"),
                gpu_milli=row.integer("gpu_milli"),
                gpu_models=row.models("gpu_spec"),
                qos=row.choice("qos", PRIORITY_BY_QOS),
                creation_second=row.integer("creation_time"),
                deletion_second=row.integer("deletion_time") if row.text("deletion_time") else None,
            )
        )
    if not any(pod.lives for pod in pods):
        raise TraceFault(f"{path}: no pod that lives for at least a second; there is nothing to replay")
    return tuple(pods)


def cluster_of(pod_name: str, clusters: Sequence[str]) -> str:
    """Return the cluster of a pod: the first 8 bytes of SHA-256 of its name, big-endian, modulo the number of clusters.

    So a pod has the same cluster in every process and run, whatever else the trace holds.
    """
    digest = hashlib.sha256(pod_name.encode()).digest()
    return clusters[int.from_bytes(digest[:8], "big") % len(clusters)]


def capacity_request(pod: TracePod) -> CapacityRequest:
    """Return what the pod asks for.

    A GPU pod that takes any model still requires that there is one (Exists): a machine without GPUs is none of its
    business, and its row stays apart from that of the CPU pods. Within a row min units merge by maximum, so one row
    for both would ask every machine for the largest CPU pod's memory and a GPU at once.
    """
    gpu_milli = pod.gpus * pod.gpu_milli
    resources = {"cpu": f"{pod.cpu_milli}m", "memory": f"{pod.memory_mib}Mi"}
    requirements: tuple[Requirement, ...] = ()
    if gpu_milli:
        resources[GPU_MILLI] = str(gpu_milli)
        if not pod.gpu_models:
            requirements = (Requirement(labels.GPU_PRODUCT, Operator.EXISTS),)
    if pod.gpu_models:
        requirements = (Requirement(labels.GPU_PRODUCT, Operator.IN, pod.gpu_models),)
    return CapacityRequest(
        id=pod.name, resources=resources, requirements=requirements, priority=PRIORITY_BY_QOS[pod.qos]
    )


class TraceReplay:
    """A trace and the second that it stands at; the demand of a second depends on that second alone."""

    def __init__(self, pods: Sequence[TracePod], clusters: Sequence[str]) -> None:
        living = [pod for pod in pods if pod.lives]
        self.start_second = min(pod.creation_second for pod in living)
        self.end_second = max(pod.deletion_second or pod.creation_second for pod in living)
        self._requests = {pod.name: capacity_request(pod) for pod in living}
        self._cluster_of = {pod.name: cluster_of(pod.name, clusters) for pod in living}
        #: (second, name, whether the pod comes), in the order in which they happen.
        events = [(pod.creation_second, pod.name, True) for pod in living]
        events += [(pod.deletion_second, pod.name, False) for pod in living if pod.deletion_second is not None]
        self._events = sorted(events)
        self._next_event = 0

    def advance(self, second: int) -> dict[str, tuple[list[CapacityRequest], list[str]]]:
        """Move to a later second; return (requests that came, ids that went) by cluster, clusters that changed only.

        A pod that came and went in between is in neither list.
        """
        came: dict[str, set[str]] = defaultdict(set)
        went: dict[str, set[str]] = defaultdict(set)
        while self._next_event < len(self._events) and self._events[self._next_event][0] <= second:
            _second, name, comes = self._events[self._next_event]
            self._next_event += 1
            cluster = self._cluster_of[name]
            if comes:
                came[cluster].add(name)
            elif name in came[cluster]:
                came[cluster].discard(name)
            else:
                went[cluster].add(name)
        return {
            cluster: ([self._requests[name] for name in sorted(came[cluster])], sorted(went[cluster]))
            for cluster in sorted(came.keys() | went.keys())
            if came[cluster] or went[cluster]
        }


class _Row:
    """One row of a file, with what its errors need."""

    def __init__(self, path: Path, line: int, cells: Mapping[str, str]) -> None:
        self._path = path
        self._line = line
        self._cells = cells

    def text(self, column: str) -> str:
        return self._cells[column].strip()

    def fault(self, column: str, what: str) -> TraceFault:
        return TraceFault(f"{self._path} line {self._line}, column {column}: {what}")

    def integer(self, column: str, *, least: int = 0) -> int:
        text = self.text(column)
        if not (text.isascii() and text.isdigit()):
            raise self.fault(column, f"{text!r} is no whole number; write {least} or more, digits only")
        # The length first: a number of a million digits takes for ever to parse.
        if len(text) > len(str(AMOUNT_MAX)) or not least <= int(text) <= AMOUNT_MAX:
            raise self.fault(column, f"{text[:20]} is out of range; write a number from {least} to {AMOUNT_MAX}")
        return int(text)

    def unique(self, column: str, seen: dict[str, int]) -> str:
        text = self.text(column)
        if not text:
            raise self.fault(column, "is empty; every row needs a name of its own")
        if text in seen:
            raise self.fault(column, f"{text!r} is on line {seen[text]} already; names must differ")
        seen[text] = self._line
        return text

    def choice(self, column: str, allowed: Mapping[str, int]) -> str:
        text = self.text(column)
        if text not in allowed:
            raise self.fault(column, f"{text!r} is unknown; write one of {', '.join(allowed)}")
        return text

    def models(self, column: str) -> tuple[str, ...]:
        text = self.text(column)
        if not text:
            return ()
        models = tuple(part.strip() for part in text.split("|"))
        if not all(models):
            raise self.fault(column, f"{text!r} has an empty model; write models joined by |, such as V100|T4")
        return models


def _rows(path: Path, columns: Sequence[str]) -> Iterator[_Row]:
    """Yield the rows of a CSV file that has at least the columns. Raises TraceFault, also for what is no CSV at all."""
    reader = csv.reader(io.StringIO(_text(path), newline=""), strict=True)
    header = _guarded(path, reader, lambda: next(reader, None))
    if header is None:
        raise TraceFault(f"{path}: the file is empty; a header with {', '.join(columns)} is expected")
    names = [name.strip() for name in header]
    for column in columns:
        if column not in names:
            raise TraceFault(f"{path} line 1: column {column} is missing; the header has {', '.join(names)}")
    for number in range(ROWS_MAX + 1):
        cells = _guarded(path, reader, lambda: next(reader, None))
        if cells is None:
            return
        if not cells:
            continue
        line = reader.line_num
        if number == ROWS_MAX:
            raise TraceFault(f"{path} line {line}: more than {ROWS_MAX} rows; split the trace")
        if len(cells) != len(names):
            raise TraceFault(
                f"{path} line {line}: {len(cells)} cells where the header has {len(names)} columns; "
                "add or remove commas"
            )
        yield _Row(path, line, dict(zip(names, cells, strict=True)))


def _text(path: Path) -> str:
    """Return the text of a file. Raises TraceFault."""
    try:
        content = read_bounded(path, CONFIGURATION_BYTES_MAX)
        return content.decode("utf-8-sig")
    except OSError as error:
        raise TraceFault(f"{path}: {error.strerror}; name a CSV file that can be read") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise TraceFault(f"{path} line {line}: not UTF-8 text ({error.reason})") from error


def _guarded(path: Path, reader: "Reader", read: Callable[[], list[str] | None]) -> list[str] | None:
    try:
        return read()
    except csv.Error as error:
        raise TraceFault(f"{path} line {reader.line_num}: not CSV ({error})") from error
