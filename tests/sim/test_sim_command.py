"""`bigfleet sim` on the command line."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from bigfleet.cli.faults import UsageFault
from bigfleet.cli.sim.command import app

RUNNER = CliRunner()


def test_a_run_prints_a_summary_that_ends_with_its_hash_and_replays(tmp_path: Path) -> None:
    trace, page = tmp_path / "t.gz", tmp_path / "t.html"
    ran = RUNNER.invoke(app, ["run", "--seed", "2", "--steps", "3", "--trace", str(trace), "--timeline", str(page)])
    assert ran.exit_code == 0, ran.output
    last = ran.output.splitlines()[-1]
    assert last.startswith("trace hash: ")
    assert "every invariant held" in ran.output
    assert page.read_text().startswith("<!doctype html>")

    again = RUNNER.invoke(app, ["replay", str(trace)])
    assert again.exit_code == 0, again.output
    assert last in again.output
    assert again.output.splitlines()[-1] == "the same course as in the trace"


def test_the_list_names_the_world_its_faults_and_what_must_hold() -> None:
    listed = RUNNER.invoke(app, ["list"])

    assert listed.exit_code == 0
    for word in ("faults:", "shard-zombie", "S1 ", "S18", "L6", "A gang's machines are in one domain."):
        assert word in listed.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "--seeds", "9..1"], "names no seed"),
        (["run", "--seeds", "a..b"], "is no range"),
        (["run", "--seeds", "1..2", "--seed", "1"], "does not go with"),
        (["run", "--seeds", "1..2", "--for", "1s"], "does not go with"),
        (["run", "--for", "soon"], "--for"),
        (["run", "--for", "1s", "--trace", "t"], "does not go with"),
        (["run", "--require-marks"], "many seeds"),
        (["run", "no-such-scenario"], "no-such-scenario"),
        (["run", "steady-state", "--seeds", "1..2"], "are for faults"),
        (["replay", "/nowhere.gz"], "nowhere"),
    ],
)
def test_a_wrong_call_is_told_in_one_line(arguments: list[str], said: str) -> None:
    result = RUNNER.invoke(app, arguments)

    assert isinstance(result.exception, UsageFault), result.output
    assert said in str(result.exception)
    assert "\n" not in str(result.exception)


@pytest.mark.slow
def test_many_seeds_are_added_up_and_equal_on_several_cores() -> None:
    alone = RUNNER.invoke(app, ["run", "--seeds", "2..3", "--steps", "2"])
    together = RUNNER.invoke(app, ["run", "--seeds", "2..3", "--steps", "2", "--jobs", "2"])

    assert alone.exit_code == together.exit_code == 0, alone.output + together.output
    assert alone.output == together.output
    assert alone.output.startswith("2 seeds, ")
