"""Holds the working state of one decision: rows, pod groups, hosts and offers.

Everything here lives for one call of `decide` and is thrown away with it. Quantities are integers in milli-units,
indexed by the dimensions of the call. This module does not choose a machine.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final, NamedTuple, Protocol

from bigfleet.engine.decision import CapacityPool, RowResult, WithheldPools
from bigfleet.engine.targets import ClassKey
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need
from bigfleet.model.penalty import bucket_upper_dollars
from bigfleet.model.profile import TopologySpread
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.model.vector import Vector

#: The resource of which every pod takes one.
PODS: Final = "pods"
#: One pod, in milli-units.
ONE_POD: Final = 1000
#: Room of a machine in the dimension `pods` when it declares none.
UNLIMITED: Final = 1 << 200
#: Milli-units beyond what any machine has; columns have 64 bits. A request of more counts as this, and fits no machine;
#: a machine that offers as much counts as having one less.
BEYOND: Final = 1 << 62

#: (dimension, milli-units) of each dimension that is positive, dimensions ascending.
Request = tuple[tuple[int, int], ...]
Room = list[int]


class Dimensions:
    """Numbers the resource names of one call in name order; the last number is `pods`."""

    def __init__(self, vectors: Iterable[Vector]) -> None:
        """Number every name that occurs in the vectors."""
        names: set[str] = set().union(*vectors)
        self.names: tuple[str, ...] = (*sorted(names - {PODS}), PODS)
        self._index = {name: number for number, name in enumerate(self.names)}
        self.pods = len(self.names) - 1

    def request(self, amounts: Vector) -> Request:
        """Return the positive dimensions of a vector."""
        return tuple(sorted((self._index[name], milli) for name, milli in amounts.items()))

    def room(self, supply: Vector, overhead: Vector) -> Room:
        """Return what is left of a supply after an overhead, 0 at least; no `pods` declared is no limit."""
        room = [max(0, supply.get(name, 0) - overhead.get(name, 0)) for name in self.names]
        if PODS not in supply:
            room[self.pods] = UNLIMITED
        return room

    def vector(self, amounts: Iterable[tuple[int, int]]) -> Vector:
        """Return the vector of (dimension, milli-units) pairs; `pods` is left out."""
        return {self.names[number]: milli for number, milli in amounts if number != self.pods and milli > 0}


@dataclass(slots=True, eq=False, kw_only=True)
class PodGroup:
    """Equal pods of one row."""

    row: "RowState"
    #: Place in the row's shapes; waiting shapes are numbered after the others.
    index: int
    #: What one pod requests, `pods` included.
    request: Request
    count: int
    #: Most pods of the group on one machine; 0 is no limit.
    limit: int
    #: Extra demand of pods that the scheduler could not place: hosted by machines that have not joined yet.
    is_waiting: bool = False
    #: Largest share of the largest machine's supply that one pod takes; sorts groups, largest first.
    size: float = 0.0
    #: Pods that have no place yet.
    left: int


class Impossible(NamedTuple):
    """Why no known machine can host a pod."""

    #: None for the smallest machine that a row without shapes accepts.
    group: PodGroup | None
    #: The dimension that lacks; "" when no machine matches the profile.
    dimension: str
    wanted: int
    #: The largest supply of a machine that matches, less overheads.
    largest: int


@dataclass(slots=True, eq=False, kw_only=True)
class HostState:
    """One machine as its cluster sees it: what it offers, what is left of it, and who takes the rest."""

    machine: Machine
    #: Number of the machine's shape (`Shapes.of`).
    shape: int
    #: Supply less the cluster's overheads.
    total: Room
    room: Room
    claims: dict[PodGroup, int] = field(default_factory=dict)
    #: What rows without shapes take, by dimension.
    shares: dict["RowState", dict[int, int]] = field(default_factory=dict)
    #: Whether the target composition of the cluster keeps this machine also when nothing claims it.
    is_target: bool = False
    #: Where the machine was acquired from in this decision; None for what the cluster held before.
    offer: "OfferState | None" = None

    @property
    def is_claimed(self) -> bool:
        """Return whether any row takes a part of the machine."""
        return bool(self.claims or self.shares)

    @property
    def is_configured(self) -> bool:
        """Return whether the machine serves its cluster already."""
        return self.machine.state is MachineState.CONFIGURED

    def rows(self) -> set["RowState"]:
        """Return the rows that take a part of the machine."""
        return {group.row for group in self.claims} | set(self.shares)


@dataclass(slots=True, eq=False, kw_only=True)
class RowState:
    """One row of demand on its way through the phases."""

    need: Need
    #: Place in the demand, from 0.
    position: int
    #: Place in processing order, from 0.
    rank: int = 0
    cluster: "ClusterState"
    #: Shapes of machines that the row may use: the profile matches; of a Same row, those of its domain.
    matching: frozenset[int]
    #: In canonical order: size descending, then index.
    groups: list[PodGroup] = field(default_factory=list)
    #: A row without shapes: what is not covered yet, by dimension; None for a row with shapes.
    divisible: dict[int, int] | None = None
    #: A row without shapes: what a machine must have room for to be counted.
    unit: Request = ()
    domain: str | None = None
    is_satisfiable: bool = True
    #: Values of the strict spread's key that count as empty domains: those of the offers, when nothing of the row runs.
    spread_domains: tuple[str, ...] = ()
    #: Set aside: no known machine can host one pod.
    impossible: list["Impossible"] = field(default_factory=list)
    #: A gang: whether it has pods and its domain hosts them all on what the cluster holds; True for other rows.
    is_held: bool = True
    #: Short of something after Phase 1.
    is_short: bool = False
    #: Machines that drain for the row, and machines that are preempted for it.
    coming: list[Machine] = field(default_factory=list)
    victims: list[Machine] = field(default_factory=list)
    #: The key whose value all pods of the row share; None for none.
    same_key: str | None = field(init=False)
    #: The profile's strict spread; None for none.
    spread: TopologySpread | None = field(init=False)
    #: The upper bound of the row's interruption bucket; infinite when pinned.
    penalty_dollars: float = field(init=False)

    def __post_init__(self) -> None:
        # Derived once: these are asked for every pair of a row and a machine.
        profile = self.need.profile
        self.same_key = profile.same_key
        self.spread = profile.strict_spread if profile.spreads else None
        self.penalty_dollars = bucket_upper_dollars(profile.interruption_bucket)

    @property
    def is_pinned(self) -> bool:
        """Return whether the row uses nothing that can be interrupted."""
        return self.penalty_dollars == math.inf

    @property
    def has_left(self) -> bool:
        """Return whether some of the row's demand has no place."""
        for group in self.groups:
            if group.left:
                return True
        return bool(self.divisible)

    @property
    def may_acquire(self) -> bool:
        """Return whether the row may take machines that its cluster does not hold yet."""
        return self.may_preempt and not (self.same_key is not None and self.domain is None)

    @property
    def may_preempt(self) -> bool:
        """Return whether the row may look for victims; a gang without a domain may, but acquires nothing."""
        if self.impossible and (self.divisible is not None or self.same_key is not None):
            # Nothing is bought for a row that only one machine could serve, nor for a gang that can never run whole.
            return False
        if self.cluster.awaits_plan:
            return False
        return not self.need.parked

    def may_use(self, machine: Machine, shape: int) -> bool:
        """Return whether the profile allows the machine, and the cluster may have it.

        A pinned row uses nothing that can be interrupted.
        """
        if shape not in self.matching or (machine.interruption_probability > 0 and self.penalty_dollars == math.inf):
            return False
        return self.cluster.withheld is None or self.cluster.may_have(machine)


