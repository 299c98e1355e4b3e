"""Reads the pod shapes and overheads that demand files hold, in plans, fleets and cases alike (docs/planning.md).

Nothing is skipped or guessed: an aggregate that disagrees with its shapes is refused. More than 64 different shapes are
merged upwards, as an operator does before it reports them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from bigfleet.files.field_faults import field_fault
from bigfleet.model.profile import Requirement
from bigfleet.model.quantity import Family, format_quantity
from bigfleet.model.shapes import (
    COUNT_MAX,
    LIMIT_MAX,
    DemandShape,
    Overhead,
    canonical_shapes,
    largest_of,
    merged_upwards,
    overhead_fault,
    total_of,
)
from bigfleet.model.vector import Vector, families, guess_family, parse_vector, vector_faults

Quantities = Mapping[str, str | int]


class ShapeEntry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Pods of equal requests as they are written."""

    resources: dict[str, str | int]
    count: int
    max_per_machine: int = 0


class ShapeFault(ValueError):
    """A value of a row that cannot be taken; the message names the field."""


class RowAmounts(NamedTuple):
    """What a row of demand asks for."""

    aggregate: Vector
    min_unit: Vector
    #: In canonical order, at most 64.
    shapes: tuple[DemandShape, ...]
    waiting: tuple[DemandShape, ...]
    #: How each dimension was written.
    families: Mapping[str, Family]


def row_amounts(
    *,
    aggregate: Quantities | None,
    min_unit: Quantities,
    shapes: Sequence[ShapeEntry] = (),
    waiting: Sequence[ShapeEntry] = (),
    is_lenient: bool = False,
) -> RowAmounts:
    """Return the amounts of a row; an aggregate or min unit that is not given follows from the shapes.

    With `is_lenient` a dimension of the aggregate or min unit that is negative or unreadable is absent, as the engine
    has it (docs/spec/model.md §5); shapes are never read so. Raises ShapeFault for a quantity, a count or a limit
    that is wrong, for an aggregate that is not the sum of the shapes, and for a row without both.
    """
    exact = _shapes(shapes, "shapes")
    total = total_of(exact)
    if aggregate is None and not exact:
        raise ShapeFault("aggregate is missing; give the aggregate of the row or its shapes")
    said = total if aggregate is None else _vector(aggregate, "aggregate", is_lenient=is_lenient)
    written = {name: family for entry in (*waiting, *shapes) for name, family in _families(entry.resources).items()}
    written |= _families(aggregate or {})
    if exact and said != total:
        raise ShapeFault(_disagreement(said, total, written))
    smallest = _vector(min_unit, "min_unit", is_lenient=is_lenient) or largest_of(exact)
    return RowAmounts(said, smallest, merged_upwards(exact), merged_upwards(_shapes(waiting, "waiting")), written)


def checked_overhead(requirements: Sequence[Requirement], resources: Quantities) -> Overhead:
    """Return an overhead. Raises ShapeFault for a quantity that is wrong and for a Same requirement."""
    fault = overhead_fault(requirements)
    if fault is not None:
        raise ShapeFault(f"requirements: {fault}")
    return Overhead(tuple(requirements), _vector(resources, "resources"))


def shape_entries(value: Any, field: str) -> list[ShapeEntry]:
    """Return shapes of a file without a schema; None are none. Raises ShapeFault naming field and place."""
    try:
        return msgspec.convert(value or [], list[ShapeEntry])
    except msgspec.MsgspecError as error:
        raise ShapeFault(str(field_fault(error, list[ShapeEntry], root=field))) from error


def _shapes(entries: Sequence[ShapeEntry], field: str) -> tuple[DemandShape, ...]:
    found = []
    for number, entry in enumerate(entries):
        place = f"{field}[{number}]"
        resources = _vector(entry.resources, f"{place}.resources")
        if not 1 <= entry.count <= COUNT_MAX:
            raise ShapeFault(f"{place}.count: {entry.count} is not a number of pods; write 1 to {COUNT_MAX:,}")
        if not 0 <= entry.max_per_machine <= LIMIT_MAX:
            raise ShapeFault(
                f"{place}.max_per_machine: {entry.max_per_machine} is not a limit; write a number, 0 for no limit"
            )
        found.append(DemandShape(resources, entry.count, entry.max_per_machine))
    return canonical_shapes(found)


def _vector(quantities: Quantities, field: str, *, is_lenient: bool = False) -> Vector:
    texts = _texts(quantities)
    faults = [] if is_lenient else vector_faults(texts)
    if faults:
        raise ShapeFault(f"{field}.{faults[0]}")
    return parse_vector(texts)


def _texts(quantities: Quantities) -> dict[str, str]:
    return {name: str(value) for name, value in quantities.items()}


def _families(quantities: Quantities) -> Mapping[str, Family]:
    return families(_texts(quantities))


def _disagreement(said: Vector, total: Vector, written: Mapping[str, Family]) -> str:
    name = next(name for name in sorted(said.keys() | total.keys()) if said.get(name, 0) != total.get(name, 0))
    family = written.get(name) or guess_family(name)
    given, summed = (format_quantity(amounts.get(name, 0), family) for amounts in (said, total))
    return f"aggregate.{name}: {given} is not the sum of the shapes, which is {summed}; correct it or leave it out"
