"""Encodes the opaque cursor of List: 28 bytes that say what a reader has seen (docs/spec/provider.md §10).

A text that does not match its checksum is no cursor. A cursor must never make a List fail.
"""

import struct
import zlib
from enum import Enum
from typing import NamedTuple

_BODY = struct.Struct(">8sQQ")
_CHECKSUM = struct.Struct(">I")
CURSOR_BYTES = _BODY.size + _CHECKSUM.size
INCARNATION_BYTES = 8


class CursorRejection(Enum):
    """Why a cursor is not taken; the values are metric labels."""

    MALFORMED = "malformed"
    INCARNATION = "incarnation"
    EXPIRED = "expired"
    FUTURE = "future"


class Cursor(NamedTuple):
    """What a reader knows."""

    incarnation: bytes
    #: The revision of the last change that it was sent.
    position: int
    #: The head up to which it was sent the removals.
    removals: int

    def encode(self) -> bytes:
        """Return the bytes that a client keeps."""
        body = _BODY.pack(self.incarnation, self.position, self.removals)
        return body + _CHECKSUM.pack(zlib.crc32(body))


def decode_cursor(text: bytes, *, incarnation: bytes, head: int, floor: int) -> Cursor | CursorRejection:
    """Return the cursor when it is one of this store and its removals are still known, else why not."""
    if len(text) != CURSOR_BYTES or _CHECKSUM.unpack(text[_BODY.size :])[0] != zlib.crc32(text[: _BODY.size]):
        return CursorRejection.MALFORMED
    cursor = Cursor(*_BODY.unpack(text[: _BODY.size]))
    if cursor.incarnation != incarnation:
        return CursorRejection.INCARNATION
    if cursor.position > head or cursor.removals > head:
        return CursorRejection.FUTURE
    if cursor.removals < floor:
        return CursorRejection.EXPIRED
    return cursor
