"""Cuts a large message into smaller ones of its kind, so that nobody has to hold or read it as a whole.

A serialized message is the row of its fields, so any run of whole fields is a message too, and a repeated field is the
concatenation of those of the parts (the encoding guide of Protocol Buffers). Nothing here may look into a field.
"""

from collections.abc import Iterator

from google.protobuf.message import DecodeError

_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5
_VARINT_BYTES_MAX = 10


def parts_of(content: bytes, fields_max: int) -> Iterator[bytes]:
    """Yield the message in parts of at most so many fields, in order; nothing for an empty message.

    Raises DecodeError where the bytes are no message.
    """
    start = position = fields = 0
    while position < len(content):
        position = _end_of_field(content, position)
        fields += 1
        if fields == fields_max:
            yield content[start:position]
            start, fields = position, 0
    if fields:
        yield content[start:position]


def _end_of_field(content: bytes, position: int) -> int:
    tag, position = _varint(content, position)
    wire_type = tag & 7
    if wire_type == _LENGTH_DELIMITED:
        size, position = _varint(content, position)
        position += size
    elif wire_type == _VARINT:
        _value, position = _varint(content, position)
    elif wire_type == _FIXED64:
        position += 8
    elif wire_type == _FIXED32:
        position += 4
    else:
        raise DecodeError(f"wire type {wire_type} at byte {position}")
    if position > len(content):
        raise DecodeError("the message is cut short")
    return position


def _varint(content: bytes, position: int) -> tuple[int, int]:
    """Return the integer and the place behind it."""
    number = 0
    for place in range(_VARINT_BYTES_MAX):
        if position >= len(content):
            raise DecodeError("the message is cut short")
        byte = content[position]
        position += 1
        number |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return number, position
    raise DecodeError("a number has more than 10 bytes")
