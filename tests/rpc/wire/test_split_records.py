"""A record that is read in parts says what reading it as a whole does, and one that cannot be is left out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine
from bigfleet.rpc.servers.provider import encode_list_entry
from bigfleet.rpc.wire import record_scan, split_records
from bigfleet.rpc.wire.convert_machine import machine_to_wire
from bigfleet.rpc.wire.gen import provider_pb2
from bigfleet.rpc.wire.list_response import read_listing
from bigfleet.shard.ports import Listing, ProviderRefusal, SplitRecords
from bigfleet.sim.kernel.virtual_time import LoopClock, run_virtual
from tests.engine.proof import in_proportion
from tests.rpc.strategies import MACHINES, TEXT_MAPS
from tests.rpc.wire.split_parts import composed

_LENGTH_DELIMITED = 2


def varint(number: int, bytes_min: int = 1) -> bytes:
    """Return a number as the wire has it, in more bytes than it needs where that is asked for."""
    content = bytearray()
    while number >= 0x80 or len(content) + 1 < bytes_min:
        content.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes(content) + bytes([number])


def entry(content: bytes) -> bytes:
    """Return a record as an entry of an answer."""
    return b"\x0a" + varint(len(content)) + content


def fields_of(content: bytes) -> list[bytes]:
    """Return the fields of a sound message, one by one."""
    fields, position = [], 0
    while position < len(content):
        end = split_field(content, position)
        fields.append(content[position:end])
        position = end
    return fields


def split_field(content: bytes, position: int) -> int:
    """Return where the field at a position ends."""
    tag, position = read_varint(content, position)
    if tag & 7 == _LENGTH_DELIMITED:
        size, position = read_varint(content, position)
        return position + size
    return {0: lambda: read_varint(content, position)[1], 1: lambda: position + 8, 5: lambda: position + 4}[tag & 7]()


def read_varint(content: bytes, position: int) -> tuple[int, int]:
    """Return the number at a position, and where it ends."""
    number = shift = 0
    while True:
        byte = content[position]
        number, shift, position = number | (byte & 0x7F) << shift, shift + 7, position + 1
        if byte < 0x80:
            return number, position


def in_order(machine: Machine, metadata: Mapping[str, str]) -> bytes:
    """Return a record as protobuf libraries write it."""
    return machine_to_wire(machine, metadata).SerializeToString(deterministic=True)


def of_the_kit(machine: Machine, metadata: Mapping[str, str]) -> bytes:
    """Return a record as our providers send it: what many machines share stands at the end."""
    own, shared = encode_list_entry(machine, metadata)
    content = own + shared
    _length, start = read_varint(content, 1)
    return content[start:]


WRITERS = (in_order, of_the_kit)
well_written: st.SearchStrategy[bytes] = st.builds(
    lambda write, machine, metadata: write(machine, metadata), st.sampled_from(WRITERS), MACHINES, TEXT_MAPS
)
#: Fields that no reader expects there: unknown ones, known ones once more, other spellings of numbers, groups.
odd_fields = st.sampled_from(
    [
        varint(5 << 3) + b"\x01",
        varint(200 << 3 | 2) + b"\x02hi",
        varint(77 << 3 | 1) + bytes(8),
        varint(78 << 3 | 5) + bytes(4),
        varint(9 << 3 | 3) + varint(9 << 3 | 4),
        b"\x0a\x01x",
        b"\x0a\x00",
        b"\x10\x03",
        b"\x10\x83\x00",
        b"\x10\x80\x01",
        b"\x1a\x00",
        b"\x1a\x03\x0a\x01p",
        b"\x1a\x06\x12\x01r\x0a\x01p",
        b"\x1a\x06\x0a\x01p\x0a\x01q",
        b"\x1a\x04\x0a\x01p\x18",
        b"\x1a\x05\x12\x01r\x18\x01",
        b"\x22\x81\x00t",
        b"\x30\x84\x00",
        b"\x39" + b"\xff" * 8,
        b"\x4a\x00",
        b"\x52\x00",
        b"\x52\x06\x0a\x01k\x12\x01\xff",
        b"\x62\x01e",
        b"\x72\x01\xc3",
        b"\x72\x01c",
        b"\x7a\x06\x12\x01v\x0a\x01k",
        b"\xa2\x06\x01n",
        b"\xa2\x06\x01\xff",
        b"\xa2\x07\x01n",
        b"\x8a\x00\x01x",
        b"\x00",
        b"\x0a\x7f",
    ]
)


@st.composite
def records(draw: st.DrawFn) -> bytes:
    """Draw a record: as it should be, in another order, with odd fields, or with other bytes."""
    content = draw(well_written)
    kind = draw(st.sampled_from(["as it is", "as it is", "odd", "order", "bytes", "cut"]))
    if kind == "odd":
        fields = fields_of(content)
        for field in draw(st.lists(odd_fields, min_size=1, max_size=3)):
            fields.insert(draw(st.integers(0, len(fields))), field)
        content = b"".join(fields)
    elif kind == "order":
        content = b"".join(draw(st.permutations(fields_of(content))))
    elif kind == "bytes" and content:
        place = draw(st.integers(0, len(content) - 1))
        content = content[:place] + draw(st.binary(max_size=3)) + content[place + draw(st.integers(0, 2)) :]
    elif kind == "cut":
        content = content[: draw(st.integers(0, len(content)))]
    return content


async def read(contents: Sequence[bytes]) -> tuple[Listing, SplitRecords]:
    """Return an answer of these records, and those of them that can be read in parts."""
    listing = await read_listing(b"".join(map(entry, contents)), LoopClock())
    assert listing.parts is not None
    return listing, await listing.parts.read(range(len(contents)))


def assert_the_same(listing: Listing, split: SplitRecords) -> None:
    """Compare each record that was read in parts with the plain reader's."""
    assert list(split.places) == sorted(set(split.places))
    for number, place in enumerate(split.places):
        # A price may be no number, which equals nothing; its text does.
        assert repr(composed(split, number)) == repr(listing.records[place])


