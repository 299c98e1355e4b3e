"""Watches a shard from outside: its memory, its limit of memory, the length of its cycles, what it counts."""

import os
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final
from urllib.request import urlopen

_MEBIBYTE: Final = 1024 * 1024
_MEMORY_SECONDS: Final = 0.1
_SCRAPE_SECONDS: Final = 1.0
_SCRAPE_TIMEOUT_SECONDS: Final = 30.0
_CGROUPS: Final = Path("/sys/fs/cgroup")
_CYCLES: Final = "bigfleet_shard_cycle_duration_seconds"


def resident_mib(pid: int, field_name: str = "VmRSS:") -> float:
    """Return the resident memory of a process, 0 when it has ended."""
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field_name)) / 1024
    return 0.0


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started, directly or not."""
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text(encoding="ascii").split():
                found += [int(child), *children_of(int(child))]
    return found


class MemoryLimit:
    """A limit of memory for one process: of the kernel where there is cgroup v2 with memory, else watched from here."""

    def __init__(self, limit_bytes: int, root: Path = _CGROUPS) -> None:
        self._limit_bytes = limit_bytes
        self._group: Path | None = None
        with suppress(OSError):
            if os.geteuid() == 0 and "memory" in (root / "cgroup.subtree_control").read_text("ascii").split():
                group = root / f"bigfleet-overload-{os.getpid()}"
                group.mkdir()
                (group / "memory.max").write_text(str(limit_bytes), "ascii")
                self._group = group

    @property
    def kind(self) -> str:
        """Which of both it is."""
        if self._group is not None:
            return "cgroup v2 memory.max"
        return "resident memory watched in /proc (no cgroup v2 with memory here)"

    def hold(self, pid: int) -> None:
        """Put a process under the limit."""
        if self._group is not None:
            (self._group / "cgroup.procs").write_text(str(pid), "ascii")

    def close(self) -> None:
        """Remove the group; its processes have ended."""
        if self._group is not None:
            with suppress(OSError):
                self._group.rmdir()


@dataclass
class Memory:
    """Resident MiB of a shard's own process, and of what it has started."""

    start: float = 0.0
    peak: float = 0.0
    end: float = 0.0
    children: float = 0.0


@dataclass
class Scrapes:
    """What `/metrics` said, with the length of cycles between each two scrapes."""

    #: (monotonic seconds, cycles, their seconds in all) of each scrape.
    cycles: list[tuple[float, float, float]] = field(default_factory=list)
    values: dict[str, float] = field(default_factory=dict)
    failed: int = 0

    def cycle_ms(self, begin: float, end: float) -> list[float]:
        """Return the mean length of the cycles between each two scrapes of a time; empty without a cycle."""
        inside = [scrape for scrape in self.cycles if begin <= scrape[0] <= end]
        pairs = pairwise(inside)
        return [
            (after[2] - before[2]) / (after[1] - before[1]) * 1e3 for before, after in pairs if after[1] > before[1]
        ]

    def median_cycle_ms(self, begin: float, end: float) -> float:
        """Return the median of those; infinite when no cycle ended in the time."""
        found = self.cycle_ms(begin, end)
        return statistics.median(found) if found else float("inf")


def parse(text: str) -> dict[str, float]:
    """Return the samples of a scrape by name and labels."""
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


class Watch:
    """Samples a shard until it is closed."""

    def __init__(self, pid: int, metrics_port: int) -> None:
        self.pid = pid
        self._metrics_port = metrics_port
        self._ended = threading.Event()
        self.memory = Memory(start=resident_mib(pid))
        self.scrapes = Scrapes()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._sample_memory, self._scrape_often)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Take the last samples."""
        self._ended.set()
        for thread in self._threads:
            thread.join()
        self.memory.end = resident_mib(self.pid)
        # Of the kernel, which saw every moment.
        self.memory.peak = max(self.memory.peak, resident_mib(self.pid, "VmHWM:"))

    def scrape(self) -> dict[str, float]:
        """Read `/metrics` once; the last values when it does not answer."""
        try:
            with urlopen(f"http://127.0.0.1:{self._metrics_port}/metrics", timeout=_SCRAPE_TIMEOUT_SECONDS) as answer:
                values = parse(answer.read().decode())
        except OSError:
            self.scrapes.failed += 1
            return self.scrapes.values
        self.scrapes.values = values
        self.scrapes.cycles.append((time.monotonic(), values[f"{_CYCLES}_count"], values[f"{_CYCLES}_sum"]))
        return values

    def _sample_memory(self) -> None:
        while not self._ended.wait(_MEMORY_SECONDS):
            self.memory.peak = max(self.memory.peak, resident_mib(self.pid))
            self.memory.children = max(self.memory.children, sum(map(resident_mib, children_of(self.pid))))

    def _scrape_often(self) -> None:
        while not self._ended.wait(_SCRAPE_SECONDS):
            self.scrape()


@contextmanager
def watching(pid: int, metrics_port: int) -> Iterator[Watch]:
    """Watch a shard while the context lasts."""
    watch = Watch(pid, metrics_port)
    try:
        yield watch
    finally:
        watch.close()
