"""Roll-ups that are known by their bytes: only what a parser would find equal goes unparsed."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bigfleet.model.frames import MalformedMessage, OperatorFrame, RollUp
from bigfleet.rpc.wire.convert_session import (
    ReceivedRollUp,
    operator_frame_from_bytes,
    operator_frame_from_wire,
    operator_frame_to_wire,
)
from bigfleet.rpc.wire.gen import capacity_pb2, shard_pb2
from bigfleet.rpc.wire.rollup_head import head_of_rollup
from tests.engine.proof import in_proportion
from tests.rpc.strategies import INT64, PLAIN_OPERATOR_FRAMES, rollups

#: An unknown field, and fields of a roll-up once more: each may stand anywhere.
SURPLUS = (
    b"\xfa\x3e\x02\x08\x01",
    b"\x0a\x01x",
    b"\x10\x07",
    b"\x10\x00",
    b"\x12\x01y",
    b"\x1a\x00",
    b"\x1a\x02\x18\x05",
    b"\x0a\x01\xff",
)


def frame_of(frame: OperatorFrame) -> bytes:
    """Return the frame as our operators write it."""
    return operator_frame_to_wire(frame).SerializeToString(deterministic=True)


def varint(number: int) -> bytes:
    """Return the integer as a varint."""
    content = bytearray()
    while number >= 0x80:
        content.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*content, number])


def outcome_of_reading(read: Any) -> object:
    """Return everything that a shard takes from a frame."""
    if not isinstance(read, ReceivedRollUp):
        return read
    try:
        needs: object = read.needs()
    except MalformedMessage as fault:
        needs = str(fault)
    return read.cluster_id, read.timestamp_unix_nanos, read.digest, read.rows, needs


def outcome(content: bytes, known_digest: bytes | None, *, is_parsed: bool) -> object:
    """Return what a shard takes from some bytes, "no frame" when it cannot."""
    try:
        if is_parsed:
            return outcome_of_reading(operator_frame_from_wire(shard_pb2.OperatorMessage.FromString(content)))
        return outcome_of_reading(operator_frame_from_bytes(content, known_digest))
    except (DecodeError, MalformedMessage):
        return "no frame"


@st.composite
def twisted(draw: st.DrawFn, content: bytes) -> bytes:
    """Draw what a fault, another language's library or malice could make of a frame."""
    inner = content[head.start :] if (head := head_of_rollup(content)) is not None else content
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, len(inner)))
        match draw(st.sampled_from(("surplus", "flip", "cut", "double"))):
            case "surplus":
                at = draw(st.sampled_from((0, len(inner), place)))
                inner = inner[:at] + draw(st.sampled_from(SURPLUS)) + inner[at:]
            case "flip" if place < len(inner):
                inner = inner[:place] + bytes([inner[place] ^ 1 << draw(st.integers(0, 7))]) + inner[place + 1 :]
            case "cut":
                inner = inner[:place]
            case "double":
                inner = inner + inner
    size = draw(st.sampled_from((len(inner), len(inner), len(inner), len(inner) + 1, max(0, len(inner) - 1))))
    outer = b"\x12" + varint(size) + inner
    return draw(st.sampled_from((outer, outer, outer + SURPLUS[0], outer + outer, content[:-1])))


@settings(max_examples=in_proportion(150), deadline=None)
@given(rollups(), INT64, st.data())
def test_a_frame_says_the_same_parsed_or_not(sent: RollUp, timestamp_unix_nanos: int, data: st.DataObject) -> None:
    """Cluster, timestamp, digest, rows and faults are those of the parser, whatever the bytes and whatever is known."""
    known = outcome(frame_of(sent), None, is_parsed=True)
    assert isinstance(known, tuple)
    again = replace(sent, timestamp_unix_nanos=timestamp_unix_nanos)
    content = data.draw(twisted(frame_of(again)))

    assert outcome(content, known[2], is_parsed=False) == outcome(content, None, is_parsed=True)


@settings(max_examples=in_proportion(200), deadline=None)
@given(PLAIN_OPERATOR_FRAMES, st.binary(max_size=16))
def test_other_frames_are_read_as_ever(sent: OperatorFrame, known_digest: bytes) -> None:
    """Nothing that is no roll-up is taken for one."""
    content = frame_of(sent)

    assert outcome(content, known_digest, is_parsed=False) == outcome(content, None, is_parsed=True)


