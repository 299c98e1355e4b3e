"""Turns reports, ownership and instructions into `coordinator.proto` and back (docs/spec/wire.md §10, §2).

A report that comes off the wire is checked field by field; the first fault is a MalformedMessage that names its place.
An answer is made by a leader that shards obey, so reading one checks nothing beyond its form. This module must not mend
a message or leave a part of it out.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from bigfleet.coordinator.ephemeral_state import SOLD_OUT_MAX, ReportAnswer
from bigfleet.model.frames import MalformedMessage
from bigfleet.model.ids import ClusterId, Fingerprint, MachineId, ShardId
from bigfleet.model.instructions import Ack, InstructionOutcome
from bigfleet.model.ownership import (
    Base,
    Domain,
    Owned,
    OwnershipRow,
    OwnershipVersion,
    Reservation,
    RowKind,
    version_of,
)
from bigfleet.model.shard_report import CapacityCount, Holding, ShardReport, ShardSummary, Shortfall, SoldOutPool
from bigfleet.rpc.wire import report_checks
from bigfleet.rpc.wire.amounts import check_count, check_string, check_text
from bigfleet.rpc.wire.convert_instruction import (
    instruction_from_wire,
    instruction_to_wire,
    machines_from_wire,
    vector_to_wire,
)
from bigfleet.rpc.wire.convert_machine import capacity_type_from_wire, machine_from_wire, machine_to_wire
from bigfleet.rpc.wire.convert_need import requirements_to_wire
from bigfleet.rpc.wire.gen import capacity_pb2, coordinator_pb2, provider_pb2

# Bounds of docs/spec/wire.md §2 and §10.
SHORTFALLS_MAX = 100
CAPACITY_ROWS_MAX = 64
COUNT_KEYS_MAX = 256
OWNERSHIP_ROWS_MAX = 10_000
#: Of each kind of row for a machine that moved. A shard adopts fewer, but what it gave away and took back has no bound
#: there, and a view that is refused can never shrink, because its shard gets no answer.
MOVED_ROWS_MAX = 100_000
#: Of one report: an answer carries at most so many instructions.
ACKS_MAX = 1_000
#: Records of one ack: an instruction releases at most so many machines.
ACK_MACHINES_MAX = 100
CLUSTERS_MAX = 10_000

_Wire = coordinator_pb2.Ownership
_BASES = {_Wire.BASE_ALL: Base.ALL, _Wire.BASE_DOMAINS: Base.DOMAINS}
_WIRE_BASES = {base: number for number, base in _BASES.items()}
_WireAck = coordinator_pb2.InstructAck
_OUTCOMES = {
    _WireAck.OUTCOME_ACCEPTED: InstructionOutcome.ACCEPTED,
    _WireAck.OUTCOME_REJECTED_STALE: InstructionOutcome.REJECTED_STALE,
    _WireAck.OUTCOME_REJECTED_INVALID: InstructionOutcome.REJECTED_INVALID,
    _WireAck.OUTCOME_FAILED: InstructionOutcome.FAILED,
}
_WIRE_OUTCOMES = {outcome: number for number, outcome in _OUTCOMES.items()}


# ---- reports -----------------------------------------------------------------------------------------------------


def report_to_wire(report: ShardReport) -> coordinator_pb2.ShardReport:
    """Return the message of a report, which its sender has cut to the bounds."""
    return coordinator_pb2.ShardReport(
        shard_id=report.shard_id,
        cycle=report.cycle,
        timestamp_unix_nanos=report.timestamp_unix_nanos,
        shard_epoch=report.epoch,
        summary=summary_to_wire(report.summary),
        shortfalls=map(shortfall_to_wire, report.shortfalls),
        instruction_acks=map(ack_to_wire, report.acks),
        shard_address=report.address,
        clusters=sorted(report.clusters or ()),
        ownership=None if report.holding is None else holding_to_wire(report.holding),
        coordinator_term=report.echoed_term,
        sold_out=map(_sold_out_to_wire, report.sold_out),
    )


def report_from_wire(message: coordinator_pb2.ShardReport) -> ShardReport:
    """Return a report. Raises MalformedMessage for its first fault.

    Clusters count as reported when there is one, or when ownership is reported beside them: both are sent together when
    asked.
    """
    report_checks.check_identifier("shard_id", message.shard_id)
    for name in ("cycle", "shard_epoch", "coordinator_term"):
        report_checks.check_not_negative(name, getattr(message, name))
    check_string("shard_address", message.shard_address)
    check_count("shortfalls", len(message.shortfalls), "rows", SHORTFALLS_MAX)
    check_count("instruction_acks", len(message.instruction_acks), "rows", ACKS_MAX)
    check_count("clusters", len(message.clusters), "ids", CLUSTERS_MAX)
    for index, cluster in enumerate(message.clusters):
        report_checks.check_identifier(f"clusters[{index}]", cluster)
    has_clusters = bool(message.clusters) or message.HasField("ownership")
    shard_id = ShardId(message.shard_id)
    return ShardReport(
        shard_id=shard_id,
        epoch=message.shard_epoch,
        cycle=message.cycle,
        timestamp_unix_nanos=message.timestamp_unix_nanos,
        address=message.shard_address,
        echoed_term=message.coordinator_term,
        summary=_summary(message.summary),
        shortfalls=tuple(
            _shortfall(shortfall, f"shortfalls[{index}]") for index, shortfall in enumerate(message.shortfalls)
        ),
        acks=tuple(_ack(ack, f"instruction_acks[{index}]") for index, ack in enumerate(message.instruction_acks)),
        clusters=frozenset(map(ClusterId, message.clusters)) if has_clusters else None,
        holding=_holding(message.ownership) if message.HasField("ownership") else None,
        sold_out=_sold_out(message.sold_out),
    )


def summary_to_wire(summary: ShardSummary) -> coordinator_pb2.ShardSummary:
    """Return the message of a summary."""
    return coordinator_pb2.ShardSummary(
        total_machines=summary.total_machines,
        free_machines=summary.free_machines,
        per_instance_type_counts=summary.type_counts,
        per_zone_counts=summary.zone_counts,
        provider_address=summary.provider_address,
        idle_by_type_zone=map(_capacity_to_wire, summary.idle),
        speculative_by_type_zone=map(_capacity_to_wire, summary.speculative),
    )


def _summary(message: coordinator_pb2.ShardSummary) -> ShardSummary:
    check_string("summary.provider_address", message.provider_address)
    for name in ("total_machines", "free_machines"):
        report_checks.check_not_negative(f"summary.{name}", getattr(message, name))
    return ShardSummary(
        total_machines=message.total_machines,
        free_machines=message.free_machines,
        type_counts=_counts(message.per_instance_type_counts, "summary.per_instance_type_counts"),
        zone_counts=_counts(message.per_zone_counts, "summary.per_zone_counts"),
        provider_address=message.provider_address,
        idle=_capacity(message.idle_by_type_zone, "summary.idle_by_type_zone"),
        speculative=_capacity(message.speculative_by_type_zone, "summary.speculative_by_type_zone"),
    )


def _counts(counts: Mapping[str, int], place: str) -> dict[str, int]:
    check_count(place, len(counts), "keys", COUNT_KEYS_MAX)
    for name in sorted(counts):
        check_string(f"{place}[{report_checks.shown(name)}]", name, "the key has")
        report_checks.check_not_negative(f"{place}[{report_checks.shown(name)}]", counts[name])
    return dict(sorted(counts.items()))


def _capacity_to_wire(row: CapacityCount) -> coordinator_pb2.CapacityCount:
    return coordinator_pb2.CapacityCount(
        instance_type=row.instance_type,
        zone=row.zone,
        capacity_type=provider_pb2.CapacityType.ValueType(row.capacity_type.value),
        count=row.count,
        allocatable=vector_to_wire(row.allocatable),
    )


def _capacity(messages: Sequence[coordinator_pb2.CapacityCount], place: str) -> tuple[CapacityCount, ...]:
    check_count(place, len(messages), "rows", CAPACITY_ROWS_MAX)
    rows = tuple(messages)
    for index, row in enumerate(rows):
        check_string(f"{place}[{index}].instance_type", row.instance_type)
        check_string(f"{place}[{index}].zone", row.zone)
        report_checks.check_not_negative(f"{place}[{index}].count", row.count)
    return tuple(
        CapacityCount(
            row.instance_type,
            row.zone,
            capacity_type_from_wire(row.capacity_type),
            row.count,
            report_checks.checked_vector(f"{place}[{index}].allocatable", row.allocatable.resources),
        )
        for index, row in enumerate(rows)
    )


def _sold_out_to_wire(pool: SoldOutPool) -> coordinator_pb2.SoldOutPool:
    return coordinator_pb2.SoldOutPool(
        instance_type=pool.instance_type,
        zone=pool.zone,
        capacity_type=provider_pb2.CapacityType.ValueType(pool.capacity_type.value),
        backoff_seconds=math.ceil(pool.backoff_seconds),
    )


def _sold_out_pool(message: coordinator_pb2.SoldOutPool) -> SoldOutPool:
    capacity_type = capacity_type_from_wire(message.capacity_type)
    return SoldOutPool(message.instance_type, message.zone, capacity_type, message.backoff_seconds)


def _sold_out(messages: Sequence[coordinator_pb2.SoldOutPool]) -> tuple[SoldOutPool, ...]:
    check_count("sold_out", len(messages), "rows", SOLD_OUT_MAX)
    for index, message in enumerate(messages):
        check_string(f"sold_out[{index}].instance_type", message.instance_type)
        check_string(f"sold_out[{index}].zone", message.zone)
        report_checks.check_not_negative(f"sold_out[{index}].backoff_seconds", message.backoff_seconds)
    return tuple(map(_sold_out_pool, messages))


def shortfall_to_wire(shortfall: Shortfall) -> coordinator_pb2.Shortfall:
    """Return the message of a shortfall."""
    return coordinator_pb2.Shortfall(
        requirements=requirements_to_wire(shortfall.requirements),
        deficit=vector_to_wire(shortfall.deficit),
        priority=shortfall.priority,
        age_cycles=shortfall.age_cycles,
        interruption_penalty_bucket=capacity_pb2.PenaltyBucket.ValueType(shortfall.interruption_bucket),
        topology_constrained=shortfall.is_topology_constrained,
        profile_fingerprint=shortfall.fingerprint,
        min_unit=vector_to_wire(shortfall.min_unit),
    )


def _shortfall(message: coordinator_pb2.Shortfall, place: str) -> Shortfall:
    report_checks.check_not_negative(f"{place}.age_cycles", message.age_cycles)
    report_checks.check_bucket(f"{place}.interruption_penalty_bucket", message.interruption_penalty_bucket)
    return Shortfall(
        # The text of a profile holds all its requirements, so it is longer than other strings may be.
        fingerprint=Fingerprint(message.profile_fingerprint),
        requirements=report_checks.checked_requirements(f"{place}.requirements", message.requirements),
        deficit=report_checks.checked_vector(f"{place}.deficit", message.deficit.resources),
        min_unit=report_checks.checked_vector(f"{place}.min_unit", message.min_unit.resources),
        priority=message.priority,
        age_cycles=message.age_cycles,
        interruption_bucket=message.interruption_penalty_bucket,
        is_topology_constrained=message.topology_constrained,
    )


# ---- answers to instructions -------------------------------------------------------------------------------------


def ack_to_wire(ack: Ack) -> coordinator_pb2.InstructAck:
    """Return the message of a shard's answer to an instruction."""
    return _WireAck(
        instruction_id=ack.instruction_id,
        outcome=_WIRE_OUTCOMES[ack.outcome],
        reason=ack.reason,
        machine_ids=ack.machine_ids,
        machines=[machine_to_wire(machine, {}) for machine in ack.machines],
    )


