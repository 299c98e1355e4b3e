"""The help of every command: whole option names at 80 columns, no command without a description."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from bigfleet.cli.main import RootGroup, app

COLUMNS = 80


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command with the words that name it."""
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


#: `hail` parses its own arguments; the commands of `provider admin` need --state before they show their help.
ALL = [
    (path, command)
    for path, command in commands(typer.main.get_command(app))
    if path != ("hail",) and path[:2] != ("provider", "admin")
]


@pytest.mark.parametrize(("path", "command"), ALL, ids=[" ".join(path) or "bigfleet" for path, _ in ALL])
def test_help_shows_every_option_by_its_whole_name(path: tuple[str, ...], command: Any) -> None:
    shown = CliRunner().invoke(app, [*path, "--help"], terminal_width=COLUMNS)
    words = set(shown.output.replace(",", " ").split())

    assert shown.exit_code == 0
    assert {option for each in command.params for option in each.opts if option.startswith("-")} <= words
    assert max(len(line) for line in shown.output.splitlines()) <= COLUMNS


@pytest.mark.parametrize(("path", "command"), ALL, ids=[" ".join(path) or "bigfleet" for path, _ in ALL])
def test_a_heading_has_only_options_of_its_command(path: tuple[str, ...], command: Any) -> None:
    """Else a renamed option would silently lose its place in the help."""
    grouped = {option for options in getattr(command, "sections", {}).values() for option in options}
    known = {option for each in command.params for option in each.opts}

    assert grouped <= known or path[0] == "provider", "only the commands of a provider share headings"


def test_a_group_shows_whole_sentences() -> None:
    shown = CliRunner().invoke(app, ["get", "--help"], terminal_width=COLUMNS).output

    assert "..." not in shown.replace("[ARGS]...", "")


@pytest.mark.parametrize("name", RootGroup.sources)
def test_the_help_of_the_root_says_what_each_command_says(name: str) -> None:
    """The root's help is shown without loading the commands, so it has their first sentences."""
    root: Any = typer.main.get_command(app)
    command = root.commands[name]

    assert RootGroup.sources[name].summary == command.get_short_help_str(400)
    assert not command.hidden


def test_a_call_loads_no_other_command() -> None:
    """Each process would pay for all of them."""
    program = (
        "import sys\n"
        "from bigfleet.cli.main import app\n"
        "app(sys.argv[1:], standalone_mode=False)\n"
        "print(*sorted(each for each in sys.modules if each.startswith('bigfleet.cli.') and each.endswith('.command')))"
    )

    def loaded(*arguments: str) -> str:
        call = [sys.executable, "-c", program, *arguments]
        return subprocess.run(call, check=True, capture_output=True, text=True).stdout.splitlines()[-1]

    assert loaded("--help") == ""
    assert loaded("audit", "--help") == "bigfleet.cli.audit.command"
