"""Opens the streams between an operator and its shard over the simulated network, in the bytes of the real wire."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

from bigfleet.model.frames import OperatorFrame, ShardFrame
from bigfleet.operator.ports import EndKind, SessionEnded, SessionStream
from bigfleet.rpc.wire.convert_session import operator_frame_to_wire, shard_frame_from_wire
from bigfleet.rpc.wire.gen import shard_pb2
from bigfleet.sim.kernel.network import Connection, ConnectionLost, Network
from bigfleet.sim.kernel.processes import Process

#: Called with a frame of either direction.
FrameListener = Callable[[OperatorFrame | ShardFrame], None]
_END_KINDS = {"ABORTED": EndKind.REPLACED, "PERMISSION_DENIED": EndKind.DENIED}


def _hear_nothing(_frame: OperatorFrame | ShardFrame) -> None:
    """Do nothing."""


class SessionHost(Protocol):
    """A shard's place, as its operators reach it."""

    @property
    def process(self) -> Process:
        """The process of the moment; a dead one takes no stream."""

    async def serve(self, connection: Connection[bytes, bytes]) -> None:
        """Serve one session's stream until either side ends it; run in that process."""


class SimulatedDialer:
    """Opens a cluster's streams to the shard of the moment; implements `bigfleet.operator.ports.SessionDialer`."""

    def __init__(
        self, network: Network, shard: SessionHost, process: Process, *, on_frame: FrameListener = _hear_nothing
    ) -> None:
        """`on_frame` is called with each frame that leaves, and with each that arrives before the operator sees it."""
        self._network = network
        self._shard = shard
        self._process = process
        self._on_frame = on_frame

    @asynccontextmanager
    async def dial(self) -> AsyncIterator[SessionStream]:
        """Open a stream; entering it raises nothing, its first frame shows whether a server is there."""
        server = self._shard.process
        connection = self._network.connect(self._process, server)
        if server.is_alive:
            server.spawn(self._shard.serve(connection), name=f"session-{self._process.name}")
        try:
            yield _Stream(connection, self._on_frame)
        finally:
            connection.break_off("the operator closed the stream", ("CANCELLED", "closed"))


class _Stream:
    """The operator's end of a stream, in the bytes of the real wire."""

    def __init__(self, connection: Connection[bytes, bytes], on_frame: FrameListener) -> None:
        self._connection = connection
        self._on_frame = on_frame

    async def send(self, frame: OperatorFrame) -> None:
        """Write one frame. Raises SessionEnded."""
        self._on_frame(frame)
        try:
            await self._connection.to_server.send(operator_frame_to_wire(frame).SerializeToString(deterministic=True))
        except ConnectionLost as lost:
            raise self._ended() from lost

    async def receive(self) -> ShardFrame | None:
        """Read one frame. Raises SessionEnded."""
        try:
            content: Any = await self._connection.to_client.receive()
        except ConnectionLost as lost:
            raise self._ended() from lost
        frame = shard_frame_from_wire(shard_pb2.ShardMessage.FromString(content))
        if frame is not None:
            self._on_frame(frame)
        return frame

    def _ended(self) -> SessionEnded:
        code, details = self._connection.status
        return SessionEnded(_END_KINDS.get(code, EndKind.LOST), f"{code}: {details}")
