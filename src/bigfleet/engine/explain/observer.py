"""Reports to a listener what Phases 1 and 2 did to each row, in decision order (docs/spec/aggregates.md §8).

`decide` makes an observer only when it has a reporter, and calls it after each step. It reads the same allocations as
the phases; a decision is the same with and without it. What happens to machines in Phase 3 is reported by
`bigfleet.engine.explain.outcomes`.
"""

from collections.abc import Mapping, Sequence

from bigfleet.engine.decision import ActionKind, Options
from bigfleet.engine.explain.candidate_scans import (
    CandidateScan,
    OrderKey,
    RunnersUp,
    TakenRecord,
    TraceEmitter,
    spread_runner_up,
)
from bigfleet.engine.explain.records import (
    BEST_DOMAINS_MAX,
    MATCHING_COUNT_MAX,
    Acquired,
    BestDomain,
    Credited,
    DomainsRanked,
    Earmarked,
    MatchingCounts,
    Mode,
    RankedDomain,
    RankedVictim,
    Reporter,
    RowFinished,
    RowFolded,
    RowNotFolded,
    RowRef,
    RowStarted,
    RowUnresolved,
    Stage,
    VictimComing,
    VictimPicked,
    VictimsRanked,
    difference,
)
from bigfleet.engine.explain.rejections import ref
from bigfleet.engine.folding import FoldedRow, folded_need, proving_shapes
from bigfleet.engine.reference.acquire import cheapest_domain
from bigfleet.engine.reference.credit import Candidates, incumbents_first, is_own
from bigfleet.engine.reference.gang_domains import Coverage, DomainOffer, deciding_rule
from bigfleet.engine.reference.preempt import Victims, grace_seconds
from bigfleet.engine.reference.rows import Allocations, DemandRow, supply_of
from bigfleet.engine.reference.spread import SpreadPick
from bigfleet.engine.snapshot import Snapshot
from bigfleet.model import vector
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need
from bigfleet.model.penalty import bucket_upper_dollars
from bigfleet.model.states import MachineState
from bigfleet.model.vector import Vector

_STAGE_OF_STATE = {MachineState.IDLE: Stage.IDLE, MachineState.SPECULATIVE: Stage.SPECULATIVE}


