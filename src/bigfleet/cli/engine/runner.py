"""Runs a folder of case files through an engine and counts what passed (tests/cases/engine/README.md).

A case that is malformed, a stage that is unknown and a file that cannot be read are failures like a wrong answer: a
folder passes only when everything in it was understood and right.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from bigfleet.cli.engine.cases import Case, CaseFileFault, Entry, read_case_file
from bigfleet.cli.engine.checks import ENGINE_CHECKS, Check, Mismatch, check_fleet
from bigfleet.cli.engine.fleets import FleetFault, read_fleets
from bigfleet.cli.engine.registry import Decide
from bigfleet.cli.engine.shard_checks import SHARD_CHECKS

#: Every stage that there is.
CHECKS: Final[Mapping[str, Check]] = {**ENGINE_CHECKS, **SHARD_CHECKS}


#: Puts one case to an engine. Raises where the answer is wrong or the case cannot be understood.
Question = Callable[[Decide], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseFault:
    """What is wrong with one case."""

    text: str
    #: The engine, or the engines, whose answer is wrong; "" when no engine was asked.
    engine: str = ""


#: Puts a question to one engine or to several and returns what is wrong, nothing when it is answered.
Trial = Callable[[Question], list[CaseFault]]


@dataclass(frozen=True, slots=True)
class CaseOutcome:
    """What came of one case."""

    #: File and name of the case.
    name: str
    #: Empty for a case that passed.
    faults: tuple[CaseFault, ...] = ()


def trial_of(name: str, decide: Decide) -> Trial:
    """Return the trial of one engine."""

    def trial(question: Question) -> list[CaseFault]:
        text = fault_of(question, decide)
        return [CaseFault(engine=name, text=text)] if text else []

    return trial


def fault_of(question: Question, decide: Decide) -> str:
    """Return what is wrong with an engine's answer to a question; "" when it is right."""
    try:
        question(decide)
    except Mismatch as mismatch:
        return str(mismatch)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def run_case(case: Case, decide: Decide) -> None:
    """Run a case. Raises Mismatch where the answer differs, or where the case cannot be understood."""
    check = CHECKS.get(case.stage)
    if check is None:
        raise Mismatch(f"stage {case.stage!r} is unknown; there are {', '.join(CHECKS)}")
    check(case, decide)


def run_folder(folder: Path, trial: Trial) -> Iterator[CaseOutcome]:
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
    yield from (CaseOutcome(path.name, (CaseFault(text=fault.removeprefix(f"{path}: ")),)) for path, fault in faults)
    names: set[str] = set()
    for path, case in cases:
        name = f"{path.name} {case.name}"
        if case.name in names:
            yield CaseOutcome(name, (CaseFault(text=f"the name {case.name!r} is used twice in the folder"),))
            continue
        names.add(case.name)
        yield CaseOutcome(name, tuple(trial(partial(run_case, case))))
    for path, number, fleet in fleets:
        name = f"{path.name} line {number} seed {fleet.get('seed', '?')}"
        if isinstance(fleet.get("decision"), dict):
            yield CaseOutcome(name, tuple(trial(partial(check_fleet, fleet))))
        else:
            yield CaseOutcome(name, (CaseFault(text="decision is missing or no object"),))
