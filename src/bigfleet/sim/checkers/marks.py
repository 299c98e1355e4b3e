"""Defines coverage marks: states that a run must reach to count as a test of them.

`observe` derives them from events, and keeps what later ones need to know. A state that a fault causes directly is
marked where it happens. A mark must never decide anything.
"""

from typing import Final

from bigfleet.engine.decision import ActionKind
from bigfleet.model.ownership import RowKind
from bigfleet.model.states import MachineState
from bigfleet.shard.sessions.demand import RollUpOutcome
from bigfleet.sim.observations import (
    Committed,
    Cycled,
    Died,
    Event,
    Evicted,
    Observations,
    OwnershipChanged,
    RolledUp,
    Stranded,
)
from bigfleet.sim.pods.evictions import Cause

S = MachineState
#: Every mark that a long run must reach.
MARKS: Final = (
    "a machine provisioned",
    "a machine bootstrapped",
    "a machine reclaimed",
    "a machine preempted",
    "a machine released",
    "a transition driven again",
    "a gang placed",
    "a gang that cannot be placed",
    "a host lost while it served",
    "a failed machine recovered",
    "a roll-up quarantined",
    "a quarantined roll-up believed",
    "a call answered fenced",
    "a call answered unknown_outcome",
    "a call answered refused",
    "a call answered exhausted",
    "a machine held by the shard",
    "removals braked",
    "a shard died with actions under way",
    "a shard went on after a death",
    "a zombie went on",
    "a shortfall",
    "a stale List",
    "a partial List",
    "a lost cursor",
    "a mangled record",
    "an operator refused to bootstrap",
    "a drain without an operator",
    "a machine moved between shards",
    "a slot moved between shards",
    "a machine drained for another shard",
    "a machine that was drained for another shard moved",
    "a domain left",
    "another leader",
    "leader changed during a handover",
    "gang preempted during a leader change",
    "roll-up quarantined during a handover",
    "a shard died over an instruction",
    "an instruction accepted",
    "an instruction rejected_invalid",
    "an instruction failed",
    "an instruction redelivered",
    "an instruction redelivered to a new process",
    "an answer came again",
    "an answer of a former leader",
    "a commit of unknown outcome",
    "a shard's disk took nothing",
    "a pod that waits in a row that is met",
    "pods without another place",
    "pods moved by a reclaim",
    "a machine shared by rows",
    "a machine acquired with a target",
    "a target replaced",
    "a request that is too large",
    "a pod given up",
)
_KIND_MARKS = {
    ActionKind.PROVISION: "a machine provisioned",
    ActionKind.BOOTSTRAP: "a machine bootstrapped",
    ActionKind.RECLAIM: "a machine reclaimed",
    ActionKind.PREEMPT: "a machine preempted",
    ActionKind.DELETE: "a machine released",
}
#: States of a machine whose pods may still run.
_HELD = (S.CONFIGURED, S.DRAINING)


def observe(event: Event, observations: Observations) -> None:
    """Mark what an event shows."""
    match event:
        case Cycled():
            _cycled(event, observations)
        case Committed(before, after) if before is not None and after is not None:
            if after.state not in _HELD:
                observations.moves.taken_from_gangs.discard(after.id)
            if before.state is S.CONFIGURED and after.state is S.FAILED:
                observations.mark("a host lost while it served")
            if before.state is S.FAILED and after.state is not S.FAILED:
                observations.mark("a failed machine recovered")
        case RolledUp() if event.outcome is RollUpOutcome.HELD and observations.moves.under_way:
            observations.mark("roll-up quarantined during a handover")
        case RolledUp(rows=rows) if rows is not None and any(row.waiting for row in rows):
            observations.mark("a pod that waits in a row that is met")
        case Stranded(drain=drain):
            observations.stranded.setdefault(drain.instruction_id, observations.now_nanos())
            observations.mark("pods without another place")
        case Evicted(eviction) if eviction.cause is Cause.RECLAIMED:
            observations.mark("pods moved by a reclaim")
        case OwnershipChanged():
            _mark_moves(event, observations)
        case Died(shard, in_flight):
            if in_flight:
                observations.mark("a shard died with actions under way")
            if shard.shard_id in observations.moves.busy:
                observations.mark("a shard died over an instruction")


def _mark_moves(event: OwnershipChanged, observations: Observations) -> None:
    before, after = event.before, event.after
    for machine_id, row in after.owned.rows.items():
        known = before.owned.rows.get(machine_id)
        if known is not None and known.version == row.version:
            continue
        if row.kind is RowKind.ADOPTED:
            record = observations.records.get(machine_id)
            is_slot = record is not None and not record.machine.host.is_present
            observations.mark("a slot moved between shards" if is_slot else "a machine moved between shards")
        elif row.kind is RowKind.RELEASED and machine_id in before.reservations:
            observations.mark("a machine that was drained for another shard moved")
    for _machine_id in after.reservations.keys() - before.reservations.keys():
        observations.mark("a machine drained for another shard")
    for _domain in before.owned.leaving - after.owned.leaving - after.owned.domains:
        observations.mark("a domain left")


def _cycled(event: Cycled, observations: Observations) -> None:
    shard, decision = event.shard, event.report.decision
    for record in event.actions:
        if record.disposition:
            continue
        observations.mark("a transition driven again" if record.is_redrive else _KIND_MARKS[record.action.kind])
        known = observations.records.get(record.action.machine_id)
        is_taken = record.action.kind is ActionKind.PREEMPT and known is not None and known.state in _HELD
        if is_taken and record.group:
            observations.moves.taken_from_gangs.add(record.action.machine_id)
    if event.report.cycle == 1 and shard.epoch > 1:
        observations.mark("a shard went on after a death")
    if len(shard.machine_backoff):
        observations.mark("a machine held by the shard")
    if shard.metrics.removals_braked._value.get():
        observations.mark("removals braked")
    if shard.metrics.drains_without_session._value.get():
        observations.mark("a drain without an operator")
    if shard.demand_backoff.refused():
        observations.mark("an operator refused to bootstrap")
    _targets(event, observations)
    hosted: dict[str, int] = {}
    for row in decision.rows if decision is not None else ():
        for machine_id in row.claimed:
            if hosted.setdefault(machine_id, id(row)) != id(row):
                observations.mark("a machine shared by rows")
        if row.impossible:
            observations.mark("a request that is too large")
        if row.unresolved:
            observations.mark("a shortfall")
        if row.need.profile.same_key is not None:
            if row.claimed and row.satisfied:
                observations.mark("a gang placed")
            elif not row.satisfiable:
                observations.mark("a gang that cannot be placed")


def _targets(event: Cycled, observations: Observations) -> None:
    decision, memory = event.report.decision, observations.memory(event.shard)
    if decision is None or decision.basis is None:
        return
    targets = decision.basis.options.targets
    if any(memory.targets[cluster] is not targets.get(cluster) for cluster in memory.targets):
        observations.mark("a target replaced")
    if any(action.profile is not None and action.cluster in targets for action in decision.actions):
        observations.mark("a machine acquired with a target")
    memory.targets = dict(targets)
