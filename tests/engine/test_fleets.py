"""The thirty generated fleets of decisions.jsonl: every field of every decision is equal."""

from collections.abc import Callable

import pytest

from bigfleet.cli.engine.checks import check_fleet
from bigfleet.engine.reference.decide import decide
from tests.engine_cases import Entry, decide_fleet, decision_record, load_fleets

FLEETS = [pytest.param(fleet, id=str(fleet["seed"])) for fleet in load_fleets()]


@pytest.mark.parametrize("fleet", FLEETS)
def test_a_generated_fleet_gets_the_recorded_decision(
    fleet: Entry, record_property: Callable[[str, object], None]
) -> None:
    plain = not any(r["spreads"] or any(q[1] == "Same" for q in r["requirements"]) for r in fleet["demand"])
    record_property("engine fleet", "plain" if plain else "topology")

    check_fleet(fleet, decide)

    assert fleet["decision"].keys() == decision_record(decide_fleet(fleet, decide)).keys()


@pytest.mark.parametrize("fleet", FLEETS)
def test_an_equal_input_gives_an_equal_decision(fleet: Entry) -> None:
    assert decide_fleet(fleet, decide).decision == decide_fleet(fleet, decide).decision
