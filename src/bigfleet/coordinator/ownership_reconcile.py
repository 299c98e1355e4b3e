"""Reconciles the ownership tables with the ownership that shards report (docs/spec/coordinator.md §9.6).

A pure function of views and tables, run for the shard that has just reported. An instruction of an earlier answer
counts as done until the shard's next report says otherwise, because a view is older than the answer that followed it.
An instruction is never taken as proof that it was carried out. In doubt, no machine moves.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from bigfleet.coordinator.commands import Command, DropDomain, ReleaseDomain, SetDomainOwner
from bigfleet.coordinator.tables import DomainRow, DomainState
from bigfleet.model.ids import MachineId, ShardId
from bigfleet.model.instructions import (
    AssignDomain,
    Instruction,
    Payload,
    Reading,
    ReassignSpeculative,
    TransferOwnership,
    UnassignDomain,
    ids_of,
    owned_after,
    reading,
)
from bigfleet.model.machine import Machine
from bigfleet.model.ownership import Domain, Owned, OwnershipRow, OwnershipVersion, RowKind
from bigfleet.model.states import MachineState


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnershipView:
    """What the leader knows of one shard's ownership."""

    shard_id: ShardId
    #: As last reported.
    reported: Owned
    #: Fresh, of the shard's latest epoch, and from a report that echoed this leader's term: no older leader can change
    #: it any more.
    is_current: bool
    #: Instructions of the last answer to this shard, in their order; counted as done until it reports again.
    answered: tuple[Instruction, ...] = ()
    _assumed: Owned | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def assumed(self) -> Owned:
        """What it owns if it has carried out the last answer; it is made once, and asked for with each machine."""
        owned = self._assumed
        if owned is None:
            owned = self.reported
            for instruction in self.answered:
                owned = owned_after(owned, instruction, me=self.shard_id)
            object.__setattr__(self, "_assumed", owned)
        return owned


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerViews:
    """The registered shards that could own machines of one provider, and what is known of them."""

    #: By shard, of all registered ones whose provider address is this one or not known yet.
    views: Mapping[ShardId, OwnershipView]
    #: Those without a view: they may own anything.
    unseen: frozenset[ShardId] = frozenset()
    domains: Mapping[Domain, DomainRow]
    term: int
    #: Adoptions that their recipient has refused for good, by machine.
    refused: frozenset[tuple[MachineId, OwnershipVersion]] = frozenset()

    @property
    def missing(self) -> tuple[ShardId, ...]:
        """The shards without a current view; nothing that could make two owners is done while there is one."""
        stale = (shard_id for shard_id, view in self.views.items() if not view.is_current)
        return tuple(sorted({*self.unseen, *stale}))


class WantedInstruction(NamedTuple):
    """An instruction that follows from state."""

    to: ShardId
    #: That of the rows' version, so that any leader derives the same; empty: the next one of this leader.
    instruction_id: str
    payload: Payload


@dataclass(slots=True)
class OwnershipPlan:
    """What is to be done for one shard."""

    commands: list[Command] = field(default_factory=list)
    instructions: list["WantedInstruction"] = field(default_factory=list)
    #: Machines to take back to this shard; their instruction needs a new version.
    taken_back: list[MachineId] = field(default_factory=list)
    #: Released machines of this shard that have arrived.
    confirmed: list[MachineId] = field(default_factory=list)
    #: Whom the leader waits for, where it waits.
    waits_for: tuple[ShardId, ...] = ()


def reconcile_ownership(shard_id: ShardId, peers: PeerViews) -> OwnershipPlan:
    """Return what is to be done after a report of a shard with a current view; nothing for any other."""
    done = OwnershipPlan()
    view = peers.views.get(shard_id)
    if view is None or not view.is_current:
        return done
    _reconcile_domains(view, peers, done)
    for machine_id in sorted(view.reported.rows):
        _reconcile_machine(machine_id, view, peers, done)
    done.instructions = _grouped(done.instructions)
    return done


def still_follows(instruction: Instruction, to: ShardId, peers: PeerViews) -> bool:
    """Return whether what was enqueued for a shard still follows from what is known, at the moment of its delivery.

    An adoption needs its release in some view, and nothing later anywhere: a shard that has lost its disk would
    otherwise adopt what it has given on since. A row is forgotten only if no other shard has the machine meanwhile.
    """
    payload, version = instruction.payload, instruction.row_version
    if not isinstance(payload, TransferOwnership | ReassignSpeculative):
        return True
    meant = reading(payload, to)
    for machine_id in ids_of(payload):
        reported = [view.reported.rows[machine_id] for view in peers.views.values() if machine_id in view.reported.rows]
        rows = [*reported, *_assumed_rows(machine_id, peers)]
        if meant is Reading.ADOPT:
            is_released = any(row.kind is RowKind.RELEASED and row.version == version for row in reported)
            if not is_released or any(row.version > version for row in rows):
                return False
        if meant is Reading.FORGET and not _is_nowhere(rows):
            return False
    return True


