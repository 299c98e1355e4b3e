"""Parses msgspec's errors about the content of a file: which field is wrong, how, and which one may be meant.

msgspec gives this information only in the text of an error.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final, get_args

import msgspec

_FIELD: Final = re.compile(r"Object (contains unknown|missing required) field `(.*?)`")
#: Of the longest texts in common; what is less alike was hardly meant.
_NEAR: Final = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldFault:
    """One bad field of a file."""

    #: Of the section that the field is in, such as `pools[0]` or `types.*`; "" is the file.
    section: str
    #: Of the field itself; "" is the file.
    path: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}: {self.text}" if self.path else self.text


def field_fault(error: Exception, kind: Any, *, root: str = "") -> FieldFault:
    """Return the field and fault of an error; one that names no field is its own text.

    `kind` is the type that the value was to have, such as a Struct or a list of them; for an unknown key the text names
    the nearest of its fields, or all. `root` is the path of the converted value.
    """
    message, _at, place = str(error).partition(" - at `$")
    # Of a map msgspec does not name the key.
    own_section = place.rstrip("`").replace("[...]", ".*")
    section = f"{root}{own_section}".removeprefix(".")
    field = _FIELD.fullmatch(message)
    if field is None:
        return FieldFault(section=section, path=section, text=message)
    path = f"{section}.{field[2]}" if section else field[2]
    is_unknown = field[1] == "contains unknown"
    text = f"unknown key{_meant(field[2], _keys_at(own_section, kind))}" if is_unknown else "is missing"
    return FieldFault(section=section, path=path, text=text)


def _meant(written: str, keys: tuple[str, ...]) -> str:
    near = get_close_matches(written, keys, n=1, cutoff=_NEAR)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; there are {', '.join(keys)}" if keys else ""


def _keys_at(place: str, kind: Any) -> tuple[str, ...]:
    """Return the keys of the Struct that a path such as `.interruption.waves[0]` leads to; () where none is found."""
    struct = _struct_in(kind)
    for name in filter(None, re.sub(r"\[.*?\]|\.\*", "", place).split(".")):
        fields = () if struct is None else msgspec.structs.fields(struct)
        struct = next((_struct_in(field.type) for field in fields if field.encode_name == name), None)
    return () if struct is None else tuple(field.encode_name for field in msgspec.structs.fields(struct))


def _struct_in(hint: Any) -> type[msgspec.Struct] | None:
    return next((kind for kind in _classes_in(hint) if issubclass(kind, msgspec.Struct)), None)


def _classes_in(hint: Any) -> Iterator[type]:
    """Yield the classes that a type hint is made of, such as `Pool` of `tuple[Pool, ...] | None`."""
    if isinstance(hint, type) and not get_args(hint):
        yield hint
    for part in get_args(hint):
        yield from _classes_in(part)
