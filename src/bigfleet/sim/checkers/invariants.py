"""Checks the invariants at every step: one function per sentence of docs/spec/simulation.md.

Each takes one event and the observations, and yields a sentence for each violation. `INVARIANTS` lists them with the
type of event that they check; `bigfleet.sim.checkers.liveness` has those that must hold in the end. A check may not
look into the checked code further than the event shows, nor repeat that code's reasoning if the truth can be read from
a disk.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from bigfleet.engine import plain_engine
from bigfleet.engine.decision import RECLAIM_GRACE_SECONDS, ActionKind, Decision
from bigfleet.engine.snapshot import Snapshot
from bigfleet.model import vector
from bigfleet.model.clock import NANOS_PER_SECOND
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need
from bigfleet.model.states import TRANSITIONS, MachineState
from bigfleet.provider.backends.simulated.life import cluster_of, is_there
from bigfleet.shard.sessions.demand import RollUpOutcome
from bigfleet.sim.observations import (
    Audited,
    Called,
    Committed,
    Cycled,
    Died,
    Event,
    Evicted,
    Hosted,
    Marked,
    Observations,
    RolledUp,
    has_collapsed,
    is_content,
)
from bigfleet.sim.pods.evictions import Cause

S = MachineState
#: What a provider does by itself beside the table (docs/spec/provider.md §2, §13, §14).
OWN_EDGES = frozenset(
    {
        (S.IDLE, S.FAILED),
        (S.CONFIGURED, S.FAILED),
        (S.SPECULATIVE, S.IDLE),
        (S.FAILED, S.SPECULATIVE),
        (S.FAILED, S.IDLE),
        (S.FAILED, S.CONFIGURED),
    }
)
#: The table also names what a shard rolls back before its provider knew; no provider does that.
PROVIDER_EDGES = (frozenset(TRANSITIONS) | OWN_EDGES) - {(S.CONFIGURING, S.IDLE)}
#: Every so many-th cycle is decided again by the reference.
REFERENCE_EVERY_CYCLES = 8
_NOT_IN_FORCE = (RollUpOutcome.HELD, RollUpOutcome.REJECTED)
GUARD_CONFIRMATIONS = 3
#: How long an instruction and its answer take at most.
ANSWER_SECONDS_MAX = 120.0

Check = Callable[[Any, Observations], Iterator[str]]


class Invariant(NamedTuple):
    """One sentence and the function that looks whether it holds."""

    name: str
    event: type[Event]
    check: Check

    @property
    def sentence(self) -> str:
        """What it promises."""
        return " ".join((self.check.__doc__ or "").split())


INVARIANTS: list[Invariant] = []


def invariant(name: str, event: type[Event]) -> Callable[[Check], Check]:
    """Register a check under its name in docs/spec/simulation.md."""

    def register(check: Check) -> Check:
        INVARIANTS.append(Invariant(name, event, check))
        return check

    return register


def by_event() -> dict[type[Event], list[Invariant]]:
    """Return the registered invariants by the event that they look at."""
    found: defaultdict[type[Event], list[Invariant]] = defaultdict(list)
    for each in INVARIANTS:
        found[each.event].append(each)
    return dict(found)


# ---- the provider and its cloud ---------------------------------------------------------------------------------


@invariant("S1", Hosted)
def one_cluster_at_a_time(event: Hosted, _observations: Observations) -> Iterator[str]:
    """A machine is bound to at most one cluster: a host goes to another one only after it was drained."""
    before, after = event.before, event.after
    if before is None or after is None or before.ref != after.ref or not is_there(before, event.at_unix_nanos):
        return
    former = cluster_of(before, event.at_unix_nanos)
    # A host whose node never becomes Ready there serves no cluster, and the cloud knows it.
    if before.ready_unix_nanos is not None and former and after.cluster and after.cluster != former:
        yield f"{event.machine_id}: host {after.ref} was booted into {after.cluster} while it served {former}"


@invariant("S2", Marked)
def tokens_never_go_back(event: Marked, _observations: Observations) -> Iterator[str]:
    """A provider never applies a token older than one it has accepted for that (shard, machine)."""
    mark, before = event.mark, event.before
    if before is not None and (mark.epoch, mark.sequence) <= (before.epoch, before.sequence):
        yield (
            f"{mark.machine_id}: the token ({mark.epoch}, {mark.sequence}) of {mark.shard_id} was taken after"
            f" ({before.epoch}, {before.sequence})"
        )


@invariant("S3", Committed)
def states_change_along_the_table(event: Committed, _observations: Observations) -> Iterator[str]:
    """State changes only along the table."""
    before, after = event.before, event.after
    if before is None or after is None or before.state is after.state:
        return
    if (before.state, after.state) not in PROVIDER_EDGES:
        yield f"{after.id}: the provider went from {before.state.label} to {after.state.label}"


@invariant("S4", Committed)
def no_cluster_without_a_host(event: Committed, _observations: Observations) -> Iterator[str]:
    """No machine without a host has a cluster."""
    after = event.after
    if after is None:
        return
    machine = after.machine
    if machine.cluster and not machine.host.is_present:
        yield f"{machine.id}: {machine.state.label} without a host, and bound to {machine.cluster}"
    if machine.cluster and machine.state in (S.SPECULATIVE, S.CREATING, S.IDLE, S.DELETING):
        yield f"{machine.id}: {machine.state.label}, and bound to {machine.cluster}"


@invariant("S5", Committed)
def the_provider_forgets_no_host(event: Committed, _observations: Observations) -> Iterator[str]:
    """Machines are conserved: the provider lets go of no record that has a host, and every host has a record."""
    before, after = event.before, event.after
    if after is None and before is not None and before.machine.host.is_present and before.state is not S.FAILED:
        yield f"{before.id}: the record went while the host {before.machine.host.ref} was there"


@invariant("S16", Committed)
def fixed_capacity_is_never_deleting(event: Committed, _observations: Observations) -> Iterator[str]:
    """Fixed capacity is never deleted."""
    after = event.after
    if after is not None and after.slot.fixed and after.state is S.DELETING:
        yield f"{after.id}: fixed capacity is being deleted"


@invariant("S16", Hosted)
def fixed_hosts_stay(event: Hosted, _observations: Observations) -> Iterator[str]:
    """Fixed capacity is never deleted."""
    if event.is_fixed and event.after is not None and event.after.deleted_by:
        yield f"{event.machine_id}: the cloud deletes the host {event.after.ref} of fixed capacity"


# ---- what a shard sends -----------------------------------------------------------------------------------------


@invariant("S11", Called)
def a_silent_shard_makes_no_call(event: Called, _observations: Observations) -> Iterator[str]:
    """Paused and dry-run shards issue no mutating call."""
    settings, call = event.call.shard.settings, event.call
    if settings.actuation_paused or settings.dry_run:
        mode = "paused" if settings.actuation_paused else "in dry run"
        yield f"{call.method} of {call.machine_id} left a shard that is {mode}"


@invariant("S2", Called)
def every_attempt_has_a_fresh_token(event: Called, observations: Observations) -> Iterator[str]:
    """A shard never sends the same token twice, and its tokens rise."""
    call = event.call
    sent = observations.memory(call.shard).calls
    if sent and call.sequence <= max(sent):
        yield f"{call.method} of {call.machine_id} carries the sequence {call.sequence} after {max(sent)}"


@invariant("S16", Called)
def no_shard_deletes_what_stays(event: Called, observations: Observations) -> Iterator[str]:
    """No shard asks for fixed capacity to be deleted."""
    call = event.call
    if call.method == "delete" and call.machine_id in observations.fixed:
        yield f"Delete of {call.machine_id}, which is fixed capacity"


# ---- the audit log ----------------------------------------------------------------------------------------------


@invariant("S14", Audited)
def a_record_names_one_call(event: Audited, observations: Observations) -> Iterator[str]:
    """Every mutating call has exactly one audit record: none is recorded twice, none is recorded that was not made."""
    sequence, memory = event.record.token_sequence, observations.memory(event.shard)
    if not sequence:
        return
    if sequence not in memory.calls:
        yield f"{event.record.kind} of {event.record.machine} names the call {sequence}, which was never sent"
    elif memory.calls[sequence].machine_id != event.record.machine:
        yield f"the record of the call {sequence} names {event.record.machine}"
    if memory.audited[sequence]:
        yield f"{event.record.kind} of {event.record.machine} names the call {sequence} once more"


@invariant("S14", Cycled)
def no_call_goes_unrecorded(event: Cycled, observations: Observations) -> Iterator[str]:
    """Every mutating call has exactly one audit record, once its action is over."""
    memory = observations.memory(event.shard)
    yield from _unrecorded(memory.calls, memory.audited, event.shard.ledger.in_flight() | memory.called)


@invariant("S14", Died)
def the_dead_owe_the_last_call_alone(event: Died, observations: Observations) -> Iterator[str]:
    """Every mutating call has exactly one audit record, but for those that were under way at a death."""
    memory = observations.memory(event.shard)
    yield from _unrecorded(memory.calls, memory.audited, event.in_flight)


def _unrecorded(calls: Any, audited: Any, in_flight: Any) -> Iterator[str]:
    for sequence, call in calls.items():
        if not audited[sequence] and call.machine_id not in in_flight:
            yield f"{call.method} of {call.machine_id} (call {sequence}) has no audit record"


# ---- pods -------------------------------------------------------------------------------------------------------


@invariant("S21", Called)
def pods_without_another_place_stay(event: Called, observations: Observations) -> Iterator[str]:
    """A machine stays in service when its operator answers a voluntary reclaim with WOULD_NOT_FIT."""
    call = event.call
    record = call.shard.ledger.pending(MachineId(call.machine_id))
    if call.method != "drain" or record is None:
        return
    answered_nanos = observations.stranded.get(record.action_id)
    if answered_nanos is None:
        return
    waited_seconds = (observations.now_nanos() - answered_nanos) / NANOS_PER_SECOND
    # Later the grace is over, and an answer that never arrived counts for nothing.
    if waited_seconds < RECLAIM_GRACE_SECONDS - ANSWER_SECONDS_MAX:
        yield f"{call.machine_id} is drained {waited_seconds:.1f} s after WOULD_NOT_FIT to the same instruction"


@invariant("S22", Evicted)
def a_reclaim_leaves_no_pod_waiting(event: Evicted, _observations: Observations) -> Iterator[str]:
    """A voluntary reclaim leaves no pod pending that ran before, unless only the scheduler's order leaves it over."""
    eviction = event.eviction
    if eviction.cause is Cause.RECLAIMED and eviction.left_waiting and eviction.without_room:
        yield (
            f"{eviction.machine_id} of {eviction.cluster} is reclaimed with {eviction.pods} pods,"
            f" of which {eviction.without_room} have no room elsewhere, and {eviction.left_waiting} more wait"
        )


