"""docs/certified.md states the verdicts that the certification tests expect, of every provider that is shipped."""

import ast
import re

import pytest

from bigfleet.conformance.catalogue import behaviours_of
from bigfleet.conformance.profiles import ConformanceProfile
from bigfleet.conformance.runner import Verdict
from tests.commands import run_here
from tests.conformance.bench import Making, NoDeleteBackend, certified, plan_of
from tests.conformance.certifications import DATA, Certification, ProfileVerdict, certifications, page_table, page_tests
from tests.syntax_trees import ROOT, TESTS, functions, parsed

PAGE = ROOT / "docs" / "certified.md"
#: By the marks of a test, the first that it has.
TARGETS = {"long": "test-long", "slow": "test-slow"}


def test_the_page_has_the_table_and_the_tests_of_the_data() -> None:
    page = PAGE.read_text()
    for part in (page_table(), page_tests()):
        assert part in page, f"python -m tests.conformance.certifications prints it:\n{part}"


def test_the_sizes_of_profiles_are_those_of_the_catalogue() -> None:
    """On docs/conformance.md, and in the data: CERTIFIED says that every behaviour passed."""
    text = (ROOT / "docs" / "conformance.md").read_text()
    stated = {name: int(count) for name, count in re.findall(r"^\| (\w+) \| (\d+) \|", text, re.MULTILINE)}
    sizes = {profile: len(behaviours_of({profile})) for profile in ConformanceProfile}
    assert stated == {profile.value: size for profile, size in sizes.items()}
    for each in certifications():
        assert not each.not_applicable & each.profiles, each.test
        for profile, found in each.verdicts.items():
            assert (found.verdict == Verdict.CERTIFIED.value) == (found.passed == sizes[profile]), (each.test, profile)


def test_every_provider_that_can_be_run_is_on_the_page() -> None:
    commands = re.findall(r"^  (\w+) +Run a ", run_here("provider", "--help").stdout, re.MULTILINE)
    assert {"simulated", "exec"} <= set(commands)
    shown = {name for each in certifications() for name in re.findall(r"`bigfleet provider (\w+)`", each.provider)}
    assert shown == set(commands)


def test_the_entries_are_those_of_the_tests_that_use_them() -> None:
    """A test without an entry fails when it runs; an entry without its test would state what is not shown."""
    used = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        if "certification_of" not in path.read_text(encoding="utf-8"):
            continue
        tree = parsed(path)
        for node in functions(tree):
            if node.name.startswith("test_") and any(_is_use(each) for each in ast.walk(node)):
                used[f"{path.relative_to(ROOT)}::{node.name}"] = _target(tree, node)
    assert {each.test.partition("[")[0]: each.target for each in certifications()} == used


def _is_use(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "certification_of"


def _target(tree: ast.Module, node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return the Make target that runs a test, as its marks say."""
    of_module = [each for each in tree.body if isinstance(each, ast.Assign) and "pytestmark" in ast.unparse(each)]
    marks = "\n".join(map(ast.unparse, [*node.decorator_list, *of_module]))
    if "mark.kubernetes" in marks:
        return "test-kubernetes-slow" if "mark.slow" in marks else "test-kubernetes"
    # A parameter that is slow leaves the other ones to `make test`.
    of_all = re.sub(r"pytest\.param\((?!.*id='all').*", "", marks)
    return next((target for mark, target in TARGETS.items() if f"mark.{mark}" in of_all), "test")


def test_a_verdict_that_changes_fails() -> None:
    """A provider that fails one behaviour is not what the data states, also if the profile is still there."""
    report = certified(plan_of(frozenset({ConformanceProfile.CLOUD})), Making(backend=NoDeleteBackend))
    (cloud,) = {each.verdicts[ConformanceProfile.CLOUD] for each in certifications()}
    with pytest.raises(AssertionError, match=DATA.name):
        _expecting(cloud).expect(report)
    passed = sum(result.outcome.value == "passed" for result in report.results)
    _expecting(ProfileVerdict(Verdict.FAILED.value, passed)).expect(report)


def _expecting(cloud: ProfileVerdict) -> Certification:
    return Certification(
        provider="",
        runs_on="",
        test="",
        target="",
        verdicts={ConformanceProfile.CLOUD: cloud},
        not_applicable=frozenset(),
    )
