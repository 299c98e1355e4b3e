"""Random fleets with targets beyond the claims, decided until they rest."""

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from bigfleet.cli.engine.case_fleet import CaseFleet
from bigfleet.engine.columns.store import ColumnStore
from bigfleet.engine.decision import ActionKind, Decision, Options
from bigfleet.engine.matching import matches
from bigfleet.engine.shapes.decide import decide, decide_with_fleet
from bigfleet.engine.shapes.fleet import DecisionState
from bigfleet.engine.shapes.pod_engine import PodEngine
from bigfleet.engine.snapshot import Snapshot
from bigfleet.engine.targets import Target, class_key
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need
from bigfleet.model.states import MachineState
from tests.engine.proof import in_proportion
from tests.engine.shapes.shape_fleets import fleet

CYCLES_MAX = 20
OFFERED = (MachineState.IDLE, MachineState.SPECULATIVE)


@dataclass(frozen=True)
class Case:
    """A fleet whose clusters retain all that they have, and want a part of what is on offer as well."""

    machines: Sequence[Machine]
    demand: Sequence[Need]
    options: Options


def drawn(seed: int) -> Case:
    """Return the fleet of a seed, without gangs, spreads and waiting pods, with up to three priorities."""
    base, rng = fleet(seed, machines_max=18, rows_max=9, gangs=0.0), random.Random(seed)
    priorities = rng.choice([[0], [0, 100], [0, 100, 1000]])
    # In half of the fleets all rows of a cluster have one priority.
    of_cluster = {name: rng.choice(priorities) for name in ("ca", "cb", "cc")} if rng.random() < 0.5 else {}
    rows = [
        replace(need, waiting=(), profile=replace(need.profile, priority=priority, spreads=()))
        for need in base.demand
        for priority in (of_cluster.get(need.cluster, rng.choice(priorities)),)
        if need.shapes
    ]
    demand = sorted(
        {need.key: need for need in rows}.values(), key=lambda need: (-need.profile.priority, need.arrival_unix_nanos)
    )
    machines = [
        replace(machine, assigned_priority=rng.choice(priorities)) if machine.cluster else machine
        for machine in base.machines
        if machine.state is MachineState.CONFIGURED or (machine.state in OFFERED and rng.random() < 0.3)
    ]
    clusters = {need.cluster for need in demand}
    targets: dict[str, Target] = {}
    for cluster in sorted(clusters):
        counts = Counter(class_key(machine) for machine in machines if machine.cluster == cluster)
        counts.update(class_key(machine) for machine in machines if not machine.cluster and rng.random() < 0.2)
        targets[cluster] = Target(dict(counts))
    reported = frozenset(clusters | {machine.cluster for machine in machines if machine.cluster})
    overheads = base.options.overheads
    return Case(machines, demand, Options(now_seconds=0.0, reported=reported, targets=targets, overheads=overheads))


@dataclass(frozen=True)
class Cycle:
    """One decision on the way to rest."""

    seed: int
    machines: dict[MachineId, Machine]
    demand: Sequence[Need]
    options: Options
    decision: Decision
    state: DecisionState

    def slack(self) -> dict[MachineId, Machine]:
        """Return the Configured machines that a target retains without a claim."""
        hosts = [host for cluster in self.state.clusters.values() for host in cluster.hosts]
        claimed = {placement.machine_id for row in self.decision.rows for placement in row.placements}
        retained = {host.machine.id for host in hosts if host.is_target and host.machine.id not in claimed}
        configured = MachineState.CONFIGURED
        return {i: machine for i, machine in self.machines.items() if i in retained and machine.state is configured}

    def preempted_slack(self) -> dict[MachineId, int]:
        """Return the priority for which each of these machines is preempted."""
        slack, actions = self.slack(), self.decision.actions
        taken = [action for action in actions if action.kind is ActionKind.PREEMPT and action.machine_id in slack]
        return {action.machine_id: action.preemptor_priority for action in taken}

    def room(self, machine: Machine, cluster: str) -> dict[str, int]:
        """Return what pods of a cluster find on the empty machine."""
        room = dict(machine.supply)
        for overhead in self.options.overheads.get(ClusterId(cluster), ()):
            room = {name: max(0, milli - overhead.resources.get(name, 0)) for name, milli in room.items()}
        return room

    def least(self, machine: Machine) -> int | None:
        """Return the least priority of rows that may preempt the machine; None if all may."""
        own = [row for row in self.decision.rows if row.need.cluster == machine.cluster]
        short = [row.need.profile.priority + 1 for row in own if _could_use(row.need, row.unplaced, machine, self)]
        protected = self.protected(machine)
        return max([*short, *([] if protected is None else [protected])], default=None)

    def protected(self, machine: Machine) -> int | None:
        """Return the priority of the lowest pods that make room for those above that the machine could host."""
        claims: defaultdict[int, Counter[str]] = defaultdict(Counter)
        at = {other.id: other for other in self.machines.values() if other.state is MachineState.CONFIGURED}
        for row in self.decision.rows:
            if row.need.cluster != machine.cluster or not _may_use(row.need, machine):
                continue
            for placement in row.placements:
                if placement.machine_id in at:
                    for name, milli in row.need.shapes[placement.shape].resources.items():
                        claims[row.need.profile.priority][name] += milli * placement.count
        room = {name: milli for name, milli in self.room(machine, machine.cluster).items() if milli and name != "pods"}
        for priority in sorted(claims):
            above: Counter[str] = sum((claims[p] for p in claims if p > priority), Counter())
            below: Counter[str] = sum((claims[p] for p in claims if p <= priority), Counter())
            shares = [Fraction(room[name], above[name]) for name in room if above[name]]
            share = min([Fraction(1), *shares])
            if all(below[name] >= share * above[name] for name in room):
                return priority
        return None


