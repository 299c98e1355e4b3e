"""Writes records as a table, JSON or YAML while they arrive: at most one block of rows is in memory.

On a terminal a table drops columns by rank until it fits, and says so; elsewhere it has all columns. JSON is one array
with one object a line, YAML one list. This module does not decide what a record or a column is.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Final, Literal, TextIO

import msgspec
import yaml
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from bigfleet.cli.get.columns import NOTHING, TableColumn
from bigfleet.cli.get.records import Record
from bigfleet.cli.visible_text import visible, visible_cell, visible_json

#: Rows that are laid out together; later blocks only ever widen a column.
BLOCK_ROWS_MAX: Final = 500
#: Columns keep that many blanks between them.
GAP: Final = 2
#: A flexible column makes room for the others down to this.
FLEXIBLE_MIN: Final = 20
_Dumper: Final = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def write_json(records: Iterable[Record], to: TextIO) -> int:
    """Write one array, an object a line; return how many."""
    return _write_list(records, to, start="[", between=",", end="\n]\n", none="[]\n", encode=_json_line)


def write_yaml(records: Iterable[Record], to: TextIO) -> int:
    """Write one list; return how many entries it has."""
    return _write_list(records, to, start="", between="", end="", none="[]\n", encode=_yaml_entry)


def _json_line(record: Record) -> str:
    return "\n" + visible_json(msgspec.json.encode(record).decode())


def _yaml_entry(record: Record) -> str:
    text = _yaml(record, allow_unicode=True)
    # YAML itself escapes control characters, but not the marks that change the direction of text.
    return text if visible(text) == text else _yaml(record, allow_unicode=False)


def _yaml(record: Record, *, allow_unicode: bool) -> str:
    return str(yaml.dump([record], Dumper=_Dumper, sort_keys=False, allow_unicode=allow_unicode, width=1_000_000))


def _write_list(
    records: Iterable[Record],
    to: TextIO,
    *,
    start: str,
    between: str,
    end: str,
    none: str,
    encode: Callable[[Record], str],
) -> int:
    count = 0
    for record in records:
        to.write((between if count else start) + encode(record))
        count += 1
    to.write(end if count else none)
    return count


class TableWriter:
    """Lays out one table, block after block, for a terminal or for a file."""

    def __init__(self, console: Console, columns: Sequence[TableColumn], *, now_seconds: float) -> None:
        self._console = console
        self._now_seconds = now_seconds
        self._columns = list(columns)
        self._widths = [cell_len(column.head) for column in columns]
        self._is_laid_out = False
        #: Heads of the columns that made room.
        self.hidden: list[str] = []

    def write(self, records: Iterable[Record]) -> int:
        """Write every record as it arrives; return how many. Without any nothing is written, not even the heads."""
        count = 0
        records = iter(records)
        while block := list(islice(records, BLOCK_ROWS_MAX)):
            self.write_block(block)
            count += len(block)
        return count

    def write_block(self, block: Sequence[Record]) -> None:
        """Write some records, the heads before the first."""
        if self._console.is_terminal:
            self._console.print(self.table(block))
            return
        # Elsewhere there are no styles and lines are as long as they are: a hundred thousand need no layout of rich's.
        rows = self._cells(block)
        if not self._is_laid_out:
            rows.insert(0, [column.head for column in self._columns])
        self._is_laid_out = True
        self._console.file.write("".join(self._line(row) for row in rows))

    def table(self, block: Sequence[Record]) -> Table:
        """Return some records as rows, under the heads if they are the first; the first ones choose the columns."""
        is_first = not self._is_laid_out
        if is_first and self._console.is_terminal:
            self._choose(block)
        self._is_laid_out = True
        cells = self._cells(block)
        table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold", show_header=is_first)
        for column, width in zip(self._columns, self._fitting_widths(), strict=True):
            side: Literal["left", "right"] = "right" if column.right else "left"
            table.add_column(column.head, width=width, justify=side, no_wrap=True, overflow="ellipsis")
        for record, row in zip(block, cells, strict=True):
            # As text: ids and errors may hold what rich would take for markup.
            table.add_row(
                *(Text(text, style=column.style(record)) for column, text in zip(self._columns, row, strict=True))
            )
        return table

    def _cells(self, block: Sequence[Record]) -> list[list[str]]:
        """Return the texts of some records, and widen the columns to hold them."""
        cells = [[visible_cell(column.cell(record, self._now_seconds)) for column in self._columns] for record in block]
        for place, texts in enumerate(zip(*cells, strict=True)):
            self._widths[place] = max(self._widths[place], *map(cell_len, texts))
        return cells

    def _line(self, row: Sequence[str]) -> str:
        parts = []
        for column, width, text in zip(self._columns, self._widths, row, strict=True):
            blanks = " " * (width - cell_len(text))
            parts.append(blanks + text if column.right else text + blanks)
        return (" " * GAP).join(parts).rstrip() + "\n"

    def _fitting_widths(self) -> list[int]:
        if not (self._console.is_terminal and self._columns[-1].flexible):
            return list(self._widths)
        *others, last = self._widths
        left = self._console.width - sum(others) - GAP * (len(others) + 1)
        return [*others, max(1, min(last, left))]

    def _choose(self, block: Sequence[Record]) -> None:
        """Drop columns until the rows fit into the terminal: those that say nothing, then those of the highest rank."""
        cells = {column.head: [column.cell(record, self._now_seconds) for record in block] for column in self._columns}
        natural = {head: max(cell_len(head), *map(cell_len, texts)) for head, texts in cells.items()}

        def worth(place: int) -> tuple[bool, int, int]:
            column = self._columns[place]
            # Of equals the rightmost is worth least.
            return any(text != NOTHING for text in cells[column.head]), -column.rank, -place

        while self._needed(natural) > self._console.width:
            droppable = [place for place, column in enumerate(self._columns) if column.rank]
            if not droppable:
                break
            self.hidden.append(self._columns.pop(min(droppable, key=worth)).head)
        self._widths = [cell_len(column.head) for column in self._columns]

    def _needed(self, natural: dict[str, int]) -> int:
        widths = (
            min(natural[column.head], FLEXIBLE_MIN) if column.flexible else natural[column.head]
            for column in self._columns
        )
        return sum(widths) + GAP * len(self._columns)


def print_trimmed(console: Console, shown: RenderableType) -> None:
    """Print; where there is no terminal, lines end where their text ends."""
    if console.is_terminal:
        console.print(shown)
        return
    with console.capture() as captured:
        console.print(shown)
    console.file.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def footer(count: int, noun: str, hidden: Sequence[str], *, below: int = 0) -> str:
    """Return the line below a table on a terminal, where `below` of the rows are not to be seen."""
    text = f"{count:,} {noun if count == 1 else plural(noun)}"
    if below:
        text += f", {below:,} of them below the edge"
    if hidden:
        text += f"; no room for {', '.join(hidden)} (a wider terminal or -o json shows them)"
    return text


def plural(noun: str) -> str:
    """Return a noun in the plural."""
    return f"{noun}s"


@contextmanager
def quiet_when_unread() -> Iterator[None]:
    """Stop silently when the reader closes the pipe, as in `bigfleet get machines | head`."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # What is still in the buffer has nowhere to go, and the interpreter would complain about it at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
