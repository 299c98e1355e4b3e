"""The checkers have teeth: each planted defect is found by the invariant that names it, within a few seeds."""

from collections.abc import Callable

import msgspec
import pytest

from bigfleet.sim.checkers import liveness
from bigfleet.sim.plan_generator import WorldPlan
from bigfleet.sim.world.run import run_plan
from tests.sim.world import planted_fleet
from tests.sim.world.planted import BUDGET, DEFECTS, Defect, world

#: Short ones that run with every change; the others run in the slow suite.
QUICK = (
    "the reclaim cap is off",
    "every third audit record is lost",
    "a pause is ignored",
    "ownership is not asked for by reconcile",
    "one impossible pod has its whole row evicted",
    "an operator's WOULD_NOT_FIT is ignored",
)
#: A world that is kept from its rest by its defect is watched for so long; without it such a world rests after 1,310 s.
REST_SECONDS_MAX = 4_000.0


def found_by(defect: Defect) -> tuple[int, str] | None:
    """Return (seed, sentence) of the first seed in which the named invariant fails; the known one is tried first."""
    others = [seed for seed in range(1, BUDGET + 1) if seed != defect.seed]
    for seed in (defect.seed, *others):
        for violation in run_plan(defect.plan(seed)).violations:
            if violation.invariant == defect.invariant:
                return seed, violation.text
    return None


@pytest.mark.parametrize(
    "defect",
    [pytest.param(each, id=each.name, marks=[] if each.name in QUICK else [pytest.mark.slow]) for each in DEFECTS],
)
def test_a_planted_defect_is_found(
    defect: Defect, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """The summary prints the table."""
    # L2 is about the rest itself, and judged over the whole time.
    if defect.invariant != "L2":
        monkeypatch.setattr(liveness, "REST_SECONDS_MAX", REST_SECONDS_MAX)
    defect.plant(monkeypatch)
    found = found_by(defect)
    record_property("planted defect", (defect.name, defect.invariant, found, defect.seed))

    assert found is not None, f"{defect.invariant} did not find it in {BUDGET} seeds"


def test_there_are_enough_defects_and_each_has_its_name() -> None:
    """At least 48, of at least 27 invariants."""
    assert len(DEFECTS) >= 48
    assert len({defect.name for defect in DEFECTS}) == len(DEFECTS)
    assert len({defect.invariant for defect in DEFECTS}) >= 27
    assert set(QUICK) <= {defect.name for defect in DEFECTS}


#: The worlds in which the defects are found, each of them once.
WORLDS = {msgspec.json.encode(plan): plan for plan in (world(1), planted_fleet.fleet(1))} | {
    msgspec.json.encode(defect.plan(defect.seed)): defect.plan(defect.seed) for defect in DEFECTS
}


#: `make test-slow` runs one of so many of these worlds, `make test-long` the others.
SLOW_WORLDS_STEP = 8


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(
            plan, id=f"world-{number}", marks=pytest.mark.long if number % SLOW_WORLDS_STEP else pytest.mark.slow
        )
        for number, plan in enumerate(WORLDS.values())
    ],
)
def test_the_worlds_of_the_defects_are_sound_without_them(plan: WorldPlan) -> None:
    """Without a defect nothing is found: what finds the defects is not the world itself."""
    assert run_plan(plan).violations == ()