# ---- demand -----------------------------------------------------------------------------------------------------


@invariant("S10", RolledUp)
def sudden_shrinking_is_held(event: RolledUp, _observations: Observations) -> Iterator[str]:
    """A roll-up that shrinks to under a tenth is quarantined until its third time."""
    if event.rows is None or event.baseline is None or event.outcome is not RollUpOutcome.ACCEPTED:
        return
    if has_collapsed(event.baseline, event.rows) and event.suspicious_before + 1 < GUARD_CONFIRMATIONS:
        yield (
            f"{event.cluster}: a roll-up of {len(event.rows)} rows came into force after one of {len(event.baseline)},"
            f" of which it asks for less than a tenth, the {event.suspicious_before + 1}. time"
        )


@invariant("S10", Cycled)
def what_is_held_changes_nothing(event: Cycled, observations: Observations) -> Iterator[str]:
    """A quarantined roll-up changes nothing."""
    for cluster, memory in observations.memory(event.shard).clusters.items():
        if memory.last_outcome not in _NOT_IN_FORCE:
            continue
        if not is_content(event.shard.intake.table.rows_of(cluster), memory.in_force):
            yield f"{cluster}: the demand in force has changed by a roll-up that was {memory.last_outcome.value}"


@invariant("S9", Cycled)
def silence_is_not_absence(event: Cycled, observations: Observations) -> Iterator[str]:
    """Nothing is reclaimed because of silence: the demand in force is that of the last roll-up that was accepted."""
    for cluster, memory in observations.memory(event.shard).clusters.items():
        if memory.last_outcome in _NOT_IN_FORCE:
            continue
        if not is_content(event.shard.intake.table.rows_of(cluster), memory.in_force):
            yield f"{cluster}: the demand in force is not that of the last roll-up"


