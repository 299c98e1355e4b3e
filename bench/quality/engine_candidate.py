"""Runs the project's engine as a candidate: decides and applies, as a shard does, until nothing more is decided.

Rows become rows of demand without shapes: the aggregate is the sum of the pods, the min unit the largest request of
each dimension. Every action is carried out at once: a creation ends Idle, a bootstrap Configured, a drain Idle, a
deletion Speculative. A cycle takes 30 s; a cycle without actions is followed by an hour, so that holds end.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from bench.quality.values import (
    MEMORY,
    MILLI,
    Holding,
    Instance,
    Offer,
    PackingCluster,
    PackingRequirement,
    PackingRow,
    RowReport,
    Scheduler,
    Settled,
    Start,
)
from bigfleet.engine.columnar.engine import ColumnarEngine, warm_up
from bigfleet.engine.columns.store import ColumnStore, Numbers
from bigfleet.engine.decision import Action, ActionKind, Decision, Options, ParkingKey
from bigfleet.engine.parking import next_ages
from bigfleet.model import labels as keys
from bigfleet.model import vector
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import NO_HOST, HostRef, Machine
from bigfleet.model.need import Need, RowKey
from bigfleet.model.penalty import bucket_upper_dollars
from bigfleet.model.profile import Operator, Profile, Requirement, SpreadMode, TopologySpread
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.model.vector import Vector

#: Cycles that one demand is given to come to rest.
CYCLES_MAX: Final = 200
CYCLE_SECONDS: Final = 30.0
#: Creations of one machine that are refused before a shard leaves it aside.
REFUSALS_MAX: Final = 3
#: Longer than any hold.
REST_SECONDS: Final = 3600.0
HOST: Final = HostRef("bench", "host")

_OPERATORS: Final = {operator.label: operator for operator in Operator}
_CAPACITY_TYPES: Final = {kind.label: kind for kind in CapacityType}


class EngineCandidate:
    """Today's engine, columnar, with the memory that a shard's engine has."""

    def settle(self, instance: Instance, start: Start, scheduler: Scheduler) -> Settled:
        """Return what the clusters hold at rest; the engine knows no scheduler's order."""
        del scheduler
        warm_up()
        demands = instance.demands(start)
        world = EngineWorld(instance, demands)
        for clusters in demands[:-1]:
            world.live(clusters)
        return world.live(demands[-1])


