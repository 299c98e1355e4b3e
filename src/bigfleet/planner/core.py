"""Turns a problem into arrays: parts of shapes, columns of machines, and which part runs on which column.

A *part* is pods of one shape that share their constraints: a whole shape, the pods of a strict spread in one domain, or
the pods of a gang in the domain chosen for it. A *column* is machines that cost the same: the held machines of a class,
or those that can be acquired. Parts and columns are in canonical order, so the caller's order changes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, NamedTuple, Protocol

import numpy as np

from bigfleet.planner.arena import NEVER, POINT, TIES, Arena, Bool, Fleet, Int
from bigfleet.planner.hashing import noise
from bigfleet.planner.problem import AMOUNT_MAX, BILLION, QUANTITY_MAX, Problem, SchedulerOrder

#: Stands for unlimited stock: more machines than any cluster holds, small enough for sums.
PLENTY: Final = 1 << 40
#: Scores divide numbers below this many bits, so that a product with a score's points cannot overflow.
_SCORE_BITS: Final = 35
#: Bits of the supply of one machine, and of everything that is requested; sums and percentages of them have 64.
_SUPPLY_BITS: Final = QUANTITY_MAX.bit_length()
_DEMAND_BITS: Final = 62
#: Nano-dollars an hour for the largest supply of a dimension, and how much more a scarce dimension counts.
_OPPORTUNITY: Final = 500
_SCARCE: Final = 8


@dataclass(frozen=True, slots=True)
class Part:
    """Pods of one shape under one set of constraints."""

    #: Position in the problem's shapes.
    shape: int
    count: int
    #: Classes to which the part is confined beside its profile, or None.
    within: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class MachineColumn:
    """Machines of one class that cost the same."""

    #: Position in the problem's classes.
    machine_class: int
    is_held: bool
    cost: int
    stock: int


class Units(NamedTuple):
    """How amounts of each dimension are counted: in the problem's unit, but for what 64 bits do not carry.

    Sums over all pods and percentages of a machine must fit; supplies are rounded down, requests up.
    """

    #: A supply of more counts as this: no machine hosts more than everything that is requested, (D).
    supply_max: Int
    #: A request of more counts as this, which is more than any machine has, (D).
    request_max: Int
    #: Bits that are dropped, (D).
    shift: Int

    def supply(self, amounts: Int) -> Int:
        """Return supplies or allocatable amounts (N, D) in these units."""
        result: Int = np.minimum(amounts, self.supply_max) >> self.shift
        return result

    def request(self, amounts: Int) -> Int:
        """Return requests (N, D) in these units."""
        result: Int = -(-np.minimum(amounts, self.request_max) >> self.shift)
        return result


class Kernels(Protocol):
    """The loops over pods and machines; both forms give equal answers."""

    def simulate(self, core: "Core", fleets: Sequence[Fleet], queues: Sequence[Int]) -> Int:
        """Return the pods of each part that the scheduler leaves over, by fleet and queue, (F, O, P)."""
        ...

    def place(self, core: "Core", columns: Int, orders: Sequence[Sequence[int]], keep: bool) -> tuple[Int, Int]:
        """Return what first-fit leaves (R, P) and, if asked, what it places (R, P, M) on the machines of each row."""
        ...

    def patterns(self, core: "Core", pending: Sequence[int], left: Int, usable: Int, supply: Int) -> Int:
        """Return how many pods of each pending part an empty machine of each usable column takes in turn, (P', C')."""
        ...


@dataclass(frozen=True)
class Core:
    """The arrays of one problem; P parts, C columns, D dimensions."""

    problem: Problem
    kernels: Kernels
    parts: tuple[Part, ...]
    columns: tuple[MachineColumn, ...]
    units: Units
    #: In these units, (P, D) and (C, D).
    request: Int
    supply: Int
    #: Pods by part, (P).
    count: Int
    #: Place in the queue, 0 first, (P).
    tier: Int
    #: Pods of the part that one machine may host, PLENTY without a limit, (P).
    limit: Int
    #: Which columns match the profile and, for gangs, lie in the domain; too small ones included, (P, C).
    matches: Bool
    #: Those of them that are large enough: where claims may be, (P, C).
    may_claim: Bool
    #: The same without regard to interruptions, which the scheduler knows nothing of, (P, C).
    may_run: Bool
    #: Price with the expected interruptions of the average part that may claim the column, and a trifle for what its
    #: loss takes from others, which decides between equal prices, (C).
    cost: Int
    #: The part of it that expected interruptions are, (C).
    mean_risk: Int

    @cached_property
    def fits(self) -> Int:
        """Pods of a part that an empty machine of a column hosts, (P, C)."""
        most = np.minimum(pods_that_fit(self.supply, self.request), self.limit[:, None])
        return np.ascontiguousarray(np.where(self.may_claim, most, 0))

    @cached_property
    def stock(self) -> Int:
        """Machines of each column that there are, (C)."""
        return np.array([column.stock for column in self.columns], np.int64)

    @cached_property
    def demand(self) -> Int:
        """Sum of all requests, (D)."""
        total: Int = (self.request * self.count[:, None]).sum(axis=0)
        return total

    @cached_property
    def risk(self) -> Int:
        """Expected interruptions per hour, in parts per billion: 0 where nothing that may run there costs any, (C)."""
        chances = [self.problem.classes[column.machine_class].probability for column in self.columns]
        concerns = (self.may_claim & (self.penalty > 0)[:, None]).any(axis=0)
        return np.where(concerns, np.array(chances, np.int64), 0)

    @cached_property
    def penalty(self) -> Int:
        """Cost of one interruption of a machine that a part fills; 0 for pinned parts, which run elsewhere, (P)."""
        shapes = [self.problem.shapes[part.shape] for part in self.parts]
        return np.array([0 if shape.is_pinned else shape.penalty for shape in shapes], np.int64)

    def interruptions(self, fleet: Fleet, on: Int) -> int:
        """Return what expected interruptions of a packing (P, M) cost: probability × largest share × penalty."""
        columns = np.repeat([c for c, _ in fleet], [n for _, n in fleet])
        risky = np.flatnonzero(self.risk[columns])
        if not len(risky):
            return 0
        share = np.zeros((len(self.parts), len(risky)), np.float64)
        supply = np.maximum(self.supply[columns[risky]], 1)
        for d in range(self.request.shape[1]):
            np.maximum(share, on[:, risky] * (self.request[:, d, None] / supply[None, :, d]), out=share)
        cost = self.penalty.astype(np.float64) @ share @ self.risk[columns[risky]].astype(np.float64)
        return int(cost / BILLION)

    @cached_property
    def arena(self) -> Arena:
        """What simulations need."""
        return build_arena(self)

    @cached_property
    def as_scheduled(self) -> "Core | None":
        """The core as the scheduler sees it, which knows of no pinned rows; None where that is no difference."""
        if (self.may_claim == self.may_run).all():
            return None
        return replace(self, may_claim=self.may_run)

    def price(self, fleet: Fleet) -> int:
        """Return the sum of the columns' costs."""
        return sum(int(self.cost[column]) * count for column, count in fleet)

    def restricted(self, columns: Sequence[int]) -> "Core":
        """Return the core with some columns only."""
        chosen = np.array(columns, np.int64)
        return replace(
            self,
            columns=tuple(self.columns[c] for c in columns),
            supply=self.supply[chosen],
            matches=self.matches[:, chosen],
            may_claim=self.may_claim[:, chosen],
            may_run=self.may_run[:, chosen],
            cost=self.cost[chosen],
            mean_risk=self.mean_risk[chosen],
        )

    def with_counts(self, counts: Int) -> "Core":
        """Return the core with other counts of pods; parts without pods stay."""
        return replace(self, count=counts)

    def with_stock(self, stock: Int) -> "Core":
        """Return the core with so many machines of each column; columns without machines stay."""
        columns = (replace(column, stock=int(n)) for column, n in zip(self.columns, stock, strict=True))
        return replace(self, columns=tuple(columns))

    def with_parts(self, parts: Sequence[int], counts: Int) -> "Core":
        """Return the core with some parts only, and other counts by position before the choice."""
        chosen = np.array(parts, np.int64)
        return replace(
            self,
            parts=tuple(self.parts[p] for p in parts),
            request=self.request[chosen],
            count=counts[chosen],
            tier=self.tier[chosen],
            limit=self.limit[chosen],
            matches=self.matches[chosen],
            may_claim=self.may_claim[chosen],
            may_run=self.may_run[chosen],
        )