@settings(max_examples=in_proportion(200), deadline=None)
@given(st.binary(max_size=40), st.binary(max_size=16))
def test_random_bytes_are_a_frame_for_both_or_for_neither(content: bytes, known_digest: bytes) -> None:
    """Nothing is guessed."""
    assert outcome(content, known_digest, is_parsed=False) == outcome(content, None, is_parsed=True)


@settings(max_examples=in_proportion(200), deadline=None)
@given(rollups(), st.integers(0, 2**63 - 1))
def test_our_operators_repeats_are_not_parsed(sent: RollUp, timestamp_unix_nanos: int) -> None:
    """Equal demand is known by its bytes, however the timestamp changes."""
    assume(sent.cluster_id)
    digest = ReceivedRollUp(operator_frame_to_wire(sent).rollup).digest
    again = replace(sent, timestamp_unix_nanos=timestamp_unix_nanos)

    repeated = ReceivedRollUp.repeated(frame_of(again), digest)
    assert repeated is not None
    assert repeated.has_digest
    assert (repeated.cluster_id, repeated.timestamp_unix_nanos) == (sent.cluster_id, timestamp_unix_nanos)


@settings(max_examples=in_proportion(200), deadline=None)
@given(rollups(), st.integers(0, 2**63 - 1))
def test_a_roll_up_whose_head_alone_was_read_is_the_same(sent: RollUp, timestamp_unix_nanos: int) -> None:
    """Its rows, digest and number of rows are those of the parsed one; they are parsed when needed."""
    assume(sent.cluster_id)
    sent = replace(sent, timestamp_unix_nanos=timestamp_unix_nanos)
    content = frame_of(sent)
    unread, parsed = operator_frame_from_bytes(content, None, parses_rollups=False), ReceivedRollUp.unread(content)
    reference = operator_frame_from_bytes(content, None)
    assert isinstance(reference, ReceivedRollUp)
    for each in (unread, parsed):
        assert isinstance(each, ReceivedRollUp)
        assert (each.cluster_id, each.timestamp_unix_nanos) == (sent.cluster_id, sent.timestamp_unix_nanos)
        assert not each.has_digest
        assert (each.digest, each.rows) == (reference.digest, reference.rows)


@settings(max_examples=in_proportion(150), deadline=None)
@given(rollups(), INT64, st.data())
def test_a_roll_up_that_waited_unread_says_what_the_parser_reads_or_is_refused(
    sent: RollUp, timestamp_unix_nanos: int, data: st.DataObject
) -> None:
    """Refused is what names one cluster first and another one later: the first was compared with the session's."""
    content = data.draw(twisted(frame_of(replace(sent, timestamp_unix_nanos=timestamp_unix_nanos))))
    head, parsed = head_of_rollup(content), outcome(content, None, is_parsed=True)
    try:
        read = outcome_of_reading(operator_frame_from_bytes(content, None, parses_rollups=False))
    except (DecodeError, MalformedMessage):
        read = "no frame"

    is_of_two = head is not None and isinstance(parsed, tuple) and parsed[0] != head.cluster_id
    assert read == ("no frame" if is_of_two else parsed)


#: A row of 4 cpu.
ROW = b"\x12\x08\x0a\x03cpu\x12\x014"
RED, BLUE = b"\x0a\x03red", b"\x0a\x04blue"


def written(*fields: bytes) -> bytes:
    """Return the frame of a roll-up with these fields in their order."""
    inner = b"".join(fields)
    return b"\x12" + varint(len(inner)) + inner


def test_a_second_cluster_behind_the_rows_is_refused() -> None:
    """A parser takes the last of several: the rows would have been another cluster's than the one that was checked."""
    content = written(RED, b"\x10\x09", b"\x1a", varint(len(ROW)), ROW, BLUE)
    questions: tuple[Callable[[ReceivedRollUp], object], ...] = (
        ReceivedRollUp.needs,
        ReceivedRollUp.overheads,
        lambda offer: offer.rows,
        lambda offer: offer.digest,
    )
    for ask in questions:
        offer = ReceivedRollUp.unread(content)
        assert offer is not None
        for _ in range(2):
            with pytest.raises(MalformedMessage, match="cluster_id: is given twice"):
                ask(offer)
        assert offer.cluster_id == "red"


