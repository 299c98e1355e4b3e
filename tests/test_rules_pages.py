"""Compares docs/shard.md and docs/coordinator-proof.md, which list rules, with the tests that are marked with rules."""

import pytest

from tests.rules_page import PAGES, Mark, Rule, RulesPage, all_marks, faults_of, marks_in

every_page = pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)


def test_every_rule_has_a_test_and_every_marker_a_rule() -> None:
    """A test may move and change its name: its marker goes with it."""
    faults = faults_of(all_marks(), {name: page.rules() for name, page in PAGES.items()})

    assert faults == [], "mark the test that proves the rule, or correct the page:\n" + "\n".join(faults)


@every_page
def test_every_section_has_a_rule_or_is_listed_as_not_built(page: RulesPage) -> None:
    assert len(page.sections()) > 20
    assert page.open_sections(page.rules()) == []


@pytest.mark.parametrize(
    ("page", "event"), [(page, event) for page in PAGES.values() for event in page.failures()], ids=str
)
def test_every_failure_has_a_rule_or_is_listed_as_not_built(page: RulesPage, event: str) -> None:
    """The rule begins with the event, word for word."""
    section = page.failures_section
    built = [rule for rule in page.rules() if rule.section == section and rule.text.startswith(f"{event}: ")]
    missing = [text for each, text in page.not_built() if each == section and text == event]

    assert len(built) + len(missing) == 1


@every_page
def test_every_failure_of_the_page_is_one_of_the_specification(page: RulesPage) -> None:
    events = [rule.text.partition(": ")[0] for rule in page.rules() if rule.section == page.failures_section]

    assert len(page.failures()) > 15
    assert len(events) == len(set(events))
    assert set(events) <= set(page.failures())


@every_page
def test_every_rule_has_an_id_of_its_own_and_stands_once(page: RulesPage) -> None:
    """An id is a name: after a rule is deleted, those below it keep theirs."""
    rules = page.rules()

    assert len({rule.id for rule in rules}) == len(rules)
    assert len({(rule.section, rule.text) for rule in rules}) == len(rules)


RULES: dict[str, list[Rule]] = {"shard": [Rule(1, "3/1", "A rule")], "coordinator": []}


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("def test_a() -> None: ...", "shard.md:1: no test is marked with the rule shard 3/1: A rule"),
        ('@pytest.mark.rule("shard 3/1", "shard 3/2")\ndef test_a() -> None: ...', "there is no rule 'shard 3/2'"),
        ('@pytest.mark.rule("shard 3/1", "stores 3/1")\ndef test_a() -> None: ...', "there is no rule 'stores 3/1'"),
        ('@pytest.mark.rule("shard 3/1")\ndef view_of() -> None: ...', "stands at a test"),
        ('class A:\n    @pytest.mark.rule("shard 3/1")\n    def test_a(self) -> None: ...', "stands at a test"),
        ('pytestmark = pytest.mark.rule("shard 3/1")', "stands at a test"),
        ("@pytest.mark.rule(RULE)\ndef test_a() -> None: ...", "names rules as text"),
        ("@pytest.mark.rule()\ndef test_a() -> None: ...", "names rules as text"),
    ],
)
def test_a_planted_fault_is_found(source: str, fault: str) -> None:
    assert any(fault in each for each in faults_of(marks_in("test_a.py", source), RULES))


@pytest.mark.parametrize(
    "source",
    [
        '@of_each(paths)\n@pytest.mark.rule("shard 3/1")\nasync def test_a() -> None: ...',
        'class TestA:\n    @pytest.mark.rule("shard 3/1")\n    def test_a(self) -> None: ...',
        '@pytest.mark.rule("shard 3/1")\nclass TestA: ...',
    ],
)
def test_a_marker_stands_at_a_function_a_method_or_a_class(source: str) -> None:
    marks = marks_in("test_a.py", source)

    assert [mark.rules for mark in marks] == [("shard 3/1",)]
    assert faults_of(marks, RULES) == []


def test_a_section_without_a_rule_is_found() -> None:
    page = PAGES["coordinator"]

    assert page.open_sections([rule for rule in page.rules() if rule.section != "7.5"]) == ["7.5"]


def test_a_marker_says_where_it_is() -> None:
    source = '\n@pytest.mark.rule("shard 3/1", "shard 4/2")\ndef test_a() -> None: ...'

    assert marks_in("tests/test_a.py", source) == [Mark("tests/test_a.py:2", ("shard 3/1", "shard 4/2"))]
