"""Converts a cluster's part of a decision's input to a planner's problem, and the planner's answer to a target.

Held machines and Speculative ones of one class are one class of the problem; Idle ones are another, because they cost
less, and so are held ones that cannot leave now. Rows without shapes cannot be planned: a cluster that has one gets no
target.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Final

from bigfleet.engine.shapes.choice import RELEASABLE, is_paid_for
from bigfleet.engine.shapes.fleet import DecisionState
from bigfleet.engine.shapes.following import groups_by_name
from bigfleet.engine.shapes.state import UNLIMITED, ClusterState, HostState, OfferState, PodGroup, RowState
from bigfleet.engine.targets import ClassKey, Target, TargetClaim, class_key
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.planner.composition import Composition
from bigfleet.planner.problem import (
    AMOUNT_MAX,
    BILLION,
    NANO,
    QUANTITY_MAX,
    MachineClass,
    PlannerShape,
    PlannerSpread,
    PlanSettings,
    Problem,
    mask_of,
)

#: Penalties and prices above this count as this: their products must fit the planner's integers.
DOLLARS_MAX: Final = 1_000_000.0


@dataclass(frozen=True, slots=True, eq=False)
class _Kind:
    """Machines that are one class of a problem."""

    key: ClassKey
    is_idle: bool
    example: Machine
    shape: int
    #: Whether the cluster holds them, and its operator has refused to drain them.
    is_refused: bool = False


@dataclass(frozen=True, slots=True)
class ClusterProblem:
    """A problem with what it takes to read the answer."""

    problem: Problem
    kinds: tuple[_Kind, ...]
    groups: tuple[PodGroup, ...]


def problem_of(
    cluster: ClusterState,
    fleet: DecisionState,
    settings: PlanSettings,
    *,
    left: Mapping[int, int] | None = None,
    refused: Set[MachineId] = frozenset(),
    may_exchange: bool = False,
) -> ClusterProblem | None:
    """Return the cluster's problem, None when it has nothing to plan or a row without shapes.

    `left` says how many machines of each offer, by its place, may be planned with; absent are all that are available.
    `refused` are machines that cannot leave now, because their pods fit on no other node.
    """
    rows = [row for row in cluster.rows if row.groups and not row.need.parked]
    if not rows or any(row.divisible is not None and row.need.aggregate for row in cluster.rows):
        return None
    kinds, held, stock = _kinds(cluster, fleet, left, refused)
    dimensions = len(fleet.dimensions.names)
    keys = _topology_keys(rows)
    classes = tuple(
        _machine_class(kind, held[kind], stock[kind], fleet, cluster, keys, number) for number, kind in enumerate(kinds)
    )
    ranked = [(rank, group) for rank, row in enumerate(rows) for group in row.groups if not group.is_waiting]
    groups = tuple(group for _, group in ranked)
    problem = Problem(
        dimensions=fleet.dimensions.names,
        classes=classes,
        shapes=tuple(_shape(group, kinds, rank, dimensions) for rank, group in ranked),
        order=settings.order,
        may_exchange=may_exchange,
        pool_percent_max=settings.spot_pool_percent_max,
    )
    return ClusterProblem(problem=problem, kinds=tuple(kinds), groups=groups)


def _kinds(
    cluster: ClusterState, fleet: DecisionState, left: Mapping[int, int] | None, refused: Set[MachineId]
) -> tuple[list[_Kind], Mapping[_Kind, list[HostState]], Mapping[_Kind, int]]:
    """Return the classes, ordered by their first id; held machines and stock of each."""
    found: dict[tuple[ClassKey, bool, bool], _Kind] = {}
    held: defaultdict[_Kind, list[HostState]] = defaultdict(list)
    stock: Counter[_Kind] = Counter()
    # Offers first: Spot machines of one class may have several prices, and what is acquired costs what is on offer.
    for place, offer in enumerate(fleet.offers):
        if not cluster.may_plan_with(offer.example):
            continue
        available = offer.available if left is None else left.get(place, 0)
        key, is_idle = class_key(offer.example), offer.state is MachineState.IDLE
        kind = found.setdefault((key, is_idle, False), _Kind(key, is_idle, offer.example, offer.shape))
        stock[kind] += available
    for host in cluster.hosts:
        if not host.is_configured and not cluster.may_plan_with(host.machine):
            continue
        key, is_refused = class_key(host.machine), host.machine.id in refused
        kind = found.setdefault((key, False, is_refused), _Kind(key, False, host.machine, host.shape, is_refused))
        held[kind].append(host)
    usable = [
        kind
        for kind in found.values()
        if held[kind] or (stock[kind] and any(row.may_use(kind.example, kind.shape) for row in cluster.rows))
    ]
    return sorted(usable, key=lambda kind: (kind.key, kind.is_idle, kind.is_refused)), held, stock


def _topology_keys(rows: Sequence[RowState]) -> tuple[str, ...]:
    keys = {row.same_key for row in rows} | {s.topology_key for row in rows if (s := row.need.profile.strict_spread)}
    return tuple(sorted(key for key in keys if key is not None))


def _machine_class(
    kind: _Kind,
    held: Sequence[HostState],
    stock: int,
    fleet: DecisionState,
    cluster: ClusterState,
    keys: Sequence[str],
    number: int,
) -> MachineClass:
    machine = kind.example
    total = fleet.total(cluster.id, kind.shape)
    bare = fleet.total("", kind.shape)
    price = nanos(machine.price_usd_per_hour)
    # Fixed capacity costs the same whether a cluster holds it or not, and so does what cannot leave.
    held_cost = price if machine.capacity_type in RELEASABLE and not kind.is_refused else 0
    cost = price
    if kind.is_idle:
        offer = OfferState(example=machine, shape=kind.shape, machines=[machine])
        cost = 0 if is_paid_for(offer) else int(price / fleet.options.idle_head_start)
    values = ((key, machine.attribute(key)) for key in keys)
    source = "idle" if kind.is_idle else "refused" if kind.is_refused else "offer"
    return MachineClass(
        key=f"{machine.instance_type}/{machine.zone}/{machine.capacity_type.label}/{source}/{number:05d}",
        supply=_bounded(total),
        allocatable=_bounded(bare),
        cost=cost,
        held=len(held),
        held_cost=held_cost,
        stock=stock,
        probability=round(machine.interruption_probability * BILLION),
        domains=tuple((key, value) for key, value in values if value is not None),
        pool=f"{machine.instance_type}/{machine.zone}" if machine.capacity_type is CapacityType.SPOT else "",
    )


def _bounded(room: Sequence[int]) -> tuple[int, ...]:
    return tuple(min(milli, AMOUNT_MAX) if milli < UNLIMITED else QUANTITY_MAX for milli in room)


def nanos(dollars: float) -> int:
    """Return nano-dollars, within what the planner's integers carry; NaN counts as more than any price."""
    return round((DOLLARS_MAX if math.isnan(dollars) else min(max(dollars, 0.0), DOLLARS_MAX)) * NANO)