@given(st.lists(records(), max_size=6))
@settings(max_examples=in_proportion(300), deadline=None)
def test_parts_say_what_the_whole_record_says(contents: list[bytes]) -> None:
    """For any bytes; what the plain reader refuses is never read in parts."""

    async def compare() -> None:
        assert_the_same(*await read(contents))

    run_virtual(compare)


@pytest.mark.parametrize("write", WRITERS)
@given(st.lists(st.tuples(MACHINES, TEXT_MAPS), min_size=1, max_size=6))
@settings(max_examples=in_proportion(100), deadline=None)
def test_well_written_records_are_read_in_parts(
    write: Callable[[Machine, Mapping[str, str]], bytes], shown: list[tuple[Machine, dict[str, str]]]
) -> None:
    """All but those of machines without id and those with a cause of failure."""

    async def compare() -> None:
        machines = [replace(machine, last_error="") for machine, _metadata in shown]
        contents = [write(machine, metadata) for machine, (_machine, metadata) in zip(machines, shown, strict=True)]
        listing, split = await read(contents)
        assert list(split.places) == [place for place, machine in enumerate(machines) if machine.id]
        assert_the_same(listing, split)

    run_virtual(compare)


def message(number: int, **changes: Any) -> bytes:
    """Return a record of a fleet."""
    fields: dict[str, Any] = {
        "id": f"m/{number}",
        "state": 5,
        "host": provider_pb2.HostRef(provider="p", ref=f"i-{number}"),
        "instance_type": "t4",
        "cluster": f"c{number % 3}",
        "labels": {"rack": f"r{number % 2}"},
        "node_name": f"node-{number}",
    }
    return provider_pb2.Machine(**(fields | changes)).SerializeToString(deterministic=True)


def test_equal_parts_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred machines of two racks in three clusters, in several turns."""
    monkeypatch.setattr(split_records, "_RECORDS_PER_TURN_MAX", 7)

    async def compare() -> None:
        listing, split = await read([message(number) for number in range(100)])
        assert (len(split.ids), len(split.facts_values), len(split.binding_values)) == (100, 2, 3)
        assert_the_same(listing, split)

    run_virtual(compare)


def test_parts_beyond_the_limit_are_left_to_the_plain_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory has a bound for any answer of a provider."""
    monkeypatch.setattr(split_records, "_PARTS_MAX", 2)

    async def compare() -> None:
        listing, split = await read([message(number, zone=f"z{number}") for number in range(9)])
        assert list(split.places) == [0, 1]
        assert_the_same(listing, split)

    run_virtual(compare)


