"""docs/coordinator-proof.md names for every rule of the coordinator the tests that prove it: none may be missing."""

import re
from pathlib import Path

import pytest

from tests.test_rules_of_the_shard import NODE, Row, cells, known_in

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "coordinator-proof.md"
SPEC = ROOT / "docs" / "spec" / "coordinator.md"
NOT_BUILT = "## Not built yet"


def rules() -> list[Row]:
    """Return the rows of the page that claim a proof."""
    proved = PAGE.read_text(encoding="utf-8").partition(NOT_BUILT)[0]
    found = []
    for line, row in cells(proved):
        assert len(row) == 3, f"line {line}: a row has section, rule and proof"
        found.append(Row(line, row[0].removeprefix("§"), row[1], row[2]))
    return found


def not_built() -> list[tuple[str, str]]:
    """Return section and text of what the page says is not there."""
    text = PAGE.read_text(encoding="utf-8").partition(NOT_BUILT)[2]
    return [(section, row[1]) for _line, row in cells(text) for section in re.findall(r"§([\d.]+)", row[0])]


def sections() -> list[str]:
    """Return the numbered sections of the specification, such as `7.5`."""
    return re.findall(r"^##+ (\d+(?:\.\d+)*)\.? ", SPEC.read_text(encoding="utf-8"), re.MULTILINE)


def failures() -> list[str]:
    """Return the events of the specification's table of failures."""
    table = SPEC.read_text(encoding="utf-8").partition("## 12. Failures")[2].partition("## 13. ")[0]
    return [event for event in re.findall(r"^\| ([^|]+?) \| [^|]+ \|$", table, re.MULTILINE) if event != "event"]


def faults_of(rows: list[Row]) -> list[str]:
    """Return what is wrong with the proofs that rows name."""
    faults = []
    for row in rows:
        named = NODE.findall(row.proof)
        if not named:
            faults.append(f"line {row.line}: {row.rule!r} names no test")
        if "".join(named) != re.sub(r"`|<br>|\s", "", row.proof):
            faults.append(f"line {row.line}: {row.proof!r} is more than the names of tests")
        for node in named:
            path, _colons, name = node.partition("::")
            if name not in known_in(path):
                faults.append(f"line {row.line}: there is no {node}")
    return faults


def open_sections(rows: list[Row]) -> list[str]:
    """Return the sections that no row speaks of; one that is divided is covered by its parts."""
    covered = {row.section for row in rows} | {section for section, _text in not_built()}
    assert covered <= set(sections())
    return [
        section
        for section in sections()
        if section not in covered and not any(each.startswith(section + ".") for each in covered)
    ]


def test_every_rule_names_a_test_and_every_test_exists() -> None:
    assert faults_of(rules()) == []


def test_every_section_has_a_rule_or_is_said_to_be_missing() -> None:
    assert len(sections()) > 20
    assert open_sections(rules()) == []


@pytest.mark.parametrize("event", failures())
def test_every_failure_has_a_rule(event: str) -> None:
    """The row begins with the event, word for word."""
    assert len([row for row in rules() if row.section == "12" and row.rule.startswith(f"{event}: ")]) == 1


def test_every_failure_of_the_page_is_one_of_the_specification() -> None:
    told = [row.rule.partition(": ")[0] for row in rules() if row.section == "12"]

    assert len(failures()) > 15
    assert sorted(told) == sorted(failures())


def test_no_rule_is_said_twice() -> None:
    told = [(row.section, row.rule) for row in rules()]

    assert len(told) == len(set(told))


@pytest.mark.parametrize(
    "proof",
    [
        "",
        "seen by hand",
        "`tests/coordinator/test_plan.py::test_nobody_wrote_this`",
        "`tests/coordinator/test_nowhere.py::test_worked_examples`",
        "`tests/coordinator/test_plan.py::view_of`",
    ],
    ids=["nothing", "prose", "no such test", "no such file", "no test"],
)
def test_a_rule_without_a_real_test_is_found(proof: str) -> None:
    assert faults_of([Row(1, "1", "A rule", proof)]) != []


def test_a_section_without_a_rule_is_found() -> None:
    assert open_sections([row for row in rules() if row.section != "7.5"]) == ["7.5"]
