"""Loads JSON with the standard library, and rejects text that cannot be encoded as UTF-8.

Python's reader accepts an unpaired surrogate. msgspec's reader rejects it and is used for text that programs write; its
errors give a byte, those of this module a line and a column. NaN is accepted here: the reader of the entries reports it
with its entry.
"""

import json
import json.decoder
import json.scanner
import re
from collections.abc import Callable
from typing import Any, Final

#: Escapes one after the other, so that an escaped backslash before a `u` is not taken for the start of one.
_ESCAPES: Final = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)


class DuplicateKeyError(ValueError):
    """An object has a key twice; readers differ in which of the two counts."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the key {key!r} is given twice in an object; remove one of the two")
        #: Where the object begins, once it is known.
        self.start: int | None = None


def load_json(
    text: str,
    *,
    object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
    parse_float: Callable[[str], Any] | None = None,
) -> Any:
    """Return the value of a text; the two functions are those of `json.loads`. Raises ValueError for all other text.

    Without a hook a key that an object has twice is refused with its line.
    """
    for escape in _ESCAPES.finditer(text):
        if escape["half"]:
            raise json.JSONDecodeError(f"\\{escape['half']} is half of a surrogate pair", text, escape.start())
    try:
        return json.loads(text, object_pairs_hook=object_pairs_hook or _distinct, parse_float=parse_float)
    except DuplicateKeyError as error:
        raise json.JSONDecodeError(str(error), text, _start_of_duplicate(text)) from error
    except RecursionError as error:
        raise ValueError("too deeply nested") from error


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object. Raises DuplicateKeyError."""
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _value in pairs]
        raise DuplicateKeyError(next(name for name in names if names.count(name) > 1))
    return made


class _Locating(json.JSONDecoder):
    """Decodes like the standard library, only slower, and knows where the object with a duplicate key begins."""

    def __init__(self) -> None:
        super().__init__(object_pairs_hook=_distinct)
        self.parse_object: Any = self._object
        self.scan_once = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]

    def _object(self, text_and_end: tuple[str, int], *rest: Any) -> Any:
        try:
            return json.decoder.JSONObject(text_and_end, *rest)  # type: ignore[attr-defined]
        except DuplicateKeyError as error:
            if error.start is None:
                error.start = text_and_end[1] - 1
            raise


def _start_of_duplicate(text: str) -> int:
    """Return where the object begins that `_distinct` refused."""
    try:
        _Locating().decode(text)
    except DuplicateKeyError as error:
        return error.start or 0
    return 0
