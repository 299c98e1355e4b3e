"""Ids, profiles and titles of the behaviours are those of docs/spec/provider.md §23."""

import ast
import re
from pathlib import Path

from bigfleet.conformance.catalogue import BEHAVIOURS, BY_ID, behaviours_of
from bigfleet.conformance.profiles import ConformanceProfile

SPECIFICATION = Path(__file__).parents[2] / "docs" / "spec" / "provider.md"
SUITE = Path(__file__).parents[2] / "src" / "bigfleet" / "conformance"
ROW = re.compile(r"^\| ([A-Z]+-\d+) \| (\w+) \| (.+) \|$", re.MULTILINE)


def plain(text: str) -> str:
    return text.rstrip(".").casefold()


def test_the_behaviours_are_the_rows_of_the_specification() -> None:
    """None is missing, none is ours alone, each with its profile and its title."""
    rows = {id: (profile, plain(title)) for id, profile, title in ROW.findall(SPECIFICATION.read_text())}

    assert {b.id: (b.profile.value, plain(b.title)) for b in BEHAVIOURS} == rows
    assert len(BY_ID) == len(BEHAVIOURS) == 98


def test_profiles_have_the_sizes_that_the_specification_counts() -> None:
    counts = re.search(r"^Profiles: (.+?)\. ", SPECIFICATION.read_text(), re.MULTILINE)
    assert counts is not None
    told = {name: int(count) for name, count in re.findall(r"(\w+) (?:\([^)]*\) )?(\d+)", counts[1])}

    assert {profile.value: len(behaviours_of({profile})) for profile in ConformanceProfile} == told


def test_the_suite_knows_nothing_of_how_a_provider_is_made() -> None:
    """Of ours it imports `model` alone; `in_process` apart, which nothing of it imports."""
    allowed = ("bigfleet.model", "bigfleet.conformance")
    strangers = {
        (path.stem, node.module)
        for path in SUITE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith("bigfleet")
        and (not (node.module or "").startswith(allowed) or (node.module or "").endswith("in_process"))
    }

    assert {module for module, _imported in strangers} == {"in_process"}
