"""Converts what a coordinator lists to messages, in the order of docs/spec/wire.md §10.

Read from one term's tables and ephemeral state at one moment. This module does not change anything.
"""

from collections.abc import Iterable

from bigfleet.coordinator.delivery import InstructionEntry, State
from bigfleet.coordinator.leader_term import Term
from bigfleet.coordinator.rebalancer import payload_of
from bigfleet.coordinator.tables import DomainState
from bigfleet.coordinator.transfers import Transfer
from bigfleet.model.clock import NANOS_PER_SECOND, Clock
from bigfleet.model.instructions import (
    AssignDomain,
    Instruction,
    Reading,
    ReassignSpeculative,
    TransferOwnership,
    UnassignDomain,
    ids_of,
    reading,
)
from bigfleet.model.ownership import OwnershipVersion
from bigfleet.rpc.wire.convert_coordinator import holding_to_wire, outcome_to_wire, shortfall_to_wire, summary_to_wire
from bigfleet.rpc.wire.convert_instruction import instruction_to_wire
from bigfleet.rpc.wire.gen import coordinator_pb2

_Status = coordinator_pb2.InstructionStatus
_STATES = {
    State.PENDING: _Status.STATE_PENDING,
    State.DELIVERED: _Status.STATE_DELIVERED,
    State.DONE: _Status.STATE_DONE,
    State.FAILED: _Status.STATE_FAILED,
    State.EXPIRED: _Status.STATE_EXPIRED,
    State.CANCELLED: _Status.STATE_CANCELLED,
}
#: An instruction that is not a donor's follows from what reports and tables say.
_WHY_TRANSFER = {
    Reading.ADOPT: "released for this shard: {count}",
    Reading.TAKE_BACK: "released, without a recipient: {count}",
    Reading.NOTE: "now at {to}: {count}",
    Reading.FORGET: "known to no shard but the owner of their domain: {count}",
}


def shards(term: Term) -> coordinator_pb2.ListShardsResponse:
    """Return the registered shards, by id."""
    entries = []
    for shard_id, row in sorted(term.tables.shards.items()):
        heard = term.heard.get(shard_id)
        entries.append(
            coordinator_pb2.ShardRegistryEntry(
                shard_id=shard_id,
                address=row.address,
                registered_at_unix_ns=row.registered_at_unix_nanos,
                last_heartbeat_unix_ns=0 if heard is None else heard.received_unix_nanos,
                shard_epoch=row.epoch,
                alive=term.is_alive(shard_id),
            )
        )
    return coordinator_pb2.ListShardsResponse(shards=entries)


def domains(term: Term) -> coordinator_pb2.ListDomainAssignmentsResponse:
    """Return the domains, by shard, key and value."""
    ordered = sorted(term.tables.domains.items(), key=lambda item: (item[1].shard_id, item[0]))
    return coordinator_pb2.ListDomainAssignmentsResponse(
        assignments=[
            coordinator_pb2.DomainAssignment(
                topology_key=domain.topology_key,
                topology_value=domain.topology_value,
                shard_id=row.shard_id,
                releasing=row.state is DomainState.RELEASING,
            )
            for domain, row in ordered
        ]
    )


def reports(term: Term, shard_id: str) -> coordinator_pb2.ListShardReportsResponse:
    """Return the last reports, of one shard or of all, by shard."""
    snapshots = []
    for known_id, heard in sorted(term.heard.items()):
        if shard_id not in ("", known_id):
            continue
        report = heard.report
        snapshots.append(
            coordinator_pb2.ShardReportSnapshot(
                shard_id=known_id,
                cycle=report.cycle,
                received_at_unix_ns=heard.received_unix_nanos,
                summary=summary_to_wire(report.summary),
                shortfalls=map(shortfall_to_wire, report.shortfalls),
                shard_epoch=report.epoch,
                ownership=None if heard.holding is None else holding_to_wire(heard.holding),
            )
        )
    return coordinator_pb2.ListShardReportsResponse(reports=snapshots)


def quotas(term: Term) -> coordinator_pb2.ListQuotasResponse:
    """Return the quotas, by provider and region."""
    return coordinator_pb2.ListQuotasResponse(
        allocations=[
            coordinator_pb2.QuotaAllocation(
                provider=key.provider,
                region=key.region,
                per_shard={str(shard_id): slots for shard_id, slots in row.slots_of.items()},
            )
            for key, row in sorted(term.tables.quotas.items())
        ]
    )


