"""Runs a folder of case files through an engine and counts what passed (tests/cases/engine/README.md).

A case that is malformed, a stage that is unknown and a file that cannot be read are failures like a wrong answer: a
folder passes only when everything in it was understood and right.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bigfleet.cli.engine.cases import Case, CaseFileFault, Entry, read_case_file
from bigfleet.cli.engine.checks import ENGINE_CHECKS, Check, Mismatch, check_fleet
from bigfleet.cli.engine.fleets import FleetFault, read_fleets
from bigfleet.cli.engine.registry import Decide
from bigfleet.cli.engine.shard_checks import SHARD_CHECKS

#: Every stage that there is.
CHECKS: Final[Mapping[str, Check]] = {**ENGINE_CHECKS, **SHARD_CHECKS}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one case."""

    #: File and name of the case.
    name: str
    #: "" for a case that passed, else one line that says what differs.
    fault: str = ""


def run_case(case: Case, decide: Decide) -> None:
    """Run a case. Raises Mismatch where the answer differs, or where the case cannot be understood."""
    check = CHECKS.get(case.stage)
    if check is None:
        raise Mismatch(f"stage {case.stage!r} is unknown; there are {', '.join(CHECKS)}")
    check(case, decide)


def run_folder(folder: Path, decide: Decide) -> Iterator[Outcome]:
    """Yield the outcome of every case of a folder: its YAML files by name, then its JSON lines.

    Raises CaseFileFault when the folder has no file with a case that can be read.
    """
    if not folder.is_dir():
        raise CaseFileFault(f"{folder}: no such folder")
    files = sorted(path for suffix in ("*.yaml", "*.yml") for path in folder.glob(suffix))
    lines = sorted(folder.glob("*.jsonl"))
    faults: list[tuple[Path, str]] = []
    cases: list[tuple[Path, Case]] = []
    for path in files:
        try:
            cases += [(path, case) for case in read_case_file(path)]
        except CaseFileFault as fault:
            faults.append((path, str(fault)))
    fleets: list[tuple[Path, int, Entry]] = []
    for path in lines:
        try:
            fleets += [(path, number, fleet) for number, fleet in read_fleets(path)]
        except FleetFault as fault:
            faults.append((path, str(fault)))
    if not cases and not fleets:
        why = f"; {faults[0][1]}" if faults else "; *.yaml and *.jsonl files are read"
        raise CaseFileFault(f"{folder}: no readable case file{why}")
    yield from (Outcome(path.name, fault.removeprefix(f"{path}: ")) for path, fault in faults)
    names: set[str] = set()
    for path, case in cases:
        repeated = f"the name {case.name!r} stands in the folder already" if case.name in names else ""
        names.add(case.name)
        yield Outcome(f"{path.name} {case.name}", repeated or _fault(case, decide))
    for path, number, fleet in fleets:
        yield Outcome(f"{path.name} line {number} seed {fleet.get('seed', '?')}", _fleet_fault(fleet, decide))


def _fault(case: Case, decide: Decide) -> str:
    try:
        run_case(case, decide)
    except Mismatch as mismatch:
        return str(mismatch)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _fleet_fault(fleet: Entry, decide: Decide) -> str:
    if not isinstance(fleet.get("decision"), dict):
        return "decision is missing or no object"
    try:
        check_fleet(fleet, decide)
    except Mismatch as mismatch:
        return str(mismatch)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
