"""States what may be exchanged in each cluster of a decision as a question to the search.

docs/spec/exchange.md §2. Machines that are excluded leave the question together with the pods that the decision
places on them, so that nothing that stays is counted on to host what moves. A gang moves as a whole or not at all, and
so does a row with a strict spread.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from bigfleet.compositions.problems import ClusterProblem, nanos, problem_of
from bigfleet.engine.decision import CapacityPool, RowResult
from bigfleet.engine.shapes.choice import RELEASABLE
from bigfleet.engine.shapes.fleet import DecisionState
from bigfleet.engine.shapes.state import ClusterState, HostState, OfferState, RowState
from bigfleet.engine.targets import ClassKey, class_key
from bigfleet.exchange.plausibility import PriceBook
from bigfleet.exchange.values import (
    BlockReason,
    ExchangePart,
    ExchangeQuestion,
    ExchangeSettings,
    ExclusionReason,
    HeldMachine,
    MachineKind,
    WholeCluster,
    total_usd,
)
from bigfleet.model.ids import ClusterId
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need, RowKey
from bigfleet.model.penalty import bucket_upper_dollars
from bigfleet.model.states import MachineState
from bigfleet.planner.problem import PlanSettings

_DEFAULT: Final = PlanSettings()
#: A row of a cluster: its key, and which of the cluster's rows with that key it is, in list order.
_RowId = tuple[RowKey, int]
#: By machine: pods of each shape of each row that the decision places there.
_Claims = Mapping[str, Mapping[tuple[_RowId, int], int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeContext:
    """Inputs of the questions other than machines and demand."""

    #: Results of the decision on the same machines and demand; those of other clusters may be among them.
    rows: Sequence[RowResult]
    #: Prices that may be relied on.
    prices: PriceBook
    settings: ExchangeSettings = field(default_factory=ExchangeSettings)
    plan_settings: Mapping[str, PlanSettings] = field(default_factory=dict)
    #: Machines that the caller keeps, by id.
    exclude: Mapping[str, ExclusionReason] = field(default_factory=dict)
    #: Clusters that the caller leaves as they are.
    blocked: Mapping[str, BlockReason] = field(default_factory=dict)


def questions_of(fleet: DecisionState, context: ExchangeContext) -> list[ExchangeQuestion]:
    """Return the question of each cluster of the state that holds machines, cluster ids ascending.

    `fleet` is a state before Phase 1; it is not changed.
    """
    rows: defaultdict[str, list[RowResult]] = defaultdict(list)
    for row in context.rows:
        if row.need.cluster in fleet.clusters:
            rows[row.need.cluster].append(row)
    found = []
    for name in sorted(fleet.clusters):
        cluster = fleet.clusters[name]
        if cluster.hosts:
            found.append(_question(cluster, fleet, context, rows[name]))
    return found


def taker_question(
    fleet: DecisionState, context: ExchangeContext, *, giver: str, taker: str, machine_ids: Sequence[str]
) -> ExchangeQuestion:
    """Return the question of a cluster as if these machines of another one were Idle, and nothing else on offer.

    The machines are alike, and none of them is rented by the hour. Gangs of the taker have no part.
    """
    wanted = set(machine_ids)
    hosts = [host for host in fleet.clusters[giver].hosts if host.machine.id in wanted]
    machines = [replace(h.machine, state=MachineState.IDLE, cluster=ClusterId("")) for h in hosts]
    offer = OfferState(example=machines[0], shape=hosts[0].shape, machines=machines)
    # A machine that is paid for anyway costs nothing more; its price is only shown.
    offered = {CapacityPool.of(machines[0]): machines[0].price_usd_per_hour}
    question = _question(
        fleet.clusters[taker],
        replace(fleet, offers=[offer]),
        replace(context, prices=context.prices._replace(offered=offered)),
        [row for row in context.rows if row.need.cluster == taker],
    )
    return replace(question, parts=tuple(part for part in question.parts if not part.is_whole))


def _question(
    cluster: ClusterState,
    fleet: DecisionState,
    context: ExchangeContext,
    rows: Sequence[RowResult],
) -> ExchangeQuestion:
    prices = [host.machine.price_usd_per_hour for host in cluster.hosts]
    question = ExchangeQuestion(
        cluster=cluster.id,
        machines=len(prices),
        cost_usd_per_hour=total_usd(price for price in prices if math.isfinite(price)),
        settings=context.settings,
    )
    blocked = _block_reason(cluster, fleet, context, rows)
    asked = None
    if blocked is None:
        settings = context.plan_settings.get(cluster.id, _DEFAULT)
        asked = problem_of(cluster, fleet, settings)
        if asked is None:
            blocked = BlockReason.DEMAND_WITHOUT_PODS
    if asked is None:
        return replace(question, blocked=blocked)
    excluded, gangs, claims = _sorted_out(cluster, context, rows)
    parts = [
        _part(
            cluster,
            asked,
            [host for host in cluster.hosts if host.machine.id in ids],
            claims,
            fleet,
            context,
        )
        for ids in gangs
    ]
    taken = excluded.keys() | {machine_id for ids in gangs for machine_id in ids}
    movable = [host for host in cluster.hosts if host.machine.id not in taken]
    whole = tuple(replace(part, is_whole=True) for part in parts)
    counts = Counter(excluded.values())
    return replace(
        question,
        parts=(*whole, _part(cluster, asked, movable, claims, fleet, context)),
        whole=_whole(asked),
        excluded=tuple((reason, counts[reason]) for reason in sorted(counts, key=lambda each: each.value)),
    )


def _whole(asked: ClusterProblem) -> WholeCluster:
    """Return the problem without how full machines are, which changes while nothing is to be searched again."""
    classes = tuple(replace(kind, held_use=()) for kind in asked.problem.classes)
    return WholeCluster(replace(asked.problem, classes=classes), tuple(kind.key for kind in asked.kinds))


def _block_reason(
    cluster: ClusterState,
    fleet: DecisionState,
    context: ExchangeContext,
    rows: Sequence[RowResult],
) -> BlockReason | None:
    """Return why nothing of the cluster is exchanged.

    A pod that no known machine can host blocks nothing: no exchange takes anything from it.
    """
    if cluster.id in context.blocked:
        return context.blocked[cluster.id]
    if cluster.id not in fleet.options.reported:
        return BlockReason.NOT_REPORTED
    if any(row.unplaced or (row.deficit and not row.impossible) for row in rows):
        return BlockReason.SHORTFALL
    if any(row.need.waiting for row in rows):
        return BlockReason.WAITING_PODS
    if any(row.acquired or row.victims for row in rows) or any(not host.is_configured for host in cluster.hosts):
        return BlockReason.MACHINES_CHANGING
    claimed = {machine_id for row in rows for machine_id in row.claimed}
    # What nothing claims and no target keeps is excess: it goes without an exchange, unless its operator refuses.
    excess = [host for host in cluster.hosts if host.machine.id not in claimed and not host.is_target]
    goes = any(context.exclude.get(host.machine.id) is not ExclusionReason.WOULD_NOT_FIT for host in excess)
    return BlockReason.MACHINES_CHANGING if goes else None


# ---- machines that are excluded ----------------------------------------------------------------------------------


def _sorted_out(
    cluster: ClusterState, context: ExchangeContext, rows: Sequence[RowResult]
) -> tuple[dict[str, ExclusionReason], list[frozenset[str]], _Claims]:
    """Return the machines that are excluded, the machines of each gang that may move as a whole, and the claims."""
    claims: defaultdict[str, dict[tuple[_RowId, int], int]] = defaultdict(dict)
    for row, row_id in zip(rows, _row_ids([row.need for row in rows]), strict=True):
        for placement in row.placements:
            claims[placement.machine_id][(row_id, placement.shape)] = placement.count
    states = _states(cluster)
    excluded: dict[str, ExclusionReason] = {
        host.machine.id: reason
        for host in cluster.hosts
        if (reason := _exclusion_reason(host.machine, claims[host.machine.id], states, context)) is not None
    }
    used: defaultdict[_RowId, set[str]] = defaultdict(set)
    for machine_id, found in claims.items():
        for key, _ in found:
            used[key].add(machine_id)
    gangs: list[frozenset[str]] = []
    for key, state in states.items():
        if state.same_key is None or not used[key]:
            continue
        is_own = all({row for row, _ in claims[machine_id]} == {key} for machine_id in used[key])
        if is_own and not used[key] & excluded.keys():
            gangs.append(frozenset(used[key]))
        else:
            excluded |= dict.fromkeys(used[key] - excluded.keys(), ExclusionReason.GANG)
    _exclude_spreads(excluded, used, states)
    return excluded, gangs, claims


def _states(cluster: ClusterState) -> dict[_RowId, RowState]:
    """Return the cluster's rows by their ids."""
    # Sorted by precedence, which rows of one key share: these are in list order.
    return dict(zip(_row_ids([row.need for row in cluster.rows]), cluster.rows, strict=True))


