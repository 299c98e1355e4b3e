"""Checks the flags of `bigfleet up` before anything is changed.

`UpSettings` has the checked flags; those that must stay the same when a run is resumed are its `RunIdentity`. Nothing
here reads anything but the command line, the trace files that it names, and the PATH.
"""

import hashlib
import math
import shutil
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final, NamedTuple

from bigfleet.cli.flags.values import parse_positive_duration_seconds
from bigfleet.cli.runtime.failures import RunFault, UsageFault
from bigfleet.demo.fleet import MACHINES_PER_CLUSTER_MIN
from bigfleet.demo.trace import TraceFault, TraceNode, TracePod, read_nodes, read_pods
from bigfleet.files.bounded import CONFIGURATION_BYTES_MAX, read_bounded

CLUSTERS_DEFAULT: Final = 3
CLUSTERS_OF_TRACE_DEFAULT: Final = 4
CLUSTERS_MAX: Final = 64
MACHINES_DEFAULT: Final = 120
MACHINES_MAX: Final = 5000
#: A minute of the demonstration passes in a second.
SPEED_DEFAULT: Final = 60.0
SPEED_MAX: Final = 1e9
TRACE_SECONDS_DEFAULT: Final = 120.0
#: Each shard is a process of its own with an engine.
SHARDS_MAX: Final = 8
ETCD: Final = "etcd"


class StoreChoice(Enum):
    """What the coordinator of a run keeps its tables in; NONE goes without a coordinator."""

    NONE = ""
    SQLITE = "sqlite"
    ETCD = "etcd"