def cycles(seed: int) -> Iterator[Cycle]:
    """Yield the decisions on a fleet until one has no action."""
    case = drawn(seed)
    now = CaseFleet(now_seconds=0.0, machines={machine.id: machine for machine in case.machines})
    engine = PodEngine(loops=None)
    for _ in range(CYCLES_MAX):
        decision, state = decide_with_fleet(now.snapshot(), case.demand, case.options)
        view = ColumnStore.from_snapshot(now.snapshot()).snapshot()
        assert engine.decide(view, case.demand, case.options) == decision, f"seed {seed}: the engines agree"
        yield Cycle(seed, dict(now.machines), case.demand, case.options, decision, state)
        if not decision.actions:
            return
        now.apply(decision.actions)
    raise AssertionError(f"seed {seed}: no rest after {CYCLES_MAX} cycles")


def test_slack_goes_to_rows_that_it_does_not_protect_from_and_the_fleet_rests() -> None:
    """At rest no such row is short that could use the slack; no other row preempts slack on the way."""
    preempted = protected = 0
    for seed in range(in_proportion(500, least=120)):
        for cycle in cycles(seed):
            for machine_id, priority in cycle.preempted_slack().items():
                least = cycle.least(cycle.machines[machine_id])
                assert least is None or priority >= least, f"seed {seed}: {machine_id} for {priority}"
                preempted += 1
            if cycle.decision.actions:
                continue
            for machine_id, machine in cycle.slack().items():
                least = cycle.least(machine)
                for row in cycle.decision.rows:
                    if row.need.cluster == machine.cluster or not _could_use(row.need, row.unplaced, machine, cycle):
                        continue
                    is_open = least is None or row.need.profile.priority >= least
                    assert not is_open, f"seed {seed}: {row.need.key} is short, and {machine_id} is slack"
                    protected += 1
    assert preempted, "some machines are preempted"
    assert protected, "some machines are protected"


def _may_use(need: Need, machine: Machine) -> bool:
    is_pinned = need.profile.interruption_bucket == 27
    return matches(need.profile, machine) and not (is_pinned and machine.interruption_probability)


def _could_use(need: Need, unplaced: Sequence[tuple[int, int]], machine: Machine, cycle: Cycle) -> bool:
    if not _may_use(need, machine):
        return False
    room = cycle.room(machine, need.cluster)
    pods = [{**need.shapes[index].resources, "pods": 1000} for index, _ in unplaced]
    return any(
        all(room.get(name, 0 if name != "pods" else 1000) >= milli for name, milli in pod.items()) for pod in pods
    )


def test_a_cluster_has_as_many_places_without_slack_that_is_preempted() -> None:
    """What has a claim keeps one, group by group."""
    checked = 0
    for seed in range(in_proportion(500, least=60)):
        for cycle in cycles(seed):
            gone = cycle.preempted_slack()
            if not gone:
                continue
            left = [machine for machine_id, machine in cycle.machines.items() if machine_id not in gone]
            without = decide(Snapshot.of(left), cycle.demand, cycle.options)
            owners = {cycle.machines[machine_id].cluster for machine_id in gone}
            for before, after in zip(cycle.decision.rows, without.rows, strict=True):
                if before.need.cluster in owners:
                    assert sum(n for _, n in after.unplaced) <= sum(n for _, n in before.unplaced), f"seed {seed}"
                    checked += 1
    assert checked, "some machines are preempted"
