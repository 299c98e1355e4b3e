"""Transfers quota with speculative slots that change shards (docs/spec/coordinator.md §7.3, §9.3 H6).

The transfer is committed before the recipient is instructed, once per handover, under the id of the donor's
instruction. It is undone before the donor is instructed to take the slots back. This module does not write.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from bigfleet.coordinator.commands import MoveQuota, ReturnQuota
from bigfleet.coordinator.ownership_reconcile import WantedInstruction
from bigfleet.coordinator.tables import Tables
from bigfleet.coordinator.transfers import quota_behind
from bigfleet.model.ids import MachineId, ShardId
from bigfleet.model.instructions import Reading, ReassignSpeculative, reading
from bigfleet.model.ownership import Owned
from bigfleet.model.states import MachineState


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


def quota_returns_of(
    taken_back: Iterable[MachineId], donor: ShardId, owned: Owned, provider_address: str, tables: Tables
) -> tuple[ReturnQuota, ...]:
    """Return what must be committed before a donor takes released machines back: one command for each handover.

    `owned` is the donor's last view. Only slots whose quota was moved have a command.
    """
    key = quota_behind(provider_address, tables.providers, tables.quotas)
    if key is None:
        return ()
    rows = [owned.rows[machine_id] for machine_id in taken_back]
    slots = Counter(
        (row.version.instruction_id, row.other)
        for row in rows
        if row.machine is not None and row.machine.state is MachineState.SPECULATIVE
    )
    return tuple(
        ReturnQuota(key, recipient, donor, count, instruction_id)
        for (instruction_id, recipient), count in slots.items()
        if instruction_id in tables.quota_moves
    )
