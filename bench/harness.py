"""Runs benchmarks and prints their table: median, minimum and maximum, with a checksum of what was computed.

A benchmark seeds, asserts the rows that it seeded, warms up, is timed, and hands back a value to hash: one that times
an empty inventory proves nothing. Absolute times belong to the machine; compare figures of one run alone. What a run is
kept as is in `bench.record`. This module does not choose a target: that is part of the benchmark's definition.
"""

import gc
import hashlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

RUNS = 7
WARM_UPS = 2
#: Characters: the widest names, and every column beside them.
TABLE_WIDTH_MIN = 190


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
    #: What docs/spec/benchmarks.md wants the median to stay within, milliseconds; None where it wants nothing.
    target_ms: float | None = None
    #: Seeds the same input for the reference engine; its work must return an equal value. None where it takes too long.
    reference: "Callable[[], Callable[[], object]] | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What was measured, milliseconds."""

    median_ms: float
    minimum_ms: float
    maximum_ms: float
    checksum: str
    #: One copy of the columns in the same run, 0 for workloads without.
    copy_ms: float
    #: The reference engine's median on the same input; None for workloads without.
    reference_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Repeated:
    """Work that something must happen before, each time; that is not timed."""

    before: Callable[[], object]
    work: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Reading:
    """One figure of a measurement, and what docs/spec/benchmarks.md wants of it: at most, or at least; or nothing."""

    what: str
    value: float
    unit: str
    most: float | None = None
    least: float | None = None

    @property
    def target(self) -> float | None:
        """What it is held against, in the unit; None where nothing is wanted."""
        return self.least if self.most is None else self.most

    @property
    def is_met(self) -> bool | None:
        """Return whether it is within; None where nothing is wanted."""
        if self.most is not None:
            return self.value <= self.most
        return None if self.least is None else self.value >= self.least


@dataclass(frozen=True, slots=True)
class Measured:
    """What one measurement saw, and a checksum of what was counted in it."""

    readings: tuple[Reading, ...]
    checksum: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Whole processes that are watched once for a while: several figures in units of their own."""

    name: str
    size: str
    #: Runs it, and raises AssertionError when not everything arrived.
    run: Callable[[], Measured]
    #: Left out of a quick run.
    is_slow: bool = False


def resident_mib(field: str = "VmRSS") -> float:
    """Return a field of this process's memory in MiB; VmHWM is the most that it ever had."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


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
    """Run a benchmark, then the reference on its input where there is one.

    Raises AssertionError when two runs, or the two engines, computed different things.
    """
    prepared = benchmark.prepare()
    repeated = prepared if isinstance(prepared, Repeated) else Repeated(lambda: None, prepared)
    times_ms, checksum = _timed(benchmark.name, repeated)
    reference_ms = None
    if benchmark.reference is not None:
        reference_times_ms, reference_checksum = _timed(benchmark.name, Repeated(lambda: None, benchmark.reference()))
        assert reference_checksum == checksum, f"{benchmark.name} computed another thing than the reference"
        reference_ms = statistics.median(reference_times_ms)
    return Figures(
        median_ms=statistics.median(times_ms),
        minimum_ms=min(times_ms),
        maximum_ms=max(times_ms),
        checksum=checksum,
        copy_ms=copy_ms(benchmark.column_bytes),
        reference_ms=reference_ms,
    )


def _timed(name: str, repeated: Repeated) -> tuple[list[float], str]:
    """Return the times of the runs after the warm-ups, milliseconds, and the one checksum of all results.

    What benchmarks before it have left behind is not looked through meanwhile: the processes of a shard and of a
    coordinator look for garbage when it is worth the pause, never because an object is made (docs/adr/0115).
    """
    work = repeated.work
    times_ms, checksums = [], set()
    gc.collect()
    gc.disable()
    try:
        for _ in range(WARM_UPS):
            repeated.before()
            work()
        for _ in range(RUNS):
            repeated.before()
            started = time.perf_counter()
            result = work()
            times_ms.append((time.perf_counter() - started) * 1000)
            checksums.add(hashlib.sha256(repr(result).encode()).hexdigest()[:12])
    finally:
        gc.enable()
    assert len(checksums) == 1, f"{name} computed different things in {RUNS} runs"
    return times_ms, checksums.pop()


COLUMNS = (
    *("benchmark", "size", "median ms", "min ms", "max ms", "µs per item", "target ms", "× target", "met"),
    *("copy ms", "× copy", "reference ms", "checksum"),
)
LEFT = ("benchmark", "size", "met", "checksum")


def cells(benchmark: Benchmark, figures: Figures) -> list[str]:
    """Return a benchmark's line of the table; a cell is empty where there is nothing to say."""

    def text(value: float | None) -> str:
        return f"{value:.2f}" if value else ""

    target, copy = benchmark.target_ms, figures.copy_ms
    return [
        benchmark.name,
        benchmark.size,
        f"{figures.median_ms:.2f}",
        f"{figures.minimum_ms:.2f}",
        f"{figures.maximum_ms:.2f}",
        f"{figures.median_ms * 1000 / benchmark.items:.2f}",
        "" if target is None else f"{target:g}",
        "" if target is None else text(figures.median_ms / target),
        "" if target is None else "yes" if figures.median_ms <= target else "no",
        text(copy),
        text(figures.median_ms / copy) if copy else "",
        text(figures.reference_ms),
        figures.checksum,
    ]


def run(benchmarks: Sequence[Benchmark]) -> list[tuple[Benchmark, Figures]]:
    """Measure each benchmark, print the table, and return what was measured."""
    table = Table(title=f"median of {RUNS} runs after {WARM_UPS} warm-ups")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in LEFT else "right")
    # A table that wraps its names cannot be compared with the one before.
    console = Console(width=max(Console().width, TABLE_WIDTH_MIN))
    measured = []
    for benchmark in benchmarks:
        with console.status(f"{benchmark.name} {benchmark.size}"):
            figures = measure(benchmark)
        measured.append((benchmark, figures))
        table.add_row(*cells(benchmark, figures))
    console.print(table)
    return measured


READING_COLUMNS = ("measurement", "size", "figure", "value", "unit", "target", "met", "checksum")


def reading_cells(measurement: Measurement, reading: Reading, checksum: str) -> list[str]:
    """Return one figure's line of the table."""
    sign = "≤" if reading.most is not None else "≥"
    return [
        measurement.name,
        measurement.size,
        reading.what,
        f"{reading.value:,.2f}",
        reading.unit,
        "" if reading.target is None else f"{sign} {reading.target:g}",
        "" if reading.is_met is None else "yes" if reading.is_met else "no",
        checksum,
    ]


def run_measurements(measurements: Sequence[Measurement]) -> list[tuple[Measurement, Measured]]:
    """Run each measurement once, print the table, and return what was measured."""
    if not measurements:
        return []
    table = Table(title="whole processes, measured once")
    for column in READING_COLUMNS:
        table.add_column(column, justify="right" if column == "value" else "left")
    console = Console(width=max(Console().width, TABLE_WIDTH_MIN))
    seen = []
    for measurement in measurements:
        with console.status(f"{measurement.name} {measurement.size}"):
            measured = measurement.run()
        seen.append((measurement, measured))
        for reading in measured.readings:
            table.add_row(*reading_cells(measurement, reading, measured.checksum))
    console.print(table)
    return seen
