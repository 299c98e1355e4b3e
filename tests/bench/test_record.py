"""A record of a benchmark run says what was measured and on what; the README shows full runs and nothing typed."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from bench.harness import Benchmark, Figures, cells, measure
from bench.record import (
    README,
    TABLE_ENDS,
    TABLE_STARTS,
    WrongRecord,
    machine_entry,
    markdown_of,
    put_table,
    read_record,
    run_entry,
    write_record,
)

STARTED = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def benchmark(target_ms: float | None = None) -> Benchmark:
    return Benchmark(name="W0", size="1 machine", prepare=lambda: lambda: 1, items=1, target_ms=target_ms)


def figures(median_ms: float, copy_ms: float = 0.0, reference_ms: float | None = None) -> Figures:
    return Figures(
        median_ms=median_ms,
        minimum_ms=1.0,
        maximum_ms=9.0,
        checksum="abc",
        copy_ms=copy_ms,
        reference_ms=reference_ms,
    )


def record(*measured: tuple[Benchmark, Figures], is_full: bool = True) -> dict[str, object]:
    return run_entry(measured, machine=machine_entry(), started=STARTED, is_full=is_full)


def test_a_record_says_what_the_ratios_are_and_whether_the_target_is_met(tmp_path: Path) -> None:
    written = record((benchmark(target_ms=4.0), figures(5.0, copy_ms=2.0, reference_ms=50.0)))
    write_record(tmp_path / "folder" / "run.json", written)

    (entry,) = read_record(tmp_path / "folder" / "run.json")["benchmarks"]

    assert (entry["median_ms"], entry["min_ms"], entry["max_ms"]) == (5.0, 1.0, 9.0)
    assert (entry["ratio_to_copy"], entry["ratio_to_reference"], entry["ratio_to_target"]) == (2.5, 0.1, 1.25)
    assert entry["is_met"] is False


def test_what_does_not_apply_is_null() -> None:
    text = json.dumps(record((benchmark(), figures(5.0))))

    (entry,) = json.loads(text)["benchmarks"]

    names = ("copy_ms", "ratio_to_copy", "reference_ms", "ratio_to_reference", "target_ms", "ratio_to_target", "is_met")
    assert {entry[name] for name in names} == {None}


def test_a_record_names_the_machine_and_the_versions() -> None:
    written = record()

    assert written["started"] == "2026-01-02T03:04:05+00:00"
    machine = written["machine"]
    assert isinstance(machine, dict)
    assert {"cpu", "cores", "memory_bytes", "python", "numpy", "numba", "bigfleet"} <= machine.keys()
    assert all(machine.values())


def test_a_target_that_is_just_reached_is_met() -> None:
    assert "yes" in cells(benchmark(target_ms=5.0), figures(5.0))
    assert "no" in cells(benchmark(target_ms=5.0), figures(5.001))


def test_the_reference_must_compute_the_same() -> None:
    def other() -> Benchmark:
        return Benchmark(name="W0", size="", prepare=lambda: lambda: 1, items=1, reference=lambda: lambda: 2)

    with pytest.raises(AssertionError, match="another thing than the reference"):
        measure(other())


def test_the_readme_shows_a_full_run(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(README.read_text(encoding="utf-8"), encoding="utf-8")
    full = record((benchmark(target_ms=4.0), figures(5.0)))

    put_table(readme, full)
    put_table(readme, full)

    shown = readme.read_text(encoding="utf-8").partition(TABLE_STARTS)[2].partition(TABLE_ENDS)[0].strip()
    assert shown == markdown_of(full)
    assert "| W0 | 1 machine | 5.00 | 1.00 – 9.00 | 4 | **no** | 1.25 |" in shown


def test_a_partial_run_is_not_shown(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"{TABLE_STARTS}\n{TABLE_ENDS}\n", encoding="utf-8")

    with pytest.raises(WrongRecord, match="partial run"):
        put_table(readme, record(is_full=False))

    assert readme.read_text(encoding="utf-8") == f"{TABLE_STARTS}\n{TABLE_ENDS}\n"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": "other"}'])
def test_what_is_no_record_is_said_to_be_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(content, encoding="utf-8")

    with pytest.raises(WrongRecord):
        read_record(path)


def test_a_record_that_is_missing_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(WrongRecord, match="run `make bench` first"):
        read_record(tmp_path / "run.json")
