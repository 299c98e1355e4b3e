"""The checks of the operator world have teeth: each planted defect is found by the invariant that names it."""

from collections.abc import Callable

import pytest

from bigfleet.sim.operator_world.run import run_operator_plan
from tests.sim.operator_world.planted_operator import BUDGET, DEFECTS, OperatorDefect

#: Short ones that run with every change; the others run in the slow suite.
QUICK = ("an eviction that a budget refuses becomes a deletion",)


def found_by(defect: OperatorDefect) -> tuple[int, str] | None:
    """Return (seed, sentence) of the first seed in which the named invariant fails; the known one is tried first."""
    for seed in (defect.seed, *(seed for seed in range(1, BUDGET + 1) if seed != defect.seed)):
        for violation in run_operator_plan(defect.plan(seed)).violations:
            if violation.invariant == defect.invariant:
                return seed, violation.text
    return None


@pytest.mark.parametrize(
    "defect",
    [pytest.param(each, id=each.name, marks=[] if each.name in QUICK else [pytest.mark.slow]) for each in DEFECTS],
)
def test_a_planted_defect_of_the_operator_is_found(
    defect: OperatorDefect, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    defect.plant(monkeypatch)
    found = found_by(defect)
    record_property("planted defect", (defect.name, defect.invariant, found, defect.seed))

    assert found is not None, f"{defect.invariant} did not find it in {BUDGET} seeds"


@pytest.mark.parametrize(
    "defect",
    [
        pytest.param(each, id=each.name, marks=pytest.mark.long if number % 8 else pytest.mark.slow)
        for number, each in enumerate(DEFECTS)
    ],
)
def test_the_world_of_a_defect_is_sound_without_it(defect: OperatorDefect) -> None:
    """Without a defect nothing is found: what finds the defects is not the world itself."""
    assert run_operator_plan(defect.plan(defect.seed)).violations == ()
