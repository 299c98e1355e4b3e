"""Interesting states by name: a nightly run that never reached one of them has tested less than it says.

`observe` derives them from events; what a fault brings about by itself is marked where it happens. A mark must never
decide anything.
"""

from typing import Final

from bigfleet.engine.decision import ActionKind
from bigfleet.model.states import MachineState
from bigfleet.sim.world.evidence import Committed, Cycled, Died, Event, Evidence

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
)
_KIND_MARKS = {
    ActionKind.PROVISION: "a machine provisioned",
    ActionKind.BOOTSTRAP: "a machine bootstrapped",
    ActionKind.RECLAIM: "a machine reclaimed",
    ActionKind.PREEMPT: "a machine preempted",
    ActionKind.DELETE: "a machine released",
}


def observe(event: Event, evidence: Evidence) -> None:
    """Mark what an event shows."""
    match event:
        case Cycled():
            _cycled(event, evidence)
        case Committed(before, after) if before is not None and after is not None:
            if before.state is S.CONFIGURED and after.state is S.FAILED:
                evidence.mark("a host lost while it served")
            if before.state is S.FAILED and after.state is not S.FAILED:
                evidence.mark("a failed machine recovered")
        case Died(_shard, in_flight) if in_flight:
            evidence.mark("a shard died with actions under way")


def _cycled(event: Cycled, evidence: Evidence) -> None:
    shard, decision = event.shard, event.report.decision
    for record in event.actions:
        if not record.disposition:
            evidence.mark("a transition driven again" if record.is_redrive else _KIND_MARKS[record.action.kind])
    if event.report.cycle == 1 and shard.epoch > 1:
        evidence.mark("a shard went on after a death")
    if len(shard.strikes):
        evidence.mark("a machine held by the shard")
    if shard.metrics.removals_braked._value.get():
        evidence.mark("removals braked")
    if shard.metrics.drains_without_session._value.get():
        evidence.mark("a drain without an operator")
    if shard.refusals.refused():
        evidence.mark("an operator refused to bootstrap")
    for row in decision.rows if decision is not None else ():
        if row.unresolved:
            evidence.mark("a shortfall")
        if row.need.profile.same_key is not None:
            if row.claimed and row.satisfied:
                evidence.mark("a gang placed")
            elif not row.satisfiable:
                evidence.mark("a gang that cannot be placed")
