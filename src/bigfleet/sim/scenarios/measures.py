"""Measures a closed-loop scenario: counts executed actions, records each cycle, computes the figures.

docs/spec/simulation.md. Actions are counted from the audit log, which has a record of each mutating call; everything
else comes from the decisions, the provider and the pods. The journal has one line a cycle and is equal for equal runs.
This module must not change the world.
"""

import gc
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple

import msgspec

from bigfleet.engine.decision import ActionKind, Decision, RowResult
from bigfleet.link.reporter import ReportOutcome
from bigfleet.model.need import RowKey
from bigfleet.model.quantity import MILLI
from bigfleet.model.states import TRANSITIONAL_STATES, MachineState
from bigfleet.provider.records.record import Record
from bigfleet.sim.observations import AuditRecord
from bigfleet.sim.scenarios import checks
from bigfleet.sim.scenarios.scenario_file import Expectation, Measure
from bigfleet.sim.scenarios.world import ClosedWorld, Step

#: Broken invariants that are reported; a run that breaks one breaks it in every cycle.
VIOLATIONS_MAX: Final = 100
#: Actions that one line of the journal names.
ACTIONS_PER_LINE_MAX: Final = 20
#: Decisions whose reclaims may still be under way.
RECLAIMING_MAX: Final = 200
_TAKING: Final = ("reclaim", "preempt")


class Carried(NamedTuple):
    """One action for which the provider was called."""

    cycle: int
    decided_cycle: int
    #: The process's id.
    process: str
    kind: str
    machine: str
    cluster: str
    outcome: str


class _Reclaiming(NamedTuple):
    """One decision that reclaims."""

    #: Configured machines of the clusters that lose several, in its snapshot. One reclaim is within any cap.
    configured: Mapping[str, int]
    #: What was carried out of it so far, by cluster.
    reclaims: Counter[str]


