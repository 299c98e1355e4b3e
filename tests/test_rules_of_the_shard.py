"""docs/shard.md names for every rule of the shard the tests that prove it: none may be missing, and all must exist."""

import pytest

from tests.rules_page import ROOT, RulesPage, faults_of, known_in

PAGE = RulesPage(ROOT / "docs" / "shard.md", ROOT / "docs" / "spec" / "shard.md", ("## 15. Failures", "## 16. "))


def test_every_rule_names_a_test_and_every_test_exists() -> None:
    """By file, class and function."""
    assert faults_of(PAGE.rules()) == []


def test_every_section_has_a_rule_or_is_said_to_be_missing() -> None:
    """A section that is divided is covered by its parts; no row speaks of a section that there is not."""
    assert len(PAGE.sections()) > 30
    assert PAGE.open_sections(PAGE.rules()) == []


@pytest.mark.parametrize("event", PAGE.failures())
def test_every_failure_has_a_rule_or_is_said_to_be_missing(event: str) -> None:
    """The row begins with the event, word for word."""
    proved = [row for row in PAGE.rules() if row.section == "15" and row.rule.startswith(f"{event}: ")]
    missing = [text for section, text in PAGE.not_built() if section == "15" and text == event]

    assert len(proved) + len(missing) == 1


def test_every_failure_of_the_page_is_one_of_the_specification() -> None:
    """Nothing is proved that nobody asked for, and nothing is said twice."""
    told = [row.rule.partition(": ")[0] for row in PAGE.rules() if row.section == "15"]

    assert len(PAGE.failures()) > 15
    assert len(told) == len(set(told))
    assert set(told) <= set(PAGE.failures())


def test_no_rule_is_said_twice() -> None:
    """Each stands once in its section."""
    told = [(row.section, row.rule) for row in PAGE.rules()]

    assert len(told) == len(set(told))


def test_the_collector_knows_functions_and_methods_by_their_place() -> None:
    """A method is named with its class, and a file that is not there has none."""
    known = known_in("tests/rpc/test_provider_client.py")

    assert "TestRefusals::test_each_status_is_one_kind" in known
    assert "test_each_status_is_one_kind" not in known
    assert known_in("tests/shard/test_nothing_of_the_kind.py") == frozenset()
