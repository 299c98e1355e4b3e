"""Encodes log events as JSON lines of bounded length.

What a peer sends may end in a log field. Each field and each line has a maximum length, so that no message of a peer
fills the log or keeps the loop busy.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

LINE_BYTES_MAX: Final = 8 * 1024
FIELD_BYTES_MAX: Final = 1024
#: Of a traceback, whose beginning is cut: the end names the error.
TRACEBACK_BYTES_MAX: Final = 4 * 1024

_TRACEBACKS: Final = frozenset({"exception", "stack"})
#: Never left out of a line.
_ESSENTIAL: Final = ("time", "level", "component", "event")
_ELLIPSIS: Final = "…"


def encode_line(event: object, **_options: object) -> str:
    """Return an event as JSON of at most LINE_BYTES_MAX, with fields cut or left out where it would be longer."""
    line = _encode(event)
    if len(line) <= FIELD_BYTES_MAX or not isinstance(event, Mapping):
        return line.decode()
    fields = {_cut(str(name), FIELD_BYTES_MAX): _bounded(str(name), value) for name, value in event.items()}
    line = _encode(fields)
    if len(line) > LINE_BYTES_MAX:
        line = _encode(_reduced(fields))
    return line.decode()


def _encode(value: object) -> bytes:
    return msgspec.json.encode(value, enc_hook=str)


def _bounded(name: str, value: Any) -> Any:
    if name in _TRACEBACKS:
        return _cut_front(str(value), TRACEBACK_BYTES_MAX)
    if not isinstance(value, str):
        encoded = _encode(value)
        if len(encoded) <= FIELD_BYTES_MAX:
            return value
        value = encoded.decode()
    return _cut(value, FIELD_BYTES_MAX)


def _cut(text: str, bytes_max: int) -> str:
    """Return the beginning of a text that takes at most that many bytes as JSON."""
    if len(text) <= bytes_max and len(_encode(text)) <= bytes_max:
        return text
    text = text[:bytes_max]
    while len(_encode(text)) > bytes_max - len(_ELLIPSIS.encode()):
        text = text[: len(text) * 3 // 4]
    return text + _ELLIPSIS


def _cut_front(text: str, bytes_max: int) -> str:
    """Return the end of a text that takes at most that many bytes as JSON."""
    if len(text) <= bytes_max and len(_encode(text)) <= bytes_max:
        return text
    text = text[-bytes_max:]
    while len(_encode(text)) > bytes_max - len(_ELLIPSIS.encode()):
        text = text[-(len(text) * 3 // 4) :]
    return _ELLIPSIS + text


def _reduced(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return as many of the fields as a line has room for, the essential ones first, and how many were left out."""
    order = sorted(fields, key=lambda name: (name not in _ESSENTIAL, len(_encode({name: fields[name]}))))
    reduced: dict[str, Any] = {"fields_left_out": len(fields)}
    room_bytes = LINE_BYTES_MAX - len(_encode(reduced))
    for name in order:
        # Without the braces, and with a comma.
        size_bytes = len(_encode({name: fields[name]})) - 1
        if size_bytes > room_bytes:
            break
        room_bytes -= size_bytes
        reduced[name] = fields[name]
    reduced["fields_left_out"] = len(fields) - (len(reduced) - 1)
    return reduced