def pods_that_fit(supply: Int, request: Int) -> Int:
    """Return how often each request (P, D) fits each supply (C, D), at most PLENTY, (P, C)."""
    fits = np.full((len(request), len(supply)), PLENTY, np.int64)
    for d in range(request.shape[1]):
        wants = request[:, d]
        if wants.any():
            times = supply[None, :, d] // np.maximum(wants, 1)[:, None]
            np.minimum(fits, np.where(wants[:, None] > 0, times, PLENTY), out=fits)
    return fits


def matching(problem: Problem, parts: Sequence[Part], columns: Sequence[MachineColumn]) -> Bool:
    """Return which columns match the profile of each part, (P, C)."""
    size = (len(problem.classes) + 7) // 8
    rows: dict[int, Bool] = {}
    of_column = np.array([column.machine_class for column in columns], np.int64)
    result = np.zeros((len(parts), len(columns)), np.bool_)
    for p, part in enumerate(parts):
        mask = problem.shapes[part.shape].matches
        if mask not in rows:
            bits = np.frombuffer(mask.to_bytes(size, "little"), np.uint8)
            rows[mask] = np.unpackbits(bits, bitorder="little").astype(np.bool_)
        result[p] = rows[mask][of_column]
    return result


def confined(parts: Sequence[Part], columns: Sequence[MachineColumn]) -> Bool:
    """Return which columns lie where each part is confined to, (P, C)."""
    result = np.ones((len(parts), len(columns)), np.bool_)
    for p, part in enumerate(parts):
        if part.within is not None:
            result[p] = [column.machine_class in part.within for column in columns]
    return result


