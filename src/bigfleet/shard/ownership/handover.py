"""Executes a coordinator's instructions: releases machines, adopts them, drains them for other shards.

docs/spec/coordinator.md §9.2 to §9.5. Each step that changes ownership is one transaction of the ownership file. Every
instruction may arrive again, late, or after a crash of this process at any point. A released machine must never be
touched again, and a machine must not be touched before it is adopted.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import structlog

from bigfleet.engine.decision import Action, ActionKind
from bigfleet.model.clock import NANOS_PER_SECOND, Clock
from bigfleet.model.ids import MachineId, ShardId
from bigfleet.model.instructions import (
    AssignDomain,
    CrossShardDrain,
    Instruction,
    Reading,
    ReassignSpeculative,
    Selector,
    TransferOwnership,
    ids_of,
    owned_after,
    reading,
)
from bigfleet.model.machine import Machine, invariant_fault
from bigfleet.model.ownership import ADOPTED_MAX, Base, Domain, Owned, OwnershipVersion, Reservation, RowKind
from bigfleet.model.states import RESTING_STATES, TRANSITIONAL_STATES, MachineState
from bigfleet.shard.outcomes import COORDINATOR_REASON
from bigfleet.shard.ownership.donor_selection import DonorCandidate, DrainCandidate, chosen, victims
from bigfleet.shard.ownership.ownership_file import OwnershipFile, OwnershipNotWritten
from bigfleet.shard.ports import ListedMachine, ProviderRefusal, RefusalKind

#: How long a machine stays with who adopted it before it may be given on, and a ready reservation lasts (§7.5, §9.5).
COOLDOWN_REPORT_CYCLES = 8
RESERVED_REPORT_CYCLES = 10
#: Machines that are fenced at the same time.
FENCED_AT_ONCE_MAX = 16
#: The provider rejects this call, but it has stored its token: the machine is fenced.
_FENCED_ANYWAY = frozenset({RefusalKind.REFUSED})

Transfer = TransferOwnership | ReassignSpeculative
_log = structlog.get_logger("bigfleet.shard.ownership.handover")


class DoesNotApply(Exception):
    """An instruction that this shard can never execute; the message gives the reason."""


class MayYetSucceed(Exception):
    """An instruction that could not be executed now and may be repeated; the message gives the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverDone:
    """Result of an instruction that was carried out, for its acknowledgement."""

    #: Resolved, adopted or being drained.
    machine_ids: tuple[MachineId, ...] = ()
    #: Their records, from a donor.
    machines: tuple[Machine, ...] = ()


class HandoverHost(Protocol):
    """What a handover sees and moves of the shard; all of it on the shard's loop."""

    @property
    def pause(self) -> str:
        """Why no call may be made now; empty when calls are made."""
        ...

    def machine(self, machine_id: MachineId) -> Machine | None:
        """Return a machine of the inventory."""
        ...

    def is_busy(self, machine_id: MachineId) -> bool:
        """Return whether an action of the machine waits or runs."""
        ...

    def giveable(self, state: MachineState, selector: Selector) -> Sequence[DonorCandidate]:
        """Return what a selector means of the unbound machines of a state, without busy ones and claimed ones."""
        ...

    def drainable(self, selector: Selector) -> Sequence[Machine]:
        """Return what a selector means of the Configured machines that have joined and are not busy."""
        ...

    def lying_in(self, domain: Domain) -> Sequence[MachineId]:
        """Return the machines of the inventory whose attribute has the domain's value."""
        ...

    def has_none_in(self, domain: Domain) -> bool:
        """Return whether the inventory has machines, and none with the domain's value."""
        ...

    async def fence_machine(self, machine_id: MachineId, instruction_id: str) -> None:
        """Move the provider's mark of this machine past every token of an older process. Raises ProviderRefusal."""
        ...

    async def get(self, machine_id: MachineId) -> ListedMachine:
        """Return the provider's word on a machine. Raises ProviderRefusal."""
        ...

    def preempt(self, actions: Sequence[Action]) -> None:
        """Queue drains; what finds no room is not busy afterwards."""
        ...

    def remove(self, machine_ids: Iterable[MachineId]) -> None:
        """Take machines out of the inventory; they are not gone, they are no longer ours."""
        ...

    def add(self, machines: Iterable[Machine]) -> None:
        """Put machines into the inventory, those that are not known there and pass its screen."""
        ...

    def widened(self) -> None:
        """Read the whole inventory in the next cycle, and start that cycle soon: more is ours than before."""
        ...


