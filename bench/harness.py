"""Runs benchmarks and prints their table: median, minimum and maximum, with a checksum of what was computed.

A benchmark seeds, asserts the rows that it seeded, warms up, is timed, and hands back a value to hash: one that times
an empty inventory proves nothing. Absolute times belong to the machine; compare figures of one run alone.
"""

import hashlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

RUNS = 7
WARM_UPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """One workload at one size."""

    name: str
    size: str
    #: Seeds the workload and returns what is timed; that returns a value whose repr is hashed.
    prepare: "Callable[[], Callable[[], object] | Repeated]"
    #: How many things one run handles, for the per-item column.
    items: int
    #: Bytes of columns that the workload reads: the yardstick beside the time is one NumPy copy of as many.
    column_bytes: int = 0
    #: Left out of a quick run.
    is_slow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What was measured, milliseconds."""

    median_ms: float
    minimum_ms: float
    maximum_ms: float
    checksum: str
    #: One copy of the columns in the same run, 0 for workloads without.
    copy_ms: float


@dataclass(frozen=True, slots=True)
class Repeated:
    """Work that something must happen before, each time; that is not timed."""

    before: Callable[[], object]
    work: Callable[[], object]


def copy_ms(column_bytes: int) -> float:
    """Return the median time of one NumPy copy of so many bytes: what the memory of this machine allows."""
    if not column_bytes:
        return 0.0
    column, times_ms = np.zeros(column_bytes, np.uint8), []
    for _ in range(RUNS):
        started = time.perf_counter()
        column.copy()
        times_ms.append((time.perf_counter() - started) * 1000)
    return statistics.median(times_ms)


def measure(benchmark: Benchmark) -> Figures:
    """Run a benchmark. Raises AssertionError when two runs computed different things."""
    prepared = benchmark.prepare()
    repeated = prepared if isinstance(prepared, Repeated) else Repeated(lambda: None, prepared)
    work = repeated.work
    for _ in range(WARM_UPS):
        repeated.before()
        work()
    times_ms, checksums = [], set()
    for _ in range(RUNS):
        repeated.before()
        started = time.perf_counter()
        result = work()
        times_ms.append((time.perf_counter() - started) * 1000)
        checksums.add(hashlib.sha256(repr(result).encode()).hexdigest()[:12])
    assert len(checksums) == 1, f"{benchmark.name} computed different things in {RUNS} runs"
    return Figures(
        median_ms=statistics.median(times_ms),
        minimum_ms=min(times_ms),
        maximum_ms=max(times_ms),
        checksum=checksums.pop(),
        copy_ms=copy_ms(benchmark.column_bytes),
    )


def run(benchmarks: list[Benchmark]) -> None:
    """Measure each benchmark and print the table."""
    table = Table(title=f"median of {RUNS} runs after {WARM_UPS} warm-ups")
    for column in ("benchmark", "size", "median ms", "min ms", "max ms", "µs per item", "copy ms", "checksum"):
        table.add_column(column, justify="left" if column in ("benchmark", "size", "checksum") else "right")
    # A table that wraps its names cannot be compared with the one before.
    console = Console(width=max(Console().width, 120))
    for benchmark in benchmarks:
        with console.status(f"{benchmark.name} {benchmark.size}"):
            figures = measure(benchmark)
        table.add_row(
            benchmark.name,
            benchmark.size,
            f"{figures.median_ms:.2f}",
            f"{figures.minimum_ms:.2f}",
            f"{figures.maximum_ms:.2f}",
            f"{figures.median_ms * 1000 / benchmark.items:.2f}",
            f"{figures.copy_ms:.2f}" if figures.copy_ms else "",
            figures.checksum,
        )
    console.print(table)
