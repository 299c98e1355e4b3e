"""Every constraint of the charts' values.schema.json: helm refuses a value that violates it, and names its place."""

import copy
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.charts import CHARTS, NAMES, needs_helm, run_program
from tests.deploy.schema_violations import PATTERNS, Schema, Violation, together, violate

#: As helm prints a refusal; "validation failed" is the heading of several.
_REFUSAL = re.compile(r"^\s*- at '(?P<place>[^']*)': (?!validation failed$)(?P<fault>.*)$", re.MULTILINE)


def schema_of(chart: str) -> Schema:
    return Schema(json.loads((CHARTS / chart / "values.schema.json").read_text(encoding="utf-8")))


def refusals(chart: str, values: Mapping[str, Any], folder: Path) -> list[tuple[str, str]]:
    """Return each place that helm names as refused by the schema, and why."""
    path = folder / "values.json"
    path.write_text(json.dumps(values))
    done = run_program("helm", "template", "fleet", str(CHARTS / chart), "--values", str(path))
    return [(found["place"], found["fault"]) for found in _REFUSAL.finditer(done.stderr)]


def is_said(expected: tuple[str, str], refusal: tuple[str, str]) -> bool:
    """Return whether a refusal is at a place and has the words that are expected."""
    return expected[0] == refusal[0] and re.search(expected[1], refusal[1]) is not None


def pointer(violation: Violation) -> str:
    return "".join(f"/{key}" for key in violation.place)


@pytest.mark.slow
@needs_helm
@pytest.mark.parametrize("chart", NAMES)
def test_every_constraint_of_a_schema_is_held_and_its_place_named(chart: str, tmp_path: Path) -> None:
    """Several violations are in one document, because helm names all of them; nothing else is refused."""
    schema = schema_of(chart)
    accepted = schema.example()
    violations = schema.violations()
    assert refusals(chart, accepted, tmp_path) == []

    for listed in together(violations):
        values = copy.deepcopy(accepted)
        for each in listed:
            violate(values, each)
        found = refusals(chart, values, tmp_path)
        expected = [(pointer(each), each.fault) for each in listed]
        assert [each for each in expected if not any(is_said(each, refusal) for refusal in found)] == []
        assert [refusal for refusal in found if not any(is_said(each, refusal) for each in expected)] == []
    print(f"{len(violations)} violations refused")


@pytest.mark.parametrize("chart", NAMES)
def test_no_place_of_a_schema_accepts_anything(chart: str) -> None:
    assert schema_of(chart).open_places() == []


def test_a_pattern_accepts_its_example_and_refuses_its_violation() -> None:
    for pattern, (good, bad) in PATTERNS.items():
        assert re.fullmatch(pattern, good), pattern
        assert not re.search(pattern, bad), pattern


def test_a_keyword_without_a_violation_is_an_error() -> None:
    with pytest.raises(KeyError, match="multipleOf"):
        Schema({"type": "integer", "multipleOf": 2}).violations()


def test_a_place_that_accepts_anything_is_found() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "object"}}, "b": {}}}

    assert Schema(schema).open_places() == [(), ("a", 0), ("b",)]
