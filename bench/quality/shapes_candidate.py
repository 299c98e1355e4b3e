"""Runs the decision over demand shapes as a candidate, the way `bigfleet plan --until-settled` does.

Target compositions are planned once for each demand, in process. Every action is carried out at once: an acquisition
ends Configured, a drain Idle, a deletion Speculative. A cycle without actions is followed by an hour, so that holds
end.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from bench.quality.engine_candidate import (
    HOST,
    action_applied,
    level,
    machine_of,
    need_of,
    requirement_of,
    until_rest,
)
from bench.quality.values import (
    Claim,
    Holding,
    Instance,
    Offer,
    PackingCluster,
    RowReport,
    Scheduler,
    Settled,
    Start,
)
from bigfleet.compositions.targets import targets_of
from bigfleet.engine.decision import Action, ActionKind, Decision, Options, ParkingKey
from bigfleet.engine.parking import next_ages
from bigfleet.engine.shapes.decide import decide
from bigfleet.engine.snapshot import Snapshot
from bigfleet.engine.targets import Target
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need
from bigfleet.model.shapes import DemandShape, Overhead, canonical_overheads
from bigfleet.model.states import MachineState
from bigfleet.planner.problem import PlanSettings, SchedulerOrder


class ShapesCandidate:
    """Decides over shapes, towards target compositions of the planner."""

    def settle(self, instance: Instance, start: Start, scheduler: Scheduler) -> Settled:
        """Return what the clusters hold at rest."""
        demands = instance.demands(start)
        fleet = PaperFleet(instance, demands, SchedulerOrder(scheduler.value))
        for clusters in demands[:-1]:
            fleet.live(clusters)
        return fleet.live(demands[-1])


class PaperFleet:
    """The machines of an instance, decided on cycle after cycle."""

    def __init__(self, instance: Instance, demands: Sequence[Sequence[PackingCluster]], order: SchedulerOrder) -> None:
        self.order = order
        self.targets: dict[str, Target] = {}
        self._machines: dict[MachineId, Machine] = {}
        self._idle_since: dict[MachineId, float] = {}
        self._offer_of: dict[MachineId, int] = {}
        self._ages: Mapping[ParkingKey, int] = {}
        self._now = 0.0
        for position, offer in enumerate(instance.offers):
            model = machine_of(offer)
            for number in range(_slots(offer, demands)):
                machine_id = MachineId(offer.machine_id(number))
                self._offer_of[machine_id] = position
                self.put(replace(model, id=machine_id))

    def live(self, clusters: Sequence[PackingCluster]) -> Settled:
        """Plan, decide and apply until two cycles in a row, an hour apart, decide nothing."""
        started = time.process_time()
        self.targets = self.planned(clusters, self.snapshot())
        settled = self.rest(clusters)
        return replace(settled, engine_seconds=time.process_time() - started)

    def rest(self, clusters: Sequence[PackingCluster]) -> Settled:
        """Decide and apply in the same way, with the targets that are known."""
        demand = demand_of(clusters)
        before = {machine_id: level(machine) for machine_id, machine in self._machines.items()}
        started = time.process_time()
        course = until_rest(
            lambda: decide(self.snapshot(), demand, self.options(clusters)), self._carry_out, self._pass
        )
        needed = sum(_actions_between(before[machine_id], level(m)) for machine_id, m in self._machines.items())
        return Settled(
            holdings=self._holdings(clusters, course.decision),
            rows=_reports(clusters, course.decision),
            has_claims=True,
            cycles=course.cycles,
            actions=course.actions,
            actions_unneeded=course.actions - needed,
            engine_seconds=time.process_time() - started,
            is_at_rest=course.is_at_rest,
        )

    def _carry_out(self, decision: Decision) -> None:
        for action in decision.actions:
            self._apply(action)
        self._ages = next_ages(self._ages, decision.rows, advance=True)

    def _pass(self, seconds: float) -> None:
        self._now += seconds

    def planned(self, clusters: Sequence[PackingCluster], snapshot: Snapshot) -> dict[str, Target]:
        """Return the targets that the planner finds for these machines."""
        settings = {cluster.id: PlanSettings(order=self.order) for cluster in clusters}
        options = replace(self.options(clusters), targets={})
        return targets_of(snapshot, demand_of(clusters), options, settings=settings)

    def options(self, clusters: Sequence[PackingCluster]) -> Options:
        """Return the options of the next decision."""
        return Options(
            now_seconds=self._now,
            reported=frozenset(cluster.id for cluster in clusters),
            parking_ages=self._ages,
            overheads={cluster.id: _overheads(cluster) for cluster in clusters},
            targets=self.targets,
        )

    def snapshot(self, machines: Iterable[Machine] | None = None) -> Snapshot:
        """Return these machines, or all, as a decision sees them."""
        return Snapshot.of(self._machines.values() if machines is None else machines, self._idle_since)

    @property
    def machines(self) -> list[Machine]:
        """The machines as they are, in the order of the offers."""
        return list(self._machines.values())

    def _apply(self, action: Action) -> None:
        machine = self._machines[action.machine_id]
        if action.kind is ActionKind.PROVISION:
            machine = replace(machine, state=MachineState.IDLE, host=HOST)
            action = replace(action, kind=ActionKind.BOOTSTRAP)
        self.put(action_applied(machine, action))

    def put(self, machine: Machine) -> None:
        """Let a machine be as it is given."""
        self._machines[machine.id] = machine
        if machine.state is MachineState.IDLE:
            self._idle_since.setdefault(machine.id, self._now)
        else:
            self._idle_since.pop(machine.id, None)

    def _holdings(self, clusters: Sequence[PackingCluster], decision: Decision) -> tuple[Holding, ...]:
        names = {need_of(cluster.id, row).key: row.id for cluster in clusters for row in cluster.rows}
        claims: dict[str, list[Claim]] = {}
        for result in decision.rows:
            for placement in result.placements:
                claim = Claim(names[result.need.key], placement.shape, placement.count)
                claims.setdefault(placement.machine_id, []).append(claim)
        return tuple(
            Holding(
                machine_id=machine_id,
                offer=self._offer_of[machine_id],
                cluster=machine.cluster,
                claims=tuple(claims.get(machine_id, ())),
            )
            for machine_id, machine in sorted(self._machines.items())
            if machine.state is MachineState.CONFIGURED
        )


def _actions_between(before: tuple[int, str], after: tuple[int, str]) -> int:
    """Return how many actions lead from one level to another; one acquisition goes all the way to a cluster."""
    if before == after:
        return 0
    if after[0] == 2:
        return 2 if before[0] == 2 else 1
    return before[0] - after[0]


def demand_of(clusters: Sequence[PackingCluster]) -> list[Need]:
    """Return the rows in list order; shapes stand in the instance's order, which claims refer to."""
    needs: list[Need] = []
    for cluster in clusters:
        for row in cluster.rows:
            shapes = tuple(
                DemandShape({n: milli for n, milli in s.resources.items() if milli}, s.count, s.max_per_machine)
                for s in row.shapes
            )
            needs.append(replace(need_of(cluster.id, row), shapes=shapes, arrival_unix_nanos=len(needs) + 1))
    return sorted(needs, key=lambda need: -need.profile.priority)


