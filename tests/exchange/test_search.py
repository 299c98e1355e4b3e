"""The search chooses from what is held and what is on offer, also of one class."""

from random import Random
from typing import Any, Final

import pytest

from bigfleet.model.machine import Machine
from bigfleet.model.states import CapacityType
from tests.exchange.building import asked, held, need, offers, pods

SPOT: Final[dict[str, Any]] = {"capacity_type": CapacityType.SPOT, "interruption_probability": 0.0001}


@pytest.mark.parametrize("cheap", [0, 1, 3])
def test_more_machines_come_of_a_class_that_the_cluster_holds_already(cheap: int) -> None:
    """What came in the exchange before does not end the series: dear machines are left."""
    machines: list[Machine] = held(10 - 2 * cheap, "dear", 4, 3.0) + held(cheap, "cheap", 8, 0.3, **SPOT)
    found = asked([*machines, *offers(8 - cheap, "offer", 8, 0.3, **SPOT)], [need(pods(500, 1, 80))])

    ready = [each for each in found.proposals if each.waits_for is None]
    assert len(ready) == 1
    ((kind, comes),) = ready[0].comes
    assert (kind.instance_type, kind.capacity_type, comes) == ("t8", "Spot", 1)
    assert {each.split("-")[0] for each in ready[0].machine_ids} == {"dear"}


def test_machines_at_the_price_of_the_offers_stay() -> None:
    """All that is held is as cheap as what is on offer, so nothing is proposed."""
    machines = held(5, "cheap", 8, 0.3, **SPOT) + offers(8, "offer", 8, 0.3, **SPOT)
    assert asked(machines, [need(pods(500, 1, 70))]).proposals == ()


def test_what_the_composition_loses_by_chance_refuses_no_exchange() -> None:
    """A machine that is too large goes for smaller ones, although some order of the scheduler loses pods there."""
    for seed in range(20):
        random = Random(seed)
        sizes = {(random.choice((250, 500, 900, 1700, 3000)), random.choice((0.5, 1, 3))): 0 for _ in range(5)}
        shapes = [pods(cpu, memory, random.randint(4, 12)) for cpu, memory in sizes]
        cpu = sum(shape.resources["cpu"] * shape.count for shape in shapes) // 1000
        machines = held(1, "big", cpu * 3 // 2 + 8, 0.12 * cpu)
        machines += offers(12, "mid", 16, 0.7) + offers(20, "small", 4, 0.18)

        found = asked(machines, [need(*shapes)]).proposals

        assert [(each.machine_ids, each.waits_for) for each in found] == [(("big-000",), None)], seed