def outcome_to_wire(outcome: InstructionOutcome) -> coordinator_pb2.InstructAck.Outcome.ValueType:
    """Return the number of an outcome."""
    return _WIRE_OUTCOMES[outcome]


def _ack(message: coordinator_pb2.InstructAck, place: str) -> Ack:
    check_string(f"{place}.instruction_id", message.instruction_id)
    check_string(f"{place}.reason", message.reason)
    check_count(f"{place}.machine_ids", len(message.machine_ids), "ids", OWNERSHIP_ROWS_MAX)
    check_count(f"{place}.machines", len(message.machines), "records", ACK_MACHINES_MAX)
    # An outcome of a later version is neither taken nor given up: the instruction is tried again.
    return Ack(
        instruction_id=message.instruction_id,
        outcome=_OUTCOMES.get(message.outcome, InstructionOutcome.FAILED),
        reason=message.reason,
        machine_ids=tuple(map(MachineId, message.machine_ids)),
        machines=machines_from_wire(message.machines),
    )


# ---- ownership ---------------------------------------------------------------------------------------------------


def holding_to_wire(holding: Holding) -> coordinator_pb2.Ownership:
    """Return the message of a view; leaving domains stand among the held ones (docs/spec/coordinator.md §9.2)."""
    owned = holding.owned
    rows: dict[RowKind, list[tuple[MachineId, OwnershipRow]]] = {kind: [] for kind in RowKind}
    for machine_id, row in sorted(owned.rows.items()):
        rows[row.kind].append((machine_id, row))
    return _Wire(
        base=_WIRE_BASES[owned.base],
        domains=[
            coordinator_pb2.TopologyDomain(topology_key=key, topology_value=value)
            for key, value in sorted(owned.domains | owned.leaving)
        ],
        adopted=[_adoption_to_wire(machine_id, row) for machine_id, row in rows[RowKind.ADOPTED]],
        released=[_release_to_wire(machine_id, row) for machine_id, row in rows[RowKind.RELEASED]],
        disowned=[_adoption_to_wire(machine_id, row) for machine_id, row in rows[RowKind.DISOWNED]],
        reservations=[
            coordinator_pb2.Reservation(
                machine_id=reservation.machine_id,
                to_shard_id=reservation.to_shard,
                instruction_id=reservation.instruction_id,
                ready=reservation.is_ready,
                expires_unix_nanos=reservation.expires_unix_nanos,
                instance_type=reservation.instance_type,
                zone=reservation.zone,
            )
            for reservation in holding.reservations
        ],
    )


