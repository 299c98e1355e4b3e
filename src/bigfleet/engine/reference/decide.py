"""Decides for one shard from one view of its machines and of demand: the specification in plain Python.

`decide` reads like docs/spec/aggregates.md: fold, stamp, credit, acquire, preempt, reclaim, release, all on one
snapshot. Each phase continues in its own module (`folding`, `parking`, `credit`, `acquire`, `preempt`, `reclaim`). A
faster engine must give the same answer, action for action; the meaning changes here first. It must never read a clock,
do I/O, draw randomness, log, or remember anything between two calls.
"""

from collections.abc import Sequence

from bigfleet.engine.decision import (
    Action,
    ActionKind,
    Basis,
    Decision,
    Options,
    Phase,
    PhaseListener,
    Preemptor,
    RowResult,
    unheard,
)
from bigfleet.engine.explain.observer import Observer
from bigfleet.engine.explain.outcomes import report_outcomes
from bigfleet.engine.explain.records import Reporter
from bigfleet.engine.folding import FoldedRow, fold
from bigfleet.engine.parking import stamp_parked
from bigfleet.engine.reference.acquire import acquire_from, may_acquire
from bigfleet.engine.reference.credit import credit_plain, credit_same
from bigfleet.engine.reference.pool import CandidatePool
from bigfleet.engine.reference.preempt import Victims, count_coming, grace_seconds, may_preempt, pick_victims
from bigfleet.engine.reference.reclaim import reclaims, releases, rows_by_stamp_when_short
from bigfleet.engine.reference.rows import Allocations, DemandRow, supply_of
from bigfleet.engine.snapshot import Snapshot
from bigfleet.model.need import Need
from bigfleet.model.states import MachineState


def decide(
    snapshot: Snapshot,
    demand: Sequence[Need],
    options: Options,
    reporter: Reporter | None = None,
    *,
    on_phase: PhaseListener = unheard,
) -> Decision:
    """Decide one cycle; equal arguments give equal decisions in any process, with any listener.

    `demand` is in list order (docs/spec/model.md §8). All phases see the one snapshot; a machine has at most one
    action.
    """
    pool = CandidatePool(snapshot, options)
    allocations = Allocations(pool)
    victims = Victims(pool, drain_seconds=options.drain_seconds, weights=options.weights)
    observer = None
    if reporter is not None:
        observer = Observer(reporter, snapshot=snapshot, options=options, allocations=allocations, victims=victims)

    folded = fold(demand, pool)
    if observer is not None:
        observer.folded(demand, folded)
    on_phase(Phase.FOLD)
    rows = _rows(folded, pool, options)
    in_order = processing_order(rows)
    _assign(in_order, allocations, observer)
    on_phase(Phase.ASSIGN)
    _preempt(in_order, allocations, victims, observer)
    on_phase(Phase.PREEMPT)
    short = rows_by_stamp_when_short(rows)
    if reporter is not None:
        report_outcomes(
            reporter, snapshot=snapshot, options=options, allocations=allocations, rows=in_order, short=short
        )

    actions = [
        *(action for row in in_order for action in _acquisitions(row)),
        *(action for row in in_order for action in _preemptions(row)),
        *reclaims(snapshot, options, allocations, short),
        *releases(snapshot, options, allocations),
    ]
    decision = Decision(
        actions=tuple(actions),
        rows=tuple(_result(row) for row in rows),
        basis=Basis(demand=tuple(demand), options=options, snapshot=lambda: snapshot),
    )
    on_phase(Phase.RECLAIM)
    return decision


def processing_order(rows: Sequence[DemandRow]) -> list[DemandRow]:
    """Return the rows by precedence, highest first; equals in list order (docs/spec/engine.md §2.2)."""
    return sorted(rows, key=lambda row: row.need.profile.precedence, reverse=True)


def _rows(folded: Sequence[FoldedRow], pool: CandidatePool, options: Options) -> list[DemandRow]:
    needs = stamp_parked([row.need for row in folded], options.parking_ages)
    rows = []
    for position, (need, origin) in enumerate(zip(needs, folded, strict=True)):
        fit = pool.shapes.fit(need.profile, need.min_unit)
        rows.append(
            DemandRow(
                need=need,
                members=tuple(origin.members),
                folded=origin.folded,
                position=position,
                fit=fit,
                shapes=fit.shapes,
                remaining=need.aggregate,
            )
        )
    return rows


