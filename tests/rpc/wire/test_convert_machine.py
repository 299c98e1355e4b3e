"""A machine crosses the wire whole, and what this version does not know reads as unspecified."""

import math
import tracemalloc

import pytest
from hypothesis import given, settings

from bigfleet.model.ids import ClusterId, Fingerprint, MachineId
from bigfleet.model.machine import NO_HOST, HostRef, Machine
from bigfleet.model.metadata import decode_metadata, encode_metadata
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.rpc.wire.convert_machine import LAST_ERROR_CHARACTERS_MAX, machine_from_wire, machine_to_wire
from bigfleet.rpc.wire.gen import provider_pb2
from tests.engine.proof import in_proportion
from tests.rpc.strategies import MACHINES, TEXT_MAPS


def sent(machine: Machine, metadata: dict[str, str]) -> provider_pb2.Machine:
    """Return the message as the other end parses it."""
    return provider_pb2.Machine.FromString(machine_to_wire(machine, metadata).SerializeToString())


@settings(max_examples=in_proportion(150), deadline=None)
@given(MACHINES, TEXT_MAPS)
def test_a_round_trip_loses_nothing(machine: Machine, metadata: dict[str, str]) -> None:
    """Every field that the wire knows comes back equal, and so does the metadata."""
    assert (machine, metadata) == machine_from_wire(sent(machine, metadata))


def test_each_field_of_the_message_is_written() -> None:
    """No field of provider.proto's Machine is forgotten, the node name among them."""
    machine = Machine(
        id=MachineId("m-1"),
        state=MachineState.CONFIGURED,
        host=HostRef("sim", "i-1"),
        cluster=ClusterId("blue"),
        instance_type="m5.large",
        zone="a",
        capacity_type=CapacityType.SPOT,
        resources={"cpu": "2"},
        allocatable={"cpu": "1900m"},
        labels={"rack": "r1"},
        price_usd_per_hour=0.5,
        interruption_probability=0.05,
        last_error="was slow",
        node_name="node-1",
    )
    message = machine_to_wire(machine, {"k": "v"})

    assert [field.name for field in provider_pb2.Machine.DESCRIPTOR.fields] == [
        field.name for field, _value in message.ListFields()
    ]
    assert message.node_name == "node-1"


def test_stamps_cross_as_metadata_only() -> None:
    """The stamps of a bound machine come back through its metadata, not through its fields."""
    machine = Machine(
        id=MachineId("m-1"),
        state=MachineState.CONFIGURED,
        host=HostRef("sim", "i-1"),
        cluster=ClusterId("blue"),
        assigned_priority=1000,
        assigned_interruption_penalty_dollars=math.inf,
        assigned_need_fingerprint=Fingerprint("p=1000|ipb=27|rpb=0|reqs=|spr="),
        assigned_group="gang",
    )
    bare, metadata = machine_from_wire(sent(machine, encode_metadata(machine)))

    assert bare.assigned_priority == 0
    assert (machine, []) == decode_metadata(bare, metadata)


@pytest.mark.parametrize("state", MachineState)
def test_states_keep_their_number(state: MachineState) -> None:
    """A state is the same number on both sides."""
    message = sent(Machine(id=MachineId("m"), state=state), {})

    assert state.value == message.state
    assert state is machine_from_wire(message)[0].state


@pytest.mark.parametrize("number", [9, 100, -1, 2**31 - 1])
def test_unknown_enum_values_read_as_unspecified(number: int) -> None:
    """A state or capacity type of a newer version never breaks the reader."""
    message = provider_pb2.Machine(
        id="m",
        state=provider_pb2.MachineState.ValueType(number),
        capacity_type=provider_pb2.CapacityType.ValueType(number),
    )
    machine, _metadata = machine_from_wire(provider_pb2.Machine.FromString(message.SerializeToString()))

    assert (machine.state, machine.capacity_type) == (MachineState.UNSPECIFIED, CapacityType.UNSPECIFIED)


def test_no_host_is_an_absent_message() -> None:
    """A machine without a host has no HostRef, and an empty HostRef is no host."""
    message = sent(Machine(id=MachineId("m"), state=MachineState.SPECULATIVE), {})
    empty = provider_pb2.Machine(id="m", host=provider_pb2.HostRef())

    assert not message.HasField("host")
    assert machine_from_wire(message)[0].host == NO_HOST
    assert not machine_from_wire(empty)[0].host.is_present


def test_bad_numbers_pass_as_they_are() -> None:
    """A price of NaN is for the inventory to refuse by name, not for the conversion to hide."""
    message = provider_pb2.Machine(id="m", price_per_hour=math.nan, interruption_probability=7.0)
    machine, _metadata = machine_from_wire(message)

    assert math.isnan(machine.price_usd_per_hour)
    assert machine.interruption_probability == 7.0


def test_equal_shapes_are_one_object() -> None:
    """Machines of one type share the shape in memory."""
    messages = [
        sent(Machine(id=MachineId(name), state=MachineState.SPECULATIVE, allocatable={"memory": "8Gi", "cpu": "4"}), {})
        for name in ("a", "b")
    ]
    first, second = (machine_from_wire(message)[0] for message in messages)

    assert first.allocatable is second.allocatable
    assert first.allocatable == {"cpu": "4", "memory": "8Gi"}


@pytest.mark.parametrize("field", ["labels", "shard_metadata", "resources"])
def test_large_maps_are_not_retained(field: str) -> None:
    """A provider that sends other large maps in each List fills no cache with them."""
    tracemalloc.start()
    try:
        for number in range(30):
            message = provider_pb2.Machine(id="m-1")
            texts = message.resources.resources if field == "resources" else getattr(message, field)
            texts[f"k{number}"] = "v" * 1_000_000
            machine_from_wire(message)
            del message, texts
        retained, _peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert retained < 3_000_000


def test_a_last_error_is_read_up_to_its_limit() -> None:
    """A provider may send megabytes of it."""
    machine, _metadata = machine_from_wire(provider_pb2.Machine(id="m-1", last_error="E" * 1_000_000))
    assert machine.last_error == "E" * LAST_ERROR_CHARACTERS_MAX
