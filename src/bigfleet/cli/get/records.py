"""Converts the shard's messages to plain records, the JSON objects of `bigfleet get`.

Names are camelCase, times RFC 3339 in UTC, amounts Kubernetes quantities, money US dollars. Every name is always
present; null means that there is no value. A record has no age, so equal records mean that nothing changed. Nothing
here decides which columns a table has.
"""

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import xxhash

from bigfleet.engine.shortfalls import priority_class
from bigfleet.model.frames import UnmetReason
from bigfleet.model.penalty import ORDINALS, bucket_label
from bigfleet.model.profile import Operator
from bigfleet.rpc.wire.convert_machine import capacity_type_from_wire, state_from_wire
from bigfleet.rpc.wire.gen import capacity_pb2, shardread_pb2

Record = dict[str, Any]

NANOS_PER_SECOND: Final = 1_000_000_000
_OPERATORS: Final = {operator.value: operator.label for operator in Operator}
_WHEN_UNSATISFIABLE: Final = {1: "DoNotSchedule", 2: "ScheduleAnyway"}


def time_text(unix_nanos: int) -> str | None:
    """Return RFC 3339 with milliseconds in UTC, None for 0."""
    if not unix_nanos:
        return None
    moment = datetime.fromtimestamp(unix_nanos / NANOS_PER_SECOND, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def unix_seconds(text: str) -> float:
    """Return the Unix seconds of a time that `time_text` wrote."""
    return datetime.fromisoformat(text).timestamp()


def need_id(fingerprint: str, group: str) -> str:
    """Return 16 hexadecimal digits that stand for a row within its cluster, where its fingerprint is too long to say.

    Equal in every cluster, process and version; two rows of one cluster share one about never.
    """
    return xxhash.xxh3_64_hexdigest(f"{fingerprint}\0{group}".encode())


def machine_record(view: shardread_pb2.MachineView) -> Record:
    """Return the record of one machine."""
    machine = view.machine
    state = state_from_wire(machine.state)
    is_stamped = bool(view.assigned_need_fingerprint or machine.cluster)
    return {
        "id": machine.id,
        "state": state.label,
        "stateSince": time_text(view.state_since_unix_nanos),
        "cluster": machine.cluster or None,
        "instanceType": machine.instance_type or None,
        "zone": machine.zone or None,
        "capacityType": capacity_type_from_wire(machine.capacity_type).label,
        "priceUsdPerHour": _number(machine.price_per_hour),
        "interruptionProbability": _number(machine.interruption_probability),
        "allocatable": _quantities(machine.allocatable.resources or machine.resources.resources),
        "labels": dict(sorted(machine.labels.items())),
        "host": f"{machine.host.provider}/{machine.host.ref}" if machine.HasField("host") else None,
        "nodeName": machine.node_name or None,
        "priority": view.assigned_priority if is_stamped else None,
        "interruptionPenaltyUsd": _penalty(view.assigned_interruption_penalty_dollars) if is_stamped else None,
        "reclamationPenaltyUsd": _penalty(view.assigned_reclamation_penalty_dollars) if is_stamped else None,
        "needFingerprint": view.assigned_need_fingerprint or None,
        "group": view.assigned_group or None,
        "pendingAction": view.pending_action or None,
        "joined": view.joined,
        "unjoined": view.unjoined,
        "stuck": view.stuck,
        "held": view.held,
        "reservedForShard": view.reserved_for_shard_id or None,
        "reservedUntil": time_text(view.reserved_until_unix_nanos),
        "reclaimDelayedUntil": time_text(view.reclaim_delayed_until_unix_nanos),
        "reclaimDelayedReason": view.reclaim_delayed_reason or None,
        "lastError": machine.last_error or None,
    }


def need_record(view: shardread_pb2.NeedView) -> Record:
    """Return the record of one row of demand and of what the last cycle gave it."""
    need = view.need
    return {
        "cluster": view.cluster_id,
        "need": need_id(view.profile_fingerprint, need.group),
        "fingerprint": view.profile_fingerprint,
        "group": need.group or None,
        "priority": need.priority,
        "class": priority_class(need.priority),
        "requirements": [_requirement(requirement) for requirement in need.requirements],
        "spread": [_spread(spread) for spread in need.spread],
        "interruptionPenalty": _bucket(need.interruption_penalty_bucket),
        "reclamationPenalty": _bucket(need.reclamation_penalty_bucket),
        "wanted": _quantities(need.aggregate_resources),
        "minUnit": _quantities(need.min_unit),
        "missing": _quantities(view.residual_deficit.resources),
        "satisfied": view.satisfied,
        "reason": None if view.satisfied else _reason(view.unmet_reason),
        "unmetCycles": view.age_cycles_unmet,
        "firstReported": time_text(view.arrival_unix_nanos),
        "machines": view.claimed_machine_count,
        "bootstraps": view.bootstrap_count,
        "provisions": view.provision_count,
        "domain": view.same_domain or None,
        "domainSatisfiable": view.same_satisfiable if _has_same(need) else None,
        "parked": view.acquisition_parked,
        "parkedCycles": view.parked_age_cycles,
        "matchingSupply": _supply(view),
        "victims": view.preemption.victims_found,
        "victimsFree": _quantities(view.preemption.capacity_freed.resources),
    }


def action_record(action: shardread_pb2.ActionRecord) -> Record:
    """Return the record of one action; outcome and finish are null while it runs."""
    return {
        "id": action.action_id,
        "kind": action.kind,
        "machine": action.machine_id,
        "cluster": action.cluster_id or None,
        "reason": action.reason,
        "decidedCycle": action.decided_cycle,
        "executedCycle": action.executed_cycle or None,
        "decided": time_text(action.decided_unix_nanos),
        "finished": time_text(action.finished_unix_nanos),
        "graceSeconds": action.grace_seconds,
        "preemptorPriority": action.preemptor_priority,
        "outcome": action.outcome or None,
        "message": action.message or None,
    }


def session_record(view: shardread_pb2.SessionView) -> Record:
    """Return the record of one cluster's operator; outbox and capabilities are those of its session, if it has one."""
    is_connected = view.state == "connected"
    return {
        "cluster": view.cluster_id,
        "state": view.state,
        "since": time_text(view.since_unix_nanos),
        "lastRollup": time_text(view.last_rollup_unix_nanos),
        "rows": view.rows,
        "rollupHeld": view.rollup_held,
        "outboxFrames": view.outbox_frames if is_connected else None,
        "outboxDropped": view.outbox_dropped if is_connected else None,
        "capabilities": list(view.capabilities),
    }


def event_record(event: shardread_pb2.Explanation) -> Record:
    """Return the record of one event of a decision."""
    return {
        "kind": event.kind,
        "machine": event.machine_id or None,
        "domain": event.domain or None,
        "text": event.text,
        "attributes": dict(sorted(event.attributes.items())),
    }


def _quantities(quantities: Mapping[str, str]) -> dict[str, str]:
    return dict(sorted(quantities.items()))


def _number(value: float) -> float | None:
    """Return a number that JSON has; a provider's record may hold others."""
    return value if math.isfinite(value) else None


def _penalty(dollars: float) -> float | str | None:
    return "pinned" if dollars == math.inf else _number(dollars)


def _bucket(ordinal: int) -> str:
    return bucket_label(ordinal) if ordinal in ORDINALS else "unspecified"


def _requirement(requirement: capacity_pb2.NodeSelectorRequirement) -> Record:
    operator = _OPERATORS.get(requirement.operator, Operator.UNSPECIFIED.label)
    return {"key": requirement.key, "operator": operator, "values": list(requirement.values)}


def _spread(spread: capacity_pb2.TopologySpread) -> Record:
    return {
        "topologyKey": spread.topology_key,
        "maxSkew": spread.max_skew,
        "whenUnsatisfiable": _WHEN_UNSATISFIABLE.get(spread.when_unsatisfiable, "Unspecified"),
    }


def _has_same(need: capacity_pb2.CapacityNeed) -> bool:
    return any(_OPERATORS.get(requirement.operator) == Operator.SAME.label for requirement in need.requirements)


def _reason(number: int) -> str:
    """Return the reason as metrics label it, such as `priority_starved`."""
    try:
        return UnmetReason(number).label
    except ValueError:
        # A newer shard's.
        return f"reason_{number}"


def _supply(view: shardread_pb2.NeedView) -> Record | None:
    if not view.HasField("matching_supply"):
        return None
    supply = view.matching_supply
    return {
        "idle": supply.idle,
        "configured": supply.configured,
        "speculative": supply.speculative,
        "capped": supply.capped,
    }
