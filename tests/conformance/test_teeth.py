"""The suite can fail: for each behaviour there are providers broken in one point, on which it does."""

from collections.abc import Callable

import pytest

from bigfleet.conformance.catalogue import BEHAVIOURS
from bigfleet.conformance.runner import BehaviourOutcome, Verdict
from tests.conformance.bench import MUTANT, Mutant, plan_of
from tests.conformance.client_mutants import CLIENT_MUTANTS
from tests.conformance.failure_mutants import FAILURE_CLIENT_MUTANTS, FAILURE_KIT_MUTANTS
from tests.conformance.kit_mutants import KIT_MUTANTS
from tests.conformance.read_mutants import READ_CLIENT_MUTANTS, READ_KIT_MUTANTS
from tests.conformance.record_mutants import RECORD_CLIENT_MUTANTS

#: Deliberately broken variants of the kit's own code, of its options, and of the store that it stands on.
KIT = (*KIT_MUTANTS, *READ_KIT_MUTANTS, *FAILURE_KIT_MUTANTS)
#: A sound core behind a client that bends what is said, or over a backend that does.
CLIENT = (*CLIENT_MUTANTS, *READ_CLIENT_MUTANTS, *FAILURE_CLIENT_MUTANTS, *RECORD_CLIENT_MUTANTS)
MUTANTS = (*KIT, *CLIENT)
KIT_MUTANTS_MIN = 40


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.breaks}: {mutant.name}")
def test_a_broken_provider_fails(mutant: Mutant, record_property: Callable[[str, object], None]) -> None:
    """It fails at least where it is broken; the area of that behaviour is run, and what else fails there is told."""
    area = mutant.breaks.rpartition("-")[0]
    tried = frozenset(behaviour.id for behaviour in BEHAVIOURS if behaviour.id.rpartition("-")[0] == area)
    report = mutant.tried(plan_of(only=tried))
    failed = [result.behaviour.id for result in report.results if result.outcome is BehaviourOutcome.FAILED]
    record_property(MUTANT, (mutant.name, tuple(failed)))

    assert mutant.breaks in failed
    assert report.verdict is Verdict.FAILED


def test_each_behaviour_has_a_mutant() -> None:
    bitten = {mutant.breaks for mutant in MUTANTS}
    toothless = [behaviour.id for behaviour in BEHAVIOURS if behaviour.id not in bitten]

    assert toothless == []
    assert len(KIT) >= KIT_MUTANTS_MIN
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
