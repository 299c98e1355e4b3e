"""Returns text without the control characters and the length that foreign names and messages may have.

A name from a cluster, a provider or a file may have an escape sequence that moves the cursor, changes the title or
hides text, or it has megabytes. This module imports nothing but `re`, so that every program can use it.
"""

import re
from typing import Final

#: Control characters but tab and newline, line separators, and marks that change the direction of text.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_UNSAFE_IN_CELL = re.compile(_UNSAFE.pattern[:-1] + "\t\n]")

#: Of a quotation in an error. What is left out is the middle: the end of a path or a name is often what differs.
QUOTED_CHARACTERS_MAX: Final = 120
_QUOTED_END_CHARACTERS: Final = 29
#: Of text without quotation marks and blanks; paths may have that many.
WORD_CHARACTERS_MAX: Final = 255
#: Of an error as a whole.
ERROR_CHARACTERS_MAX: Final = 2_000
_ELLIPSIS: Final = "…"
#: A quotation begins after no letter, as an apostrophe does. One without an end is matched up to the end of the text,
#: so that nothing is read twice and time grows with the text.
_QUOTATION: Final = re.compile(
    r"(?<!\w)(?P<mark>['\"`])(?P<text>(?:\\.|(?!(?P=mark))[^\\])*+)(?P<end>(?P=mark)|\\?\Z)", re.DOTALL
)
_LONG_WORD: Final = re.compile(rf"\S{{{WORD_CHARACTERS_MAX + 1},}}+")


def visible(text: str) -> str:
    """Return text with each unsafe character as an escape such as `\\x1b`; tabs and newlines stay."""
    return _UNSAFE.sub(_escaped, text)


def visible_cell(text: str) -> str:
    """Return text for one cell of a table: as `visible`, with tabs and newlines escaped too."""
    return text if text.isprintable() else _UNSAFE_IN_CELL.sub(_escaped, text)


def visible_json(text: str) -> str:
    """Return a JSON text with unsafe characters as JSON escapes; it stands for the same values."""
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def error_line(message: object) -> str:
    """Return an error as one line without unsafe characters, with long quotations and words shortened."""
    text = _QUOTATION.sub(_shortened_quotation, visible_cell(str(message)))
    text = _LONG_WORD.sub(lambda found: _shortened(found[0], QUOTED_CHARACTERS_MAX), text)
    return _shortened(text, ERROR_CHARACTERS_MAX)


def _shortened_quotation(found: re.Match[str]) -> str:
    if found["end"] != found["mark"]:
        return found[0]
    return f"{found['mark']}{_shortened(found['text'], QUOTED_CHARACTERS_MAX)}{found['end']}"


def _shortened(text: str, characters_max: int) -> str:
    """Return text with its middle left out, if it is longer than so many characters."""
    if len(text) <= characters_max:
        return text
    return text[: characters_max - 1 - _QUOTED_END_CHARACTERS] + _ELLIPSIS + text[-_QUOTED_END_CHARACTERS:]


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
