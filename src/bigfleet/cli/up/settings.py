"""What a run of `bigfleet up` is asked to do, checked before anything is touched.

`UpSettings` is what the person said; the parts that must stay the same when a run is resumed are its `Identity`.
Nothing here reads anything but the command line and the trace files that it names.
"""

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from bigfleet.cli.faults import UsageFault
from bigfleet.cli.values import parse_positive_duration_seconds
from bigfleet.sim.fleet import MACHINES_PER_CLUSTER_MIN
from bigfleet.sim.trace import TraceFault, TraceNode, TracePod, read_nodes, read_pods

CLUSTERS_DEFAULT: Final = 3
CLUSTERS_OF_TRACE_DEFAULT: Final = 4
CLUSTERS_MAX: Final = 64
MACHINES_DEFAULT: Final = 120
MACHINES_MAX: Final = 5000
#: A minute of the demonstration passes in a second.
SPEED_DEFAULT: Final = 60.0
SPEED_MAX: Final = 1e9
TRACE_SECONDS_DEFAULT: Final = 120.0


class Trace(NamedTuple):
    """A trace as its files gave it, and the digest of both files."""

    nodes: tuple[TraceNode, ...]
    pods: tuple[TracePod, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class Identity:
    """What a state directory was made for; a run with another one cannot resume it."""

    clusters: int
    machines: int
    seed: int
    #: SHA-256 of the trace's files, "" for the demonstration.
    trace_digest: str


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
    trace: Trace | None

    @property
    def identity(self) -> Identity:
        """What must stay the same over resumed runs."""
        return Identity(self.clusters, self.machines, self.seed, self.trace.digest if self.trace else "")

    @property
    def cluster_ids(self) -> tuple[str, ...]:
        """The clusters' ids, `cluster-0` and so on."""
        return tuple(f"cluster-{number}" for number in range(self.clusters))


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
) -> UpSettings:
    """Return the settings of a command line. Raises UsageFault naming the flag, or the file with line and column."""
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
    trace = _read_trace(nodes, pods) if nodes is not None and pods is not None else None
    cluster_count = _cluster_count(clusters, is_trace=trace is not None)
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
    )


def _cluster_count(clusters: int | None, *, is_trace: bool) -> int:
    if clusters is None:
        return CLUSTERS_OF_TRACE_DEFAULT if is_trace else CLUSTERS_DEFAULT
    if not 1 <= clusters <= CLUSTERS_MAX:
        raise UsageFault(f"--clusters: {clusters} must be from 1 to {CLUSTERS_MAX}")
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


def _read_trace(nodes: Path, pods: Path) -> Trace:
    try:
        trace_nodes, trace_pods = read_nodes(nodes), read_pods(pods)
        digest = hashlib.sha256()
        for path in (nodes, pods):
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    except TraceFault as fault:
        raise UsageFault(str(fault)) from fault
    return Trace(trace_nodes, trace_pods, digest.hexdigest())
