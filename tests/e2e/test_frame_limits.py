"""A shard process reads frames up to the sizes that its flags set, and refuses larger ones (docs/spec/wire.md §2)."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc import aio

from bigfleet.rpc.servers.session import FRAME_BYTES_MAX, HELLO_BYTES_MAX
from bigfleet.rpc.wire.gen import capacity_pb2, shard_pb2
from tests.commands import run_here
from tests.e2e.fault_world import LiveShard, live_provider, live_shard, until
from tests.rpc.live_shard import Peer, dial

HELLO_BYTES, FRAME_BYTES = 1_024, 65_536
#: A field that no message has: it pads a frame and changes nothing of it.
PADDING_FIELD, LENGTH_DELIMITED = 1_000, 2

LOWERED = ("--hello-max-bytes", f"{HELLO_BYTES}", "--frame-max-bytes", f"{FRAME_BYTES // 1_024}KiB")


@pytest.fixture(scope="module", params=[LOWERED, ()], ids=["lowered", "defaults"])
def shard(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LiveShard, int, int]]:
    """A shard with and without the flags, and the sizes that it must read."""
    place = tmp_path_factory.mktemp("frames")
    sizes = (HELLO_BYTES, FRAME_BYTES) if request.param else (HELLO_BYTES_MAX, FRAME_BYTES_MAX)
    with live_provider(place) as provider, live_shard(place / "shard", provider.address, *request.param) as process:
        yield process, *sizes


def padded(message: shard_pb2.OperatorMessage, size_bytes: int) -> bytes:
    """Return the frame with an unknown field behind it, so many bytes in all."""
    content = message.SerializeToString()
    for length in range(size_bytes - len(content), -1, -1):
        head = varint(PADDING_FIELD << 3 | LENGTH_DELIMITED) + varint(length)
        if len(content) + len(head) + length == size_bytes:
            return content + head + bytes(length)
    raise AssertionError(f"no padding gives {size_bytes} bytes")


def varint(number: int) -> bytes:
    """Return a number as protobuf writes it."""
    digits = [number >> shift & 0x7F for shift in range(0, max(1, number.bit_length()), 7)]
    return bytes([*(digit | 0x80 for digit in digits[:-1]), digits[-1]])


def hello(cluster: str) -> shard_pb2.OperatorMessage:
    return shard_pb2.OperatorMessage(hello=shard_pb2.Hello(cluster_id=cluster))


def rollup(cluster: str) -> shard_pb2.OperatorMessage:
    needs = capacity_pb2.ClusterCapacityNeeds(cluster_id=cluster, timestamp_unix_nanos=1)
    return shard_pb2.OperatorMessage(rollup=needs)


async def greeted(channel: aio.Channel, first: bytes) -> Peer:
    """Open a session with a first frame; return it once the shard has accepted it."""
    peer = dial(channel)
    await peer.say_bytes(first)
    await peer.hear_ack("hello")
    return peer


async def test_a_first_frame_is_read_up_to_its_limit(shard: tuple[LiveShard, int, int]) -> None:
    """The largest is a session; one byte more is refused with both sizes, and nothing of it is a session."""
    process, hello_bytes, _ = shard
    async with aio.insecure_channel(process.address) as channel:
        await greeted(channel, padded(hello("largest"), hello_bytes))
        refused = dial(channel)
        await refused.say_bytes(padded(hello("larger"), hello_bytes + 1))
        text = f"the first frame has {hello_bytes + 1} bytes, at most {hello_bytes} are read"
        assert await refused.end() == (grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        until(lambda: process.metric("active_sessions"), lambda count: count == 1, "the sessions are")


async def test_a_later_frame_is_read_up_to_its_limit(shard: tuple[LiveShard, int, int]) -> None:
    """The largest roll-up is acknowledged; one byte more ends the session with both sizes, and no other one."""
    process, _, frame_bytes = shard
    async with aio.insecure_channel(process.address) as channel, aio.insecure_channel(process.address) as other:
        honest = await greeted(other, hello("honest").SerializeToString())
        peer = await greeted(channel, hello("c1").SerializeToString())
        await peer.say_bytes(padded(rollup("c1"), frame_bytes))
        assert not (await peer.hear_ack("rollup")).error
        await peer.try_to_say_bytes(padded(rollup("c1"), frame_bytes + 1))
        code, text = await peer.end()
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED, text
        assert str(frame_bytes) in text
        await honest.say_bytes(rollup("honest").SerializeToString())
        assert not (await honest.hear_ack("rollup")).error


@pytest.mark.parametrize(
    ("flag", "value", "fault"),
    [
        ("--hello-max-bytes", "65537", f"'65537' is above the limit of {HELLO_BYTES_MAX} bytes; use that or less"),
        ("--frame-max-bytes", "33MiB", f"'33MiB' is above the limit of {FRAME_BYTES_MAX} bytes; use that or less"),
        ("--hello-max-bytes", "0", "'0' is not a size"),
        ("--frame-max-bytes", "-1KiB", "'-1KiB' is not a size"),
        ("--frame-max-bytes", "many", "'many' is not a size"),
    ],
)
def test_a_limit_is_only_lowered(flag: str, value: str, fault: str, tmp_path: Path) -> None:
    """A shard with another value does not start: exit 2 and one line with the flag and the value."""
    words = ("--provider-addr", "127.0.0.1:1", "--data-dir", str(tmp_path), "--metrics-addr", "off")
    done = run_here("shard", *words, "--listen", "127.0.0.1:0", flag, value)
    assert done.returncode == 2
    assert done.stderr.startswith(f"bigfleet: {flag}: {fault}"), done.stderr
    assert done.stderr.count("\n") == 1