def _assign(in_order: Sequence[DemandRow], allocations: Allocations, observer: Observer | None) -> None:
    """Phase 1: credit every row, then let every row acquire; no claim is ever taken back."""
    for rank, row in enumerate(in_order):
        if observer is not None:
            observer.row_started(row, rank)
        credit_row(row, allocations, observer)
    for row in in_order:
        acquire_row(row, allocations, observer)


def credit_row(row: DemandRow, allocations: Allocations, observer: Observer | None) -> None:
    """Claim what serves the row already."""
    if row.is_same:
        candidates = credit_same(row, allocations)
        if observer is not None:
            observer.credited_same(row, candidates)
    else:
        credit_plain(row, allocations)
        if observer is not None:
            observer.credited_plain(row)


def acquire_row(row: DemandRow, allocations: Allocations, observer: Observer | None) -> None:
    """Take from Idle, then from Speculative, however cheap that is, if the row may; what remains is its deficit."""
    for state in (MachineState.IDLE, MachineState.SPECULATIVE) if may_acquire(row) else ():
        before = row.remaining
        picks = acquire_from(row, allocations, state) if before else []
        if observer is not None:
            observer.acquired(row, state, before=before, picks=picks)
    row.deficit = row.remaining
    if observer is not None:
        observer.row_finished(row)


def _preempt(
    in_order: Sequence[DemandRow], allocations: Allocations, victims: Victims, observer: Observer | None
) -> None:
    """Phase 2: what drains for a short row counts first, then victims are picked until nothing remains."""
    for row in in_order:
        preempt_row(row, allocations, victims, observer)


def preempt_row(row: DemandRow, allocations: Allocations, victims: Victims, observer: Observer | None) -> None:
    """Count what drains for a short row and pick its victims, if it may have any."""
    if row.deficit and may_preempt(row):
        count_coming(row, allocations)
        if observer is not None:
            observer.coming_counted(row, before=row.deficit)
        before = row.remaining
        picks = pick_victims(row, allocations, victims)
        if observer is not None:
            observer.victims_picked(row, before=before, picks=picks)
    if row.remaining and observer is not None:
        observer.row_unresolved(row)


def _acquisitions(row: DemandRow) -> list[Action]:
    kinds = (
        (MachineState.IDLE, ActionKind.BOOTSTRAP, "phase1.idle"),
        (MachineState.SPECULATIVE, ActionKind.PROVISION, "phase1.speculative"),
    )
    return [
        Action(
            kind=kind,
            machine_id=machine.id,
            cluster=row.need.cluster,
            reason=reason,
            profile=row.need.profile,
            group=row.need.group,
        )
        for state, kind, reason in kinds
        for machine in row.held_in(state)
    ]


def _preemptions(row: DemandRow) -> list[Action]:
    need = row.need
    return [
        Action(
            kind=ActionKind.PREEMPT,
            machine_id=victim.id,
            cluster=victim.cluster,
            reason="phase2.inversion",
            grace_seconds=grace_seconds(need.profile.priority - victim.assigned_priority),
            preemptor_priority=need.profile.priority,
            preemptor=Preemptor(need.cluster, need.fingerprint, need.group),
        )
        for victim in row.victims
    ]


def _result(row: DemandRow) -> RowResult:
    return RowResult(
        need=row.need,
        members=row.members,
        folded=row.folded,
        claimed=tuple(machine.id for machine in row.claimed),
        bootstraps=tuple(machine.id for machine in row.held_in(MachineState.IDLE)),
        provisions=tuple(machine.id for machine in row.held_in(MachineState.SPECULATIVE)),
        held=supply_of(row.claimed),
        deficit=row.deficit,
        domain=row.domain or "",
        has_domain=row.domain is not None,
        satisfiable=row.satisfiable,
        unresolved=row.remaining,
        victims=tuple(machine.id for machine in row.victims),
        freed=supply_of(row.victims),
    )
