"""A real shard behind real gRPC on loopback, and a peer that may say anything to it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
from grpc import aio

from bigfleet.rpc.grpc_server import GrpcServer
from bigfleet.rpc.servers import session as session_server
from bigfleet.rpc.servers import shardadmin as shardadmin_server
from bigfleet.rpc.servers import shardread as shardread_server
from bigfleet.rpc.wire.gen import shard_pb2, shardadmin_pb2_grpc, shardread_pb2_grpc
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.patience import PATIENCE_SECONDS
from tests.shard.world import World

#: Far beyond anything on loopback; it only turns a hang into a failure.


class LiveShard:
    """A world whose shard listens, and channels to it."""

    def __init__(
        self,
        world: World,
        server: GrpcServer,
        channel: aio.Channel,
        port: int,
        sessions: session_server.SessionServicer,
    ) -> None:
        self.world = world
        self.sessions = sessions
        self.port = port
        self.shard = world.shard
        self.server = server
        self.channel = channel
        self.read: Any = shardread_pb2_grpc.ShardReadStub(channel)
        self.admin: Any = shardadmin_pb2_grpc.ShardAdminStub(channel)

    def dial(self) -> "Peer":
        """Open a Session stream that has said nothing yet."""
        return dial(self.channel)

    async def connect(self, cluster: str, *capabilities: str) -> "Peer":
        """Open a session and wait until its resync is over, if the shard knows its machines."""
        peer = self.dial()
        await peer.say(hello=shard_pb2.Hello(cluster_id=cluster, capabilities=capabilities))
        await peer.hear_ack("hello")
        if self.shard.sessions.are_shown_machines:
            await peer.hear_ack("resync")
        return peer


@asynccontextmanager
async def live_shard(world: World | None = None) -> AsyncIterator[LiveShard]:
    """Serve the world's shard while the context lasts."""
    world = world or World()
    sessions = session_server.SessionServicer(world.shard)

    def register(server: aio.Server) -> None:
        session_server.add_to_server(sessions, server)
        shardread_server.add_to_server(shardread_server.ShardReadServicer(world.shard, LoopClock()), server)
        shardadmin_server.add_to_server(shardadmin_server.ShardAdminServicer(world.shard), server)

    services = (session_server.SERVICE_NAME, shardread_server.SERVICE_NAME, shardadmin_server.SERVICE_NAME)
    server = GrpcServer(services=services, register=register, receive_bytes_max=session_server.FRAME_BYTES_MAX)
    port = await server.start("127.0.0.1", 0)
    try:
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield LiveShard(world, server, channel, port, sessions)
    finally:
        world.shard.stop_sessions()
        await server.stop(0)


#: What a client is told by its own gRPC in place of the refusal when a frame of its own crosses it.
CROSSED = (grpc.StatusCode.INTERNAL, "Internal error from Core")


class Peer:
    """One end of a Session stream: what it says need not make sense."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.heard: list[shard_pb2.ShardMessage] = []

    async def say(self, **payload: Any) -> None:
        """Send one frame, such as `hello=Hello(…)`."""
        await self.say_bytes(shard_pb2.OperatorMessage(**payload).SerializeToString())

    async def say_bytes(self, content: bytes) -> None:
        """Send bytes that need not be a frame."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            await self._call.write(content)

    async def try_to_say(self, **payload: Any) -> None:
        """Send one frame unless the stream has ended, which may be at any moment."""
        with suppress(aio.AioRpcError, asyncio.InvalidStateError):
            await self.say(**payload)

    async def try_to_say_bytes(self, content: bytes) -> None:
        """Send bytes unless the stream has ended, which may be at any moment."""
        with suppress(aio.AioRpcError, asyncio.InvalidStateError):
            await self.say_bytes(content)

    async def stop_talking(self) -> None:
        """Close this direction of the stream."""
        await self._call.done_writing()

    def vanish(self) -> None:
        """Cancel the call."""
        self._call.cancel()

    async def hear(self) -> shard_pb2.ShardMessage | None:
        """Return the next frame, None at the stream's end."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                content = await self._call.read()
        except aio.AioRpcError:
            return None
        if not isinstance(content, bytes):
            return None
        message = shard_pb2.ShardMessage.FromString(content)
        self.heard.append(message)
        return message

    async def hear_until(self, wanted: Callable[[shard_pb2.ShardMessage], bool]) -> shard_pb2.ShardMessage:
        """Return the first frame that is wanted, whatever comes before it."""
        while (message := await self.hear()) is not None:
            if wanted(message):
                return message
        raise AssertionError(f"the stream ended: {await self.end()}")

    async def hear_ack(self, echo: str) -> shard_pb2.Acknowledgement:
        """Return the next ack of a kind."""
        return (await self.hear_until(lambda message: message.ack.echo == echo)).ack

    async def hear_kind(self, kind: str) -> Any:
        """Return the next payload of a kind, such as `bootstrap_request`."""
        return getattr(await self.hear_until(lambda message: message.WhichOneof("payload") == kind), kind)

    async def end(self) -> tuple[grpc.StatusCode, str]:
        """Read to the stream's end and return its status."""
        while await self.hear() is not None:
            pass
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self._call.code(), await self._call.details()


def dial(channel: aio.Channel) -> Peer:
    """Open a Session stream that has said nothing yet."""
    session: Any = channel.stream_stream(
        "/bigfleet.v1alpha1.Shard/Session", request_serializer=bytes, response_deserializer=bytes
    )
    return Peer(session())
