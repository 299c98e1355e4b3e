"""Holds the distinct pod requests of a row of demand, and what daemons take of every node.

A row of at most `SHAPES_MAX` shapes says which requests it consists of, where an aggregate says only their sum. Shapes
stand in one canonical order, so that equal demand is equal data whatever order the pods came in.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from typing import Final

from bigfleet.model import vector
from bigfleet.model.profile import Operator, Requirement
from bigfleet.model.quantity import MILLI_MAX
from bigfleet.model.vector import Vector

#: Shapes of one row, and of its waiting pods.
SHAPES_MAX: Final = 64
#: Overheads of one cluster.
OVERHEADS_MAX: Final = 64
#: Pods of one shape and the largest limit on a machine: the wire has 64 and 32 bits, sums must stay far below.
COUNT_MAX: Final = 10**9
LIMIT_MAX: Final = 2**31 - 1

#: Leading bits that numbers of one cell share, from the finest grid to the coarsest of this kind.
_LEADING_BITS: Final = range(12, 0, -1)
#: Beyond, so many powers of two share a cell.
_POWERS: Final = (2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class DemandShape:
    """Pods of equal requests."""

    #: What each pod requests, milli-units; a dimension that is zero is absent.
    resources: Vector
    #: How many pods there are, at least 1.
    count: int
    #: Pods of this shape that one machine may host, because they exclude each other; 0 is no limit.
    max_per_machine: int = 0


@dataclass(frozen=True, slots=True)
class Overhead:
    """What DaemonSets take of every machine that holds the requirements, before any pod of the demand is placed."""

    #: Sorted and without duplicates; all must hold. None hold for every machine. Never with the operator Same.
    requirements: tuple[Requirement, ...]
    #: Milli-units.
    resources: Vector

    def __post_init__(self) -> None:
        object.__setattr__(self, "requirements", tuple(sorted(set(self.requirements))))

    def applies(self, attribute: Callable[[str], str | None]) -> bool:
        """Say whether a machine, asked for its attributes by name, has this overhead."""
        return all(requirement.holds(attribute(requirement.key)) for requirement in self.requirements)


ShapeKey = tuple[tuple[tuple[str, int], ...], int, int]


def shape_key(shape: DemandShape) -> ShapeKey:
    """Return a hashable value that is equal for equal shapes."""
    return (vector.vector_key(shape.resources), shape.max_per_machine, shape.count)


def canonical_shapes(shapes: Iterable[DemandShape]) -> tuple[DemandShape, ...]:
    """Return equal demand in one form, whatever the order of the shapes: largest first, the smaller limit first.

    "Largest" compares the requests name by name, names ascending. Shapes without a limit are joined when their requests
    are equal. Groups that exclude themselves are joined only when requests and the number of machines that they fill
    are equal, as two groups of 10 pods with limit 1 fill 10 machines, together or apart: counts and limits add up.
    Groups of 10 and 2 pods stay apart, for 12 pods with limit 2 would fit on 6 machines.
    """
    given = tuple(shapes)
    requests = [vector.vector_key(shape.resources) for shape in given]
    if all(larger > smaller for larger, smaller in pairwise(requests)):
        return given
    joined: dict[ShapeKey, list[DemandShape]] = defaultdict(list)
    for request, shape in zip(requests, given, strict=True):
        fraction = (0, 0)
        if shape.max_per_machine:
            # Groups of an equal ratio fill as many machines as their sum: each takes its part of every machine.
            divisor = gcd(shape.count, shape.max_per_machine)
            fraction = (shape.count // divisor, shape.max_per_machine // divisor)
        joined[(request, *fraction)].append(shape)
    merged = [same[0] if len(same) == 1 else _sum(same) for same in joined.values()]
    merged.sort(key=lambda shape: (shape.max_per_machine, shape.count))
    merged.sort(key=lambda shape: vector.vector_key(shape.resources), reverse=True)
    return tuple(merged)


def _sum(shapes: Sequence[DemandShape]) -> DemandShape:
    return DemandShape(
        shapes[0].resources,
        sum(shape.count for shape in shapes),
        min(LIMIT_MAX, sum(shape.max_per_machine for shape in shapes)),
    )


def total_of(shapes: Iterable[DemandShape]) -> Vector:
    """Return the sum of all pods, each dimension at most `MILLI_MAX`."""
    total: dict[str, int] = {}
    for shape in shapes:
        for name, milli in shape.resources.items():
            total[name] = min(MILLI_MAX, total.get(name, 0) + milli * shape.count)
    return total


def largest_of(shapes: Iterable[DemandShape]) -> Vector:
    """Return the largest request in each dimension."""
    largest: dict[str, int] = {}
    for shape in shapes:
        for name, milli in shape.resources.items():
            largest[name] = max(largest.get(name, 0), milli)
    return largest


def missing_in(shapes: Sequence[DemandShape], aggregate: Vector) -> tuple[str, int, int] | None:
    """Return the first dimension, names ascending, in which shapes and aggregate contradict each other, with both sums.

    The shapes of a row may add up to more than its aggregate, because requests are rounded up when there are more than
    `SHAPES_MAX` of them. They never add up to less, and rounding makes nothing of a dimension that no pod requests.
    """
    total = total_of(shapes)
    for name in sorted(total.keys() | aggregate.keys()):
        said, sum_milli = min(aggregate.get(name, 0), MILLI_MAX), total.get(name, 0)
        if sum_milli < said or not said:
            return name, sum_milli, said
    return None


# ---- fewer shapes ------------------------------------------------------------------------------------------------


def merged_upwards(shapes: Iterable[DemandShape], shapes_max: int = SHAPES_MAX) -> tuple[DemandShape, ...]:
    """Return at most so many shapes, in canonical order, such that what hosts these can host the given ones.

    Shapes in one cell of a grid become one shape that requests, in each dimension, the largest request in the cell. The
    grid is made coarser until few enough remain. Groups that exclude themselves are rounded up to as many pods as fill
    the machines of the largest group in the cell. Up to `shapes_max` shapes, which is at least 2, are returned as they
    are.
    """
    exact = canonical_shapes(shapes)
    if len(exact) <= shapes_max:
        return exact
    cells: list[Callable[[int], object]] = [_leading(bits) for bits in _LEADING_BITS]
    cells += [_powers(powers) for powers in _POWERS]
    for cell in cells:
        # Groups of equal requests and nearly equal counts first: joining them leaves every request as it is.
        for resource_cell in (_same, cell):
            merged = _merged_by(exact, resource_cell, cell)
            if len(merged) <= shapes_max:
                return merged
    # Only shapes that name other dimensions are left apart.
    everything = _merged_by(exact, None, _any)
    assert len(everything) <= shapes_max, "one cell with a limit and one without remain"
    return everything


def _same(milli: int) -> object:
    return milli


def _any(_number: int) -> object:
    return None


def _leading(bits: int) -> Callable[[int], object]:
    """Put numbers into one cell that have the same size and the same leading bits."""

    def cell(number: int) -> object:
        size = number.bit_length()
        return (size, number >> max(0, size - bits))

    return cell


def _powers(powers: int) -> Callable[[int], object]:
    def cell(number: int) -> object:
        return number.bit_length() // powers

    return cell


def _merged_by(
    shapes: Sequence[DemandShape],
    resource_cell: Callable[[int], object] | None,
    count_cell: Callable[[int], object],
) -> tuple[DemandShape, ...]:
    """Join the shapes of each cell; without a cell for resources all requests are in one, whatever they name."""
    joined: dict[object, list[DemandShape]] = defaultdict(list)
    for shape in shapes:
        resources: object = None
        if resource_cell is not None:
            resources = tuple((name, resource_cell(milli)) for name, milli in vector.vector_key(shape.resources))
        filled = count_cell(_machines_filled(shape)) if shape.max_per_machine else None
        joined[(resources, bool(shape.max_per_machine), filled)].append(shape)
    return canonical_shapes(same[0] if len(same) == 1 else _rounded_up(same) for same in joined.values())


def _rounded_up(shapes: Sequence[DemandShape]) -> DemandShape:
    largest = largest_of(shapes)
    if not shapes[0].max_per_machine:
        return DemandShape(largest, sum(shape.count for shape in shapes))
    limit = sum(shape.max_per_machine for shape in shapes)
    return DemandShape(largest, max(map(_machines_filled, shapes)) * limit, min(LIMIT_MAX, limit))


def _machines_filled(shape: DemandShape) -> int:
    """Return on how many machines a group that excludes itself stands at least."""
    return -(-shape.count // shape.max_per_machine)


# ---- overheads ---------------------------------------------------------------------------------------------------


def canonical_overheads(overheads: Iterable[Overhead]) -> tuple[Overhead, ...]:
    """Return equal overheads in one form: those of equal requirements added up, none without resources.

    They are sorted by their requirements.
    """
    sums: dict[tuple[Requirement, ...], Vector] = {}
    for overhead in overheads:
        sums[overhead.requirements] = vector.add(sums.get(overhead.requirements, vector.ZERO), overhead.resources)
    return tuple(Overhead(requirements, resources) for requirements, resources in sorted(sums.items()) if resources)


def overhead_fault(requirements: Iterable[Requirement]) -> str | None:
    """Return what is wrong with the requirements of an overhead, None for nothing."""
    for requirement in requirements:
        if requirement.operator is Operator.SAME:
            return "has the operator Same, which says nothing about one machine"
    return None