class Handover:
    """One shard's side of all instructions; they come one after the other."""

    def __init__(
        self,
        *,
        me: ShardId,
        file: OwnershipFile,
        handover_host: HandoverHost,
        clock: Clock,
        report_interval_seconds: float,
    ) -> None:
        self._me = me
        self._file = file
        self._handover_host = handover_host
        self._clock = clock
        self._cooldown_nanos = int(COOLDOWN_REPORT_CYCLES * report_interval_seconds * NANOS_PER_SECOND)
        self._reserved_seconds = RESERVED_REPORT_CYCLES * report_interval_seconds
        #: On the monotonic clock, of reservations that are ready.
        self._deadlines_seconds: dict[MachineId, float] = {}

    # ---- what the link calls ------------------------------------------------------------------------------------

    async def accept_term(self, term: int) -> None:
        """Make a term durable. Raises MayYetSucceed."""
        try:
            self._file.accept_term(term)
        except OwnershipNotWritten as error:
            raise MayYetSucceed(str(error)) from error

    async def confirm(self, machine_ids: Iterable[MachineId]) -> None:
        """Note that released machines have arrived (H10). Raises MayYetSucceed."""
        owned = self._file.owned.confirmed(machine_ids)
        if owned is not self._file.owned:
            self._commit(owned)

    async def carry_out(self, instruction: Instruction) -> HandoverDone:
        """Carry an instruction out, to its end. Raises DoesNotApply and MayYetSucceed, and nothing else."""
        try:
            return await self._carry_out(instruction)
        except (DoesNotApply, MayYetSucceed):
            raise
        except Exception as error:  # a defect here must not end the link
            _log.exception("handover.instruction_failed", instruction=instruction.instruction_id)
            raise MayYetSucceed(f"{type(error).__name__}: {error}") from error

    async def _carry_out(self, instruction: Instruction) -> HandoverDone:
        payload = instruction.payload
        if isinstance(payload, CrossShardDrain):
            return self._drain(payload, instruction)
        if isinstance(payload, TransferOwnership | ReassignSpeculative):
            meant = reading(payload, self._me)
            if meant is Reading.FOREIGN:
                raise DoesNotApply(f"it moves machines from {payload.from_shard!r} to {payload.to_shard!r}, not here")
            if meant is Reading.RELEASE:
                return await self._release(payload, instruction)
            return self._take_note(payload, instruction, meant)
        if isinstance(payload, AssignDomain):
            self._check_domain(payload.domain)
        self._commit(self._after(instruction))
        self._handover_host.widened()
        return HandoverDone()

    def _check_domain(self, domain: Domain) -> None:
        """Refuse a first domain without machines: with a misspelled one the shard would lose all that are unbound."""
        if self._file.owned.base is Base.ALL and self._handover_host.has_none_in(domain):
            key, value = domain
            reason = f"no machine of this shard has {key}={value}; it would own no unbound machine any more"
            raise MayYetSucceed(f"{reason}. Unassign the domain if it is misspelled")

    # ---- releasing ----------------------------------------------------------------------------------------------

    async def _release(self, payload: Transfer, instruction: Instruction) -> HandoverDone:
        version = instruction.row_version
        if not payload.to_shard:
            raise DoesNotApply("it does not say which shard gets the machines")
        known = self._released_at(version)
        if known.machine_ids:
            return known
        named = [machine_id for machine_id in ids_of(payload) if not self._is_past(machine_id, version)]
        if ids_of(payload) and not named:
            # What a later instruction has settled is left as it is.
            return HandoverDone()
        if self._handover_host.pause:
            raise MayYetSucceed(self._handover_host.pause)
        state = MachineState.IDLE if isinstance(payload, TransferOwnership) else MachineState.SPECULATIVE
        resolved = self._named(named, state, payload.to_shard) if named else self._selected(payload, state, version)
        records = await self._fence_machines(resolved, state, payload.to_shard, instruction)
        # The shard went on meanwhile; what it has begun to use stays.
        going = [m for m in records if not self._why_not(m.id, state, payload.to_shard)]
        if not going:
            raise MayYetSucceed("none of the machines could be released now")
        owned, now_unix_nanos = self._file.owned, self._clock.unix_nanos()
        for machine in going:
            owned = owned.released(machine, version, to=payload.to_shard, now_unix_nanos=now_unix_nanos)
        gone = {machine.id for machine in going}
        self._commit(owned, {m: each for m, each in self._file.reservations.items() if m not in gone})  # H4
        self._handover_host.remove(sorted(gone))
        _log.info(
            "handover.machines_released",
            instruction=instruction.instruction_id,
            to=payload.to_shard,
            machines=len(gone),
        )
        return HandoverDone(machine_ids=tuple(machine.id for machine in going), machines=tuple(going))

    def _released_at(self, version: OwnershipVersion) -> HandoverDone:
        """Return what was released under a version before: the instruction comes again."""
        rows = {
            machine_id: row
            for machine_id, row in sorted(self._file.owned.rows.items())
            if row.version == version and row.kind is not RowKind.ADOPTED
        }
        records = tuple(row.machine for row in rows.values() if row.machine is not None)
        return HandoverDone(machine_ids=tuple(rows), machines=records)

    def _is_past(self, machine_id: MachineId, version: OwnershipVersion) -> bool:
        row = self._file.owned.rows.get(machine_id)
        return row is not None and row.version >= version

    def _selected(self, payload: Transfer, state: MachineState, version: OwnershipVersion) -> list[MachineId]:
        selector = payload.selector
        if selector is None or selector.count <= 0:
            raise DoesNotApply("it names neither machines nor a selector that asks for any")
        matching = [
            candidate
            for candidate in self._handover_host.giveable(state, selector)
            if self._is_ours(candidate.machine)
            and candidate.machine.id not in self._file.reservations
            and not self._is_past(candidate.machine.id, version)
            and not self._cools_down(candidate.machine.id)
        ]
        resolved = chosen(selector, matching)
        if not resolved:
            raise DoesNotApply(f"{state.label} machines that match: {len(matching)}, and none of them can be spared")
        return resolved

    def _named(self, machine_ids: Sequence[MachineId], state: MachineState, to: ShardId) -> list[MachineId]:
        reasons = {machine_id: self._why_not(machine_id, state, to) for machine_id in machine_ids}
        fit = [machine_id for machine_id, reason in reasons.items() if not reason]
        if fit:
            return fit
        text = "; ".join(f"{machine_id} {reason}" for machine_id, reason in list(reasons.items())[:3])
        if all(self._is_on_its_way(machine_id) for machine_id in machine_ids):
            raise MayYetSucceed(text)
        raise DoesNotApply(text)

    def _why_not(self, machine_id: MachineId, state: MachineState, to: ShardId) -> str:
        """Say why a named machine cannot be given to a shard; empty when it can."""
        machine = self._handover_host.machine(machine_id)
        if machine is None or not (machine.cluster or self._is_ours(machine)):
            return "is not ours"
        if machine.state is not state or machine.cluster:
            return f"is {machine.state.label}"
        if self._handover_host.is_busy(machine_id):
            return "has an action under way"
        reservation = self._file.reservations.get(machine_id)
        if reservation is not None and reservation.to_shard != to:
            return f"is reserved for {reservation.to_shard}"
        return ""

    def _is_ours(self, unbound: Machine) -> bool:
        return self._file.owned.owns(unbound, "", me=self._me, inherits=frozenset(), stays=False)

    def _is_on_its_way(self, machine_id: MachineId) -> bool:
        machine = self._handover_host.machine(machine_id)
        if machine is None or machine.state is MachineState.FAILED:
            return False
        return machine.state not in RESTING_STATES or self._handover_host.is_busy(machine_id)

    @property
    def cooling(self) -> frozenset[MachineId]:
        """The machines that came so lately that they are not given on yet (§7.5)."""
        return frozenset(machine_id for machine_id in self._file.owned.rows if self._cools_down(machine_id))

    def _cools_down(self, machine_id: MachineId) -> bool:
        row = self._file.owned.rows.get(machine_id)
        if row is None or row.kind is not RowKind.ADOPTED:
            return False
        # A stamp that is far ahead is that of a wall clock that was, and says nothing.
        return abs(self._clock.unix_nanos() - row.since_unix_nanos) < self._cooldown_nanos

    async def _fence_machines(
        self, machine_ids: Sequence[MachineId], state: MachineState, to: ShardId, instruction: Instruction
    ) -> list[Machine]:
        """Fence older processes of this shard off (H3); return the records of the machines that may go.

        Raises MayYetSucceed when we are the older process ourselves.
        """
        records: list[Machine] = []
        for first in range(0, len(machine_ids), FENCED_AT_ONCE_MAX):
            several = machine_ids[first : first + FENCED_AT_ONCE_MAX]
            fencings = (self._fence_machine(each, state, to, instruction) for each in several)
            # All of them end before anything follows from one.
            for found in await asyncio.gather(*fencings, return_exceptions=True):
                if isinstance(found, BaseException):
                    raise found
                records += [found] if found is not None else []
        return records

    async def _fence_machine(
        self, machine_id: MachineId, state: MachineState, to: ShardId, instruction: Instruction
    ) -> Machine | None:
        if self._why_not(machine_id, state, to):
            # It was begun to be used while others were fenced: the Drain would apply to it, and drain its pods.
            return None
        try:
            try:
                await self._handover_host.fence_machine(machine_id, instruction.instruction_id)
            except ProviderRefusal as refusal:
                if refusal.kind not in _FENCED_ANYWAY:
                    raise
            machine = (await self._handover_host.get(machine_id)).machine
        except ProviderRefusal as refusal:
            if refusal.kind is RefusalKind.FENCED:
                raise MayYetSucceed("another process of this shard is newer") from refusal
            _log.warning("handover.release_failed", machine=machine_id, refusal=refusal.kind.value, error=str(refusal))
            return None
        is_free = machine.id == machine_id and machine.state is state and not machine.cluster
        return machine.without_binding() if is_free and invariant_fault(machine) is None else None

    # ---- taking over, and hearing where machines are ------------------------------------------------------------

    def _take_note(self, payload: Transfer, instruction: Instruction, meant: Reading) -> HandoverDone:
        before, owned = self._file.owned, self._after(instruction)
        if meant is Reading.ADOPT and owned.adopted_count > max(ADOPTED_MAX, before.adopted_count):
            raise DoesNotApply(f"{before.adopted_count} machines were adopted here already, at most {ADOPTED_MAX} are")
        self._commit(owned)  # H7
        concerned = ids_of(payload)
        if meant is Reading.NOTE:
            self._handover_host.remove(each for each in concerned if self._is_elsewhere(each))
            return HandoverDone()
        if meant is Reading.ADOPT and isinstance(payload, TransferOwnership):
            fresh = {each for each in concerned if owned.rows.get(each) is not before.rows.get(each)}
            self._handover_host.add(machine.without_binding() for machine in payload.machines if machine.id in fresh)
        self._handover_host.widened()
        here = (each for each in concerned if (row := owned.rows.get(each)) and row.kind is RowKind.ADOPTED)
        return HandoverDone(machine_ids=tuple(here))

    def _is_elsewhere(self, machine_id: MachineId) -> bool:
        """Return whether a machine of the inventory is not ours any more; one that is bound is always its binder's."""
        machine, row = self._handover_host.machine(machine_id), self._file.owned.rows.get(machine_id)
        is_free = machine is not None and not machine.cluster and not self._handover_host.is_busy(machine_id)
        return is_free and row is not None and row.kind is not RowKind.ADOPTED

    def _after(self, instruction: Instruction) -> Owned:
        return owned_after(self._file.owned, instruction, me=self._me, now_unix_nanos=self._clock.unix_nanos())

    # ---- draining for others ------------------------------------------------------------------------------------

    def _drain(self, payload: CrossShardDrain, instruction: Instruction) -> HandoverDone:
        if payload.to_shard in ("", self._me):
            raise DoesNotApply("it does not say for which other shard")
        if self._handover_host.pause:
            raise MayYetSucceed(self._handover_host.pause)
        before, at_hand = self._file.reservations, self._handover_host.drainable(payload.selector)
        begun = {m for m, each in before.items() if each.instruction_id == instruction.instruction_id}
        if begun:
            # Drains that were queued and died with their process are queued again.
            self._preempt(
                victims(payload, [machine for machine in at_hand if machine.id in begun]), payload, instruction
            )
            return HandoverDone(machine_ids=tuple(sorted(begun)))
        allowed = set(payload.machine_ids)
        free = [
            each
            for each in at_hand
            if each.id not in before and (not allowed or each.id in allowed) and not self._cools_down(each.id)
        ]
        picked = victims(payload, free)
        if not picked:
            raise DoesNotApply("no machine serves less urgent work that is also cheaper to interrupt")
        reserved = {victim.machine.id: _reservation(victim.machine, payload, instruction) for victim in picked}
        self._commit(self._file.owned, {**before, **reserved})
        self._preempt(picked, payload, instruction)
        queued = {machine_id: each for machine_id, each in reserved.items() if self._handover_host.is_busy(machine_id)}
        if len(queued) < len(reserved):
            self._commit(self._file.owned, {**before, **queued})
        if not queued:
            raise MayYetSucceed("the action queue has no room")
        return HandoverDone(machine_ids=tuple(sorted(queued)))

    def _preempt(self, picked: Sequence[DrainCandidate], payload: CrossShardDrain, instruction: Instruction) -> None:
        self._handover_host.preempt([_preempt(victim, payload, instruction) for victim in picked])

    def tend(self) -> None:
        """Look after reservations and leaving domains; only after a reconcile that succeeded. Raises nothing."""
        reservations = {
            m: after for m, each in self._file.reservations.items() if (after := self._tended(each)) is not None
        }
        owned = self._file.owned
        for domain in sorted(owned.leaving):
            if not self._has_business_in(domain, reservations):
                owned = owned.left(domain)
        self._deadlines_seconds = {m: at for m, at in self._deadlines_seconds.items() if m in reservations}
        if reservations == self._file.reservations and owned is self._file.owned:
            return
        try:
            self._commit(owned, reservations)
        except MayYetSucceed as failure:
            advice = "retried later; check the disk of shard.db"
            _log.error("ownership.write_failed", error=str(failure), advice=advice)

    def _has_business_in(self, domain: Domain, reservations: Mapping[MachineId, Reservation]) -> bool:
        """Return whether a leaving domain still has a machine in use here; the others leave the inventory (§9.2)."""
        lying = [self._handover_host.machine(machine_id) for machine_id in self._handover_host.lying_in(domain)]
        # What was adopted, or lies in a domain that is held, stays for that.
        passing = [machine for machine in lying if machine is not None and not self._is_ours(machine)]
        done = {machine.id for machine in passing if machine.id not in reservations and self._is_done_with(machine)}
        self._handover_host.remove(sorted(done))
        return len(done) < len(passing)

    def _is_done_with(self, machine: Machine) -> bool:
        return (
            not machine.cluster
            and machine.state not in TRANSITIONAL_STATES
            and not self._handover_host.is_busy(machine.id)
        )

    def _tended(self, reservation: Reservation) -> Reservation | None:
        """Return what a reservation is now; None when it has ended (§9.5)."""
        machine = self._handover_host.machine(reservation.machine_id)
        if machine is None:
            return None
        if self._handover_host.is_busy(machine.id) or machine.state is MachineState.DRAINING:
            return reservation
        if machine.state is not MachineState.IDLE:
            # The drain failed, or the machine took another way.
            return None
        now_seconds, now_unix_nanos = self._clock.monotonic_seconds(), self._clock.unix_nanos()
        if not reservation.is_ready:
            self._deadlines_seconds[machine.id] = now_seconds + self._reserved_seconds
            expires = now_unix_nanos + int(self._reserved_seconds * NANOS_PER_SECOND)
            return replace(reservation, is_ready=True, expires_unix_nanos=expires)
        if machine.id not in self._deadlines_seconds:
            # Another process made it ready; a wall clock that jumped must not make it permanent.
            left_seconds = (reservation.expires_unix_nanos - now_unix_nanos) / NANOS_PER_SECOND
            self._deadlines_seconds[machine.id] = now_seconds + min(left_seconds, self._reserved_seconds)
        return reservation if now_seconds < self._deadlines_seconds[machine.id] else None

    def _commit(self, owned: Owned, reservations: dict[MachineId, Reservation] | None = None) -> None:
        try:
            self._file.commit(owned, reservations)
        except OwnershipNotWritten as error:
            raise MayYetSucceed(str(error)) from error


def _reservation(machine: Machine, payload: CrossShardDrain, instruction: Instruction) -> Reservation:
    return Reservation(
        machine_id=machine.id,
        to_shard=payload.to_shard,
        instruction_id=instruction.instruction_id,
        instance_type=machine.instance_type,
        zone=machine.zone,
    )


def _preempt(victim: DrainCandidate, payload: CrossShardDrain, instruction: Instruction) -> Action:
    return Action(
        kind=ActionKind.PREEMPT,
        machine_id=victim.machine.id,
        cluster=victim.machine.cluster,
        reason=COORDINATOR_REASON + instruction.instruction_id,
        grace_seconds=victim.grace_seconds,
        preemptor_priority=payload.preemptor_priority,
    )