class EngineWorld:
    """The machines of an instance, and the engine that decides about them."""

    def __init__(
        self, instance: Instance, demands: Sequence[Sequence[PackingCluster]], *, has_all_slots: bool = False
    ) -> None:
        """Make the world of some demands; slots that no row could use exist with `has_all_slots` alone."""
        self._store = ColumnStore()
        self._engine = ColumnarEngine()
        #: Machines that are not slots; a slot is made an object when something is done with it.
        self._machines: dict[MachineId, Machine] = {}
        #: How each machine that was acted upon stood when the present demand came.
        self._before: dict[MachineId, tuple[int, str]] = {}
        self._idle_since: dict[MachineId, float] = {}
        self._offer_of: dict[MachineId, int] = {}
        self._ages: Mapping[ParkingKey, int] = {}
        self._now = 0.0
        self._refusals: Counter[MachineId] = Counter()
        slots = _slots(instance.offers, [_needs(clusters) for clusters in demands])
        if has_all_slots:
            slots = [offer.stock for offer in instance.offers]
        self._models = [machine_of(offer) for offer in instance.offers]
        for position, offer in enumerate(instance.offers):
            for number in range(slots[position]):
                machine_id = MachineId(offer.machine_id(number))
                self._offer_of[machine_id] = position
                if offer.is_existing:
                    self._put(replace(self._models[position], id=machine_id))
                elif number == 0:
                    self._store.insert(replace(self._models[position], id=machine_id))
                    slot = self._numbers(self._models[position])
                else:
                    self._store.put(machine_id, slot)

    def _numbers(self, machine: Machine) -> Numbers:
        """Return a slot in the numbers of the store: all slots of a class have the same."""
        words = self._store.vocabulary
        return (
            machine.state,
            words.cluster(machine.cluster),
            words.shape(machine),
            words.offer(machine),
            words.stamp(machine),
            math.nan,
        )

    def _get(self, machine_id: MachineId) -> Machine:
        known = self._machines.get(machine_id)
        return known or replace(self._models[self._offer_of[machine_id]], id=machine_id)

    def live(self, clusters: Sequence[PackingCluster]) -> Settled:
        """Decide and apply until two cycles in a row, an hour apart, decide nothing."""
        demand = _needs(clusters)
        self._before.clear()
        seconds = 0.0

        def decide() -> Decision:
            nonlocal seconds
            decision, spent = self._decide(clusters, demand)
            seconds += spent
            return decision

        course = until_rest(decide, self._carry_out, self._pass)
        needed = sum(distance(before, level(self._get(machine_id))) for machine_id, before in self._before.items())
        return Settled(
            holdings=self._holdings(),
            rows=_reports(clusters, course.decision),
            has_claims=False,
            cycles=course.cycles,
            actions=course.actions,
            actions_unneeded=course.actions - needed,
            engine_seconds=seconds,
            is_at_rest=course.is_at_rest,
        )

    def _carry_out(self, decision: Decision) -> None:
        for action in decision.actions:
            self._apply(action)
        self._ages = next_ages(self._ages, decision.rows, advance=True)

    def _pass(self, seconds: float) -> None:
        self._now += seconds

    def cycle(self, clusters: Sequence[PackingCluster], refuses: Container[str] = ()) -> Counter[ActionKind]:
        """Decide one cycle and apply it; return how many actions there were of each kind.

        `refuses` names instance types of which every creation fails: the slot stays as it is, and after three
        refusals the machine counts as Failed, which is a shard's rule.
        """
        decision, _ = self._decide(clusters, _needs(clusters))
        for action in decision.actions:
            machine = self._get(action.machine_id)
            if action.kind is ActionKind.PROVISION and machine.instance_type in refuses:
                self._refusals[machine.id] += 1
                if self._refusals[machine.id] == REFUSALS_MAX:
                    self._put(replace(machine, state=MachineState.FAILED, last_error="create refused"))
            else:
                self._apply(action)
        self._ages = next_ages(self._ages, decision.rows, advance=True)
        self._now += CYCLE_SECONDS
        return Counter(action.kind for action in decision.actions)

    def serving(self, instance_type: str) -> int:
        """Return how many machines of a type are Configured."""
        of_type = (m for m in self._machines.values() if m.instance_type == instance_type)
        return sum(machine.state is MachineState.CONFIGURED for machine in of_type)

    def _decide(self, clusters: Sequence[PackingCluster], demand: Sequence[Need]) -> tuple[Decision, float]:
        options = Options(
            now_seconds=self._now,
            reported=frozenset(cluster.id for cluster in clusters),
            parking_ages=self._ages,
        )
        view = self._store.snapshot()
        started = time.process_time()
        decision = self._engine.decide(view, demand, options)
        return decision, time.process_time() - started

    def _holdings(self) -> tuple[Holding, ...]:
        return tuple(
            Holding(machine_id=machine_id, offer=self._offer_of[machine_id], cluster=machine.cluster)
            for machine_id, machine in sorted(self._machines.items())
            if machine.state is MachineState.CONFIGURED
        )

    def _apply(self, action: Action) -> None:
        machine = self._get(action.machine_id)
        self._before.setdefault(machine.id, level(machine))
        self._put(action_applied(machine, action))

    def _put(self, machine: Machine) -> None:
        known = self._machines.get(machine.id)
        self._machines[machine.id] = machine
        if machine.state is not MachineState.IDLE:
            self._idle_since.pop(machine.id, None)
        elif known is None or known.state is not MachineState.IDLE:
            self._idle_since[machine.id] = self._now
        self._store.insert(machine, self._idle_since.get(machine.id))


class Course(NamedTuple):
    """How a fleet came to rest, or did not."""

    #: The last decision; without actions when the fleet is at rest.
    decision: Decision
    #: Cycles that had actions, and their actions.
    cycles: int
    actions: int
    is_at_rest: bool


def until_rest(
    decide: Callable[[], Decision], carry_out: Callable[[Decision], None], wait: Callable[[float], None]
) -> Course:
    """Decide and carry out until two cycles in a row, an hour apart, decide nothing, or `CYCLES_MAX` are over."""
    cycles = actions = quiet = 0
    for _ in range(CYCLES_MAX):
        decision = decide()
        if decision.actions:
            quiet = 0
            cycles += 1
            actions += len(decision.actions)
            carry_out(decision)
            wait(CYCLE_SECONDS)
            continue
        quiet += 1
        wait(REST_SECONDS)
        if quiet == 2:
            break
    return Course(decision, cycles, actions, is_at_rest=quiet == 2)


def action_applied(machine: Machine, action: Action) -> Machine:
    """Return the machine when the action has ended."""
    match action.kind:
        case ActionKind.DELETE:
            return replace(machine.without_binding(), state=MachineState.SPECULATIVE, host=NO_HOST)
        case ActionKind.RECLAIM | ActionKind.PREEMPT | ActionKind.PROVISION:
            return replace(machine.without_binding(), state=MachineState.IDLE, host=HOST)
        case ActionKind.BOOTSTRAP:
            profile = action.profile
            assert profile is not None, "a bootstrap names the row's profile"
            return replace(
                machine,
                state=MachineState.CONFIGURED,
                cluster=action.cluster,
                assigned_need_fingerprint=profile.fingerprint,
                assigned_group=action.group,
                assigned_priority=profile.priority,
                assigned_interruption_penalty_dollars=bucket_upper_dollars(profile.interruption_bucket),
                assigned_reclamation_penalty_dollars=bucket_upper_dollars(profile.reclamation_bucket),
            )


