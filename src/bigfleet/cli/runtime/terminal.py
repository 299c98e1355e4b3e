"""Writes lines to a terminal without the control characters that foreign names and messages may contain.

A name from a cluster, a provider or a file may have an escape sequence that moves the cursor, changes the title or
hides text. Every command prints through this module or through `bigfleet.cli.runtime.console`.
"""

import re

import typer

#: Control characters but tab and newline, line separators, and marks that change the direction of text.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_UNSAFE_IN_CELL = re.compile(_UNSAFE.pattern[:-1] + "\t\n]")


def visible(text: str) -> str:
    """Return text with each unsafe character as an escape such as `\\x1b`; tabs and newlines stay."""
    return _UNSAFE.sub(_escaped, text)


def visible_cell(text: str) -> str:
    """Return text for one cell of a table: as `visible`, with tabs and newlines escaped too."""
    return text if text.isprintable() else _UNSAFE_IN_CELL.sub(_escaped, text)


def visible_json(text: str) -> str:
    """Return a JSON text with unsafe characters as JSON escapes; it stands for the same values."""
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def echo(message: object = "", *, err: bool = False) -> None:
    """Write one message and a newline to standard output, or to standard error."""
    typer.echo(visible(str(message)), err=err)


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
