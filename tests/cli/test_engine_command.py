"""`bigfleet engine check` and `bigfleet engine decide`: what they print, write and refuse, and how they exit."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from bigfleet.cli.engine.command import app
from bigfleet.cli.engine.registry import ENGINES, engine_named
from bigfleet.cli.faults import UsageFault
from tests.engine_cases import CASES_DIRECTORY, load_fleets
from tests.processes import run_bigfleet

GOOD = {"name": "good", "stage": "table", "fn": "bucket_upper_dollars", "rows": [{"in": 3, "out": 1.0}]}
WRONG = {"name": "wrong", "stage": "table", "fn": "bucket_upper_dollars", "rows": [{"in": 3, "out": 2.0}]}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), catch_exceptions=True)


def write_cases(folder: Path, *cases: object, name: str = "topic.yaml") -> None:
    (folder / name).write_text(yaml.safe_dump(list(cases)), encoding="utf-8")


def refusal(*arguments: str) -> str:
    """Return the one line of a call that is refused with exit 2."""
    finished = run_bigfleet("engine", *arguments)
    assert finished.returncode == 2, finished.stdout
    (line,) = finished.stderr.splitlines()
    return line


@pytest.mark.parametrize("engine", ENGINES)
def test_the_cases_of_the_project_pass_on_every_engine(engine: str) -> None:
    result = run("check", str(CASES_DIRECTORY), "--engine", engine)

    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1].endswith(" passed, 0 failed")


def test_a_failing_case_is_one_line_and_the_count_stands_last(tmp_path: Path) -> None:
    write_cases(tmp_path, GOOD, WRONG)

    result = run("check", str(tmp_path))

    assert result.exit_code == 1
    assert result.output.splitlines() == ["FAILED topic.yaml wrong: 3: expected 2.0, got 1.0", "1 passed, 1 failed"]


def test_what_cannot_be_understood_fails_like_a_wrong_answer(tmp_path: Path) -> None:
    write_cases(tmp_path, GOOD, {"name": "odd", "stage": "dance"}, {"name": "bare", "stage": "cycle"}, GOOD)
    (tmp_path / "broken.yaml").write_text("a: [", encoding="utf-8")
    (tmp_path / "fleets.jsonl").write_text('{"seed": 7, "options": {}, "inventory": [], "demand": []}\n', "utf-8")

    result = run("check", str(tmp_path))

    assert result.exit_code == 1
    lines = result.output.splitlines()
    assert lines[0].startswith("FAILED broken.yaml: not YAML")
    assert lines[1].startswith("FAILED topic.yaml odd: stage 'dance' is unknown; there are cycle, multi")
    assert lines[2] == "FAILED topic.yaml bare: KeyError: 'needs'"
    assert lines[3] == "FAILED topic.yaml good: the name 'good' stands in the folder already"
    assert lines[4] == "FAILED fleets.jsonl line 1 seed 7: decision is missing or no object"
    assert lines[5] == "1 passed, 5 failed"


def test_a_recorded_decision_that_differs_names_the_field(tmp_path: Path) -> None:
    fleet = dict(load_fleets()[0])
    fleet["decision"] = {**fleet["decision"], "order": ["n99"]}
    (tmp_path / "fleets.jsonl").write_text(json.dumps(fleet) + "\n", encoding="utf-8")

    result = run("check", str(tmp_path))

    assert result.exit_code == 1
    assert result.output.splitlines()[0].split(": expected")[0].endswith(f"seed {fleet['seed']}: decision.order")


def test_a_folder_without_a_readable_case_file_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "text.yaml").write_text("just text", encoding="utf-8")

    assert "no readable case file; *.yaml and *.jsonl files are read" in refusal("check", str(empty))
    assert "a list of cases is expected" in refusal("check", str(tmp_path))
    assert "no such folder" in refusal("check", str(tmp_path / "nowhere"))


def test_an_unknown_engine_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(UsageFault, match="--engine: 'fast' is unknown; choose one of reference"):
        engine_named("fast")
    assert "'fast' is unknown" in refusal("check", str(CASES_DIRECTORY), "--engine", "fast")


def test_decide_writes_the_recorded_decisions(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"

    result = run("decide", str(CASES_DIRECTORY / "decisions.jsonl"), "--out", str(out))

    assert (result.exit_code, result.output) == (0, f"30 decisions written to {out}\n")
    written = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert written == [{"seed": fleet["seed"], "decision": fleet["decision"]} for fleet in load_fleets()]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: a JSON object is expected"),
        ('{"options": {}, "inventory": []}', "line 2: demand is missing or no list"),
        ('{"options": {}, "inventory": [], "demand": []}', "line 2: the field 'now' is missing"),
        ('{"options": {}, "inventory": [{"id": "m", "state": "Odd"}], "demand": []}', "line 2: the field"),
        ('{"options": {}, "inventory": [3], "demand": []}', "line 2: a field has a wrong value"),
    ],
)
def test_decide_names_the_line_of_a_wrong_fleet_and_writes_nothing(tmp_path: Path, line: str, fault: str) -> None:
    fleets, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    fleets.write_text(json.dumps(load_fleets()[0]) + "\n" + line + "\n", encoding="utf-8")

    assert f"bigfleet: {fleets} {fault}" in refusal("decide", str(fleets), "--out", str(out))
    assert not out.exists()


def test_decide_refuses_a_file_without_fleets_and_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n", encoding="utf-8")

    assert "the file has no fleet" in refusal("decide", str(tmp_path / "empty.jsonl"), "--out", str(tmp_path / "o"))
    assert "No such file" in refusal("decide", str(tmp_path / "absent.jsonl"), "--out", str(tmp_path / "o"))
    fleets = str(CASES_DIRECTORY / "decisions.jsonl")
    finished = run_bigfleet("engine", "decide", fleets, "--out", str(tmp_path / "no" / "dir"))
    assert (finished.returncode, len(finished.stderr.splitlines())) == (1, 1)
