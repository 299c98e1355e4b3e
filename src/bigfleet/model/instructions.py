"""Defines the instructions of a coordinator to a shard, and how the simple ones change what the shard owns.

docs/spec/wire.md §10, docs/spec/coordinator.md §9.3. `owned_after` is the complete effect of all instructions but
three: releasing machines, moving slots and draining also need the donor's machines and its provider. This module does
no I/O.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Final

from bigfleet.model.ids import MachineId, ShardId
from bigfleet.model.machine import Machine
from bigfleet.model.ownership import Domain, Owned, OwnershipVersion, version_of
from bigfleet.model.profile import Requirement
from bigfleet.model.vector import Vector


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """Which machines a donor may choose; it chooses among those that it can give."""

    #: At most this many.
    count: int
    #: Empty is any.
    instance_type: str = ""
    zone: str = ""
    #: All must hold.
    requirements: tuple[Requirement, ...] = ()
    #: Each machine must cover it, milli-units.
    min_unit: Vector = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AssignDomain:
    """Take a domain."""

    domain: Domain


@dataclass(frozen=True, slots=True)
class UnassignDomain:
    """Acquire nothing more in a domain, and leave it when it is empty."""

    domain: Domain


@dataclass(frozen=True, slots=True, kw_only=True)
class ReassignSpeculative:
    """Release slots, or take over those that another shard has released."""

    from_shard: ShardId
    to_shard: ShardId
    machine_ids: tuple[MachineId, ...] = ()
    selector: Selector | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossShardDrain:
    """Drain cheaper work and keep the machines for another shard."""

    to_shard: ShardId
    preemptor_priority: int
    requester_interruption_bucket: int
    selector: Selector
    #: They restrict the candidates, when there are any.
    machine_ids: tuple[MachineId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOwnership:
    """Give machines up, take them over, take them back, or note where they are; which one, `reading` says."""

    from_shard: ShardId
    to_shard: ShardId
    machine_ids: tuple[MachineId, ...] = ()
    selector: Selector | None = None
    #: Records that are handed over.
    machines: tuple[Machine, ...] = ()
    is_note: bool = False


Payload = AssignDomain | UnassignDomain | ReassignSpeculative | CrossShardDrain | TransferOwnership

#: What metrics call each kind.
KIND_LABELS: Final[Mapping[type[Payload], str]] = MappingProxyType(
    {
        AssignDomain: "assign_domain",
        UnassignDomain: "unassign_domain",
        ReassignSpeculative: "reassign_speculative",
        CrossShardDrain: "cross_shard_drain",
        TransferOwnership: "transfer_ownership",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One instruction of one leader."""

    instruction_id: str
    version: OwnershipVersion
    #: None: of a kind that this version does not know.
    payload: Payload | None

    @property
    def row_version(self) -> OwnershipVersion:
        """The version of the rows that it makes."""
        return version_of(self.instruction_id, own=self.version)


class Reading(Enum):
    """What a transfer asks of the shard that reads it."""

    RELEASE = "release"
    ADOPT = "adopt"
    TAKE_BACK = "take_back"
    NOTE = "note"
    FORGET = "forget"
    #: It is about two others.
    FOREIGN = "foreign"


def reading(payload: TransferOwnership | ReassignSpeculative, me: ShardId) -> Reading:
    """Return the kind of a transfer for a shard."""
    if isinstance(payload, TransferOwnership) and payload.is_note:
        return Reading.NOTE if payload.to_shard else Reading.FORGET
    if payload.to_shard == me:
        return Reading.TAKE_BACK if payload.from_shard == me else Reading.ADOPT
    return Reading.RELEASE if payload.from_shard == me else Reading.FOREIGN


def ids_of(payload: TransferOwnership | ReassignSpeculative) -> tuple[MachineId, ...]:
    """Return the machines that a transfer names, those of its records included, each once, in their order."""
    records: tuple[Machine, ...] = payload.machines if isinstance(payload, TransferOwnership) else ()
    return tuple(dict.fromkeys((*payload.machine_ids, *(machine.id for machine in records))))


def owned_after(owned: Owned, instruction: Instruction, *, me: ShardId, now_unix_nanos: int = 0) -> Owned:
    """Return what a shard owns after an instruction; what only its donor can carry out changes nothing here."""
    payload, version = instruction.payload, instruction.row_version
    if isinstance(payload, AssignDomain):
        return owned.assigned(payload.domain)
    if isinstance(payload, UnassignDomain):
        return owned.unassigned(payload.domain)
    if not isinstance(payload, TransferOwnership | ReassignSpeculative):
        return owned
    meant = reading(payload, me)
    for machine_id in ids_of(payload):
        if meant is Reading.ADOPT:
            owned = owned.adopted(machine_id, version, by_gift_of=payload.from_shard, now_unix_nanos=now_unix_nanos)
        elif meant is Reading.TAKE_BACK:
            owned = owned.taken_back(machine_id, version, me=me, now_unix_nanos=now_unix_nanos)
        elif meant is Reading.NOTE:
            owned = owned.noted(machine_id, version, at=payload.to_shard, now_unix_nanos=now_unix_nanos)
        elif meant is Reading.FORGET:
            owned = owned.forgotten(machine_id, version)
    return owned


class InstructionOutcome(Enum):
    """What a shard made of an instruction."""

    ACCEPTED = "accepted"
    #: The shard has seen a higher term.
    REJECTED_STALE = "rejected_stale"
    #: It does not apply there.
    REJECTED_INVALID = "rejected_invalid"
    #: It may succeed later.
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Ack:
    """A shard's answer to an instruction."""

    instruction_id: str
    outcome: InstructionOutcome
    reason: str = ""
    #: Ids that the shard resolved or adopted.
    machine_ids: tuple[MachineId, ...] = ()
    #: Their records, from a donor.
    machines: tuple[Machine, ...] = ()