@invariant("S9", Cycled)
def no_reclaim_before_the_first_word(event: Cycled, observations: Observations) -> Iterator[str]:
    """Nothing is reclaimed from a cluster that has not reported since the shard started."""
    reported = observations.memory(event.shard).clusters
    for record in event.actions:
        action = record.action
        if action.kind is ActionKind.RECLAIM and not record.is_redrive and action.cluster not in reported:
            yield f"{action.machine_id} is taken from {action.cluster}, which has said nothing to this process"


# ---- decisions --------------------------------------------------------------------------------------------------


@invariant("S6", Cycled)
def a_gang_is_in_one_domain(event: Cycled, _observations: Observations) -> Iterator[str]:
    """A gang's machines are in one domain."""
    decision = event.report.decision
    if decision is None:
        return
    gangs = [row for row in decision.rows if row.need.profile.same_key is not None]
    snapshot = _snapshot(event) if gangs else None
    for row in gangs:
        assert snapshot is not None, "made for gangs"
        key = row.need.profile.same_key or ""
        held = (*row.claimed, *row.bootstraps, *row.provisions)
        domains = {snapshot.machines[machine_id].attribute(key) for machine_id in held}
        if len(domains) > 1:
            yield f"the gang {row.need.key} holds {len(held)} machines in the domains {sorted(map(str, domains))}"


