"""Converts the coordinator's messages to plain records, and defines their table columns.

Names, times and amounts as in `bigfleet.cli.get.records`. This module does not call a coordinator.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from bigfleet.cli.get.columns import NOTHING, TableColumn, age_text, plain
from bigfleet.cli.get.moves import moves_in
from bigfleet.cli.get.records import Record, time_text, unix_seconds
from bigfleet.rpc.wire.gen import coordinator_pb2

_Status = coordinator_pb2.InstructionStatus
_KINDS: Final = {
    "assign_domain": "AssignDomain",
    "unassign_domain": "UnassignDomain",
    "reassign_speculative": "ReassignSpeculative",
    "cross_shard_drain": "CrossShardDrain",
    "transfer_ownership": "TransferOwnership",
}
_SHOWN_IDS_MAX: Final = 1


def shard_records(answer: coordinator_pb2.ListShardsResponse) -> Iterator[Record]:
    """Return shards, by id."""
    for entry in answer.shards:
        yield {
            "shard": entry.shard_id,
            "address": entry.address or None,
            "alive": entry.alive,
            "registered": time_text(entry.registered_at_unix_ns),
            "lastReport": time_text(entry.last_heartbeat_unix_ns),
            "epoch": entry.shard_epoch,
        }


def domain_records(answer: coordinator_pb2.ListDomainAssignmentsResponse) -> Iterator[Record]:
    """Return domains, by shard, key and value."""
    for entry in answer.assignments:
        yield {
            "key": entry.topology_key,
            "value": entry.topology_value,
            "shard": entry.shard_id,
            "state": "releasing" if entry.releasing else "assigned",
        }


def quota_records(answer: coordinator_pb2.ListQuotasResponse) -> Iterator[Record]:
    """Return quotas, one record for each shard that has slots."""
    for entry in answer.allocations:
        for shard_id, slots in sorted(entry.per_shard.items()):
            yield {"provider": entry.provider, "region": entry.region, "shard": shard_id, "slots": slots}


def provider_records(answer: coordinator_pb2.ListProvidersResponse) -> Iterator[Record]:
    """Return providers, by name."""
    for entry in answer.providers:
        yield {"provider": entry.name, "address": entry.address, "region": entry.region or None}


def binding_records(answer: coordinator_pb2.ListClustersResponse) -> Iterator[Record]:
    """Return clusters and the shards that they belong to, by cluster."""
    for entry in answer.clusters:
        yield {
            "cluster": entry.cluster_id,
            "shard": entry.shard_id,
            "bound": time_text(entry.bound_at_unix_ns),
            "lastReport": time_text(entry.last_reported_unix_ns),
            "alsoClaimedBy": list(entry.conflicting_shard_ids),
        }


def instruction_records(answer: coordinator_pb2.ListInstructionsResponse) -> Iterator[Record]:
    """Return instructions, by term and sequence."""
    for status in answer.instructions:
        yield _instruction(status)


def move_records(answer: coordinator_pb2.ListInstructionsResponse, *, shard: str = "") -> Iterator[Record]:
    """Return the moves of machines between shards, from or to one shard if it is given."""
    for move in moves_in(answer):
        if shard in ("", move.donor, move.recipient):
            yield {
                "id": move.move_id,
                "from": move.donor,
                "to": move.recipient,
                "tier": move.tier,
                "state": move.state.value,
                "count": move.machines,
                "instanceType": move.instance_type or None,
                "zone": move.zone or None,
                "machines": list(move.machine_ids),
                "lastReason": move.reason or None,
                "enqueued": time_text(move.enqueued_unix_nanos),
                "why": move.why or None,
            }


def _instruction(status: coordinator_pb2.InstructionStatus) -> Record:
    instruction = status.instruction
    kind = instruction.WhichOneof("payload")
    payload: Any = getattr(instruction, kind) if kind else None
    selector = getattr(payload, "selector", None)
    ids = list(getattr(payload, "machine_ids", ()))
    # A drain is sent to its donor and names the requester alone.
    giver = status.shard_id if kind == "cross_shard_drain" else getattr(payload, "from_shard_id", "")
    domain = f"{payload.topology_key}={payload.topology_value}" if hasattr(payload, "topology_key") else None
    return {
        "id": instruction.instruction_id,
        "term": instruction.coordinator_term,
        "sequence": instruction.sequence_number,
        "kind": _KINDS.get(kind or "", "Unknown"),
        "shard": status.shard_id,
        "state": _Status.State.Name(status.state).removeprefix("STATE_").capitalize(),
        "from": giver or None,
        "to": getattr(payload, "to_shard_id", "") or None,
        "domain": domain,
        "machines": ids,
        "count": len(ids) or (selector.count if selector is not None else 0),
        "instanceType": (selector.instance_type if selector is not None else "") or None,
        "zone": (selector.zone if selector is not None else "") or None,
        "attempts": status.attempts,
        "lastOutcome": coordinator_pb2.InstructAck.Outcome.Name(status.last_outcome).removeprefix("OUTCOME_")
        if status.last_outcome
        else None,
        "lastReason": status.last_reason or None,
        "enqueued": time_text(status.enqueued_unix_nanos),
        "nextDelivery": time_text(status.next_delivery_unix_nanos),
        "why": status.why or None,
    }


def _field(name: str) -> Any:
    return lambda record, _now: plain(record[name])


def _age(name: str) -> Any:
    return lambda record, now: NOTHING if record[name] is None else age_text(now - unix_seconds(record[name]))


def _alive(record: Record, _now: float) -> str:
    return "alive" if record["alive"] else "silent"


def _alive_style(record: Record) -> str:
    return "green" if record["alive"] else "bold red"


def _move_style(record: Record) -> str:
    return {"arrived": "green", "failed": "bold red", "expired": "yellow", "proposed": "dim"}.get(
        record["state"], "cyan"
    )


def _moved(record: Record, _now: float) -> str:
    """Return how many machines of which kind move, and from where; without a kind the ids of some."""
    if not record["instanceType"]:
        return _what(record | {"domain": None}, _now)
    kind = f"{record['count']} {record['instanceType']}"
    return plain(f"{kind} in {record['zone']}" if record["zone"] else kind)


def _state_style(record: Record) -> str:
    return {"Done": "green", "Failed": "bold red", "Expired": "yellow", "Cancelled": "dim"}.get(record["state"], "cyan")


def _what(record: Record, _now: float) -> str:
    """Return what an instruction is about in few characters: a domain, machines by kind, or their ids."""
    if record["domain"]:
        return plain(record["domain"])
    if record["instanceType"] or record["zone"]:
        return plain(" ".join(filter(None, (str(record["count"]), record["instanceType"], record["zone"]))))
    shown = [plain(machine) for machine in record["machines"][:_SHOWN_IDS_MAX]]
    left = len(record["machines"]) - len(shown)
    return ", ".join(shown) + (f" and {left} more" if left else "") or NOTHING


def _conflict(record: Record, _now: float) -> str:
    return plain(",".join(record["alsoClaimedBy"]))


SHARDS: Final[Sequence[TableColumn]] = (
    TableColumn(head="SHARD", cell=_field("shard")),
    TableColumn(head="STATE", cell=_alive, style=_alive_style),
    TableColumn(head="LAST REPORT", cell=_age("lastReport"), right=True),
    TableColumn(head="REGISTERED", cell=_age("registered"), rank=2, right=True),
    TableColumn(head="EPOCH", cell=_field("epoch"), rank=3, right=True),
    TableColumn(head="ADDRESS", cell=_field("address"), rank=1, flexible=True),
)
DOMAINS: Final[Sequence[TableColumn]] = (
    TableColumn(head="SHARD", cell=_field("shard")),
    TableColumn(head="KEY", cell=_field("key")),
    TableColumn(head="VALUE", cell=_field("value")),
    TableColumn(
        head="STATE", cell=_field("state"), style=lambda record: "yellow" if record["state"] == "releasing" else ""
    ),
)
QUOTAS: Final[Sequence[TableColumn]] = (
    TableColumn(head="PROVIDER", cell=_field("provider")),
    TableColumn(head="REGION", cell=_field("region")),
    TableColumn(head="SHARD", cell=_field("shard")),
    TableColumn(head="SLOTS", cell=_field("slots"), right=True),
)
PROVIDERS: Final[Sequence[TableColumn]] = (
    TableColumn(head="PROVIDER", cell=_field("provider")),
    TableColumn(head="ADDRESS", cell=_field("address")),
    TableColumn(head="REGION", cell=_field("region")),
)
BINDINGS: Final[Sequence[TableColumn]] = (
    TableColumn(head="CLUSTER", cell=_field("cluster")),
    TableColumn(head="SHARD", cell=_field("shard")),
    TableColumn(head="BOUND", cell=_age("bound"), rank=2, right=True),
    TableColumn(head="LAST REPORT", cell=_age("lastReport"), rank=1, right=True),
    TableColumn(head="ALSO CLAIMED BY", cell=_conflict, style=lambda _record: "bold red", flexible=True),
)
INSTRUCTIONS: Final[Sequence[TableColumn]] = (
    TableColumn(head="ID", cell=_field("id")),
    TableColumn(head="SHARD", cell=_field("shard")),
    TableColumn(head="KIND", cell=_field("kind"), rank=2),
    TableColumn(head="STATE", cell=_field("state"), style=_state_style),
    TableColumn(head="AGE", cell=_age("enqueued"), rank=1, right=True),
    TableColumn(head="TRIES", cell=_field("attempts"), rank=4, right=True),
    TableColumn(head="WHAT", cell=_what, rank=3),
    TableColumn(head="REASON", cell=_field("lastReason"), rank=5),
    TableColumn(head="WHY", cell=_field("why"), rank=1, flexible=True),
)
MOVES: Final[Sequence[TableColumn]] = (
    TableColumn(head="ID", cell=_field("id"), rank=5),
    TableColumn(head="FROM", cell=_field("from")),
    TableColumn(head="TO", cell=_field("to")),
    TableColumn(head="STATE", cell=_field("state"), style=_move_style),
    TableColumn(head="AGE", cell=_age("enqueued"), rank=2, right=True),
    TableColumn(head="TIER", cell=_field("tier"), rank=1),
    TableColumn(head="WHAT", cell=_moved, rank=3),
    TableColumn(head="REASON", cell=_field("lastReason"), rank=4),
    TableColumn(head="WHY", cell=_field("why"), flexible=True),
)
