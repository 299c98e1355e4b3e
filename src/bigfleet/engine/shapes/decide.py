"""Decides one cycle over demand shapes: credit, acquire, preempt, reclaim, release, all on one snapshot.

Equal arguments give equal decisions in any process. It must never read a clock, do I/O, draw randomness, log, or
remember anything between two calls.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import repeat
from types import MappingProxyType
from typing import NamedTuple

from bigfleet.engine.bulk import made_at_once
from bigfleet.engine.decision import (
    Action,
    ActionKind,
    Basis,
    Decision,
    Impossibility,
    Options,
    Phase,
    PhaseListener,
    Placement,
    Preemptor,
    RowResult,
    unheard,
)
from bigfleet.engine.demand_order import ListedRows
from bigfleet.engine.folding import folded_need
from bigfleet.engine.parking import stamp_parked, with_members_of
from bigfleet.engine.reference.preempt import grace_seconds
from bigfleet.engine.shapes.acquire import acquire
from bigfleet.engine.shapes.credit import credit, is_served_on_columns
from bigfleet.engine.shapes.fleet import DecisionState, build, has_pods
from bigfleet.engine.shapes.machines import SnapshotMachines
from bigfleet.engine.shapes.reclaim import Reclaimed, reclaimed, reclaims, releases
from bigfleet.engine.shapes.state import PODS, ClusterState, HostState, Impossible, RowState
from bigfleet.engine.shapes.victims import preempt
from bigfleet.engine.snapshot import Snapshot
from bigfleet.model import vector
from bigfleet.model.ids import Fingerprint, MachineId
from bigfleet.model.need import Need, RowKey
from bigfleet.model.shapes import lacking_of
from bigfleet.model.states import MachineState
from bigfleet.model.vector import Vector


def says_pods(demand: Sequence[Need]) -> bool:
    """Return whether any row says of which pods it consists: then the decision is one over pods.

    The rows of a demand table are looked at once: a cycle asks more than once, and most repeat the demand before.
    """
    if not isinstance(demand, ListedRows):
        return any(has_pods(need) for need in demand)
    if demand.says_pods is None:
        demand.says_pods = any(has_pods(need) for need in demand)
    return demand.says_pods


def decide(snapshot: Snapshot, demand: Sequence[Need], options: Options) -> Decision:
    """Return the decision of one cycle; `demand` is in list order."""
    return decide_with_fleet(snapshot, demand, options)[0]


def decide_with_fleet(snapshot: Snapshot, demand: Sequence[Need], options: Options) -> tuple[Decision, DecisionState]:
    """Return the decision and the working state that it left, from which it can be explained."""
    fleet = build(SnapshotMachines(snapshot, options), stamp_parked(list(demand), options.parking_ages), options)
    answer = conclude(fleet)
    decision = Decision(
        actions=(
            *answer.actions,
            *reclaims(answer.reclaimed, options.unjoined),
            *releases(fleet.machines, answer.claimed),
        ),
        rows=with_members_of(demand, [answer.results[at] for at in range(len(demand))], options.parking_ages),
        basis=Basis(demand=tuple(demand), options=options, snapshot=lambda: snapshot),
    )
    return decision, fleet


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What the phases came to."""

    #: Those of Phases 1 and 2.
    actions: list[Action]
    #: What Phase 3 reclaims.
    reclaimed: list[Reclaimed]
    #: Machines of which something is claimed or that a target keeps, Idle ones among them.
    claimed: Set[str]
    #: By the place of the row in the demand; without the rows of `complete`.
    results: dict[int, RowResult]
    #: By cluster, in list order: those of clusters that credit on columns served whole.
    complete: dict[str, Sequence[RowResult]]
    #: Configured machines that no row and no target keeps, in keep-priority order, by cluster; of the clusters that
    #: were decided on.
    excess: dict[str, Sequence[MachineId]]


