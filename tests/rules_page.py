"""A page that names for every rule of a specification the tests that prove it, and what would be wrong with it."""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
NOT_BUILT = "## Not built yet"
_NODE = re.compile(r"`(tests/[\w/]+/?\w*\.py(?:::\w+)+)`")


class Row(NamedTuple):
    """One rule, and what it says proves it."""

    line: int
    section: str
    rule: str
    proof: str


@dataclass(frozen=True, slots=True)
class RulesPage:
    """One page of proofs, and the specification whose rules it proves; both are read again each time."""

    page: Path
    spec: Path
    #: Heading of the specification's table of failures, and of what follows it.
    failures_between: tuple[str, str]

    def rules(self) -> list[Row]:
        """Return the rows of the page that claim a proof."""
        proved = self.page.read_text(encoding="utf-8").partition(NOT_BUILT)[0]
        found = []
        for line, row in _cells(proved):
            assert len(row) == 3, f"line {line}: a row has section, rule and proof"
            found.append(Row(line, row[0].removeprefix("§"), row[1], row[2]))
        return found

    def not_built(self) -> list[tuple[str, str]]:
        """Return section and text of what the page says is not there."""
        text = self.page.read_text(encoding="utf-8").partition(NOT_BUILT)[2]
        return [(section, row[1]) for _line, row in _cells(text) for section in re.findall(r"§([\d.]+)", row[0])]

    def sections(self) -> list[str]:
        """Return the numbered sections of the specification, such as `5.3`."""
        return re.findall(r"^##+ (\d+(?:\.\d+)*)\.? ", self.spec.read_text(encoding="utf-8"), re.MULTILINE)

    def failures(self) -> list[str]:
        """Return the events of the specification's table of failures."""
        begin, end = self.failures_between
        table = self.spec.read_text(encoding="utf-8").partition(begin)[2].partition(end)[0]
        return [event for event in re.findall(r"^\| ([^|]+?) \| [^|]+ \|$", table, re.MULTILINE) if event != "event"]

    def open_sections(self, rows: Iterable[Row]) -> list[str]:
        """Return the sections that no row speaks of; one that is divided is covered by its parts."""
        known = self.sections()
        covered = {row.section for row in rows} | {section for section, _text in self.not_built()}
        assert covered <= set(known), "a row speaks of a section that there is not"
        return [
            section
            for section in known
            if section not in covered and not any(each.startswith(section + ".") for each in covered)
        ]


def faults_of(rows: Iterable[Row]) -> list[str]:
    """Return what is wrong with the proofs that rows name: by file, class and function."""
    faults = []
    for row in rows:
        named = _NODE.findall(row.proof)
        if not named:
            faults.append(f"line {row.line}: {row.rule!r} names no test")
        if "".join(named) != re.sub(r"`|<br>|\s", "", row.proof):
            faults.append(f"line {row.line}: {row.proof!r} is more than the names of tests")
        for node in named:
            path, _colons, name = node.partition("::")
            if name not in known_in(path):
                faults.append(f"line {row.line}: there is no {node}")
    return faults


@cache
def known_in(path: str) -> frozenset[str]:
    """Return the tests of a file as pytest names them, without running anything; empty when there is no file."""
    file = ROOT / path
    if not file.is_file():
        return frozenset()
    return frozenset(_names(ast.parse(file.read_text(encoding="utf-8")).body))


def _cells(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield line number and cells of each row whose first cell names sections."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("| §"):
            yield number, [cell.strip() for cell in line.strip().strip("|").split(" | ")]


def _names(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield prefix + node.name
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            yield from _names(node.body, f"{prefix}{node.name}::")
