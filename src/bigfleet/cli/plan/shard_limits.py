"""Refuses in the files of a plan what a shard would refuse, with the place and the field.

The limits are those of docs/spec/wire.md §1 and §2 and of docs/security.md. A plan of anything else would mislead.
"""

import math
import re
from dataclasses import replace
from typing import Final

from bigfleet.cli.runtime.failures import UsageFault
from bigfleet.model.ids import control_character_in, identifier_fault, text_bytes
from bigfleet.model.machine import Machine
from bigfleet.model.profile import Operator, Requirement
from bigfleet.shard.inventory.record_checks import cluster_fault, facts_fault

_TEXT_BYTES_MAX: Final = 1_024
_ARRIVALS: Final = range(-(2**63), 2**63)
_AMOUNT: Final = re.compile(r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_UNBOUNDED: Final = "+Inf"


def check_dollars(value: float | str, place: str) -> None:
    """Raise UsageFault unless the value is a number of at least 0, or `+Inf`."""
    if isinstance(value, str):
        amount = float(value) if _AMOUNT.fullmatch(value) else -1.0
        is_sound = value == _UNBOUNDED or 0 <= amount < math.inf
    else:
        is_sound = value >= 0
    if not is_sound:
        raise UsageFault(f"{place}: {value!r} is not an amount; use dollars of at least 0, or +Inf")


def check_machine(machine: Machine, place: str) -> None:
    """Raise UsageFault for a machine whose record a shard would reject; a plan allows an unbounded price."""
    fault = identifier_fault(machine.id)
    if fault is not None:
        raise UsageFault(f"{place}: id {fault}")
    fault = cluster_fault(machine.cluster)
    if fault is not None:
        raise UsageFault(f"{place}: {fault}")
    is_unbounded = machine.price_usd_per_hour == math.inf
    found = facts_fault(replace(machine, price_usd_per_hour=0.0) if is_unbounded else machine)
    if found is not None:
        raise UsageFault(f"{place}: {found[1]}")


def check_row(name: str, group: str, arrival_unix_nanos: int, place: str) -> None:
    """Raise UsageFault for a row whose id, group or arrival is out of bounds."""
    fault = identifier_fault(name)
    if fault is not None:
        raise UsageFault(f"{place}: id {fault}")
    if text_bytes(group) > _TEXT_BYTES_MAX:
        raise UsageFault(f"{place}: group has {text_bytes(group)} bytes, at most {_TEXT_BYTES_MAX} are allowed")
    if arrival_unix_nanos not in _ARRIVALS:
        raise UsageFault(f"{place}: arrival: {arrival_unix_nanos} is out of range; use a 64-bit integer")


def check_requirement(requirement: Requirement, place: str) -> None:
    """Raise UsageFault for a requirement that a shard would refuse in a roll-up."""
    if not requirement.key:
        raise UsageFault(f"{place}: key is empty")
    if not requirement.values and requirement.operator in (Operator.IN, Operator.NOT_IN):
        raise UsageFault(f"{place}: {requirement.operator.label} needs at least one value")
    for text in (requirement.key, *requirement.values):
        if text_bytes(text) > _TEXT_BYTES_MAX:
            raise UsageFault(f"{place}: a text has {text_bytes(text)} bytes, at most {_TEXT_BYTES_MAX} are allowed")
        character = control_character_in(text)
        if character:
            raise UsageFault(f"{place}: a text has the control character {character!r}; remove it")
