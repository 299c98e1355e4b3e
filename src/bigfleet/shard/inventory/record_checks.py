"""Rejects provider records whose size, id, texts, counts or price exceed the limits of docs/spec/provider.md §9.

What a provider lists reaches logs, terminals, operators and the engine's vocabulary. A rejected record leaves the last
good one in force; the others of the same List are taken.
"""

from collections.abc import Sequence
from typing import Final

from bigfleet.model.ids import identifier_fault
from bigfleet.model.limits.record_limits import (
    PRICE_USD_PER_HOUR_MAX,
    RECORD_BYTES_MAX,
    SURELY_SHORT_CHARACTERS,
    counts_fault,
    high_price_text,
    long_fault,
    texts_fault,
    texts_of,
)
from bigfleet.model.machine import InvariantFault, Machine
from bigfleet.shard.inventory.machine_record import Facts, InventoryRecord
from bigfleet.shard.ports import ListedMachine, OversizedRecord

#: The reason of a rejection for a size, a text or a count.
LIMITS: Final = "limits"


def record_fault(record: ListedMachine, known: InventoryRecord | None = None) -> tuple[str, str] | None:
    """Return why a record is rejected, as a metric label and a sentence; None for a sound one.

    `known` is what the last good record of the same machine said, None where there is none: what is the same object in
    both is not looked at again.
    """
    machine = record.machine
    fault = identifier_fault(machine.id) if known is None else None
    if fault is not None:
        return LIMITS, f"id {fault}"
    if isinstance(record, OversizedRecord):
        return LIMITS, f"the record has {record.size_bytes:,} bytes, at most {RECORD_BYTES_MAX:,} are allowed"
    ref, node_name = machine.host.ref, machine.node_name
    # Most are short together, and need no further call.
    if len(ref) + len(node_name) > SURELY_SHORT_CHARACTERS:
        fault = long_fault("host.ref", ref) or long_fault("node_name", node_name)
        if fault is not None:
            return LIMITS, fault
    fault = cluster_fault(machine.cluster)
    if fault is not None:
        return LIMITS, fault
    return facts_fault(machine, None if known is None else known.facts)


def facts_fault(machine: Machine, accepted: Facts | None = None) -> tuple[str, str] | None:
    """Return why the facts of a record are rejected: what many machines have alike."""
    price = machine.price_usd_per_hour
    if price > PRICE_USD_PER_HOUR_MAX:
        return InvariantFault.PRICE.value, high_price_text(price, "price_per_hour")
    # Conversion shares maps, and a change of a price has the maps and texts of the record before.
    if accepted is not None and _are_accepted(machine, accepted):
        return None
    fault = counts_fault(machine.resources, machine.allocatable, machine.labels) or texts_fault(
        [
            machine.host.provider,
            machine.instance_type,
            machine.zone,
            *texts_of(machine.labels, machine.resources, machine.allocatable),
        ]
    )
    return (LIMITS, fault) if fault is not None else None


def _are_accepted(machine: Machine, accepted: Facts) -> bool:
    """Return whether all maps and texts of a machine are those of accepted facts."""
    return (
        machine.labels is accepted.labels
        and machine.allocatable is accepted.allocatable
        and machine.resources is accepted.resources
        and machine.instance_type == accepted.instance_type
        and machine.zone == accepted.zone
        and machine.host.provider == accepted.host_provider
    )


def cluster_fault(cluster: str) -> str | None:
    """Return why the cluster of a record is rejected; a machine may have none."""
    fault = identifier_fault(cluster) if cluster else None
    return None if fault is None else f"cluster {fault}"


def are_ids_sound(ids: Sequence[str]) -> bool:
    """Return at once whether all ids are sound that have no more bytes than an id may have."""
    joined = "".join(ids)
    return joined.isprintable() and " " not in joined and all(ids)
