"""Turns a coordinator's instructions into `coordinator.proto` and back (docs/spec/wire.md §10).

What a shard reads here comes from the leader that it obeys: unknown operators and kinds read as UNSPECIFIED and as no
payload, for the shard to refuse. This module does not decide what an instruction means.
"""

from collections.abc import Iterable

from bigfleet.model.ids import MachineId, ShardId
from bigfleet.model.instructions import (
    AssignDomain,
    CrossShardDrain,
    Instruction,
    Payload,
    ReassignSpeculative,
    Selector,
    TransferOwnership,
    UnassignDomain,
)
from bigfleet.model.machine import Machine
from bigfleet.model.ownership import Domain, OwnershipVersion
from bigfleet.model.vector import Vector, format_vector, parse_vector
from bigfleet.rpc.wire.convert_machine import machine_from_wire, machine_to_wire, resources_to_wire
from bigfleet.rpc.wire.convert_need import requirements_from_wire, requirements_to_wire
from bigfleet.rpc.wire.gen import capacity_pb2, coordinator_pb2, provider_pb2

_Wire = coordinator_pb2.CoordinatorInstruction


def instruction_to_wire(instruction: Instruction) -> coordinator_pb2.CoordinatorInstruction:
    """Return the message of an instruction; one without payload has none."""
    message = _Wire(
        coordinator_term=instruction.version.term,
        sequence_number=instruction.version.sequence,
        instruction_id=instruction.instruction_id,
    )
    match instruction.payload:
        case AssignDomain(domain):
            message.assign_domain.CopyFrom(coordinator_pb2.AssignDomain(**domain._asdict()))
        case UnassignDomain(domain):
            message.unassign_domain.CopyFrom(coordinator_pb2.UnassignDomain(**domain._asdict()))
        case ReassignSpeculative() as payload:
            message.reassign_speculative.CopyFrom(_reassign_to_wire(payload))
        case CrossShardDrain() as payload:
            message.cross_shard_drain.CopyFrom(_drain_to_wire(payload))
        case TransferOwnership() as payload:
            message.transfer_ownership.CopyFrom(_transfer_to_wire(payload))
        case None:
            pass
    return message


def instruction_from_wire(message: coordinator_pb2.CoordinatorInstruction) -> Instruction:
    """Return an instruction; its payload is None where this version knows none of those that it may carry."""
    return Instruction(
        instruction_id=message.instruction_id,
        version=OwnershipVersion(message.coordinator_term, message.sequence_number),
        payload=_payload(message),
    )


def vector_to_wire(vector: Vector) -> provider_pb2.Resources | None:
    """Return the message of a vector, None for an empty one: absent and empty say the same."""
    return resources_to_wire(format_vector(vector))


def machines_from_wire(messages: Iterable[provider_pb2.Machine]) -> tuple[Machine, ...]:
    """Return records without their metadata: machines that are handed over are not bound."""
    return tuple(machine_from_wire(message)[0] for message in messages)


def _payload(message: coordinator_pb2.CoordinatorInstruction) -> Payload | None:
    match message.WhichOneof("payload"):
        case "assign_domain":
            assign = message.assign_domain
            return AssignDomain(Domain(assign.topology_key, assign.topology_value))
        case "unassign_domain":
            unassign = message.unassign_domain
            return UnassignDomain(Domain(unassign.topology_key, unassign.topology_value))
        case "reassign_speculative":
            return _reassign(message.reassign_speculative)
        case "cross_shard_drain":
            return _drain(message.cross_shard_drain)
        case "transfer_ownership":
            return _transfer(message.transfer_ownership)
        case _:
            return None


def _reassign_to_wire(payload: ReassignSpeculative) -> coordinator_pb2.ReassignSpeculative:
    return coordinator_pb2.ReassignSpeculative(
        machine_ids=payload.machine_ids,
        selector=_selector_to_wire(payload.selector),
        from_shard_id=payload.from_shard,
        to_shard_id=payload.to_shard,
    )


def _reassign(message: coordinator_pb2.ReassignSpeculative) -> ReassignSpeculative:
    return ReassignSpeculative(
        from_shard=ShardId(message.from_shard_id),
        to_shard=ShardId(message.to_shard_id),
        machine_ids=tuple(map(MachineId, message.machine_ids)),
        selector=_selector(message.selector) if message.HasField("selector") else None,
    )


def _drain_to_wire(payload: CrossShardDrain) -> coordinator_pb2.CrossShardDrain:
    return coordinator_pb2.CrossShardDrain(
        machine_ids=payload.machine_ids,
        preemptor_priority=payload.preemptor_priority,
        selector=_selector_to_wire(payload.selector),
        requester_interruption_bucket=capacity_pb2.PenaltyBucket.ValueType(payload.requester_interruption_bucket),
        to_shard_id=payload.to_shard,
    )


def _drain(message: coordinator_pb2.CrossShardDrain) -> CrossShardDrain:
    return CrossShardDrain(
        to_shard=ShardId(message.to_shard_id),
        preemptor_priority=message.preemptor_priority,
        requester_interruption_bucket=message.requester_interruption_bucket,
        selector=_selector(message.selector),
        machine_ids=tuple(map(MachineId, message.machine_ids)),
    )


def _transfer_to_wire(payload: TransferOwnership) -> coordinator_pb2.TransferOwnership:
    return coordinator_pb2.TransferOwnership(
        machine_ids=payload.machine_ids,
        from_shard_id=payload.from_shard,
        to_shard_id=payload.to_shard,
        selector=_selector_to_wire(payload.selector),
        machines=[machine_to_wire(machine, {}) for machine in payload.machines],
        note=payload.is_note,
    )


def _transfer(message: coordinator_pb2.TransferOwnership) -> TransferOwnership:
    return TransferOwnership(
        from_shard=ShardId(message.from_shard_id),
        to_shard=ShardId(message.to_shard_id),
        machine_ids=tuple(map(MachineId, message.machine_ids)),
        selector=_selector(message.selector) if message.HasField("selector") else None,
        machines=machines_from_wire(message.machines),
        is_note=message.note,
    )


def _selector_to_wire(selector: Selector | None) -> coordinator_pb2.Selector | None:
    if selector is None:
        return None
    return coordinator_pb2.Selector(
        count=selector.count,
        instance_type=selector.instance_type,
        zone=selector.zone,
        requirements=requirements_to_wire(selector.requirements),
        min_unit=vector_to_wire(selector.min_unit),
    )


def _selector(message: coordinator_pb2.Selector) -> Selector:
    return Selector(
        count=message.count,
        instance_type=message.instance_type,
        zone=message.zone,
        requirements=requirements_from_wire(message.requirements),
        min_unit=parse_vector(dict(message.min_unit.resources)),
    )
