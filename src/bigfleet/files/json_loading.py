"""Loads JSON with the standard library, and rejects text that cannot be encoded as UTF-8.

Python's reader accepts an unpaired surrogate. msgspec's reader rejects it and is used for text that programs write; its
errors give a byte, those of this module a line and a column. NaN is accepted here: the reader of the entries reports it
with its entry.
"""

import json
import re
from collections.abc import Callable
from typing import Any, Final

#: Escapes one after the other, so that an escaped backslash before a `u` is not taken for the start of one.
_ESCAPES: Final = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)


def load_json(
    text: str,
    *,
    object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
    parse_float: Callable[[str], Any] | None = None,
) -> Any:
    """Return the value of a text; the two functions are those of `json.loads`. Raises ValueError for all other text."""
    for escape in _ESCAPES.finditer(text):
        if escape["half"]:
            raise json.JSONDecodeError(f"\\{escape['half']} is half of a surrogate pair", text, escape.start())
    try:
        return json.loads(text, object_pairs_hook=object_pairs_hook, parse_float=parse_float)
    except RecursionError as error:
        raise ValueError("too deeply nested") from error
