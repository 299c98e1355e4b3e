"""Writes a plan as one JSON document: every action by name, exact figures, explanations.

Infinite numbers are the string `+Inf`, as in the inventory. This module does not decide or round anything.
"""

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from bigfleet.cli.plan.bound import CostBound
from bigfleet.cli.plan.planning import Cost, Difference, FleetPlan, PlannedAction, PlannedShortfall
from bigfleet.cli.plan.settling import Claim, Settled
from bigfleet.engine.decision import ActionKind, RowResult
from bigfleet.engine.explain.explanation import Explanation
from bigfleet.engine.explain.sentences import sentences
from bigfleet.model.vector import format_vector


def plan_document(plan: FleetPlan) -> dict[str, Any]:
    """Return actions, costs before and after, and shortfalls."""
    return {
        "actions": [_action(planned) for planned in plan.actions],
        "cost_before": _cost(plan.before),
        "cost_after": _cost(plan.after),
        "shortfalls": [_shortfall(short, plan) for short in plan.shortfalls],
    }


def settled_document(settled: Settled) -> dict[str, Any]:
    """Return what every cluster holds at rest, what that costs, and what it took to get there."""
    rows_of, claims_of = settled.rows_of, settled.claims_of
    at_rest = settled.plan.before
    return {
        "clusters": {
            cluster: {
                "machines": [
                    {
                        "id": machine.id,
                        "rows": rows_of.get(machine.id, []),
                        "instance_type": machine.instance_type,
                        "zone": machine.zone,
                        "capacity_type": machine.capacity_type.label,
                        "price_per_hour": plain(machine.price_usd_per_hour),
                        "claims": [_claim(claim) for claim in claims_of.get(machine.id, ())],
                    }
                    for machine in machines
                ]
            }
            for cluster, machines in settled.clusters.items()
        },
        "cost_usd_per_hour": plain(at_rest.serving_usd_per_hour),
        "idle_usd_per_hour": plain(at_rest.idle_usd_per_hour),
        "idle_machines": at_rest.idle_machines,
        "cycles": settled.cycles,
        "actions": {kind.label: settled.actions.get(kind, 0) for kind in ActionKind},
        "shortfalls": [_shortfall(short, settled.plan) for short in settled.plan.shortfalls],
    }


def _claim(claim: Claim) -> dict[str, Any]:
    return {
        "row": claim.row,
        "resources": format_vector(claim.resources, claim.families),
        **({} if claim.pods is None else {"count": claim.pods}),
    }


def difference_document(difference: Difference) -> dict[str, Any]:
    """Return the changed plan and how it differs."""
    return {
        "plan": plan_document(difference.changed),
        "changes_nothing": difference.is_empty,
        "actions_added": [_action(planned) for planned in difference.added],
        "actions_dropped": [_action(planned) for planned in difference.dropped],
        "shortfalls_changed": [
            {"row": name, "lacks": format_vector(changed), "lacked": format_vector(base)}
            for name, base, changed in difference.shortfalls
        ],
    }


def bound_document(bound: CostBound) -> dict[str, Any]:
    """Return the cost of what is newly taken, its bound and the gap as a share of the bound."""
    return {
        "acquired_usd_per_hour": bound.ours_usd_per_hour,
        "least_usd_per_hour": bound.least_usd_per_hour,
        "gap": plain(bound.gap),
        "rows": bound.rows,
        "classes": bound.classes,
    }


def explanation_document(plan: FleetPlan, explanation: Explanation | list[str], about: str) -> dict[str, Any]:
    """Return an explanation as sentences and, of a decision over aggregates, as values."""
    if isinstance(explanation, list):
        return {"about": about, "sentences": explanation}
    return {"about": about, "sentences": sentences(explanation, row_name=plan.row_name), "values": plain(explanation)}


def plain(value: Any) -> Any:
    """Return a value made of what JSON knows: objects by field, enums by name or text, infinity as `+Inf`."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return value.value if isinstance(value.value, str) else getattr(value, "label", value.name)
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, tuple | list):
        return [plain(one) for one in value]
    if isinstance(value, float) and math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return value


def _action(planned: PlannedAction) -> dict[str, Any]:
    action, machine = planned.action, planned.machine
    record: dict[str, Any] = {
        "kind": action.kind.label,
        "machine": machine.id,
        "cluster": action.cluster,
        "row": planned.need_id,
        "reason": action.reason,
        "instance_type": machine.instance_type,
        "zone": machine.zone,
        "capacity_type": machine.capacity_type.label,
        "price_per_hour": plain(machine.price_usd_per_hour),
    }
    if action.grace_seconds:
        record["grace_seconds"] = action.grace_seconds
    return record


def _pods_short(row: RowResult) -> dict[str, Any]:
    """Return the pods that have no place and those that are set aside, for a row with shapes."""
    shapes = (*row.need.shapes, *row.need.waiting)
    if not shapes:
        return {}
    return {
        "unplaced": [
            {"resources": format_vector(shapes[index].resources, row.need.families), "count": count}
            for index, count in row.unplaced
        ],
        "impossible": [
            {
                "reason": "request_too_large" if entry.dimension else "no_machine_matches",
                "resources": format_vector(shapes[entry.shape].resources, row.need.families),
                "count": shapes[entry.shape].count,
                "dimension": entry.dimension,
                "wanted": format_vector({entry.dimension: entry.wanted}).get(entry.dimension, "0"),
                "largest": format_vector({entry.dimension: entry.largest}).get(entry.dimension, "0"),
            }
            for entry in row.impossible
            if entry.shape is not None
        ],
    }


def _cost(cost: Cost) -> dict[str, Any]:
    return {
        "serving_usd_per_hour": plain(cost.serving_usd_per_hour),
        "idle_usd_per_hour": plain(cost.idle_usd_per_hour),
        "total_usd_per_hour": plain(cost.total_usd_per_hour),
        "serving_machines": cost.serving_machines,
        "idle_machines": cost.idle_machines,
    }


def _shortfall(short: PlannedShortfall, plan: FleetPlan) -> dict[str, Any]:
    families = short.row.need.families
    return {
        "row": short.need_id,
        "cluster": short.row.need.cluster,
        "priority": short.row.need.profile.priority,
        "lacks": format_vector(short.lacks, families),
        "lacks_before_preemption": format_vector(short.row.deficit, families),
        "waits_for": list(short.waits_for),
        "reasons": plan.shortfall_reasons(short),
        **_pods_short(short.row),
    }
