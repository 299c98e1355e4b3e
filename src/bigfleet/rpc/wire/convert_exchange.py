"""Converts found exchanges to the messages of ListExchanges (docs/spec/wire.md §9)."""

from collections.abc import Sequence

from bigfleet.exchange.course import ExchangeCourse, ExchangeEnd, ExchangePhase
from bigfleet.exchange.sentences import cluster_sentences, end_sentence, proposal_sentences
from bigfleet.exchange.values import ExchangeProposal, MachineKind
from bigfleet.model.states import CapacityType
from bigfleet.rpc.wire.gen import provider_pb2, shardread_pb2
from bigfleet.shard.exchange.exchange_records import ExchangeRecord, RecordedKind
from bigfleet.shard.exchange.proposals import FoundExchanges

_CAPACITY_TYPES = {kind.label: provider_pb2.CapacityType.ValueType(kind.value) for kind in CapacityType}


def runs_to_wire(
    records: Sequence[ExchangeRecord], course: ExchangeCourse | None
) -> list[shardread_pb2.ExchangeRunView]:
    """Return the messages of the exchanges that a cluster began; `course` is the one under way."""
    return [_run(record, course) for record in records]


def _run(record: ExchangeRecord, course: ExchangeCourse | None) -> shardread_pb2.ExchangeRunView:
    is_ended = bool(record.ended_unix_nanos)
    phase = ExchangePhase.ENDED if is_ended or course is None else course.phase
    left = record.left if is_ended or course is None else len(course.gone)
    came = record.came_ids if is_ended or course is None else tuple(sorted(course.came))
    end = ExchangeEnd(record.end) if record.end else None
    return shardread_pb2.ExchangeRunView(
        exchange_id=record.id,
        phase=phase.value,
        end=record.end,
        begun_unix_nanos=record.begun_unix_nanos,
        ended_unix_nanos=record.ended_unix_nanos,
        goes=[_exchanged(kind, kind.machines) for kind in record.goes],
        comes=[_exchanged(kind, kind.machines) for kind in record.comes],
        machine_ids=record.goes_ids,
        came_ids=came,
        left=left,
        promised_usd_per_hour=record.promised_usd_per_hour,
        realised_usd_per_hour=record.realised_usd_per_hour,
        sentences=[*([] if end is None else [end_sentence(end)]), *_move_sentences(record)],
        taker=record.taker,
        giver_exchange_id=record.giver_exchange_id,
    )


def _move_sentences(record: ExchangeRecord) -> list[str]:
    """Return where the machines of an exchange between clusters go, or which exchange gave those that come."""
    if record.taker:
        verb = "went" if record.end == ExchangeEnd.DONE.value else "are to go"
        taker = record.taker
        return [f"Its machines {verb} to {taker}: what they save there is promised by an exchange of {taker}."]
    if record.giver_exchange_id:
        return [f"The machines that come were given for it by exchange {record.giver_exchange_id}."]
    return []


def _exchanged(
    kind: MachineKind | RecordedKind, machines: int, *, is_idle: bool = False
) -> shardread_pb2.ExchangedMachines:
    return shardread_pb2.ExchangedMachines(
        instance_type=kind.instance_type,
        zone=kind.zone,
        capacity_type=_CAPACITY_TYPES[kind.capacity_type],
        price_usd_per_hour=kind.price_usd_per_hour,
        idle=is_idle,
        machines=machines,
    )


def exchanges_to_wire(found: FoundExchanges) -> shardread_pb2.ClusterExchangesView:
    """Return the message of what could be exchanged in one cluster."""
    exchanges = found.exchanges
    return shardread_pb2.ClusterExchangesView(
        cluster_id=exchanges.cluster,
        computed_at_unix_nanos=found.at_unix_nanos,
        machines=exchanges.machines,
        cost_usd_per_hour=exchanges.cost_usd_per_hour,
        blocked="" if exchanges.blocked is None else exchanges.blocked.value,
        excluded={reason.value: count for reason, count in exchanges.excluded},
        proposals=[_proposal(proposal) for proposal in exchanges.proposals],
        sentences=cluster_sentences(exchanges),
    )


def _proposal(proposal: ExchangeProposal) -> shardread_pb2.ExchangeView:
    gate, part = proposal.gate, proposal.taker_part
    return shardread_pb2.ExchangeView(
        kind=proposal.kind.value,
        gang=proposal.is_gang,
        goes=[_exchanged(kind, machines, is_idle=kind.is_idle) for kind, machines in proposal.goes],
        comes=[_exchanged(kind, machines, is_idle=kind.is_idle) for kind, machines in proposal.comes],
        machine_ids=proposal.machine_ids,
        waves=proposal.waves,
        saving_usd_per_hour=gate.saving_usd_per_hour,
        break_even_seconds=gate.break_even_seconds,
        gain_usd=gate.gain_usd,
        required_usd=gate.required_usd,
        boot_usd=gate.boot_usd,
        double_running_usd=gate.double_running_usd,
        reclamation_usd=gate.reclamation_usd,
        margin=gate.settings.margin,
        hold_seconds=gate.hold_seconds,
        waits_for="" if proposal.waits_for is None else proposal.waits_for.value,
        sentences=proposal_sentences(proposal),
        taker=proposal.taker,
        taker_goes=[] if part is None else [_exchanged(kind, machines) for kind, machines in part.goes],
        taker_machine_ids=() if part is None else part.machine_ids,
    )