class LeastRoom(NamedTuple):
    """A room that every host of some pods has at least, in two dimensions."""

    dimension: int
    milli: int
    other: int
    other_milli: int

    def is_in(self, room: Room) -> bool:
        """Return whether the room has this; without it, no such pod fits."""
        return room[self.dimension] >= self.milli and room[self.other] >= self.other_milli


@dataclass(slots=True, eq=False)
class HeldDomain:
    """The hosts of one domain that some rows may use, in hosting order; full ones may have been dropped."""

    hosts: list[HostState]
    #: The place before which all of them are full.
    first: int = 0


#: Which machines gangs may use: their shapes, whether none may be interrupted, and the key of the domains.
GangAccess = tuple[frozenset[int], bool, str]


@dataclass(slots=True, eq=False)
class HostIndex:
    """Finds a cluster's machines."""

    #: Machines of the cluster when this was made.
    size: int
    #: By shape: (place in hosting order, host).
    by_shape: dict[int, list[tuple[int, HostState]]] = field(default_factory=dict)
    #: By some shapes, in hosting order.
    by_shapes: dict[frozenset[int], list[HostState]] = field(default_factory=dict)
    #: By the machines that gangs may use: their domains, and the least room that is of use to any of them.
    domains: dict[GangAccess, dict[str, HeldDomain]] = field(default_factory=dict)
    least: dict[GangAccess, LeastRoom] = field(default_factory=dict)
    #: By (fingerprint, group) of the stamp, in hosting order.
    by_stamp: dict[tuple[str, str], list[HostState]] = field(default_factory=dict)


