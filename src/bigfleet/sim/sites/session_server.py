"""Serves the sessions of a simulated shard: the real servicer over the simulated network, in the bytes of the wire."""

import asyncio
from typing import Any

from bigfleet.rpc.servers.session import SessionServicer
from bigfleet.shard.cycle.controller import Shard
from bigfleet.sim.kernel.network import Connection, ConnectionLost


async def serve_session(shard: Shard, connection: Connection[bytes, bytes]) -> None:
    """Serve one session's stream until either side ends it; run in the shard's process."""
    context = _Context(connection)
    servicer: Any = SessionServicer(shard)
    handler = asyncio.create_task(servicer.Session(None, context))
    broken = asyncio.create_task(connection.broken())
    await asyncio.wait((handler, broken), return_when=asyncio.FIRST_COMPLETED)
    handler.cancel()
    broken.cancel()
    await asyncio.gather(handler, broken, return_exceptions=True)
    connection.break_off("the shard ended the stream", context.status)


class _Aborted(Exception):
    """The servicer ended the call with a status."""


class _Context:
    """The part of gRPC's servicer context that a session uses, in plain text."""

    def __init__(self, connection: Connection[bytes, bytes]) -> None:
        self._connection = connection
        self.status = ("UNAVAILABLE", "the connection broke")

    def auth_context(self) -> dict[str, list[bytes]]:
        """Return what a connection without TLS shows."""
        return {"transport_security_type": [b"insecure"]}

    async def send_initial_metadata(self, _metadata: object) -> None:
        """Do nothing: there are no headers."""

    async def read(self) -> bytes | None:
        """Return the next frame, None when the connection is lost."""
        try:
            return await self._connection.to_server.receive()
        except ConnectionLost:
            return None

    async def write(self, message: Any) -> None:
        """Send a frame; on a broken connection wait for the end, as gRPC cancels its handler."""
        try:
            await self._connection.to_client.send(message.SerializeToString())
        except ConnectionLost:
            await asyncio.Event().wait()

    async def abort(self, code: Any, details: str = "") -> None:
        """End the call with a status."""
        self.status = (code.name, details)
        raise _Aborted(details)
