"""Measures W18, how fast a shard recovers, in whole processes: its first List, and its first decision after kill -9.

docs/spec/benchmarks.md. The provider is a process over the provider library, with W8's fleet in its state file; the
shard is the real command, with its kernels on disk. Each figure is the median of several starts; processor time is that
of the shard's process, user and system. A start that did not see every machine and row has no figure.
"""

import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.request import urlopen

import grpc

from bench.harness import Measured, Measurement, Reading
from bench.workloads.provider import process as provider_process
from bench.workloads.streams import Child, checksum, cpu_seconds, end, free_port
from bigfleet.operator.session import HEALTHY_SECONDS

STARTS = 3
START_SECONDS_MAX = 600.0
#: A start with so few machines is what the first List of a large fleet is compared with.
FEW_MACHINES = 100
#: From the first List until memory is read: what was freed has been given back by then.
SETTLE_SECONDS = 15.0
#: A look at the metrics takes some milliseconds of the shard's time.
_POLL_SECONDS = 0.25
#: So long have sessions stood when the shard is killed: operators dial a shard that dies again sooner less often.
STOOD_SECONDS = HEALTHY_SECONDS + 5.0
#: No second List falls into a measurement.
_FLAGS = ("--cycle-interval", "10m")


@dataclass(frozen=True, slots=True)
class _Start:
    """What one start of a shard took, until it was ready and its kernels were loaded."""

    wall_seconds: float
    cpu_seconds: float
    #: Some seconds later.
    resident_mib: float
    peak_mib: float


