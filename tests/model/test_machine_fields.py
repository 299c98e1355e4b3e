"""Every place that names a machine's fields knows all of them, or is said here not to, so that a new one is not lost.

`Machine` and `Stamp` of `bigfleet.model.machine` are the declaration. A place that lists fields by hand (formats on the
wire and on disk, and what is read or compared for each of half a million machines) stands in `PLACES` with the fields
that it does not see.
"""

import asyncio
from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from typing import Any

import pytest

from bigfleet.cli.engine.cases import machine_of
from bigfleet.cli.engine.machine_entries import machine_of_entry
from bigfleet.cli.get.records import machine_record
from bigfleet.cli.plan.inputs import MachineEntry, machine_given
from bigfleet.conformance import in_process
from bigfleet.engine.columns.objects import machine_at, machines_at, resources_of
from bigfleet.engine.columns.store import ColumnStore
from bigfleet.engine.targets import class_key
from bigfleet.model.ids import ClusterId, Fingerprint, MachineId
from bigfleet.model.machine import MACHINE_FIELDS, NO_STAMP, HostRef, Machine, PreemptedFor, Stamp
from bigfleet.model.metadata import decode_metadata, encode_metadata
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.provider.backend import ExistingHost, Slot
from bigfleet.provider.records.record import Record
from bigfleet.provider.storage.codec import decode_record, encode_record
from bigfleet.rpc.clients import conformance
from bigfleet.rpc.servers.provider import encode_list_entry
from bigfleet.rpc.wire.convert_machine import machine_from_wire, machine_to_wire, stamp_to_wire
from bigfleet.rpc.wire.gen import provider_pb2, shardread_pb2
from bigfleet.rpc.wire.list_response import read_listing
from bigfleet.shard.inventory.host_texts import unpack
from bigfleet.shard.inventory.machine_record import Binding, InventoryRecord, Keeper, binding_of
from bigfleet.shard.ownership import ownership_file
from bigfleet.sim.kernel.virtual_time import LoopClock

#: A machine of which each field differs from what it is when nothing is said.
WHOLE = Machine(
    id=MachineId("m1"),
    state=MachineState.FAILED,
    host=HostRef("p", "h1"),
    cluster=ClusterId("c1"),
    instance_type="t4",
    zone="za",
    capacity_type=CapacityType.ON_DEMAND,
    resources={"cpu": "8"},
    allocatable={"cpu": "7"},
    labels={"rack": "r1"},
    price_usd_per_hour=1.5,
    interruption_probability=0.25,
    last_error="broken",
    node_name="n1",
    assigned_priority=7,
    assigned_interruption_penalty_dollars=2.0,
    assigned_reclamation_penalty_dollars=3.0,
    assigned_need_fingerprint=Fingerprint("f1"),
    assigned_group="g1",
    intended_cluster=ClusterId("c2"),
    preempted_for=PreemptedFor("c3", "f3", "g3"),
)
STAMP = frozenset(Stamp._fields)
#: What a shard alone remembers.
MEMORY = frozenset({"intended_cluster", "preempted_for"})
#: Each field as it is when nothing is said; those that a machine always has, with another value.
UNSAID: dict[str, Any] = {"id": MachineId("m2"), "state": MachineState.IDLE} | {
    each.name: each.default if each.default is not MISSING else {}
    for each in fields(Machine)
    if each.init and each.name not in ("id", "state")
}


def packed(machine: Machine) -> Machine:
    """Return what an inventory holds of a machine."""
    store = ColumnStore()
    record, _numbers = Keeper(store.vocabulary).keep(machine, binding_of(machine), 0.0, store.vocabulary)
    return record.machine(machine.id)


def in_columns(machine: Machine) -> Machine:
    """Return the machine that a row of the columns is."""
    store = ColumnStore()
    store.insert(machine)
    view = store.snapshot()
    resources = resources_of(view.vocabulary)
    made = machine_at(view, 0, resources)
    assert [made] == machines_at(view, [0], resources), "one by one and many at once"
    return made