def _shape(group: PodGroup, kinds: Sequence[_Kind], rank: int, dimensions: int) -> PlannerShape:
    row = group.row
    request = [0] * dimensions
    for d, milli in group.request:
        request[d] = min(milli, AMOUNT_MAX)
    penalty = row.penalty_dollars
    spread = row.need.profile.strict_spread
    return PlannerShape(
        row=row.position,
        request=tuple(request),
        count=group.count,
        # By the profile alone: the scheduler places pods of pinned rows on machines that may be interrupted, too.
        matches=mask_of(n for n, kind in enumerate(kinds) if kind.shape in row.matching),
        rank=rank,
        priority=row.need.profile.priority,
        max_per_machine=group.limit,
        penalty=nanos(penalty),
        is_pinned=penalty == float("inf"),
        gang="" if row.same_key is None else str(row.position),
        same_key=row.same_key or "",
        spread=None
        if spread is None or row.same_key is not None
        else PlannerSpread(spread.topology_key, spread.skew_max),
    )


# ---- answers -----------------------------------------------------------------------------------------------------


def target_of(asked: ClusterProblem, answer: Composition) -> Target:
    """Return the composition in the terms of a decision."""
    counts: Counter[ClassKey] = Counter()
    first: dict[int, int] = {}
    retained = dict(enumerate(answer.retained))
    added = dict(enumerate(answer.added))
    held_first = sorted(range(len(asked.kinds)), key=lambda n: (asked.kinds[n].key, asked.kinds[n].is_idle))
    for n in held_first:
        key = asked.kinds[n].key
        first[n] = counts[key]
        counts[key] += retained.get(n, 0) + added.get(n, 0)
    known = groups_by_name(asked.groups[0].row.cluster) if asked.groups else {}
    named = {group: name for name, group in known.items()}
    claims = tuple(
        TargetClaim(
            asked.kinds[claim.machine_class].key,
            first[claim.machine_class] + claim.first,
            claim.machines,
            *named[asked.groups[claim.shape]],
            claim.count,
        )
        for claim in answer.claims
    )
    runner_up = answer.runner_up
    return Target(
        counts={key: count for key, count in counts.items() if count},
        claims=claims,
        runner_up="" if runner_up is None else _class_name(asked, runner_up.leader),
        runner_up_costs_more_usd_per_hour=None if runner_up is None else runner_up.costs_more / NANO,
        limited_pools=answer.limited_pools,
    )