@invariant("S7", Cycled)
def victims_are_lower(event: Cycled, _observations: Observations) -> Iterator[str]:
    """A victim's priority, that of its claims or, while its cluster is silent, its stamp, is below its preemptor's."""
    preempts = [record.action for record in event.actions if record.action.kind is ActionKind.PREEMPT]
    preempts = [action for action in preempts if action.reason == "phase2.inversion"]
    decision = event.report.decision
    if not preempts or decision is None or decision.basis is None:
        return
    snapshot, reported = _snapshot(event), decision.basis.options.reported
    claims = _claimed_priorities(decision)
    for action in preempts:
        victim = snapshot.machines.get(action.machine_id)
        if victim is None:
            continue
        is_heard = victim.cluster in reported
        priority = claims.get(victim.id) if is_heard else victim.assigned_priority
        if priority is not None and priority >= action.preemptor_priority:
            yield f"{victim.id} of priority {priority} is taken for one of {action.preemptor_priority}"


def _claimed_priorities(decision: Decision) -> dict[str, int]:
    """Return the highest priority among the rows that claim each machine."""
    highest: dict[str, int] = {}
    for row in decision.rows:
        for machine_id in row.claimed:
            highest[machine_id] = max(highest.get(machine_id, row.need.profile.priority), row.need.profile.priority)
    return highest


@invariant("S8", Cycled)
def reclaims_stay_under_the_cap(event: Cycled, observations: Observations) -> Iterator[str]:
    """Reclaims per cluster per cycle never exceed the cap."""
    memory = observations.memory(event.shard)
    for cluster, count in memory.reclaims.items():
        if count > memory.caps.get(cluster, 1):
            yield f"{cluster}: {count} reclaims in one period, the cap is {memory.caps.get(cluster, 1)}"


@invariant("S8", Cycled)
def reclaims_wait_for_their_delay(event: Cycled, observations: Observations) -> Iterator[str]:
    """No machine is reclaimed before it has been excess without interruption for the reclaim delay."""
    decision = event.report.decision
    if decision is None or decision.basis is None:
        return
    since = observations.memory(event.shard).excess_since_seconds
    now_seconds, after_seconds = decision.basis.options.now_seconds, event.shard.settings.reclaim_after_seconds
    for record in event.actions:
        if record.is_redrive or record.disposition or record.action.reason != "phase3.excess":
            continue
        waited = now_seconds - since.get(record.action.machine_id, now_seconds)
        if waited < after_seconds:
            machine_id = record.action.machine_id
            yield f"{machine_id} is reclaimed after {waited:g} s of excess, the delay is {after_seconds:g} s"


