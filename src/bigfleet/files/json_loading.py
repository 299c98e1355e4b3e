"""Loads JSON with the standard library, and rejects what its readers could not write again.

Python's reader accepts half of a surrogate pair, which no UTF-8 text can hold, and NaN, which is no JSON. msgspec's
reader rejects both and is used where nobody types the text; it names a byte, this one a line and a column.
"""

import json
import re
from collections.abc import Callable
from typing import Any, Final, NoReturn

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
        return json.loads(
            text, object_pairs_hook=object_pairs_hook, parse_float=parse_float, parse_constant=_reject_constant
        )
    except RecursionError as error:
        raise ValueError("too deeply nested") from error


def _reject_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")
