"""Writes and reads frames of HTTP/2 without a library, for peers that do what none would do."""

import asyncio
import struct
from collections.abc import AsyncIterator

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS_TYPE, RST_TYPE, SETTINGS_TYPE = 1, 3, 4
END_STREAM, END_HEADERS = 1, 4


def http2_frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    return struct.pack(">I", len(content))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + content


def literal(name: bytes, value: bytes) -> bytes:
    """Return a header without compression."""
    return b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value


def greeting() -> bytes:
    """Return what a client begins a connection with: preface and settings."""
    return PREFACE + http2_frame(SETTINGS_TYPE, 0, 0, b"")


def call_headers(stream: int, path: bytes = b"/bigfleet.v1alpha1.Shard/Session") -> bytes:
    """Return the headers that begin a call on a stream."""
    headers = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": path,
        b":authority": b"shard",
        b"te": b"trailers",
        b"content-type": b"application/grpc",
    }
    block = b"".join(literal(name, value) for name, value in headers.items())
    return http2_frame(HEADERS_TYPE, END_HEADERS, stream, block)


def session_call() -> bytes:
    """Return the begin of a Session call: preface, settings and headers."""
    return greeting() + call_headers(1)


async def frames_of(reader: asyncio.StreamReader) -> AsyncIterator[tuple[int, int, int]]:
    """Yield type, flags and stream of each frame until the connection is closed."""
    while True:
        try:
            head = await reader.readexactly(9)
            await reader.readexactly(int.from_bytes(head[:3], "big"))
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        yield head[3], head[4], int.from_bytes(head[5:9], "big")
