"""Reads machines whose fields have the names of docs/spec/model.md §1, in plans and generated fleets alike.

Values are taken as they are; a caller whose input comes from people checks them first.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from bigfleet.cli.engine.cases import CAPACITY_TYPES, HOST, STATES, Entry, dollars
from bigfleet.model.machine import MACHINE_FIELDS, NO_HOST, Machine, PreemptedFor


def machine_of_entry(entry: Entry) -> Machine:
    """Return a machine. Raises KeyError, TypeError or ValueError for a wrong or missing field."""
    as_written = {name: entry[name] for name in _AS_WRITTEN}
    return Machine(**as_written, **{name: read(entry) for name, read in _READ.items()})


#: How fields are read that are not written as they are.
_READ: Final[Mapping[str, Callable[[Entry], Any]]] = {
    "state": lambda entry: STATES[entry["state"]],
    "host": lambda entry: HOST if entry["host"] else NO_HOST,
    "capacity_type": lambda entry: CAPACITY_TYPES[entry["capacity_type"]],
    "price_usd_per_hour": lambda entry: dollars(entry["price_per_hour"]),
    "assigned_interruption_penalty_dollars": lambda entry: dollars(entry["assigned_interruption_penalty_dollars"]),
    "assigned_reclamation_penalty_dollars": lambda entry: dollars(entry["assigned_reclamation_penalty_dollars"]),
    "preempted_for": lambda entry: PreemptedFor(*entry["preempted_for"]) if entry["preempted_for"] else None,
}
#: No decision reads the name of a node.
_AS_WRITTEN: Final = tuple(name for name in MACHINE_FIELDS if name not in {*_READ, "node_name"})
