"""Frames with more elements than any operator sends: refused unparsed, and others are served meanwhile."""

import threading
from collections.abc import Callable

import grpc
import pytest

from bigfleet.rpc.servers import session as session_server
from bigfleet.rpc.wire import message_limits
from bigfleet.rpc.wire.convert_session import ReceivedOperatorFrame, operator_frame_from_bytes
from bigfleet.rpc.wire.gen import capacity_pb2, shard_pb2, shardread_pb2
from bigfleet.rpc.wire.message_limits import FRAME_MESSAGES_MAX, SMALL_FRAME_BYTES_MAX
from tests.patience import PATIENCE_SECONDS, wait_until_async
from tests.rpc.live_shard import CROSSED, live_shard

IN = capacity_pb2.NodeSelectorRequirement.OPERATOR_IN
MANY = FRAME_MESSAGES_MAX + 1
MESSAGES = "has more than 1,048,576 rows, requirements, quantities and the like"
#: The largest frame that is parsed here without a scan.
UNSCANNED_BYTES = 2 * FRAME_MESSAGES_MAX


def varint(number: int) -> bytes:
    """Return the integer as a varint."""
    content = bytearray()
    while number >= 0x80:
        content.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*content, number])


def field(number: int, content: bytes) -> bytes:
    """Return a length-delimited field."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def names(number: int) -> bytes:
    """Return a map of field 2 with so many names."""
    return b"".join(field(2, field(1, b"%06x" % each)) for each in range(number))


def rollup(content: bytes) -> bytes:
    """Return the frame of a roll-up of c1."""
    return field(2, field(1, b"c1") + b"\x10\x01" + content)


#: What is sent, and what is said of it.
FRAMES: dict[str, tuple[Callable[[], bytes], str]] = {
    "rows": (lambda: rollup(b"\x1a\0" * MANY), f"frame: {MESSAGES}"),
    "overheads": (lambda: rollup(b"\xa2\x06\0" * MANY), f"frame: {MESSAGES}"),
    "requirements of a row": (lambda: rollup(field(3, b"\x0a\0" * MANY)), f"frame: {MESSAGES}"),
    "shapes of a row": (lambda: rollup(field(3, b"\xa2\x06\0" * MANY)), f"frame: {MESSAGES}"),
    "roll-ups": (lambda: rollup(b"c" * 300_000) + b"\x12\0" * MANY, "frame: has more than 64 fields and 262,144 bytes"),
    "values": (
        lambda: rollup(field(3, field(1, b"\x1a\0" * (4 * MANY)))),
        "frame: has more than 4,194,304 fields",
    ),
    "names of a row": (
        lambda: rollup(field(3, names(250_000))),
        "rollup.needs.aggregate_resources: has more than 4,096 names",
    ),
    "names of a status": (
        lambda: field(100, field(1, b"m") + names(30_000).replace(b"\x12", b"\xa2\x06")),
        "node_status: has ",
    ),
    "a later hello": (lambda: field(1, b"\xa2\x06\0" * 100_000), "hello: has 300,000 bytes, at most 262,144"),
    "a drain's text": (lambda: field(101, field(4, b"x" * 300_000)), "drain_result: has 300,004 bytes"),
    "cut short": (lambda: rollup(b"\x1a\0" * 20)[:-1] + b"x" * UNSCANNED_BYTES, "frame: "),
}


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of the frames that are parsed."""
    sizes: list[int] = []

    def parse(content: bytes, known: bytes | None, *, parses_rollups: bool = True) -> ReceivedOperatorFrame | None:
        sizes.append(len(content))
        return operator_frame_from_bytes(content, known, parses_rollups=parses_rollups)

    monkeypatch.setattr(session_server, "operator_frame_from_bytes", parse)
    return sizes


@pytest.mark.rule("shard 4.4/6")
@pytest.mark.parametrize("kind", FRAMES)
async def test_a_frame_with_too_many_elements_is_not_parsed(kind: str, parsed: list[int]) -> None:
    """The status names the limit, and the frame counts as one that cannot be read."""
    make, fault = FRAMES[kind]
    async with live_shard() as live:
        peer = await live.connect("c1")
        await peer.say_bytes(make())
        code, text = await peer.end()

        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert text.startswith(f"a frame could not be read: {fault}")
        assert max(parsed) < 1_000
        assert live.sessions._malformed._peers["c1"][0] == 1
        await live.connect("c1")


async def test_after_three_of_them_the_peer_has_to_wait() -> None:
    """As after frames that are no message."""
    async with live_shard() as live:
        for _ in range(3):
            peer = await live.connect("c1")
            await peer.say_bytes(FRAMES["a later hello"][0]())
            assert (await peer.end())[0] is grpc.StatusCode.INVALID_ARGUMENT
        again = live.dial()
        await again.try_to_say(hello=shard_pb2.Hello(cluster_id="c1"))
        assert (await again.end())[0] in (grpc.StatusCode.RESOURCE_EXHAUSTED, CROSSED[0])


