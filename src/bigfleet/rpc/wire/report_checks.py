"""Validates a report field by field against the bounds of docs/spec/wire.md §2.

Each check returns nothing, or the checked value, and raises MalformedMessage that names the place. An invalid value is
never corrected.
"""

from collections.abc import Mapping, Sequence

from bigfleet.model import penalty
from bigfleet.model.frames import MalformedMessage
from bigfleet.model.ids import identifier_fault
from bigfleet.model.profile import Operator, Requirement
from bigfleet.model.quantity import QuantityError, parse_quantity
from bigfleet.model.vector import Vector, parse_vector
from bigfleet.rpc.wire.amounts import RESOURCE_NAMES_MAX, check_count, check_string
from bigfleet.rpc.wire.convert_need import REQUIREMENTS_MAX, VALUES_MAX, requirements_from_wire
from bigfleet.rpc.wire.gen import capacity_pb2

_SHOWN_CHARACTERS_MAX = 64
_OPERATORS_WITH_VALUES = frozenset({Operator.IN, Operator.NOT_IN})


def shown(text: str) -> str:
    """Return the beginning of a foreign text, quoted."""
    return repr(text if len(text) <= _SHOWN_CHARACTERS_MAX else text[:_SHOWN_CHARACTERS_MAX] + "…")


def check_identifier(place: str, text: str) -> None:
    """Raise MalformedMessage unless the text can be the id of a cluster or a shard."""
    fault = identifier_fault(text)
    if fault is not None:
        raise MalformedMessage(place, fault)


def check_name(place: str, text: str) -> None:
    """Raise MalformedMessage for a text that is empty or too long."""
    if not text:
        raise MalformedMessage(place, "is empty")
    check_string(place, text)


def check_not_negative(place: str, number: int) -> None:
    """Raise MalformedMessage for a number below 0."""
    if number < 0:
        raise MalformedMessage(place, f"is {number}, and must not be negative")


def check_bucket(place: str, ordinal: int) -> None:
    """Raise MalformedMessage for a number that is no penalty bucket."""
    if ordinal not in penalty.ORDINALS:
        raise MalformedMessage(place, f"is {ordinal}, penalty buckets are 0 to {penalty.PINNED}")


def checked_vector(place: str, quantities: Mapping[str, str]) -> Vector:
    """Return the milli-units of a resource map. Raises MalformedMessage for its first fault, names ascending."""
    check_count(place, len(quantities), "names", RESOURCE_NAMES_MAX)
    for name in sorted(quantities):
        where = f"{place}[{shown(name)}]"
        check_string(where, name, "the name has")
        try:
            milli = parse_quantity(quantities[name])
        except QuantityError as error:
            raise MalformedMessage(where, str(error)) from error
        check_not_negative(where, milli)
    return parse_vector(quantities)


def checked_requirements(
    place: str, messages: Sequence[capacity_pb2.NodeSelectorRequirement]
) -> tuple[Requirement, ...]:
    """Return some requirements in their order. Raises MalformedMessage for the first fault."""
    check_count(place, len(messages), "requirements", REQUIREMENTS_MAX)
    rows = tuple(messages)
    for index, row in enumerate(rows):
        check_count(f"{place}[{index}].values", len(row.values), "values", VALUES_MAX)
    requirements = requirements_from_wire(rows)
    for index, (row, requirement) in enumerate(zip(rows, requirements, strict=True)):
        where = f"{place}[{index}]"
        check_name(f"{where}.key", row.key)
        if requirement.operator is Operator.UNSPECIFIED:
            raise MalformedMessage(f"{where}.operator", f"is {row.operator}, which is no operator that is known here")
        if not row.values and requirement.operator in _OPERATORS_WITH_VALUES:
            raise MalformedMessage(
                f"{where}.values", f"is empty, {requirement.operator.label} needs at least one value"
            )
        for place_of_value, value in enumerate(row.values):
            check_string(f"{where}.values[{place_of_value}]", value)
    return requirements
