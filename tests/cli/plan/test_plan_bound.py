"""`bigfleet plan --bound`: a bound that is never above the plan, and a gap that is explained by what causes it."""

import json
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from rich.console import Console
from typer.testing import CliRunner

from bigfleet.cli.main import app
from bigfleet.cli.plan import bound as bound_module
from bigfleet.cli.plan.bound import CostBound, bound_of
from bigfleet.cli.plan.inputs import MachineGiven, NeedGiven
from bigfleet.cli.plan.planning import make_plan, plan_input
from bigfleet.cli.plan.tables import show_bound
from bigfleet.cli.runtime.failures import UsageFault
from tests.engine.proof import in_proportion
from tests.engine_cases import Entry, machine_of, need_of
from tests.strategies import FleetInput, fleets

SLOT = {"st": "Speculative", "type": "t4", "ct": "OnDemand"}


def bounded(machines: list[Entry], needs: list[Entry]) -> CostBound:
    given = [MachineGiven(machine=machine_of(entry, entry["id"], {})) for entry in machines]
    rows = [NeedGiven(id=f"row {number}", need=need_of(entry)) for number, entry in enumerate(needs)]
    return bound_of(make_plan(plan_input(given, rows)))


def slot(machine_id: str, price: float, **fields: Any) -> Entry:
    return {**SLOT, "id": machine_id, "price": price, "alloc": {"cpu": "4"}, **fields}


def test_the_cheapest_of_equal_machines_are_no_dearer_than_the_bound() -> None:
    bound = bounded([slot("a", 1.0), slot("b", 2.0), slot("c", 3.0)], [{"agg": {"cpu": "8"}}])

    assert (bound.ours_usd_per_hour, bound.rows, bound.classes) == (3.0, 1, 3)
    assert bound.least_usd_per_hour == pytest.approx(3.0)
    assert bound.gap == pytest.approx(0.0, abs=1e-9)


def test_a_big_machine_for_a_small_rest_is_a_gap() -> None:
    bound = bounded([slot("a", 1.0), slot("big", 1.5, alloc={"cpu": "32"})], [{"agg": {"cpu": "8"}}])

    # The engine takes the machine that costs less, then still needs the other; one of the two would have done.
    assert bound.ours_usd_per_hour == 2.5
    assert bound.least_usd_per_hour == pytest.approx(8 / 32 * 1.5)


def test_idle_before_offered_is_part_of_the_gap() -> None:
    machines = [{**slot("idle", 5.0), "st": "Idle"}, slot("cheap", 1.0)]

    bound = bounded(machines, [{"agg": {"cpu": "4"}}])

    assert bound.ours_usd_per_hour == 5.0
    assert bound.least_usd_per_hour == pytest.approx(1.0)
    assert bound.gap == pytest.approx(4.0)


def test_expected_interruptions_count_and_pinned_rows_are_offered_no_spot() -> None:
    machines = [slot("spot", 1.0, iprob=0.5, ct="Spot"), slot("safe", 2.0)]

    # Bucket 5 is $4: spot costs 1 + 0.5 × 4 = 3.
    assert bounded(machines, [{"agg": {"cpu": "8"}, "ipb": 5}]).ours_usd_per_hour == 5.0
    assert bounded(machines, [{"agg": {"cpu": "4"}, "ipb": 27}]).least_usd_per_hour == pytest.approx(2.0)


def test_what_serves_already_is_not_bought_again() -> None:
    serving = {"id": "s", "t": "T4", "st": "Configured", "cluster": "c1"}

    bound = bounded([serving, slot("a", 1.0)], [{"agg": {"cpu": "8"}}])

    assert bound.ours_usd_per_hour == 1.0
    assert bound.least_usd_per_hour == pytest.approx(1.0)
    assert bounded([serving], [{"agg": {"cpu": "4"}}]) == CostBound(
        ours_usd_per_hour=0.0, least_usd_per_hour=0.0, rows=0, classes=0
    )


def test_a_plan_with_too_many_classes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound_module, "CLASSES_MAX", 1)

    with pytest.raises(UsageFault, match="--bound: 2 classes of machines, at most 1 are bounded"):
        bounded([slot("a", 1.0), slot("b", 2.0)], [{"agg": {"cpu": "4"}}])


def test_a_plan_with_too_many_pairs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound_module, "PAIRS_MAX", 1)

    with pytest.raises(UsageFault, match="more than 1 pairs of a row and a class"):
        bounded([slot("a", 1.0), slot("b", 2.0)], [{"agg": {"cpu": "4"}}])


def test_a_machine_of_unbounded_price_has_no_bound() -> None:
    with pytest.raises(UsageFault, match="unbounded price"):
        bounded([slot("a", float("inf"))], [{"agg": {"cpu": "4"}}])


def test_without_scipy_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)

    with pytest.raises(
        UsageFault,
        match=r"needs scipy, which is not installed; run make setup in a checkout, or pip install 'scipy>=1.15'",
    ):
        bounded([slot("a", 1.0)], [{"agg": {"cpu": "4"}}])


def test_the_command_prints_the_gap(tmp_path: Path) -> None:
    inventory, demand = tmp_path / "fleet.jsonl", tmp_path / "demand.json"
    machine = {"id": "a", "state": "Speculative", "allocatable": {"cpu": "8"}, "price_per_hour": 1.0}
    inventory.write_text(json.dumps(machine) + "\n", encoding="utf-8")
    demand.write_text(json.dumps([{"id": "n", "cluster": "c", "aggregate": {"cpu": "6"}}]), encoding="utf-8")
    arguments = ["plan", "--inventory", str(inventory), "--demand", str(demand), "--bound"]

    text = " ".join(CliRunner().invoke(app, arguments, catch_exceptions=False).output.split())
    document = json.loads(CliRunner().invoke(app, [*arguments, "--output", "json"], catch_exceptions=False).output)

    assert "New machines for 1 row cost $1.00/h, expected interruptions included." in text
    assert "costs less than $0.75/h: the plan is at most 33.3% above the best." in text
    assert document["bound"]["gap"] == pytest.approx(1 / 3)


def shown(bound: CostBound) -> str:
    console = Console(width=1000, file=StringIO())
    with console.capture() as captured:
        show_bound(console, bound)
    return captured.get().strip().splitlines()[-1]


def test_a_bound_of_nothing_says_no_share() -> None:
    free = CostBound(ours_usd_per_hour=0.0, least_usd_per_hour=0.0, rows=2, classes=3)

    assert shown(free) == "New machines for 2 rows cost nothing, and nothing costs less."
    assert shown(replace(free, ours_usd_per_hour=1.5)) == (
        "New machines for 2 rows cost $1.50/h, expected interruptions included. No choice among the 3 classes of "
        "machines costs less than $0.00/h: parts of machines that cost nothing would do, so there is no "
        "share to report."
    )
    assert shown(replace(free, rows=0)) == "No new machines are taken, so there is no cost to bound."


@settings(max_examples=in_proportion(240), deadline=None)
@given(fleets(flags=False))
def test_no_plan_costs_less_than_its_bound(fleet: FleetInput) -> None:
    """The plan's own acquisitions are one point of the relaxation, whatever the rows without shapes are."""
    machines = [MachineGiven(machine=machine) for machine in fleet.snapshot.machines.values()]
    needs = [
        NeedGiven(id=f"row {number}", need=replace(need, shapes=(), waiting=()))
        for number, need in enumerate(fleet.demand)
    ]

    bound = bound_of(make_plan(plan_input(machines, needs)))

    assert 0.0 <= bound.least_usd_per_hour <= bound.ours_usd_per_hour + 1e-6
