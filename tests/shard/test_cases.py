"""Every case of tests/cases/engine whose stage belongs to the shard: inventory, demand table, quarantine, rails."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from bigfleet.engine.decision import Action, ActionKind
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.need import Need
from bigfleet.shard import rails
from bigfleet.shard.demand import Intake
from bigfleet.shard.inventory import Inventory, InventoryRefusal
from tests.engine_cases import Case, load_cases, machine_of, need_of

RecordProperty = Callable[[str, object], None]


def cases_of(stage: str) -> pytest.MarkDecorator:
    """Parametrize a test over the cases of a stage."""
    cases = load_cases(stage)
    assert cases, f"no case has the stage {stage}"
    return pytest.mark.parametrize("case", [pytest.param(case, id=f"{case.topic}-{case.name}") for case in cases])


@pytest.fixture(autouse=True)
def _count_the_case(request: pytest.FixtureRequest, record_property: RecordProperty) -> None:
    case: Case = request.getfixturevalue("case")
    record_property("engine case", "plain" if case.is_plain else "topology")


@cases_of("inventory")
def test_inventory(case: Case) -> None:
    """Operations answer as the case says, and idle stamps follow."""
    inventory = Inventory()
    for step in case.data["ops"]:
        result = "ok"
        try:
            if step["op"] == "remove":
                inventory.remove(step["id"])
            else:
                operation = inventory.insert if step["op"] == "insert" else inventory.apply
                operation(machine_of(step["machine"], step["machine"]["id"], {}), now_seconds=float(step["at"]))
        except InventoryRefusal as refusal:
            result = refusal.reason

        assert step.get("result", "ok") == result
        for machine_id, since in step.get("idle_since", {}).items():
            assert since == inventory.idle_since_seconds(machine_id)


@cases_of("needs_table")
def test_needs_table(case: Case) -> None:
    """Roll-ups through the quarantine leave rows in the stated order with the stated arrivals."""
    intake = Intake()
    ids: dict[tuple[str, str, str], str] = {}
    for number, report in enumerate(case.data["reports"]):
        needs = []
        for entry in report["rows"]:
            need = need_of({"cluster": report["cluster"], **entry})
            ids[need.key] = entry["id"]
            needs.append(need)
        verdict = intake.offer(report["cluster"], needs, digest=str(number).encode(), now_unix_nanos=report["at"])
        rows = intake.table.in_list_order()

        assert report.get("verdict", "accept") == verdict.value
        if "order" in report:
            assert report["order"] == [ids[row.key] for row in rows]
        arrivals = {ids[row.key]: row.arrival_unix_nanos for row in rows}
        for row_id, arrival in report.get("arrivals", {}).items():
            assert arrival == arrivals[row_id]


@cases_of("guard")
def test_guard(case: Case) -> None:
    """The quarantine judges by row counts, keeps the demand while it holds, and counts every report."""
    intake = Intake()
    for number, report in enumerate(case.data["reports"]):
        rows = [_row(f"g{index}") for index in range(report["rows"])]
        verdict = intake.offer("c1", rows, digest=str(number).encode(), now_unix_nanos=number)

        assert report["expect"] == verdict.value
        if "active" in report:
            assert report["active"] == len(intake.table.in_list_order())
        if "reported" in report:
            assert report["reported"] == ("c1" in intake.reported)


def _row(group: str) -> Need:
    return need_of({"group": group, "agg": {"cpu": "1"}})


@cases_of("rails")
def test_rails(case: Case) -> None:
    """Posture, cap and action limit let through exactly what the case lists."""
    data: dict[str, Any] = dict(case.data)
    actions = [_action(text) for text in data["actions"]]
    posture = rails.disposition(paused=data.get("paused", False), dry_run=data.get("dry_run", False))
    expect = data["expect"]
    if posture is not rails.Disposition.EXECUTE:
        assert expect["executed"] == []
        assert expect["suppressed"] == Counter(action.kind.label for action in actions)
        assert expect["outcome"] == posture.value
        return
    capped = rails.cap_reclaims(
        actions, fraction=data.get("fraction", 0.05), configured_by_cluster=data["configured"], spent={}
    )
    limited, postponed = rails.limit_actions(capped.kept, data.get("actions_max", 0))

    assert expect["executed"] == [f"{a.kind.label} {a.machine_id} {a.cluster or '-'}" for a in limited]
    assert expect.get("capped", 0) == capped.capped
    assert expect.get("postponed", 0) == postponed
    assert expect.get("extra_cycle", False) == (postponed > 0)


def _action(text: str) -> Action:
    kind, machine_id, cluster = text.split()
    return Action(
        kind=ActionKind[kind.upper()],
        machine_id=MachineId(machine_id),
        cluster=ClusterId("" if cluster == "-" else cluster),
        reason="case",
    )