def _row_ids(needs: Iterable[Need]) -> list[_RowId]:
    """Return the ids of rows; those of one key are in list order."""
    seen: Counter[RowKey] = Counter()
    found = []
    for need in needs:
        found.append((need.key, seen[need.key]))
        seen[need.key] += 1
    return found


def _exclude_spreads(
    excluded: dict[str, ExclusionReason], used: Mapping[_RowId, set[str]], rows: Mapping[_RowId, RowState]
) -> None:
    """Exclude all machines of a row with a strict spread of which one is excluded: its pods are counted together."""
    spreads = [used[key] for key, row in rows.items() if row.spread is not None and key in used]
    is_more = True
    while is_more:
        is_more = False
        for machines in spreads:
            others = machines - excluded.keys()
            if others and len(others) < len(machines):
                excluded |= dict.fromkeys(others, ExclusionReason.SPREAD)
                is_more = True


def _exclusion_reason(
    machine: Machine,
    claims: Mapping[tuple[_RowId, int], int],
    rows: Mapping[_RowId, RowState],
    context: ExchangeContext,
) -> ExclusionReason | None:
    reason = context.exclude.get(machine.id)
    if reason is not None:
        return reason
    penalties = [
        machine.assigned_interruption_penalty_dollars,
        machine.assigned_reclamation_penalty_dollars,
    ]
    for key, _ in claims:
        profile = rows[key].need.profile
        penalties += (
            bucket_upper_dollars(profile.interruption_bucket),
            bucket_upper_dollars(profile.reclamation_bucket),
        )
    if math.inf in penalties:
        return ExclusionReason.PINNED
    return None if CapacityPool.of(machine) in context.prices.held else ExclusionReason.PRICE