# ---- domains -----------------------------------------------------------------------------------------------------


def _reconcile_domains(view: OwnershipView, peers: PeerViews, done: OwnershipPlan) -> None:
    me, reported, assumed = view.shard_id, view.reported, view.assumed
    for domain in sorted(reported.domains | reported.leaving):
        row = peers.domains.get(domain)
        if row is None:
            # The store was lost or restored: the shard knows better.
            done.commands.append(SetDomainOwner(domain, me))
            if domain in reported.leaving:
                done.commands.append(ReleaseDomain(domain))
        elif (row.shard_id != me or row.state is DomainState.RELEASING) and domain in assumed.domains:
            done.instructions.append(WantedInstruction(me, "", UnassignDomain(domain)))
    for domain, row in sorted(peers.domains.items()):
        if row.shard_id != me:
            continue
        if row.state is DomainState.RELEASING:
            if _has_left(view, domain):
                done.commands.append(DropDomain(domain))
        elif domain not in assumed.domains:
            _give(domain, view, peers, done)


def _still_in(domain: Domain, others: Iterable[OwnershipView]) -> tuple[ShardId, ...]:
    """Return the other shards that have a domain; it is assigned to no shard while there is one."""
    return tuple(view.shard_id for view in others if not _has_left(view, domain))


def _moved(view: OwnershipView) -> Iterable[tuple[MachineId, OwnershipRow]]:
    """Return a shard's rows, those included that an answer instructed it to make and no report has shown yet."""
    return view.assumed.rows.items()


def _has_left(view: OwnershipView, domain: Domain) -> bool:
    """Return whether a shard has left a domain, in its report and by its answers since.

    Judged on an old view the domain could have two owners.
    """
    return not _lists(view.reported, domain) and not _lists(view.assumed, domain)


def _give(domain: Domain, view: OwnershipView, peers: PeerViews, done: OwnershipPlan) -> None:
    """Give a domain once it is known which of its machines are elsewhere, and say so before it."""
    if peers.missing:
        done.waits_for = peers.missing
        return
    me = view.shard_id
    others = [other for shard_id, other in sorted(peers.views.items()) if shard_id != me]
    listing = _still_in(domain, others)
    if listing:
        done.waits_for = listing
        return
    elsewhere: dict[MachineId, tuple[OwnershipVersion, ShardId]] = {}
    for other in others:
        for machine_id, row in _moved(other):
            at = other.shard_id if row.kind is RowKind.ADOPTED else row.other
            if row.kind is not RowKind.DISOWNED and at != me:
                elsewhere[machine_id] = max(elsewhere.get(machine_id, (row.version, at)), (row.version, at))
    for machine_id, (version, at) in sorted(elsewhere.items()):
        own = view.reported.rows.get(machine_id)
        if own is None or own.version < version:
            done.instructions.append(_note(machine_id, version, me, at))
    done.instructions.append(WantedInstruction(me, "", AssignDomain(domain)))


# ---- machines ----------------------------------------------------------------------------------------------------


def _reconcile_machine(machine_id: MachineId, view: OwnershipView, peers: PeerViews, done: OwnershipPlan) -> None:
    rows = {
        shard_id: other.reported.rows[machine_id]
        for shard_id, other in sorted(peers.views.items())
        if machine_id in other.reported.rows
    }
    latest = max(row.version for row in rows.values())
    own = rows[view.shard_id]
    holders = [shard_id for shard_id, row in rows.items() if row.kind is RowKind.ADOPTED and row.version == latest]
    if holders:
        (holder,) = holders[:1]
        _settle_arrived(machine_id, latest, holder, view, rows, peers, done)
    elif own.kind is RowKind.RELEASED and own.version < latest:
        done.confirmed.append(machine_id)
    elif own.kind is RowKind.RELEASED:
        _hand_on(machine_id, own, view, peers, done)
    elif _is_nowhere([*rows.values(), *_assumed_rows(machine_id, peers)]):
        _forget(machine_id, latest, view, rows, peers, done)
    else:
        # The row of another shard is the latest, and released: its own report goes on with it.
        return


def _is_nowhere(rows: Iterable[OwnershipRow]) -> bool:
    """Return whether no row says more than that the machine is elsewhere."""
    return all(row.kind is RowKind.DISOWNED for row in rows)


def _assumed_rows(machine_id: MachineId, peers: PeerViews) -> list[OwnershipRow]:
    owned = (view.assumed for view in peers.views.values())
    return [each.rows[machine_id] for each in owned if machine_id in each.rows]