def _adoption_to_wire(machine_id: MachineId, row: OwnershipRow) -> coordinator_pb2.Adoption:
    return coordinator_pb2.Adoption(
        machine_id=machine_id, shard_id=row.other, instruction_id=row.version.instruction_id
    )


def _release_to_wire(machine_id: MachineId, row: OwnershipRow) -> coordinator_pb2.Release:
    return coordinator_pb2.Release(
        machine_id=machine_id,
        to_shard_id=row.other,
        instruction_id=row.version.instruction_id,
        released_unix_nanos=row.since_unix_nanos,
        machine=None if row.machine is None else machine_to_wire(row.machine, {}),
    )


def _holding(message: coordinator_pb2.Ownership) -> Holding:
    if message.base not in _BASES:
        raise MalformedMessage("ownership.base", f"is {message.base}, and must be ALL (1) or DOMAINS (2)")
    bounds = {"domains": OWNERSHIP_ROWS_MAX, "reservations": OWNERSHIP_ROWS_MAX}
    for name in ("domains", "adopted", "released", "reservations", "disowned"):
        check_count(f"ownership.{name}", len(getattr(message, name)), "rows", bounds.get(name, MOVED_ROWS_MAX))
    for index, domain in enumerate(message.domains):
        for name in ("topology_key", "topology_value"):
            place = f"ownership.domains[{index}].{name}"
            report_checks.check_name(place, getattr(domain, name))
            # A leader that has lost its tables writes these as keys.
            check_text(place, getattr(domain, name))
    rows: dict[MachineId, OwnershipRow] = {}
    for kind, name in ((RowKind.ADOPTED, "adopted"), (RowKind.DISOWNED, "disowned")):
        for index, adoption in enumerate(getattr(message, name)):
            place = f"ownership.{name}[{index}]"
            version = _version(adoption.instruction_id, f"{place}.instruction_id")
            _put_row(rows, adoption.machine_id, OwnershipRow(kind, version, ShardId(adoption.shard_id)), place)
    for index, release in enumerate(message.released):
        place = f"ownership.released[{index}]"
        machine = machine_from_wire(release.machine)[0] if release.HasField("machine") else None
        version = _version(release.instruction_id, f"{place}.instruction_id")
        row = OwnershipRow(
            RowKind.RELEASED, version, ShardId(release.to_shard_id), release.released_unix_nanos, machine
        )
        _put_row(rows, release.machine_id, row, place)
    owned = Owned(
        base=_BASES[message.base],
        domains=frozenset(Domain(domain.topology_key, domain.topology_value) for domain in message.domains),
        rows=rows,
    )
    return Holding(owned=owned, reservations=_reservations(message.reservations))


