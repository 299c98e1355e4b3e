"""Checks the invariants of handovers at every step: S5 between shards, S15 and S17.

They extend the list of `bigfleet.sim.checkers.invariants`. Ownership is read from the disks of all shards and of the
provider; `remember` stores what later events are compared with. No check may ask a shard what it owns.
"""

from collections.abc import Iterator, Mapping

from bigfleet.model import labels
from bigfleet.model.clock import NANOS_PER_SECOND
from bigfleet.model.ids import MachineId, ShardId
from bigfleet.model.ownership import OwnershipRow, RowKind
from bigfleet.sim.checkers.invariants import INVARIANTS as INVARIANTS
from bigfleet.sim.checkers.invariants import by_event as by_event
from bigfleet.sim.checkers.invariants import invariant
from bigfleet.sim.observations import Called, Committed, Cycled, Marked, Observations, OwnershipChanged
from bigfleet.sim.sites.ownership import OwnershipRecord, owners

# ---- one owner --------------------------------------------------------------------------------------------------


@invariant("S5", OwnershipChanged)
def never_two_owners(_event: OwnershipChanged, observations: Observations) -> Iterator[str]:
    """No machine is owned by two shards, after any loss of disks."""
    for machine_id in sorted(observations.records):
        yield from _two_owners(machine_id, observations)


@invariant("S5", Committed)
def never_two_owners_of_what_is_bound(event: Committed, observations: Observations) -> Iterator[str]:
    """No machine is owned by two shards, in any state at its provider."""
    if event.after is not None and observations.moves.ownerships:
        yield from _two_owners(event.after.id, observations)


def _two_owners(machine_id: str, observations: Observations) -> Iterator[str]:
    record = observations.records[machine_id]
    found = owners(observations.moves.ownerships, record.machine, record.metadata.get(labels.ASSIGNED_SHARD, ""))
    if len(found) > 1:
        rows = {name: observations.moves.ownerships[name].owned.rows.get(record.machine.id) for name in found}
        yield f"{machine_id} belongs to {', '.join(found)}: {rows}"


@invariant("S5", Cycled)
def a_shard_decides_on_its_own_machines(event: Cycled, observations: Observations) -> Iterator[str]:
    """A shard decides on no machine that its disk says is another's."""
    shard = event.shard
    ownership = observations.moves.ownerships.get(shard.shard_id)
    if ownership is None or ownership.epoch != shard.epoch:
        return
    for known in shard.inventory:
        record = observations.records.get(known.id)
        binder = "" if record is None or not known.cluster else record.metadata.get(labels.ASSIGNED_SHARD, "")
        if record is not None and known.cluster and record.machine.cluster != known.cluster:
            # The provider has gone on meanwhile; the former owner is not known any more.
            continue
        is_busy = shard.ledger.is_pending(known.id)
        if not is_busy and not ownership.owns(shard.shard_id, known, binder, stays=True):
            yield f"{shard.shard_id} knows {known.id}, {known.state.label} {known.cluster!r}, and does not own it"


@invariant("S5", Called)
def a_shard_calls_for_its_own_machines(event: Called, observations: Observations) -> Iterator[str]:
    """A shard sends no call for an unbound machine that its disk says is another's."""
    shard, call = event.call.shard, event.call
    ownership = observations.moves.ownerships.get(shard.shard_id)
    known = shard.inventory.get(MachineId(call.machine_id))
    if ownership is None or ownership.epoch != shard.epoch or known is None or known.cluster:
        return
    if not ownership.owns(shard.shard_id, known, "", stays=True):
        yield f"{call.method} of {call.machine_id} leaves {shard.shard_id}, which does not own it"


@invariant("S5", Marked)
def who_gave_a_machine_up_calls_no_more(event: Marked, observations: Observations) -> Iterator[str]:
    """A provider takes no token of a shard for a machine that this shard has released."""
    mark, me = event.mark, ShardId(event.mark.shard_id)
    ownership = observations.moves.ownerships.get(me)
    row = None if ownership is None else ownership.owned.rows.get(MachineId(mark.machine_id))
    if row is not None and row.kind is not RowKind.ADOPTED and (me, row.version) in observations.moves.releases:
        yield f"{mark.machine_id}: a call of {mark.shard_id} was taken after it had given the machine up"