def providers(term: Term) -> coordinator_pb2.ListProvidersResponse:
    """Return the providers, by name."""
    return coordinator_pb2.ListProvidersResponse(
        providers=[
            coordinator_pb2.ProviderEntry(name=name, address=row.address, region=row.region)
            for name, row in sorted(term.tables.providers.items())
        ]
    )


def clusters(term: Term) -> coordinator_pb2.ListClustersResponse:
    """Return the bound clusters, by id, with the other shards that claim to serve them."""
    conflicts = term.conflicts()
    return coordinator_pb2.ListClustersResponse(
        clusters=[
            coordinator_pb2.ClusterBinding(
                cluster_id=cluster,
                shard_id=row.shard_id,
                bound_at_unix_ns=row.bound_at_unix_nanos,
                last_reported_unix_ns=term.cluster_heard_unix_nanos(cluster, row.shard_id),
                conflicting_shard_ids=conflicts.get(cluster, ()),
            )
            for cluster, row in sorted(term.tables.clusters.items())
        ]
    )


def instructions(
    term: Term, clock: Clock, *, shard_id: str, with_finished: bool
) -> coordinator_pb2.ListInstructionsResponse:
    """Return instructions by term and sequence; with finished ones also what a dry run would have sent."""
    offset_nanos = clock.unix_nanos() - int(clock.monotonic_seconds() * NANOS_PER_SECOND)
    chosen = [
        entry
        for entry in term.instructions()
        if shard_id in ("", entry.to) and (with_finished or not entry.state.is_final)
    ]
    chosen.sort(key=lambda entry: entry.instruction.version)
    statuses = [_status(entry, offset_nanos) for entry in chosen]
    if with_finished:
        statuses[:0] = _dry(term, (move for move in term.proposed if shard_id in ("", move.donor)))
    return coordinator_pb2.ListInstructionsResponse(instructions=statuses)


def _dry(term: Term, moves: Iterable[Transfer]) -> list[coordinator_pb2.InstructionStatus]:
    """Return a dry run's proposals as cancelled instructions; they were never enqueued and have no number."""
    return [
        _Status(
            instruction=instruction_to_wire(
                Instruction(
                    instruction_id=f"{term.term}-0/dry-run/{place}",
                    version=OwnershipVersion(term.term, 0),
                    payload=payload_of(move),
                )
            ),
            shard_id=move.donor,
            state=_Status.STATE_CANCELLED,
            why=f"dry run: {move.why}",
        )
        for place, move in enumerate(moves, start=1)
    ]


def _status(entry: InstructionEntry, offset_nanos: int) -> coordinator_pb2.InstructionStatus:
    def unix_nanos(seconds: float) -> int:
        return offset_nanos + int(seconds * NANOS_PER_SECOND)

    status = _Status(
        instruction=instruction_to_wire(entry.instruction),
        shard_id=entry.to,
        state=_STATES[entry.state],
        attempts=_attempts(entry),
        enqueued_unix_nanos=unix_nanos(entry.enqueued_seconds),
        next_delivery_unix_nanos=0 if entry.state.is_final else unix_nanos(entry.next_delivery_seconds),
        why=why_of(entry),
    )
    if entry.last is not None:
        status.last_outcome = outcome_to_wire(entry.last.outcome)
        status.last_reason = entry.last.reason
    return status


def _attempts(entry: InstructionEntry) -> int:
    """Return how often it was carried out, or tried, as far as answers show; one under way counts."""
    if entry.state in (State.DELIVERED, State.DONE):
        return entry.failures + 1
    return max(entry.failures, 1) if entry.state is State.FAILED else entry.failures


def why_of(entry: InstructionEntry) -> str:
    """Return in one sentence why a shard gets an instruction."""
    payload = entry.instruction.payload
    match payload:
        case _ if entry.why:
            return entry.why
        case AssignDomain(domain):
            return f"{domain.topology_key}={domain.topology_value} is assigned to {entry.to}, which does not list it"
        case UnassignDomain(domain):
            return f"{domain.topology_key}={domain.topology_value} is listed by {entry.to} and is not to stay there"
        case TransferOwnership() | ReassignSpeculative():
            text = _WHY_TRANSFER.get(reading(payload, entry.to), "{count} machines change hands")
            return text.format(count=len(ids_of(payload)), to=payload.to_shard)
        case _:
            return ""