def in_parts(machine: Machine) -> tuple[object, ...]:
    """Return what the reader of large Lists makes of a record."""

    async def read() -> tuple[object, ...]:
        message = machine_to_wire(machine, encode_metadata(machine))
        listing = await read_listing(provider_pb2.MachineList(machines=[message]).SerializeToString(), LoopClock())
        assert listing.parts is not None
        split = await listing.parts.read([0])
        assert len(split.ids) == 1, "the record could not be read in parts"
        return split.ids[0], split.facts_values[0], split.binding_values[0], unpack(split.texts[0])

    return asyncio.run(read())


def record_of(machine: Machine) -> Record:
    """Return a provider's record of a machine."""
    slot = Slot(id="m1", instance_type=machine.instance_type, zone=machine.zone, capacity_type=machine.capacity_type)
    return Record(machine=machine, slot=slot, declared_price_usd_per_hour=0.0, declared_probability=0.0)


def shown(machine: Machine) -> dict[str, Any]:
    """Return what `bigfleet get machines` prints of it."""
    return machine_record(shardread_pb2.MachineView(machine=machine_to_wire(machine, {}), **stamp_to_wire(machine)))


def entry_of(machine: Machine) -> dict[str, Any]:
    """Return a machine in the names of docs/spec/model.md §1, as fleets and plans are given it."""
    entry = {name: getattr(machine, name) for name in MACHINE_FIELDS if name != "node_name"}
    entry["price_per_hour"] = entry.pop("price_usd_per_hour")
    labels = {"state": machine.state.label, "capacity_type": machine.capacity_type.label}
    return entry | labels | {"host": machine.host.is_present}


#: Names of the fields in the case files (tests/cases/engine/README.md).
SHORT = {
    "state": "st",
    "instance_type": "type",
    "capacity_type": "ct",
    "allocatable": "alloc",
    "price_per_hour": "price",
    "interruption_probability": "iprob",
    "assigned_priority": "aprio",
    "assigned_interruption_penalty_dollars": "aint",
    "assigned_reclamation_penalty_dollars": "arec",
    "assigned_need_fingerprint": "afp",
    "assigned_group": "agroup",
    "intended_cluster": "icl",
    "preempted_for": "pfor",
}


def in_case(machine: Machine) -> Machine:
    """Return the machine that a case with all its fields makes."""
    entry = {SHORT.get(name, name): value for name, value in entry_of(machine).items() if value is not None}
    return machine_of(entry, machine.id, {})


def whole_record() -> InventoryRecord:
    """Return the inventory's record of the whole machine."""
    store = ColumnStore()
    return Keeper(store.vocabulary).keep(WHOLE, binding_of(WHOLE), 0.0, store.vocabulary)[0]


