"""Defines `bigfleet engine check` and `bigfleet engine decide`: runs case files and fleets through the engines.

Exit 2 for a wrong call or a file that cannot be read, 1 for a case that fails and for engines that differ, else 0.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from bigfleet.cli.engine.registry import BOTH, CHOICES, DEFAULT_ENGINE, engine_named
from bigfleet.cli.flags.help_text import HelpGroup
from bigfleet.cli.flags.switches import SwitchCommand
from bigfleet.cli.runtime.failures import RunFault, UsageFault
from bigfleet.cli.runtime.terminal import echo

if TYPE_CHECKING:
    from bigfleet.cli.engine.registry import Decide
    from bigfleet.cli.engine.runner import CaseOutcome, Trial

app = typer.Typer(cls=HelpGroup, help="Run test cases and fleets through a decision engine.", no_args_is_help=True)

#: Characters of one fault's text; a whole decision would fill pages.
FAULT_CHARACTERS_MAX: Final = 1000

_Engine = Annotated[
    str, typer.Option(metavar="NAME", help=f"One of: {', '.join(CHOICES)}. {BOTH} holds them to one answer.")
]
_Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Directory of case files: *.yaml and *.jsonl.")]
_Fleets = Annotated[Path, typer.Argument(metavar="IN.jsonl", help="Input file, one fleet per line.")]
_Out = Annotated[Path, typer.Option(metavar="OUT.jsonl", help="Output file, one decision per line.")]


@app.command(cls=SwitchCommand)
def check(folder: _Folder, engine: _Engine = DEFAULT_ENGINE) -> None:
    """Run all cases of a directory; print failures and totals.

    With both engines, a case also fails when they decide or explain differently.
    """
    from bigfleet.cli.engine.cases import CaseFileFault
    from bigfleet.cli.engine.runner import run_folder

    trial = _trial(engine)
    passed = failed = 0
    try:
        for outcome in run_folder(folder, trial):
            if outcome.faults:
                failed += 1
                echo(_failure(outcome))
            else:
                passed += 1
    except CaseFileFault as fault:
        raise UsageFault(_one_line(str(fault))) from fault
    echo(f"{passed} passed, {failed} failed")
    raise typer.Exit(1 if failed else 0)


@app.command(cls=SwitchCommand)
def decide(fleets: _Fleets, out: _Out, engine: _Engine = DEFAULT_ENGINE) -> None:
    """Decide all fleets of a file; write one {seed, decision} per line.

    With both engines nothing is written unless every decision of the two is the same.
    """
    import json

    from bigfleet.cli.engine.both import EnginesDiffer, EveryEngine
    from bigfleet.cli.engine.fleets import FleetFault, decide_fleet, decision_record, read_fleets

    run: Decide = EveryEngine(with_records=False).decide if engine == BOTH else engine_named(engine)
    written = []
    try:
        for number, fleet in read_fleets(fleets):
            try:
                decided = decide_fleet(fleet, run)
            except EnginesDiffer as fault:
                where = f"{fleets} line {number} seed {fleet.get('seed', '?')}"
                raise RunFault(_one_line(f"{where}: the engines differ: {fault}")) from fault
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise UsageFault(f"{fleets} line {number}: {_wrong_field(error)}") from error
            record = {"seed": fleet.get("seed"), "decision": decision_record(decided)}
            written.append(json.dumps(record, sort_keys=True) + "\n")
    except FleetFault as fault:
        raise UsageFault(_one_line(str(fault))) from fault
    if not written:
        raise UsageFault(f"{fleets}: the file has no fleet; one JSON object a line is expected")
    try:
        out.write_text("".join(written), encoding="utf-8")
    except OSError as error:
        raise RunFault(f"{out}: {error.strerror}; name a file that can be written") from error
    echo(f"{len(written)} decisions written to {out}")


def _trial(engine: str) -> "Trial":
    if engine == BOTH:
        from bigfleet.cli.engine.both import EveryEngine

        return EveryEngine(with_records=True).faults
    from bigfleet.cli.engine.runner import trial_of

    return trial_of(engine, engine_named(engine))


def _failure(outcome: "CaseOutcome") -> str:
    """Return one line: the case, then each engine whose answer is wrong and what is wrong with it."""
    texts = [_one_line(fault.text) for fault in outcome.faults]
    parts = [
        f" on {fault.engine}: {text}" if fault.engine else f": {text}"
        for fault, text in zip(outcome.faults, texts, strict=True)
    ]
    return f"FAILED {outcome.name}{';'.join(parts)}"


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= FAULT_CHARACTERS_MAX else line[:FAULT_CHARACTERS_MAX] + " …"


def _wrong_field(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"the field {error.args[0]!r} is missing or has a value that is not allowed"
    return _one_line(f"a field has a wrong value ({error})")
