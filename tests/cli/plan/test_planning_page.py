"""docs/planning.md shows what the commands print: every example on the page is run."""

import re
from pathlib import Path

import pytest

from tests.commands import run_here

PAGE = Path(__file__).parents[3] / "docs" / "planning.md"
FILES = re.compile(r"`([\w.-]+)`:\n\n```\w+\n(.*?)```\n", re.DOTALL)
EXAMPLES = re.compile(r"```console\n\$ bigfleet ([^\n]*)\n(.*?)```\n", re.DOTALL)


def examples() -> list[tuple[str, str]]:
    """Return command line and output of every example."""
    found = EXAMPLES.findall(PAGE.read_text(encoding="utf-8"))
    assert found, "the page has no example"
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("command", "shown"), examples(), ids=[command for command, _shown in examples()])
def test_an_example_prints_what_the_page_shows(tmp_path: Path, command: str, shown: str) -> None:
    for name, text in FILES.findall(PAGE.read_text(encoding="utf-8")):
        (tmp_path / name).write_text(text, encoding="utf-8")

    finished = run_here(*command.split(), cwd=tmp_path)

    printed = [line.rstrip() for line in (finished.stdout + finished.stderr).splitlines()]
    # An example may leave out the beginning, which another one shows already.
    expected = shown.rstrip("\n").removeprefix("[…]\n").splitlines()
    assert expected == (printed[-len(expected) :] if shown.startswith("[…]\n") else printed)
