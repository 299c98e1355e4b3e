"""Decides one cycle over demand shapes: credit, acquire, preempt, reclaim, release, all on one snapshot.

Equal arguments give equal decisions in any process. It must never read a clock, do I/O, draw randomness, log, or
remember anything between two calls.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bigfleet.engine.decision import (
    Action,
    ActionKind,
    Basis,
    Decision,
    Impossibility,
    Options,
    Placement,
    Preemptor,
    RowResult,
)
from bigfleet.engine.parking import stamp_parked
from bigfleet.engine.preempt import grace_seconds
from bigfleet.engine.shapes.acquire import acquire
from bigfleet.engine.shapes.credit import credit
from bigfleet.engine.shapes.fleet import Fleet, build
from bigfleet.engine.shapes.release import reclaims, releases
from bigfleet.engine.shapes.state import PODS, Host, Row
from bigfleet.engine.shapes.victims import preempt
from bigfleet.engine.snapshot import Snapshot
from bigfleet.model import vector
from bigfleet.model.ids import MachineId
from bigfleet.model.need import Need
from bigfleet.model.states import MachineState
from bigfleet.model.vector import Vector


def decide(snapshot: Snapshot, demand: Sequence[Need], options: Options) -> Decision:
    """Return the decision of one cycle; `demand` is in list order."""
    return decide_with_fleet(snapshot, demand, options)[0]


def decide_with_fleet(snapshot: Snapshot, demand: Sequence[Need], options: Options) -> tuple[Decision, Fleet]:
    """Return the decision and the working state that it left, from which it can be explained."""
    fleet = build(snapshot, stamp_parked(list(demand), options.parking_ages), options)
    credit(fleet)
    acquire(fleet)
    outcomes = [_outcome(row) for row in fleet.rows]
    hosts = [host for cluster in fleet.clusters.values() for host in cluster.hosts]
    claimed = frozenset(host.machine.id for host in hosts if host.is_claimed or host.is_target)
    bound = _bound_for(fleet)
    preempt(fleet)
    actions = [
        *(action for row in fleet.rows for action in _bindings(row, bound[row.position])),
        *(action for row in fleet.rows for action in _preemptions(row, fleet)),
        *reclaims(fleet, claimed),
        *releases(fleet, claimed),
    ]
    results = {outcome.row.position: _result(outcome, fleet, bound[outcome.row.position]) for outcome in outcomes}
    decision = Decision(
        actions=tuple(actions),
        rows=tuple(results[position] for position in sorted(results)),
        basis=Basis(demand=tuple(demand), options=options, snapshot=lambda: snapshot),
    )
    return decision, fleet


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What Phase 1 gave a row, before Phase 2 counts on machines that are not there yet."""

    row: Row
    claims: tuple[tuple[Host, int, int], ...]
    shares: tuple[tuple[Host, tuple[tuple[int, int], ...]], ...]
    left: tuple[tuple[int, int], ...]
    divisible: tuple[tuple[int, int], ...]


def _outcome(row: Row) -> _Outcome:
    hosts = row.cluster.hosts
    return _Outcome(
        row=row,
        claims=tuple((h, g.index, h.claims[g]) for h in hosts for g in row.groups if g in h.claims),
        shares=tuple((h, tuple(sorted(h.shares[row].items()))) for h in hosts if row in h.shares),
        left=tuple((g.index, g.left) for g in row.groups if g.left),
        divisible=tuple(sorted((row.divisible or {}).items())),
    )


# ---- actions -----------------------------------------------------------------------------------------------------


def _bound_for(fleet: Fleet) -> dict[int, list[Host]]:
    """Return the machines that are bound for each row, by its position: each machine for its highest claim."""
    of_row: dict[int, list[Host]] = {row.position: [] for row in fleet.rows}
    for cluster in fleet.clusters.values():
        for host in cluster.acquired:
            rows = host.rows()
            owners = [row for row in cluster.rows if row in rows] or [
                row for row in cluster.rows if row.may_acquire and row.may_use(host.machine, host.shape)
            ]
            of_row[owners[0].position].append(host)
    return of_row


def _in_state(hosts: Sequence[Host], state: MachineState) -> list[MachineId]:
    return sorted(host.machine.id for host in hosts if host.machine.state is state)


def _bindings(row: Row, hosts: Sequence[Host]) -> list[Action]:
    """Return the row's Bootstraps, then its Provisions, each by id."""
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


def _preemptions(row: Row, fleet: Fleet) -> list[Action]:
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


def _result(outcome: _Outcome, fleet: Fleet, bound: Sequence[Host]) -> RowResult:
    row, names = outcome.row, fleet.dimensions.names
    shapes = [*row.need.shapes, *row.need.waiting]
    held = _sum([(shapes[index].resources, count) for _, index, count in outcome.claims])
    for _, amounts in outcome.shares:
        held = vector.add(held, {names[d]: milli for d, milli in amounts if names[d] != PODS})
    impossible = [(shapes[i.group.index].resources, i.group.count) for i in row.impossible if i.group is not None]
    left = _sum([(shapes[index].resources, count) for index, count in outcome.left])
    deficit = vector.add(vector.add(left, _sum(impossible)), {names[d]: milli for d, milli in outcome.divisible})
    unresolved = vector.add(_sum([(shapes[g.index].resources, g.left) for g in row.groups if g.left]), _sum(impossible))
    unresolved = vector.add(unresolved, {names[d]: milli for d, milli in (row.divisible or {}).items()})
    machines = {h.machine.id: h.machine for h in row.cluster.hosts if any(h is c[0] for c in outcome.claims)}
    machines |= {h.machine.id: h.machine for h, _ in outcome.shares}
    return RowResult(
        need=row.need,
        members=(row.need,),
        claimed=tuple(machines),
        bootstraps=tuple(_in_state(bound, MachineState.IDLE)),
        provisions=tuple(_in_state(bound, MachineState.SPECULATIVE)),
        held=held,
        deficit=deficit,
        domain=row.domain or "",
        has_domain=row.domain is not None,
        satisfiable=row.is_satisfiable,
        unresolved=unresolved,
        victims=tuple(machine.id for machine in row.victims),
        freed=_sum([(machine.supply, 1) for machine in row.victims]),
        placements=tuple(Placement(h.machine.id, index, count) for h, index, count in outcome.claims),
        shares=tuple((h.machine.id, {names[d]: milli for d, milli in amounts}) for h, amounts in outcome.shares),
        unplaced=outcome.left,
        impossible=tuple(
            Impossibility(None if i.group is None else i.group.index, i.dimension, i.wanted, i.largest)
            for i in row.impossible
        ),
    )


def _sum(parts: Sequence[tuple[Vector, int]]) -> Vector:
    total: Vector = vector.ZERO
    for amounts, count in parts:
        total = vector.add(total, vector.scale(amounts, count))
    return total