@pytest.mark.parametrize(
    ("changes", "is_in_parts"),
    [
        ({}, True),
        ({"instance_type": "t" * 16_000}, True),
        ({"id": "m" * 127}, True),
        ({"id": "m" * 128}, False),
        ({"id": ""}, False),
        ({"node_name": "n" * 128}, False),
        ({"last_error": "broken"}, False),
        ({"state": 0, "host": None, "cluster": ""}, True),
        ({"labels": {str(each): "v" for each in range(80)}}, True),
        ({"labels": {str(each): "v" for each in range(record_scan._FIELDS_MAX)}}, False),
    ],
)
def test_which_records_are_read_in_parts(changes: dict[str, object], *, is_in_parts: bool) -> None:
    """Long texts and many labels, up to a bound."""

    async def compare() -> None:
        listing, split = await read([message(1, **changes)])
        assert len(split.ids) == is_in_parts
        assert_the_same(listing, split)

    run_virtual(compare)


@pytest.mark.parametrize("places", [[1, 4, 7], [2, 3, 4, 5], [0], [9], [0, 9]])
async def test_some_places_alone_are_read(places: list[int]) -> None:
    """Places are those of the answer, whether the records lie together or are scattered."""
    listing, _split = await read([message(number) for number in range(10)])
    assert listing.parts is not None
    split = await listing.parts.read(places)

    assert list(split.places) == places
    assert split.ids == [MachineId(f"m/{place}") for place in places]
    assert_the_same(listing, split)


@given(st.lists(records(), min_size=1, max_size=12), st.data())
@settings(max_examples=in_proportion(100), deadline=None)
def test_any_places_are_read_as_they_are_among_all(contents: list[bytes], data: st.DataObject) -> None:
    """A record is cut alike, whatever else is asked for."""
    is_asked = data.draw(st.lists(st.booleans(), min_size=len(contents), max_size=len(contents)))
    places = [place for place, asked in enumerate(is_asked) if asked]

    async def compare() -> None:
        listing, split = await read(contents)
        assert listing.parts is not None
        some = await listing.parts.read(places)
        assert list(some.places) == [place for place in split.places if place in places]
        assert_the_same(listing, some)

    run_virtual(compare)


@pytest.mark.parametrize("texts", [("m\0", "n"), ("\0", ""), ("mü", "n"), ("m", "nü"), ("m\0ü", "ü\0")])
async def test_texts_with_odd_characters_are_read(texts: tuple[str, str]) -> None:
    """Also beside others, with which they are decoded together."""
    odd_id, node_name = texts
    listing, split = await read([message(1), message(2, id=odd_id, node_name=node_name), message(3)])

    assert split.ids == ["m/1", odd_id, "m/3"]
    assert_the_same(listing, split)


async def test_a_text_that_is_none_leaves_out_its_record_alone() -> None:
    """An id, a node name, and a character that is cut in two between reference and node name."""
    cut_in_two = message(4).replace(b"i-4", b"i-\xc3").replace(b"node-4", b"\xbcode-4")
    contents = [
        message(1),
        message(2).replace(b"m/2", b"m\xff2"),
        message(3).replace(b"node-3", b"node\xff3"),
        cut_in_two,
    ]
    listing, split = await read([*contents, message(5)])

    assert split.ids == ["m/1", "m/5"]
    assert_the_same(listing, split)


async def test_what_the_plain_reader_refuses_is_left_out() -> None:
    """A label that is no text, and a record that ends too early."""
    broken = [message(1) + b"\x52\x06\x0a\x01k\x12\x01\xff", message(2)[:-1]]
    listing, split = await read([*broken, message(3)])

    assert split.ids == [MachineId("m/3")]
    for place in (0, 1):
        with pytest.raises(ProviderRefusal, match="is no MachineList"):
            listing.records[place]