class Observer:
    """Reports the steps of one decision."""

    def __init__(
        self, reporter: Reporter, *, snapshot: Snapshot, options: Options, allocations: Allocations, victims: Victims
    ) -> None:
        self._reporter = reporter
        self._snapshot = snapshot
        self._allocations = allocations
        self._pool = allocations.pool
        self._victims = victims
        self._emitter = TraceEmitter(reporter, options, allocations)
        #: Domains among which each Same row chose.
        self._domains: dict[DemandRow, Sequence[DomainOffer]] = {}

    # ---- folding and the start of a row ------------------------------------------------------------------------

    def folded(self, demand: Sequence[Need], rows: Sequence[FoldedRow]) -> None:
        """Report what became of each Same row, in the order of the folded list."""
        place = {id(need): position for position, need in enumerate(demand)}
        for position, row in enumerate(rows):
            if self._reporter.wants_row(RowRef.of(row.need, position)):
                self.row_folded(row, position, place)

    def row_folded(self, row: FoldedRow, position: int, place: Mapping[int, int]) -> None:
        """Report what became of a row at its place of the folded list, if it is a Same row or was made of such.

        `place` is the place in the demand of each member by its identity.
        """
        row_ref = RowRef.of(row.need, position)
        if row.folded:
            members = tuple(RowRef.of(member, place[id(member)]) for member in row.members)
            proof = min(self._proof_machines(row.need))
            self._reporter.report(RowFolded(row=row_ref, members=members, proof_machine=proof))
        elif row.need.profile.same_key is not None:
            count = self._matching_but_small(folded_need(row.need))
            self._reporter.report(RowNotFolded(row=row_ref, matching_machines=count))

    def _places(self, folded: Need) -> list[Machine]:
        pool = self._pool
        bucket = folded.profile.interruption_bucket
        return [*pool.bound(folded.cluster), *pool.own_creating(folded), *pool.idle, *pool.speculative(bucket)]

    def _proof_machines(self, folded: Need) -> list[str]:
        proving = proving_shapes(folded, self._pool)
        return [machine.id for machine in self._places(folded) if self._pool.shapes.of[machine.id] in proving]

    def _matching_but_small(self, folded: Need) -> int:
        matching = self._pool.shapes.matching(folded.profile)
        small = (
            machine
            for machine in self._places(folded)
            if self._pool.shapes.of[machine.id] in matching and not vector.covers(machine.supply, folded.aggregate)
        )
        return sum(1 for _, _ in zip(small, range(MATCHING_COUNT_MAX), strict=False))

    def row_started(self, row: DemandRow, rank: int) -> None:
        """Report that a row's turn in the credit pass has come; `rank` is its place in processing order."""
        if not self._emitter.wants(row):
            return
        profile = row.need.profile
        mode = Mode.SPREAD if profile.strict_spread is not None else Mode.SAME if row.is_same else Mode.PLAIN
        self._reporter.report(
            RowStarted(
                row=ref(row),
                rank=rank,
                priority=profile.priority,
                interruption=profile.interruption_bucket,
                reclamation=profile.reclamation_bucket,
                aggregate=row.need.aggregate,
                min_unit=row.need.min_unit,
                mode=Mode.PARKED if row.need.parked else mode,
            )
        )

    # ---- credit ------------------------------------------------------------------------------------------------

    def credited_plain(self, row: DemandRow) -> None:
        """Report the credit scan of a row without Same."""
        if self._emitter.wants(row):
            self._report_credit(row, self._credit_order(row))

    def credited_same(self, row: DemandRow, candidates: Candidates) -> None:
        """Report how a Same row chose its domain, what it was credited with and what it earmarked."""
        self._domains[row] = candidates.domains
        if not self._emitter.wants(row):
            return
        aggregate = row.need.aggregate
        seen: list[Machine] = [*self._credit_order(row)]
        if not row.need.parked:
            seen += [*self._state_order(row, MachineState.IDLE), *self._state_order(row, MachineState.SPECULATIVE)]
        among = CandidateScan(row, Stage.DOMAIN, seen, start=aggregate, taken=())
        self._emitter.emit(among, order_key=self._order_key(row), taken_record=self._credited(row))
        self._report_domains(row, candidates)
        if row.domain is None:
            return
        chosen = incumbents_first(row, self._allocations, candidates)
        chosen_ids = {machine.id for machine in chosen}
        others = [machine for machine in candidates.creditable if machine.id not in chosen_ids]
        self._report_credit(row, [*chosen, *others])
        remaining = row.remaining
        for machine in candidates.acquirable:
            if self._allocations.earmarks.get(machine.id) is row:
                remaining = vector.subtract(remaining, machine.supply)
                if self._reporter.wants_machine(machine.id):
                    self._reporter.report(Earmarked(row=ref(row), machine=machine.id, remaining=remaining))

    def _report_credit(self, row: DemandRow, machines: Sequence[Machine]) -> None:
        scan = CandidateScan(row, Stage.CREDIT, machines, start=row.need.aggregate, taken=row.claimed)
        self._emitter.emit(scan, order_key=self._order_key(row), taken_record=self._credited(row))

    def _credited(self, row: DemandRow) -> TakenRecord:
        def record(machine: Machine, before: Vector) -> Credited:
            return Credited(
                row=ref(row),
                machine=machine.id,
                state=machine.state,
                own=is_own(row, machine),
                supply=machine.supply,
                remaining=vector.subtract(before, machine.supply),
            )

        return record

    def _report_domains(self, row: DemandRow, candidates: Candidates) -> None:
        key, domains = row.need.profile.same_key, candidates.domains
        assert key is not None, "only a Same row has domains"
        aggregate = row.need.aggregate
        decided_by = deciding_rule(aggregate, domains[0], domains[1]) if len(domains) > 1 else None
        ranked = tuple(_ranked(domain, aggregate) for domain in domains)
        self._reporter.report(DomainsRanked(row=ref(row), key=key, domains=ranked, decided_by=decided_by))

    # ---- acquisition and the end of Phase 1 --------------------------------------------------------------------

    def acquired(self, row: DemandRow, state: MachineState, *, before: Vector, picks: Sequence[SpreadPick]) -> None:
        """Report the scan of one state; `before` is what the row wanted when it began."""
        if not self._emitter.wants(row):
            return
        held_before = [machine for machine in row.claimed if machine.state is not state]
        taken = [machine for machine in row.claimed if machine.state is state]
        scan = CandidateScan(row, _STAGE_OF_STATE[state], self._state_order(row, state), start=before, taken=taken)
        candidates = self._emitter.candidates(scan) if taken else []
        runners_up = RunnersUp(scan, candidates)
        order_key = self._order_key(row)

        def record(machine: Machine, remaining: Vector) -> Acquired:
            if row.need.profile.strict_spread is None:
                second = runners_up.of(machine, remaining)
            else:
                second = spread_runner_up(scan, candidates, machine, held=held_before, preference=cheapest_domain)
            pick = next((pick for pick in picks if pick.machine is machine), None)
            return _acquired(row, machine, vector.subtract(remaining, machine.supply), second, order_key, pick)

        if row.need.profile.strict_spread is None:
            self._emitter.emit(scan, order_key=order_key, taken_record=record)
        else:
            self._emitter.emit_spread(scan, picks, order_key=order_key, taken_record=record)

    def row_finished(self, row: DemandRow) -> None:
        """Report what Phase 1 gave the row, and for a short row what there would be to match."""
        if not self._emitter.wants(row):
            return
        is_short = bool(row.deficit)
        self._reporter.report(
            RowFinished(
                row=ref(row),
                satisfied=not is_short,
                deficit=row.deficit,
                claimed=tuple(machine.id for machine in row.claimed),
                bootstraps=tuple(machine.id for machine in row.held_in(MachineState.IDLE)),
                provisions=tuple(machine.id for machine in row.held_in(MachineState.SPECULATIVE)),
                domain=row.domain or "",
                satisfiable=row.satisfiable,
                matching=self._matching_counts(row) if is_short else None,
                best_domains=self._best_domains(row) if is_short else (),
            )
        )

    def _matching_counts(self, row: DemandRow) -> MatchingCounts:
        pool = self._pool
        found = (
            len(pool.idle_fitting(row.fit)),
            len(pool.speculative_fitting(row.fit)),
            len(pool.fitting(pool.configured, row.fit)),
        )
        idle, speculative, configured = (min(count, MATCHING_COUNT_MAX) for count in found)
        return MatchingCounts(
            idle=idle,
            speculative=speculative,
            configured=configured,
            is_capped=any(count > MATCHING_COUNT_MAX for count in found),
        )

    def _best_domains(self, row: DemandRow) -> tuple[BestDomain, ...]:
        aggregate = row.need.aggregate
        best = [
            BestDomain(value=domain.value, coverage_per_mille=coverage_per_mille(aggregate, domain.total))
            for domain in self._domains.get(row, ())
        ]
        best.sort(key=lambda domain: (-domain.coverage_per_mille, domain.value))
        return tuple(best[:BEST_DOMAINS_MAX])

    # ---- preemption --------------------------------------------------------------------------------------------

    def coming_counted(self, row: DemandRow, *, before: Vector) -> None:
        """Report what drains for the row already; `before` is its deficit."""
        if not self._emitter.wants(row):
            return
        draining = [m for m in self._snapshot.of_state(MachineState.DRAINING) if m.preempted_for is not None]
        scan = CandidateScan(row, Stage.COMING, draining, start=before, taken=row.coming)

        def record(machine: Machine, remaining: Vector) -> VictimComing:
            return VictimComing(
                row=ref(row),
                machine=machine.id,
                supply=machine.supply,
                remaining=vector.subtract(remaining, machine.supply),
            )

        self._emitter.emit(scan, order_key=lambda machine: (), taken_record=record)

    def victims_picked(self, row: DemandRow, *, before: Vector, picks: Sequence[SpreadPick]) -> None:
        """Report who could be preempted for the row and who is; `before` is what was wanted when it began."""
        if not self._emitter.wants(row):
            return
        priority = row.need.profile.priority
        everyone = sorted(
            self._snapshot.of_state(MachineState.CONFIGURED),
            key=lambda machine: (-self._victims.score(priority, machine), machine.id),
        )
        scan = CandidateScan(row, Stage.VICTIM, everyone, start=before, taken=row.victims)
        candidates = self._emitter.candidates(scan)
        if before:
            ranked = tuple(self._ranked_victim(row, machine) for machine in candidates)
            self._reporter.report(VictimsRanked(row=ref(row), victims=ranked))
        runners_up = RunnersUp(scan, candidates)
        place = {machine.id: position for position, machine in enumerate(candidates)}

        def record(machine: Machine, remaining: Vector) -> VictimPicked:
            if row.need.profile.strict_spread is None:
                second = runners_up.of(machine, remaining)
            else:
                second = spread_runner_up(
                    scan,
                    candidates,
                    machine,
                    held=[*row.claimed, *row.coming],
                    preference=lambda candidate, domain: (place[candidate.id], domain),
                )
            return self._picked(row, machine, vector.subtract(remaining, machine.supply), second)

        def order_key(machine: Machine) -> tuple[float, ...]:
            return (self._victims.score(priority, machine),)

        if row.need.profile.strict_spread is None:
            self._emitter.emit(scan, order_key=order_key, taken_record=record)
        else:
            self._emitter.emit_spread(scan, picks, order_key=order_key, taken_record=record)

    def row_unresolved(self, row: DemandRow) -> None:
        """Report a row that Phase 2 left short."""
        if self._emitter.wants(row):
            self._reporter.report(
                RowUnresolved(
                    row=ref(row), deficit=row.remaining, victims=len(row.victims), freed=supply_of(row.victims)
                )
            )

    def _claimed_by(self, machine: Machine) -> RowRef | None:
        holder = self._allocations.claims.get(machine.id)
        return None if holder is None else ref(holder)

    def _ranked_victim(self, row: DemandRow, machine: Machine) -> RankedVictim:
        priority = row.need.profile.priority
        terms = self._victims.terms(priority, machine)
        return RankedVictim(
            machine=machine.id,
            cluster=machine.cluster,
            claimed_by=self._claimed_by(machine),
            score=self._victims.score(priority, machine),
            gap=priority - machine.assigned_priority,
            priority_term=terms[0],
            drain_term=terms[1],
            interruption_term=terms[2],
            reclamation_term=terms[3],
        )

    def _picked(self, row: DemandRow, machine: Machine, remaining: Vector, second: Machine | None) -> VictimPicked:
        priority = row.need.profile.priority
        score = self._victims.score(priority, machine)
        return VictimPicked(
            row=ref(row),
            machine=machine.id,
            cluster=machine.cluster,
            claimed_by=self._claimed_by(machine),
            score=score,
            grace_seconds=grace_seconds(priority - machine.assigned_priority),
            remaining=remaining,
            runner_up=second.id if second is not None else "",
            score_difference=None if second is None else difference(self._victims.score(priority, second), score),
        )

    # ---- orders of the scans -----------------------------------------------------------------------------------

    def _credit_order(self, row: DemandRow) -> list[Machine]:
        """Return everything that the credit scan could have looked at, what the pool hides included."""
        cluster = row.need.cluster
        own = self._pool.own_creating(row.need)
        own_ids = {machine.id for machine in own}
        creating = self._snapshot.of_state(MachineState.CREATING)
        return [
            *self._snapshot.of_cluster(cluster, MachineState.CONFIGURED),
            *self._snapshot.of_cluster(cluster, MachineState.CONFIGURING),
            *own,
            *(machine for machine in creating if machine.id not in own_ids),
        ]

    def _state_order(self, row: DemandRow, state: MachineState) -> list[Machine]:
        """Return every machine of a state in the row's acquisition order, what the pool hides included."""
        order_key = self._order_key(row)
        return sorted(self._snapshot.of_state(state), key=lambda machine: (order_key(machine), machine.id))

    def _order_key(self, row: DemandRow) -> OrderKey:
        dollars = bucket_upper_dollars(row.need.profile.interruption_bucket)

        def order_key(machine: Machine) -> tuple[float, ...]:
            match machine.state:
                case MachineState.IDLE:
                    return (machine.price_usd_per_hour,)
                case MachineState.SPECULATIVE:
                    return (machine.effective_cost_usd_per_hour(dollars),)
                case MachineState.CONFIGURED | MachineState.CONFIGURING:
                    return (machine.price_usd_per_hour, machine.assigned_reclamation_penalty_dollars)
                case _:
                    return ()

        return order_key


