"""docs/coordinator-proof.md names for every rule of the coordinator the tests that prove it: none may be missing."""

import pytest

from tests.rules_page import ROOT, Row, RulesPage, faults_of

PAGE = RulesPage(
    ROOT / "docs" / "coordinator-proof.md",
    ROOT / "docs" / "spec" / "coordinator.md",
    ("## 12. Failures", "## 13. "),
)


def test_every_rule_names_a_test_and_every_test_exists() -> None:
    assert faults_of(PAGE.rules()) == []


def test_every_section_has_a_rule_or_is_said_to_be_missing() -> None:
    assert len(PAGE.sections()) > 20
    assert PAGE.open_sections(PAGE.rules()) == []


@pytest.mark.parametrize("event", PAGE.failures())
def test_every_failure_has_a_rule(event: str) -> None:
    """The row begins with the event, word for word."""
    assert len([row for row in PAGE.rules() if row.section == "12" and row.rule.startswith(f"{event}: ")]) == 1


def test_every_failure_of_the_page_is_one_of_the_specification() -> None:
    told = [row.rule.partition(": ")[0] for row in PAGE.rules() if row.section == "12"]

    assert len(PAGE.failures()) > 15
    assert sorted(told) == sorted(PAGE.failures())


def test_no_rule_is_said_twice() -> None:
    told = [(row.section, row.rule) for row in PAGE.rules()]

    assert len(told) == len(set(told))


@pytest.mark.parametrize(
    "proof",
    [
        "",
        "seen by hand",
        "`tests/coordinator/rebalancing/test_rebalance_plan.py::test_nobody_wrote_this`",
        "`tests/coordinator/test_nowhere.py::test_worked_examples`",
        "`tests/coordinator/rebalancing/test_rebalance_plan.py::view_of`",
    ],
    ids=["nothing", "prose", "no such test", "no such file", "no test"],
)
def test_a_rule_without_a_real_test_is_found(proof: str) -> None:
    assert faults_of([Row(1, "1", "A rule", proof)]) != []


def test_a_section_without_a_rule_is_found() -> None:
    assert PAGE.open_sections([row for row in PAGE.rules() if row.section != "7.5"]) == ["7.5"]