class Watch:
    """Everything that is known of one run so far."""

    def __init__(self) -> None:
        #: In the order in which they ended.
        self.carried: list[Carried] = []
        self.journal: list[str] = []
        self.violations: list[str] = []
        self.quiet_cycles = 0
        self.longest_transition_cycles = 0
        self.claim_changes: Counter[str] = Counter()
        #: Evicted pods of all clusters as of each cycle's end; the first entry is the beginning.
        self.evictions = [0]
        #: Rows of the last decision of each shard, and what it lacks by fingerprint.
        self._rows_of: dict[str, list[RowResult]] = {}
        self._lacking: dict[str, dict[str, dict[str, int]]] = {}
        self._lacking_before: dict[str, dict[str, dict[str, int]]] | None = None
        self._is_acting = False
        self._decisions: list[str] = []
        #: Machines of each gang that was whole once, as of the last cycle.
        self._claims: dict[RowKey, frozenset[str]] = {}
        #: Machines with exactly one owner, where there are several shards.
        self._owned = 0
        self._in_transition: dict[str, tuple[MachineState, int]] = {}
        self._records: dict[str, Record] = {}
        self._objects: list[int] = []
        #: The newest decisions that reclaim, by process and its cycle.
        self._reclaiming: dict[tuple[str, int], _Reclaiming] = {}
        #: Carried actions that were looked at, and how many of them each process did.
        self._looked_at = 0
        self._recorded: Counter[str] = Counter()

    # ---- while it runs -------------------------------------------------------------------------------------------

    def audited(self, world: ClosedWorld, process: str, line: bytes) -> None:
        """Note an action that a process has carried out, from a line of its audit log."""
        record = msgspec.json.decode(line, type=AuditRecord)
        if record.token_sequence:
            self.carried.append(
                Carried(
                    cycle=world.cycle,
                    decided_cycle=record.decided_cycle,
                    process=process,
                    kind=record.kind.lower(),
                    machine=record.machine,
                    cluster=record.cluster,
                    outcome=record.outcome,
                )
            )

    async def decided(self, world: ClosedWorld, step: Step) -> None:
        """Take a decision in."""
        for check in checks.ON_DECISION:
            self._violated(world, check(world, step))
        decision = step.report.decision
        if decision is None:
            self._decisions.append("not ready")
            return
        self._is_acting = self._is_acting or bool(decision.actions)
        named = [f"{a.kind.label} {a.machine_id} {a.cluster}".rstrip() for a in decision.actions[:ACTIONS_PER_LINE_MAX]]
        left = len(decision.actions) - len(named)
        self._decisions.append((", ".join(named) or "nothing decided") + (f" and {left} more" if left else ""))
        reclaims = Counter(str(action.cluster) for action in decision.actions if action.kind is ActionKind.RECLAIM)
        if reclaims:
            configured = _configured(decision, [cluster for cluster, count in reclaims.items() if count > 1])
            self._reclaiming[step.process.id, step.report.cycle] = _Reclaiming(configured, Counter())
        name = step.process.name
        if step.process is not world.newest(name):
            return
        self._rows_of[name] = list(decision.rows)
        self._note_claims(world, self._rows_of[name])
        ledger = step.process.shard.shortfall_ledger
        self._lacking[name] = {str(key): dict(sorted(entry.deficit.items())) for key, entry in sorted(ledger.items())}

    @property
    def _rows(self) -> list[RowResult]:
        return [row for rows in self._rows_of.values() for row in rows]

    @property
    def _shortfalls(self) -> list[Mapping[str, int]]:
        return [deficit for ledger in self._lacking.values() for deficit in ledger.values()]

    def _note_claims(self, world: ClosedWorld, rows: list[RowResult]) -> None:
        for row in rows:
            if row.need.profile.same_key is None:
                continue
            key, claimed = row.need.key, frozenset(row.claimed)
            if key not in self._claims and not row.satisfied:
                continue
            if self._claims.get(key, claimed) != claimed:
                self.claim_changes[_workload_of(world, row)] += 1
            self._claims[key] = claimed

    async def cycle_ended(self, world: ClosedWorld) -> None:
        """Take in what the cycle came to."""
        self._records = await world.records()
        for check in checks.AT_REST:
            self._violated(world, check(world, self._records))
        if len(world.homes) > 1:
            self._owned = sum(len(world.owners(record)) == 1 for record in self._records.values())
        self._check_cap(world)
        for process in world.processes:
            if not process.shard.ledger.in_flight():
                records = self._recorded[process.id]
                self._violated(world, checks.recorded(process.id, process.traffic.calls, records))
        self._note_transitions(world)
        is_quiet = not self._is_acting and self._lacking == self._lacking_before and world.is_whole
        self.quiet_cycles = self.quiet_cycles + 1 if is_quiet else 0
        self.evictions.append(sum(operator.pods.evictions for operator in world.operators.values()))
        self.journal.append(self._line(world))
        self._lacking_before, self._is_acting, self._decisions = dict(self._lacking), False, []
        if world.cycle in (world.scenario.cycles // 2, world.scenario.cycles) and _wants_growth(world):
            gc.collect()
            self._objects.append(len(gc.get_objects()) - len(self.carried))

    def _check_cap(self, world: ClosedWorld) -> None:
        """Hold the reclaims of each decision, as far as they have ended, against the cap of its cycle."""
        changed: set[tuple[str, int]] = set()
        for carried in self.carried[self._looked_at :]:
            decided_in = (carried.process, carried.decided_cycle)
            if carried.kind == "reclaim" and decided_in in self._reclaiming:
                self._reclaiming[decided_in].reclaims[carried.cluster] += 1
                changed.add(decided_in)
            self._recorded[carried.process] += 1
        self._looked_at = len(self.carried)
        for decided_in in sorted(changed):
            known = self._reclaiming[decided_in]
            self._violated(world, checks.capped(known.reclaims, known.configured, world.scenario.reclaim_cap))
        while len(self._reclaiming) > RECLAIMING_MAX:
            del self._reclaiming[next(iter(self._reclaiming))]

    def _note_transitions(self, world: ClosedWorld) -> None:
        moving = {i: r.state for i, r in self._records.items() if r.state in TRANSITIONAL_STATES}
        for machine_id in self._in_transition.keys() - moving.keys():
            del self._in_transition[machine_id]
        for machine_id, state in moving.items():
            known, since = self._in_transition.get(machine_id, (None, world.cycle))
            if known is not state:
                since = world.cycle
            self._in_transition[machine_id] = (state, since)
            self.longest_transition_cycles = max(self.longest_transition_cycles, world.cycle - since)

    def _violated(self, world: ClosedWorld, faults: Iterable[str]) -> None:
        for fault in faults:
            if len(self.violations) < VIOLATIONS_MAX:
                self.violations.append(f"cycle {world.cycle}: {fault}")

    def _line(self, world: ClosedWorld) -> str:
        states = ", ".join(f"{n} {state.label}" for state, n in sorted(world.states(self._records).items()))
        bound = sum(operator.pods.bound for operator in world.operators.values())
        pods = sum(len(operator.pods.pods) for operator in world.operators.values())
        short = "; ".join(
            ", ".join(f"{name} {milli / MILLI:g}" for name, milli in deficit.items()) for deficit in self._shortfalls
        )
        decisions = " | ".join(self._decisions) or "no process"
        return f"{world.cycle}: {states}; {bound}/{pods} pods bound; short of {short or 'nothing'}; {decisions}"

    # ---- afterwards ----------------------------------------------------------------------------------------------

    def value(self, world: ClosedWorld, expectation: Expectation) -> float:
        """Return what is measured."""
        match expectation.measure:
            case Measure.MACHINES:
                return sum(_is_meant(world, record, expectation) for record in self._records.values())
            case Measure.HELD:
                return self._held(world, expectation)
            case Measure.WHOLE_GANGS:
                rows = [row for row in self._rows if row.satisfied and _is_row_meant(world, row, expectation)]
                return sum(len(row.members) for row in rows)
            case Measure.BOUND_PERCENT:
                return _bound_percent(world, expectation)
            case Measure.QUIET_CYCLES:
                return self.quiet_cycles
            case Measure.SHORTFALLS:
                return len(self._shortfalls)
            case Measure.SHORTFALL:
                return sum(deficit.get(expectation.resource, 0) for deficit in self._shortfalls) / MILLI
            case Measure.ACTIONS:
                return len(self._narrowed(world, self.carried, expectation))
            case Measure.ACQUISITIONS:
                return len(self._narrowed(world, self._acquisitions(), expectation))
            case Measure.CHURN:
                return self._churn()
            case Measure.CLAIM_CHANGES:
                changes = self.claim_changes
                return changes[expectation.workload] if expectation.workload else changes.total()
            case Measure.DELETES_BEFORE_RECLAIM:
                return self._deletes_before_reclaim()
            case Measure.TRANSITION_CYCLES:
                return self.longest_transition_cycles
            case Measure.EVICTIONS:
                return self.evictions[-1] - self.evictions[max(0, expectation.from_cycle - 1)]
            case Measure.FENCED:
                return sum(carried.outcome == "fenced" for carried in self.carried)
            case Measure.OWNED:
                return self._owned
            case Measure.REPORTS_TAKEN:
                return 0 if world.coordinator is None else world.coordinator.reports[ReportOutcome.OK]
            case Measure.REPORTS_LOST:
                return 0 if world.coordinator is None else world.coordinator.reports[ReportOutcome.ERROR]
            case Measure.GROWTH_PERCENT:
                half, end = self._objects
                return 100 * (end - half) / half

    def _held(self, world: ClosedWorld, expectation: Expectation) -> int:
        held = [i for row in self._rows if _is_row_meant(world, row, expectation) for i in row.claimed]
        return sum(expectation.shape in ("", world.stock[machine_id].shape) for machine_id in held)

    def _narrowed(self, world: ClosedWorld, carried: list[Carried], expectation: Expectation) -> list[Carried]:
        from_cycle = expectation.from_cycle
        if expectation.last_cycles:
            from_cycle = max(from_cycle, world.cycle - expectation.last_cycles + 1)
        return [
            each
            for each in carried
            if each.cycle >= from_cycle
            and expectation.kind in ("", each.kind)
            and expectation.cluster in ("", each.cluster)
            and expectation.shape in ("", world.stock[each.machine].shape)
        ]

    def _acquisitions(self) -> list[Carried]:
        """Return what was gained: a Bootstrap of what was provisioned for the same cluster is the same gain."""
        provisioned: dict[str, str] = {}
        gained = []
        for carried in self.carried:
            if carried.kind == "provision":
                provisioned[carried.machine] = carried.cluster
                gained.append(carried)
            elif carried.kind == "bootstrap" and provisioned.pop(carried.machine, None) != carried.cluster:
                gained.append(carried)
            elif carried.kind == "delete":
                provisioned.pop(carried.machine, None)
        return gained

    def _churn(self) -> int:
        taken: set[str] = set()
        bound: set[str] = set()
        churn = 0
        for carried in self.carried:
            if carried.kind == "bootstrap":
                churn += carried.machine in taken
                bound.add(carried.machine)
            elif carried.kind in _TAKING:
                churn += carried.machine in bound
                taken.add(carried.machine)
        return churn

    def _deletes_before_reclaim(self) -> int:
        taken: set[str] = set()
        early = 0
        for carried in self.carried:
            if carried.kind in _TAKING:
                taken.add(carried.machine)
            early += carried.kind == "delete" and carried.machine not in taken
        return early


def _configured(decision: Decision, clusters: Collection[str]) -> Mapping[str, int]:
    """Return the Configured machines of some clusters in the snapshot that a decision is based on.

    The inventory has fewer by the time that a decision is seen: its first drains have begun.
    """
    if not clusters:
        return {}
    assert decision.basis is not None, "a decision that reclaims knows its snapshot"
    snapshot = decision.basis.snapshot()
    return {cluster: len(snapshot.of_cluster(cluster, MachineState.CONFIGURED)) for cluster in clusters}


def _wants_growth(world: ClosedWorld) -> bool:
    return any(expectation.measure is Measure.GROWTH_PERCENT for expectation in world.scenario.must_hold)


def _is_meant(world: ClosedWorld, record: Record, expectation: Expectation) -> bool:
    return (
        expectation.state.upper() in ("", record.state.name)
        and expectation.cluster in ("", record.machine.cluster)
        and expectation.shape in ("", world.stock[record.id].shape)
        and expectation.error in record.machine.last_error
    )


def _is_row_meant(world: ClosedWorld, row: RowResult, expectation: Expectation) -> bool:
    is_workload = not expectation.workload or _workload_of(world, row) == expectation.workload
    return is_workload and expectation.cluster in ("", row.need.cluster)


def _workload_of(world: ClosedWorld, row: RowResult) -> str:
    """Return the workload whose pods a row is made of, "" for none; rows fold together only within one."""
    _cluster, fingerprint, group = row.members[0].key
    for (workload, _gang), template in world.templates.items():
        if template.profile.fingerprint == fingerprint and template.group == group:
            return workload
    return ""


def _bound_percent(world: ClosedWorld, expectation: Expectation) -> float:
    names = [expectation.cluster] if expectation.cluster else list(world.operators)
    counts = [world.operators[name].pods.counts(expectation.workload) for name in names]
    pods = sum(count for _bound, count in counts)
    return 100 * sum(bound for bound, _count in counts) / pods if pods else 100.0