def coverage_per_mille(aggregate: Vector, total: Vector) -> int:
    """Return the smallest ⌊1000 × min(total, aggregate) ÷ aggregate⌋ over the aggregate's dimensions; 1000 for none."""
    return min((1000 * min(total.get(name, 0), milli) // milli for name, milli in aggregate.items()), default=1000)


def _ranked(domain: DomainOffer, aggregate: Vector) -> RankedDomain:
    coverage = Coverage(aggregate)
    satisfiable = vector.covers(domain.total, aggregate)
    creditable, own = coverage.capped(domain.creditable), coverage.capped(domain.own)
    if satisfiable:
        parts = (creditable, own, coverage.uncapped(domain.total))
    else:
        parts = (coverage.capped(domain.total), creditable, own)
    first, second, third = (coverage.fraction(part) for part in parts)
    return RankedDomain(
        value=domain.value,
        satisfiable=satisfiable,
        members=domain.members,
        total=domain.total,
        creditable=domain.creditable,
        own=domain.own,
        coverages=(
            f"{first.numerator}/{first.denominator}",
            f"{second.numerator}/{second.denominator}",
            f"{third.numerator}/{third.denominator}",
        ),
    )


def _acquired(
    row: DemandRow,
    machine: Machine,
    remaining: Vector,
    second: Machine | None,
    order_key: OrderKey,
    pick: SpreadPick | None,
) -> Acquired:
    dollars = bucket_upper_dollars(row.need.profile.interruption_bucket)
    spread = row.need.profile.strict_spread
    second_key = None if second is None else order_key(second)[0]
    return Acquired(
        row=ref(row),
        machine=machine.id,
        kind=ActionKind.BOOTSTRAP if machine.state is MachineState.IDLE else ActionKind.PROVISION,
        price=machine.price_usd_per_hour,
        probability=machine.interruption_probability,
        penalty_dollars=dollars,
        cost=machine.effective_cost_usd_per_hour(dollars),
        remaining=remaining,
        runner_up="" if second is None else second.id,
        runner_up_cost=second_key,
        cost_difference=None if second_key is None else difference(second_key, order_key(machine)[0]),
        domain=None if pick is None else pick.domain,
        count=None if pick is None else pick.count,
        minimum=None if pick is None else pick.minimum,
        skew=None if spread is None else spread.skew_max,
    )
