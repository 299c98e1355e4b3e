"""Reads the pages that list the rules of a specification, and the tests that prove them: `@pytest.mark.rule`."""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
NOT_BUILT = "## Not built yet"
MARKER = "pytest.mark.rule"
_RULE = re.compile(r"(\d+(?:\.\d+)*)/[1-9]\d*")


class Rule(NamedTuple):
    """One row of a page: a rule's id, such as `9.2/4` for the fourth of section 9.2, and what it says."""

    line: int
    id: str
    text: str

    @property
    def section(self) -> str:
        """The section of the specification."""
        return self.id.partition("/")[0]


class Mark(NamedTuple):
    """One marker, at `path:line`: the rules that it names, or that it is not at a test."""

    place: str
    rules: tuple[str, ...]
    fault: str = ""


@dataclass(frozen=True, slots=True)
class RulesPage:
    """The rules of one specification; both files are read again each time."""

    #: What a marker calls the specification.
    name: str
    page: Path
    spec: Path
    #: Heading of the specification's table of failures, and of what follows it.
    failures_between: tuple[str, str]

    def rules(self) -> list[Rule]:
        """Return the rules that are built, which tests must prove."""
        built = self.page.read_text(encoding="utf-8").partition(NOT_BUILT)[0]
        found = []
        for line, cells in _rows(built):
            if cells[0] == "rule":
                continue
            assert len(cells) == 2, f"line {line}: a row has the id of the rule and its text"
            assert _RULE.fullmatch(cells[0]), f"line {line}: {cells[0]!r} is not section/number, such as 9.2/4"
            found.append(Rule(line, *cells))
        return found

    def not_built(self) -> list[tuple[str, str]]:
        """Return section and text of each rule that the page says is not built."""
        text = self.page.read_text(encoding="utf-8").partition(NOT_BUILT)[2]
        return [(section, cells[1]) for _line, cells in _rows(text) for section in re.findall(r"§([\d.]+)", cells[0])]

    def sections(self) -> list[str]:
        """Return the numbered sections of the specification, such as `5.3`."""
        return re.findall(r"^##+ (\d+(?:\.\d+)*)\.? ", self.spec.read_text(encoding="utf-8"), re.MULTILINE)

    def failures(self) -> list[str]:
        """Return the events of the specification's table of failures."""
        begin, end = self.failures_between
        table = self.spec.read_text(encoding="utf-8").partition(begin)[2].partition(end)[0]
        return [event for event in re.findall(r"^\| ([^|]+?) \| [^|]+ \|$", table, re.MULTILINE) if event != "event"]

    def open_sections(self, rules: Iterable[Rule]) -> list[str]:
        """Return the sections without a rule; one that is divided is covered by its parts."""
        known = self.sections()
        covered = {rule.section for rule in rules} | {section for section, _text in self.not_built()}
        assert covered <= set(known), "a row names a section that does not exist"
        return [
            section
            for section in known
            if section not in covered and not any(each.startswith(section + ".") for each in covered)
        ]

    @property
    def failures_section(self) -> str:
        """The number of the section that lists the failures."""
        return self.failures_between[0].removeprefix("## ").partition(".")[0]


PAGES = {
    page.name: page
    for page in (
        RulesPage(
            "shard",
            ROOT / "docs" / "shard.md",
            ROOT / "docs" / "spec" / "shard.md",
            ("## 15. Failures", "## 16. "),
        ),
        RulesPage(
            "coordinator",
            ROOT / "docs" / "coordinator-proof.md",
            ROOT / "docs" / "spec" / "coordinator.md",
            ("## 12. Failures", "## 13. "),
        ),
    )
}


def marks_in(path: str, source: str) -> list[Mark]:
    """Return the markers of a file, without running anything."""
    if MARKER not in source:
        return []
    tree = ast.parse(source)
    at_tests = {id(each): node for node in _tests(tree.body) for each in node.decorator_list}
    found = []
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func) == MARKER):
            continue
        rules = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        is_plain = bool(rules) and len(rules) == len(node.args) and not node.keywords
        fault = (
            "a marker of rules stands at a test"
            if id(node) not in at_tests
            else ""
            if is_plain
            else f'a marker names rules as text: @{MARKER}("shard 9.2/4")'
        )
        found.append(Mark(f"{path}:{node.lineno}", tuple(rules), fault))
    return found


def all_marks() -> list[Mark]:
    """Return the markers of every test."""
    return [
        mark
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for mark in marks_in(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
    ]


def faults_of(marks: Iterable[Mark], rules: dict[str, list[Rule]]) -> list[str]:
    """Return what is wrong between markers and the rules of the pages, which are by the name of the specification."""
    marks = list(marks)
    known = {f"{name} {rule.id}" for name, listed in rules.items() for rule in listed}
    proved = {each for mark in marks for each in mark.rules if not mark.fault}
    return [
        *(f"{mark.place}: {mark.fault}" for mark in marks if mark.fault),
        *(
            f"{mark.place}: there is no rule {each!r}; the pages list {', '.join(rules)}, section/number"
            for mark in marks
            for each in mark.rules
            if each not in known
        ),
        *(
            f"{PAGES[name].page.name}:{rule.line}: no test is marked with the rule {name} {rule.id}: {rule.text}"
            for name, listed in rules.items()
            for rule in listed
            if f"{name} {rule.id}" not in proved
        ),
    ]


def _rows(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield line number and cells of each row of a table, but for the line below a header."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("| "):
            yield number, [cell.strip() for cell in line.strip().strip("|").split(" | ")]


def _tests(body: list[ast.stmt]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield node
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            yield node
            yield from _tests(node.body)
