"""Speaks just enough HTTP/2 and gRPC to hold thousands of calls in one process, and to break the rules on purpose.

A call costs one object and no task. A client of gRPC would take most of the cores that the shard is measured on. Header
compression is not used: the peer is asked not to (table size 0), and what it sends is literal or in the static table.
"""

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from typing import Final, cast

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
FRAME_HEAD_BYTES: Final = 9
FRAME_BYTES_MAX: Final = 16_384
#: The one call of a connection.
STREAM: Final = 1
_WINDOW_BYTES: Final = 65_535
_WINDOW_BYTES_MAX: Final = 2**31 - 1
_HEADER_TABLE_SIZE, _INITIAL_WINDOW_SIZE = 1, 4
#: Names of RFC 7541's static table that a server of gRPC refers to; of others the index is the name.
_STATIC_NAMES = {8: ":status", 31: "content-type"}
SESSION_PATH: Final = b"/bigfleet.v1alpha1.Shard/Session"


def frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    """Return an HTTP/2 frame."""
    return struct.pack(">I", len(content))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + content


def settings(**values: int) -> bytes:
    """Return a SETTINGS frame with the setting n of `sn`."""
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", int(name[1:]), value) for name, value in values.items()))


def _literal(name: bytes, value: bytes) -> bytes:
    return b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value


def call_headers(path: bytes, authority: bytes = b"shard", stream: int = STREAM) -> bytes:
    """Return the HEADERS frame that begins a call."""
    fields = (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path),
        (b":authority", authority),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    )
    return frame(HEADERS, END_HEADERS, stream, b"".join(_literal(name, value) for name, value in fields))


def message(content: bytes) -> bytes:
    """Return a gRPC message with its prefix."""
    return b"\0" + struct.pack(">I", len(content)) + content


def header_fields(block: bytes) -> dict[str, str]:
    """Read a header block without compression; a field that the static table holds has no value."""
    fields: dict[str, str] = {}
    place = 0
    while place < len(block):
        first = block[place]
        if first & 0x80:
            index, place = _integer(block, place, 7)
            fields[_STATIC_NAMES.get(index, str(index))] = ""
        elif first & 0xE0 == 0x20:
            _size, place = _integer(block, place, 5)
        else:
            index, place = _integer(block, place, 6 if first & 0x40 else 4)
            name = _STATIC_NAMES.get(index, str(index))
            if not index:
                name, place = _string(block, place)
            fields[name], place = _string(block, place)
    return fields


def _integer(block: bytes, place: int, bits: int) -> tuple[int, int]:
    most = (1 << bits) - 1
    value = block[place] & most
    place += 1
    if value < most:
        return value, place
    shift = 0
    while True:
        octet = block[place]
        place += 1
        value += (octet & 0x7F) << shift
        shift += 7
        if not octet & 0x80:
            return value, place


def _string(block: bytes, place: int) -> tuple[str, int]:
    size, start = _integer(block, place, 7)
    return block[start : start + size].decode("latin-1"), start + size