class ClaimLoss(NamedTuple):
    """Sort key of what preempting a unit, or a set of units, destroys; the least is chosen."""

    priority_class: int
    penalty_dollars: float
    priority: int
    #: Supply that becomes free, as the sum over the dimensions of its share of the largest Configured machine.
    supply: float
    id: str


@dataclass(frozen=True, slots=True)
class Unit:
    """Machines that are preempted together: one machine, and all machines of every gang on it."""

    hosts: tuple[HostState, ...]
    loss: ClaimLoss


@dataclass(slots=True, eq=False)
class UnitsOfShapes:
    """The units of one cluster that consist of machines of some shapes."""

    #: The machines of each unit, by id.
    hosts: list[tuple[HostState, ...]] = field(default_factory=list)
    #: The least loss first, and the lowest priority that protects any; found when a row looks for victims among them.
    units: list[Unit] | None = None
    lowest: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class ClusterUnits:
    """The Configured machines of one cluster in units; none of its claims may change as long as this is used."""

    hosts: Sequence[HostState]
    #: The rows of the cluster, if it has a target composition.
    rows: Sequence["RowState"] = ()
    #: Largest supply of the machines, less overheads, by dimension.
    largest: Sequence[int]
    #: What the order by loss depends on beside the claims: the largest supply of all clusters, and whether this one
    #: has reported.
    basis: tuple[tuple[int, ...], bool] | None = None
    #: By each of their shapes.
    by_shape: dict[int, list[UnitsOfShapes]] = field(default_factory=dict)


class ClusterClaims(Protocol):
    """The claims of one cluster that was credited on columns of machines."""

    def hosts(self) -> list[HostState]:
        """Make the cluster's hosts in hosting order, with their claims."""
        ...

    def rows(self) -> list["RowState"]:
        """Make the cluster's rows in processing order, with what has no place."""
        ...

    @property
    def has_left(self) -> bool:
        """Return whether some of the cluster's pods have no place."""
        ...

    @property
    def has_impossible(self) -> bool:
        """Return whether pods of the cluster were set aside."""
        ...

    def unclaimed(self) -> Sequence[MachineId]:
        """Return the Configured machines of the cluster that nothing claims, in keep-priority order."""
        ...

    def results(self) -> Sequence[RowResult]:
        """Return the results of the rows in list order; all pods of the cluster have a place."""
        ...


@dataclass(slots=True, eq=False, kw_only=True)
class ClusterState:
    """What one cluster holds and wants in this decision."""

    id: str
    #: Its rows in list order, with their places in the demand.
    needs: Sequence[tuple[int, Need]] = ()
    #: What is claimed on columns of machines; None where the rows and hosts alone have the claims.
    claims: "ClusterClaims | None" = None
    _rows: list[RowState] | None = None
    _hosts: list[HostState] | None = None
    #: Acquired in this decision, in order.
    acquired: list[HostState] = field(default_factory=list)
    #: By (class, number): what the target composition has on each machine, and the machine where the cluster has it.
    planned: dict[tuple[ClassKey, int], list[tuple[PodGroup, int]]] = field(default_factory=dict)
    #: By row: the numbers on which pods of it are planned, in the order of `planned`.
    planned_for: dict[RowState, list[tuple[ClassKey, int]]] = field(default_factory=dict)
    numbered: dict[tuple[ClassKey, int], HostState] = field(default_factory=dict)
    #: What its rows with shapes request in all, by dimension; found when machines are put in hosting order.
    wanted: dict[int, int] | None = None
    #: Made when gangs are credited.
    index: HostIndex | None = None
    #: Made when a row of another cluster looks for victims.
    units: ClusterUnits | None = None
    #: Whether it takes no new machines until its target composition is there.
    awaits_plan: bool = False
    #: Pools of which the cluster acquires nothing; None for none.
    withheld: WithheldPools | None = None
    #: Whether everything had a place on what the cluster holds.
    is_credited: bool = False
    #: Whether machines in creation whose cluster is not known count for it.
    has_orphans: bool = False
    #: Numbers of machines that cannot be had.
    unavailable: set[tuple[ClassKey, int]] = field(default_factory=set)
    #: Known shapes of machines when what cannot be hosted was last set aside; only saves work.
    known: frozenset[int] | None = None

    @property
    def rows(self) -> list[RowState]:
        """Return the rows in processing order; those of a cluster that was credited on columns are made when read."""
        if self._rows is None:
            self._rows = [] if self.claims is None else self.claims.rows()
        return self._rows

    @property
    def hosts(self) -> list[HostState]:
        """Bound and coming machines in hosting order, then those that were acquired in this decision."""
        if self._hosts is None:
            self._hosts = [] if self.claims is None else self.claims.hosts()
        return self._hosts

    def may_have(self, machine: Machine) -> bool:
        """Return whether the cluster holds the machine, or its pool is not withheld from it."""
        if self.withheld is None or machine.cluster == self.id or machine.state is MachineState.CREATING:
            return True
        return not self.withheld.hides(machine)

    def may_plan_with(self, machine: Machine) -> bool:
        """Return whether a composition may count on the machine: its pool is not withheld, and it is no probe."""
        return self.withheld is None or CapacityPool.of(machine) not in self.withheld.pools

    def leave_columns(self) -> None:
        """Have the claims in `hosts` alone, because they are about to change."""
        assert self.rows is self._rows, "the rows are made"
        assert self.hosts is self._hosts, "the hosts are made"
        self.claims = None


