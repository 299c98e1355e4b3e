"""Reads an offerings file: the slots of a provider, as a JSON array of kinds of slots with counts.

docs/spec/provider.md §19. Every mistake of the file is listed, with entry and key. `bigfleet.provider.inventory.offers`
and the core decide what follows from a mistake. This module must not drop an entry silently.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from bigfleet.files.bounded import CONFIGURATION_BYTES_MAX, read_bounded
from bigfleet.files.json_loading import load_json
from bigfleet.model.states import CapacityType
from bigfleet.provider.backend import Slot
from bigfleet.provider.records.validate import (
    Fault,
    Reason,
    facts_fault,
    labels_fault,
    price_fault,
    probability_fault,
    shape_fault,
)
from bigfleet.provider.storage.codec import intern_map

#: Units of one entry; more is a slip of the finger.
COUNT_MAX: Final = 1_000_000
_CAPACITY_TYPES: Final = {
    "ondemand": CapacityType.ON_DEMAND,
    "spot": CapacityType.SPOT,
    "reserved": CapacityType.RESERVED,
    "baremetal": CapacityType.BARE_METAL,
}
_REQUIRED: Final = ("instance_type", "zone", "count")
_MAPS: Final = ("resources", "allocatable", "labels")
_PRICE: Final = "price_per_hour"
_NUMBERS: Final = (_PRICE, "interruption_probability")
_KEYS: Final = frozenset({*_REQUIRED, "capacity_type", *_MAPS, *_NUMBERS, "fixed"})


class OfferingsUnreadable(Exception):
    """The file is no array of offerings at all; the text names it and the finding."""


class OfferingFault(NamedTuple):
    """One mistake in the file."""

    #: Such as `offerings.json: entry 3`.
    place: str
    key: str
    fault: Fault

    def __str__(self) -> str:
        return f"{self.place}: {self.key}: {self.fault.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offering:
    """So many slots of one kind."""

    #: What every id begins with, the last slash included.
    prefix: str
    count: int
    #: A slot without an id.
    template: Slot
    #: What the entry says beyond a slot, and of `_NUMBERS`, for a provider with a dialect of its own.
    own: Mapping[str, Any] = field(default_factory=dict)

    def slot(self, number: int) -> Slot:
        """Return slot `number` of this kind."""
        return replace(self.template, id=f"{self.prefix}{number:03d}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferingDialect:
    """What a provider's offerings may have beyond those of every provider."""

    #: More keys; their values are the provider's to check.
    keys: frozenset[str] = frozenset()
    #: Price and interruption probability may be left out, because the provider knows them otherwise.
    has_own_prices: bool = False


STANDARD: Final = OfferingDialect()


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferingsRead:
    """What a file says, and what is wrong with it."""

    offerings: tuple[Offering, ...]
    faults: tuple[OfferingFault, ...]


def read_offerings(path: Path, provider: str, dialect: OfferingDialect = STANDARD) -> OfferingsRead:
    """Return the offerings of a file and its mistakes. Raises OfferingsUnreadable when it is no JSON array."""
    try:
        entries = load_json(read_bounded(path, CONFIGURATION_BYTES_MAX).decode())
    except OSError as error:
        raise OfferingsUnreadable(f"{path}: {error.strerror}; name a file that can be read") from error
    except ValueError as error:
        raise OfferingsUnreadable(f"{path}: not JSON: {error}") from error
    if not isinstance(entries, list):
        raise OfferingsUnreadable(f"{path}: not an array of offerings, but {type(entries).__name__}")
    offerings: dict[str, Offering] = {}
    faults: list[OfferingFault] = []
    for number, entry in enumerate(entries):
        place = f"{path.name}: entry {number}"
        offering, found = _read_entry(entry, provider, dialect)
        faults.extend(OfferingFault(place, key, fault) for key, fault in found)
        if offering is None:
            continue
        if offering.prefix in offerings:
            text = f"{offering.prefix.rstrip('/')} is offered twice; add the counts up in one entry"
            faults.append(OfferingFault(place, "instance_type", Fault(Reason.DUPLICATE, text)))
        else:
            offerings[offering.prefix] = offering
    return OfferingsRead(offerings=tuple(offerings.values()), faults=tuple(faults))