def columns_of(problem: Problem) -> tuple[MachineColumn, ...]:
    """Return held and acquirable machines, by key, held ones first."""
    columns = []
    for position in sorted(range(len(problem.classes)), key=lambda c: problem.classes[c].key):
        kind = problem.classes[position]
        if kind.held:
            columns.append(MachineColumn(position, True, kind.held_cost, kind.held))
        if kind.stock is None or kind.stock > 0:
            columns.append(MachineColumn(position, False, kind.cost, PLENTY if kind.stock is None else kind.stock))
    return tuple(columns)


def units_of(problem: Problem) -> Units:
    """Return the units of a problem's dimensions: 1, unless a machine or the whole demand is too large for it."""
    width = len(problem.dimensions)
    supplies = np.array([kind.supply for kind in problem.classes], np.int64).reshape(len(problem.classes), width)
    supply_max, request_max, shifts = list[int](), list[int](), list[int]()
    for d, largest in enumerate(supplies.max(axis=0, initial=0).tolist()):
        wanted = sum(min(shape.request[d], largest + 1) * shape.count for shape in problem.shapes)
        most = min(max(wanted, QUANTITY_MAX), AMOUNT_MAX)
        supply_max.append(most)
        request_max.append(largest + 1)
        shifts.append(max(min(largest, most).bit_length() - _SUPPLY_BITS, wanted.bit_length() - _DEMAND_BITS, 0))
    return Units(np.array(supply_max, np.int64), np.array(request_max, np.int64), np.array(shifts, np.int64))


