"""Defines identifiers: their types, what makes one valid, and where new ones come from.

The rules are those of docs/spec/wire.md §1. This module does not draw randomness by itself: an `IdSource` is handed in.
"""

import re
from typing import Final, NewType, Protocol

MachineId = NewType("MachineId", str)
ClusterId = NewType("ClusterId", str)
ShardId = NewType("ShardId", str)
Fingerprint = NewType("Fingerprint", str)

IDENTIFIER_BYTES_MAX = 253
_CONTROL_CHARACTERS: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class Rng(Protocol):
    """The part of `random.Random` that the project uses; an instance is always handed in, seeded by the caller."""

    def random(self) -> float: ...
    def uniform(self, a: float, b: float) -> float: ...
    def getrandbits(self, k: int, /) -> int: ...


class IdSource(Protocol):
    """Makes ids that never repeat, over processes and restarts; unguessable outside of tests."""

    def new_id(self) -> str:
        """Return 26 characters of Crockford base 32 (a ULID)."""
        ...


def control_character_in(text: str) -> str:
    """Return the first control character or line separator of a text, empty without one.

    No resource name, label key or value on the wire may have one (docs/spec/wire.md §1).
    """
    if text.isprintable():
        return ""
    found = _CONTROL_CHARACTERS.search(text)
    return found[0] if found else ""


def identifier_fault(text: str) -> str | None:
    """Say why `text` is no valid cluster or shard id, or return None.

    Valid: 1 to 253 bytes of UTF-8, printable, without blanks (docs/spec/wire.md §1).
    """
    if not text:
        return "is empty"
    size_bytes = len(text.encode("utf-8", "surrogatepass"))
    if size_bytes > IDENTIFIER_BYTES_MAX:
        return f"has {size_bytes} bytes, at most {IDENTIFIER_BYTES_MAX} are allowed"
    if text.isprintable() and " " not in text:
        return None
    for position, character in enumerate(text):
        if character.isspace() or not character.isprintable():
            return f"has the character {character!r} at position {position}; blanks and control characters are refused"
    return None


def text_bytes(text: str) -> int:
    """Return the size of the text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())
