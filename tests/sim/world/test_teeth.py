"""The checkers have teeth: each planted defect is found by the invariant that names it, within a few seeds."""

from collections.abc import Callable

import pytest

from bigfleet.sim.world.world import run_plan
from tests.sim.world import planted_fleet
from tests.sim.world.planted import BUDGET, DEFECTS, Defect, world

#: Short ones that run with every change; all of them run in the slow suite.
QUICK = (
    "the reclaim cap is off",
    "every third audit record is lost",
    "a pause is ignored",
    "ownership is not asked for by reconcile",
    "one impossible pod has its whole row evicted",
)


def found_by(defect: Defect) -> tuple[int, str] | None:
    """Return (seed, sentence) of the first seed in which the named invariant fails."""
    for seed in range(1, BUDGET + 1):
        for violation in run_plan(defect.plan(seed)).violations:
            if violation.invariant == defect.invariant:
                return seed, violation.text
    return None


@pytest.mark.parametrize("defect", [each for each in DEFECTS if each.name in QUICK], ids=lambda defect: defect.name)
def test_a_planted_defect_is_found(defect: Defect, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few of them, at once."""
    defect.plant(monkeypatch)

    assert found_by(defect) is not None


@pytest.mark.slow
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_every_planted_defect_is_found(
    defect: Defect, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """All of them; the summary prints the table."""
    defect.plant(monkeypatch)
    found = found_by(defect)
    record_property("planted defect", (defect.name, defect.invariant, found))

    assert found is not None, f"{defect.invariant} did not find it in {BUDGET} seeds"


def test_there_are_enough_defects_and_each_has_its_name() -> None:
    """At least 43, of at least 23 invariants."""
    assert len(DEFECTS) >= 43
    assert len({defect.name for defect in DEFECTS}) == len(DEFECTS)
    assert len({defect.invariant for defect in DEFECTS}) >= 23


@pytest.mark.slow
def test_the_worlds_of_the_defects_are_sound_without_them() -> None:
    """Without a defect nothing is found: what finds the defects is not the world itself."""
    plans = {str(defect.plan(1)): defect.plan(1) for defect in DEFECTS}
    found = [violation for plan in plans.values() for violation in run_plan(plan).violations]

    assert found == []
    assert run_plan(world(1)).violations == run_plan(planted_fleet.fleet(1)).violations == ()
