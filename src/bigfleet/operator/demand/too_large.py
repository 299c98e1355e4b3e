"""Parses from a shard's verdict which requests of a need are larger than any machine (docs/spec/shard.md §12).

Such a pod affects only itself, while a verdict applies to all requests of a need. The message of the verdict names
resource and largest amount of each shape that is too large. If a message cannot be parsed, it applies to all requests.
"""

import re
from collections.abc import Iterable
from typing import Final

from bigfleet.model.quantity import QuantityError, parse_quantity
from bigfleet.model.vector import Vector

#: The shard names no more shapes in one sentence; then there may be others.
_NAMED_MAX: Final = 3
_SHAPE: Final = re.compile(r"wants? (\S+) \S+, the largest machine for it has (\S+?)(?:;|$)")

#: (resource, milli-units).
Largest = tuple[tuple[str, int], ...]


def largest_named(message: str) -> Largest:
    """Return resource and largest amount of each shape that a verdict calls too large.

    Empty when the sentence cannot be read, or when there may be more shapes than it names.
    """
    parts = _SHAPE.findall(message)
    if len(parts) != message.count(";") + 1 or len(parts) >= _NAMED_MAX:
        return ()
    found = []
    for name, quantity in parts:
        try:
            found.append((name, 0 if quantity == "none" else parse_quantity(quantity)))
        except QuantityError:
            return ()
    return tuple(found)


def exceeds(vector: Vector, largest: Iterable[tuple[str, int]]) -> bool:
    """Return whether a request asks for more of some resource than the largest amount."""
    return any(vector.get(name, 0) > milli for name, milli in largest)
