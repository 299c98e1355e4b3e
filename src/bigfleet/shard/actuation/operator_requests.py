"""Builds bootstrap requests and reclaim instructions for single machines (docs/spec/wire.md §6)."""

from bigfleet.model.frames import BootstrapRequest, ReclaimInstruction
from bigfleet.model.machine import Machine
from bigfleet.model.node_identity import node_labels, node_taints, provider_id
from bigfleet.model.profile import Profile
from bigfleet.shard.outcomes import ActionRecord, instruction_reason


def bootstrap_request(request_id: str, cluster: str, machine: Machine, profile: Profile) -> BootstrapRequest:
    """Return the request for a machine's bootstrap data."""
    return BootstrapRequest(
        request_id=request_id,
        cluster_id=cluster,
        requirements=profile.requirements,
        machine_id=machine.id,
        instance_type=machine.instance_type,
        zone=machine.zone,
        provider_id=provider_id(machine),
        labels=node_labels(machine),
        taints=tuple(node_taints(machine)),
    )


def reclaim_instruction(
    record: ActionRecord, machine: Machine, *, node_name: str, grace_seconds: int
) -> ReclaimInstruction:
    """Return the instruction to drain a machine's node."""
    return ReclaimInstruction(
        instruction_id=record.action_id,
        nodes=(node_name,),
        machine_ids=(machine.id,),
        provider_ids=(provider_id(machine),),
        grace_seconds=grace_seconds,
        preemptor_priority=record.action.preemptor_priority,
        reason=instruction_reason(record.action),
    )
