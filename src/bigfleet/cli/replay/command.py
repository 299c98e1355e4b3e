"""Defines `bigfleet replay`: reads a recording, replays it, and prints a verdict (docs/replay.md).

Exit 0 if every cycle was decided as recorded, 1 if one was not, 2 for a wrong call or a file that is damaged or not a
recording. Differences that come from changed settings or patches do not count.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bigfleet.cli.runtime.failures import UsageFault
from bigfleet.cli.runtime.terminal import echo, echo_error
from bigfleet.cli.visible_text import visible_json

if TYPE_CHECKING:
    from bigfleet.cli.plan.planning import Difference, FleetPlan
    from bigfleet.cli.replay.changes import ReplaySettings
    from bigfleet.cli.replay.replaying import Replayed
    from bigfleet.engine.explain.explanation import Explanation
    from bigfleet.recording.reader import RecordedCycle

OUTPUTS = ("table", "json")
#: Width of the pages where there is no terminal.
WIDTH = 120

_File = Annotated[
    Path, typer.Argument(metavar="FILE", help="Recording of bigfleet shard --record, or its rotated file FILE.1 …")
]
_Cycle = Annotated[int | None, typer.Option(metavar="N", help="Show only this cycle, in full.")]
_Epoch = Annotated[
    int | None, typer.Option(metavar="N", help="Read only the records of this epoch (one process of the shard).")
]
_Explain = Annotated[
    str | None,
    typer.Option(
        metavar="NEED|MACHINE", help="With --cycle: explain the decision for a row (CLUSTER/ID) or a machine (ID)."
    ),
]
_WhatIf = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="With --cycle: patch file of bigfleet plan; show what the patches change."),
]
_Weight = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=NUMBER",
        help="Replace a weight of preemption candidates: priority, drain, interruption or reclamation.",
    ),
]
_Hold = Annotated[
    list[str] | None,
    typer.Option(metavar="TYPE=DURATION", help="Replace the hold of idle machines: on-demand or spot."),
]
_Drain = Annotated[str | None, typer.Option(metavar="DURATION", help="Replace the assumed duration of a drain.")]
_Engine = Annotated[str, typer.Option(metavar="NAME", help="columnar or reference; both give the same decisions.")]
_Output = Annotated[str, typer.Option(metavar="FORM", help="Output format: table or json.")]


def replay(
    file: _File,
    cycle: _Cycle = None,
    epoch: _Epoch = None,
    explain: _Explain = None,
    what_if: _WhatIf = None,
    weight: _Weight = None,
    hold: _Hold = None,
    drain: _Drain = None,
    engine: _Engine = "columnar",
    output: _Output = "table",
) -> None:
    """Repeat recorded cycles and compare the decisions, also under other settings."""
    from bigfleet.cli.get.output import quiet_when_unread
    from bigfleet.cli.replay.changes import ENGINES, read_settings
    from bigfleet.cli.runtime.kernel_cache import keep_kernels

    for flag, value, known in (("--output", output, OUTPUTS), ("--engine", engine, ENGINES)):
        if value not in known:
            raise UsageFault(f"{flag}: {value!r} is unknown; choose one of {', '.join(known)}")
    for flag, given in (("--explain", explain), ("--what-if", what_if)):
        if given is not None and cycle is None:
            raise UsageFault(f"{flag} applies to one cycle; name it with --cycle N")
    settings = read_settings(weight or (), hold or (), drain)
    keep_kernels()
    # What it stays when the reader closes the pipe.
    is_same = True
    with quiet_when_unread():
        if cycle is None:
            is_same = _replay_all(file, epoch, settings, engine, output)
        else:
            recorded = _the_cycle(file, cycle, epoch)
            is_same = _replay_one(recorded, explain, what_if, settings, engine, output)
    if not is_same:
        raise typer.Exit(1)


# ---- reading -----------------------------------------------------------------------------------------------------


def _cycles(file: Path, epoch: int | None) -> "Iterator[RecordedCycle]":
    """Yield the cycles of the file. Raises UsageFault for what is no recording, or behind the last that is whole."""
    from bigfleet.recording.frames import Damage, Torn, WrongFile
    from bigfleet.recording.reader import read_recording

    last: int | None = None
    try:
        for found in read_recording(file):
            if isinstance(found, Torn):
                echo_error(_torn_text(file, found.start, found.size_bytes, last))
            else:
                last = found.cycle
                if epoch is None or found.head.epoch == epoch:
                    yield found
    except OSError as error:
        raise UsageFault(f"{file}: {error.strerror}; name a recording that can be read") from error
    except WrongFile as fault:
        raise UsageFault(f"{file}: {fault}") from fault
    except Damage as damage:
        before = "nothing before it could be read" if last is None else f"up to cycle {last} it is good"
        raise UsageFault(
            f"{file}: {damage}; {before}. What comes behind cannot be read: restore the file from a copy, "
            "or replay another one of the recording, each of which can be read by itself"
        ) from damage


def _torn_text(file: Path, start: int, size_bytes: int, last: int | None) -> str:
    upto = "there is no whole record before it" if last is None else f"it is read up to cycle {last}"
    return (
        f"bigfleet: {file}: the last record is not whole ({size_bytes:,} bytes at byte {start:,}): "
        f"its process was killed or is writing just now; {upto}"
    )


def _the_cycle(file: Path, number: int, epoch: int | None) -> "RecordedCycle":
    """Return the cycle with that number; of several processes' the last one's that can be read. Raises UsageFault."""
    found: RecordedCycle | None = None
    numbers: list[int] = []
    epochs: list[int] = []
    try:
        for recorded in _cycles(file, epoch):
            numbers.append(recorded.cycle)
            if recorded.cycle == number:
                found = recorded
                epochs.append(recorded.head.epoch)
    except UsageFault as fault:
        if found is None:
            raise
        # It is before the damage.
        echo_error(f"bigfleet: {fault}")
    if found is None:
        raise UsageFault(f"--cycle {number}: {_whereabouts(file, numbers, epoch)}")
    if len(set(epochs)) > 1:
        older = ", ".join(map(str, sorted(set(epochs))[:-1]))
        echo_error(f"bigfleet: cycle {number} is that of epoch {epochs[-1]}; --epoch shows that of {older}")
    return found


def _whereabouts(file: Path, numbers: list[int], epoch: int | None) -> str:
    if not numbers:
        return f"{file}: {_nothing_text(epoch)}"
    of_epoch = "" if epoch is None else f" of epoch {epoch}"
    return (
        f"{file} has cycles{of_epoch} from {min(numbers)} to {max(numbers)}; older ones may be in {file.name}.1 and on"
    )


def _nothing_text(epoch: int | None) -> str:
    if epoch is None:
        return "no whole cycle to replay; wait until its shard has decided, or name an older file of it"
    return f"no whole cycle of epoch {epoch} to replay; leave --epoch out to see which there are"


# ---- all cycles --------------------------------------------------------------------------------------------------


def _replay_all(file: Path, epoch: int | None, settings: "ReplaySettings", engine: str, output: str) -> bool:
    from bigfleet.cli.replay.replaying import Replayer

    replayer = Replayer(engine, change=settings.applied if settings else None)
    replayed = (replayer.replay(recorded) for recorded in _cycles(file, epoch))
    shown = _write_json(replayed) if output == "json" else _write_table(replayed, settings)
    if shown is None:
        raise UsageFault(f"{file}: {_nothing_text(epoch)}")
    return shown


def _write_json(replayed: "Iterator[Replayed]") -> bool | None:
    import msgspec

    from bigfleet.cli.replay.records import cycle_record

    is_same, count = True, 0
    try:
        for one in replayed:
            sys.stdout.write(
                ("," if count else '{"cycles":[') + "\n" + visible_json(msgspec.json.encode(cycle_record(one)).decode())
            )
            is_same, count = is_same and one.is_same, count + 1
    finally:
        # The output is a complete document after any end of the file.
        if count:
            sys.stdout.write(f'\n],"count":{count},"verdict":"{"same" if is_same else "different"}"}}\n')
    return is_same if count else None


def _write_table(replayed: "Iterator[Replayed]", settings: "ReplaySettings") -> bool | None:
    from bigfleet.cli.replay import tables
    from bigfleet.cli.replay.records import cycle_record
    from bigfleet.cli.replay.replaying import ReplayVerdict
    from bigfleet.cli.runtime.console import output_console

    console = output_console(WIDTH)
    table = tables.new_table(console, is_changed=bool(settings))
    verdicts: list[tuple[int, ReplayVerdict]] = []
    missed = 0
    block: list[Replayed] = []
    changes: list[tuple[int, int]] = []

    def flush() -> None:
        if block:
            table.write_block([cycle_record(one) for one in block])
        for one in block:
            if one.difference:
                tables.show_line(console, f"  cycle {one.recorded.cycle}: {one.difference}", "red")
        block.clear()

    head = None
    try:
        for one in replayed:
            if one.recorded.head != head:
                flush()
                head = one.recorded.head
                tables.show_line(console, tables.head_text(head), "bold")
                if settings and not verdicts:
                    tables.show_line(console, f"changed: {settings.text()}")
            block.append(one)
            verdicts.append((one.recorded.cycle, one.verdict))
            missed += one.recorded.missed
            if one.changed is not None:
                changes.append((one.changed.added, one.changed.dropped))
            if len(block) == tables.BLOCK_MAX or not one.is_same:
                flush()
    finally:
        flush()
        if verdicts:
            tables.show_line(console, tables.verdict_text(verdicts, missed=missed))
        if settings and verdicts:
            tables.show_line(console, tables.changed_text(changes))
    return all(verdict is not ReplayVerdict.DIFFERENT for _cycle, verdict in verdicts) if verdicts else None


# ---- one cycle ---------------------------------------------------------------------------------------------------


def _replay_one(
    recorded: "RecordedCycle",
    explain: str | None,
    patches: Path | None,
    settings: "ReplaySettings",
    engine: str,
    output: str,
) -> bool:
    from bigfleet.cli.replay.cycle_plan import difference_to, explained, plan_of
    from bigfleet.cli.replay.replaying import Replayer, with_machines

    replayed = Replayer(engine).replay(with_machines(recorded))
    if replayed.decision is None:
        _show_one(replayed, None, None, None, settings, output)
        return replayed.is_same
    base = plan_of(replayed.recorded, replayed.decision)
    difference = difference_to(base, patches, settings, engine) if patches is not None or settings else None
    final = base if difference is None else difference.changed
    about = None if explain is None else explained(final, explain, base=base)
    _show_one(replayed, base, difference, about, settings, output)
    return replayed.is_same


def _show_one(
    replayed: "Replayed",
    base: "FleetPlan | None",
    difference: "Difference | None",
    about: "tuple[Explanation | list[str], str] | None",
    settings: "ReplaySettings",
    output: str,
) -> None:
    from bigfleet.cli.replay.records import cycle_record
    from bigfleet.cli.replay.replaying import differing_actions

    record = cycle_record(replayed)
    final = base if difference is None else difference.changed
    if output == "json":
        import json

        from bigfleet.cli.plan.document import difference_document, explanation_document, plan_document

        document = {"cycle": record}
        if not replayed.is_same:
            only_recorded, only_now = differing_actions(replayed)
            document["differing"] = {"only_recorded": only_recorded, "only_now": only_now}
        if base is not None:
            document["plan"] = plan_document(base)
        if difference is not None:
            document["what_if"] = difference_document(difference)
        if about is not None and final is not None:
            document["explanation"] = explanation_document(final, *about)
        echo(json.dumps(document, indent=2, allow_nan=False))
        return
    from bigfleet.cli.plan.tables import show_difference, show_explanation, show_plan
    from bigfleet.cli.replay import tables
    from bigfleet.cli.runtime.console import output_console

    console = output_console(WIDTH)
    tables.show_line(console, tables.head_text(replayed.recorded.head), "bold")
    tables.show_line(console, tables.verdict_line(replayed, record["digest"] or ""))
    kind = "timer cycle" if record["timer"] else "woken cycle"
    rows, machines = record["rows"], record["machines"]
    of_demand = f"{rows:,} {'row' if rows == 1 else 'rows'} of demand"
    tables.show_line(
        console, f"{record['time']}, {kind}: {of_demand}, {machines:,} {'machine' if machines == 1 else 'machines'}"
    )
    if not replayed.is_same:
        tables.show_differing(console, replayed)
    console.print()
    if base is not None:
        show_plan(console, base, title=f"Decision of cycle {replayed.recorded.cycle}")
    if difference is not None:
        show_difference(console, difference)
        if settings:
            tables.show_line(console, f"Changed: {settings.text()}.")
    if about is not None and final is not None:
        show_explanation(console, final, *about)
