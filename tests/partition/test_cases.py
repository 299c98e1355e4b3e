"""The shared cases: what Ganeti's hail printed for 50 messages, byte for byte (tests/cases/hail/)."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.partition.real_hail import HAIL, need_hail, we_say

FOLDER = Path(__file__).parent.parent / "cases" / "hail"
CASES: list[dict[str, Any]] = json.loads((FOLDER / "manifest.json").read_text(encoding="utf-8"))


def message_of(case: dict[str, Any]) -> bytes:
    """Return the input of a case."""
    return (FOLDER / f"{case['case']}.json").read_bytes()


def test_there_are_fifty_cases() -> None:
    assert len(CASES) == 50
    assert sum(case["dedicated"] for case in CASES) == 43


def test_the_recorded_outputs_are_those_of_the_manifest() -> None:
    recorded = {
        case["case"]: (FOLDER / f"{case['case']}.out").read_text(encoding="utf-8").rstrip("\n") for case in CASES
    }

    assert recorded == {case["case"]: case["out"] for case in CASES}


@pytest.mark.parametrize("case", [case for case in CASES if case["dedicated"]], ids=lambda case: str(case["case"]))
def test_a_dedicated_request_is_answered_as_hail_does(case: dict[str, Any]) -> None:
    said = we_say(message_of(case), case["args"])

    assert (said.code, said.output) == (case["exit"], case["out"] + "\n")


@pytest.mark.parametrize("case", [case for case in CASES if case["exit"]], ids=lambda case: str(case["case"]))
def test_bad_input_ends_with_one_line_and_exit_code_1(case: dict[str, Any]) -> None:
    said = we_say(message_of(case), case["args"])

    assert (said.code, said.output) == (case["exit"], "")
    assert said.errors.startswith("Error: ")
    assert said.errors.count("\n") == 1


ORDINARY = [case for case in CASES if not case["dedicated"] and not case["exit"]]


@pytest.mark.parametrize("case", ORDINARY, ids=lambda case: str(case["case"]))
def test_an_ordinary_request_is_refused_in_a_reply_that_says_so(case: dict[str, Any]) -> None:
    said = we_say(message_of(case), case["args"])
    reply = json.loads(said.output)

    assert (said.code, reply["success"], reply["result"]) == (0, False, [])
    assert "--ordinary-allocator" in reply["info"]


@pytest.mark.parametrize("case", ORDINARY, ids=lambda case: str(case["case"]))
def test_an_ordinary_request_is_answered_by_the_allocator_that_was_named(case: dict[str, Any]) -> None:
    need_hail()
    said = we_say(message_of(case), [*case["args"], f"--ordinary-allocator={HAIL}"])

    assert (said.code, said.output) == (case["exit"], case["out"] + "\n")