#: By place: what it makes of a machine, and the fields that it does not see.
PLACES: dict[str, tuple[Callable[[Machine], object], frozenset[str]]] = {
    "packed record": (packed, frozenset()),
    "comparison with a listed record": (
        lambda machine: whole_record().declares(machine),
        STAMP | {"id", "state", "cluster", "last_error"},
    ),
    "comparison of frames": (
        lambda machine: whole_record().is_framed_like(machine),
        STAMP | {"id", "cluster", "capacity_type", "price_usd_per_hour", "interruption_probability"},
    ),
    # Allocatable hides resources; what no decision reads is in no column.
    "columns": (in_columns, frozenset({"host", "last_error", "node_name", "resources"})),
    "end of a binding": (Machine.without_binding, STAMP | {"cluster"}),
    "metadata": (
        lambda machine: decode_metadata(replace(WHOLE, **NO_STAMP._asdict()), encode_metadata(machine)),
        frozenset(MACHINE_FIELDS) - STAMP | MEMORY,
    ),
    "message": (lambda machine: machine_to_wire(machine, encode_metadata(machine)), MEMORY),
    "message and back": (
        lambda machine: machine_from_wire(machine_to_wire(machine, encode_metadata(machine))),
        MEMORY,
    ),
    "entry of a List": (
        lambda machine: provider_pb2.MachineList.FromString(
            b"".join(encode_list_entry(machine, encode_metadata(machine)))
        ),
        MEMORY,
    ),
    # A record with an error is left to the reader of whole records.
    "List in parts": (lambda machine: in_parts(replace(machine, last_error="")), MEMORY | {"last_error"}),
    "provider's row": (lambda machine: encode_record(record_of(machine)), STAMP | {"id"}),
    "provider's row and back": (
        lambda machine: decode_record(machine.id, 0, 0, encode_record(record_of(machine)), None, None).machine,
        STAMP,
    ),
    "conformance suite, in process": (lambda machine: in_process.machine_seen(record_of(machine)), STAMP),
    "conformance suite, over the wire": (
        lambda machine: conformance.machine_seen(machine_to_wire(machine, {})),
        STAMP,
    ),
    "released machine on a shard's disk": (
        lambda machine: ownership_file._unpacked(machine.id, ownership_file._packed(machine)),
        STAMP | {"cluster"},
    ),
    # Allocatable hides resources.
    "bigfleet get": (shown, MEMORY | {"resources"}),
    "generated fleet": (lambda machine: machine_of_entry(entry_of(machine)), frozenset({"node_name"})),
    # Only a failed machine has an error, and one that does not say which has one nevertheless.
    "plan": (
        lambda machine: machine_given(MachineEntry(**entry_of(machine)), "here").machine,
        frozenset({"node_name"}),
    ),
    "case": (in_case, frozenset({"last_error", "node_name"})),
    "class of a composition": (
        class_key,
        STAMP | {"id", "state", "host", "cluster", "resources", "last_error", "node_name"},
    ),
}


def test_the_whole_machine_has_every_field() -> None:
    """A field that is added to a machine is added here, and then to the places that do not see it yet."""
    assert [name for name in MACHINE_FIELDS if getattr(WHOLE, name) == UNSAID[name]] == []


@pytest.mark.parametrize("place", PLACES)
def test_a_place_sees_every_field_but_those_that_it_is_said_not_to_see(place: str) -> None:
    """What it makes of a machine changes with each field."""
    see, blind = PLACES[place]
    unseen = {name for name in MACHINE_FIELDS if see(WHOLE) == see(replace(WHOLE, **{name: UNSAID[name]}))}

    assert unseen == blind


def test_the_stamps_are_fields_of_a_machine_with_the_same_defaults() -> None:
    assert {name: UNSAID[name] for name in Stamp._fields} == NO_STAMP._asdict()
    assert WHOLE.stamp == Stamp(**{name: getattr(WHOLE, name) for name in Stamp._fields})
    assert binding_of(WHOLE) == Binding(WHOLE.state, WHOLE.cluster, WHOLE.stamp)


def test_a_plan_names_the_fields_that_a_fleet_names() -> None:
    beside = {"idle_since", "unjoined", "reserved"}

    assert set(MachineEntry.__struct_fields__) - beside == entry_of(WHOLE).keys()


def test_the_host_of_a_slot_has_what_the_slot_offers() -> None:
    slot = Slot(
        id="m1",
        instance_type="t4",
        zone="za",
        capacity_type=CapacityType.SPOT,
        resources={"cpu": "8"},
        allocatable={"cpu": "7"},
        labels={"rack": "r1"},
        price_usd_per_hour=1.5,
        interruption_probability=0.25,
        fixed=True,
    )
    host = ExistingHost.of(slot, host_ref="h1", node_name="n1")

    assert host.slot == slot
    assert (host.host_ref, host.node_name) == ("h1", "n1")
    assert replace(host, fixed=False).slot == replace(slot, fixed=False)