class Held:
    """A scan that does not begin before it may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_begin = threading.Event()
        self.frames: list[int] = []
        monkeypatch.setattr(session_server, "frame_elements_fault", self.scan)

    def scan(self, content: bytes) -> object:
        """Scan when it may."""
        self.frames.append(len(content))
        assert self.may_begin.wait(PATIENCE_SECONDS)
        return message_limits.frame_elements_fault(content)

    async def has_come(self, count: int) -> None:
        """Return when so many frames are there to be scanned."""

        async def is_there() -> bool:
            return len(self.frames) >= count

        await wait_until_async(is_there, poll_seconds=0.01)


async def test_others_are_served_while_a_frame_is_scanned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their frames are read and answered; of the large ones one is scanned at a time."""
    held = Held(monkeypatch)
    async with live_shard() as live:
        greedy, second, honest = [await live.connect(cluster) for cluster in ("c1", "c2", "c3")]
        await greedy.say_bytes(FRAMES["rows"][0]())
        await held.has_come(1)
        await second.say_bytes(FRAMES["rows"][0]())
        await honest.say(rollup=capacity_pb2.ClusterCapacityNeeds(cluster_id="c3", timestamp_unix_nanos=7))
        assert (await honest.hear_ack("rollup")).rollup_timestamp_unix_nanos == 7
        listed = [each async for each in live.read.ListSessions(shardread_pb2.ListSessionsRequest())]
        assert len(listed) == 3
        assert len(held.frames) == 1

        held.may_begin.set()
        for peer in (greedy, second):
            assert (await peer.end())[0] is grpc.StatusCode.INVALID_ARGUMENT
        assert len(held.frames) == 2


def large_rollup(timestamp_unix_nanos: int) -> bytes:
    """Return the frame of a sound roll-up that is large enough to be scanned."""
    row = capacity_pb2.CapacityNeed(
        requirements=[
            capacity_pb2.NodeSelectorRequirement(key="type", operator=IN, values=[f"type-{n:09}" for n in range(1_000)])
        ],
        aggregate_resources={"cpu": "1"},
    )
    rows = [row] * (UNSCANNED_BYTES // row.ByteSize() + 1)
    needs = capacity_pb2.ClusterCapacityNeeds(cluster_id="c1", timestamp_unix_nanos=timestamp_unix_nanos, needs=rows)
    return shard_pb2.OperatorMessage(rollup=needs).SerializeToString()


async def test_frames_keep_their_order_and_a_repeated_roll_up_is_not_scanned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes behind a frame that is scanned waits for it; what is in force already is known by its bytes."""
    held = Held(monkeypatch)
    async with live_shard() as live:
        peer = await live.connect("c1")
        await peer.say_bytes(large_rollup(1))
        await held.has_come(1)
        await peer.say(hello=shard_pb2.Hello(cluster_id="c1"))
        held.may_begin.set()
        acks = [(await peer.hear_until(lambda message: bool(message.ack.echo))).ack.echo for _ in range(2)]
        assert sorted(acks) == ["hello", "rollup"]

        await peer.say_bytes(large_rollup(2))
        assert (await peer.hear_ack("rollup")).rollup_timestamp_unix_nanos == 2
        assert len(held.frames) == 1


async def test_the_end_of_a_session_while_its_frame_is_scanned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer session has taken its place: the frame is not routed any more."""
    held = Held(monkeypatch)
    async with live_shard() as live:
        old = await live.connect("c1")
        await old.say_bytes(large_rollup(1))
        await held.has_come(1)
        new = await live.connect("c1")
        held.may_begin.set()
        assert (await old.end())[0] is grpc.StatusCode.ABORTED
        await new.say(rollup=capacity_pb2.ClusterCapacityNeeds(cluster_id="c1", timestamp_unix_nanos=9))
        assert (await new.hear_ack("rollup")).rollup_timestamp_unix_nanos == 9
        assert not live.shard.intake.table.rows_of("c1")


async def test_a_roll_up_with_a_row_too_many_is_rejected_and_the_session_stays() -> None:
    """It is below the limits that protect the parser: its operator is sent what is wrong."""
    async with live_shard() as live:
        peer = await live.connect("c1", "need-status")
        await peer.say_bytes(rollup(b"\x1a\0" * 20_001))
        assert (await peer.hear_ack("rollup_rejected")).error == "needs: has 20001 rows, at most 20000 are allowed"


async def test_long_texts_for_people_are_cut_as_before(parsed: list[int]) -> None:
    """An operator of another make may send an error of any length below the limit of its kind."""
    async with live_shard() as live:
        peer = await live.connect("c1")
        await peer.say(drain_result=shard_pb2.DrainResult(machine_id="m1", message="x" * (SMALL_FRAME_BYTES_MAX - 100)))
        await peer.say(rollup=capacity_pb2.ClusterCapacityNeeds(cluster_id="c1", timestamp_unix_nanos=3))
        await peer.hear_ack("rollup")
        assert max(parsed) > SMALL_FRAME_BYTES_MAX - 1_000
