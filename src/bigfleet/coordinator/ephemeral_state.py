"""Holds what a leader learns from reports and drops when it loses leadership (docs/spec/coordinator.md §5).

Values are immutable; each report makes new ones. Times are seconds of the leader's monotonic clock and are passed in.
This module does not write to the store.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from bigfleet.coordinator.delivery import PERSISTENT_RETRY_CYCLES, InstructionEntry, InstructionLedger, State
from bigfleet.coordinator.ownership_reconcile import (
    OwnershipPlan,
    OwnershipView,
    PeerViews,
    WantedInstruction,
    still_follows,
)
from bigfleet.coordinator.reports import ShardFigures
from bigfleet.coordinator.tables import Tables
from bigfleet.model.ids import ClusterId, MachineId, ShardId
from bigfleet.model.instructions import (
    Ack,
    AssignDomain,
    Instruction,
    InstructionOutcome,
    Reading,
    ReassignSpeculative,
    TransferOwnership,
    UnassignDomain,
    ids_of,
    reading,
)
from bigfleet.model.ownership import Domain, Owned, OwnershipVersion
from bigfleet.model.shard_report import SoldOutPool
from bigfleet.model.states import CapacityType

#: Pools of one answer.
SOLD_OUT_MAX = 64
#: Report cycles within which a report counts as fresh.
FRESH_CYCLES = 3


def _of_domain(domain: Domain) -> tuple[AssignDomain, UnassignDomain]:
    return AssignDomain(domain), UnassignDomain(domain)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedReport:
    """One report of one shard."""

    shard_id: ShardId
    epoch: int
    cycle: int
    address: str = ""
    #: The term that the shard has accepted.
    echoed_term: int = 0
    provider_address: str = ""
    figures: ShardFigures | None = None
    #: None: as it was.
    owned: Owned | None = None
    clusters: frozenset[ClusterId] | None = None
    acks: tuple[Ack, ...] = ()
    sold_out: tuple[SoldOutPool, ...] = ()

    @property
    def order(self) -> tuple[int, int]:
        """Reports of a shard are ordered by epoch, then cycle."""
        return (self.epoch, self.cycle)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The last that was heard of a shard."""

    report: ReceivedReport
    received_seconds: float
    #: Its last view, and the epoch and echoed term of the report that brought it.
    reported: Owned | None = None
    reported_epoch: int = 0
    reported_echo: int = 0
    clusters: frozenset[ClusterId] = frozenset()
    #: What the last answer carried; counted as done until the next report.
    answered: tuple[Instruction, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportAnswer:
    """What a shard is answered."""

    term: int
    #: False: out of order or superseded, nothing was taken.
    acknowledged: bool = True
    instructions: tuple[Instruction, ...] = ()
    want_ownership: bool = False
    confirmed: tuple[MachineId, ...] = ()
    #: What other shards of the same provider report, longest back-off first.
    sold_out: tuple[SoldOutPool, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EphemeralState:
    """Everything that a leader knows from reports."""

    term: int
    ledger: InstructionLedger
    known: Mapping[ShardId, Known] = field(default_factory=dict)
    #: Adoptions that their recipient has refused for good.
    refused: frozenset[tuple[MachineId, OwnershipVersion]] = frozenset()

    @classmethod
    def of_new_leader(cls, term: int, report_cycle_seconds: float) -> "EphemeralState":
        """Return the empty state of a new leader."""
        return cls(term=term, ledger=InstructionLedger(report_cycle_seconds=report_cycle_seconds))

    # ---- reports ------------------------------------------------------------------------------------------------

    def is_in_order(self, report: ReceivedReport) -> bool:
        """Return whether a report is not older than the last one of its shard."""
        known = self.known.get(report.shard_id)
        return known is None or report.order >= known.report.order

    def reported(self, report: ReceivedReport, now_seconds: float) -> "EphemeralState":
        """Return the state after an accepted report, its answers to instructions included (§4)."""
        before = self.known.get(report.shard_id)
        known = Known(report=report, received_seconds=now_seconds)
        if before is not None:
            # The same report again was sent before the answer to it: what that carried may still be done.
            answered = before.answered if before.report.order == report.order else ()
            known = replace(before, report=report, received_seconds=now_seconds, answered=answered)
        if report.owned is not None:
            known = replace(known, reported=report.owned, reported_epoch=report.epoch, reported_echo=report.echoed_term)
        if report.clusters is not None:
            known = replace(known, clusters=report.clusters)
        refused = self.refused | self._refused_by(report)
        ledger = self.ledger.at(now_seconds).acked(report.shard_id, report.acks, now_seconds)
        return replace(self, known={**self.known, report.shard_id: known}, ledger=ledger, refused=refused)

    def _refused_by(self, report: ReceivedReport) -> set[tuple[MachineId, OwnershipVersion]]:
        refused_ids = {ack.instruction_id for ack in report.acks if ack.outcome is InstructionOutcome.REJECTED_INVALID}
        found: set[tuple[MachineId, OwnershipVersion]] = set()
        for entry in self.ledger.live():
            payload, instruction = entry.instruction.payload, entry.instruction
            if entry.to != report.shard_id or instruction.instruction_id not in refused_ids:
                continue
            if not isinstance(payload, TransferOwnership | ReassignSpeculative):
                continue
            if reading(payload, entry.to) is Reading.ADOPT:
                found |= {(machine_id, instruction.row_version) for machine_id in ids_of(payload)}
        return found

    def without_shard(self, shard_id: ShardId, now_seconds: float) -> "EphemeralState":
        """Return the state after a shard was removed."""
        known = {each: value for each, value in self.known.items() if each != shard_id}
        return replace(self, known=known, ledger=self.ledger.without_shard(shard_id, now_seconds))

    # ---- ownership ----------------------------------------------------------------------------------------------

    def is_fresh(self, shard_id: ShardId, now_seconds: float) -> bool:
        """Return whether a shard reported within three report cycles."""
        known = self.known.get(shard_id)
        return known is not None and now_seconds - known.received_seconds <= (
            FRESH_CYCLES * self.ledger.report_cycle_seconds
        )

    def has_current_view(self, shard_id: ShardId, now_seconds: float) -> bool:
        """Return whether no older leader can change the shard's last view any more (§9.6)."""
        known = self.known.get(shard_id)
        if known is None or known.reported is None or not self.is_fresh(shard_id, now_seconds):
            return False
        return known.reported_epoch == known.report.epoch and known.reported_echo == self.term

    def peer_views(self, shard_id: ShardId, tables: Tables, now_seconds: float) -> PeerViews:
        """Return the shards that could own machines of the same provider as one shard, itself included."""
        address = self.known[shard_id].report.provider_address
        views: dict[ShardId, OwnershipView] = {}
        unseen: set[ShardId] = set()
        for other in tables.shards:
            known = self.known.get(other)
            if known is not None and known.report.provider_address not in ("", address):
                continue
            if known is None or known.reported is None:
                unseen.add(other)
                continue
            views[other] = OwnershipView(
                shard_id=other,
                reported=known.reported,
                is_current=self.has_current_view(other, now_seconds),
                answered=known.answered,
            )
        return PeerViews(
            views=views,
            unseen=frozenset(unseen),
            domains=tables.domains,
            term=self.term,
            refused=self.refused,
        )

    def with_plan(self, plan: OwnershipPlan, to: ShardId, now_seconds: float) -> "EphemeralState":
        """Return the state after a plan of ownership reconciliation was enqueued and all others were cancelled.

        A domain is given in one answer with the notes that it needs, after them: one that was given before, and not
        taken yet, may need others now.
        """
        wanted_now = [wanted.payload for wanted in plan.instructions if wanted.to == to]
        has_notes = any(isinstance(payload, TransferOwnership) and payload.is_note for payload in wanted_now)
        outdated = [
            entry
            for entry in self.ledger.live()
            if entry.to == to
            and isinstance(entry.instruction.payload, AssignDomain | UnassignDomain)
            and (has_notes or entry.instruction.payload not in wanted_now)
        ]
        ledger = self.ledger.cancelled(outdated, now_seconds)
        for wanted in plan.instructions:
            if self._is_leaving_already(wanted, now_seconds):
                continue
            ledger = ledger.enqueued(
                wanted.to,
                wanted.payload,
                term=self.term,
                now_seconds=now_seconds,
                instruction_id=wanted.instruction_id,
            )
        if plan.taken_back and not self._is_taking_back(to, plan.taken_back):
            payload = TransferOwnership(from_shard=to, to_shard=to, machine_ids=tuple(plan.taken_back))
            ledger = ledger.enqueued(to, payload, term=self.term, now_seconds=now_seconds)
        return replace(self, ledger=ledger)

    def _is_leaving_already(self, wanted: WantedInstruction, now_seconds: float) -> bool:
        """Return whether a shard has just agreed to leave a domain, and has not been given it since.

        A view lists what is being left among what is held, for as long as machines there are bound: sent again with
        every report, the shard would report every second meanwhile.
        """
        domain = wanted.payload.domain if isinstance(wanted.payload, UnassignDomain) else None
        about = [
            entry
            for entry in self.ledger.entries
            if domain is not None and entry.to == wanted.to and entry.instruction.payload in _of_domain(domain)
        ]
        if not about:
            return False
        last = max(about, key=lambda entry: entry.instruction.version)
        return (
            last.state is State.DONE
            and isinstance(last.instruction.payload, UnassignDomain)
            and now_seconds - last.finished_seconds < PERSISTENT_RETRY_CYCLES * self.ledger.report_cycle_seconds
        )

    def _is_taking_back(self, to: ShardId, machine_ids: list[MachineId]) -> bool:
        return any(_takes_back(entry, to, machine_ids) for entry in self.ledger.live())

    # ---- the answer ---------------------------------------------------------------------------------------------

    def answered(
        self, to: ShardId, plan: OwnershipPlan, peers: PeerViews, now_seconds: float
    ) -> tuple["EphemeralState", ReportAnswer]:
        """Return the answer to a shard's report, and the state after it."""
        outdated = [e for e in self.ledger.due(to, now_seconds) if not still_follows(e.instruction, to, peers)]
        ledger = self.ledger.cancelled(outdated, now_seconds)
        due = ledger.due(to, now_seconds)
        known = self.known[to]
        instructions = tuple(entry.instruction for entry in due)
        carried = (*known.answered, *(each for each in instructions if each not in known.answered))
        answer = ReportAnswer(
            term=self.term,
            instructions=instructions,
            want_ownership=not self.has_current_view(to, now_seconds),
            confirmed=tuple(plan.confirmed),
            sold_out=self._sold_out_elsewhere(to, now_seconds),
        )
        after = {**self.known, to: replace(known, answered=carried)}
        return replace(self, known=after, ledger=ledger.delivered(due)), answer

    def _sold_out_elsewhere(self, to: ShardId, now_seconds: float) -> tuple[SoldOutPool, ...]:
        """Return the pools that other shards of the same provider report, each with what is left of its back-off."""
        address = self.known[to].report.provider_address
        left: dict[tuple[str, str, CapacityType], float] = {}
        for other, known in self.known.items():
            if other == to or not address or known.report.provider_address != address:
                continue
            for instance_type, zone, capacity_type, backoff_seconds in known.report.sold_out:
                pool = instance_type, zone, capacity_type
                seconds = backoff_seconds - (now_seconds - known.received_seconds)
                if seconds > left.get(pool, 0.0):
                    left[pool] = seconds
        longest = sorted(left.items(), key=lambda item: (-item[1], item[0]))
        return tuple(SoldOutPool(*pool, seconds) for pool, seconds in longest[:SOLD_OUT_MAX])


def _takes_back(entry: InstructionEntry, to: ShardId, machine_ids: list[MachineId]) -> bool:
    payload = entry.instruction.payload
    if entry.to != to or not isinstance(payload, TransferOwnership) or entry.state is State.DONE:
        return False
    return reading(payload, to) is Reading.TAKE_BACK and set(machine_ids) <= set(payload.machine_ids)
