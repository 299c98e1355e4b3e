"""What a run of the benchmarks is kept as: a JSON file, and the table of bench/README.md that is made from it.

A record says on which machine, with which versions and when; figures without that are nobody's. The table in the README
is only ever written from a record of a full run: nothing here may let anybody type a number.
"""

import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from bench.harness import RUNS, WARM_UPS, Benchmark, Figures, Measured, Measurement

FORMAT: Final = "bigfleet-bench-1"
HERE: Final = Path(__file__).parent
FULL_RECORD: Final = HERE / "results.json"
#: A partial run must not take the place of the full one that the README shows.
PARTIAL_RECORD: Final = HERE / "results-partial.json"
README: Final = HERE / "README.md"
TABLE_STARTS: Final = "<!-- the table of `python -m bench --markdown` starts here -->"
TABLE_ENDS: Final = "<!-- and ends here -->"
PACKAGES: Final = ("bigfleet", "numpy", "numba")
MARKDOWN_COLUMNS: Final = (
    *("benchmark", "size", "median ms", "min – max ms", "target ms", "met", "× target", "× copy", "reference ms"),
    "checksum",
)

MEASUREMENT_COLUMNS: Final = ("measurement", "size", "figure", "value", "target", "met", "checksum")

Entry = Mapping[str, Any]


class WrongRecord(Exception):
    """A record that no table can be made of; the text says why and what to do."""


def machine_entry() -> dict[str, Any]:
    """Describe this machine, its load and the versions that matter."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_bytes": pages,
        "load_before": os.getloadavg()[0],
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
    }


def _cpu_model() -> str:
    """Return the model as Linux names it, elsewhere what the platform says."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def benchmark_entry(benchmark: Benchmark, figures: Figures) -> dict[str, Any]:
    """Return one benchmark as it is kept; what does not apply is null."""
    median, copy, reference, target = figures.median_ms, figures.copy_ms, figures.reference_ms, benchmark.target_ms
    return {
        "name": benchmark.name,
        "size": benchmark.size,
        "items": benchmark.items,
        "median_ms": median,
        "min_ms": figures.minimum_ms,
        "max_ms": figures.maximum_ms,
        "copy_ms": copy or None,
        "ratio_to_copy": median / copy if copy else None,
        "reference_ms": reference,
        "ratio_to_reference": None if reference is None else median / reference,
        "target_ms": target,
        "ratio_to_target": None if target is None else median / target,
        "is_met": None if target is None else median <= target,
        "checksum": figures.checksum,
    }


def measurement_entry(measurement: Measurement, measured: Measured) -> dict[str, Any]:
    """Return one measurement as it is kept; what nothing is wanted of has a null target."""
    return {
        "name": measurement.name,
        "size": measurement.size,
        "readings": [
            {
                "what": reading.what,
                "value": reading.value,
                "unit": reading.unit,
                "at_most": reading.most,
                "at_least": reading.least,
                "is_met": reading.is_met,
            }
            for reading in measured.readings
        ],
        "checksum": measured.checksum,
    }


def run_entry(
    measured: Sequence[tuple[Benchmark, Figures]],
    *,
    machine: Entry,
    started: datetime,
    is_full: bool,
    measurements: Sequence[tuple[Measurement, Measured]] = (),
) -> dict[str, Any]:
    """Return the whole record of one run; times are UTC."""
    return {
        "format": FORMAT,
        "started": started.astimezone(UTC).isoformat(timespec="seconds"),
        "is_full": is_full,
        "runs": RUNS,
        "warm_ups": WARM_UPS,
        "machine": dict(machine),
        "benchmarks": [benchmark_entry(benchmark, figures) for benchmark, figures in measured],
        "measurements": [measurement_entry(measurement, seen) for measurement, seen in measurements],
    }


def write_record(path: Path, entry: Entry) -> None:
    """Write a record, making the folder when there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(entry, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_record(path: Path) -> Entry:
    """Read a record. Raises WrongRecord when there is none, or when it is not one."""
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WrongRecord(f"there is no {path}; run `make bench` first") from None
    except ValueError as error:
        raise WrongRecord(f"{path} is no JSON: {error}") from None
    if not isinstance(entry, dict) or entry.get("format") != FORMAT:
        raise WrongRecord(f"{path} is no record of format {FORMAT}; run `make bench` again")
    return entry


def markdown_of(entry: Entry) -> str:
    """Return the record as a paragraph and a table. Raises WrongRecord for a partial run."""
    if not entry["is_full"]:
        raise WrongRecord("the record is of a partial run; run `make bench` without --quick and --only")
    machine = entry["machine"]
    packages = ", ".join(f"{name} {machine[name]}" for name in PACKAGES)
    lines = [
        f"{entry['started']}, {machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.1f} GiB,"
        f" load {machine['load_before']:.2f} before the run; {machine['system']}, Python {machine['python']},"
        f" {packages}; median of {entry['runs']} runs after {entry['warm_ups']} warm-ups.",
        "",
        f"| {' | '.join(MARKDOWN_COLUMNS)} |",
        "|---|---|---:|---:|---:|---|---:|---:|---:|---|",
        *(_markdown_row(benchmark) for benchmark in entry["benchmarks"]),
    ]
    measurements = entry.get("measurements", [])
    if measurements:
        lines += [
            "",
            "Whole processes, measured once:",
            "",
            f"| {' | '.join(MEASUREMENT_COLUMNS)} |",
            "|---|---|---|---:|---:|---|---|",
            *(row for measurement in measurements for row in _measurement_rows(measurement)),
        ]
    return "\n".join(lines)


def _measurement_rows(measurement: Entry) -> Iterator[str]:
    for reading in measurement["readings"]:
        most, least, met = reading["at_most"], reading["at_least"], reading["is_met"]
        target = "" if met is None else f"≤ {most:g}" if most is not None else f"≥ {least:g}"
        cells = [
            measurement["name"].replace("|", "\\|"),
            measurement["size"],
            reading["what"],
            f"{reading['value']:,.2f} {reading['unit']}".rstrip(),
            target,
            "" if met is None else "yes" if met else "**no**",
            f"`{measurement['checksum']}`",
        ]
        yield "| " + " | ".join(cells) + " |"


def _markdown_row(benchmark: Entry) -> str:
    def text(name: str) -> str:
        value = benchmark[name]
        return "" if value is None else f"{value:.2f}"

    target, met = benchmark["target_ms"], benchmark["is_met"]
    cells = [
        benchmark["name"].replace("|", "\\|"),
        benchmark["size"],
        text("median_ms"),
        f"{benchmark['min_ms']:.2f} – {benchmark['max_ms']:.2f}",
        "" if target is None else f"{target:g}",
        "" if met is None else "yes" if met else "**no**",
        text("ratio_to_target"),
        text("ratio_to_copy"),
        text("reference_ms"),
        f"`{benchmark['checksum']}`",
    ]
    return "| " + " | ".join(cells) + " |"


def put_table(readme: Path, entry: Entry) -> None:
    """Replace what stands between the two marks of a README. Raises WrongRecord, and writes nothing, without them."""
    text = readme.read_text(encoding="utf-8")
    before, starts, rest = text.partition(TABLE_STARTS)
    _, ends, after = rest.partition(TABLE_ENDS)
    if not starts or not ends:
        raise WrongRecord(f"{readme} lacks the line {TABLE_STARTS if not starts else TABLE_ENDS}")
    readme.write_text(f"{before}{TABLE_STARTS}\n\n{markdown_of(entry)}\n\n{TABLE_ENDS}{after}", encoding="utf-8")
