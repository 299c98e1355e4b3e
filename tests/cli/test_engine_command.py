"""`bigfleet engine check` and `bigfleet engine decide`: what they print, write and refuse, and how they exit."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from bigfleet.cli.engine import both
from bigfleet.cli.engine.command import app
from bigfleet.cli.engine.registry import CHOICES, engine_named
from bigfleet.cli.runtime.failures import RunFault, UsageFault
from bigfleet.engine.decision import Decision, Options
from bigfleet.engine.explain.records import Record, Reporter, RowRef, RowStarted
from bigfleet.engine.reference import decide as reference
from bigfleet.engine.snapshot import Snapshot
from bigfleet.model.need import Need
from tests.commands import run_here
from tests.engine_cases import CASES_DIRECTORY, load_fleets

GOOD = {"name": "good", "stage": "table", "fn": "bucket_upper_dollars", "rows": [{"in": 3, "out": 1.0}]}
WRONG = {"name": "wrong", "stage": "table", "fn": "bucket_upper_dollars", "rows": [{"in": 3, "out": 2.0}]}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), catch_exceptions=True)


def write_cases(folder: Path, *cases: object, name: str = "topic.yaml") -> None:
    (folder / name).write_text(yaml.safe_dump(list(cases)), encoding="utf-8")


def refusal(*arguments: str) -> str:
    """Return the one line of a call that is refused with exit 2."""
    result = run(*arguments)
    assert isinstance(result.exception, UsageFault), result.output
    (line,) = str(result.exception).splitlines()
    return line


@pytest.mark.parametrize("engine", CHOICES)
def test_the_cases_of_the_project_pass_on_every_engine(engine: str) -> None:
    result = run("check", str(CASES_DIRECTORY), "--engine", engine)

    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1].endswith(" passed, 0 failed")


def test_a_failing_case_is_one_line_and_the_count_stands_last(tmp_path: Path) -> None:
    write_cases(tmp_path, GOOD, WRONG)

    result = run("check", str(tmp_path))

    assert result.exit_code == 1
    assert result.output.splitlines() == [
        "FAILED topic.yaml wrong on reference: 3: expected 2.0, got 1.0",
        "1 passed, 1 failed",
    ]


def test_what_cannot_be_understood_fails_like_a_wrong_answer(tmp_path: Path) -> None:
    write_cases(tmp_path, GOOD, {"name": "odd", "stage": "dance"}, {"name": "bare", "stage": "cycle"}, GOOD)
    (tmp_path / "broken.yaml").write_text("a: [", encoding="utf-8")
    (tmp_path / "fleets.jsonl").write_text('{"seed": 7, "options": {}, "inventory": [], "demand": []}\n', "utf-8")

    result = run("check", str(tmp_path))

    assert result.exit_code == 1
    lines = result.output.splitlines()
    assert lines[0].startswith("FAILED broken.yaml: not YAML")
    assert lines[1].startswith("FAILED topic.yaml odd on reference: stage 'dance' is unknown; there are cycle, multi")
    assert lines[2] == "FAILED topic.yaml bare on reference: KeyError: 'needs'"
    assert lines[3] == "FAILED topic.yaml good: the name 'good' is used twice in the folder"
    assert lines[4] == "FAILED fleets.jsonl line 1 seed 7: decision is missing or no object"
    assert lines[5] == "1 passed, 5 failed"


def test_a_recorded_decision_that_differs_names_the_field(tmp_path: Path) -> None:
    fleet = dict(load_fleets()[0])
    fleet["decision"] = {**fleet["decision"], "order": ["n99"]}
    (tmp_path / "fleets.jsonl").write_text(json.dumps(fleet) + "\n", encoding="utf-8")

    result = run("check", str(tmp_path))

    assert result.exit_code == 1
    assert (
        result.output.splitlines()[0]
        .split(": expected")[0]
        .endswith(f"seed {fleet['seed']} on reference: decision.order")
    )


def test_a_folder_without_a_readable_case_file_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "text.yaml").write_text("just text", encoding="utf-8")

    assert "no readable case file; *.yaml and *.jsonl files are read" in refusal("check", str(empty))
    assert "not a list of cases" in refusal("check", str(tmp_path))
    assert "no such folder" in refusal("check", str(tmp_path / "nowhere"))


def test_an_unknown_engine_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(UsageFault, match="--engine: 'fast' is unknown; choose one of reference, columnar, both"):
        engine_named("fast")
    finished = run_here("engine", "check", str(CASES_DIRECTORY), "--engine", "fast")
    assert (finished.returncode, len(finished.stderr.splitlines())) == (2, 1)
    assert "'fast' is unknown" in finished.stderr


@pytest.mark.parametrize("engine", CHOICES)
def test_decide_writes_the_recorded_decisions_once(tmp_path: Path, engine: str) -> None:
    out = tmp_path / "out.jsonl"

    result = run("decide", str(CASES_DIRECTORY / "decisions.jsonl"), "--out", str(out), "--engine", engine)

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

    assert refusal("decide", str(fleets), "--out", str(out)).startswith(f"{fleets} {fault}")
    assert not out.exists()


def test_decide_refuses_a_file_without_fleets_and_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n", encoding="utf-8")

    assert "the file has no fleet" in refusal("decide", str(tmp_path / "empty.jsonl"), "--out", str(tmp_path / "o"))
    assert "No such file" in refusal("decide", str(tmp_path / "absent.jsonl"), "--out", str(tmp_path / "o"))
    fleets = str(CASES_DIRECTORY / "decisions.jsonl")
    finished = run_here("engine", "decide", fleets, "--out", str(tmp_path / "no" / "dir"))
    assert (finished.returncode, len(finished.stderr.splitlines())) == (1, 1)


# ---- both engines ------------------------------------------------------------------------------------------------

CYCLE = {
    "name": "one machine",
    "stage": "cycle",
    "machines": [{"id": "m", "t": "T4", "st": "Idle"}],
    "needs": [{"id": "n", "t": "P4", "agg": {"cpu": "4"}}],
    "expect": {"acts": ["Bootstrap m c1"]},
}


class OtherEngine:
    """The reference, which one test makes wrong in one place."""

    def __init__(
        self,
        *,
        spoil: Callable[[Decision], Decision] = lambda decision: decision,
        spoil_record: Callable[[Record], Record] = lambda record: record,
    ) -> None:
        self._spoil = spoil
        self._spoil_record = spoil_record

    def __call__(
        self, snapshot: Snapshot, demand: Sequence[Need], options: Options, reporter: Reporter | None = None, /
    ) -> Decision:
        listener = None if reporter is None else Listener(reporter, self._spoil_record)
        return self._spoil(reference.decide(snapshot, demand, options, listener))


class Listener:
    """Passes records on, changed."""

    def __init__(self, reporter: Reporter, spoil: Callable[[Record], Record]) -> None:
        self._reporter = reporter
        self._spoil = spoil

    def wants_row(self, row: RowRef) -> bool:
        return self._reporter.wants_row(row)

    def wants_machine(self, machine_id: str) -> bool:
        return self._reporter.wants_machine(machine_id)

    def report(self, record: Record) -> None:
        self._reporter.report(self._spoil(record))


def use_other(monkeypatch: pytest.MonkeyPatch, other: OtherEngine) -> None:
    """Have the command hold the reference and this engine to one answer."""
    monkeypatch.setattr(both, "engine_named", lambda name: reference.decide if name == "reference" else other)


def no_actions(decision: Decision) -> Decision:
    return replace(decision, actions=())


def other_domain(decision: Decision) -> Decision:
    return replace(decision, rows=tuple(replace(row, domain="elsewhere") for row in decision.rows))


def other_rank(record: Record) -> Record:
    return replace(record, rank=7) if isinstance(record, RowStarted) else record


def fails(decision: Decision) -> Decision:
    raise ValueError("out of range")


@pytest.mark.parametrize(
    ("other", "fault"),
    [
        (
            OtherEngine(spoil=no_actions),
            " on columnar: acts: expected ['Bootstrap m c1'], got []; on reference and columnar: the engines differ: "
            "decision.actions[0]: reference Action(kind=<ActionKind.BOOTSTRAP: 1>, machine_id='m'",
        ),
        (
            OtherEngine(spoil=other_domain),
            " on reference and columnar: the engines differ: decision.rows[0].domain: reference '', columnar "
            "'elsewhere'",
        ),
        (
            OtherEngine(spoil_record=other_rank),
            " on reference and columnar: the engines differ: records[0].rank: reference 0, columnar 7",
        ),
        (
            OtherEngine(spoil=fails),
            " on columnar: ValueError: out of range; on reference and columnar: the engines differ: reference "
            "decides, columnar fails (ValueError('out of range'))",
        ),
    ],
    ids=["action", "field that the case does not name", "record", "crash"],
)
def test_where_the_engines_differ_is_one_line_that_names_engine_and_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: OtherEngine, fault: str
) -> None:
    write_cases(tmp_path, GOOD, CYCLE)
    use_other(monkeypatch, other)

    result = run("check", str(tmp_path), "--engine", "both")

    assert result.exit_code == 1
    line, count = result.output.splitlines()
    assert line.startswith(f"FAILED topic.yaml one machine{fault}")
    assert count == "1 passed, 1 failed"


def test_a_case_that_both_engines_miss_alike_names_both(tmp_path: Path) -> None:
    write_cases(tmp_path, {**CYCLE, "expect": {"acts": []}})

    result = run("check", str(tmp_path), "--engine", "both")

    assert result.output.splitlines() == [
        "FAILED topic.yaml one machine on reference and columnar: acts: expected [], got ['Bootstrap m c1']",
        "0 passed, 1 failed",
    ]


def test_decide_with_engines_that_differ_names_seed_and_field_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleets, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    fleets.write_text("".join(json.dumps(fleet) + "\n" for fleet in load_fleets()[:2]), encoding="utf-8")
    use_other(monkeypatch, OtherEngine(spoil=other_domain))

    result = run("decide", str(fleets), "--out", str(out), "--engine", "both")

    assert isinstance(result.exception, RunFault)
    assert result.exception.exit_code == 1
    message = str(result.exception)
    assert message.startswith(f"{fleets} line 1 seed {load_fleets()[0]['seed']}: the engines differ: decision.rows[0].")
    assert message.endswith("domain: reference '', columnar 'elsewhere'")
    assert not out.exists()


def test_a_part_that_is_missing_or_of_another_kind_is_named() -> None:
    assert both.first_difference((1, 2), [1, 2]) == ("", (1, 2), [1, 2])
    assert both.first_difference({"a": (1, 2)}, {"a": (1,)}) == ("['a'][1]", 2, both._NOTHING)
    assert both.first_difference({"a": 1}, {"a": 1, "b": 2}) == ("['b']", both._NOTHING, 2)
    assert both.first_difference("same", "same") is None
    assert repr(both._NOTHING) == "nothing"