def _reservations(messages: Iterable[coordinator_pb2.Reservation]) -> tuple[Reservation, ...]:
    reservations: list[Reservation] = []
    for index, message in enumerate(messages):
        place = f"ownership.reservations[{index}]"
        report_checks.check_name(f"{place}.machine_id", message.machine_id)
        for name in ("to_shard_id", "instruction_id", "instance_type", "zone"):
            check_string(f"{place}.{name}", getattr(message, name))
        reservations.append(
            Reservation(
                machine_id=MachineId(message.machine_id),
                to_shard=ShardId(message.to_shard_id),
                instruction_id=message.instruction_id,
                is_ready=message.ready,
                expires_unix_nanos=message.expires_unix_nanos,
                instance_type=message.instance_type,
                zone=message.zone,
            )
        )
    return tuple(reservations)


def _put_row(rows: dict[MachineId, OwnershipRow], machine_id: str, row: OwnershipRow, place: str) -> None:
    report_checks.check_name(f"{place}.machine_id", machine_id)
    check_string(f"{place}.shard_id", row.other)
    if machine_id in rows:
        raise MalformedMessage(
            f"{place}.machine_id", f"{report_checks.shown(machine_id)} has another row in the same view"
        )
    rows[MachineId(machine_id)] = row


def _version(instruction_id: str, place: str) -> OwnershipVersion:
    check_string(place, instruction_id)
    version = version_of(instruction_id, own=OwnershipVersion(-1, -1))
    if version.term < 0:
        raise MalformedMessage(place, f"{report_checks.shown(instruction_id)} names no term and number, as in 17-3")
    return version


# ---- answers -----------------------------------------------------------------------------------------------------


def answer_to_wire(answer: ReportAnswer) -> coordinator_pb2.ReportAck:
    """Return the message of an answer."""
    return coordinator_pb2.ReportAck(
        coordinator_term=answer.term,
        acknowledged=answer.acknowledged,
        instructions=map(instruction_to_wire, answer.instructions),
        want_ownership=answer.want_ownership,
        confirmed_machine_ids=answer.confirmed,
        sold_out=map(_sold_out_to_wire, answer.sold_out),
    )


def answer_from_wire(message: coordinator_pb2.ReportAck) -> ReportAnswer:
    """Return an answer; an instruction of a kind that this version does not know has no payload."""
    return ReportAnswer(
        term=message.coordinator_term,
        acknowledged=message.acknowledged,
        instructions=tuple(map(instruction_from_wire, message.instructions)),
        want_ownership=message.want_ownership,
        confirmed=tuple(map(MachineId, message.confirmed_machine_ids)),
        sold_out=tuple(map(_sold_out_pool, message.sold_out)),
    )
