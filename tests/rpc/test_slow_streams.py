"""Peers that send a byte at a time hold no session and no connection (docs/spec/wire.md §2, §4)."""

import asyncio
import struct

import pytest

from bigfleet.rpc import connection_limits
from bigfleet.rpc.servers import session as session_server
from tests.patience import PATIENCE_SECONDS
from tests.rpc.live_shard import live_shard
from tests.rpc.raw_http2 import (
    END_STREAM,
    HEADERS_TYPE,
    PREFACE,
    RST_TYPE,
    frames_of,
    http2_frame,
    session_call,
)

#: What the slow peer says that its first frame has.
HELLO_BYTES = 60_000


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
