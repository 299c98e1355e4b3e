"""Finds the entries of one repeated field of a large message, so that it is never held or read as a whole.

A serialized message is the concatenation of its fields, so any run of complete fields is a message too, and a repeated
field is the concatenation of its entries (the encoding guide of Protocol Buffers). This module must not read the
content of a field.
"""

from array import array

from google.protobuf.message import DecodeError

_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5
_VARINT_BYTES_MAX = 10
#: A tag of one byte and a size of two: whatever is longer takes the long way.
_HEAD_BYTES = 3


def cut(
    content: bytes, position: int, fields_max: int, tag: int, places: "tuple[array[int], array[int]]", rest: bytearray
) -> int:
    """Pass over so many fields from a position on, and return the place behind the last one.

    Where the contents of fields with the tag begin and end is appended to `places`; `tag` is less than 128 and says
    that the field is length-delimited. Other fields are appended to `rest`. Raises DecodeError where the bytes are no
    message.
    """
    starts, ends = places
    size, last_head = len(content), len(content) - _HEAD_BYTES
    for _field in range(fields_max):
        if position >= size:
            break
        begin = -1
        # Half a million times in a List: nearly every entry is of the tag, and its size has one or two bytes.
        if position <= last_head and content[position] == tag:
            length = content[position + 1]
            if length < 0x80:
                begin = position + 2
            elif (high := content[position + 2]) < 0x80:
                begin, length = position + 3, (high << 7) | (length & 0x7F)
        if begin >= 0:
            end = begin + length
            if end > size:
                raise DecodeError("the message is cut short")
        else:
            end = _end_of_field(content, position)
            number, begin = varint_at(content, position)
            if number != tag:
                rest += content[position:end]
                position = end
                continue
            _length, begin = varint_at(content, begin)
        starts.append(begin)
        ends.append(end)
        position = end
    return position


def _end_of_field(content: bytes, position: int) -> int:
    tag, position = varint_at(content, position)
    wire_type = tag & 7
    if wire_type == _LENGTH_DELIMITED:
        size, position = varint_at(content, position)
        position += size
    elif wire_type == _VARINT:
        _value, position = varint_at(content, position)
    elif wire_type == _FIXED64:
        position += 8
    elif wire_type == _FIXED32:
        position += 4
    else:
        raise DecodeError(f"wire type {wire_type} at byte {position}")
    if position > len(content):
        raise DecodeError("the message is cut short")
    return position


def varint_at(content: bytes, position: int) -> tuple[int, int]:
    """Return the integer at a place and the place behind it. Raises DecodeError where there is none."""
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