@invariant("S13", Cycled)
def no_bad_record_enters(event: Cycled, _observations: Observations) -> Iterator[str]:
    """A rejected provider record never enters a cost."""
    for machine in event.shard.inventory:
        price, probability = machine.price_usd_per_hour, machine.interruption_probability
        if math.isnan(price) or price < 0 or math.isnan(probability) or not 0 <= probability <= 1:
            yield f"{machine.id} is decided on at a price of {price} and a probability of {probability}"


@invariant("S5", Cycled)
def a_shard_invents_no_machine(event: Cycled, observations: Observations) -> Iterator[str]:
    """Machines are conserved: a shard knows none that its provider never had."""
    for machine_id in event.shard.inventory.ids:
        if machine_id not in observations.machines:
            yield f"{machine_id} is known to the shard and was never the provider's"


@invariant("S18", Cycled)
def incremental_equals_full(event: Cycled, _observations: Observations) -> Iterator[str]:
    """The incremental decision equals the full one."""
    decision = event.report.decision
    if event.shard.divergences():
        yield "the columnar engine's check against a full pass found another answer"
    if decision is None or decision.basis is None or event.report.cycle % REFERENCE_EVERY_CYCLES:
        return
    basis = decision.basis
    full = plain_engine.decide(basis.snapshot(), list(basis.demand), basis.options)
    if tuple(full.actions) != tuple(decision.actions):
        ours, theirs = set(decision.actions), set(full.actions)
        yield (
            f"cycle {event.report.cycle}: {len(ours)} actions, the reference has {len(theirs)};"
            f" not in it {sorted(map(str, ours - theirs))[:2]}, only in it {sorted(map(str, theirs - ours))[:2]}"
        )


@invariant("S20", Cycled)
def a_short_row_keeps_its_machines(event: Cycled, _observations: Observations) -> Iterator[str]:
    """No machine is reclaimed as excess while the row that it was bound for is short."""
    reclaims = [record.action for record in event.actions if not record.is_redrive]
    reclaims = [action for action in reclaims if action.reason == "phase3.excess"]
    decision = event.report.decision
    if not reclaims or decision is None or decision.basis is None:
        return
    machines = decision.basis.snapshot().machines
    for action in reclaims:
        machine = machines.get(action.machine_id)
        if machine is None:
            continue
        stamp = (action.cluster, machine.assigned_need_fingerprint, machine.assigned_group)
        for need in decision.basis.demand:
            if need.key == stamp and is_beyond_reach(need, machines.values()):
                yield f"{machine.id} is reclaimed, and no choice of machines covers the row {stamp} it was bound for"


def is_beyond_reach(need: Need, machines: Iterable[Machine]) -> bool:
    """Return whether a row is short under any assignment: what its cluster has and what is free do not cover it.

    Summed here and not read from the decision, which is what is judged. A machine counts when it meets the
    requirements and hosts the min unit; claims of other rows, domains and spreads only make a row shorter.
    """
    within_reach: vector.Vector = vector.ZERO
    for machine in machines:
        is_bound = machine.state in (S.CONFIGURED, S.CONFIGURING) and machine.cluster == need.cluster
        is_reachable = is_bound or machine.state in (S.CREATING, S.IDLE, S.SPECULATIVE)
        holds = all(each.holds(machine.attribute(each.key)) for each in need.profile.requirements)
        if is_reachable and holds and vector.covers(machine.supply, need.min_unit):
            within_reach = vector.add(within_reach, machine.supply)
    return not vector.covers(within_reach, need.aggregate)


@invariant("S0", Cycled)
def nothing_breaks_by_itself(_event: Cycled, observations: Observations) -> Iterator[str]:
    """Nothing of ours raises an error that it does not expect itself."""
    while observations.unexpected:
        yield observations.unexpected.pop(0)


def _snapshot(event: Cycled) -> Snapshot:
    decision = event.report.decision
    assert decision is not None, "asked for the snapshot of a decision"
    assert decision.basis is not None, "the shard keeps what it decided on"
    return decision.basis.snapshot()
