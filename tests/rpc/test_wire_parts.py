"""A large message in parts: together they say what the whole says, and bytes that are no message are refused."""

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from bigfleet.rpc.gen import provider_pb2
from bigfleet.rpc.wire_parts import parts_of

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


@given(messages, st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_the_parts_together_are_the_whole(message: provider_pb2.MachineList, fields_max: int) -> None:
    """Each part is a message by itself, of no more fields than asked for."""
    parts = list(parts_of(message.SerializeToString(), fields_max))
    joined = provider_pb2.MachineList()
    for part in parts:
        read = provider_pb2.MachineList.FromString(part)
        assert len(read.machines) + len(read.removed_ids) <= fields_max
        joined.MergeFrom(read)

    assert joined == message
    assert b"".join(parts) == message.SerializeToString()


def test_fields_of_every_kind_are_passed_over() -> None:
    """A newer provider may send what this version does not know: integers, doubles, floats."""
    content = b"\x50\x96\x01" + b"\x59" + bytes(8) + b"\x65" + bytes(4) + b"\x6a\x01x"
    parts = list(parts_of(content, 1))

    assert (len(parts), b"".join(parts)) == (4, content)


@pytest.mark.parametrize(
    "content",
    [b"\x0a\x05ab", b"\x0a", b"\x59\x00", b"\x0b", b"\x0c", b"\x50" + b"\xff" * 11, b"\x0a\xff"],
    ids=["short text", "no size", "short double", "group", "end of group", "endless number", "cut size"],
)
def test_what_is_no_message_is_refused(content: bytes) -> None:
    """Nothing is guessed."""
    with pytest.raises(DecodeError):
        list(parts_of(content, 10))