def build_core(problem: Problem, parts: Sequence[Part], columns: Sequence[MachineColumn], kernels: Kernels) -> Core:
    """Return the arrays of some parts and columns."""
    shapes = [problem.shapes[part.shape] for part in parts]
    classes = [problem.classes[column.machine_class] for column in columns]
    width = len(problem.dimensions)
    units = units_of(problem)
    request = units.request(np.array([shape.request for shape in shapes], np.int64).reshape(len(parts), width))
    supply = units.supply(np.array([kind.supply for kind in classes], np.int64).reshape(len(columns), width))
    count = np.array([part.count for part in parts], np.int64)
    priorities = sorted({shape.priority for shape in shapes}, reverse=True)
    matches = matching(problem, parts, columns)
    is_large_enough = np.ones_like(matches)
    for d in range(width):
        if request[:, d].any():
            is_large_enough &= request[:, d][:, None] <= supply[None, :, d]
    pinned = np.array([shape.is_pinned for shape in shapes], np.bool_)
    risky = np.array([kind.probability > 0 for kind in classes], np.bool_)
    within = confined(parts, columns)
    may_run = matches & within & is_large_enough
    may_claim = may_run & ~(pinned[:, None] & risky[None, :])
    is_gang = np.array([bool(shape.gang) for shape in shapes], np.bool_)
    bare = np.array([column.cost for column in columns], np.int64)
    mean_risk = _mean_risk(problem, request, count, may_claim, columns, parts)
    place = {priority: tier for tier, priority in enumerate(priorities)}
    return Core(
        problem=problem,
        kernels=kernels,
        parts=tuple(parts),
        columns=tuple(columns),
        units=units,
        request=request,
        supply=supply,
        count=count,
        tier=np.array([place[shape.priority] for shape in shapes], np.int64),
        limit=np.array([shape.max_per_machine or PLENTY for shape in shapes], np.int64),
        matches=matches & (within | ~is_gang[:, None]),
        may_claim=may_claim,
        may_run=may_run,
        cost=bare + mean_risk + _opportunity(request, supply),
        mean_risk=mean_risk,
    )


