"""Peers that send a byte at a time hold no session and no connection (docs/spec/wire.md §2, §4)."""

import asyncio
import struct
from collections.abc import AsyncIterator

import pytest

from bigfleet.rpc import connection_limits
from bigfleet.rpc.servers import session as session_server
from tests.patience import PATIENCE_SECONDS
from tests.rpc.live_shard import live_shard

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS_TYPE, RST_TYPE, SETTINGS_TYPE = 1, 3, 4
END_STREAM, END_HEADERS = 1, 4
#: What the slow peer says that its first frame has.
HELLO_BYTES = 60_000


def http2_frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    return struct.pack(">I", len(content))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + content


def literal(name: bytes, value: bytes) -> bytes:
    """Return a header without compression."""
    return b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value


def session_call() -> bytes:
    """Return the begin of a Session call: preface, settings and headers."""
    headers = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": b"/bigfleet.v1alpha1.Shard/Session",
        b":authority": b"shard",
        b"te": b"trailers",
        b"content-type": b"application/grpc",
    }
    block = b"".join(literal(name, value) for name, value in headers.items())
    return PREFACE + http2_frame(SETTINGS_TYPE, 0, 0, b"") + http2_frame(HEADERS_TYPE, END_HEADERS, 1, block)


async def frames_of(reader: asyncio.StreamReader) -> AsyncIterator[tuple[int, int, int]]:
    """Yield type, flags and stream of each frame until the connection is closed."""
    while True:
        try:
            head = await reader.readexactly(9)
            await reader.readexactly(int.from_bytes(head[:3], "big"))
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        yield head[3], head[4], int.from_bytes(head[5:9], "big")


async def drip(writer: asyncio.StreamWriter, piece: bytes) -> None:
    """Send a piece again and again with pauses, until the task is cancelled."""
    while True:
        writer.write(piece)
        await asyncio.sleep(0.05)


async def test_a_first_frame_that_comes_byte_by_byte_ends_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream ends when the time for the first frame is over, and another operator is served meanwhile."""
    monkeypatch.setattr(session_server, "HELLO_TIMEOUT_SECONDS", 1.0)
    async with live_shard() as live, asyncio.timeout(PATIENCE_SECONDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
        writer.write(session_call() + http2_frame(0, 0, 1, b"\0" + struct.pack(">I", HELLO_BYTES)))
        dripping = asyncio.create_task(drip(writer, http2_frame(0, 0, 1, b"x")))
        await live.connect("c1")
        has_ended = False
        async for kind, flags, stream in frames_of(reader):
            has_ended = stream == 1 and (kind == RST_TYPE or (kind == HEADERS_TYPE and bool(flags & END_STREAM)))
            if has_ended:
                break
        dripping.cancel()
        writer.close()

        assert has_ended
        assert len(live.shard.sessions) == 1


async def test_a_connection_whose_handshake_does_not_end_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer sends the begin of what every connection starts with, and then nothing."""
    monkeypatch.setattr(connection_limits, "HANDSHAKE_SECONDS", 1.0)
    async with live_shard() as live, asyncio.timeout(PATIENCE_SECONDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
        writer.write(PREFACE[:5])
        # Ends when the connection is closed.
        assert all([stream == 0 async for _kind, _flags, stream in frames_of(reader)])
        writer.close()
        await live.connect("c1")
