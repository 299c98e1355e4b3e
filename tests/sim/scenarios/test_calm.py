"""At rest nothing happens."""

import msgspec
import pytest

from bigfleet.sim.scenarios.runner import run_scenario, scenario_of
from bigfleet.sim.scenarios.scenario_file import Expectation, Measure


@pytest.mark.slow
def test_constant_demand_decides_nothing_in_a_thousand_cycles() -> None:
    """Two cycles buy and bind what is wanted; the others decide nothing."""
    quiet = Expectation(measure=Measure.QUIET_CYCLES, at_least=998)
    scenario = msgspec.structs.replace(scenario_of("calm"), events=(), cycles=1000, must_hold=(quiet,))

    outcome = run_scenario(scenario, name="constant")

    assert outcome.is_met, outcome.faults
    assert outcome.actions.keys() <= {"provision", "bootstrap"}
    assert outcome.actions["bootstrap"] == 16
