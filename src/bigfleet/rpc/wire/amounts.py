"""Reads resource maps from the wire, each distinct map once: vectors, original texts, and faults.

The bounds are those of docs/spec/wire.md §2. Equal maps give the same objects. An invalid quantity is never corrected.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from bigfleet.model.frames import MalformedMessage
from bigfleet.model.ids import control_character_in, text_bytes
from bigfleet.model.quantity import Family, QuantityError, parse_quantity, quantity_family
from bigfleet.model.vector import Vector

RESOURCE_NAMES_MAX: Final = 32
STRING_BYTES_MAX: Final = 1_024

#: Resource maps that are shared; many differ from roll-up to roll-up.
_AMOUNTS_CACHED_MAX: Final = 16_384
#: Characters of a map that is shared; a larger one is read each time.
AMOUNTS_CHARACTERS_MAX: Final = 2_048
_NAME_SHOWN_CHARACTERS_MAX: Final = 64


def amounts_of(place: str, texts: dict[str, str]) -> tuple[Vector, Mapping[str, Family]]:
    """Return the vector of a resource map, without dimensions that are zero, and how each dimension was written.

    Raises MalformedMessage for the first fault, names ascending. Equal maps give the same objects, if they are small.
    """
    characters = sum(map(len, texts)) + sum(map(len, texts.values()))
    read: Callable[[tuple[tuple[str, str], ...]], tuple[Vector, Mapping[str, Family]]] = _sound_amounts
    if characters <= AMOUNTS_CHARACTERS_MAX:
        read = _shared_amounts
    try:
        return read(tuple(texts.items()))
    except QuantityError:
        check_vector(place, texts)
        raise AssertionError("what is refused has a fault") from None


def _sound_amounts(items: tuple[tuple[str, str], ...]) -> tuple[Vector, Mapping[str, Family]]:
    """Return a resource map's vector and families. Raises QuantityError when anything in it is unsound."""
    if len(items) > RESOURCE_NAMES_MAX:
        raise QuantityError("too many names")
    amounts: dict[str, int] = {}
    written: dict[str, Family] = {}
    for name, text in items:
        milli = parse_quantity(text)
        if milli < 0 or text_bytes(name) > STRING_BYTES_MAX or control_character_in(name):
            raise QuantityError("a negative quantity, or a name that is too long or has a control character")
        if milli:
            amounts[name] = milli
        written[name] = quantity_family(text)
    return MappingProxyType(amounts), written


_shared_amounts = lru_cache(maxsize=_AMOUNTS_CACHED_MAX)(_sound_amounts)


def check_vector(place: str, texts: Mapping[str, str]) -> None:
    """Raise MalformedMessage for the first fault of a resource map, names ascending."""
    check_count(place, len(texts), "names", RESOURCE_NAMES_MAX)
    for name in sorted(texts):
        check_text(f"{place}[{_shown(name)}]", name, "the name has")
        try:
            milli = parse_quantity(texts[name])
        except QuantityError as error:
            raise MalformedMessage(f"{place}[{_shown(name)}]", str(error)) from error
        if milli < 0:
            raise MalformedMessage(f"{place}[{_shown(name)}]", f"{texts[name]!r} is negative")


def _shown(name: str) -> str:
    short = name if len(name) <= _NAME_SHOWN_CHARACTERS_MAX else name[:_NAME_SHOWN_CHARACTERS_MAX] + "…"
    return repr(short)


def check_count(place: str, count: int, noun: str, count_max: int) -> None:
    """Raise MalformedMessage for more than `count_max`."""
    if count > count_max:
        raise MalformedMessage(place, f"has {count} {noun}, at most {count_max} are allowed")


def check_string(place: str, text: str, subject: str = "has") -> None:
    """Raise MalformedMessage for a text that is too long."""
    size_bytes = text_bytes(text)
    if size_bytes > STRING_BYTES_MAX:
        raise MalformedMessage(place, f"{subject} {size_bytes} bytes, at most {STRING_BYTES_MAX} are allowed")


def check_text(place: str, text: str, subject: str = "has") -> None:
    """Raise MalformedMessage for a name or value that is too long or has a control character."""
    check_string(place, text, subject)
    character = control_character_in(text)
    if character:
        raise MalformedMessage(place, f"{subject} the control character {character!r}, which no name or value may have")