def conclude(
    fleet: DecisionState,
    excess: Mapping[str, Sequence[MachineId]] = MappingProxyType({}),
    on_phase: PhaseListener = unheard,
) -> Conclusion:
    """Run the phases; `excess` has the excess machines of clusters that are not decided on again."""
    on_phase(Phase.FOLD)
    credit(fleet)
    acquire(fleet)
    complete = {c.id: c.claims for c in fleet.clusters.values() if c.claims is not None and is_served_on_columns(c)}
    others = [cluster for cluster in fleet.clusters.values() if cluster.id not in complete]
    outcomes = [outcome for cluster in others for outcome in _outcomes(cluster)]
    claimed = frozenset(
        host.machine.id for cluster in others for host in cluster.hosts if host.is_claimed or host.is_target
    )
    bound = _bound_for(fleet)
    on_phase(Phase.ASSIGN)
    preempt(fleet)
    on_phase(Phase.PREEMPT)
    found = {**excess, **{name: claims.unclaimed() for name, claims in complete.items()}}
    found.update(_excess(fleet, claimed, found))
    actions = [
        *(action for row in fleet.rows for action in _bindings(row, bound[row.position])),
        *(action for row in fleet.rows for action in _preemptions(row, fleet)),
    ]
    excess_machines = reclaimed(fleet, found)
    results = dict(_results(outcomes, fleet, bound))
    on_phase(Phase.RECLAIM)
    return Conclusion(
        actions, excess_machines, claimed, results, {name: claims.results() for name, claims in complete.items()}, found
    )


def _excess(
    fleet: DecisionState, claimed: frozenset[str], known: Mapping[str, Sequence[MachineId]]
) -> dict[str, Sequence[MachineId]]:
    """Return the Configured machines that nothing keeps, of the clusters that are not known."""
    short: defaultdict[str, set[RowKey]] = defaultdict(set)
    # Many gangs have one profile; each is folded once.
    folded: dict[Fingerprint, Fingerprint] = {}
    for row in fleet.rows:
        if not row.is_short:
            continue
        need, cluster = row.need, row.cluster.id
        short[cluster].add(need.key)
        if row.same_key is not None:
            # A machine may have been bound for the folded row: a decision over aggregates folds gangs.
            if need.fingerprint not in folded:
                folded[need.fingerprint] = folded_need(need).fingerprint
            short[cluster].add((cluster, folded[need.fingerprint], ""))
    return {
        cluster: fleet.machines.excess_in(cluster, claimed, short[cluster])
        for cluster in fleet.machines.clusters_with_machines()
        if cluster not in known
    }


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What Phase 1 gave a row, before Phase 2 counts on machines that are not there yet."""

    row: RowState
    #: (host, shape, pods), by host in hosting order, then in the order of the row's groups.
    claims: list[tuple[HostState, int, int]]
    shares: list[tuple[HostState, tuple[tuple[int, int], ...]]]
    left: tuple[tuple[int, int], ...]
    divisible: tuple[tuple[int, int], ...]


def _outcomes(cluster: ClusterState) -> list[_Outcome]:
    outcomes = {
        row: _Outcome(
            row=row,
            claims=[],
            shares=[],
            left=tuple((g.index, g.left) for g in row.groups if g.left),
            divisible=tuple(sorted((row.divisible or {}).items())),
        )
        for row in cluster.rows
    }
    places = {group: place for row in cluster.rows for place, group in enumerate(row.groups)}
    for host in cluster.hosts:
        claims = host.claims.items()
        for group, count in sorted(claims, key=lambda item: places[item[0]]) if len(claims) > 1 else claims:
            outcomes[group.row].claims.append((host, group.index, count))
        for row, share in host.shares.items():
            outcomes[row].shares.append((host, tuple(sorted(share.items()))))
    return list(outcomes.values())


# ---- actions -----------------------------------------------------------------------------------------------------


def _bound_for(fleet: DecisionState) -> dict[int, list[HostState]]:
    """Return the machines that are bound for each row, by its position: each machine for its highest claim."""
    of_row: dict[int, list[HostState]] = {row.position: [] for row in fleet.rows}
    for cluster in fleet.clusters.values():
        for host in cluster.acquired:
            rows = host.rows()
            owners = [row for row in cluster.rows if row in rows] or [
                row for row in cluster.rows if row.may_acquire and row.may_use(host.machine, host.shape)
            ]
            of_row[owners[0].position].append(host)
    return of_row


def _in_state(hosts: Sequence[HostState], state: MachineState) -> list[MachineId]:
    return sorted(host.machine.id for host in hosts if host.machine.state is state)


def _bindings(row: RowState, hosts: Sequence[HostState]) -> list[Action]:
    """Return the row's Bootstraps, then its Provisions, each by id."""
    if not hosts:
        return []
    need = row.need
    kinds = {MachineState.IDLE: ActionKind.BOOTSTRAP, MachineState.SPECULATIVE: ActionKind.PROVISION}
    return [
        Action(
            kind=kind,
            machine_id=machine_id,
            cluster=need.cluster,
            reason="phase1.idle" if state is MachineState.IDLE else "phase1.speculative",
            profile=need.profile,
            group=need.group,
        )
        for state, kind in kinds.items()
        for machine_id in _in_state(hosts, state)
    ]


