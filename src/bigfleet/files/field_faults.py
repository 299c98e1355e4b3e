"""Parses msgspec's errors about the content of a file: which field is wrong, and how.

msgspec gives this information only in the text of an error.
"""

import re
from dataclasses import dataclass
from typing import Final

import msgspec

_FIELD: Final = re.compile(r"Object (contains unknown|missing required) field `(.*?)`")


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldFault:
    """One bad field of a file."""

    #: Of the section that the field is in, such as `pools[0]` or `types.*`; "" is the file.
    section: str
    #: Of the field itself; "" is the file.
    path: str
    text: str
    is_unknown_key: bool = False

    def __str__(self) -> str:
        return f"{self.path}: {self.text}" if self.path else self.text


def field_fault(error: msgspec.DecodeError, *, root: str = "") -> FieldFault:
    """Return the field and fault of an error; `root` is the path of the converted value."""
    message, _at, place = str(error).partition(" - at `$")
    # Of a map msgspec does not name the key.
    section = f"{root}{place.rstrip('`')}".replace("[...]", ".*").removeprefix(".")
    field = _FIELD.fullmatch(message)
    if field is None:
        return FieldFault(section=section, path=section, text=message)
    path = f"{section}.{field[2]}" if section else field[2]
    is_unknown_key = field[1] == "contains unknown"
    text = "unknown key" if is_unknown_key else "is missing"
    return FieldFault(section=section, path=path, text=text, is_unknown_key=is_unknown_key)
