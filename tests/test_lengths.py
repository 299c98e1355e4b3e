"""No test that a target of the Makefile chooses is in a module that it leaves unread."""

import re
from itertools import chain, combinations
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from tests.lengths import LENGTHS, lengths_named_in, may_choose
from tests.syntax_trees import ROOT

EXPRESSIONS = re.findall(r'-m "(.*?)"', (ROOT / "Makefile").read_text(encoding="utf-8"))
SETS = [frozenset(each) for each in chain.from_iterable(combinations(LENGTHS, size) for size in range(4))]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_a_module_is_read_exactly_if_it_may_have_a_test_that_is_chosen(expression: str) -> None:
    chooses = Expression.compile(expression).evaluate
    for named in SETS:
        is_wanted = any(chooses(lambda name, /, **_: name in having) for having in SETS if having <= named)  # noqa: B023
        assert may_choose(expression, named) == is_wanted, named


def test_the_targets_choose_by_marker() -> None:
    assert len(EXPRESSIONS) >= 5


@pytest.mark.parametrize("expression", ["", "slow and rule", "rule(id='shard 1/1')"])
def test_with_other_words_every_module_is_read(expression: str) -> None:
    assert may_choose(expression, ())


def test_a_module_names_the_markers_of_its_tests(tmp_path: Path) -> None:
    path = tmp_path / "test_it.py"
    path.write_text("SLOW = pytest.mark." + "slow\n# It is long, and of kubernetes.\n")

    assert lengths_named_in(path) == {"slow"}
