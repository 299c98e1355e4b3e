"""Every case of tests/cases/engine whose stage belongs to the shard: inventory, demand table, quarantine, rails."""

from collections.abc import Callable

import pytest

from bigfleet.cli.engine.runner import run_case
from bigfleet.cli.engine.shard_checks import SHARD_CHECKS
from bigfleet.engine.reference.decide import decide
from tests.engine_cases import Case, cases_of

RecordProperty = Callable[[str, object], None]


@pytest.mark.rule(
    "shard 4/10", "shard 6/1", "shard 6/4", "shard 6/6", "shard 6/7", "shard 6/18", "shard 6/19", "shard 9.1/2"
)
@cases_of(*SHARD_CHECKS)
def test_the_shard_answers_as_the_case_says(case: Case, record_property: RecordProperty) -> None:
    record_property("engine case", "plain" if case.is_plain else "topology")

    run_case(case, decide)
