"""Rejects provider records whose size, id, texts, counts or price exceed the limits of docs/spec/provider.md §9.

What a provider lists reaches logs, terminals, operators and the engine's vocabulary. A rejected record leaves the last
good one in force; the others of the same List are taken.
"""

from collections.abc import Sequence
from typing import Final

from bigfleet.model.ids import control_character_in, identifier_fault
from bigfleet.model.machine import InvariantFault, Machine
from bigfleet.shard.inventory.machine_record import Facts, InventoryRecord
from bigfleet.shard.ports import ListedMachine, OversizedRecord

#: Bytes of one record; of a larger one only the id is read.
RECORD_BYTES_MAX: Final = 128 * 1024
TEXT_BYTES_MAX: Final = 1_024
RESOURCE_NAMES_MAX: Final = 32
LABELS_MAX: Final = 256
#: No machine costs so much; sums of prices stay far below the largest float.
PRICE_USD_PER_HOUR_MAX: Final = 1e9

#: No text of so many characters has more bytes than `TEXT_BYTES_MAX`.
_SURELY_SHORT: Final = TEXT_BYTES_MAX // 4

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
    # Bytes are counted where there may be too many of them.
    if len(ref) > _SURELY_SHORT and _bytes(ref) > TEXT_BYTES_MAX:
        return LIMITS, f"host.ref {_too_long(ref)}"
    if len(node_name) > _SURELY_SHORT and _bytes(node_name) > TEXT_BYTES_MAX:
        return LIMITS, f"node_name {_too_long(node_name)}"
    fault = cluster_fault(machine.cluster)
    if fault is not None:
        return LIMITS, fault
    return facts_fault(machine, None if known is None else known.facts)


def facts_fault(machine: Machine, accepted: Facts | None = None) -> tuple[str, str] | None:
    """Return why the facts of a record are rejected: what many machines have alike."""
    price = machine.price_usd_per_hour
    if price > PRICE_USD_PER_HOUR_MAX:
        text = f"price_per_hour is {price:g}, at most {PRICE_USD_PER_HOUR_MAX:,.0f} is allowed"
        return InvariantFault.PRICE.value, text
    # Conversion shares maps, and a change of a price has the maps and texts of the record before.
    if accepted is not None and _are_accepted(machine, accepted):
        return None
    for name, quantities in (("resources", machine.resources), ("allocatable", machine.allocatable)):
        if len(quantities) > RESOURCE_NAMES_MAX:
            return LIMITS, f"{name} has {len(quantities)} names, at most {RESOURCE_NAMES_MAX} are allowed"
    if len(machine.labels) > LABELS_MAX:
        return LIMITS, f"labels has {len(machine.labels)} keys, at most {LABELS_MAX} are allowed"
    texts = [machine.host.provider, machine.instance_type, machine.zone]
    for texts_by_name in (machine.labels, machine.resources, machine.allocatable):
        texts += texts_by_name.keys()
        texts += texts_by_name.values()
    fault = _texts_fault(texts)
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


def _texts_fault(texts: Sequence[str]) -> str | None:
    together = "".join(texts)
    # Most records are sound: with one look at all their texts, a record is checked in half the time.
    if len(together) <= TEXT_BYTES_MAX and together.isascii() and together.isprintable():
        return None
    for text in texts:
        if _bytes(text) > TEXT_BYTES_MAX:
            return f"a text {_too_long(text)}"
        character = control_character_in(text)
        if character:
            return f"a text has the control character {character!r}, which no name or value may have"
    return None


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _too_long(text: str) -> str:
    return f"has {_bytes(text)} bytes, at most {TEXT_BYTES_MAX} are allowed: {text[:32]!r}…"
