"""Encodes a recording as a header line and frames, each with a checksum.

docs/adr/0134-a-recording-is-what-the-engine-saw.md. A head begins a segment. The cycles of a segment are one stream of
zlib, flushed after each, so that every cycle is compressed with the context of those before. A frame that the end of
the file cuts off is what a killed process leaves; a frame with a wrong checksum is damage. An incomplete frame is never
interpreted.
"""

import struct
import zlib
from collections.abc import Iterator
from enum import IntEnum
from typing import BinaryIO, Final, NamedTuple

import xxhash

#: Of the way in which frames lie in the file.
MAGIC: Final = b"bigfleet recording 1\n"
_KIND_OF_FILE: Final = b"bigfleet recording "
#: Kind, bytes of content, sum of content.
_FIELDS: Final = struct.Struct("<BIQ")
#: Sum of the fields.
_SUM: Final = struct.Struct("<I")
HEADER_BYTES: Final = _FIELDS.size + _SUM.size
#: Most that one frame may have in the file or unpack to; half a million machines take 26 MB (ADR 0134).
CONTENT_BYTES_MAX: Final = 512 * 1024**2
#: Read at once of what is no frame.
_CHUNK_BYTES: Final = 1024**2
#: Measured in docs/adr/0134: higher levels take several times as long for a few per cent.
_LEVEL: Final = 1


class FrameKind(IntEnum):
    """What a frame holds."""

    HEAD = 1
    CYCLE = 2


class Frame(NamedTuple):
    """One whole frame, its content as it lies in the file."""

    kind: FrameKind
    content: bytes
    #: Where it begins, and where the next one does.
    start: int
    stop: int


class Torn(NamedTuple):
    """An end of the file that is no whole frame."""

    start: int
    size_bytes: int


class WrongFile(Exception):
    """The file is no recording that this version reads; the message says what it is."""


class Damage(Exception):
    """A frame that is not what was written."""

    def __init__(self, start: int, fault: str) -> None:
        super().__init__(f"damaged at byte {start:,}: {fault}")
        self.start = start


class FramePacker:
    """Makes the frames of one segment."""

    def __init__(self) -> None:
        self._stream = zlib.compressobj(_LEVEL)

    def head(self, content: bytes) -> bytes:
        """Return the frame that begins the segment."""
        return _framed(FrameKind.HEAD, content)

    def cycle(self, content: bytes) -> bytes:
        """Return the frame of the next cycle. Cost: a second for 40 MiB, without holding up other threads."""
        packed = self._stream.compress(content) + self._stream.flush(zlib.Z_SYNC_FLUSH)
        return _framed(FrameKind.CYCLE, packed)


class Unpacker:
    """Reads the cycles of one segment."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj()

    def cycle(self, frame: Frame) -> bytes:
        """Return the content of the next cycle. Raises Damage."""
        try:
            content = self._stream.decompress(frame.content, CONTENT_BYTES_MAX)
        except zlib.error as error:
            raise Damage(frame.start, f"it cannot be unpacked ({error})") from error
        except MemoryError as error:
            raise Damage(frame.start, "it unpacks to more than this process may allocate") from error
        if self._stream.unconsumed_tail:
            raise Damage(frame.start, f"it unpacks to more than {CONTENT_BYTES_MAX:,} bytes")
        return content


def _framed(kind: FrameKind, content: bytes) -> bytes:
    fields = _FIELDS.pack(kind, len(content), xxhash.xxh3_64_intdigest(content))
    return fields + _SUM.pack(xxhash.xxh32_intdigest(fields)) + content


def frames(file: BinaryIO) -> Iterator[Frame | Torn]:
    """Yield every whole frame, and at the end what is left of one that is not whole, if anything is.

    Raises WrongFile for what is no recording, Damage for a frame that is not what was written, OSError.
    """
    check_magic(file.read(len(MAGIC)))
    start = len(MAGIC)
    while header := file.read(HEADER_BYTES):
        if len(header) < HEADER_BYTES:
            yield Torn(start, len(header))
            return
        fields = header[: _FIELDS.size]
        if _SUM.unpack_from(header, _FIELDS.size)[0] != xxhash.xxh32_intdigest(fields):
            # A machine that lost power may leave zeros where the disk had room and no content yet.
            size_bytes, rest = 0, header
            while rest:
                if any(rest):
                    raise Damage(start, "no frame begins here")
                size_bytes += len(rest)
                rest = file.read(_CHUNK_BYTES)
            yield Torn(start, size_bytes)
            return
        kind, size_bytes, content_sum = _FIELDS.unpack(fields)
        if size_bytes > CONTENT_BYTES_MAX:
            raise Damage(start, f"a frame of {size_bytes:,} bytes, more than {CONTENT_BYTES_MAX:,}")
        content = file.read(size_bytes)
        if len(content) < size_bytes:
            yield Torn(start, HEADER_BYTES + len(content))
            return
        if xxhash.xxh3_64_intdigest(content) != content_sum:
            raise Damage(start, "its content is not what was written")
        if kind not in FrameKind.__members__.values():
            raise Damage(start, f"a frame of the unknown kind {kind}")
        stop = start + HEADER_BYTES + size_bytes
        yield Frame(FrameKind(kind), content, start, stop)
        start = stop


def check_magic(beginning: bytes) -> None:
    """Raise WrongFile unless the file begins as this version writes one."""
    if beginning == MAGIC:
        return
    if not beginning:
        raise WrongFile("the file is empty: the shard that was to write it recorded nothing yet")
    if beginning.startswith(_KIND_OF_FILE):
        written = beginning[len(_KIND_OF_FILE) :].split(b"\n")[0].decode("ascii", "replace")
        read = MAGIC[len(_KIND_OF_FILE) :].decode().strip()
        raise WrongFile(
            f"a recording of format {written}, this version reads {read}: "
            "replay it with the version of bigfleet that wrote it"
        )
    raise WrongFile("no recording of a shard: name a file that `bigfleet shard --record FILE` wrote")
