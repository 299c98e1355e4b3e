"""Reads the shell blocks of docs/kubernetes.md, in order, with what the page says of each to its test."""

import re
from pathlib import Path
from typing import NamedTuple

_FENCE = re.compile(r"(?:<!-- test: (?P<mark>[a-z ]+) -->\n)?```sh\n(?P<script>.*?)^```$", re.MULTILINE | re.DOTALL)
_SETTING = re.compile(r"\b([A-Z_]+)=(\S+)")


class ShellBlock(NamedTuple):
    """Commands that a reader runs at once; the mark is "" for a block that is run as it stands."""

    mark: str
    script: str


def shell_blocks(page: Path) -> list[ShellBlock]:
    """Return the shell blocks of a page in order."""
    text = page.read_text(encoding="utf-8")
    return [ShellBlock(found["mark"] or "", found["script"]) for found in _FENCE.finditer(text)]


def settings_of(block: ShellBlock) -> dict[str, str]:
    """Return the variables that a block sets."""
    return dict(_SETTING.findall(block.script))


def background_commands(block: ShellBlock) -> list[str]:
    """Return the commands of a block that go on in the background, each without its `&`."""
    return [command.strip() for command in re.split(r"&\s*$", block.script, flags=re.MULTILINE) if command.strip()]