@dataclass(frozen=True, slots=True)
class Searched:
    """What a search of a small cluster found."""

    #: Pods of each group that can be served together with those of the groups before it.
    accepted: list[int]
    #: (number of the group, pods by host).
    placed: list[tuple[int, list[int]]]


@dataclass(frozen=True, slots=True)
class DomainVerdict:
    """What a domain offers a gang."""

    hosts_something: bool
    #: Share of the gang that has a place, negative; 0 for the whole gang.
    lacking: Fraction
    #: Shares on what the cluster holds and on the gang's own machines, negative.
    held: Fraction
    own: Fraction
    #: What the machines to acquire cost, dollars an hour.
    cost: float
    #: (place of the offer among those of the domain, machines).
    wanted: Sequence[tuple[int, int]]
    #: What the choice among offers depends on beside them; None where there was no choice.
    weights: tuple[float, ...] | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class OfferState:
    """Machines that are alike in everything a choice looks at; Idle or Speculative."""

    example: Machine
    shape: int
    #: Equal numbers in decisions that share verdicts mean equal offers with the same first machine.
    number: int = 0
    #: Ids ascending; never changed.
    machines: Sequence[Machine]
    #: Machines at the end that gangs count on, by the row's position; they hide machines from other gangs' domains
    #: only.
    earmarked: int = 0
    #: Place of the first machine that was never taken, and the places of those given back before it, ascending.
    _next: int = 0
    _returned: list[int] = field(default_factory=list)
    _size: int = field(init=False)
    #: What the machines have in common beside their shape.
    terms: tuple[MachineState, CapacityType, float, float] = field(init=False)

    def __post_init__(self) -> None:
        self._size, machine = len(self.machines), self.example
        terms = (machine.capacity_type, machine.price_usd_per_hour, machine.interruption_probability)
        self.terms = (machine.state, *terms)

    @property
    def available(self) -> int:
        """Return how many machines are left."""
        return self._size - self._next + len(self._returned)

    @property
    def has_returned(self) -> bool:
        """Return whether machines are available that were taken and given back."""
        return bool(self._returned)

    @property
    def state(self) -> MachineState:
        """Return the state of the offer's machines."""
        return self.example.state

    def peek(self, number: int = 0) -> Machine:
        """Return the machine that would be taken after `number` others; there must be so many."""
        if number < len(self._returned):
            return self.machines[self._returned[number]]
        return self.machines[self._next + number - len(self._returned)]

    def take(self) -> Machine:
        """Remove the machine with the lowest id and return it."""
        if self._returned:
            return self.machines[self._returned.pop(0)]
        self._next += 1
        return self.machines[self._next - 1]

    def give_back(self, machine: Machine) -> None:
        """Make a machine that was taken available again."""
        place = bisect_left(self.machines, machine.id, hi=self._next, key=lambda m: m.id)
        insort(self._returned, place)


def largest(rooms: Iterable[Room], dimensions: int) -> list[int]:
    """Return the largest room of each dimension; 0 where there is none."""
    most = [0] * dimensions
    for room in rooms:
        most = [max(a, b) for a, b in zip(most, room, strict=True)]
    return most


def dominant_share(request: Request, most: Sequence[int], pods: int) -> float:
    """Return the largest request ÷ most over the dimensions but `pods`; infinite where there is none."""
    shares = (float(milli) / float(most[d]) if most[d] else float("inf") for d, milli in request if d != pods)
    return max(shares, default=0.0)
