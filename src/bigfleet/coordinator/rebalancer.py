"""Runs the rebalancing passes of a leader and turns the planned transfers into instructions.

docs/spec/coordinator.md §7. Moves in flight are derived from the ledger and the last reports, so they end when a move
fails, expires or arrives. Cooldowns and refusals are the only state. Times are passed in as numbers. This module does
not send anything.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from bigfleet.coordinator.delivery import DONOR_EXPIRY_CYCLES, InstructionEntry, InstructionLedger, State
from bigfleet.coordinator.ephemeral_state import EphemeralState, Known
from bigfleet.coordinator.rebalance_plan import plan
from bigfleet.coordinator.received_report import ready_in
from bigfleet.coordinator.reports import ShardFigures
from bigfleet.coordinator.tables import Tables
from bigfleet.coordinator.transfers import (
    FleetView,
    FlowKey,
    Knobs,
    Memory,
    RebalancePlan,
    ShortfallKey,
    Tier,
    Transfer,
)
from bigfleet.model import vector
from bigfleet.model.ids import Fingerprint, MachineId, ShardId
from bigfleet.model.instructions import (
    CrossShardDrain,
    InstructionOutcome,
    Payload,
    ReassignSpeculative,
    Selector,
    TransferOwnership,
)
from bigfleet.model.ownership import Base
from bigfleet.model.shard_report import Holding, ShardReport
from bigfleet.model.vector import Vector


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """The last report of a shard as received, for readers that list it."""

    report: ShardReport
    received_unix_nanos: int
    #: As last reported by this process of the shard, None when it never was.
    holding: Holding | None

    def after(self, report: ShardReport, received_unix_nanos: int) -> "Heard":
        """Return what is known after another report; a new process of the shard has yet to report what it holds."""
        holding = self.holding if report.epoch == self.report.epoch else None
        return Heard(report=report, received_unix_nanos=received_unix_nanos, holding=report.holding or holding)


@dataclass(slots=True)
class InFlight:
    """What this leader's own moves have under way."""

    moving: defaultdict[ShortfallKey, Vector] = field(default_factory=lambda: defaultdict(dict))
    draining: defaultdict[ShortfallKey, Vector] = field(default_factory=lambda: defaultdict(dict))
    #: Donors that drain for somebody, and the shortfalls that they drain for.
    draining_donors: set[ShardId] = field(default_factory=set)
    drained_for: set[ShortfallKey] = field(default_factory=set)
    #: Drained machines that are being handed over already.
    leaving: set[MachineId] = field(default_factory=set)


class Rebalancing:
    """The memory of one leader's passes."""

    def __init__(self, *, knobs: Knobs, cooldown_seconds: float, began_seconds: float) -> None:
        """No pass is due before one cooldown has passed since `began_seconds`: a former leader may have begun one."""
        self._knobs = knobs
        self._cooldown_seconds = cooldown_seconds
        self._first_seconds = began_seconds + cooldown_seconds
        #: When each flow may move again.
        self._cooling: dict[FlowKey, float] = {}
        #: The last pass: what it proposed, and why each other shortfall got nothing.
        self.last: RebalancePlan | None = None

    def is_due(self, now_seconds: float) -> bool:
        """Return whether passes may run in this term yet."""
        return now_seconds >= self._first_seconds

    def run(
        self, ephemeral: EphemeralState, heard: Mapping[ShardId, Heard], tables: Tables, now_seconds: float
    ) -> RebalancePlan:
        """Plan one pass and remember it; what it proposes has not been enqueued."""
        flying = in_flight(ephemeral, heard, now_seconds)
        self._cooling = {flow: until for flow, until in self._cooling.items() if until > now_seconds}
        memory = Memory(
            cooling=frozenset(self._cooling),
            refused_drains=frozenset(self._refused(ephemeral, now_seconds)),
            moving=flying.moving,
            draining=flying.draining,
            draining_donors=frozenset(flying.draining_donors),
            drained_for=frozenset(flying.drained_for),
        )
        self.last = plan(fleet_view(ephemeral, heard, tables, flying.leaving, now_seconds), memory, self._knobs)
        return self.last

    def emitted(self, moves: Iterable[Transfer], ephemeral: EphemeralState, now_seconds: float) -> EphemeralState:
        """Return what is known after moves were enqueued; each begins its flow's cooldown, whatever becomes of it."""
        ledger = ephemeral.ledger
        sequence = ledger.next_sequence
        sent: list[InstructionEntry] = []
        # Only what its donor has already can bar a move, so each donor's part is looked at alone.
        of_donor: dict[ShardId, InstructionLedger] = {}
        for move in moves:
            self._cooling[move.flow] = now_seconds + self._cooldown_seconds
            own = of_donor.get(move.donor)
            if own is None:
                own = replace(ledger, entries=tuple(entry for entry in ledger.live() if entry.to == move.donor))
            after = replace(own, next_sequence=sequence).enqueued(
                move.donor, payload_of(move), term=ephemeral.term, now_seconds=now_seconds, move=move, why=move.why
            )
            sent += after.entries[len(own.entries) :]
            sequence, of_donor[move.donor] = after.next_sequence, after
        return replace(ephemeral, ledger=replace(ledger, entries=(*ledger.entries, *sent), next_sequence=sequence))

    def _refused(self, ephemeral: EphemeralState, now_seconds: float) -> Iterable[tuple[ShardId, Fingerprint]]:
        """Return the donors in which a drain for a shortfall found nothing, for one cooldown."""
        for entry in ephemeral.ledger.entries:
            move, last = entry.move, entry.last
            is_refused = last is not None and last.outcome is InstructionOutcome.REJECTED_INVALID
            if move is None or move.tier is not Tier.PREEMPT or not is_refused:
                continue
            if now_seconds - entry.finished_seconds < self._cooldown_seconds:
                yield (move.donor, move.fingerprint)