# ---- each instruction once --------------------------------------------------------------------------------------


def _fresh_rows(before: OwnershipRecord, after: OwnershipRecord) -> Mapping[MachineId, OwnershipRow]:
    """Return the rows that a change made again, by machine; one that only became disowned is no new one."""
    known = before.owned.rows
    return {
        machine_id: row
        for machine_id, row in sorted(after.owned.rows.items())
        if machine_id not in known or known[machine_id].version != row.version
    }


@invariant("S15", OwnershipChanged)
def an_instruction_acts_once(event: OwnershipChanged, observations: Observations) -> Iterator[str]:
    """An instruction redelivered acts once."""
    moves, me = observations.moves, event.shard_id
    for machine_id, row in _fresh_rows(event.before, event.after).items():
        if row.kind is RowKind.RELEASED and (me, row.version) in moves.releases:
            yield (
                f"{me} gives {machine_id} up under {row.version.instruction_id}, under which it gave machines up before"
            )
        if row.kind is RowKind.ADOPTED and (me, machine_id, row.version) in moves.adoptions:
            yield f"{me} takes {machine_id} over under {row.version.instruction_id} for the second time"
    for key, machines in _drained(event).items():
        everything = moves.drained.get(key, set()) | machines
        count = moves.drain_counts.get(key, 0)
        if len(everything) > count:
            yield f"{me} has drained {sorted(everything)} for {key[1]}, which asked for {count}"


@invariant("S15", OwnershipChanged)
def a_former_leader_is_not_obeyed(event: OwnershipChanged, observations: Observations) -> Iterator[str]:
    """Instructions of a leader with a lower term than the accepted one have no effect."""
    handed = observations.moves.handed.get(event.shard_id)
    if handed is None or handed.term >= handed.accepted_term:
        return
    fresh = _fresh_rows(event.before, event.after)
    domains = event.after.owned.domains - event.before.owned.domains
    if fresh or domains:
        what = [*fresh, *(domain.topology_value for domain in sorted(domains))]
        yield f"{event.shard_id} obeys the term {handed.term} after {handed.accepted_term} about {what}"


def _drained(event: OwnershipChanged) -> dict[tuple[ShardId, str], set[MachineId]]:
    found: dict[tuple[ShardId, str], set[MachineId]] = {}
    for machine_id, reservation in event.after.reservations.items():
        if machine_id not in event.before.reservations:
            found.setdefault((event.shard_id, reservation.instruction_id), set()).add(machine_id)
    return found


# ---- no move back and forth -------------------------------------------------------------------------------------


@invariant("S17", OwnershipChanged)
def what_has_come_stays_for_a_while(event: OwnershipChanged, observations: Observations) -> Iterator[str]:
    """No B→A→B move within the cooldown: a machine that has come is not given on before its cooldown is over."""
    moves, me, now_nanos = observations.moves, event.shard_id, observations.now_nanos()
    for machine_id, row in _fresh_rows(event.before, event.after).items():
        came = moves.arrivals.get((me, machine_id))
        if row.kind is not RowKind.RELEASED or came is None:
            continue
        since_nanos, giver = came
        if now_nanos - since_nanos < moves.cooldown_nanos:
            seconds = (now_nanos - since_nanos) / NANOS_PER_SECOND
            yield f"{machine_id} came from {giver} to {me} and goes to {row.other} after {seconds:.1f} s"


def remember(event: OwnershipChanged, observations: Observations) -> None:
    """Keep what a change of a disk means for later ones; called once it was judged."""
    moves, me = observations.moves, event.shard_id
    fresh = _fresh_rows(event.before, event.after)
    for machine_id, row in fresh.items():
        if row.kind is RowKind.RELEASED:
            moves.releases.add((me, row.version))
        elif row.kind is RowKind.ADOPTED:
            moves.adoptions.add((me, machine_id, row.version))
            if row.other != me:
                moves.arrivals[me, machine_id] = (observations.now_nanos(), row.other)
        observations.note("row", machine_id, f"{me} {row.kind.value} {row.version.instruction_id} {row.other}")
    for key, machines in _drained(event).items():
        moves.drained.setdefault(key, set()).update(machines)
    before, after = event.before, event.after
    if fresh or (before.owned.domains, before.owned.leaving) != (after.owned.domains, after.owned.leaving):
        moves.changes += 1
