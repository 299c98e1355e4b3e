"""Refuses YAML that is nested too deep, before a loader in C meets it.

libyaml's composer calls itself for each level, on the stack of C: some ten thousand brackets end the process with a
segmentation fault. Text that cannot be deep is not parsed twice.
"""

import re
from typing import Any, Final

import yaml

#: No file of ours has more than ten levels.
DEPTH_MAX: Final = 100
_OPENING: Final = re.compile(r"[\[{]")
#: What opens levels in the block style: indentation, and one for each dash, question mark and colon of a line.
_BLOCK: Final = re.compile(r"^[ ]*(?:[-?:][ \t]+)*", re.MULTILINE)
_PARSER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class NestingError(ValueError):
    """Text has more levels than `DEPTH_MAX`."""


def check_nesting(text: str) -> None:
    """Raise NestingError for YAML or JSON with more than `DEPTH_MAX` levels; what is no YAML may pass."""
    brackets = sum(1 for _ in _OPENING.finditer(text))
    # A level of the block style takes a character at least, and may hold a mapping beside its dash.
    block = max((len(found[0]) for found in _BLOCK.finditer(text)), default=0)
    if brackets + 2 * block + 2 <= DEPTH_MAX:
        return
    depth = 0
    try:
        for event in yaml.parse(text, _PARSER):
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
                if depth > DEPTH_MAX:
                    raise NestingError(f"more than {DEPTH_MAX} levels are nested")
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
    except yaml.YAMLError:
        # The loader will say where and why; up to there nothing was too deep.
        return
