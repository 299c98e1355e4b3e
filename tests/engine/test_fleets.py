"""The thirty generated fleets of decisions.jsonl: every field of every decision is equal."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from bigfleet.engine.decision import Action, ActionKind, Decision, RowResult
from bigfleet.engine.reference import decide
from tests.engine_cases import (
    Entry,
    fleet_need_of,
    fleet_options_of,
    fleet_snapshot_of,
    load_fleets,
    row_name,
)

FLEETS = [pytest.param(fleet, id=str(fleet["seed"])) for fleet in load_fleets()]


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision of a generated fleet, its rows named as in the file."""

    decision: Decision
    rows: Mapping[str, RowResult]

    def name_of(self, machine_id: str, *, victim: bool) -> str:
        """Return the row that claims the machine, or that takes it as a victim."""
        return next(name for name, row in self.rows.items() if machine_id in (row.victims if victim else row.claimed))


def decided(fleet: Entry) -> Decided:
    needs = [fleet_need_of(record) for record in fleet["demand"]]
    ids = {id(need): record["id"] for need, record in zip(needs, fleet["demand"], strict=True)}
    decision = decide(fleet_snapshot_of(fleet), needs, fleet_options_of(fleet))
    rows = {row_name([ids[id(member)] for member in row.members], folded=row.folded): row for row in decision.rows}
    assert len(rows) == len(decision.rows), "row names repeat"
    return Decided(decision, rows)


def action_record(action: Action, result: Decided) -> dict[str, Any]:
    """Return an action with the fields that the file gives for its kind."""
    record: dict[str, Any] = {
        "kind": action.kind.label,
        "machine": action.machine_id,
        "cluster": action.cluster,
        "reason": action.reason,
    }
    if action.kind in (ActionKind.RECLAIM, ActionKind.PREEMPT):
        record |= {"grace_seconds": action.grace_seconds, "preemptor_priority": action.preemptor_priority}
    if action.kind in (ActionKind.BOOTSTRAP, ActionKind.PROVISION, ActionKind.PREEMPT):
        record["row"] = result.name_of(action.machine_id, victim=action.kind is ActionKind.PREEMPT)
    return record


def row_record(name: str, row: RowResult) -> dict[str, Any]:
    return {
        "id": name,
        "cluster": row.need.cluster,
        "fingerprint": row.need.fingerprint,
        "group": row.need.group,
        "arrival": row.need.arrival_unix_nanos,
        "aggregate_milli": dict(row.need.aggregate),
        "min_unit_milli": dict(row.need.min_unit),
    }


def decision_record(result: Decided) -> dict[str, Any]:
    """Return the whole decision in the form of the file."""
    rows = result.rows
    in_order = sorted(rows.items(), key=lambda item: item[1].need.profile.precedence, reverse=True)
    gangs = {name: row for name, row in rows.items() if row.need.profile.same_key is not None and row.domain}
    return {
        "actions": [action_record(action, result) for action in result.decision.actions],
        "claims": {name: sorted(row.claimed) for name, row in rows.items()},
        "domains": {name: row.domain for name, row in gangs.items()},
        "order": [name for name, _ in in_order],
        "rows": [row_record(name, row) for name, row in rows.items()],
        "satisfiable": {name: row.satisfiable for name, row in gangs.items()},
        "unresolved_milli": {name: dict(row.unresolved) for name, row in rows.items() if row.unresolved},
        "unsatisfied_milli": {name: dict(row.deficit) for name, row in rows.items() if row.deficit},
    }


@pytest.mark.parametrize("fleet", FLEETS)
def test_a_generated_fleet_gets_the_recorded_decision(
    fleet: Entry, record_property: Callable[[str, object], None]
) -> None:
    plain = not any(r["spreads"] or any(q[1] == "Same" for q in r["requirements"]) for r in fleet["demand"])
    record_property("engine fleet", "plain" if plain else "topology")

    record = decision_record(decided(fleet))

    expected = fleet["decision"]
    assert expected.keys() == record.keys()
    for field, want in expected.items():
        assert want == record[field], field


@pytest.mark.parametrize("fleet", FLEETS)
def test_an_equal_input_gives_an_equal_decision(fleet: Entry) -> None:
    assert decided(fleet).decision == decided(fleet).decision