def payload_of(move: Transfer) -> Payload:
    """Return the instruction to the donor that a move stands for."""
    if move.tier is Tier.READY:
        return TransferOwnership(from_shard=move.donor, to_shard=move.requester, machine_ids=move.machine_ids)
    selector = Selector(
        count=move.count,
        instance_type=move.instance_type,
        zone=move.zone,
        requirements=move.requirements,
        min_unit=move.min_unit,
    )
    if move.tier is Tier.IDLE:
        return TransferOwnership(from_shard=move.donor, to_shard=move.requester, selector=selector)
    if move.tier is Tier.SPECULATIVE:
        return ReassignSpeculative(from_shard=move.donor, to_shard=move.requester, selector=selector)
    return CrossShardDrain(
        to_shard=move.requester,
        preemptor_priority=move.priority,
        requester_interruption_bucket=move.interruption_bucket,
        selector=selector,
    )


# ---- what a pass is shown ----------------------------------------------------------------------------------------


def fleet_view(
    ephemeral: EphemeralState,
    heard: Mapping[ShardId, Heard],
    tables: Tables,
    leaving: set[MachineId],
    now_seconds: float,
) -> FleetView:
    """Return the fleet as the last reports show it; machines in `leaving` are ready for no shard any more."""
    overlapping = ownership_overlap(ephemeral, tables)
    shards: list[ShardFigures] = []
    for shard_id in sorted(tables.shards):
        known = ephemeral.known.get(shard_id)
        if known is None or known.report.figures is None:
            continue
        holding = heard[shard_id].holding if shard_id in heard else None
        shards.append(
            replace(
                known.report.figures,
                base=Base.ALL if shard_id in overlapping else base_of(known),
                is_fresh=ephemeral.is_fresh(shard_id, now_seconds),
                ready=tuple(reserved for reserved in ready_in(holding) if reserved.machine_id not in leaving),
            )
        )
    return FleetView(shards=tuple(shards), providers=tables.providers, quotas=tables.quotas)


def base_of(known: Known) -> Base:
    """Return what a shard owns before the exceptions; one whose present process never reported it counts as ALL."""
    if known.reported is None or known.reported_epoch != known.report.epoch:
        return Base.ALL
    return known.reported.base


def ownership_overlap(ephemeral: EphemeralState, tables: Tables) -> frozenset[ShardId]:
    """Return the shards behind a provider address at which one of several owns everything (§9.1)."""
    behind: defaultdict[str, list[ShardId]] = defaultdict(list)
    for shard_id, known in ephemeral.known.items():
        if shard_id in tables.shards and known.report.provider_address:
            behind[known.report.provider_address].append(shard_id)
    return frozenset(
        shard_id
        for shards in behind.values()
        if len(shards) > 1 and any(base_of(ephemeral.known[each]) is Base.ALL for each in shards)
        for shard_id in shards
    )


def in_flight(ephemeral: EphemeralState, heard: Mapping[ShardId, Heard], now_seconds: float) -> InFlight:
    """Return what is under way: from emission until failure, expiry, or the report that follows the adoption (§7.1)."""
    flying = InFlight()
    adoptions = {entry.instruction.instruction_id: entry for entry in ephemeral.ledger.entries if entry.move is None}
    for entry in ephemeral.ledger.entries:
        move = entry.move
        if move is None:
            continue
        if move.tier is Tier.PREEMPT:
            _add_drain(entry, move, heard.get(move.donor), flying)
        elif _is_moving(entry, adoptions.get(f"{entry.instruction.instruction_id}/adopt"), ephemeral, now_seconds):
            count = len(entry.last.machine_ids) if entry.state is State.DONE and entry.last else 0
            flying.moving[move.shortfall] = vector.add(flying.moving[move.shortfall], _share(move, count or move.count))
            flying.leaving.update(move.machine_ids)
    return flying


def _is_moving(
    entry: InstructionEntry, adoption: InstructionEntry | None, ephemeral: EphemeralState, now_seconds: float
) -> bool:
    if not entry.state.is_final:
        return True
    if entry.state is not State.DONE:
        return False
    if adoption is None:
        # The donor's view, which the adoption follows from, has yet to come, and cannot be waited for without end.
        return now_seconds - entry.finished_seconds < DONOR_EXPIRY_CYCLES * ephemeral.ledger.report_cycle_seconds
    if adoption.state is not State.DONE:
        return not adoption.state.is_final
    recipient = ephemeral.known.get(adoption.to)
    return recipient is not None and recipient.received_seconds <= adoption.finished_seconds


def _add_drain(entry: InstructionEntry, move: Transfer, donor: Heard | None, flying: InFlight) -> None:
    """Note what a drain is to free: all of it until the donor has answered, then what it still drains."""
    count = move.count
    if entry.state is State.DONE:
        reserved = () if donor is None or donor.holding is None else donor.holding.reservations
        instruction_id = entry.instruction.instruction_id
        count = sum(each.instruction_id == instruction_id and not each.is_ready for each in reserved)
    elif entry.state.is_final:
        return
    if not count:
        return
    flying.draining[move.shortfall] = vector.add(flying.draining[move.shortfall], _share(move, count))
    flying.draining_donors.add(move.donor)
    flying.drained_for.add(move.shortfall)


def _share(move: Transfer, count: int) -> Vector:
    """Return what so many of a move's equal machines bring."""
    return {name: milli * count // move.count for name, milli in move.capacity.items()}
