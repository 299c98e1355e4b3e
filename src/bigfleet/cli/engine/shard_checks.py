"""Runs the engine cases whose stage belongs to the shard: inventory, demand table, quarantine, safety limits.

The format is that of tests/cases/engine/README.md. These answers do not depend on the engine.
"""

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from bigfleet.cli.engine.cases import Case, machine_of, need_of
from bigfleet.cli.engine.checks import Check, expect_equal
from bigfleet.cli.engine.registry import Decide
from bigfleet.engine.decision import Action, ActionKind
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.need import Need
from bigfleet.model.vector import parse_vector
from bigfleet.shard import safety_limits
from bigfleet.shard.inventory.inventory import Inventory, InventoryRefusal
from bigfleet.shard.sessions.demand import Intake


def _inventory(case: Case, decide: Decide) -> None:
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
        expect_equal(step.get("result", "ok"), result, f"result of {step['op']}")
        for machine_id, since in step.get("idle_since", {}).items():
            expect_equal(since, inventory.idle_since_seconds(machine_id), f"idle_since of {machine_id}")


def _needs_table(case: Case, decide: Decide) -> None:
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
        expect_equal(report.get("verdict", "accept"), verdict.value, "verdict")
        if "order" in report:
            expect_equal(report["order"], [ids[row.key] for row in rows], "order")
        arrivals = {ids[row.key]: row.arrival_unix_nanos for row in rows}
        for row_id, arrival in report.get("arrivals", {}).items():
            expect_equal(arrival, arrivals[row_id], f"arrival of {row_id}")


def _guard(case: Case, decide: Decide) -> None:
    intake = Intake()
    for number, report in enumerate(case.data["reports"]):
        asked = report["rows"]
        rows = [_row(f"g{index}") for index in range(asked)] if isinstance(asked, int) else list(map(need_of, asked))
        largest = parse_vector(report.get("largest_machine", {}))
        verdict = intake.offer(
            "c1",
            rows,
            digest=str(number).encode(),
            now_unix_nanos=number,
            largest_supply=partial(dict[str, int], largest),
        )
        expect_equal(report["expect"], verdict.value, "verdict")
        if "active" in report:
            expect_equal(report["active"], len(intake.table.in_list_order()), "active rows")
        if "reported" in report:
            expect_equal(report["reported"], "c1" in intake.reported, "reported")


def _row(group: str) -> Need:
    return need_of({"group": group, "agg": {"cpu": "1"}})


def _check_safety_limits(case: Case, decide: Decide) -> None:
    data: dict[str, Any] = dict(case.data)
    actions = [_action(text) for text in data["actions"]]
    disposition = safety_limits.disposition(paused=data.get("paused", False), dry_run=data.get("dry_run", False))
    expect = data["expect"]
    if disposition is not safety_limits.Disposition.EXECUTE:
        expect_equal(expect["executed"], [], "executed")
        expect_equal(expect["suppressed"], dict(Counter(action.kind.label for action in actions)), "suppressed")
        expect_equal(expect["outcome"], disposition.value, "outcome")
        return
    capped = safety_limits.cap_reclaims(
        actions, fraction=data.get("fraction", 0.05), configured_by_cluster=data["configured"], spent={}
    )
    limited, postponed = safety_limits.limit_actions(capped.admitted, data.get("actions_max", 0))
    executed = [f"{a.kind.label} {a.machine_id} {a.cluster or '-'}" for a in limited]
    expect_equal(expect["executed"], executed, "executed")
    expect_equal(expect.get("capped", 0), capped.capped, "capped")
    expect_equal(expect.get("postponed", 0), postponed, "postponed")
    expect_equal(expect.get("extra_cycle", False), postponed > 0, "extra_cycle")


def _action(text: str) -> Action:
    kind, machine_id, cluster = text.split()
    return Action(
        kind=ActionKind[kind.upper()],
        machine_id=MachineId(machine_id),
        cluster=ClusterId("" if cluster == "-" else cluster),
        reason="case",
    )


#: The stages that the shard answers.
SHARD_CHECKS: Final[Mapping[str, Check]] = {
    "inventory": _inventory,
    "needs_table": _needs_table,
    "guard": _guard,
    "rails": _check_safety_limits,
}
