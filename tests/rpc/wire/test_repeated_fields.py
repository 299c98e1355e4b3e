"""The entries of a large message and the rest of it say what the whole says; bytes that are no message are refused."""

from array import array

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from bigfleet.rpc.wire.gen import provider_pb2
from bigfleet.rpc.wire.repeated_fields import cut
from tests.engine.proof import in_proportion

messages = st.builds(
    provider_pb2.MachineList,
    machines=st.lists(
        st.builds(
            provider_pb2.Machine,
            id=st.text(max_size=200),
            price_per_hour=st.floats(allow_nan=False),
            labels=st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
        ),
        max_size=12,
    ),
    revision=st.binary(max_size=9),
    removed_ids=st.lists(st.text(max_size=5), max_size=5),
    tombstones=st.booleans(),
)


def entries_of(content: bytes, fields_max: int) -> tuple[list[bytes], bytes]:
    """Return the entries of field 1, and all other fields."""
    starts, ends, rest, position = array("Q"), array("Q"), bytearray(), 0
    while position < len(content):
        before, former = len(starts) + len(rest), position
        position = cut(content, position, fields_max, 0x0A, (starts, ends), rest)
        assert position > former
        assert len(starts) + len(rest) > before
    return [content[start:end] for start, end in zip(starts, ends, strict=True)], bytes(rest)


@given(messages, st.integers(1, 5))
@settings(max_examples=in_proportion(200), deadline=None)
def test_the_entries_and_the_rest_are_the_whole(message: provider_pb2.MachineList, fields_max: int) -> None:
    """However many fields are passed over at a time."""
    entries, rest = entries_of(message.SerializeToString(), fields_max)

    assert [provider_pb2.Machine.FromString(entry) for entry in entries] == list(message.machines)
    others = provider_pb2.MachineList.FromString(rest)
    assert not others.machines
    others.machines.extend(message.machines)
    assert others == message


@pytest.mark.parametrize("size", [0, 1, 127, 128, 300, 16_383, 16_384, 2_100_000])
def test_an_entry_may_have_any_size(size: int) -> None:
    """Sizes of one byte, two and more."""
    message = provider_pb2.MachineList(machines=[provider_pb2.Machine(id="x" * size), provider_pb2.Machine(id="y")])
    entries, rest = entries_of(message.SerializeToString(), 3)

    assert [provider_pb2.Machine.FromString(entry).id for entry in entries] == ["x" * size, "y"]
    assert rest == b""


def test_a_tag_may_be_longer_than_it_needs() -> None:
    """A reader of Protocol Buffers takes it for what it says."""
    content = b"\x8a\x00\x03\x0a\x01m"

    assert entries_of(content, 1) == ([b"\x0a\x01m"], b"")
    assert [machine.id for machine in provider_pb2.MachineList.FromString(content).machines] == ["m"]


def test_fields_of_every_kind_are_passed_over() -> None:
    """A newer provider may send what this version does not know: integers, doubles, floats."""
    content = b"\x50\x96\x01" + b"\x59" + bytes(8) + b"\x65" + bytes(4) + b"\x6a\x01x"

    assert entries_of(content, 1) == ([], content)


@pytest.mark.parametrize(
    "content",
    [b"\x0a\x05ab", b"\x0a", b"\x59\x00", b"\x0b", b"\x0c", b"\x50" + b"\xff" * 11, b"\x0a\xff"],
    ids=["short text", "no size", "short double", "group", "end of group", "endless number", "cut size"],
)
def test_what_is_no_message_is_refused(content: bytes) -> None:
    """Nothing is guessed."""
    with pytest.raises(DecodeError):
        entries_of(content, 10)
