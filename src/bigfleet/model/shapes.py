"""Holds the distinct pod requests of a row of demand, and what daemons take of every node.

A row of at most `SHAPES_MAX` shapes says which requests it consists of, where an aggregate says only their sum. Shapes
stand in one canonical order, so that equal demand is equal data for any order of pods.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count, pairwise
from math import gcd
from types import MappingProxyType
from typing import Final

from bigfleet.model import vector
from bigfleet.model.profile import Operator, Requirement
from bigfleet.model.quantity import MILLI_MAX
from bigfleet.model.vector import Vector

#: Shapes of one row, and of its waiting pods.
SHAPES_MAX: Final = 64
#: Overheads of one cluster.
OVERHEADS_MAX: Final = 64
#: The resource of which every pod takes one, and what stands for a pod that requests nothing.
PODS: Final = "pods"
_ONE_POD: Final[Vector] = MappingProxyType({PODS: 1000})
#: Pods of one shape and the largest limit on a machine: the wire has 64 and 32 bits, sums must stay far below.
COUNT_MAX: Final = 10**9
LIMIT_MAX: Final = 2**31 - 1

#: More shapes than these are joined on a grid before they are cut into cells, which takes some tens of milliseconds.
_CUT_MAX: Final = 512
#: Leading bits that numbers of one cell of that grid share, from the finest grid to the coarsest.
_LEADING_BITS: Final = range(12, 0, -1)
#: Of shares that are stored as integers.
_SCALE: Final = 1 << 40


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
        """Return whether a machine, asked for its attributes by name, has this overhead."""
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


def lacking_of(pods: Iterable[tuple[Vector, int]]) -> Vector:
    """Return what pods without a place request, of (request, pods); pods that request nothing count as `pods`."""
    return vector.sum_of([(request or _ONE_POD, number) for request, number in pods])


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

    Shapes of one cell become one shape that requests, in each dimension, the largest request of the cell. Groups that
    exclude themselves are first rounded up to as many pods as fill the machines of the largest group of the cell. All
    shapes begin in one cell for each set of dimensions; the cut that saves most of what rounding adds is made until
    there are `shapes_max` cells, which is at least 2. Up to so many shapes are returned as they are.
    """
    exact = canonical_shapes(shapes)
    if len(exact) <= shapes_max:
        return exact
    few = _gridded(exact)
    groups: dict[object, list[DemandShape]] = defaultdict(list)
    for shape in few:
        groups[(bool(shape.max_per_machine), frozenset(shape.resources))].append(shape)
    if len(groups) > shapes_max:
        # So many sets of dimensions that pods must be given what they do not ask for.
        groups = defaultdict(list)
        for shape in few:
            groups[bool(shape.max_per_machine)].append(shape)
    totals = {name: milli for name, milli in total_of(few).items() if milli}
    pods = sum(shape.count for shape in few)
    # Largest saving first; the number orders equal savings.
    cells = [_Cell(each, totals, pods) for each in groups.values()]
    waiting = [(-cell.saving, number, cell) for number, cell in enumerate(cells)]
    heapify(waiting)
    numbers = count(len(waiting))
    while len(waiting) < shapes_max:
        saving, number, cell = heappop(waiting)
        if not saving:
            heappush(waiting, (saving, number, cell))
            break
        for part in cell.parts:
            half = _Cell(part, totals, pods)
            heappush(waiting, (-half.saving, next(numbers), half))
    return canonical_shapes(_rounded_up(cell.shapes) for _saving, _number, cell in waiting)


class _Cell:
    """Shapes that become one, and the best cut through them."""

    __slots__ = ("parts", "saving", "shapes")

    def __init__(self, shapes: Sequence[DemandShape], totals: Vector, pods: int) -> None:
        self.shapes = shapes
        #: What the cut saves of that which rounding adds, as a share of the row's total in each dimension.
        self.saving = 0
        self.parts: tuple[Sequence[DemandShape], Sequence[DemandShape]] = (shapes, ())
        if len(shapes) < 2:
            return
        orders: list[Callable[[DemandShape], int]] = [
            lambda shape, name=name: shape.resources.get(name, 0)  # type: ignore[misc]
            for name in sorted({name for shape in shapes for name in shape.resources})
        ]
        if shapes[0].max_per_machine:
            orders.append(_machines_filled)
        for order in orders:
            line = sorted(shapes, key=order)
            before = _added(line, totals, pods)
            behind = _added(line[::-1], totals, pods)
            for cut in range(1, len(line)):
                saving = before[-1] - before[cut - 1] - behind[len(line) - cut - 1]
                if saving > self.saving:
                    self.saving, self.parts = saving, (line[:cut], line[cut:])


def _added(line: Sequence[DemandShape], totals: Vector, pods: int) -> list[int]:
    """Return what rounding adds when the first shapes become one, for each number of them from 1 on."""
    largest: dict[str, int] = {}
    sums: dict[str, int] = {}
    filled = limit = asked = 0
    added = []
    for shape in line:
        asked += shape.count
        limit += shape.max_per_machine
        if shape.max_per_machine:
            filled = max(filled, _machines_filled(shape))
        for name, milli in shape.resources.items():
            largest[name] = max(largest.get(name, 0), milli)
            sums[name] = sums.get(name, 0) + milli * shape.count
        rounded = filled * limit if limit else asked
        share = (rounded - asked) * _SCALE // pods
        for name, milli in largest.items():
            share += (milli * rounded - sums[name]) * _SCALE // totals[name]
        added.append(share)
    return added


def _gridded(shapes: Sequence[DemandShape]) -> Sequence[DemandShape]:
    """Join shapes whose numbers share their leading bits, as few of these as leave few enough shapes to cut well."""
    for bits in _LEADING_BITS:
        if len(shapes) <= _CUT_MAX:
            break
        joined: dict[object, list[DemandShape]] = defaultdict(list)
        for shape in shapes:
            requests = tuple((name, _leading(milli, bits)) for name, milli in vector.vector_key(shape.resources))
            filled = _leading(_machines_filled(shape), bits) if shape.max_per_machine else None
            joined[(requests, filled)].append(shape)
        shapes = [_rounded_up(same) for same in joined.values()]
    return shapes


def _leading(number: int, bits: int) -> tuple[int, int]:
    """Return what numbers share that have the same size and the same leading bits."""
    size = number.bit_length()
    return (size, number >> max(0, size - bits))


def _rounded_up(shapes: Sequence[DemandShape]) -> DemandShape:
    if len(shapes) == 1:
        return shapes[0]
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