class Call(asyncio.Protocol):
    """One call on a connection of its own."""

    def __init__(
        self,
        first: bytes = b"",
        *,
        path: bytes = SESSION_PATH,
        preface: bytes = b"",
        reads: bool = True,
        on_message: Callable[["Call", bytes], None] | None = None,
        on_end: Callable[["Call"], None] = lambda _call: None,
    ) -> None:
        """Begin the call with `first` as its first bytes of the stream; nothing is read without `reads`.

        With `preface` these bytes are all that the connection begins with.
        `on_message` is called with each message; without it they are counted and not put together.
        """
        self._first = first
        self._path = path
        self._preface = preface
        self._reads = reads
        self._on_message = on_message
        self._on_end = on_end
        #: Set once the call has ended.
        self.ended = asyncio.Event()
        self._received = bytearray()
        self._message = bytearray()
        self._transport: asyncio.Transport | None = None
        self._window = self._connection_window = self._initial_window = _WINDOW_BYTES
        self._to_send: deque[memoryview] = deque()
        self._unacknowledged = 0
        #: Bytes of messages that came.
        self.received_bytes = 0
        #: Whether the server has answered the call, with headers at least.
        self.is_answered = False
        self.has_ended = self._is_closed = False
        #: Of the trailers; empty when the connection was cut without any.
        self.status = ""
        self.details = ""

    # ---- the connection ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the call."""
        # The loop of the processes here makes transports that are no subclass of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        transport = self._transport
        if self._preface:
            transport.write(self._preface)
            return
        begin = PREFACE + settings(s1=0, s4=_WINDOW_BYTES_MAX if self._reads else _WINDOW_BYTES)
        if self._reads:
            begin += frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", _WINDOW_BYTES_MAX - _WINDOW_BYTES))
        transport.write(begin + call_headers(self._path))
        if not self._reads:
            transport.pause_reading()
        if self._first:
            self.send(self._first)

    def connection_lost(self, _error: Exception | None) -> None:
        """Note the end."""
        self._end()

    def data_received(self, data: bytes) -> None:
        """Take frames apart."""
        if self._preface:
            # An answer would end the slow beginning.
            return
        self._received += data
        place = 0
        while len(self._received) - place >= FRAME_HEAD_BYTES:
            size = int.from_bytes(self._received[place : place + 3], "big")
            end = place + FRAME_HEAD_BYTES + size
            if len(self._received) < end:
                break
            kind, flags = self._received[place + 3], self._received[place + 4]
            stream = int.from_bytes(self._received[place + 5 : place + 9], "big")
            self._take(kind, flags, stream, bytes(self._received[place + FRAME_HEAD_BYTES : end]))
            place = end
        del self._received[:place]

    def close(self) -> None:
        """Cut the connection without a word."""
        self._is_closed = True
        if self._transport is not None:
            self._transport.abort()

    @property
    def is_open(self) -> bool:
        """Return whether the call goes on."""
        return self._transport is not None and not self.has_ended and not self._is_closed

    @property
    def waiting_bytes(self) -> int:
        """How much of what was sent has not been taken."""
        unsent = self._transport.get_write_buffer_size() if self._transport is not None else 0
        return sum(map(len, self._to_send)) + unsent

    # ---- the call ---------------------------------------------------------------------------------------------------

    def send(self, content: bytes) -> None:
        """Send bytes of the call's stream, as fast as the server's windows allow."""
        self._to_send.append(memoryview(content))
        self._flush()

    def send_unasked(self, content: bytes) -> None:
        """Write raw bytes to the connection."""
        if self._transport is not None and not self.has_ended:
            self._transport.write(content)

    def _flush(self) -> None:
        if self._transport is None or self.has_ended:
            return
        pieces = []
        while self._to_send:
            room = min(self._window, self._connection_window, FRAME_BYTES_MAX)
            if room <= 0:
                break
            content = self._to_send[0]
            piece, rest = content[:room], content[room:]
            pieces.append(frame(DATA, 0, STREAM, bytes(piece)))
            self._window -= len(piece)
            self._connection_window -= len(piece)
            if rest:
                self._to_send[0] = rest
            else:
                self._to_send.popleft()
        if pieces:
            self._transport.write(b"".join(pieces))

    def _take(self, kind: int, flags: int, stream: int, content: bytes) -> None:
        match kind:
            case 0:
                self._take_data(content)
            case 1:
                self.is_answered = True
                if flags & END_STREAM:
                    fields = header_fields(content)
                    self.status, self.details = fields.get("grpc-status", ""), fields.get("grpc-message", "")
                    self._end()
            case 3 | 7:
                if kind == RST_STREAM or not self.status:
                    self.details = self.details or f"{'reset' if kind == RST_STREAM else 'goaway'} {content[-40:]!r}"
                self._end()
            case 4:
                if not flags & ACK:
                    self._take_settings(content)
            case 6:
                if not flags & ACK:
                    self.send_unasked(frame(PING, ACK, 0, content))
            case 8:
                (more,) = struct.unpack(">I", content)
                if stream:
                    self._window += more
                else:
                    self._connection_window += more
                self._flush()

    def _take_settings(self, content: bytes) -> None:
        for place in range(0, len(content), 6):
            setting, value = struct.unpack_from(">HI", content, place)
            if setting == _INITIAL_WINDOW_SIZE:
                self._window += value - self._initial_window
                self._initial_window = value
        self.send_unasked(frame(SETTINGS, ACK, 0))
        self._flush()

    def _take_data(self, content: bytes) -> None:
        self.received_bytes += len(content)
        self._unacknowledged += len(content)
        if self._unacknowledged > FRAME_BYTES_MAX:
            more = struct.pack(">I", self._unacknowledged)
            self.send_unasked(frame(WINDOW_UPDATE, 0, 0, more) + frame(WINDOW_UPDATE, 0, STREAM, more))
            self._unacknowledged = 0
        if self._on_message is None:
            return
        self._message += content
        while len(self._message) >= 5:
            end = 5 + int.from_bytes(self._message[1:5], "big")
            if len(self._message) < end:
                return
            found = bytes(self._message[5:end])
            del self._message[:end]
            self._on_message(self, found)

    def _end(self) -> None:
        if not self.has_ended:
            self.has_ended = True
            self._to_send.clear()
            self.ended.set()
            self._on_end(self)
            if self._transport is not None:
                self._transport.abort()


async def open_call(host: str, port: int, call: Call) -> bool:
    """Connect a call; False when the connection was refused."""
    try:
        await asyncio.get_running_loop().create_connection(lambda: call, host, port)
    except OSError as error:
        call.has_ended, call.details = True, str(error)
        return False
    return True
