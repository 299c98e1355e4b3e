"""Defines what the planner is asked: a cluster's shapes, the machine classes on offer, and the scheduler's order.

Quantities are integers in the caller's units, one entry per dimension. Money is integer nano-dollars per hour, an
interruption penalty integer nano-dollars, a probability integer parts per billion per hour. No value is a float, so
equal problems give equal answers in every process.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final

#: One dollar.
NANO: Final = 1_000_000_000
#: A probability of 1.
BILLION: Final = 1_000_000_000
#: Largest price or count that the arithmetic carries without overflow; of `pods` it stands for no limit.
QUANTITY_MAX: Final = 1 << 55
#: Largest amount of a resource. Amounts above QUANTITY_MAX are counted in larger units.
AMOUNT_MAX: Final = 1 << 62
PODS_MAX: Final = 1 << 19


class ProblemFault(Exception):
    """A problem that cannot be planned; the message names the place, the value and what to do."""


class SchedulerOrder(Enum):
    """Which scoring strategy of kube-scheduler's NodeResourcesFit places the pods."""

    LEAST_ALLOCATED = "least-allocated"
    MOST_ALLOCATED = "most-allocated"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """How one cluster is planned."""

    order: SchedulerOrder = SchedulerOrder.LEAST_ALLOCATED
    #: Percent of a cluster's supply that one Spot pool (instance type and zone) may provide; 0 is no limit.
    spot_pool_percent_max: int = 50


