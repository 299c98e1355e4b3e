"""Computes with resource vectors: resources and their amounts in exact milli-units.

A vector maps names to positive integers; a dimension that is zero is absent, so equal vectors are equal mappings
(docs/spec/model.md §5). Vectors are treated as immutable: no function here changes its arguments.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType

from bigfleet.model.quantity import Family, QuantityError, format_quantity, parse_quantity, quantity_family

Vector = Mapping[str, int]

ZERO: Vector = MappingProxyType({})

#: Characters of a map of quantities whose vector is cached.
_CACHED_CHARACTERS_MAX = 2_048


def parse_vector(quantities: Mapping[str, str]) -> Vector:
    """Return the vector of a map of quantities: dimensions that are zero, negative or unparsable are absent.

    `vector_faults` names the last two. Equal maps give the same object.
    """
    items = tuple(sorted(quantities.items()))
    # A sender of other large maps each time would fill the cache with them.
    is_small = sum([len(name) + len(text) for name, text in items]) <= _CACHED_CHARACTERS_MAX
    return _parse_items(items) if is_small else _parse_items.__wrapped__(items)


@lru_cache(maxsize=16384)
def _parse_items(items: tuple[tuple[str, str], ...]) -> Vector:
    parsed: dict[str, int] = {}
    for name, text in items:
        try:
            milli = parse_quantity(text)
        except QuantityError:
            continue
        if milli > 0:
            parsed[name] = milli
    return MappingProxyType(parsed)


def vector_faults(quantities: Mapping[str, str]) -> list[str]:
    """Name each dimension that is unparsable or negative, with its reason, in name order."""
    faults = []
    for name, text in sorted(quantities.items()):
        try:
            if parse_quantity(text) < 0:
                faults.append(f"{name}: {text!r} is negative")
        except QuantityError as error:
            faults.append(f"{name}: {error}")
    return faults


def families(quantities: Mapping[str, str]) -> dict[str, Family]:
    """Return how each parsable dimension was written; `format_vector` prints its sums the same way."""
    written = {}
    for name, text in quantities.items():
        try:
            written[name] = quantity_family(text)
        except QuantityError:
            continue
    return written


def format_vector(vector: Vector, written: Mapping[str, Family] | None = None) -> dict[str, str]:
    """Return canonical quantity text by name, in name order; a dimension without a family prints as `guess_family`."""
    known = written or {}
    return {
        name: format_quantity(milli, known.get(name) or guess_family(name)) for name, milli in sorted(vector.items())
    }


def guess_family(name: str) -> Family:
    """Return the family that Kubernetes users expect of a resource: binary for bytes, decimal for the rest."""
    is_bytes = name in ("memory", "storage", "ephemeral-storage") or name.startswith("hugepages-")
    return Family.BINARY if is_bytes else Family.DECIMAL


def add(left: Vector, right: Vector) -> Vector:
    """Return the sum."""
    total = dict(left)
    for name, milli in right.items():
        total[name] = total.get(name, 0) + milli
    return total


def scale(unit: Vector, count: int) -> Vector:
    """Return `count` times the vector; count is positive."""
    return {name: milli * count for name, milli in unit.items()}


def sum_of(parts: Iterable[tuple[Vector, int]]) -> Vector:
    """Return the sum of vectors, each so many times."""
    total: dict[str, int] = {}
    for unit, count in parts:
        for name, milli in unit.items():
            total[name] = total.get(name, 0) + milli * count
    return total


def maximum(left: Vector, right: Vector) -> Vector:
    """Return the larger of both in each dimension."""
    largest = dict(left)
    for name, milli in right.items():
        largest[name] = max(largest.get(name, 0), milli)
    return largest


def subtract(have: Vector, take: Vector) -> Vector:
    """Return what is left of `have`: saturating at zero, positive dimensions only."""
    return {name: milli - take.get(name, 0) for name, milli in have.items() if milli > take.get(name, 0)}


def covers(have: Vector, want: Vector) -> bool:
    """Return whether `have` is at least `want` in every dimension of `want`; no dimension wanted is covered by all."""
    return all(have.get(name, 0) >= milli for name, milli in want.items())


def is_useful(supply: Vector, remaining: Vector) -> bool:
    """Return whether the supply is positive in some dimension that still remains (docs/spec/aggregates.md §3)."""
    return any(name in supply for name in remaining)


def vector_key(vector: Vector) -> tuple[tuple[str, int], ...]:
    """Return a hashable value that is equal for equal vectors."""
    return tuple(sorted(vector.items()))