def _class_name(asked: ClusterProblem, key: str) -> str:
    """Return what people call the class with a key of the problem."""
    classes = zip(asked.kinds, asked.problem.classes, strict=True)
    machine = next(kind.example for kind, of in classes if of.key == key)
    text = f"{machine.instance_type or 'machines'} {machine.capacity_type.label}"
    return f"{text} in {machine.zone}" if machine.zone else text


def without_offers(asked: ClusterProblem, empty: Counter[ClassKey]) -> ClusterProblem:
    """Return the problem with nothing on offer, and so many fewer held machines of each class."""
    left = Counter(empty)
    classes = []
    for kind, of in zip(asked.kinds, asked.problem.classes, strict=True):
        fewer = min(left[kind.key], of.held)
        left[kind.key] -= fewer
        classes.append(replace(of, held=of.held - fewer, stock=0))
    return replace(asked, problem=replace(asked.problem, classes=tuple(classes)))


def hosts_all(problem: Problem, answer: Composition) -> bool:
    """Return whether every pod has a place for which some class of the problem is large enough."""
    for missing in answer.unhosted:
        shape = problem.shapes[missing.shape]
        for number, of in enumerate(problem.classes):
            fits = all(wanted <= room for wanted, room in zip(shape.request, of.supply, strict=True))
            if shape.matches >> number & 1 and fits:
                return False
    return True


def target_of_held(asked: ClusterProblem, answer: Composition) -> Target | None:
    """Return the answer to a problem without offers as a target that retains all that is held.

    None when a pod has no place that some class of the problem is large enough for.
    """
    if not hosts_all(asked.problem, answer):
        return None
    counts: Counter[ClassKey] = Counter()
    for kind, of in zip(asked.kinds, asked.problem.classes, strict=True):
        counts[kind.key] += of.held
    return replace(target_of(asked, answer), counts={key: count for key, count in counts.items() if count})


def added_by_offer(
    asked: ClusterProblem, answer: Composition, fleet: DecisionState, cluster: ClusterState
) -> dict[int, int]:
    """Return how many machines of each offer, by its place, the composition of the cluster acquires."""
    wanted: Counter[tuple[ClassKey, bool]] = Counter()
    for kind, count in zip(asked.kinds, answer.added, strict=True):
        wanted[(kind.key, kind.is_idle)] += count
    taken: dict[int, int] = {}
    for place, offer in enumerate(fleet.offers):
        key = (class_key(offer.example), offer.state is MachineState.IDLE)
        count = min(wanted[key], offer.available) if cluster.may_plan_with(offer.example) else 0
        if count:
            taken[place] = count
            wanted[key] -= count
    return taken
