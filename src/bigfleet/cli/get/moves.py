"""Lists machines that move between shards: donor, recipient, reason, progress.

A move consists of the donor's instruction and, after the release, the recipient's instruction. Both have one id and are
shown as one row. This module does not call a coordinator.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from bigfleet.rpc.wire.gen import coordinator_pb2

_Status = coordinator_pb2.InstructionStatus
_ADOPT: Final = "adopt"
_DRY_RUN: Final = "dry-run"


class MoveState(Enum):
    """How far a move is."""

    #: By a dry run: no instruction is sent.
    PROPOSED = "proposed"
    ASKED = "asked"
    #: Machines of tier 3: they are drained, and another move hands over what becomes free.
    DRAINING = "draining"
    #: The donor has released them, and no shard has adopted them.
    GIVEN = "given"
    ARRIVED = "arrived"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


#: What a donor is instructed, by how the coordinator calls it; a transfer of named machines hands over what was
#: drained.
TIERS: Final[Mapping[str, str]] = {
    "transfer_ownership": "idle",
    "reassign_speculative": "speculative",
    "cross_shard_drain": "drain",
}
DRAINED: Final = "drained"
_ENDS: Final[Mapping[int, MoveState]] = {
    _Status.STATE_FAILED: MoveState.FAILED,
    _Status.STATE_EXPIRED: MoveState.EXPIRED,
    _Status.STATE_CANCELLED: MoveState.CANCELLED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One move as a coordinator reports it."""

    #: The id of the donor's instruction.
    move_id: str
    #: idle, speculative, drain or drained: tiers 1, 2, 3, and what a drain of tier 3 has freed.
    tier: str
    donor: str
    recipient: str
    state: MoveState
    #: Asked for; what was given once it was.
    machines: int
    #: Once they are known.
    machine_ids: tuple[str, ...]
    #: Empty where several, or none, are known.
    instance_type: str
    #: Empty for a drain, and where several are known.
    zone: str
    #: One sentence of the coordinator.
    why: str
    #: What a shard said last that could not do it.
    reason: str
    enqueued_unix_nanos: int


def moves_in(answer: coordinator_pb2.ListInstructionsResponse) -> Iterator[Move]:
    """Return the moves in an answer, each once, by term and sequence of the donor's instruction."""
    asked: dict[str, coordinator_pb2.InstructionStatus] = {}
    adoptions: dict[str, coordinator_pb2.InstructionStatus] = {}
    for status in answer.instructions:
        full_id = status.instruction.instruction_id
        move_id, _slash, part = full_id.partition("/")
        kind = _kind(status)
        if kind not in TIERS or _payload(status).to_shard_id in ("", _giver(status)):
            # Taken back, or forgotten: it moves nothing between shards.
            continue
        if not part or part.startswith(_DRY_RUN):
            asked[full_id] = status
        elif part == _ADOPT:
            adoptions[move_id] = status
    joined = {move_id: _move(move_id, status, adoptions.get(move_id)) for move_id, status in asked.items()}
    # A leader that was elected in between knows the half of the recipient alone.
    joined |= {
        move_id: _move(move_id, adoption, adoption) for move_id, adoption in adoptions.items() if move_id not in joined
    }
    yield from joined.values()


def _kind(status: coordinator_pb2.InstructionStatus) -> str:
    return status.instruction.WhichOneof("payload") or ""


def _payload(status: coordinator_pb2.InstructionStatus) -> Any:
    return getattr(status.instruction, _kind(status))


def _giver(status: coordinator_pb2.InstructionStatus) -> str:
    # A drain is sent to its donor and names the requester alone.
    return str(status.shard_id if _kind(status) == "cross_shard_drain" else _payload(status).from_shard_id)


def _move(
    move_id: str, status: coordinator_pb2.InstructionStatus, adoption: coordinator_pb2.InstructionStatus | None
) -> Move:
    payload, kind = _payload(status), _kind(status)
    is_named = kind == "transfer_ownership" and not payload.HasField("selector") and status is not adoption
    given = payload if adoption is None else _payload(adoption)
    records = list(getattr(given, "machines", ()))
    last = adoption or status
    return Move(
        move_id=move_id,
        tier=DRAINED if is_named else TIERS[kind],
        donor=_giver(status),
        recipient=payload.to_shard_id,
        state=_state(move_id, status, adoption),
        machines=len(given.machine_ids) or payload.selector.count,
        machine_ids=tuple(given.machine_ids),
        instance_type=payload.selector.instance_type or _only({record.instance_type for record in records}),
        zone=payload.selector.zone or _only({record.zone for record in records}),
        why=status.why,
        reason=last.last_reason if last.state != _Status.STATE_DONE else "",
        enqueued_unix_nanos=status.enqueued_unix_nanos,
    )


def _only(values: set[str]) -> str:
    return next(iter(values)) if len(values) == 1 else ""


def _state(
    move_id: str, status: coordinator_pb2.InstructionStatus, adoption: coordinator_pb2.InstructionStatus | None
) -> MoveState:
    if _DRY_RUN in move_id:
        return MoveState.PROPOSED
    if adoption is not None:
        return MoveState.ARRIVED if adoption.state == _Status.STATE_DONE else MoveState.GIVEN
    if status.state == _Status.STATE_DONE:
        return MoveState.DRAINING if _kind(status) == "cross_shard_drain" else MoveState.GIVEN
    return _ENDS.get(status.state, MoveState.ASKED)
