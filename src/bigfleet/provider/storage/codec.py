"""Encodes records as rows of readable JSON, and decodes them exactly (docs/spec/provider.md §11).

Used by `bigfleet.provider.storage.sqlite`. Maps that repeat are interned on the way in, so that a large fleet stays
small in memory. A row that does not read back must never be guessed at.
"""

from collections.abc import Mapping
from sys import intern
from types import MappingProxyType
from typing import Any, Final

import msgspec

from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import NO_HOST, HostRef, Machine
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.provider.backend import Slot
from bigfleet.provider.records.kinds import Kind
from bigfleet.provider.records.record import NO_METADATA, ErrorCode, Failure, Operation, Pushed, Record


class _SlotRow(msgspec.Struct, frozen=True, omit_defaults=True):
    resources: dict[str, str] = {}
    allocatable: dict[str, str] = {}
    labels: dict[str, str] = {}
    price_usd_per_hour: float = 0.0
    interruption_probability: float = 0.0
    fixed: bool = False


class _FailureRow(msgspec.Struct, frozen=True, omit_defaults=True):
    code: str
    source: int
    hold_seconds: float | None = None


class _Row(msgspec.Struct, frozen=True, omit_defaults=True):
    instance_type: str
    zone: str
    capacity_type: int
    state: int
    slot: _SlotRow
    host_provider: str = ""
    host_ref: str = ""
    cluster: str = ""
    node_name: str = ""
    last_error: str = ""
    price_usd_per_hour: float = 0.0
    interruption_probability: float = 0.0
    declared_price_usd_per_hour: float = 0.0
    declared_probability: float = 0.0
    # None: as the slot declares them.
    resources: dict[str, str] | None = None
    allocatable: dict[str, str] | None = None
    labels: dict[str, str] | None = None
    metadata: dict[str, str] = {}
    host_node_name: str = ""
    failures_in_row: int = 0
    failure: _FailureRow | None = None
    state_revision: int = 0
    former_cluster: str = ""


class _ReadRow(_Row, frozen=True):
    """A `_Row` on its way in: what repeats over a fleet stays text, which is known again in one look-up."""

    # A row is only decoded as this class; typing knows no field that is read as another type than it is written.
    slot: msgspec.Raw  # type: ignore[assignment]
    metadata: msgspec.Raw = msgspec.Raw(b"")  # type: ignore[assignment]


class _OperationRow(msgspec.Struct, frozen=True):
    id: str
    kind: Kind
    accepted_unix_nanos: int
    attempt: int
    grace_seconds: int


_ENCODER = msgspec.json.Encoder(order="deterministic")
_ROW = msgspec.json.Decoder(_ReadRow)
_SLOT = msgspec.json.Decoder(_SlotRow)
_METADATA = msgspec.json.Decoder(dict[str, str])
_OPERATION = msgspec.json.Decoder(_OperationRow)
#: More different maps than this are not interned; it only costs memory.
_INTERNED_MAX = 65_536
_INTERNED: dict[tuple[tuple[str, str], ...], Mapping[str, str]] = {}


#: By their texts in a row; cleared when full.
_SLOT_FACTS: dict[bytes, Mapping[str, Any]] = {}
_BINDINGS: dict[bytes, Mapping[str, str]] = {}
_STATES: Final = {state.value: state for state in MachineState}
_CAPACITY_TYPES: Final = {kind.value: kind for kind in CapacityType}


def intern_map(mapping: Mapping[str, str]) -> Mapping[str, str]:
    """Return a read-only map equal to this one, the same object for equal maps where that is affordable."""
    key = tuple(sorted(mapping.items()))
    interned = _INTERNED.get(key)
    if interned is None:
        interned = MappingProxyType(dict(mapping))
        if len(_INTERNED) < _INTERNED_MAX:
            _INTERNED[key] = interned
    return interned


#: Prices and probabilities that are stored once.
_NUMBERS_MAX = 65_536
_NUMBERS: dict[float, float] = {}


def _number(number: float) -> float:
    """Return an equal number, the same object for numbers that repeat; a zero keeps its sign."""
    if not number:
        return number
    if len(_NUMBERS) >= _NUMBERS_MAX:
        _NUMBERS.clear()
    return _NUMBERS.setdefault(number, number)


