"""Repeats a query: redraws a screen, or prints a document per change.

If the shard cannot be reached after the first answer, the command says so and waits for it. Records have no ages, so
equal records are no change. Ctrl-C is the normal way to end the command. Only a digest of the last document is stored.
"""

import shutil
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from tempfile import SpooledTemporaryFile
from typing import Final, NoReturn, TextIO, cast

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from bigfleet.cli.get.columns import TableColumn
from bigfleet.cli.get.output import TableWriter, footer, plural, write_json, write_yaml
from bigfleet.cli.get.records import NANOS_PER_SECOND, Record, time_text
from bigfleet.cli.runtime.console import TerminalConsole
from bigfleet.cli.runtime.early_end import ended_by_interrupt
from bigfleet.cli.runtime.failures import CommandFault

#: A document stays in memory up to this and goes through a file above it.
SPOOL_BYTES_MAX: Final = 16 * 1024 * 1024
#: Lines of a screen that are not rows: heads, a blank, the footer, and one that the cursor keeps.
_FRAME_LINES: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What is shown, and how."""

    #: Asks the shard again at each call. Raises CommandFault, also while it is read.
    look: Callable[[], Iterator[Record]]
    columns: Sequence[TableColumn]
    #: In the singular.
    noun: str
    #: table, json or yaml.
    form: str


def show_once(shown: Shown, console: Console) -> None:
    """Write one answer to standard output. Ctrl-C ends the process with code 130."""
    with ended_by_interrupt():
        _show_once(shown, console)


def _show_once(shown: Shown, console: Console) -> None:
    records = shown.look()
    try:
        if shown.form != "table":
            write = write_json if shown.form == "json" else write_yaml
            write(records, sys.stdout)
            return
        table = TableWriter(console, shown.columns, now_seconds=time.time())
        count = table.write(records)
    finally:
        # The call that it reads must not last until the interpreter ends: since Python 3.12 gRPC would never end then.
        if isinstance(records, Generator):
            records.close()
    if not count:
        # Beside the output, so that a program that counts lines counts none.
        TerminalConsole(stderr=True, highlight=False).print(f"no {plural(shown.noun)} found")
    elif console.is_terminal:
        console.print(Text(footer(count, shown.noun, table.hidden), style="dim"))


def watch(shown: Shown, console: Console, *, interval_seconds: float) -> NoReturn:
    """Show it until Ctrl-C, which ends the process with code 0. Raises CommandFault if the first look fails."""
    if shown.form == "table" and console.is_terminal:
        _redraw(shown, console, interval_seconds)
    with ended_by_interrupt(0):
        _show_changes(shown, console, interval_seconds)


def _redraw(shown: Shown, console: Console, interval_seconds: float) -> NoReturn:
    live = Live(console=console, screen=True, auto_refresh=False)
    with ended_by_interrupt(0, live.stop):
        screen = answer = _screen(shown, console)
        with live:
            while True:
                live.update(screen, refresh=True)
                time.sleep(interval_seconds)
                try:
                    screen = answer = _screen(shown, console)
                except CommandFault as fault:
                    away = Text(f"{_clock_text()} {fault}; looking again", style="bold red")
                    # The last answer stays below: it is what was known.
                    screen = Group(away, answer)


def _screen(shown: Shown, console: Console) -> RenderableType:
    """Return as many rows as the terminal is high; the others are counted."""
    table = TableWriter(console, shown.columns, now_seconds=time.time())
    records = shown.look()
    rows = list(islice(records, max(1, console.height - _FRAME_LINES)))
    rest = sum(1 for _record in records)
    drawn = table.table(rows) if rows else Text("")
    text = footer(len(rows) + rest, shown.noun, table.hidden, below=rest) if rows else f"no {plural(shown.noun)} found"
    below = Text(f"{_clock_text()} {text}", style="dim", no_wrap=True, overflow="ellipsis")
    return Group(drawn, Text(""), below)


def _show_changes(shown: Shown, console: Console, interval_seconds: float) -> NoReturn:
    last = b""
    complaint: str | None = ""
    while True:
        with SpooledTemporaryFile(SPOOL_BYTES_MAX, mode="w+", encoding="utf-8") as spool:
            try:
                digest = _write_document(shown, cast(TextIO, spool))
                complaint = None
                if digest != last:
                    spool.seek(0)
                    shutil.copyfileobj(spool, sys.stdout)
                    sys.stdout.flush()
                last = digest
            except CommandFault as fault:
                if complaint == "":
                    raise
                if complaint != str(fault):
                    complaint = str(fault)
                    TerminalConsole(stderr=True, highlight=False, soft_wrap=True).print(
                        Text(f"bigfleet: {fault}; looking again")
                    )
        time.sleep(interval_seconds)


def _write_document(shown: Shown, to: TextIO) -> bytes:
    """Write one document and return the digest of its records."""
    digest = blake2b()

    def digested() -> Iterator[Record]:
        for record in shown.look():
            digest.update(msgspec.json.encode(record))
            yield record

    if shown.form == "json":
        write_json(digested(), to)
    elif shown.form == "yaml":
        to.write("---\n")
        write_yaml(digested(), to)
    else:
        to.write(f"# {_clock_text()}\n")
        console = TerminalConsole(file=to, force_terminal=False, color_system=None, highlight=False)
        if not TableWriter(console, shown.columns, now_seconds=time.time()).write(digested()):
            to.write(f"no {plural(shown.noun)} found\n")
    return digest.digest()


def _clock_text() -> str:
    return time_text(int(time.time()) * NANOS_PER_SECOND) or ""
