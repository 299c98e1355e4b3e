"""Turns a machine and its metadata into `provider.proto`'s Machine and back (docs/spec/wire.md §6).

The stamps of a bound machine cross as metadata, which `bigfleet.model.metadata` reads and writes; the shard's own
memory (`intended_cluster`, `preempted_for`) does not cross at all. This module must not judge a record: a price of NaN
or a Failed machine without a cause passes as it is, for the inventory to refuse by name.
"""

from collections.abc import Mapping
from functools import lru_cache
from sys import intern
from types import MappingProxyType
from typing import Any

from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import NO_HOST, HostRef, Machine, Stamp
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.rpc.wire.gen import provider_pb2, shardread_pb2

#: Shapes that are shared: a fleet has some hundreds, a List shows each of them hundreds of thousands of times.
_SHAPES_MAX = 16384
#: Sets of labels that are shared: there is one per rack and type, some ten thousand in a large fleet.
_LABELS_MAX = 65536
#: Sets of metadata that are shared: there is one per row that machines are bound to.
_METADATA_MAX = 65536
#: Characters of a map that is shared. A larger one is made for its machine only: a provider that sends other large maps
#: in each List would otherwise fill the memory with them.
SHARED_CHARACTERS_MAX = 2_048
#: Characters of a machine's last error that are read; a provider may send 1,024 bytes (docs/spec/provider.md §4).
LAST_ERROR_CHARACTERS_MAX = 1_024
#: Prices and probabilities that are shared.
_NUMBERS_MAX = 4096

_STATES = {state.value: state for state in MachineState}
_CAPACITY_TYPES = {kind.value: kind for kind in CapacityType}
_WIRE_STATES = {state: provider_pb2.MachineState.ValueType(state.value) for state in MachineState}
_WIRE_CAPACITY_TYPES = {kind: provider_pb2.CapacityType.ValueType(kind.value) for kind in CapacityType}


def machine_to_wire(machine: Machine, metadata: Mapping[str, str]) -> provider_pb2.Machine:
    """Return the message of a machine; a host without provider and ref, like an empty shape, is left absent."""
    host = machine.host
    return provider_pb2.Machine(
        id=machine.id,
        state=_WIRE_STATES[machine.state],
        host=provider_pb2.HostRef(provider=host.provider, ref=host.ref) if host.is_present else None,
        instance_type=machine.instance_type,
        zone=machine.zone,
        capacity_type=_WIRE_CAPACITY_TYPES[machine.capacity_type],
        price_per_hour=machine.price_usd_per_hour,
        interruption_probability=machine.interruption_probability,
        resources=resources_to_wire(machine.resources),
        labels=machine.labels,
        last_error=machine.last_error,
        allocatable=resources_to_wire(machine.allocatable),
        cluster=machine.cluster,
        shard_metadata=metadata,
        node_name=machine.node_name,
    )


def stamp_to_wire(machine: Machine) -> dict[str, Any]:
    """Return the fields of a MachineView that are the machine's stamps."""
    return {name: getattr(machine, name) for name in _SHOWN_STAMPS}


_SHOWN_STAMPS = [name for name in Stamp._fields if name in shardread_pb2.MachineView.DESCRIPTOR.fields_by_name]


def machine_from_wire(message: provider_pb2.Machine) -> tuple[Machine, Mapping[str, str]]:
    """Return the machine without stamps, and its metadata. An unknown state or capacity type reads as UNSPECIFIED.

    What repeats over a fleet (types, zones, labels, shapes, metadata) is shared between the machines that it returns.
    """
    machine = Machine(
        id=MachineId(message.id),
        state=state_from_wire(message.state),
        host=HostRef(intern(message.host.provider), message.host.ref) if message.HasField("host") else NO_HOST,
        cluster=ClusterId(intern(message.cluster)),
        instance_type=intern(message.instance_type),
        zone=intern(message.zone),
        capacity_type=capacity_type_from_wire(message.capacity_type),
        resources=resources_from_wire(message.resources),
        allocatable=resources_from_wire(message.allocatable),
        labels=_labels_from_wire(message.labels),
        price_usd_per_hour=_number(message.price_per_hour),
        interruption_probability=_number(message.interruption_probability),
        last_error=message.last_error[:LAST_ERROR_CHARACTERS_MAX],
        node_name=message.node_name,
    )
    return machine, metadata_from_wire(message.shard_metadata)


def state_to_wire(state: MachineState) -> provider_pb2.MachineState.ValueType:
    """Return the state's number."""
    return _WIRE_STATES[state]


def state_from_wire(number: int) -> MachineState:
    """Return the state, UNSPECIFIED for a number that this version does not know."""
    return _STATES.get(number, MachineState.UNSPECIFIED)


def capacity_type_from_wire(number: int) -> CapacityType:
    """Return the capacity type, UNSPECIFIED for a number that this version does not know."""
    return _CAPACITY_TYPES.get(number, CapacityType.UNSPECIFIED)


def resources_to_wire(quantities: Mapping[str, str]) -> provider_pb2.Resources | None:
    """Return the message of some quantities, None for no quantity: absent and empty say the same."""
    return provider_pb2.Resources(resources=quantities) if quantities else None


def resources_from_wire(message: provider_pb2.Resources) -> Mapping[str, str]:
    """Return the quantities of a message as declared; equal ones are the same object."""
    items = tuple(sorted(message.resources.items()))
    return _shared(items) if _is_small(items) else MappingProxyType(dict(items))


def metadata_from_wire(metadata: Mapping[str, str]) -> Mapping[str, str]:
    """Return the metadata of a message; equal ones in one order are the same object."""
    items = tuple(metadata.items())
    return _shared_metadata(items) if _is_small(items) else MappingProxyType(dict(items))


def _labels_from_wire(labels: Mapping[str, str]) -> Mapping[str, str]:
    items = tuple(sorted(labels.items()))
    return _shared_labels(items) if _is_small(items) else MappingProxyType(dict(items))


def _is_small(items: tuple[tuple[str, str], ...]) -> bool:
    return sum([len(key) + len(value) for key, value in items]) <= SHARED_CHARACTERS_MAX


@lru_cache(maxsize=_NUMBERS_MAX)
def _shared_number(number: float) -> float:
    return number


def _number(number: float) -> float:
    # Zeros of both signs are one key.
    return _shared_number(number) if number else number


@lru_cache(maxsize=_LABELS_MAX)
def _shared_labels(items: tuple[tuple[str, str], ...]) -> Mapping[str, str]:
    return MappingProxyType({intern(key): intern(value) for key, value in items})


@lru_cache(maxsize=_METADATA_MAX)
def _shared_metadata(items: tuple[tuple[str, str], ...]) -> Mapping[str, str]:
    return MappingProxyType({intern(key): intern(value) for key, value in items})


@lru_cache(maxsize=_SHAPES_MAX)
def _shared(items: tuple[tuple[str, str], ...]) -> Mapping[str, str]:
    return MappingProxyType(dict(items))