# ---- parts -----------------------------------------------------------------------------------------------------------


def _part(
    cluster: ClusterState,
    asked: ClusterProblem,
    hosts: Sequence[HostState],
    claims: _Claims,
    fleet: DecisionState,
    context: ExchangeContext,
) -> ExchangePart:
    """Return the part of the cluster's problem that concerns some of its machines and the pods on them."""
    by_class: defaultdict[ClassKey, list[HostState]] = defaultdict(list)
    wanted: Counter[tuple[_RowId, int]] = Counter()
    for host in hosts:
        by_class[class_key(host.machine)].append(host)
        wanted.update(claims.get(host.machine.id, {}))
    rows = _states(cluster)
    row_ids = {row: row_id for row_id, row in rows.items()}
    pods = sum(wanted.values())
    classes, kinds, held = [], [], []
    for kind, of in zip(asked.kinds, asked.problem.classes, strict=True):
        machine, pool = kind.example, CapacityPool.of(kind.example)
        going = (
            []
            if kind.is_idle
            else [_held(host.machine, claims.get(host.machine.id, {}), rows) for host in by_class[kind.key]]
        )
        is_rented = machine.capacity_type in RELEASABLE
        offered, paid = context.prices.offered.get(pool), context.prices.held.get(pool, 0.0)
        # A pool that is sold out has probes on offer, which find out whether it still is.
        is_open = offered is not None and pool not in fleet.options.sold_out
        price = paid if going else (offered or 0.0)
        classes.append(
            replace(
                of,
                held=len(going),
                held_use=(),
                held_cost=nanos(paid) if is_rented else 0,
                cost=nanos(offered or 0.0) if is_rented or not kind.is_idle else 0,
                # More than one machine for each pod is never needed; equal questions are answered once.
                stock=min(of.stock or 0, pods) if is_open else 0,
            )
        )
        kinds.append(
            MachineKind(
                instance_type=machine.instance_type,
                zone=machine.zone,
                capacity_type=machine.capacity_type.label,
                price_usd_per_hour=price,
                key=kind.key,
                is_idle=kind.is_idle,
            )
        )
        held.append(tuple(sorted(going, key=lambda each: (each.reclamation_usd, each.pods, each.id))))
    shapes = tuple(
        replace(shape, count=wanted[(row_ids[group.row], group.index)])
        for group, shape in zip(asked.groups, asked.problem.shapes, strict=True)
    )
    problem = replace(asked.problem, classes=tuple(classes), shapes=shapes)
    return ExchangePart(problem=problem, kinds=tuple(kinds), held=tuple(held))


def _held(machine: Machine, claims: Mapping[tuple[_RowId, int], int], rows: Mapping[_RowId, RowState]) -> HeldMachine:
    penalties = [bucket_upper_dollars(rows[key].need.profile.reclamation_bucket) for key in {key for key, _ in claims}]
    return HeldMachine(
        id=machine.id,
        reclamation_usd=max(total_usd(penalties), machine.assigned_reclamation_penalty_dollars),
        pods=sum(claims.values()),
    )
