"""Peers that open 10,000 streams on a shard process: its memory is bounded, honest clusters have their sessions."""

import asyncio
import resource
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from grpc import aio

from bigfleet.rpc.connection_limits import STREAMS_PER_CONNECTION_MAX
from bigfleet.rpc.servers.first_frames import FIRST_FRAMES_MAX
from bigfleet.rpc.wire.gen import capacity_pb2, shard_pb2
from tests.e2e.fault_world import LiveShard, live_provider, live_shard
from tests.patience import wait_until_async
from tests.rpc.live_shard import Peer, dial
from tests.rpc.raw_http2 import END_STREAM, HEADERS_TYPE, RST_TYPE, call_headers, frames_of, greeting, http2_frame

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

STREAMS = 10_000
#: Three times what the largest of the attacks below was seen to take.
GROWTH_BYTES_MAX = 200 * 1024 * 1024
CANCEL = struct.pack(">I", 8)


@dataclass(slots=True)
class Flood:
    """A connection of a peer that begins calls and sends no frame in them."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    #: Streams that the shard has ended with a status, and those that it has reset.
    ended: set[int] = field(default_factory=set)
    reset: set[int] = field(default_factory=set)
    is_closed: bool = False

    async def listen(self) -> None:
        """Note what the shard ends, until it closes the connection."""
        async for kind, flags, stream in frames_of(self.reader):
            if kind == HEADERS_TYPE and flags & END_STREAM:
                self.ended.add(stream)
            elif kind == RST_TYPE:
                self.reset.add(stream)
        self.is_closed = True

    async def begin(self, count: int, *, cancels: bool) -> None:
        """Begin calls without regard to the limit of streams; with `cancels` reset each one at once."""
        self.writer.write(greeting())
        for number in range(count):
            stream = 2 * number + 1
            self.writer.write(call_headers(stream))
            if cancels:
                self.writer.write(http2_frame(RST_TYPE, 0, stream, CANCEL))
            if number % 100 == 0:
                await self.writer.drain()
        await self.writer.drain()


@asynccontextmanager
async def flood(shard: LiveShard) -> AsyncIterator[Flood]:
    """Open a connection for a flood while the context lasts."""
    host, _, port = shard.address.rpartition(":")
    made = Flood(*await asyncio.open_connection(host, int(port)))
    listening = asyncio.create_task(made.listen())
    try:
        yield made
    finally:
        listening.cancel()
        made.writer.close()


@asynccontextmanager
async def floods_on(shard: LiveShard, connections: int) -> AsyncIterator[list[Flood]]:
    """Open so many connections."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(flood(shard)) for _ in range(connections)]


def resident_bytes(shard: LiveShard) -> int:
    assert shard.process is not None
    pages = int(Path(f"/proc/{shard.process.pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


async def greeted(channel: aio.Channel, cluster: str) -> Peer:
    """Open a session; return it once the shard has accepted it."""
    peer = dial(channel)
    await peer.say(hello=shard_pb2.Hello(cluster_id=cluster))
    await peer.hear_ack("hello")
    return peer


async def admitted(channel: aio.Channel, cluster: str) -> Peer:
    """Open a session as an operator does: gRPC refuses a call while very many wait to be read, and it comes again."""
    found: list[Peer] = []

    async def is_admitted() -> bool:
        peer = dial(channel)
        await peer.try_to_say(hello=shard_pb2.Hello(cluster_id=cluster))
        message = await peer.hear()
        if message is not None and message.ack.echo == "hello":
            found.append(peer)
        return bool(found)

    await wait_until_async(is_admitted, poll_seconds=0.1)
    return found[0]


async def is_heard(peer: Peer, cluster: str, stamp: int) -> bool:
    """Report an empty roll-up; return whether the shard acknowledges it."""
    await peer.say(rollup=capacity_pb2.ClusterCapacityNeeds(cluster_id=cluster, timestamp_unix_nanos=stamp))
    ack = await peer.hear_ack("rollup")
    return ack.rollup_timestamp_unix_nanos == stamp and not ack.error


def shed(shard: LiveShard) -> float:
    """Return how many sessions were ended for others that wait for their first frame."""
    name = 'bigfleet_shard_shed_total{limit="first_frames"} '
    return sum(float(line.removeprefix(name)) for line in shard.series() if line.startswith(name))


@pytest.mark.parametrize(
    ("connections", "cancels"),
    [(STREAMS // STREAMS_PER_CONNECTION_MAX, False), (1, False), (1, True)],
    ids=["on ten connections", "on one connection", "each reset at once"],
)
async def test_ten_thousand_streams_cost_no_honest_cluster_its_session(
    connections: int, cancels: bool, tmp_path: Path
) -> None:
    """Sessions go on, a newcomer gets in, every silent stream ends, and what was ended for others is counted."""
    with live_provider(tmp_path) as provider, live_shard(tmp_path / "shard", provider.address) as shard:
        options = (("grpc.use_local_subchannel_pool", 1),)
        async with (
            aio.insecure_channel(shard.address, options) as channel,
            aio.insecure_channel(shard.address, options) as newcomers,
        ):
            honest = await greeted(channel, "honest")
            before_bytes = resident_bytes(shard)
            async with floods_on(shard, connections) as floods:
                await asyncio.gather(*(each.begin(STREAMS // connections, cancels=cancels) for each in floods))
                assert await is_heard(honest, "honest", 1)
                newcomer = await admitted(newcomers, "newcomer")
                assert resident_bytes(shard) - before_bytes < GROWTH_BYTES_MAX

                async def is_over() -> bool:
                    count = sum(len(each.ended | each.reset) for each in floods)
                    return count == STREAMS or (cancels and await is_heard(honest, "honest", 2))

                await wait_until_async(is_over, poll_seconds=0.1)
                if connections > 1:
                    assert sum(len(each.ended) for each in floods) == STREAMS
                    assert shed(shard) > 0
                elif not cancels:
                    assert len(floods[0].ended) == STREAMS_PER_CONNECTION_MAX == FIRST_FRAMES_MAX
            assert await is_heard(honest, "honest", 3)
            assert await is_heard(newcomer, "newcomer", 1)
            assert resident_bytes(shard) - before_bytes < GROWTH_BYTES_MAX
