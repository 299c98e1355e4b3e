"""Chooses the modules that have tests of some length, by their text: importing every module takes ten seconds."""

import functools
import re
from collections.abc import Collection
from itertools import product
from pathlib import Path

#: The markers by which the targets of the Makefile choose tests.
LENGTHS = ("slow", "long", "kubernetes")


@functools.cache
def lengths_named_in(path: Path) -> frozenset[str]:
    """Return the markers of `LENGTHS` that the tests of a module may have."""
    text = path.read_text(encoding="utf-8")
    return frozenset(name for name in LENGTHS if f"mark.{name}" in text)


def may_choose(expression: str, named: Collection[str]) -> bool:
    """Return whether an expression of markers chooses a test that has some of the named ones, or none of them.

    An expression with other words may always.
    """
    words = set(re.findall(r"\w+", expression)) - {"and", "or", "not"}
    if not words or not words <= set(LENGTHS):
        return True
    choices = [(False, True) if name in named else (False,) for name in LENGTHS]
    return any(eval(expression, {}, dict(zip(LENGTHS, chosen, strict=True))) for chosen in product(*choices))
