"""Nothing that a peer names reaches a terminal as a control character, and every command prints where that holds."""

import io
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

import bigfleet.cli
from bigfleet.cli.get.columns import TableColumn
from bigfleet.cli.get.output import TableWriter, write_json, write_yaml
from bigfleet.cli.runtime.console import TerminalConsole
from bigfleet.cli.runtime.terminal import echo, echo_error
from bigfleet.cli.visible_text import (
    ERROR_CHARACTERS_MAX,
    error_line,
    visible,
    visible_cell,
    visible_json,
)
from tests.commands import run_here

#: Sets the title, clears the screen, starts a line of its own, and turns text around; the last is a CSI of one byte.
ATTACK = "cpu\x1b]0;owned\x07\x1b[2J\r\nadmin\tok\u202egpj\x9b2J"
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]")
#: The two modules that print for all others, and those that write documents or bytes of their own.
PRINTERS = {"runtime/terminal.py", "runtime/console.py"}
WRITERS = {"get/output.py", "get/watching.py", "replay/command.py", "hail/program.py", "up/child.py"}


def test_what_is_printed_has_no_control_character(capsys: pytest.CaptureFixture[str]) -> None:
    """By the two functions, to both streams."""
    echo(ATTACK)
    echo_error(ATTACK)
    output = capsys.readouterr()
    for text in (output.out, output.err):
        assert not UNSAFE.search(text)
        assert "cpu\\x1b]0;owned\\x07" in text


@pytest.mark.parametrize("terminal", [True, False])
def test_a_console_escapes_texts_tables_and_markup(terminal: bool) -> None:
    """Its own styles stay escape sequences, on a terminal alone."""
    written = io.StringIO()
    console = TerminalConsole(file=written, force_terminal=terminal, width=300)
    table = Table(ATTACK)
    table.add_row(Text(ATTACK, style="bold"))
    console.print(table)
    console.print(ATTACK, markup=False)
    styles = re.compile(r"\x1b\[[0-9;]*m")
    shown = styles.sub("", written.getvalue())
    assert bool(styles.search(written.getvalue())) is terminal
    assert not UNSAFE.search(shown)
    assert "\\x1b]0;owned" in shown


def test_tables_json_and_yaml_of_get_are_harmless() -> None:
    """One row stays one line, and a program that reads JSON gets the name as it is."""
    columns = [TableColumn(head="NAME", cell=lambda record, _now: str(record["name"]))]
    written = io.StringIO()
    TableWriter(TerminalConsole(file=written, width=300), columns, now_seconds=0).write([{"name": ATTACK}])
    assert len(written.getvalue().splitlines()) == 2
    for write in (write_json, write_yaml):
        document = io.StringIO()
        write([{"name": ATTACK}], document)
        written.write(document.getvalue())
        if write is write_json:
            assert json.loads(document.getvalue()) == [{"name": ATTACK}]
    assert not UNSAFE.search(written.getvalue())


@given(st.text())
def test_any_text_becomes_harmless_and_printable_text_is_unchanged(text: str) -> None:
    """A cell has one line."""
    assert not UNSAFE.search(visible(text))
    assert not set(visible_cell(text)) & {"\n", "\t"}
    assert json.loads(visible_json(json.dumps(text, ensure_ascii=False))) == text
    if text.isprintable():
        assert (visible(text), visible_cell(text)) == (text, text)


@given(st.text())
def test_an_error_is_one_line_of_bounded_length(text: str) -> None:
    """Short text that needs no escapes is unchanged."""
    line = error_line(text)
    assert not UNSAFE.search(line)
    assert not set(line) & {"\n", "\t"}
    assert len(error_line(text * 100)) <= ERROR_CHARACTERS_MAX
    if text.isprintable() and len(text) <= 120:
        assert line == text


LONG = "k" * 200_000


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (f"f.yaml: the key {LONG!r} is unknown", f"f.yaml: the key '{'k' * 90}…{'k' * 29}' is unknown"),
        (f"f.yaml: {LONG}: is missing", f"f.yaml: {'k' * 90}…{'k' * 28}: is missing"),
        ("a shard's id 'é' is the coordinator's, " * 4, "a shard's id 'é' is the coordinator's, " * 4),
        (f"/{'d/' * 120}f.yaml: is missing", f"/{'d/' * 120}f.yaml: is missing"),
        ("a\nb\x1b[31m: does not exist", "a\\nb\\x1b[31m: does not exist"),
    ],
    ids=["quotation", "word", "apostrophes", "path", "control characters"],
)
def test_an_error_shows_the_beginning_and_the_end_of_long_input(message: str, shown: str) -> None:
    assert error_line(message) == shown


@pytest.mark.parametrize("mark", ["'", "'\\", '"\\x', "('", "`'\""])
def test_an_error_with_many_quotation_marks_takes_no_long_time(mark: str) -> None:
    """A pattern that tries matches twice would not end."""
    assert len(error_line(mark * 200_000)) <= ERROR_CHARACTERS_MAX


MACHINE = '{"id": "m-1", "allocatable": {"cpu": "4"}}'
ROW = "- {id: r, cluster: c, shapes: [{resources: {cpu: 1}, count: 1}]}"


@pytest.mark.parametrize(
    ("name", "inventory", "demand"),
    [
        ("a\nb\x1b[31m", None, ROW),
        ("long-key", f'{{"id": "m-1", "{LONG}": 1}}', ROW),
        ("long-value", f'{{"id": "m-1", "state": "{LONG}"}}', ROW),
        ("long-row", MACHINE, f'- {{id: "{LONG}", cluster: c, group: 5}}'),
        ("long-row-of-words", MACHINE, f'- {{id: "{"k " * 100_000}", cluster: c, group: 5}}'),
        ("escape-row", MACHINE, '- {id: "r\\n\\e[31m", cluster: c, group: 5}'),
        ("escape-key", MACHINE, '- {id: r, cluster: c, "r\\n\\e[31m": 5}'),
    ],
)
def test_a_command_prints_one_short_line_about_wrong_input(
    tmp_path: Path, name: str, inventory: str | None, demand: str
) -> None:
    """Also where an error has the name of a file."""
    machines, rows = tmp_path / f"{name}.jsonl", tmp_path / "demand.yaml"
    if inventory is not None:
        machines.write_text(inventory, encoding="utf-8")
    rows.write_text(demand, encoding="utf-8")
    done = run_here("plan", "--inventory", str(machines), "--demand", str(rows))

    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert not UNSAFE.search(done.stderr)
    assert len(done.stderr) <= ERROR_CHARACTERS_MAX + 1


def test_every_command_prints_through_them() -> None:
    """No other module prints, makes a console, or writes to standard output."""
    folder = Path(bigfleet.cli.__file__).parent
    prints = re.compile(r"typer\.echo\(|click\.s?echo\(|(?<![.\w])print\(|(?<![\w.])Console\(|import rprint")
    writes = re.compile(r"sys\.std(out|err)\.write\(")
    found = []
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).as_posix()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            is_print = name not in PRINTERS and prints.search(line)
            is_write = name not in WRITERS and writes.search(line)
            if (is_print or is_write) and not line.lstrip().startswith(("def ", "#")):
                found.append(f"{name}:{number}: {line.strip()}")
    assert found == []
