"""Parses JSON as Ganeti's `hail` does, and reads values from it with errors that name owner and key.

docs/spec/partition.md §2 and §13. Of a repeated key the first counts; an integer may be written with a fraction and is
rounded half to even; strings, null and booleans are not numbers. Numbers with a fraction or an exponent stay text until
they are read, so unused ones cost nothing and lose nothing. Documents that another parser has read, with floats and
dictionaries, are accepted as well. This module never decides what a value means.
"""

import json
from collections.abc import Mapping
from math import inf, isfinite
from typing import Any, Final, NoReturn, TypeVar

T = TypeVar("T")

Body = Mapping[str, Any]
#: Number of digits before or behind the point beyond which a number is refused instead of being written out.
EXPONENT_MAX: Final = 400
_MISSING: Final = object()


class WrongInput(Exception):
    """The message is not understood; its text names owner and key."""


class Repeated(dict[str, Any]):
    """A JSON object in which a key occurs more than once; as a mapping it has the first value of each key."""

    __slots__ = ("pairs",)

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(reversed(pairs))
        #: Every key and value in the order of the file.
        self.pairs = pairs


class Real:
    """A number that was written with a fraction or an exponent."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    body = dict(pairs)
    return body if len(body) == len(pairs) else Repeated(pairs)


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


def decode(content: bytes) -> dict[str, Any]:
    """Return the object that the text holds. Raises WrongInput when it is not JSON, not UTF-8 or not an object."""
    if content[:1] not in (b"{", b"["):
        raise WrongInput("Parsing input IAllocator message: Invalid JSON: it does not begin with { or [")
    try:
        # The position of a fault is worth more than the line: messages are mostly one line long.
        document = json.loads(
            content.decode("utf-8"), object_pairs_hook=_object, parse_float=Real, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        raise WrongInput(f"Parsing input IAllocator message: Malformed JSON: {error}") from error
    if not isinstance(document, dict):
        raise WrongInput("Parsing input IAllocator message: Unable to read JSObject")
    return document


def pairs_of(body: Body) -> list[tuple[str, Any]]:
    """Return every key and value in the order of the file, repeated keys too."""
    return body.pairs if isinstance(body, Repeated) else list(body.items())


def listed(texts: list[str]) -> str:
    """Return the texts as errors show them: `["a","b"]`."""
    return json.dumps(texts, separators=(",", ":"), ensure_ascii=False)


# ---- taking values; each raises WrongInput with the owner and the key ------------------------------------------------


def need(body: Body, key: str, owner: str) -> Any:
    """Return the value of a key that must be there."""
    value = body.get(key, _MISSING)
    if value is _MISSING:
        keys = [name for name, _ in pairs_of(body)]
        raise WrongInput(f"{owner}: key '{key}' not found, object contains only {listed(keys)}")
    return value


def unreadable(owner: str, key: str, kind: str) -> NoReturn:
    """Refuse a value that is not of its kind."""
    raise WrongInput(f"{owner}: key '{key}': Unable to read {kind}")


def take_int(body: Body, key: str, owner: str) -> int:
    """Return a whole number; one with a fraction is rounded half to even."""
    value = body.get(key)
    return value if value.__class__ is int else _as_int(need(body, key, owner), key, owner)


def take_int_maybe(body: Body, key: str, owner: str) -> int | None:
    """Return a whole number, or None when it is missing or null."""
    value = body.get(key)
    return None if value is None else _as_int(value, key, owner)


def _as_int(value: object, key: str, owner: str) -> int:
    if value.__class__ is int:
        return value
    if isinstance(value, float) and isfinite(value):
        return round(value)
    if not isinstance(value, Real):
        unreadable(owner, key, "Int")
    # Imported where it is needed, which is hardly ever: it costs 3 ms.
    from decimal import Decimal

    exact = Decimal(value.text)
    if exact.adjusted() > EXPONENT_MAX:
        unreadable(owner, key, "Int")
    return round(exact) if exact.adjusted() >= -1 else 0


def take_float(body: Body, key: str, owner: str) -> float:
    """Return a number as a double. One beyond the doubles is refused."""
    value = body.get(key, _MISSING)
    if value.__class__ is not int and not isinstance(value, Real | float):
        need(body, key, owner)
        unreadable(owner, key, "Double")
    try:
        number = float(value.text if isinstance(value, Real) else value)
    except OverflowError:
        number = inf
    if not isfinite(number):
        unreadable(owner, key, "Double")
    return number


def take_bool(body: Body, key: str, owner: str) -> bool:
    """Return a boolean."""
    value = body.get(key)
    if value is True or value is False:
        return value
    need(body, key, owner)
    unreadable(owner, key, "Bool")


def take_str(body: Body, key: str, owner: str) -> str:
    """Return a text."""
    value = body.get(key)
    return value if value.__class__ is str else as_text(need(body, key, owner), key, owner)


def as_text(value: object, key: str, owner: str) -> str:
    """Return a text. A list of single characters is one, too, as it is to `hail`, whose texts are such lists."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        unreadable(owner, key, "String")
    if any(not isinstance(each, str) or len(each) != 1 for each in value):
        unreadable(owner, key, "Char")
    return "".join(value)


def take_list(body: Body, key: str, owner: str) -> list[Any]:
    """Return a list."""
    value = body.get(key)
    if value.__class__ is list:
        return value
    need(body, key, owner)
    unreadable(owner, key, "list")


def take_objects(body: Body, key: str, owner: str) -> list[Body]:
    """Return a list of objects."""
    values = take_list(body, key, owner)
    for value in values:
        if not isinstance(value, dict):
            raise WrongInput(f"{owner}: key '{key}': not an object")
    return values


def take_object(body: Body, key: str, owner: str) -> Body:
    """Return an object."""
    value = need(body, key, owner)
    if not isinstance(value, dict):
        unreadable(owner, key, "JSObject")
    return value


def take_texts(body: Body, key: str, owner: str) -> tuple[str, ...]:
    """Return a list of texts."""
    return tuple([as_text(value, key, owner) for value in take_list(body, key, owner)])


def take_choice(body: Body, key: str, owner: str, choices: Mapping[str, T], kind: str) -> T:
    """Return what one of the known words stands for."""
    return as_choice(take_str(body, key, owner), key, owner, choices, kind)


def as_choice(value: object, key: str, owner: str, choices: Mapping[str, T], kind: str) -> T:
    """Return what a word stands for."""
    word = as_text(value, key, owner)
    try:
        return choices[word]
    except KeyError:
        shown = json.dumps(word, ensure_ascii=False)
        raise WrongInput(f"{owner}: key '{key}': Invalid string value for type {kind}: {shown}") from None
