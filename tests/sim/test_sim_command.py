"""`bigfleet sim` on the command line."""

from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Self

import pytest
from typer.testing import CliRunner

from bigfleet.cli.runtime.failures import UsageFault
from bigfleet.cli.sim.command import app
from bigfleet.cli.sim.seeds import SeedRun, plan_of, run_seeds, seed_run
from bigfleet.sim.observations import Violation
from bigfleet.sim.scenarios.runner import scenarios
from bigfleet.sim.world.run import run_plan
from bigfleet.sim.world.trace_files import write_trace

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
    first, second, tenth = (listed.output.index(f"\n{name} ") for name in ("S1", "S2", "S10"))
    assert first < second < tenth
    assert "impossible-gang: One gang wants eight machines in one rack, and racks hold four.\n" in listed.output


@pytest.mark.slow
def test_of_many_seeds_some_run_twice_and_another_course_is_a_breach(monkeypatch: pytest.MonkeyPatch) -> None:
    """S19, of every second seed."""
    call = ["run", "--seeds", "2..3", "--steps", "2", "--twice-every", "2"]
    same = RUNNER.invoke(app, call)
    runs = count(1)
    monkeypatch.setattr(
        "bigfleet.cli.sim.seeds.run_seed",
        lambda seed, steps: seed_run(run_plan(plan_of(seed + 100 * (next(runs) == 3), steps))),
    )
    other = RUNNER.invoke(app, call)

    assert (same.exit_code, other.exit_code) == (0, 1), other.output
    assert "A second run took another course" in other.output


@pytest.mark.long
def test_two_processes_run_seeds_as_one_does() -> None:
    """In the order of the seeds, whichever is done first; those that run twice run beside each other."""
    call = ["run", "--seeds", "2..3", "--steps", "2"]
    alone, together = RUNNER.invoke(app, call), RUNNER.invoke(app, [*call, "--jobs", "2", "--twice-every", "1"])

    assert (alone.exit_code, together.exit_code) == (0, 0), together.output
    assert alone.output.splitlines()[-1] == together.output.splitlines()[-1]


class _Pool:
    """In place of processes: the first run lasts until five others were begun, which are over at once."""

    def __init__(self, *_args: object, **_kinds: object) -> None:
        self.begun: list[Future[SeedRun]] = []
        self.going_on: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        assert all(run.done() for run in self.begun)

    def submit(self, _run: object, seed: int, _steps: object) -> Future[SeedRun]:
        self.begun.append(Future())
        self.going_on.append(sum(not run.done() for run in self.begun))
        if seed > 1:
            self.begun[-1].set_result(_seed_run(seed))
        if seed == 6:
            self.begun[0].set_result(_seed_run(1))
        return self.begun[-1]


def _seed_run(seed: int) -> SeedRun:
    return SeedRun(seed, f"hash {seed}", (), 1.0, 1, Counter(), Counter(), Counter(), Counter())


