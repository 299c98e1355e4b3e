"""A sold-out type costs a few Creates, however many slots of it are on offer; another one is asked for at once."""

import msgspec
import pytest

from bigfleet.sim.scenarios.runner import ScenarioOutcome, run_scenario, scenario_of
from bigfleet.sim.scenarios.scenario_file import Expectation, Measure, Scenario

NAME = "sold-out-pool"
WANTED = 10


def with_slots(cheap: int, dear: int, *, cycles: int, must_hold: tuple[Expectation, ...] = ()) -> Scenario:
    """Return the scenario with that many slots of the sold-out type and of the other one."""
    scenario = scenario_of(NAME)
    counts = zip(scenario.machines, (cheap, dear), strict=True)
    machines = tuple(msgspec.structs.replace(stock, count=count) for stock, count in counts)
    return msgspec.structs.replace(
        scenario, machines=machines, cycles=cycles, must_hold=must_hold or scenario.must_hold
    )


def ran(scenario: Scenario) -> ScenarioOutcome:
    outcome = run_scenario(scenario, name=NAME)
    assert outcome.is_met, "\n".join([*outcome.faults, *outcome.journal])
    return outcome


@pytest.mark.parametrize("slots", [200, 2000])
def test_what_a_stockout_costs_does_not_grow_with_the_slots(slots: int) -> None:
    """At most three Creates more than machines are wanted; every pod runs after three cycles."""
    outcome = ran(with_slots(slots, 20, cycles=10))

    first = next(cycle for cycle, line in enumerate(outcome.journal, start=1) if "Provision dear" in line)
    assert first <= 1 + 2


@pytest.mark.slow
def test_without_another_type_one_probe_follows_each_back_off() -> None:
    """Ten Creates at first, then one after 3, 6, 12 and 24 minutes each; the row is short all the time."""
    probes = Expectation(measure=Measure.ACTIONS, kind="provision", exactly=WANTED + 4)
    short = Expectation(measure=Measure.SHORTFALLS, exactly=1)
    outcome = ran(with_slots(200, 0, cycles=6 * 48, must_hold=(probes, short)))

    assert all("short of nothing" not in line for line in outcome.journal[2:])