@dataclass(frozen=True, slots=True)
class PlannerSpread:
    """A strict topology spread: pods per value of `key` differ by at most `skew`."""

    key: str
    skew: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineClass:
    """Machines that are equal in everything that the planner looks at.

    `key` identifies the class and orders it among equals: ids differ, and equal keys mean equal classes in any process.
    """

    key: str
    #: What pods may use: allocatable less overheads, by dimension.
    supply: tuple[int, ...]
    #: What the scheduler's score divides by; empty means `supply`.
    allocatable: tuple[int, ...] = ()
    #: What one more machine costs; 0 for a machine that is paid for anyway.
    cost: int
    #: Machines that the cluster holds.
    held: int = 0
    #: What keeping one of them costs.
    held_cost: int = 0
    #: How full each held machine is, in thousandths; empty means all alike. The fuller ones are kept.
    held_use: tuple[int, ...] = ()
    #: How many more can be had; None is no limit.
    stock: int | None = None
    #: Interruptions per hour, in parts per billion.
    probability: int = 0
    #: Value by topology key, for the keys that gangs and spreads name.
    domains: tuple[tuple[str, str], ...] = ()
    #: Machines with equal names here are interrupted together; empty for those that no limit concerns.
    pool: str = ""

    def domain(self, key: str) -> str | None:
        """Return the value of a topology key, or None for a class without it."""
        return next((value for name, value in self.domains if name == key), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerShape:
    """Pods of one request in one row of demand."""

    #: Position of the row in the caller's list; shapes of one row share it.
    row: int
    #: By dimension; a pod takes one of `pods` where that is a dimension.
    request: tuple[int, ...]
    count: int
    #: Bit i is set where class i matches the row's profile (see `mask_of`).
    matches: int
    #: Precedence of the row: 0 is served first when stock is short.
    rank: int = 0
    #: Place in the scheduler's queue: pods of a higher priority are scheduled first.
    priority: int = 0
    #: Pods of the shape that one machine may host; 0 is no limit.
    max_per_machine: int = 0
    #: Cost of one interruption of a machine that the shape fills.
    penalty: int = 0
    #: The row never claims a machine that may be interrupted.
    is_pinned: bool = False
    #: All shapes with the same gang id run in one value of `same_key`, all of them or none.
    gang: str = ""
    same_key: str = ""
    spread: PlannerSpread | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One cluster's demand and what it may run on."""

    dimensions: tuple[str, ...]
    classes: tuple[MachineClass, ...]
    shapes: tuple[PlannerShape, ...]
    order: SchedulerOrder = SchedulerOrder.LEAST_ALLOCATED
    #: Dimensions by which the scheduler scores machines; those absent from `dimensions` are ignored.
    scored: tuple[str, ...] = ("cpu", "memory")
    #: Whether held machines may be exchanged for others. Without it what is held stays while it is needed.
    may_exchange: bool = False
    #: Percent of the supply that one pool may provide for pods with a penalty; 0 is no limit.
    pool_percent_max: int = 0

    @property
    def pods(self) -> int:
        """Number of pods."""
        return sum(shape.count for shape in self.shapes)

    def validate(self) -> None:
        """Raise ProblemFault naming the first value that cannot be planned with."""
        width = len(self.dimensions)
        if len(set(self.dimensions)) != width:
            raise ProblemFault(f"dimensions {self.dimensions!r}: a name occurs twice; name each dimension once")
        seen: set[str] = set()
        for place, kind in enumerate(self.classes):
            _check_class(f"classes[{place}] ({kind.key})", kind, width)
            if kind.key in seen:
                raise ProblemFault(f"classes[{place}].key: {kind.key!r} occurs twice; keys must differ")
            seen.add(kind.key)
        for place, shape in enumerate(self.shapes):
            _check_shape(f"shapes[{place}] (row {shape.row})", shape, width, len(self.classes))
        if not 0 <= self.pool_percent_max <= 100:
            raise ProblemFault(f"pool_percent_max: {self.pool_percent_max} is out of range; use 0 to 100")
        if self.pods > PODS_MAX:
            raise ProblemFault(f"shapes: {self.pods} pods; a cluster may have {PODS_MAX}")


def mask_of(classes: Iterable[int]) -> int:
    """Return the bit mask with the bits of these class positions set."""
    mask = 0
    for position in classes:
        mask |= 1 << position
    return mask


def _check_class(place: str, kind: MachineClass, width: int) -> None:
    if len(kind.supply) != width or len(kind.allocatable) not in (0, width):
        raise ProblemFault(f"{place}: supply and allocatable need {width} entries, one per dimension")
    _check_range(f"{place}.supply", min(kind.supply, default=0), max(kind.supply, default=0), AMOUNT_MAX)
    _check_range(f"{place}.allocatable", min(kind.allocatable, default=0), max(kind.allocatable, default=0), AMOUNT_MAX)
    stock = 0 if kind.stock is None else kind.stock
    numbers = (kind.cost, kind.held, kind.held_cost, stock, kind.probability)
    _check_range(f"{place}: cost, held, held_cost, stock or probability", min(numbers), max(numbers))
    if len(kind.held_use) not in (0, kind.held):
        raise ProblemFault(
            f"{place}.held_use: {len(kind.held_use)} entries for {kind.held} held machines; give one each"
        )
    if kind.held > PODS_MAX:
        raise ProblemFault(f"{place}.held: {kind.held}; a class may hold {PODS_MAX} machines")


def _check_shape(place: str, shape: PlannerShape, width: int, classes: int) -> None:
    if len(shape.request) != width:
        raise ProblemFault(
            f"{place}.request: {len(shape.request)} entries; give one for each of the {width} dimensions"
        )
    _check_range(f"{place}.request", min(shape.request, default=0), max(shape.request, default=0), AMOUNT_MAX)
    numbers = (shape.count, shape.rank, shape.max_per_machine, shape.penalty)
    _check_range(f"{place}: count, rank, max_per_machine or penalty", min(numbers), max(numbers))
    if shape.matches < 0 or shape.matches >> classes:
        raise ProblemFault(f"{place}.matches: a bit above the last of {classes} classes is set; use mask_of")
    if bool(shape.gang) != bool(shape.same_key):
        raise ProblemFault(f"{place}: gang {shape.gang!r} with same_key {shape.same_key!r}; give both or neither")
    if shape.spread is not None and shape.spread.skew < 1:
        raise ProblemFault(f"{place}.spread.skew: {shape.spread.skew}; it must be at least 1")


def _check_range(place: str, least: int, most: int, limit: int = QUANTITY_MAX) -> None:
    if least < 0 or most > limit:
        value = least if least < 0 else most
        raise ProblemFault(f"{place}: {value} is out of range; use 0 to {limit}")
