"""The cases and fleets of tests/cases/engine, for tests; `bigfleet.cli.engine` reads and runs them.

Nothing here decides or compares anything.
"""

from functools import cache
from pathlib import Path

import pytest

from bigfleet.cli.engine.case_fleet import CaseFleet
from bigfleet.cli.engine.cases import (
    Case,
    Entry,
    fingerprints_of,
    machine_of,
    need_of,
    read_case_file,
    row_name,
    vector_of,
)
from bigfleet.cli.engine.fleets import (
    decide_fleet,
    decision_record,
    fleet_need_of,
    fleet_options_of,
    fleet_snapshot_of,
    read_fleets,
)

__all__ = [
    "Case",
    "Entry",
    "CaseFleet",
    "all_cases",
    "cases_of",
    "decide_fleet",
    "decision_record",
    "fingerprints_of",
    "fleet_need_of",
    "fleet_options_of",
    "fleet_snapshot_of",
    "load_cases",
    "load_fleets",
    "machine_of",
    "need_of",
    "row_name",
    "vector_of",
]

CASES_DIRECTORY = Path(__file__).parent / "cases" / "engine"


@cache
def all_cases() -> tuple[Case, ...]:
    """Return every case of every file, by file name, then in file order."""
    return tuple(case for path in sorted(CASES_DIRECTORY.glob("*.yaml")) for case in read_case_file(path))


def load_cases(*stages: str) -> list[Case]:
    """Return the cases of the stages, in file order."""
    return [case for case in all_cases() if case.stage in stages]


def cases_of(*stages: str) -> pytest.MarkDecorator:
    """Parametrize a test over the cases of the stages, named as in the files."""
    cases = load_cases(*stages)
    assert cases, f"no case has a stage of {stages}"
    return pytest.mark.parametrize("case", [pytest.param(case, id=f"{case.topic}-{case.name}") for case in cases])


@cache
def load_fleets() -> tuple[Entry, ...]:
    """Return the objects of decisions.jsonl."""
    return tuple(fleet for _line, fleet in read_fleets(CASES_DIRECTORY / "decisions.jsonl"))
