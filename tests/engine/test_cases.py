"""Every case of tests/cases/engine that the engine itself answers: one test per case.

The stages `inventory`, `needs_table`, `guard` and `rails` belong to the shard and run in tests/shard.
"""

from collections.abc import Callable

import pytest

from bigfleet.cli.engine.checks import ENGINE_CHECKS
from bigfleet.cli.engine.runner import CHECKS, run_case
from bigfleet.engine.plain_engine import decide
from tests.engine_cases import Case, all_cases, cases_of

RecordProperty = Callable[[str, object], None]


@cases_of(*ENGINE_CHECKS)
def test_the_engine_answers_as_the_case_says(case: Case, record_property: RecordProperty) -> None:
    record_property("engine case", "plain" if case.is_plain else "topology")

    run_case(case, decide)


def test_every_case_has_a_name_of_its_own_and_a_stage_that_runs() -> None:
    names = [case.name for case in all_cases()]

    assert len(set(names)) == len(names)
    assert {case.stage for case in all_cases()} == set(CHECKS)


@pytest.mark.parametrize("stage", sorted(ENGINE_CHECKS))
def test_a_stage_has_cases(stage: str) -> None:
    assert any(case.stage == stage for case in all_cases())