def test_the_same_cluster_twice_and_a_later_timestamp_are_what_the_parser_reads() -> None:
    content = written(RED, b"\x10\x09", b"\x1a", varint(len(ROW)), ROW, RED, b"\x10\x0b")
    offer = ReceivedRollUp.unread(content)

    assert offer is not None
    assert [need.cluster for need in offer.needs()] == ["red"]
    assert offer.timestamp_unix_nanos == 11


def test_a_roll_up_behind_whose_head_is_no_message_is_malformed_once_it_is_read() -> None:
    inner = b"\x0a\x04blue" + b"\x10\x09" + b"\xff\xff"
    unread = ReceivedRollUp.unread(b"\x12" + varint(len(inner)) + inner)

    assert unread is not None
    assert unread.cluster_id == "blue"
    with pytest.raises(MalformedMessage, match="rollup"):
        _ = unread.rows


def test_another_order_of_fields_is_parsed_and_known() -> None:
    """An operator in another language may write maps in any order: it costs a parse, and counts as unchanged."""
    message = capacity_pb2.ClusterCapacityNeeds(
        cluster_id="blue", needs=[capacity_pb2.CapacityNeed(aggregate_resources={"cpu": "4", "memory": "1Gi"})]
    )
    cpu, memory = b"\x12\x08\x0a\x03cpu\x12\x014", b"\x12\x0d\x0a\x06memory\x12\x031Gi"
    digest = ReceivedRollUp(message).digest
    contents = []
    for row in (cpu + memory, memory + cpu):
        inner = b"\x0a\x04blue" + b"\x10\x09" + b"\x1a" + varint(len(row)) + row
        contents.append(b"\x12" + varint(len(inner)) + inner)

    assert [ReceivedRollUp.repeated(content, digest) is not None for content in contents] == [True, False]
    for content in contents:
        read = operator_frame_from_bytes(content, digest)
        assert isinstance(read, ReceivedRollUp)
        assert (read.digest, read.timestamp_unix_nanos) == (digest, 9)


@pytest.mark.parametrize("content", [b"", b"\x12", b"\x12\x00", b"\x12\x02\x0a", b"\x12\x02\x0a\x05", b"\x12\x80"])
def test_a_head_that_is_cut_short_is_none(content: bytes) -> None:
    """The parser says what is wrong with it."""
    assert head_of_rollup(content) is None


def test_rows_are_named_in_the_order_of_their_faults() -> None:
    """What repeats from row to row is remembered, its faults are not: each row hears its own, first things first."""
    same = capacity_pb2.NodeSelectorRequirement(key="rack", operator=capacity_pb2.NodeSelectorRequirement.OPERATOR_SAME)
    bad = {"cpu": "x"}
    rows = [
        (capacity_pb2.CapacityNeed(priority=1, interruption_penalty_bucket=99, aggregate_resources=bad), "bucket"),  # type: ignore[arg-type]
        (capacity_pb2.CapacityNeed(priority=1, aggregate_resources=bad, min_unit=bad, group="g"), "aggregate"),
        (capacity_pb2.CapacityNeed(priority=1, aggregate_resources={"cpu": "1"}, min_unit=bad, group="g"), "min_unit"),
        (capacity_pb2.CapacityNeed(priority=1, aggregate_resources={"cpu": "1"}, group="g"), "group"),
        (capacity_pb2.CapacityNeed(requirements=[same], group="g" * 1025), "group: has"),
    ]
    good = capacity_pb2.CapacityNeed(requirements=[same], aggregate_resources={"cpu": "1"}, group="g")
    for _ in range(2):
        for row, place in rows:
            offer = ReceivedRollUp(capacity_pb2.ClusterCapacityNeeds(cluster_id="blue", needs=[good, row]))
            for _ in range(2):
                with pytest.raises(MalformedMessage, match=rf"needs\[1\].*{place}"):
                    offer.needs()
