"""Replays one row or machine of a finished decision with the reference's steps, on the machines that matter.

docs/adr/0121-explain-one-row.md. The allocations are filled with what the other rows held when the row was served; then
the reference serves the row again under an observer. That it comes to what the decision says is checked each time. This
module does not make a new decision, and an answer that differs from the decision is never returned.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from bigfleet.engine.decision import RowResult
from bigfleet.engine.explain.decided_fleet import DecidedFleet, Ints
from bigfleet.engine.explain.earmarks import EarmarkReplay
from bigfleet.engine.explain.explanation import ROWS_ASKED_MAX
from bigfleet.engine.explain.observer import Observer
from bigfleet.engine.explain.outcomes import idle_record, reclaim_reason, reclaimed_record, spared_for
from bigfleet.engine.explain.records import (
    CandidateConsidered,
    MachineKept,
    MachineRecord,
    MachineSpared,
    Record,
    Reporter,
    RowRef,
    SparedReason,
    Stage,
)
from bigfleet.engine.explain.rejections import ref
from bigfleet.engine.explain.scope import RowScope, may_preempt
from bigfleet.engine.folding import FoldedRow
from bigfleet.engine.matching import Fit, fits
from bigfleet.engine.reference.credit import Candidates, candidates_of, credit_domain, credit_plain
from bigfleet.engine.reference.decide import acquire_row, preempt_row
from bigfleet.engine.reference.pool import CandidatePool
from bigfleet.engine.reference.preempt import Victims, count_coming
from bigfleet.engine.reference.reclaim import rows_by_stamp_when_short, short_row_of
from bigfleet.engine.reference.rows import Allocations, DemandRow
from bigfleet.model import vector
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need
from bigfleet.model.states import MachineState
from bigfleet.model.vector import Vector

_FREE: Final = (MachineState.IDLE, MachineState.SPECULATIVE)


class ExplainMismatch(Exception):
    """A row came to something else than the decision says; the text says where."""


class _RowAgain:
    """One row on its way through the phases once more. Phases are replayed in order, each once."""

    def __init__(
        self, scope: RowScope, reporter: Reporter, *, heads: int, listed: int, also: Iterable[int] = ()
    ) -> None:
        fleet = scope.fleet
        rows = np.union1d(scope.machines(heads=heads, listed=listed), np.array(list(also), np.int64)).astype(np.int64)
        self._fleet, self._scope = fleet, scope
        self._rows = rows
        self._machines = {int(row): fleet.view.ids[row] for row in rows.tolist()}
        snapshot = fleet.objects(rows)
        self._snapshot = snapshot
        self._pool = CandidatePool(snapshot, fleet.options)
        self._allocations = Allocations(self._pool)
        self._victims = Victims(self._pool, drain_seconds=fleet.options.drain_seconds, weights=fleet.options.weights)
        self._observer = Observer(
            reporter, snapshot=snapshot, options=fleet.options, allocations=self._allocations, victims=self._victims
        )
        self._reporter = reporter
        self._others: dict[int, DemandRow] = {}
        self.row = self._row_at(scope.place, scope.result)
        #: What the row wanted when each of its scans began.
        self.starts: dict[Stage, Vector] = {
            Stage.DOMAIN: self.row.need.aggregate,
            Stage.CREDIT: self.row.need.aggregate,
        }

    def _row_at(self, place: int, result: RowResult) -> DemandRow:
        need = result.need
        fit = self._pool.shapes.fit(need.profile, need.min_unit)
        return DemandRow(
            need=need,
            members=result.members,
            folded=result.folded,
            position=place,
            fit=fit,
            shapes=fit.shapes,
            remaining=need.aggregate,
        )

    def _other(self, place: int) -> DemandRow:
        """Return a row that only stands in the allocations."""
        known = self._others.get(place)
        if known is None:
            need = self._fleet.needs[place]
            known = self._others[place] = DemandRow(
                need=need,
                members=(),
                folded=False,
                position=place,
                fit=Fit(need.profile, need.min_unit, frozenset()),
                shapes=frozenset(),
                remaining=vector.ZERO,
            )
        return known

    def _fill(self, allocations: dict[str, DemandRow], rows: Ints, places: Ints) -> None:
        for row in rows.tolist():
            place = int(places[row])
            if place >= 0 and place != self.row.position:
                allocations[self._machines[row]] = self._other(place)

    # ---- the phases ----------------------------------------------------------------------------------------------

    def replay_fold(self, places: Mapping[int, int]) -> None:
        """Replay what became of the row in folding; `places` is each member's place in the demand by identity."""
        row = self.row
        self._observer.row_folded(FoldedRow(row.need, list(row.members), folded=row.folded), row.position, places)

    def credit(self) -> None:
        """Replay the row's turn in the credit pass."""
        fleet, rows, rank = self._fleet, self._rows, self._scope.rank
        credited = rows[~fleet.is_free[rows] & (fleet.holder_rank[rows] < rank)]
        self._fill(self._allocations.claims, credited, fleet.holder)
        self._fill(self._allocations.earmarks, rows, self._scope.earmarked_by)
        self._observer.row_started(self.row, rank)
        if self.row.is_same:
            candidates = self._candidates()
            credit_domain(self.row, self._allocations, candidates)
            self._observer.credited_same(self.row, candidates)
        else:
            credit_plain(self.row, self._allocations)
            self._observer.credited_plain(self.row)

    def _candidates(self) -> Candidates:
        """Return what the row chose among: the machines that matter, and the sums of all."""
        shape_of, fleet = self._pool.shapes.of, self._fleet
        number_of = {int(fleet.shape[row]): shape_of[name] for row, name in self._machines.items()}
        counts = [
            Counter({number_of[shape]: count for shape, count in counted.items() if shape in number_of})
            for counted in self._scope.domain_counts()
        ]
        return candidates_of(self.row, self._allocations, counts)

    def acquire(self) -> None:
        """Replay the row's turn in acquisition."""
        fleet, rows, row = self._fleet, self._rows, self.row
        is_free, holder_rank = fleet.is_free[rows], fleet.holder_rank[rows]
        credited_later = rows[~is_free & (holder_rank > self._scope.rank)]
        self._fill(self._allocations.claims, credited_later, fleet.holder)
        self._fill(self._allocations.claims, rows[is_free & (holder_rank < self._scope.rank)], fleet.holder)
        self.starts[Stage.IDLE] = row.remaining
        idle = fleet.rows_of(self._scope.result.bootstraps)
        self.starts[Stage.SPECULATIVE] = vector.subtract(row.remaining, fleet.supply(idle))
        acquire_row(row, self._allocations, self._observer)

    def preempt(self) -> None:
        """Replay the row's turn in preemption, then check that it came to what the decision says."""
        fleet, rows, row, scope = self._fleet, self._rows, self.row, self._scope
        self._fill(
            self._allocations.claims, rows[fleet.is_free[rows] & (fleet.holder_rank[rows] > scope.rank)], fleet.holder
        )
        self._fill(self._allocations.taken, rows[fleet.taker_rank[rows] < scope.rank], fleet.taker)
        self._count_what_came_before()
        self.starts[Stage.COMING] = row.deficit
        preempt_row(row, self._allocations, self._victims, self._observer)
        self._check()

    def _count_what_came_before(self) -> None:
        """Count, for earlier rows with the same key, what drains for them."""
        scope, fleet = self._scope, self._fleet
        for place in fleet.places[self.row.need.key]:
            other = fleet.results[place]
            if fleet.rank[place] < scope.rank and other.deficit and may_preempt(other):
                earlier = self._row_at(place, other)
                earlier.remaining = other.deficit
                earlier.shapes = self._allowed(earlier, other)
                count_coming(earlier, self._allocations)
                scope.coming_taken = np.concatenate(
                    [scope.coming_taken, fleet.rows_of(machine.id for machine in earlier.coming)]
                )

    def _allowed(self, row: DemandRow, result: RowResult) -> frozenset[int]:
        key, shapes = row.need.profile.same_key, self._pool.shapes
        if key is None:
            return row.fit.shapes
        values = shapes.values(shapes.useful(row.fit.shapes, row.need.aggregate), key)
        return frozenset(number for number, value in values.items() if value == result.domain)

    def _check(self) -> None:
        row, result = self.row, self._scope.result
        came_to = (
            tuple(machine.id for machine in row.claimed),
            row.deficit,
            (row.domain or "", row.domain is not None, row.satisfiable),
            tuple(machine.id for machine in row.victims),
            row.remaining,
        )
        said = (
            result.claimed,
            result.deficit,
            (result.domain, result.has_domain, result.satisfiable),
            result.victims,
            result.unresolved,
        )
        if came_to != said:
            raise ExplainMismatch(f"row {row.need.key} came to {came_to}, the decision says {said}")

    def report_retained(self) -> None:
        """Report which Configured machines stay because the row holds them."""
        fleet, row_ref = self._fleet, ref(self.row)
        for row in fleet.by_keep_priority(self.row.need.cluster, MachineState.CONFIGURED).tolist():
            if fleet.holder[row] == self.row.position and fleet.taker[row] < 0:
                machine_id = fleet.view.ids[row]
                if self._reporter.wants_machine(machine_id):
                    self._reporter.report(MachineKept(machine=machine_id, cluster=self.row.need.cluster, row=row_ref))

    # ---- what a record of one machine needs beside ---------------------------------------------------------------

    def possible_victims(self) -> int:
        """Return how many machines could have been preempted, of which a record lists the first."""
        return self._scope.possible_victims(self._wanted_of_victims())

    def _wanted_of_victims(self) -> Vector:
        left = self.row.deficit
        for machine in self.row.coming:
            left = vector.subtract(left, machine.supply)
        return left

    def position(self, stage: Stage, machine: int) -> int:
        """Return how many candidates a scan considered before a machine that it considered."""
        row = self.row
        match stage:
            case Stage.DOMAIN:
                taken: Sequence[Machine] = ()
            case Stage.CREDIT:
                taken = [one for one in row.claimed if one.state not in _FREE]
            case Stage.IDLE:
                taken = [one for one in row.claimed if one.state is MachineState.IDLE]
            case Stage.SPECULATIVE:
                taken = [one for one in row.claimed if one.state is MachineState.SPECULATIVE]
            case Stage.COMING:
                taken = row.coming
            case Stage.VICTIM:
                taken = row.victims
        start = self._wanted_of_victims() if stage is Stage.VICTIM else self.starts[stage]
        places = self._fleet.rows_of(one.id for one in taken).tolist()
        return self._scope.position(stage, machine, start=start, taken=places)