def _read_entry(entry: Any, provider: str, dialect: OfferingDialect) -> tuple[Offering | None, list[tuple[str, Fault]]]:
    if not isinstance(entry, dict):
        return None, [("-", Fault(Reason.MISSING, f"an offering is an object, not {type(entry).__name__}"))]
    faults = [(key, Fault(Reason.MISSING, text)) for key, text in _shape_faults(entry, _KEYS | dialect.keys)]
    capacity_type = CapacityType.ON_DEMAND
    if isinstance(entry.get("capacity_type"), str):
        capacity_type = capacity_type_of(entry["capacity_type"])
        if capacity_type is CapacityType.UNSPECIFIED:
            text = f"{entry['capacity_type']!r} is none of on_demand, spot, reserved, bare_metal"
            faults.append(("capacity_type", Fault(Reason.MISSING, text)))
    unchecked = {key for key in _NUMBERS if dialect.has_own_prices and key not in entry}
    faults += _value_faults(entry, capacity_type, {key for key, _ in faults} | unchecked)
    if faults:
        return None, faults
    own = {key: entry[key] for key in entry if key in dialect.keys or key in _NUMBERS}
    offering = replace(_offering(entry, capacity_type, provider), own=own)
    faults = _id_faults(offering)
    return (None, faults) if faults else (offering, [])


def capacity_type_of(text: str) -> CapacityType:
    """Return the type that `on_demand`, `on-demand` or `OnDemand` names, and so on; UNSPECIFIED for other texts."""
    return _CAPACITY_TYPES.get(text.lower().replace("-", "").replace("_", ""), CapacityType.UNSPECIFIED)


def _shape_faults(entry: Mapping[str, Any], keys: frozenset[str]) -> list[tuple[str, str]]:
    """Return the keys that are missing, unknown or of the wrong type, with what is wrong."""
    faults = [(key, "is missing") for key in _REQUIRED if key not in entry]
    faults += [(key, f"is unknown; the keys are {', '.join(sorted(keys))}") for key in entry if key not in keys]
    for key in ("instance_type", "zone", "capacity_type"):
        if key in entry and (not isinstance(entry[key], str) or not entry[key]):
            faults.append((key, f"must be a text that is not empty, not {_shown(entry[key])}"))
    count = entry.get("count", 0)
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= COUNT_MAX:
        faults.append(("count", f"must be a whole number from 0 to {COUNT_MAX:,}, not {_shown(count)}"))
    for key in _MAPS:
        value = entry.get(key, {})
        if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
            faults.append((key, f"must be an object of texts, not {_shown(value)}"))
    for key in _NUMBERS:
        if key in entry and (isinstance(entry[key], bool) or not isinstance(entry[key], int | float)):
            faults.append((key, f"must be a number, not {_shown(entry[key])}"))
    if not isinstance(entry.get("fixed", False), bool):
        faults.append(("fixed", f"must be true or false, not {_shown(entry['fixed'])}"))
    return faults


def _value_faults(
    entry: Mapping[str, Any], capacity_type: CapacityType, unreadable: set[str]
) -> list[tuple[str, Fault]]:
    """Return what is wrong with the values but those of `unreadable` keys."""
    found: list[tuple[str, Fault | None]] = []
    if not unreadable & {_PRICE, "capacity_type"}:
        found.append((_PRICE, price_fault(float(entry.get(_PRICE, 0.0)), capacity_type, _PRICE)))
    if not unreadable & {"interruption_probability", "capacity_type"}:
        probability = float(entry.get("interruption_probability", 0.0))
        found.append(("interruption_probability", probability_fault(probability, capacity_type)))
    if "labels" not in unreadable:
        found.append(("labels", labels_fault(entry.get("labels", {}))))
    if not unreadable & {"resources", "allocatable"}:
        found.append(("resources", shape_fault(entry.get("resources", {}), entry.get("allocatable", {}))))
    faults = []
    for key, fault in found:
        if fault is not None and key in _NUMBERS and key not in entry:
            fault = Fault(Reason.MISSING, f"is missing: {fault.text}")
        if fault is not None:
            faults.append((key, fault))
    return faults


def _id_faults(offering: Offering) -> list[tuple[str, Fault]]:
    longest = offering.slot(max(0, offering.count - 1))
    fault = facts_fault(longest, price_key=_PRICE)
    return [("instance_type", fault)] if fault is not None and fault.reason is Reason.ID else []


def _offering(entry: Mapping[str, Any], capacity_type: CapacityType, provider: str) -> Offering:
    instance_type, zone = entry["instance_type"], entry["zone"]
    resources, allocatable = entry.get("resources"), entry.get("allocatable")
    kind = capacity_type.name.lower().replace("_", "-")
    return Offering(
        prefix=f"{provider}/{kind}/{instance_type}/{zone}/",
        count=entry["count"],
        template=Slot(
            id="",
            instance_type=instance_type,
            zone=zone,
            capacity_type=capacity_type,
            # One of the two says both, unless both are given.
            resources=intern_map(resources if resources is not None else allocatable or {}),
            allocatable=intern_map(allocatable if allocatable is not None else resources or {}),
            labels=intern_map(entry.get("labels", {})),
            price_usd_per_hour=float(entry.get(_PRICE, 0.0)),
            interruption_probability=float(entry.get("interruption_probability", 0.0)),
            fixed=entry.get("fixed", False),
        ),
    )


def _shown(value: object) -> str:
    return f"{type(value).__name__} {str(value)[:64]!r}"
