"""Transfers quota with speculative slots that change shards (docs/spec/coordinator.md §7.3, §9.3 H6).

The transfer is committed before the recipient is instructed, once per handover, under the id of the donor's
instruction. This module does not write.
"""

from dataclasses import replace

from bigfleet.coordinator.commands import MoveQuota
from bigfleet.coordinator.ownership_reconcile import WantedInstruction
from bigfleet.coordinator.tables import Tables
from bigfleet.coordinator.transfers import quota_behind
from bigfleet.model.instructions import Reading, ReassignSpeculative, reading


def quota_transfer_of(
    wanted: WantedInstruction, provider_address: str, tables: Tables, now_unix_nanos: int
) -> MoveQuota | None:
    """Return the quota move that must be committed before an instruction is enqueued; None where there is none."""
    payload = wanted.payload
    if not isinstance(payload, ReassignSpeculative) or reading(payload, wanted.to) is not Reading.ADOPT:
        return None
    key = quota_behind(provider_address, tables.providers, tables.quotas)
    if key is None:
        return None
    return MoveQuota(
        key=key,
        from_shard_id=payload.from_shard,
        to_shard_id=payload.to_shard,
        slots=len(payload.machine_ids),
        instruction_id=wanted.instruction_id.removesuffix("/adopt"),
        now_unix_nanos=now_unix_nanos,
    )


def what_is_left(transfer: MoveQuota, tables: Tables) -> MoveQuota:
    """Return the transfer of what the donor still has, where its quota was lowered after the slots had left it."""
    quota = tables.quotas.get(transfer.key)
    left = 0 if quota is None else quota.slots_of.get(transfer.from_shard_id, 0)
    return replace(transfer, slots=min(left, transfer.slots))
