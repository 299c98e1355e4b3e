"""Refuses in the files of a plan what a shard would refuse, with the place and the field.

The limits are those of docs/spec/wire.md §1 and §2 and of docs/security.md. A plan of anything else would mislead.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from bigfleet.cli.runtime.failures import UsageFault
from bigfleet.model.frames import MalformedMessage, RollUp
from bigfleet.model.ids import identifier_fault
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need
from bigfleet.model.shapes import Overhead
from bigfleet.rpc.wire.convert_need import ReceivedRollUp, rollup_to_wire
from bigfleet.shard.inventory.record_checks import cluster_fault, facts_fault

_ARRIVALS: Final = range(-(2**63), 2**63)
_AMOUNT: Final = re.compile(r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_UNBOUNDED: Final = "+Inf"
_ROW_FIELD: Final = re.compile(r"needs\[(?P<row>[0-9]+)\]\.(?P<field>\w+)(?P<rest>.*)", re.DOTALL)
#: Fields of a roll-up by another name than in a file.
_FIELDS: Final = {
    "aggregate_resources": "aggregate",
    "spread": "spreads",
    "interruption_penalty_bucket": "interruption_bucket",
    "reclamation_penalty_bucket": "reclamation_bucket",
}


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


def check_row(name: str, arrival_unix_nanos: int, place: str) -> None:
    """Raise UsageFault for a row whose id or arrival is out of bounds."""
    fault = identifier_fault(name)
    if fault is not None:
        raise UsageFault(f"{place}: id {fault}")
    if arrival_unix_nanos not in _ARRIVALS:
        raise UsageFault(f"{place}: arrival: {arrival_unix_nanos} is out of range; use a 64-bit integer")


def check_demand(rows: Iterable[tuple[str, Need]], overheads: Mapping[str, tuple[Overhead, ...]], place: str) -> None:
    """Raise UsageFault for demand of which a shard would refuse a roll-up; each row has its place.

    The shard's own reader is asked, with what an operator would send.
    """
    by_cluster: dict[str, list[tuple[str, Need]]] = {cluster: [] for cluster in overheads}
    for where, need in rows:
        by_cluster.setdefault(need.cluster, []).append((where, need))
    for cluster, given in by_cluster.items():
        needs = tuple(need for _where, need in given)
        sent = RollUp(cluster_id=cluster, timestamp_unix_nanos=0, needs=needs, overheads=overheads.get(cluster, ()))
        try:
            ReceivedRollUp(rollup_to_wire(sent)).needs()
        except MalformedMessage as fault:
            found = _ROW_FIELD.fullmatch(fault.place)
            if found is not None:
                field = _FIELDS.get(found["field"], found["field"]) + found["rest"]
                raise UsageFault(f"{given[int(found['row'])][0]}: {field}: {fault.fault}") from fault
            # Overheads are sorted, so that their numbers are not those of the file.
            field = re.sub(r"^overheads\[[0-9]+\]", "overheads", fault.place)
            raise UsageFault(f"{place}: cluster {cluster}: {field}: {fault.fault}") from fault
