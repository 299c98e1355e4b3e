"""Defines what the planner answers: a target composition with its packing, its price and what it cannot host."""

from dataclasses import dataclass
from enum import Enum


class UnhostedReason(Enum):
    """Why pods are not part of the composition."""

    #: No class matches the row, or none that it may claim.
    NO_CLASS_MATCHES = "no_class_matches"
    #: No matching class is large enough in one dimension.
    REQUEST_TOO_LARGE = "request_too_large"
    #: The classes that could host them have no machine left.
    OUT_OF_STOCK = "out_of_stock"
    #: No single domain can hold the whole gang.
    NO_DOMAIN_HOLDS_GANG = "no_domain_holds_gang"
    #: A domain of the strict spread can host too few pods, and so holds the others down.
    SPREAD_HOLDS_BACK = "spread_holds_back"


@dataclass(frozen=True, slots=True)
class Unhosted:
    """Pods of one shape that the composition does not host."""

    #: Position in the problem's shapes.
    shape: int
    count: int
    reason: UnhostedReason
    #: For a request that is too large: its dimension, what it wants, and the most that a matching class has.
    dimension: str = ""
    wanted: int = 0
    largest: int = 0


@dataclass(frozen=True, slots=True, order=True)
class ShapeAssignment:
    """Pods of one shape on a run of machines of one class.

    Machines of a class are numbered from 0: first those that are retained, then those that are added. Each of the
    machines `first` to `first + machines - 1` hosts `count` pods of the shape.
    """

    #: Position in the problem's classes.
    machine_class: int
    first: int
    machines: int
    #: Position in the problem's shapes.
    shape: int
    count: int


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """The best composition that another type leads."""

    #: Key of the class with the largest part of the cost.
    leader: str
    #: How much more it costs than the composition, nano-dollars per hour, lost pods completed in both.
    costs_more: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """The machines that a cluster should hold."""

    #: Held machines that stay, by class.
    retained: tuple[int, ...]
    #: Machines to acquire, by class.
    added: tuple[int, ...]
    #: Which pods each machine hosts, sorted; together they host every pod that is not in `unhosted`.
    claims: tuple[ShapeAssignment, ...]
    unhosted: tuple[Unhosted, ...]
    #: Price of retained and added machines and expected interruptions of the claims, nano-dollars per hour.
    cost: int
    #: Expected pods without a place in the scheduler's order, in thousandths of a pod.
    lost_millipods: int
    #: Key of the class with the largest part of the cost; empty for an empty composition.
    leader: str
    #: None where no composition with another leader was found.
    runner_up: RunnerUp | None
    #: Pods placed in simulations, over all fleets and orders: the effort spent.
    steps: int
    #: Pools that would provide more than `pool_percent_max` without the limit, sorted.
    limited_pools: tuple[str, ...] = ()

    @property
    def counts(self) -> tuple[int, ...]:
        """Machines by class, retained and added."""
        return tuple(retained + added for retained, added in zip(self.retained, self.added, strict=True))