def test_a_long_run_leaves_no_process_idle_and_no_seed_is_asked_for_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds behind a long one are run meanwhile, and told after it; `--for` begins none that nobody has time for."""
    pool = _Pool()
    monkeypatch.setattr("bigfleet.cli.sim.seeds.ProcessPoolExecutor", lambda *_args, **_kinds: pool)

    runs = run_seeds(range(1, 9), jobs=2)

    assert next(runs).seed == 1
    assert len(pool.begun) == 6
    assert [run.seed for run in runs] == [2, 3, 4, 5, 6, 7, 8]
    assert max(pool.going_on) <= 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "--seeds", "9..1"], "write the lower one first: 1..9"),
        (["run", "--seeds", "0..10000000"], "names more than 10,000,000 seeds"),
        (["run", "--seeds", "a..b"], "is not a range"),
        (["run", "--seeds", "1..2", "--seed", "1"], "does not go with"),
        (["run", "--seeds", "1..2", "--for", "1s"], "does not go with"),
        (["run", "--for", "soon"], "--for"),
        (["run", "--for", "1s", "--trace", "t"], "does not go with"),
        (["run", "--require-marks"], "many seeds"),
        (["run", "--jobs", "2"], "many seeds"),
        (["run", "--twice-every", "2"], "many seeds"),
        (["run", "no-such-scenario"], "no scenario 'no-such-scenario' here; there are faults, operator, bound-counts"),
        (["run", "no-such-scenario", "--trace", "t"], "there are faults, operator, bound-counts"),
        (["run", "steady-state", "--seeds", "1..2"], "are for faults"),
        (["run", "steady-state", "--jobs", "2"], "are for faults"),
        (["run", "--trace", "t", "--timeline", "t"], "name two files"),
        (["replay", "/nowhere.gz"], "nowhere"),
    ],
)
def test_a_wrong_call_is_told_in_one_line(arguments: list[str], said: str) -> None:
    result = RUNNER.invoke(app, arguments)

    assert isinstance(result.exception, UsageFault), result.output
    assert said in str(result.exception)
    assert "\n" not in str(result.exception)


@pytest.mark.parametrize("command", ["run", "shrink"])
@pytest.mark.parametrize("option", ["--trace", "--timeline"])
def test_a_file_that_cannot_be_written_is_told_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, option: str
) -> None:
    monkeypatch.setattr("bigfleet.cli.sim.seeds.plan_of", lambda *_which: pytest.fail("it ran"))
    path = tmp_path / "not-there" / "file"

    result = RUNNER.invoke(app, [command, "--seed", "1", option, str(path)])

    assert isinstance(result.exception, UsageFault), result.output
    assert str(result.exception) == f"{path}: No such file or directory; name a file that can be written"


def test_a_file_that_is_there_is_not_touched_by_a_wrong_call(tmp_path: Path) -> None:
    kept, link, folder = tmp_path / "kept", tmp_path / "link", tmp_path / "folder"
    kept.write_text("of an earlier run")
    link.symlink_to(tmp_path / "nothing-yet")
    folder.mkdir()

    for trace in (kept, link):
        result = RUNNER.invoke(app, ["run", "--trace", str(trace), "--timeline", str(folder)])
        assert str(result.exception) == f"{folder}: Is a directory; name a file that can be written"

    assert kept.read_text() == "of an earlier run"
    assert sorted(tmp_path.iterdir()) == [folder, kept, link]


def test_a_scenario_that_is_cut_short_says_what_was_not_asked() -> None:
    result = RUNNER.invoke(app, ["run", "steady-state", "--steps", "2"])

    assert result.exit_code == 0, result.output
    assert "not asked: what must hold" in result.output


def test_outside_of_a_checkout_it_is_told_where_scenarios_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("bigfleet.sim.scenarios.runner.scenarios", lambda: scenarios(tmp_path))

    listed, result = RUNNER.invoke(app, ["list"]), RUNNER.invoke(app, ["run", "steady-state"])

    assert "none here; beside faults and operator, scenarios are in tests/cases/sim of a checkout" in listed.output
    assert isinstance(result.exception, UsageFault), result.output
    assert str(result.exception).endswith("scenarios are in tests/cases/sim of a checkout")


def test_a_replay_of_a_failing_run_fails_though_its_course_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    breach = Violation("S1", 5_000_000_000, "two clusters have it")
    sound = run_plan(plan_of(2, 1))
    monkeypatch.setattr("bigfleet.sim.world.run.run_plan", lambda _plan: replace(sound, violations=(breach,) * 12))
    write_trace(tmp_path / "t.gz", sound)

    again = RUNNER.invoke(app, ["replay", str(tmp_path / "t.gz")])

    assert again.exit_code == 1
    lines = again.output.splitlines()
    assert lines[:10] == ["VIOLATION S1 at 5.000 s: two clusters have it"] * 10
    assert lines[10] == "and 2 more"
    assert lines[-1] == "the same course as in the trace"


@pytest.mark.slow
def test_many_seeds_are_added_up_and_equal_on_several_cores() -> None:
    alone = RUNNER.invoke(app, ["run", "--seeds", "2..3", "--steps", "2"])
    together = RUNNER.invoke(app, ["run", "--seeds", "2..3", "--steps", "2", "--jobs", "2"])

    assert alone.exit_code == together.exit_code == 0, alone.output + together.output
    assert alone.output == together.output
    assert alone.output.startswith("2 seeds, ")


def test_the_operator_world_runs_from_the_command_and_refuses_a_trace(tmp_path: Path) -> None:
    ran = RUNNER.invoke(app, ["run", "operator", "--seeds", "4..4", "--steps", "1"])
    assert ran.exit_code == 0, ran.output
    assert "every invariant held" in ran.output
    assert ran.output.splitlines()[-1].startswith("trace hash: ")

    refused = RUNNER.invoke(app, ["run", "operator", "--trace", str(tmp_path / "t.gz")])
    assert isinstance(refused.exception, UsageFault)
    assert "--trace and --timeline are for faults, not for operator" in str(refused.exception)


def test_the_list_names_the_operator_world_and_its_invariants() -> None:
    listed = RUNNER.invoke(app, ["list"])

    for word in ("operator: ", "watches-expired", "K1 ", "K11", "The operator takes no pod away beyond"):
        assert word in listed.output