def level(machine: Machine) -> tuple[int, str]:
    """Return how far a machine is from not existing, and the cluster that holds it."""
    levels = {MachineState.SPECULATIVE: 0, MachineState.IDLE: 1, MachineState.CONFIGURED: 2}
    return levels[machine.state], machine.cluster


def distance(before: tuple[int, str], after: tuple[int, str]) -> int:
    """Return how many actions lead from one level to another."""
    changes_cluster = before[0] == after[0] == 2 and before[1] != after[1]
    return 2 if changes_cluster else abs(before[0] - after[0])


# ---- values of the engine ----------------------------------------------------------------------------------------


def machine_of(offer: Offer) -> Machine:
    """Return a machine of the class as it stands at first: Idle where it exists, else Speculative."""
    state = MachineState.IDLE if offer.is_existing else MachineState.SPECULATIVE
    return Machine(
        id=MachineId(offer.id),
        state=state,
        host=HOST if state is MachineState.IDLE else NO_HOST,
        instance_type=offer.instance_type,
        zone=offer.zone,
        capacity_type=_CAPACITY_TYPES[offer.capacity_type],
        allocatable={name: _quantity(name, milli) for name, milli in sorted(offer.allocatable.items())},
        labels={**offer.labels, keys.CAPACITY_TYPE: offer.capacity_type},
        price_usd_per_hour=offer.price_usd_per_hour,
        interruption_probability=offer.interruption_probability,
    )


def _quantity(name: str, milli: int) -> str:
    return f"{milli // MILLI}" if name == MEMORY or milli % MILLI == 0 else f"{milli}m"


def _needs(clusters: Sequence[PackingCluster]) -> tuple[Need, ...]:
    return tuple(need_of(cluster.id, row) for cluster in clusters for row in cluster.rows)


def need_of(cluster: str, row: PackingRow) -> Need:
    """Return the row as a row of demand without shapes."""
    aggregate: Vector = {}
    min_unit: Vector = {}
    for shape in row.shapes:
        unit = {name: milli for name, milli in shape.resources.items() if milli}
        aggregate = vector.add(aggregate, vector.scale(unit, shape.count))
        min_unit = vector.maximum(min_unit, unit)
    return Need(
        cluster=ClusterId(cluster), profile=_profile(row), aggregate=aggregate, min_unit=min_unit, group=row.group
    )


def requirement_of(requirement: PackingRequirement) -> Requirement:
    """Return a requirement as the engine's."""
    return Requirement(requirement.key, _OPERATORS[requirement.operator], requirement.values)


def _profile(row: PackingRow) -> Profile:
    modes = {True: SpreadMode.DO_NOT_SCHEDULE, False: SpreadMode.SCHEDULE_ANYWAY}
    return Profile(
        requirements=tuple(requirement_of(r) for r in row.requirements),
        spreads=tuple(TopologySpread(s.key, s.skew_max, modes[s.is_strict]) for s in row.spreads),
        priority=row.priority,
        interruption_bucket=row.interruption_bucket,
        reclamation_bucket=row.reclamation_bucket,
    )


def _slots(offers: Sequence[Offer], demands: Sequence[Sequence[Need]]) -> list[int]:
    """Return how many machines of each class to offer: the stock, or fewer where no row could ever use as many.

    A row never takes more machines of a class than cover its aggregate, and takes idle ones first, so slots beyond
    the sum of that over the rows are never looked at.
    """
    slots = []
    known: dict[tuple[tuple[str, int], ...], int] = {}
    for offer in offers:
        # Classes of one supply differ in zone and price alone.
        supply = tuple(sorted(offer.allocatable.items()))
        if supply not in known:
            known[supply] = max(sum(_usable(offer, need) for need in demand) for demand in demands)
        slots.append(offer.stock if offer.is_existing else min(offer.stock, known[supply]))
    return slots


def _usable(offer: Offer, need: Need) -> int:
    if any(offer.allocatable.get(name, 0) < milli for name, milli in need.min_unit.items()):
        return 0
    covered = [-(-milli // offer.allocatable[name]) for name, milli in need.aggregate.items()]
    return max(covered, default=0)


def _reports(clusters: Sequence[PackingCluster], decision: Decision) -> tuple[RowReport, ...]:
    """Return each row's report; a row that is short is short of all its pods, because the engine counts no pods."""
    satisfied: dict[RowKey, bool] = {}
    for result in decision.rows:
        for member in result.members:
            satisfied[member.key] = result.satisfied
    reports = []
    for cluster in clusters:
        for row in cluster.rows:
            is_satisfied = satisfied[need_of(cluster.id, row).key]
            short = {} if is_satisfied else {n: shape.count for n, shape in enumerate(row.shapes)}
            reason = "" if is_satisfied else "no machine left that fits"
            reports.append(
                RowReport(cluster=cluster.id, row=row.id, is_satisfied=is_satisfied, short=short, reason=reason)
            )
    return tuple(reports)