def _mean_risk(
    problem: Problem, request: Int, count: Int, may_claim: Bool, columns: Sequence[MachineColumn], parts: Sequence[Part]
) -> Int:
    """Return probability × penalty, the penalty weighted by what each part asks for."""
    costs = np.zeros(len(columns), np.int64)
    risky = [c for c, column in enumerate(columns) if problem.classes[column.machine_class].probability]
    if not risky:
        return costs
    demand = [max(1, int(total)) for total in (request * count[:, None]).sum(axis=0)]
    # Weight of a part: its largest share of the cluster's demand, in parts per billion.
    weights = [
        max((int(wants) * int(n) * BILLION // whole for wants, whole in zip(row, demand, strict=True)), default=0)
        for row, n in zip(request, count, strict=True)
    ]
    known: dict[bytes, int] = {}
    for c in risky:
        who = may_claim[:, c]
        mark = who.tobytes()
        if mark not in known:
            chosen = [int(p) for p in np.flatnonzero(who)]
            whole = max(1, sum(weights[p] for p in chosen))
            known[mark] = sum(weights[p] * problem.shapes[parts[p].shape].penalty for p in chosen) // whole
        costs[c] += problem.classes[columns[c].machine_class].probability * known[mark] // BILLION
    return costs


def _opportunity(request: Int, supply: Int) -> Int:
    """Return a few micro-dollars for each column: more for larger machines, most for what no part or few parts want."""
    total = np.ones(len(supply), np.int64)
    for d in range(supply.shape[1]):
        most = int(supply[:, d].max(initial=0))
        shift = max(0, most.bit_length() - 40)
        is_scarce = not len(request) or bool((request[:, d] == 0).any())
        weight = _OPPORTUNITY * (_SCARCE if is_scarce else 1)
        total += (supply[:, d] >> shift) * weight // max(1, most >> shift)
    return total


def build_arena(core: Core) -> Arena:
    """Return what simulations of a core need beside its requests and supplies."""
    takes, empty = _scores(core)
    return Arena(takes=takes, empty=empty, count=core.count, tier=core.tier)


def _scores(core: Core) -> tuple[Int, Int]:
    """Return the score that each part takes from a machine of each column, and the score of an empty machine."""
    problem = core.problem
    takes = np.zeros((len(core.parts), len(core.columns)), np.int64)
    empty = np.zeros(len(core.columns), np.int64)
    scored = [d for d, name in enumerate(problem.dimensions) if name in problem.scored]
    classes = [problem.classes[column.machine_class] for column in core.columns]
    given = np.array([kind.allocatable or kind.supply for kind in classes], np.int64)
    allocatable = core.units.supply(given.reshape(len(classes), len(problem.dimensions)))
    for d in scored:
        divisor = np.maximum(allocatable[:, d], core.supply[:, d])
        shift = max(0, int(divisor.max(initial=0)).bit_length() - _SCORE_BITS)
        whole = np.maximum(divisor >> shift, 1)
        points = 100 // len(scored) * POINT
        takes += (core.request[:, d] >> shift)[:, None] * points // whole[None, :]
        free = (core.supply[:, d] >> shift) * points // whole
        empty += free if problem.order is SchedulerOrder.LEAST_ALLOCATED else points - free
    if problem.order is SchedulerOrder.MOST_ALLOCATED:
        takes = -takes
    takes[~core.may_run] = NEVER
    return takes, empty + POINT


class CompiledKernels:
    """The loops in compiled form, for many fleets at once."""

    def simulate(self, core: Core, fleets: Sequence[Fleet], queues: Sequence[Int]) -> Int:
        """Return what the scheduler leaves over, by fleet and queue, (F, O, P)."""
        from bigfleet.planner.compiled import schedule

        machines = max(1, *(sum(count for _, count in fleet) for fleet in fleets))
        columns = np.full((len(fleets), machines), -1, np.int64)
        for f, fleet in enumerate(fleets):
            filled = np.repeat(np.array([c for c, _ in fleet], np.int64), np.array([n for _, n in fleet], np.int64))
            columns[f, : len(filled)] = filled
        arena = core.arena
        lost = np.zeros((len(fleets), len(queues), len(core.parts)), np.int64)
        ties = noise(TIES + machines, POINT)
        schedule(
            columns,
            np.array(queues, np.int64).reshape(len(queues), -1),
            core.request,
            core.supply,
            core.limit,
            arena.takes,
            arena.empty,
            ties,
            POINT,
            lost,
        )
        return lost

    def place(self, core: Core, columns: Int, orders: Sequence[Sequence[int]], keep: bool) -> tuple[Int, Int]:
        """Return what first-fit leaves (R, P) and, if asked, what it places (R, P, M) on the machines of each row."""
        from bigfleet.planner.compiled import first_fit

        rows, parts = len(columns), len(core.parts)
        left = np.zeros((rows, parts), np.int64)
        on = np.zeros((rows, parts, columns.shape[1]) if keep else (0, 0, 0), np.int64)
        numbers = np.array(orders, np.int64).reshape(rows, parts)
        first_fit(columns, numbers, core.request, core.supply, core.fits, core.count, left, on)
        return left, on

    def patterns(self, core: Core, pending: Sequence[int], left: Int, usable: Int, supply: Int) -> Int:
        """Return how many pods of each pending part an empty machine of each usable column takes in turn, (P', C')."""
        from bigfleet.planner.compiled import fill_one

        takes = np.zeros((len(pending), len(usable)), np.int64)
        parts = np.array(pending, np.int64)
        fill_one(parts, left, usable, core.request, supply, core.fits, takes)
        return takes


COMPILED: Final = CompiledKernels()