# ---- a row -------------------------------------------------------------------------------------------------------


def replay_row(
    fleet: DecidedFleet,
    demand: Sequence[Need],
    place: int,
    reporter: Reporter,
    *,
    heads: int,
    listed: int,
) -> int:
    """Report what the reference would report of the row at a place of the folded list; return its possible victims.

    Every record comes but those of machines behind the first `heads` that a scan passes over, and a list of possible
    victims holds the first `listed` at least. Raises ExplainMismatch.
    """
    again = _RowAgain(RowScope(fleet, place, EarmarkReplay(fleet)), reporter, heads=heads, listed=listed)
    again.replay_fold({id(need): number for number, need in enumerate(demand)})
    again.credit()
    again.acquire()
    again.preempt()
    again.report_retained()
    return again.possible_victims()


# ---- a machine ---------------------------------------------------------------------------------------------------


class _OneMachine:
    """Passes on what is about one machine, with its place among all candidates."""

    def __init__(self, machine_id: str, machine: int, reporter: Reporter) -> None:
        self._machine_id = machine_id
        self._machine = machine
        self._reporter = reporter
        self.again: _RowAgain | None = None

    def wants_row(self, row: RowRef) -> bool:
        return True

    def wants_machine(self, machine_id: str) -> bool:
        return machine_id == self._machine_id

    def report(self, record: Record) -> None:
        if isinstance(record, CandidateConsidered):
            assert self.again is not None, "reported before its row"
            record = replace(record, position=self.again.position(record.stage, self._machine))
        self._reporter.report(record)


