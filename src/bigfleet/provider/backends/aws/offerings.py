"""Reads the offerings of EC2 and numbers their slots.

docs/spec/aws-provider.md §1. The format is that of every provider with the keys of a launch. Prices come from AWS where
the file has none. It makes no call to AWS.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from bigfleet.model.states import CapacityType
from bigfleet.provider.backend import Slot
from bigfleet.provider.backends.aws.launch import LaunchSettings
from bigfleet.provider.inventory.offerings import Offering, OfferingDialect, read_offerings

_TEXT_KEYS: Final = ("ami", "launch_template", "launch_template_version", "subnet", "capacity_reservation")
#: Facts that AWS's APIs give are optional; keys that say how an instance is launched are known.
DIALECT: Final = OfferingDialect(keys=frozenset(_TEXT_KEYS), has_own_prices=True)


class OfferingsFault(Exception):
    """What is wrong with the file, one mistake a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsOffering:
    """So many slots of one kind, and how they are launched."""

    offering: Offering
    settings: LaunchSettings
    #: The price that the file says, None to ask AWS.
    price_usd_per_hour: float | None
    #: Within one hour, as the file says; None to derive it.
    interruption_probability: float | None

    @property
    def instance_type(self) -> str:
        """The type of its instances."""
        return self.offering.template.instance_type

    @property
    def zone(self) -> str:
        """The zone of its instances."""
        return self.offering.template.zone

    @property
    def capacity_type(self) -> CapacityType:
        """How its instances are paid for."""
        return self.offering.template.capacity_type


def read_aws_offerings(path: Path, provider: str) -> tuple[AwsOffering, ...]:
    """Return the offerings of a file. Raises OfferingsUnreadable, or OfferingsFault naming each mistake."""
    read = read_offerings(path, provider, DIALECT)
    faults = [str(fault) for fault in read.faults]
    found = []
    for offering in read.offerings:
        fault = _fault(offering)
        if fault:
            faults.append(f"{path.name}: {offering.prefix.rstrip('/')}: {fault}")
            continue
        found.append(
            AwsOffering(
                offering=offering,
                settings=LaunchSettings(**{key: offering.own[key] for key in _TEXT_KEYS if key in offering.own}),
                price_usd_per_hour=_number(offering.own, "price_per_hour"),
                interruption_probability=_number(offering.own, "interruption_probability"),
            )
        )
    if faults:
        raise OfferingsFault("\n".join(faults))
    return tuple(found)


def _fault(offering: Offering) -> str:
    own = offering.own
    for key in _TEXT_KEYS:
        if key in own and (not isinstance(own[key], str) or not own[key]):
            return f"{key}: must be a text that is not empty"
    if "ami" not in own and "launch_template" not in own:
        return "ami: is missing; name an AMI or a launch_template that has one"
    if "launch_template_version" in own and "launch_template" not in own:
        return "launch_template_version: needs launch_template"
    kind = offering.template.capacity_type
    if kind is CapacityType.BARE_METAL:
        return "capacity_type: EC2 sells its .metal types as on_demand, spot or reserved"
    if "capacity_reservation" in own and kind is not CapacityType.RESERVED:
        return "capacity_reservation: belongs to capacity_type reserved"
    if not offering.template.allocatable:
        return "allocatable: is missing; say what pods get of an instance"
    return ""


def _number(own: Mapping[str, Any], key: str) -> float | None:
    return float(own[key]) if key in own else None


def slots_of(
    offerings: Iterable[AwsOffering], used_ids: Iterable[str], priced: Callable[[AwsOffering], Slot | None]
) -> list[Slot]:
    """Return the slots on offer: of each kind its count, machines with an instance among them, lowest numbers first.

    `priced` returns the template of an offering with its price, None while there is no price.
    """
    used: dict[str, set[int]] = {}
    for machine_id in used_ids:
        prefix, _, tail = machine_id.rpartition("/")
        if tail.isascii() and tail.isdigit():
            used.setdefault(f"{prefix}/", set()).add(int(tail))
    slots = []
    for offering in offerings:
        template = priced(offering)
        if template is None:
            continue
        numbers = {
            number
            for number in used.get(offering.offering.prefix, ())
            if offering.offering.slot(number).id.endswith(f"/{number:03d}")
        }
        candidate = 0
        while len(numbers) < offering.offering.count:
            numbers.add(candidate)
            candidate += 1
        slots += [replace(template, id=f"{offering.offering.prefix}{number:03d}") for number in sorted(numbers)]
    return slots