def _preemptions(row: RowState, fleet: DecisionState) -> list[Action]:
    need = row.need
    return [
        Action(
            kind=ActionKind.PREEMPT,
            machine_id=machine.id,
            cluster=machine.cluster,
            reason="phase2.inversion",
            grace_seconds=grace_seconds(max(0, need.profile.priority - machine.assigned_priority)),
            preemptor_priority=need.profile.priority,
            preemptor=Preemptor(need.cluster, need.fingerprint, need.group),
        )
        for machine in row.victims
    ]


# ---- results -----------------------------------------------------------------------------------------------------


def _results(
    outcomes: Sequence[_Outcome], fleet: DecisionState, bound: Mapping[int, Sequence[HostState]]
) -> Iterable[tuple[int, RowResult]]:
    """Return the position and the result of each outcome."""
    names = fleet.dimensions.names
    positions = [outcome.row.position for outcome in outcomes]
    needs = [outcome.row.need for outcome in outcomes]
    amounts = [_amounts(outcome, names) for outcome in outcomes]
    slots: dict[str, Iterable[object]] = {
        "need": needs,
        "members": zip(needs),
        "folded": repeat(False),
        "claimed": [_claimed(outcome) for outcome in outcomes],
        "bootstraps": [tuple(_in_state(bound[at], MachineState.IDLE)) if bound[at] else () for at in positions],
        "provisions": [tuple(_in_state(bound[at], MachineState.SPECULATIVE)) if bound[at] else () for at in positions],
        "held": [each.held for each in amounts],
        "deficit": [each.deficit for each in amounts],
        "domain": [outcome.row.domain or "" for outcome in outcomes],
        "has_domain": [outcome.row.domain is not None for outcome in outcomes],
        "satisfiable": [outcome.row.is_satisfiable for outcome in outcomes],
        "unresolved": [each.unresolved for each in amounts],
        "victims": [tuple([m.id for m in o.row.victims]) if o.row.victims else () for o in outcomes],
        "freed": [vector.sum_of([(machine.supply, 1) for machine in o.row.victims]) for o in outcomes],
        "placements": [tuple([Placement(h.machine.id, i, count) for h, i, count in o.claims]) for o in outcomes],
        "shares": [tuple([(h.machine.id, {names[d]: m for d, m in a}) for h, a in o.shares]) for o in outcomes],
        "unplaced": [outcome.left for outcome in outcomes],
        "impossible": [tuple(map(_impossibility, o.row.impossible)) if o.row.impossible else () for o in outcomes],
    }
    return zip(positions, made_at_once(RowResult, len(outcomes), slots), strict=True)


def _claimed(outcome: _Outcome) -> tuple[MachineId, ...]:
    machines = dict.fromkeys([host.machine.id for host, _, _ in outcome.claims])
    machines.update(dict.fromkeys([host.machine.id for host, _ in outcome.shares]))
    return tuple(machines)


def _impossibility(found: Impossible) -> Impossibility:
    index = None if found.group is None else found.group.index
    return Impossibility(index, found.dimension, found.wanted, found.largest)


class _Amounts(NamedTuple):
    """What a row holds and lacks."""

    held: Vector
    deficit: Vector
    unresolved: Vector


def _amounts(outcome: _Outcome, names: Sequence[str]) -> _Amounts:
    row, need = outcome.row, outcome.row.need
    shapes = (*need.shapes, *need.waiting) if need.waiting else need.shapes
    counts: dict[int, int] = {}
    for _, index, count in outcome.claims:
        counts[index] = counts.get(index, 0) + count
    held: Vector = vector.sum_of([(shapes[index].resources, count) for index, count in counts.items()])
    for _, amounts in outcome.shares:
        held = vector.add(held, {names[d]: milli for d, milli in amounts if names[d] != PODS})
    if not (outcome.left or outcome.divisible or row.impossible or row.has_left):
        return _Amounts(held, {}, {})
    set_aside = lacking_of(
        [(shapes[i.group.index].resources, i.group.count) for i in row.impossible if i.group is not None]
    )
    left = lacking_of([(shapes[index].resources, count) for index, count in outcome.left])
    deficit = vector.add(vector.add(left, set_aside), {names[d]: milli for d, milli in outcome.divisible})
    unresolved = lacking_of([(shapes[g.index].resources, g.left) for g in row.groups if g.left])
    unresolved = vector.add(vector.add(unresolved, set_aside), {names[d]: m for d, m in (row.divisible or {}).items()})
    return _Amounts(held, deficit, unresolved)
