"""A measurement of whole processes is shown and kept like a benchmark, each figure in its unit."""

from datetime import UTC, datetime
from typing import Any

import pytest

from bench.harness import Measured, Measurement, Reading, reading_cells, run_measurements
from bench.record import machine_entry, markdown_of, run_entry

READINGS = (
    Reading("latency", 99.5, "ms", most=100.0),
    Reading("speed", 499.0, "/s", least=500.0),
    Reading("decisions", 3.0, ""),
)


def measurement() -> Measurement:
    return Measurement(name="W0", size="1 stream", run=lambda: Measured(READINGS, "abc"))


def record() -> dict[str, Any]:
    return run_entry(
        [],
        machine=machine_entry(),
        started=datetime(2026, 1, 2, tzinfo=UTC),
        is_full=True,
        measurements=run_measurements([measurement()]),
    )


@pytest.mark.parametrize(("reading", "expected"), list(zip(READINGS, (True, False, None), strict=True)))
def test_a_reading_is_held_against_what_is_wanted_of_it(reading: Reading, expected: bool | None) -> None:
    assert reading.is_met is expected


def test_a_reading_says_in_which_direction_its_target_lies() -> None:
    targets = [reading_cells(measurement(), reading, "abc")[5:7] for reading in READINGS]

    assert targets == [["≤ 100", "yes"], ["≥ 500", "no"], ["", ""]]


def test_the_record_keeps_every_reading() -> None:
    (kept,) = record()["measurements"]

    assert [(reading["what"], reading["value"], reading["is_met"]) for reading in kept["readings"]] == [
        ("latency", 99.5, True),
        ("speed", 499.0, False),
        ("decisions", 3.0, None),
    ]
    assert kept["checksum"] == "abc"


def test_the_readme_shows_them_in_a_table_of_their_own() -> None:
    shown = markdown_of(record())

    assert "| W0 | 1 stream | latency | 99.50 ms | ≤ 100 | yes | `abc` |" in shown
    assert "| W0 | 1 stream | speed | 499.00 /s | ≥ 500 | **no** | `abc` |" in shown
    assert "| W0 | 1 stream | decisions | 3.00 |  |  | `abc` |" in shown