def _settle_arrived(
    machine_id: MachineId,
    latest: OwnershipVersion,
    holder: ShardId,
    view: OwnershipView,
    rows: Mapping[ShardId, OwnershipRow],
    peers: PeerViews,
    done: OwnershipPlan,
) -> None:
    """A machine has arrived at its holder: confirm what was released before, and note it where it was before."""
    own = rows[view.shard_id]
    if own.kind is RowKind.RELEASED:
        done.confirmed.append(machine_id)
    elif _is_former_holder(own, latest):
        done.instructions.append(_note(machine_id, latest, view.shard_id, holder))
    if view.shard_id == holder:
        giver = own.other
        known = peers.views.get(giver)
        if giver != holder and known is not None and known.is_current and machine_id not in known.assumed.rows:
            done.instructions.append(_note(machine_id, latest, giver, holder))


def _is_former_holder(own: OwnershipRow, latest: OwnershipVersion) -> bool:
    """Return whether a shard holds what is elsewhere by now.

    It was removed and lives after all, or its file was restored from a backup.
    """
    return own.kind is RowKind.ADOPTED and own.version < latest


def _hand_on(
    machine_id: MachineId, own: OwnershipRow, view: OwnershipView, peers: PeerViews, done: OwnershipPlan
) -> None:
    """A released machine has not arrived: send it on, or take it back when its recipient is gone."""
    is_mine = own.version.term == peers.term
    is_known = own.other in peers.views or own.other in peers.unseen
    is_refused = (machine_id, own.version) in peers.refused
    if peers.missing and not (is_mine and is_known and not is_refused):
        done.waits_for = peers.missing
    elif is_known and not is_refused:
        done.instructions.append(
            WantedInstruction(own.other, f"{own.version.instruction_id}/adopt", _adoption(machine_id, own, view))
        )
    else:
        done.taken_back.append(machine_id)


def _adoption(machine_id: MachineId, own: OwnershipRow, view: OwnershipView) -> Payload:
    record = own.machine
    if record is not None and record.state is MachineState.SPECULATIVE:
        return ReassignSpeculative(from_shard=view.shard_id, to_shard=own.other, machine_ids=(machine_id,))
    records: tuple[Machine, ...] = () if record is None else (record,)
    return TransferOwnership(from_shard=view.shard_id, to_shard=own.other, machine_ids=(machine_id,), machines=records)


def _forget(
    machine_id: MachineId,
    latest: OwnershipVersion,
    view: OwnershipView,
    rows: Mapping[ShardId, OwnershipRow],
    peers: PeerViews,
    done: OwnershipPlan,
) -> None:
    """Nobody has a machine but by its domain: forget where it was, everywhere."""
    if peers.missing:
        done.waits_for = peers.missing
        return
    for shard_id, row in rows.items():
        payload = TransferOwnership(from_shard=shard_id, to_shard=ShardId(""), machine_ids=(machine_id,), is_note=True)
        done.instructions.append(
            WantedInstruction(shard_id, f"{row.version.instruction_id}/forget/{shard_id}", payload)
        )


def _note(machine_id: MachineId, version: OwnershipVersion, to: ShardId, at: ShardId) -> WantedInstruction:
    payload = TransferOwnership(from_shard=to, to_shard=at, machine_ids=(machine_id,), is_note=True)
    return WantedInstruction(to, f"{version.instruction_id}/note/{to}", payload)


def _lists(owned: Owned, domain: Domain) -> bool:
    return domain in owned.domains or domain in owned.leaving


def _grouped(wanted: list[WantedInstruction]) -> list[WantedInstruction]:
    """Return one instruction for all machines that share an id, in the order of the first of each."""
    grouped: dict[tuple[ShardId, str], WantedInstruction] = {}
    alone: list[WantedInstruction] = []
    for each in wanted:
        if not each.instruction_id:
            alone.append(each)
            continue
        key = (each.to, each.instruction_id)
        grouped[key] = _joined(grouped[key], each) if key in grouped else each
    # Domains come last: what is elsewhere is noted before they are given.
    return [*grouped.values(), *alone]


def _joined(first: WantedInstruction, second: WantedInstruction) -> WantedInstruction:
    left, right = first.payload, second.payload
    if isinstance(left, TransferOwnership) and isinstance(right, TransferOwnership):
        ids = (*left.machine_ids, *right.machine_ids)
        return first._replace(payload=replace(left, machine_ids=ids, machines=(*left.machines, *right.machines)))
    if isinstance(left, ReassignSpeculative) and isinstance(right, ReassignSpeculative):
        return first._replace(payload=replace(left, machine_ids=(*left.machine_ids, *right.machine_ids)))
    raise ValueError(f"{first.instruction_id} of {first.to} means two things")
