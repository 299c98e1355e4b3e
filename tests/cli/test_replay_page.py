"""docs/replay.md shows what the command prints: every example on the page is run on a recording of the same course."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from bigfleet.cli.main import app
from bigfleet.sim.kernel.virtual_time import run_virtual
from tests.cli.plan.test_planning_page import EXAMPLES, FILES
from tests.cli.test_replay_command import course

PAGE = Path(__file__).parent.parent.parent / "docs" / "replay.md"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files of the page."""
    folder = tmp_path_factory.mktemp("page")
    run_virtual(lambda: course(folder / "shard.rec"))
    for name, text in FILES.findall(PAGE.read_text(encoding="utf-8")):
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize(("command", "shown"), EXAMPLES.findall(PAGE.read_text(encoding="utf-8")))
def test_an_example_prints_what_the_page_shows(
    place: Path, command: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    finished = CliRunner().invoke(app, command.split(), env={"COLUMNS": "200"}, catch_exceptions=False)

    assert finished.exit_code == 0, finished.stderr
    printed = [line.rstrip() for line in finished.stdout.splitlines()]
    expected = shown.rstrip("\n").removeprefix("[…]\n").splitlines()
    assert expected == (printed[-len(expected) :] if shown.startswith("[…]\n") else printed)