def replay_machine(fleet: DecidedFleet, machine_id: str, reporter: Reporter) -> None:
    """Report what the reference would report of a machine from the rows that have most to say, and its outcome.

    Records of rows come as far as they name machines that matter to them. Raises ExplainMismatch.
    """
    (machine,) = fleet.rows_of([machine_id]).tolist()
    ear = _OneMachine(machine_id, machine, reporter)
    earmarks = EarmarkReplay(fleet)
    asked = sorted(rows_to_replay(fleet, machine), key=lambda place: int(fleet.rank[place]))
    rows = []
    for place in asked:
        scope = RowScope(fleet, place, earmarks)
        # In the order of ranks, before a later row asks for its own.
        _ = scope.earmarked_by
        rows.append(_RowAgain(scope, ear, heads=0, listed=0, also=(machine,)))
    for phase in (_RowAgain.credit, _RowAgain.acquire, _RowAgain.preempt):
        for row in rows:
            ear.again = row
            phase(row)
    outcome = _outcome(fleet, machine)
    if outcome is not None:
        reporter.report(outcome)


def rows_to_replay(fleet: DecidedFleet, machine: int) -> frozenset[int]:
    """Return the places of the rows that `bigfleet.engine.explain.explanation.rows_to_ask` would ask about a
    machine."""
    (one,) = fleet.objects(np.array([machine])).machines.values()
    takers = {int(fleet.holder[machine]), int(fleet.taker[machine])}
    known: dict[object, bool] = {}

    def urgency(place: int) -> tuple[object, ...]:
        need = fleet.needs[place]
        key = (need.fingerprint, vector.vector_key(need.min_unit))
        if key not in known:
            known[key] = fits(need.profile, need.min_unit, one)
        return (place not in takers, not known[key], *(-part for part in need.profile.precedence), place)

    return frozenset(sorted(range(len(fleet.needs)), key=urgency)[:ROWS_ASKED_MAX])


