"""Validates facts before they become a record, with the reason for each rejection (docs/spec/provider.md §9).

Checked where facts enter (inventory, the result of `create`, pushes). A value that breaks a rule is never repaired.
"""

import math
import re
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

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
    MISSING = "missing"


class Fault(NamedTuple):
    """One broken rule, with a sentence that names the field and the value."""

    reason: Reason
    text: str


_ID = re.compile(r"[A-Za-z0-9._:/@-]{1,253}", re.ASCII)
_QUANTITY = re.compile(r"[0-9]+(?:\.[0-9]+)?(?:m|k|M|G|Ki|Mi|Gi)?", re.ASCII)
_RESETS = tuple(reset.value for reset in Reset)
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


def facts_fault(facts: Slot) -> Fault | None:
    """Return the first broken rule of a slot or host, or None."""
    if not _ID.fullmatch(facts.id):
        return Fault(Reason.ID, f"id {facts.id[:260]!r} is not 1 to 253 characters of A-Za-z0-9._:/@-")
    for name in ("instance_type", "zone"):
        if not getattr(facts, name):
            return Fault(Reason.MISSING, f"{name} is empty")
    if facts.capacity_type is CapacityType.UNSPECIFIED:
        return Fault(Reason.MISSING, "capacity_type is not set")
    if isinstance(facts, ExistingHost) and not facts.host_ref:
        return Fault(Reason.MISSING, "host_ref is empty")
    return (
        price_fault(facts.price_usd_per_hour, facts.capacity_type)
        or probability_fault(facts.interruption_probability, facts.capacity_type)
        or labels_fault(facts.labels)
        or shape_fault(facts.resources, facts.allocatable)
    )


def price_fault(usd_per_hour: float, capacity_type: CapacityType) -> Fault | None:
    """Return what is wrong with a price, or None."""
    if not math.isfinite(usd_per_hour) or usd_per_hour < 0:
        return Fault(Reason.PRICE, f"price_per_hour is {usd_per_hour}, it must be finite and not negative")
    if usd_per_hour == 0 and capacity_type is not CapacityType.BARE_METAL:
        return Fault(Reason.PRICE, f"price_per_hour is 0, which only bare metal may have, not {capacity_type.label}")
    return None


def probability_fault(probability: float, capacity_type: CapacityType) -> Fault | None:
    """Return what is wrong with an interruption probability, or None."""
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
    """Return what is wrong with the result of a `create`, or None."""
    machine = record.machine
    if not host.ref:
        return Fault(Reason.MISSING, "the host has no ref")
    if host.price_usd_per_hour is not None:
        fault = price_fault(host.price_usd_per_hour, machine.capacity_type)
        if fault is not None:
            return fault
    return labels_fault(host.labels or {}) or shape_fault(
        machine.resources if host.resources is None else host.resources,
        machine.allocatable if host.allocatable is None else host.allocatable,
    )
