"""Delivers instructions to shards: due, delivered, acknowledged, retried, abandoned (docs/spec/coordinator.md §6).

An immutable ledger and pure functions of time. It is ephemeral: a new leader begins with an empty ledger and derives
the rest from the reports of shards. This module does not decide which instruction a shard gets.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum

from bigfleet.coordinator.transfers import Transfer
from bigfleet.model.ids import ShardId
from bigfleet.model.instructions import (
    Ack,
    AssignDomain,
    Instruction,
    InstructionOutcome,
    Payload,
    Reading,
    ReassignSpeculative,
    TransferOwnership,
    UnassignDomain,
    reading,
)
from bigfleet.model.ownership import OwnershipVersion

#: Report cycles before the second and the third attempt of what failed.
RETRY_CYCLES = (1, 4)
#: Report cycles between later attempts of what is never abandoned.
PERSISTENT_RETRY_CYCLES = 10
#: Report cycles after which an unanswered instruction to a donor expires.
DONOR_EXPIRY_CYCLES = 10
FINISHED_RETENTION_SECONDS = 3_600.0
FINISHED_MAX = 1_000
#: Instructions of one answer.
ANSWER_MAX = 1_000


class State(Enum):
    """How far an instruction is."""

    PENDING = "pending"
    DELIVERED = "delivered"
    DONE = "done"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Return whether nothing more happens to it."""
        return self not in (State.PENDING, State.DELIVERED)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionEntry:
    """One instruction to one shard."""

    to: ShardId
    instruction: Instruction
    state: State
    enqueued_seconds: float
    next_delivery_seconds: float
    #: How often it failed.
    failures: int = 0
    last: Ack | None = None
    finished_seconds: float = 0.0
    #: The proposal that it carries out, of a donor's instruction.
    move: Transfer | None = None
    #: One sentence for a person.
    why: str = ""

    @property
    def is_persistent(self) -> bool:
        """Return whether it follows from state, and is therefore never abandoned."""
        payload = self.instruction.payload
        if isinstance(payload, AssignDomain | UnassignDomain):
            return True
        if isinstance(payload, TransferOwnership | ReassignSpeculative):
            return reading(payload, self.to) is not Reading.RELEASE
        return False

    @property
    def is_surfaced(self) -> bool:
        """Return whether a person should look: refused, abandoned, or failing for the third time and not done yet."""
        is_failing = self.failures >= len(RETRY_CYCLES) + 1
        return self.state is State.FAILED or (is_failing and not self.state.is_final)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionLedger:
    """All instructions of one leader, in the order in which they were enqueued."""

    report_cycle_seconds: float
    entries: tuple[InstructionEntry, ...] = ()
    next_sequence: int = 1

    # ---- enqueuing ----------------------------------------------------------------------------------------------

    def enqueued(
        self,
        to: ShardId,
        payload: Payload,
        *,
        term: int,
        now_seconds: float,
        instruction_id: str = "",
        move: Transfer | None = None,
        why: str = "",
    ) -> "InstructionLedger":
        """Return the ledger with one more, unless one with the same effect lives, or an opposite one is cancelled.

        An empty id is the next of this leader.
        """
        if any(each.to == to and each.instruction.payload == payload for each in self.live()):
            return self
        opposite = next((each for each in self.live() if each.to == to and _undo_each_other(each, payload)), None)
        if opposite is not None and opposite.state is State.PENDING and not opposite.failures:
            return self._changed(opposite, lambda entry: _ended(entry, State.CANCELLED, now_seconds))
        version = OwnershipVersion(term, self.next_sequence)
        instruction = Instruction(
            instruction_id=instruction_id or version.instruction_id, version=version, payload=payload
        )
        entry = InstructionEntry(
            to=to,
            instruction=instruction,
            state=State.PENDING,
            enqueued_seconds=now_seconds,
            next_delivery_seconds=now_seconds,
            move=move,
            why=why,
        )
        return replace(self, entries=(*self.entries, entry), next_sequence=self.next_sequence + 1)

    # ---- delivering ---------------------------------------------------------------------------------------------

    def live(self) -> Iterable[InstructionEntry]:
        """Return the instructions that are not final, in order."""
        return (entry for entry in self.entries if not entry.state.is_final)

    def due(self, to: ShardId, now_seconds: float) -> tuple[InstructionEntry, ...]:
        """Return the instructions of the next answer to a shard, by sequence."""
        ready = [
            entry
            for entry in self.live()
            if entry.to == to and (entry.state is State.DELIVERED or entry.next_delivery_seconds <= now_seconds)
        ]
        return tuple(sorted(ready, key=lambda entry: entry.instruction.version)[:ANSWER_MAX])

    def delivered(self, entries: Iterable[InstructionEntry]) -> "InstructionLedger":
        """Return the ledger after an answer carried some."""
        ids = {(entry.to, entry.instruction.version) for entry in entries}
        return replace(
            self,
            entries=tuple(
                replace(entry, state=State.DELIVERED) if (entry.to, entry.instruction.version) in ids else entry
                for entry in self.entries
            ),
        )

    # ---- answers ------------------------------------------------------------------------------------------------

    def acked(self, by: ShardId, acks: Iterable[Ack], now_seconds: float) -> "InstructionLedger":
        """Return the ledger after a shard's answers; ids that are not known are ignored."""
        answered = {ack.instruction_id: ack for ack in acks}
        return replace(
            self,
            entries=tuple(
                self._answered(entry, answered[entry.instruction.instruction_id], now_seconds)
                if entry.to == by and not entry.state.is_final and entry.instruction.instruction_id in answered
                else entry
                for entry in self.entries
            ),
        )

    def _answered(self, entry: InstructionEntry, ack: Ack, now_seconds: float) -> InstructionEntry:
        entry = replace(entry, last=ack)
        if ack.outcome is InstructionOutcome.ACCEPTED:
            return _ended(entry, State.DONE, now_seconds)
        if ack.outcome is InstructionOutcome.REJECTED_INVALID:
            return _ended(entry, State.FAILED, now_seconds)
        failures = entry.failures + 1
        if failures <= len(RETRY_CYCLES):
            wait_cycles = RETRY_CYCLES[failures - 1]
        elif entry.is_persistent:
            wait_cycles = PERSISTENT_RETRY_CYCLES
        else:
            return _ended(replace(entry, failures=failures), State.FAILED, now_seconds)
        again_seconds = now_seconds + wait_cycles * self.report_cycle_seconds
        return replace(entry, state=State.PENDING, failures=failures, next_delivery_seconds=again_seconds)

    def at(self, now_seconds: float) -> "InstructionLedger":
        """Return the ledger at a time: unanswered instructions to donors are expired, old final ones removed."""
        expiry_seconds = DONOR_EXPIRY_CYCLES * self.report_cycle_seconds
        entries = [
            _ended(entry, State.EXPIRED, now_seconds)
            if not entry.state.is_final
            and not entry.is_persistent
            and now_seconds - entry.enqueued_seconds >= expiry_seconds
            else entry
            for entry in self.entries
        ]
        retained = [
            e for e in entries if not e.state.is_final or now_seconds - e.finished_seconds < FINISHED_RETENTION_SECONDS
        ]
        final = [entry for entry in retained if entry.state.is_final]
        gone = set(map(id, final[: max(0, len(final) - FINISHED_MAX)]))
        return replace(self, entries=tuple(entry for entry in retained if id(entry) not in gone))

    def cancelled(self, entries: Iterable[InstructionEntry], now_seconds: float) -> "InstructionLedger":
        """Return the ledger with some instructions cancelled, because their reason has ended."""
        gone = {(entry.to, entry.instruction.version) for entry in entries}
        return replace(
            self,
            entries=tuple(
                _ended(entry, State.CANCELLED, now_seconds) if (entry.to, entry.instruction.version) in gone else entry
                for entry in self.entries
            ),
        )

    def without_shard(self, shard_id: ShardId, now_seconds: float) -> "InstructionLedger":
        """Return the ledger after a shard was removed: instructions to it are cancelled."""
        return replace(
            self,
            entries=tuple(
                _ended(entry, State.CANCELLED, now_seconds)
                if entry.to == shard_id and not entry.state.is_final
                else entry
                for entry in self.entries
            ),
        )

    def _changed(
        self, entry: InstructionEntry, change: Callable[[InstructionEntry], InstructionEntry]
    ) -> "InstructionLedger":
        return replace(self, entries=tuple(change(each) if each is entry else each for each in self.entries))


def _ended(entry: InstructionEntry, state: State, now_seconds: float) -> InstructionEntry:
    return replace(entry, state=state, finished_seconds=now_seconds)


def _undo_each_other(entry: InstructionEntry, payload: Payload) -> bool:
    match entry.instruction.payload, payload:
        case (AssignDomain(first), UnassignDomain(second)) | (UnassignDomain(first), AssignDomain(second)):
            return first == second
        case _:
            return False
