"""docs/shard.md names for every rule of the shard the tests that prove it: none may be missing, and all must exist."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "shard.md"
SPEC = ROOT / "docs" / "spec" / "shard.md"
NOT_BUILT = "## Not built yet"
NODE = re.compile(r"`(tests/[\w/]+/?\w*\.py(?:::\w+)+)`")


class Row(NamedTuple):
    """One rule, and what it says proves it."""

    line: int
    section: str
    rule: str
    proof: str


def cells(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield line number and cells of each row whose first cell names sections."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("| §"):
            yield number, [cell.strip() for cell in line.strip().strip("|").split(" | ")]


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
    """Return the numbered sections of the specification, such as `5.3`."""
    return re.findall(r"^##+ (\d+(?:\.\d+)*)\.? ", SPEC.read_text(encoding="utf-8"), re.MULTILINE)


def failures() -> list[str]:
    """Return the events of the specification's table of failures."""
    table = SPEC.read_text(encoding="utf-8").partition("## 15. Failures")[2].partition("## 16. ")[0]
    return [event for event in re.findall(r"^\| ([^|]+?) \| [^|]+ \|$", table, re.MULTILINE) if event != "event"]


@cache
def known_in(path: str) -> frozenset[str]:
    """Return the tests of a file as pytest names them, without running anything; empty when there is no file."""
    file = ROOT / path
    if not file.is_file():
        return frozenset()
    return frozenset(_names(ast.parse(file.read_text(encoding="utf-8")).body))


def _names(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield prefix + node.name
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            yield from _names(node.body, f"{prefix}{node.name}::")


def test_every_rule_names_a_test_and_every_test_exists() -> None:
    """By file, class and function."""
    faults = []
    for row in rules():
        named = NODE.findall(row.proof)
        if not named:
            faults.append(f"line {row.line}: {row.rule!r} names no test")
        if "".join(named) != re.sub(r"`|<br>|\s", "", row.proof):
            faults.append(f"line {row.line}: {row.proof!r} is more than the names of tests")
        for node in named:
            path, _colons, name = node.partition("::")
            if name not in known_in(path):
                faults.append(f"line {row.line}: there is no {node}")

    assert faults == []


def test_every_section_has_a_rule_or_is_said_to_be_missing() -> None:
    """A section that is divided is covered by its parts; no row speaks of a section that there is not."""
    known = sections()
    covered = {row.section for row in rules()} | {section for section, _text in not_built()}
    open_sections = [
        section for section in known if section not in covered and not any(c.startswith(section + ".") for c in covered)
    ]

    assert len(known) > 30
    assert (open_sections, covered - set(known)) == ([], set())


@pytest.mark.parametrize("event", failures())
def test_every_failure_has_a_rule_or_is_said_to_be_missing(event: str) -> None:
    """The row begins with the event, word for word."""
    proved = [row for row in rules() if row.section == "15" and row.rule.startswith(f"{event}: ")]
    missing = [text for section, text in not_built() if section == "15" and text == event]

    assert len(proved) + len(missing) == 1


def test_every_failure_of_the_page_is_one_of_the_specification() -> None:
    """Nothing is proved that nobody asked for, and nothing is said twice."""
    told = [row.rule.partition(": ")[0] for row in rules() if row.section == "15"]

    assert len(told) == len(set(told))
    assert set(told) <= set(failures())


def test_no_rule_is_said_twice() -> None:
    """Each stands once in its section."""
    told = [(row.section, row.rule) for row in rules()]

    assert len(told) == len(set(told))


def test_the_collector_knows_functions_and_methods_by_their_place() -> None:
    """A method is named with its class, and a file that is not there has none."""
    known = known_in("tests/rpc/test_provider_client.py")

    assert "TestRefusals::test_each_status_is_one_kind" in known
    assert "test_each_status_is_one_kind" not in known
    assert known_in("tests/shard/test_nothing_of_the_kind.py") == frozenset()


@pytest.mark.parametrize(
    "row",
    [
        "| §8 | A rule |  |",
        "| §8 | A rule | seen by hand |",
        "| §8 | A rule | `tests/shard/test_cycle.py::test_nobody_wrote_this` |",
        "| §8 | A rule | `tests/shard/test_nowhere.py::test_the_timer_alone_cycles_at_its_interval` |",
        "| §8 | A rule | `tests/shard/test_cycle.py::Starts::_noted` |",
        "| §8 | A rule | `tests/rpc/test_provider_client.py::test_each_status_is_one_kind` |",
    ],
    ids=["nothing", "prose", "no such test", "no such file", "no test", "no class"],
)
def test_a_rule_without_a_real_test_is_found(row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among rows that are sound."""
    page = tmp_path / "shard.md"
    page.write_text(PAGE.read_text(encoding="utf-8").replace(NOT_BUILT, f"{row}\n\n{NOT_BUILT}"), encoding="utf-8")
    monkeypatch.setitem(globals(), "PAGE", page)
    with pytest.raises(AssertionError, match=r"A rule|there is no|is more than"):
        test_every_rule_names_a_test_and_every_test_exists()


def test_a_section_without_a_rule_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were all rows of §7 to go."""
    page = tmp_path / "shard.md"
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    page.write_text("\n".join(line for line in lines if not line.startswith("| §7 ")), encoding="utf-8")
    monkeypatch.setitem(globals(), "PAGE", page)
    with pytest.raises(AssertionError, match="'7'"):
        test_every_section_has_a_rule_or_is_said_to_be_missing()