def _outcome(fleet: DecidedFleet, machine: int) -> MachineRecord | None:
    """Return what became of a Configured or Idle machine, None in other states."""
    snapshot = fleet.objects(np.array([machine]))
    (one,) = snapshot.machines.values()
    allocations = Allocations(CandidatePool(snapshot, fleet.options))
    holder = int(fleet.holder[machine])
    if one.state is MachineState.IDLE:
        if holder >= 0:
            allocations.claims[one.id] = _standing(fleet, holder, allocations)
        return idle_record(one, snapshot, fleet.options, allocations)
    if one.state is not MachineState.CONFIGURED or not one.cluster:
        return None
    if fleet.taker[machine] >= 0:
        return MachineSpared(machine=one.id, cluster=one.cluster, reason=SparedReason.PREEMPTED)
    if holder >= 0:
        return MachineKept(machine=one.id, cluster=one.cluster, row=RowRef.of(fleet.needs[holder], holder))
    if one.cluster not in fleet.options.reported:
        return MachineSpared(machine=one.id, cluster=one.cluster, reason=SparedReason.CLUSTER_NOT_REPORTED)
    rows = [
        _standing(fleet, place, allocations) for place in fleet.in_order if fleet.needs[place].cluster == one.cluster
    ]
    short_row = short_row_of(one, fleet.options, rows_by_stamp_when_short(rows))
    if short_row is not None:
        return spared_for(one, short_row)
    order = fleet.by_keep_priority(one.cluster, MachineState.CONFIGURED)
    position = int(np.flatnonzero(order == machine)[0])
    before = order[:position]
    held = before[(fleet.holder[before] >= 0) & (fleet.taker[before] < 0)]
    last_kept = next(iter(fleet.objects(held[-1:]).machines.values())) if len(held) else None
    return reclaimed_record(one, position, reclaim_reason(one, fleet.options, allocations, rows), last_kept)


def _standing(fleet: DecidedFleet, place: int, allocations: Allocations) -> DemandRow:
    """Return a row as it stood when everybody had been served."""
    result = fleet.results[place]
    need = result.need
    fit = allocations.pool.shapes.fit(need.profile, need.min_unit)
    return DemandRow(
        need=need,
        members=result.members,
        folded=result.folded,
        position=place,
        fit=fit,
        shapes=fit.shapes,
        remaining=result.unresolved,
        deficit=result.deficit,
        domain=result.domain if result.has_domain else None,
    )
