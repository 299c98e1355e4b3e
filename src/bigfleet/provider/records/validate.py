"""Validates facts before they become a record, with the reason for each rejection (docs/spec/provider.md §9).

Checked where facts enter (inventory, the result of `create`, pushes). A value that breaks a rule is never repaired. The
store writes what passed here as it is, so a value of a wrong type must not pass.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from enum import Enum
from typing import Final, NamedTuple

from bigfleet.model.limits.record_limits import (
    PRICE_USD_PER_HOUR_MAX,
    counts_fault,
    high_price_text,
    long_fault,
    texts_fault,
    texts_of,
)
from bigfleet.model.quantity import QuantityError, parse_quantity
from bigfleet.model.states import CapacityType
from bigfleet.provider.backend import ExistingHost, Host, Reset, Slot
from bigfleet.provider.records.record import Record
from bigfleet.provider.records.reset import RESET_LABEL


class Reason(Enum):
    """Why a fact is quarantined; the values are metric labels."""

    PRICE = "price"
    PROBABILITY = "probability"
    LABEL = "label"
    QUANTITY = "quantity"
    ID = "id"
    IMMUTABLE = "immutable"
    DUPLICATE = "duplicate"
    SHARED_HOST = "shared_host"
    MISSING = "missing"
    TYPE = "type"
    LIMITS = "limits"


class Fault(NamedTuple):
    """One broken rule, with a sentence that names the field and the value."""

    reason: Reason
    text: str


def joined_faults(faults: Iterable[tuple[str, Fault]]) -> list[tuple[str, Fault]]:
    """Return one fault for each id: all its texts, in order; the reason is the first, or that the id comes twice."""
    by_id: dict[str, list[Fault]] = {}
    for machine_id, fault in faults:
        found = by_id.setdefault(machine_id, [])
        if fault not in found and len(found) < _TEXTS_JOINED_MAX:
            found.append(fault)
    return [(machine_id, _joined(found)) for machine_id, found in by_id.items()]


def _joined(faults: list[Fault]) -> Fault:
    is_duplicate = any(fault.reason is Reason.DUPLICATE for fault in faults)
    reason = Reason.DUPLICATE if is_duplicate else faults[0].reason
    return Fault(reason, "; ".join(fault.text for fault in faults))


def _fields_of(owner: type[Slot] | type[Host], kind: object) -> tuple[str, ...]:
    """Return the names of the fields that are annotated with a type."""
    return tuple(each.name for each in fields(owner) if each.type == kind)


_SLOT_TEXTS = _fields_of(Slot, str)
_EXISTING_HOST_TEXTS = _fields_of(ExistingHost, str)
#: Name of a price in the facts of a backend.
PRICE_KEY: Final = "price_usd_per_hour"
_HOST_TEXTS = _fields_of(Host, str)
#: Of a host as well, where None leaves them as the slot has them.
_MAPS = _fields_of(Slot, Mapping[str, str])
_ID = re.compile(r"[A-Za-z0-9._:/@-]{1,253}", re.ASCII)
_QUANTITY = re.compile(r"[0-9]+(?:\.[0-9]+)?(?:m|k|M|G|Ki|Mi|Gi)?", re.ASCII)
_RESETS = tuple(reset.value for reset in Reset)
#: Whole numbers up to here are the same as a float, which is what the wire and the store take.
_WHOLE_NUMBER_MAX = 2**53
#: Of one id; the others are seen once these are repaired.
_TEXTS_JOINED_MAX = 5
_FORBIDDEN_LABELS = frozenset(
    {
        "instance-type",
        "instance_type",
        "instanceType",
        "zone",
        "availability-zone",
        "availability_zone",
        "capacity-type",
        "capacity_type",
        "capacityType",
    }
)


def id_of(entry: object) -> str | None:
    """Return the id of an entry of an inventory, None for an entry that is no `Slot` or has no text as its id."""
    return entry.id if isinstance(entry, Slot) and _is(entry.id, str) else None


def entry_id(number: int, entry: object) -> str:
    """Return the id of an entry of an inventory, by its number. Raises ValueError for an entry without one.

    Such an entry may stand for any machine, so that nothing follows from the absence of another one.
    """
    named = id_of(entry)
    if named is None:
        raise ValueError(f"entry {number} of the inventory is {entry!r:.260}, no Slot with a text as its id")
    return named


def type_fault(facts: Slot) -> Fault | None:
    """Return the first field of a slot or host whose value is of another type than the field's, or None.

    A value that passes is one that the wire and the store take.
    """
    names = _EXISTING_HOST_TEXTS if isinstance(facts, ExistingHost) else _SLOT_TEXTS
    fault = _text_fault(facts, names, _MAPS)
    if fault is not None:
        return fault
    if not _is(facts.capacity_type, CapacityType):
        return Fault(Reason.TYPE, f"capacity_type is {facts.capacity_type!r:.64}, it must be a CapacityType")
    if not _is(facts.fixed, bool):
        return Fault(Reason.TYPE, f"fixed is {facts.fixed!r:.64}, it must be True or False")
    return None


def _is(value: object, kind: type) -> bool:
    # The annotations promise it, and no annotation binds an author's program.
    return isinstance(value, kind)


def is_text(value: object) -> bool:
    """Return whether a value is text that can be written as UTF-8, which half of a surrogate pair cannot."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_number(value: object) -> bool:
    """Return whether a value is a number that the wire and the store take; True and False are none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or abs(value) <= _WHOLE_NUMBER_MAX


def _text_fault(owner: object, texts: Iterable[str], maps: Iterable[str]) -> Fault | None:
    """Return the first of these fields that holds anything but text, or a map of text to text."""
    values = [getattr(owner, name) for name in texts]
    try:
        for name in maps:
            mapping = getattr(owner, name)
            values += mapping
            values += mapping.values()
        # One look at all of them: this runs for every fact of every inventory.
        "".join(values).encode()
    except (TypeError, AttributeError, UnicodeEncodeError) as error:
        return _named_text_fault(owner, texts, maps) or Fault(Reason.TYPE, f"a field holds no text: {error}")
    return None


def _named_text_fault(owner: object, texts: Iterable[str], maps: Iterable[str]) -> Fault | None:
    for name in texts:
        value = getattr(owner, name)
        if not is_text(value):
            return Fault(Reason.TYPE, f"{name} is {value!r:.64}, it must be text")
    for name in maps:
        mapping = getattr(owner, name)
        if not isinstance(mapping, Mapping):
            return Fault(Reason.TYPE, f"{name} is {mapping!r:.64}, it must be a map of text to text")
        for key, value in mapping.items():
            if not (is_text(key) and is_text(value)):
                return Fault(Reason.TYPE, f"{name}[{key!r:.64}] is {value!r:.64}; key and value must be text")
    return None


def is_id(text: str) -> bool:
    """Return whether a text may be the id of a machine."""
    return _ID.fullmatch(text) is not None


def facts_fault(facts: Slot, *, price_key: str = PRICE_KEY) -> Fault | None:
    """Return the first broken rule of a slot or host of which `type_fault` found none, or None."""
    if not is_id(facts.id):
        return Fault(Reason.ID, f"id {facts.id[:260]!r} is not 1 to 253 characters of A-Za-z0-9._:/@-")
    for name in ("instance_type", "zone"):
        if not getattr(facts, name):
            return Fault(Reason.MISSING, f"{name} is empty")
    if facts.capacity_type is CapacityType.UNSPECIFIED:
        return Fault(Reason.MISSING, "capacity_type is not set")
    if isinstance(facts, ExistingHost) and not facts.host_ref:
        return Fault(Reason.MISSING, "host_ref is empty")
    return (
        price_fault(facts.price_usd_per_hour, facts.capacity_type, price_key)
        or probability_fault(facts.interruption_probability, facts.capacity_type)
        or labels_fault(facts.labels)
        or shape_fault(facts.resources, facts.allocatable)
        or _limits_fault(facts.resources, facts.allocatable, facts.labels, facts)
    )


def _limits_fault(
    resources: Mapping[str, str], allocatable: Mapping[str, str], labels: Mapping[str, str], owner: Slot | Host
) -> Fault | None:
    """Return what a shard would reject of the texts and counts of a slot or host, or None."""
    long = None
    texts: list[str] = []
    if isinstance(owner, Slot):
        texts += (owner.instance_type, owner.zone)
    if isinstance(owner, ExistingHost | Host):
        ref = owner.host_ref if isinstance(owner, ExistingHost) else owner.ref
        long = long_fault("host_ref", ref) or long_fault("node_name", owner.node_name)
    text = long or counts_fault(resources, allocatable, labels)
    text = text or texts_fault([*texts, *texts_of(resources, allocatable, labels)])
    return None if text is None else Fault(Reason.LIMITS, text)


def price_fault(usd_per_hour: float, capacity_type: CapacityType, key: str = PRICE_KEY) -> Fault | None:
    """Return what is wrong with a price, or None; `key` is what its author calls it."""
    if not is_number(usd_per_hour):
        return Fault(Reason.PRICE, f"{key} is {usd_per_hour!r:.64}, it must be a number")
    if not math.isfinite(usd_per_hour) or usd_per_hour < 0:
        return Fault(Reason.PRICE, f"{key} is {usd_per_hour}, it must be finite and not negative")
    if usd_per_hour > PRICE_USD_PER_HOUR_MAX:
        return Fault(Reason.PRICE, high_price_text(usd_per_hour, key))
    if usd_per_hour == 0 and capacity_type is not CapacityType.BARE_METAL:
        return Fault(Reason.PRICE, f"{key} is 0, which only bare metal may have, not {capacity_type.label}")
    return None


def probability_fault(probability: float, capacity_type: CapacityType) -> Fault | None:
    """Return what is wrong with an interruption probability, or None."""
    if not is_number(probability):
        return Fault(Reason.PROBABILITY, f"interruption_probability is {probability!r:.64}, it must be a number")
    if not 0.0 <= probability <= 1.0:
        return Fault(Reason.PROBABILITY, f"interruption_probability is {probability}, it must be in [0, 1]")
    if probability == 0 and capacity_type is CapacityType.SPOT:
        return Fault(Reason.PROBABILITY, "interruption_probability is 0, and a spot machine's must be above 0")
    return None


def labels_fault(labels: Mapping[str, str]) -> Fault | None:
    """Return which label may not be there, or None."""
    for key in sorted(labels):
        if key in _FORBIDDEN_LABELS:
            return Fault(Reason.LABEL, f"label {key!r} shadows a field of the record; leave it out")
    reset = labels.get(RESET_LABEL)
    if reset is not None and reset not in _RESETS:
        return Fault(Reason.LABEL, f"label {RESET_LABEL!r} is {reset[:64]!r}; write one of {', '.join(_RESETS)}")
    return None


def shape_fault(resources: Mapping[str, str], allocatable: Mapping[str, str]) -> Fault | None:
    """Return which quantity is unusable, or None."""
    for field, quantities in (("resources", resources), ("allocatable", allocatable)):
        for name, text in sorted(quantities.items()):
            if not _QUANTITY.fullmatch(text):
                return Fault(
                    Reason.QUANTITY,
                    f"{field}[{name!r}] is {text[:64]!r}; write a number with one of m, k, M, G, Ki, Mi, Gi or nothing",
                )
            try:
                parse_quantity(text)
            except QuantityError as error:
                return Fault(Reason.QUANTITY, f"{field}[{name!r}]: {error}")
    for name in sorted(resources.keys() & allocatable.keys()):
        if parse_quantity(resources[name]) <= 0:
            return Fault(Reason.QUANTITY, f"resources[{name!r}] is {resources[name]!r}, it must be above zero")
    return None


def change_fault(record: Record, facts: Slot) -> Fault | None:
    """Return which field differs that is fixed for the life of the id, or None."""
    machine = record.machine
    for name in ("instance_type", "zone", "capacity_type"):
        old, new = getattr(machine, name), getattr(facts, name)
        if old != new:
            return Fault(Reason.IMMUTABLE, f"{name} was {_shown(old)} and is now {_shown(new)}")
    return None


def _shown(value: object) -> str:
    return value.label if isinstance(value, CapacityType) else repr(value)


def host_fault(record: Record, host: Host) -> Fault | None:
    """Return what is wrong with the result of a `create`, or with a host that `adopt` found, or None."""
    machine = record.machine
    fault = _text_fault(host, _HOST_TEXTS, [name for name in _MAPS if getattr(host, name) is not None])
    if fault is not None:
        return fault
    if not host.ref:
        return Fault(Reason.MISSING, "the host has no ref")
    if host.price_usd_per_hour is not None:
        fault = price_fault(host.price_usd_per_hour, machine.capacity_type)
        if fault is not None:
            return fault
    resources = machine.resources if host.resources is None else host.resources
    allocatable = machine.allocatable if host.allocatable is None else host.allocatable
    labels = host.labels or {}
    return (
        labels_fault(labels)
        or shape_fault(resources, allocatable)
        or _limits_fault(resources, allocatable, labels, host)
    )
