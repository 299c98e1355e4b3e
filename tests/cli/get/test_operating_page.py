"""docs/operating.md shows what the commands print: the heads of its tables are those of the commands."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from bigfleet.cli.get import columns
from bigfleet.cli.get.columns import TableColumn
from tests.commands import run_here

PAGE = Path(__file__).parents[3] / "docs" / "operating.md"
TABLES: dict[str, Sequence[TableColumn]] = {
    "machines": columns.MACHINES,
    "needs": columns.NEEDS,
    "shortfalls": columns.SHORTFALLS,
    "clusters": columns.CLUSTERS,
    "actions": columns.ACTIONS,
    "sessions": columns.SESSIONS,
    "sessions --totals": columns.SESSION_TOTALS,
}

#: What alerts of the coordinator have a reader look at; docs/coordinator.md describes them.
COORDINATOR = ("shards", "domains", "bindings", "moves", "instructions")


def examples() -> dict[str, str]:
    """Return the output of every example by its command."""
    return dict(re.findall(r"```console\n\$ bigfleet ([^\n]*)\n(.*?)```\n", PAGE.read_text("utf-8"), re.DOTALL))


@pytest.mark.parametrize("what", TABLES)
def test_every_table_is_shown_with_its_heads(what: str) -> None:
    (shown,) = (
        output for command, output in examples().items() if re.fullmatch(rf"get {what}( -c \w+)?", command) and output
    )

    assert re.split(r"\s{2,}", shown.splitlines()[0].strip()) == [column.head for column in TABLES[what]]


def test_the_failure_that_is_shown_is_told_like_that() -> None:
    command, shown = next((command, output) for command, output in examples().items() if "--addr" in command)

    assert run_here(*command.split()).stderr == shown


def test_every_command_and_flag_on_the_page_exists() -> None:
    """Each is in the help of its command."""
    named = re.findall(r"bigfleet ((?:get|explain) \w+)([^`\n]*)", PAGE.read_text("utf-8"))
    flags: dict[str, set[str]] = {}
    for command, rest in named:
        flags.setdefault(command, set()).update(re.findall(r"(?<!\S)--?[a-z][a-z-]*", rest.split("|")[0]))

    whats = {what.split()[0] for what in TABLES} | {*COORDINATOR}
    assert set(flags) == {*(f"get {what}" for what in whats), "explain need", "explain machine"}
    for command, used in flags.items():
        told = run_here(*command.split(), "--help").stdout
        assert {flag for flag in used if not re.search(rf"(?<!\S|,){flag}\b|,{flag}\b", told)} == set(), command