class _Shard:
    """A real shard process."""

    def __init__(self, folder: Path, provider_port: int, port: int) -> None:
        self._metrics_port = free_port()
        self._log = folder / "shard.log"
        arguments = [
            *("--provider-addr", f"127.0.0.1:{provider_port}"),
            *("--listen", f"127.0.0.1:{port}"),
            *("--metrics-addr", f"127.0.0.1:{self._metrics_port}"),
            *("--data-dir", str(folder / "shard")),
            *("--log-level", "error"),
            *_FLAGS,
        ]
        # As an installed shard does, it starts from compiled modules.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        self.began_seconds = time.monotonic()
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "bigfleet.cli.main", "shard", *arguments],
                stdout=log,
                stderr=log,
                env=environment,
            )

    def metric(self, name: str) -> float:
        """Return the sum of a metric's series, -1 while there is none."""
        return _sum(self._page(), name)

    def is_filled(self, machines: int) -> bool:
        """Return whether the kernels are there and so many machines are known."""
        page = self._page()
        return _sum(page, "kernels_compiled_ratio") == 1 and _sum(page, "inventory_machines") == machines

    def _page(self) -> str:
        try:
            with urlopen(f"http://127.0.0.1:{self._metrics_port}/metrics", timeout=30.0) as answer:
                page: str = answer.read().decode()
                return page
        except OSError:
            return ""

    def wait(self, holds: Callable[[], bool], *, poll_seconds: float = _POLL_SECONDS) -> float:
        """Return the seconds since the start of the process at which something holds."""
        while not holds():
            assert self.process.poll() is None, f"the shard ended:\n{self._log.read_text(encoding='utf-8')}"
            seconds = time.monotonic() - self.began_seconds
            assert seconds < START_SECONDS_MAX, f"the shard does not come up:\n{self._log.read_text(encoding='utf-8')}"
            time.sleep(poll_seconds)
        return time.monotonic() - self.began_seconds

    def memory_mib(self, field: str) -> float:
        """Return a field of the process's memory."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        return int(re.findall(rf"^{field}:\s+(\d+) kB$", status, re.MULTILINE)[0]) / 1024

    @property
    def cpu_seconds(self) -> float:
        """User and system time."""
        return cpu_seconds(self.process.pid)

    def kill(self) -> None:
        """End the process as a power cut would."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def _sum(page: str, name: str) -> float:
    values = re.findall(rf"^bigfleet_shard_{name}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE)
    return sum(map(float, values)) if values else -1.0


@contextmanager
def _shard(folder: Path, provider_port: int, port: int) -> Iterator[_Shard]:
    """Run a shard while the context lasts."""
    shard = _Shard(folder, provider_port, port)
    try:
        yield shard
    finally:
        end(shard.process)


@contextmanager
def _child(*arguments: str, log: Path) -> Iterator[Child]:
    """Run a process of `bench.processes.recovery` while the context lasts."""
    started = Child(*arguments, log=log, module="bench.processes.recovery")
    try:
        yield started
    finally:
        started.close()


@contextmanager
def _provider(folder: Path, machines: int) -> Iterator[tuple[int, int]]:
    """Serve a fleet while the context lasts; yield the port and how many machines there are."""
    state, port, log = folder / f"state-{machines}.db", free_port(), folder / "log"
    with _child("fleet", str(state), str(machines), log=log) as writer:
        size = writer.heard()["machines"]
    with provider_process("serve", str(state), str(port), "normal"):
        # A shard whose first List finds no provider asks again after its interval, which is long here.
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            grpc.channel_ready_future(channel).result(timeout=START_SECONDS_MAX)
        yield port, size


# ---- the first List -------------------------------------------------------------------------------------------------


def _started(folder: Path, provider_port: int, machines: int) -> _Start:
    """Start a shard, and end it when it has had every machine for some seconds."""
    with _shard(folder, provider_port, free_port()) as shard:
        # Each look costs the shard some 20 ms of the processor time that is measured.
        wall_seconds = shard.wait(lambda: shard.is_filled(machines), poll_seconds=1.0)
        taken_seconds = shard.cpu_seconds
        time.sleep(SETTLE_SECONDS)
        return _Start(wall_seconds, taken_seconds, shard.memory_mib("VmRSS"), shard.memory_mib("VmHWM"))


def measure_first_list(machines: int) -> Measured:
    """Start shards over a large fleet and over a small one, in turn: the difference is what the fleet takes."""
    with TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        large_port, large = stack.enter_context(_provider(folder, machines))
        small_port, small = stack.enter_context(_provider(folder, FEW_MACHINES))
        pairs = [(_started(folder, small_port, small), _started(folder, large_port, large)) for _ in range(STARTS)]
    assert large > small > 0
    first_list = [after.cpu_seconds - before.cpu_seconds for before, after in pairs]
    starts = [after for _before, after in pairs]
    return Measured(
        readings=(
            Reading("the first List, processor time", statistics.median(first_list), "s", most=6.0),
            Reading("the same for a machine", statistics.median(first_list) / large * 1e6, "µs"),
            Reading("start until every machine is there", statistics.median(s.wall_seconds for s in starts), "s"),
            Reading("the same, processor time", statistics.median(s.cpu_seconds for s in starts), "s"),
            Reading("memory at rest", statistics.median(s.resident_mib for s in starts), "MiB", most=350.0),
            Reading("memory, peak", statistics.median(s.peak_mib for s in starts), "MiB"),
            Reading("memory at rest, few machines", statistics.median(s.resident_mib for s, _ in pairs), "MiB"),
        ),
        checksum=checksum((large, small)),
    )


def first_list(machines: int = 500_000) -> Measurement:
    """The first List of a fleet, in the shard."""
    return Measurement(
        name="W18 first List",
        size=f"{machines:,} machines",
        run=lambda: measure_first_list(machines),
        is_slow=machines > 10_000,
    )


# ---- kill -9 --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Restart:
    """What one start took until the demand of every cluster was decided."""

    first_cycle_seconds: float
    wall_seconds: float
    cpu_seconds: float


def _decided(shard: _Shard, *, rows: int, machines: int) -> _Restart:
    """Wait for the decision on every row."""
    first_cycle_seconds = shard.wait(lambda: shard.metric("cycle_duration_seconds_count") > 0)
    wall_seconds = shard.wait(lambda: shard.metric("demand_rows") == rows)
    taken_seconds = shard.cpu_seconds
    assert shard.metric("inventory_machines") == machines
    return _Restart(first_cycle_seconds, wall_seconds, taken_seconds)


def measure_restart(machines: int) -> Measured:
    """Kill a shard again and again while its operators go on; time it from its start to its first decision."""
    with TemporaryDirectory() as name, ExitStack() as stack:
        folder, port = Path(name), free_port()
        provider_port, size = stack.enter_context(_provider(folder, machines))
        shard = stack.enter_context(_shard(folder, provider_port, port))
        operators = stack.enter_context(_child("operators", str(port), str(machines), log=folder / "log"))
        rows = operators.heard()["rows"]
        # The first start is no restart.
        _decided(shard, rows=rows, machines=size)
        restarts = []
        for _ in range(STARTS):
            time.sleep(STOOD_SECONDS)
            shard.kill()
            shard = stack.enter_context(_shard(folder, provider_port, port))
            restarts.append(_decided(shard, rows=rows, machines=size))
    assert rows > 0
    return Measured(
        readings=(
            Reading(
                "start to the decision on every row",
                statistics.median(r.wall_seconds for r in restarts),
                "s",
                most=10.0,
            ),
            Reading("the same, longest", max(r.wall_seconds for r in restarts), "s"),
            Reading("the same, processor time", statistics.median(r.cpu_seconds for r in restarts), "s"),
            Reading(
                "start to the end of the first cycle", statistics.median(r.first_cycle_seconds for r in restarts), "s"
            ),
        ),
        checksum=checksum((size, rows)),
    )


def restart(machines: int = 100_000) -> Measurement:
    """From kill -9 to a decision."""
    return Measurement(
        name="W18 restart after kill -9",
        size=f"{machines:,} machines, 100 clusters, kernels on disk",
        run=lambda: measure_restart(machines),
        is_slow=machines > 10_000,
    )


RECOVERY = (first_list(), restart())