def _overheads(cluster: PackingCluster) -> tuple[Overhead, ...]:
    return canonical_overheads(
        Overhead(tuple(requirement_of(r) for r in overhead.requirements), dict(overhead.resources))
        for overhead in cluster.overheads
    )


def _slots(offer: Offer, demands: Sequence[Sequence[PackingCluster]]) -> int:
    """Return how many machines of a class to offer: the stock, or as many as pods that one could host, if fewer."""
    if offer.is_existing:
        return offer.stock
    hosted = (
        sum(
            shape.count
            for cluster in clusters
            for row in cluster.rows
            for shape in row.shapes
            if all(offer.allocatable.get(name, 0) >= milli for name, milli in shape.resources.items())
        )
        for clusters in demands
    )
    return min(offer.stock, max(hosted, default=0))


def _reports(clusters: Sequence[PackingCluster], decision: Decision) -> tuple[RowReport, ...]:
    results = {result.need.key: result for result in decision.rows}
    reports = []
    for cluster in clusters:
        for row in cluster.rows:
            result = results[need_of(cluster.id, row).key]
            short = dict(result.unplaced)
            short |= {i.shape: row.shapes[i.shape].count for i in result.impossible if i.shape is not None}
            reason = "" if result.satisfied else ("request_too_large" if result.impossible else "no room")
            reports.append(
                RowReport(cluster=cluster.id, row=row.id, is_satisfied=result.satisfied, short=short, reason=reason)
            )
    return tuple(reports)