class PodTrace(NamedTuple):
    """A trace as its files gave it, and the digest of both files."""

    nodes: tuple[TraceNode, ...]
    pods: tuple[TracePod, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """What a state directory was made for; a run with another one cannot resume it."""

    clusters: int
    machines: int
    seed: int
    #: SHA-256 of the trace's files, "" for the demonstration.
    trace_digest: str
    shards: int = 1
    #: The value of a `StoreChoice`.
    store: str = StoreChoice.NONE.value
    #: Real control planes; 0 where clusters are simulated.
    kubernetes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpSettings:
    """One run."""

    #: None runs until it is stopped.
    for_seconds: float | None
    #: Virtual or trace seconds per second; None lets a trace fit `for_seconds`.
    speed: float | None
    clusters: int
    machines: int
    seed: int
    state_dir: Path
    fresh: bool
    report: Path | None
    #: None is the demonstration.
    trace: PodTrace | None
    shards: int = 1
    #: NONE with one shard, and only then.
    store: StoreChoice = StoreChoice.NONE
    #: The program of StoreChoice.ETCD, empty otherwise.
    etcd_program: str = ""

    @property
    def identity(self) -> RunIdentity:
        """What must stay the same over resumed runs."""
        digest = self.trace.digest if self.trace else ""
        return RunIdentity(self.clusters, self.machines, self.seed, digest, self.shards, self.store.value)

    @property
    def cluster_ids(self) -> tuple[str, ...]:
        """The clusters' ids, `cluster-0` and so on."""
        return tuple(f"cluster-{number}" for number in range(self.clusters))

    @property
    def shard_ids(self) -> tuple[str, ...]:
        """The shards' ids, `shard-0` and so on."""
        return tuple(f"shard-{number}" for number in range(self.shards))

    @property
    def clusters_of(self) -> dict[str, tuple[str, ...]]:
        """The clusters that report to each shard: they are dealt out in turn."""
        return {shard: self.cluster_ids[number :: self.shards] for number, shard in enumerate(self.shard_ids)}


def settings_from_flags(
    *,
    for_duration: str | None,
    speed: float | None,
    clusters: int | None,
    machines: int | None,
    seed: int,
    state_dir: Path,
    fresh: bool,
    report: Path | None,
    nodes: Path | None,
    pods: Path | None,
    shards: int = 1,
    store: str | None = None,
) -> UpSettings:
    """Return the settings of a command line. Raises UsageFault naming the flag, or the file with line and column.

    Raises RunFault when the store that was asked for is not installed.
    """
    for_seconds = parse_positive_duration_seconds(for_duration, "--for") if for_duration is not None else None
    if speed is not None and not (math.isfinite(speed) and 0 < speed <= SPEED_MAX):
        raise UsageFault(f"--speed: {speed:g} must be above 0 and at most {SPEED_MAX:g}")
    if seed < 0 or seed >= 2**63:
        raise UsageFault(f"--seed: {seed} must be from 0 to 2^63 - 1")
    if (nodes is None) != (pods is None):
        given, missing = ("--nodes", "--pods") if nodes is not None else ("--pods", "--nodes")
        raise UsageFault(f"{missing} is missing: a trace is two files, and {given} is one of them")
    if nodes is not None and machines is not None:
        raise UsageFault("--machines: the fleet of a trace is what --nodes lists; leave --machines out")
    _check_report(report)
    chosen = _store(store, shards)
    if shards > 1 and nodes is not None:
        raise UsageFault("--shards: one shard replays a trace; leave --shards out")
    trace = _read_trace(nodes, pods) if nodes is not None and pods is not None else None
    cluster_count = _cluster_count(clusters, shards, is_trace=trace is not None)
    if trace is not None:
        machine_count = len(trace.nodes)
        for_seconds = for_seconds or (TRACE_SECONDS_DEFAULT if speed is None else None)
    else:
        machine_count = _machine_count(machines, cluster_count)
        speed = speed or SPEED_DEFAULT
    return UpSettings(
        for_seconds=for_seconds,
        speed=speed,
        clusters=cluster_count,
        machines=machine_count,
        seed=seed,
        state_dir=state_dir,
        fresh=fresh,
        report=report,
        trace=trace,
        shards=shards,
        store=chosen,
        etcd_program=_etcd_program() if chosen is StoreChoice.ETCD else "",
    )


def _store(name: str | None, shards: int) -> StoreChoice:
    if not 1 <= shards <= SHARDS_MAX:
        raise UsageFault(f"--shards: {shards} must be from 1 to {SHARDS_MAX}")
    if name is None:
        return StoreChoice.NONE if shards == 1 else StoreChoice.SQLITE
    names = [store.value for store in StoreChoice if store is not StoreChoice.NONE]
    if name not in names:
        raise UsageFault(f"--store: {name!r} is unknown; choose one of {', '.join(names)}")
    if shards == 1:
        raise UsageFault("--store: one shard has no coordinator whose store it could be; add --shards 2 or more")
    return StoreChoice(name)


def _etcd_program() -> str:
    found = shutil.which(ETCD)
    if found is None:
        raise RunFault(
            f"--store etcd: no {ETCD} is on the PATH; install etcd 3.4 or newer (Debian, Ubuntu: apt-get install "
            "etcd-server; macOS: brew install etcd), or use --store sqlite, which needs nothing"
        )
    return found


def _cluster_count(clusters: int | None, shards: int, *, is_trace: bool) -> int:
    if clusters is None:
        return CLUSTERS_OF_TRACE_DEFAULT if is_trace else max(CLUSTERS_DEFAULT, shards)
    if not shards <= clusters <= CLUSTERS_MAX:
        more = f" for {shards} shards" if shards > 1 else ""
        raise UsageFault(f"--clusters: {clusters} must be from {shards}{more} to {CLUSTERS_MAX}")
    return clusters


def _machine_count(machines: int | None, clusters: int) -> int:
    least = clusters * MACHINES_PER_CLUSTER_MIN
    if machines is None:
        return max(MACHINES_DEFAULT, least)
    if not least <= machines <= MACHINES_MAX:
        raise UsageFault(f"--machines: {machines} must be from {least} for {clusters} clusters to {MACHINES_MAX}")
    return machines


def _check_report(report: Path | None) -> None:
    if report is None:
        return
    if report.is_dir():
        raise UsageFault(f"--report: {report} is a directory; name a file")
    if not report.absolute().parent.is_dir():
        raise UsageFault(f"--report: the directory of {report} does not exist; make it first")


def _read_trace(nodes: Path, pods: Path) -> PodTrace:
    try:
        trace_nodes, trace_pods = read_nodes(nodes), read_pods(pods)
        digest = hashlib.sha256()
        for path in (nodes, pods):
            digest.update(hashlib.sha256(read_bounded(path, CONFIGURATION_BYTES_MAX)).digest())
    except TraceFault as fault:
        raise UsageFault(str(fault)) from fault
    except OSError as error:
        raise UsageFault(f"{error.filename}: {error.strerror}; name a CSV file that can be read") from error
    return PodTrace(trace_nodes, trace_pods, digest.hexdigest())