def encode_record(record: Record) -> bytes:
    """Return the row text of a record, without operation, revision and pushes, which have columns of their own."""
    machine, slot = record.machine, record.slot

    def unless_slot(own: Mapping[str, str], offered: Mapping[str, str]) -> dict[str, str] | None:
        return None if own == offered else dict(own)

    failure = record.failure
    return _ENCODER.encode(
        _Row(
            instance_type=machine.instance_type,
            zone=machine.zone,
            capacity_type=machine.capacity_type.value,
            state=machine.state.value,
            slot=_SlotRow(
                resources=dict(slot.resources),
                allocatable=dict(slot.allocatable),
                labels=dict(slot.labels),
                price_usd_per_hour=slot.price_usd_per_hour,
                interruption_probability=slot.interruption_probability,
                fixed=slot.fixed,
            ),
            host_provider=machine.host.provider,
            host_ref=machine.host.ref,
            cluster=machine.cluster,
            node_name=machine.node_name,
            last_error=machine.last_error,
            price_usd_per_hour=machine.price_usd_per_hour,
            interruption_probability=machine.interruption_probability,
            declared_price_usd_per_hour=record.declared_price_usd_per_hour,
            declared_probability=record.declared_probability,
            resources=unless_slot(machine.resources, slot.resources),
            allocatable=unless_slot(machine.allocatable, slot.allocatable),
            labels=unless_slot(machine.labels, slot.labels),
            metadata=dict(record.metadata),
            host_node_name=record.host_node_name,
            failures_in_row=record.failures_in_row,
            failure=None
            if failure is None
            else _FailureRow(code=failure.code.value, source=failure.source.value, hold_seconds=failure.hold_seconds),
            state_revision=record.state_revision,
            former_cluster=record.former_cluster,
        )
    )


def encode_operation(operation: Operation | None) -> bytes | None:
    """Return the column text of a record's latest operation."""
    if operation is None:
        return None
    return _ENCODER.encode(
        _OperationRow(
            id=operation.id,
            kind=operation.kind,
            accepted_unix_nanos=operation.accepted_unix_nanos,
            attempt=operation.attempt,
            grace_seconds=operation.grace_seconds,
        )
    )


def decode_record(
    machine_id: str,
    revision: int,
    state_since_unix_nanos: int,
    text: bytes,
    operation_text: bytes | None,
    pushed: Pushed | None,
) -> Record:
    """Return the record of a row. Raises msgspec.MsgspecError, ValueError or RecursionError."""
    row = _ROW.decode(text)
    state, capacity_type = _STATES.get(row.state), _CAPACITY_TYPES.get(row.capacity_type)
    if state is None or capacity_type is None:
        raise ValueError(f"state {row.state} or capacity type {row.capacity_type} does not exist")
    slot = Slot(
        id=machine_id,
        instance_type=intern(row.instance_type),
        zone=intern(row.zone),
        capacity_type=capacity_type,
        **_slot_facts(bytes(row.slot)),
    )
    machine = Machine(
        id=MachineId(machine_id),
        state=state,
        host=HostRef(intern(row.host_provider), row.host_ref) if row.host_provider or row.host_ref else NO_HOST,
        cluster=ClusterId(intern(row.cluster)),
        instance_type=slot.instance_type,
        zone=slot.zone,
        capacity_type=capacity_type,
        resources=slot.resources if row.resources is None else intern_map(row.resources),
        allocatable=slot.allocatable if row.allocatable is None else intern_map(row.allocatable),
        labels=slot.labels if row.labels is None else intern_map(row.labels),
        price_usd_per_hour=_number(row.price_usd_per_hour),
        interruption_probability=_number(row.interruption_probability),
        last_error=row.last_error,
        node_name=row.node_name,
    )
    return Record(
        machine=machine,
        slot=slot,
        declared_price_usd_per_hour=_number(row.declared_price_usd_per_hour),
        declared_probability=_number(row.declared_probability),
        metadata=_metadata(row.metadata),
        state_since_unix_nanos=state_since_unix_nanos,
        operation=None if operation_text is None else _decode_operation(operation_text),
        pushed=pushed,
        host_node_name=row.host_node_name,
        failures_in_row=row.failures_in_row,
        failure=None
        if row.failure is None
        else Failure(
            code=ErrorCode(row.failure.code),
            source=MachineState(row.failure.source),
            hold_seconds=row.failure.hold_seconds,
        ),
        revision=revision,
        state_revision=row.state_revision,
        former_cluster=intern(row.former_cluster),
    )


def _slot_facts(text: bytes) -> Mapping[str, Any]:
    """Return what a slot's text says by field of `Slot`, the same object for equal texts."""
    known = _SLOT_FACTS.get(text)
    if known is not None:
        return known
    said = msgspec.structs.asdict(_SLOT.decode(text))
    facts = {name: intern_map(value) if isinstance(value, dict) else value for name, value in said.items()}
    if len(_SLOT_FACTS) >= _INTERNED_MAX:
        _SLOT_FACTS.clear()
    _SLOT_FACTS[text] = facts
    return facts


def _metadata(raw: msgspec.Raw) -> Mapping[str, str]:
    """Return a binding's map, the same object for equal texts: many machines are bound to one need."""
    text = bytes(raw)
    if not text:
        return NO_METADATA
    known = _BINDINGS.get(text)
    if known is not None:
        return known
    metadata = MappingProxyType({intern(key): intern(value) for key, value in _METADATA.decode(text).items()})
    if len(_BINDINGS) >= _INTERNED_MAX:
        _BINDINGS.clear()
    _BINDINGS[text] = metadata
    return metadata


def _decode_operation(text: bytes) -> Operation:
    row = _OPERATION.decode(text)
    return Operation(
        id=row.id,
        kind=row.kind,
        accepted_unix_nanos=row.accepted_unix_nanos,
        attempt=row.attempt,
        grace_seconds=row.grace_seconds,
    )
