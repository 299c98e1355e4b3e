"""A small closed world: carries every decision out, slowly, and says when nothing more is decided.

Machines take cycles to be created, configured, drained and deleted; slots may turn up in another rack than they were
offered in; rows that are equal change places from cycle to cycle. Both engines decide every cycle, the columnar one
from a store and with a memory that live as long as the world, and must agree. A world that does not come to rest is
looked at by `trading_gangs`, which knows the one excepted kind of fleet (docs/spec/aggregates.md §9.9). Nothing here
decides anything, and nothing here may excuse a fleet for another reason.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bigfleet.engine.columnar.engine import ColumnarEngine
from bigfleet.engine.columns.store import ColumnStore
from bigfleet.engine.decision import Action, ActionKind, Decision, Options, ParkingKey, RowResult
from bigfleet.engine.parking import next_ages
from bigfleet.engine.reference import decide as reference
from bigfleet.engine.snapshot import Snapshot
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import NO_HOST, Machine, PreemptedFor
from bigfleet.model.need import Need
from bigfleet.model.penalty import bucket_upper_dollars
from bigfleet.model.states import MachineState
from bigfleet.model.vector import vector_key
from tests.strategies import HOST, RACK, FleetInput

#: What a transitional state ends in.
ENDS: Mapping[MachineState, MachineState] = {
    MachineState.CREATING: MachineState.IDLE,
    MachineState.CONFIGURING: MachineState.CONFIGURED,
    MachineState.DRAINING: MachineState.IDLE,
    MachineState.DELETING: MachineState.SPECULATIVE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How slowly things happen, and what moves meanwhile."""

    #: Cycles that a transition takes beyond the one that begins it; each transition takes the next number, in turn.
    delays: tuple[int, ...] = (3,)
    cycle_seconds: float = 150.0
    #: Whether equal rows change places from cycle to cycle.
    rotates: bool = True
    #: Slots whose host turns up in another rack when they are first created; they stay there ever after.
    landings: Mapping[MachineId, str] = field(default_factory=dict)


class World:
    """Carries decisions out, some at once and some cycles later, and keeps the stamps that later cycles read."""

    def __init__(self, fleet: FleetInput, pace: Pace) -> None:
        self.machines: dict[MachineId, Machine] = dict(fleet.snapshot.machines)
        self.idle_since: dict[MachineId, float] = dict(fleet.snapshot.idle_since_seconds)
        self.turn = 0
        self._fleet = fleet
        self._pace = pace
        self._now = fleet.options.now_seconds
        self._ages: Mapping[ParkingKey, int] = fleet.options.parking_ages
        self._drawn = 0
        self._landings = dict(pace.landings)
        #: Machine id → cycles until its transition ends; all and only machines in a transition.
        self._due: dict[MachineId, int] = {}
        self._engine, self._store = ColumnarEngine(), ColumnStore()
        for machine in self.machines.values():
            self._store.insert(machine, self.idle_since.get(machine.id))
            if machine.state in ENDS:
                self._due[machine.id] = self._delay()

    def _delay(self) -> int:
        self._drawn += 1
        return self._pace.delays[self._drawn % len(self._pace.delays)]

    @property
    def demand(self) -> Sequence[Need]:
        """The rows of the coming cycle."""
        return rotated(self._fleet.demand, self.turn) if self._pace.rotates else self._fleet.demand

    @property
    def options(self) -> Options:
        """What the coming cycle is decided under; a machine is unjoined for as long as it is Configured."""
        unjoined = frozenset(
            machine_id
            for machine_id in self._fleet.options.unjoined
            if self.machines[MachineId(machine_id)].state is MachineState.CONFIGURED
        )
        return replace(self._fleet.options, now_seconds=self._now, parking_ages=self._ages, unjoined=unjoined)

    def decide(self) -> Decision:
        """Return what both engines decide now; the columnar one remembers the cycles before."""
        snapshot, demand, options = Snapshot.of(self.machines.values(), self.idle_since), self.demand, self.options
        decision = reference.decide(snapshot, demand, options)
        assert decision == self._engine.decide(self._store.snapshot(), demand, options)
        return decision

    def step(self, decision: Decision) -> None:
        """Begin every action, end the transitions that are due, and let the cycle's time pass."""
        for action in decision.actions:
            self._put(begun(self.machines[action.machine_id], action))
            self._due[action.machine_id] = self._delay()
        for machine_id, cycles in list(self._due.items()):
            if cycles > 0:
                self._due[machine_id] = cycles - 1
            else:
                del self._due[machine_id]
                self._put(self._ended(self.machines[machine_id]))
        self._ages = next_ages(self._ages, decision.rows, advance=True)
        self._now += self._pace.cycle_seconds
        self.turn += 1

    @property
    def is_moving(self) -> bool:
        """Return whether some transition has not ended yet."""
        return bool(self._due)

    def _ended(self, machine: Machine) -> Machine:
        state = ENDS[machine.state]
        if state is MachineState.CONFIGURED:
            return replace(machine, state=state)
        host = NO_HOST if state is MachineState.SPECULATIVE else HOST
        free = replace(machine.without_binding(), state=state, host=host)
        landing = self._landings.pop(machine.id, None) if machine.state is MachineState.CREATING else None
        return free if landing is None else replace(free, labels={**machine.labels, RACK: landing})

    def _put(self, machine: Machine) -> None:
        was_idle = self.machines[machine.id].state is MachineState.IDLE
        self.machines[machine.id] = machine
        if machine.state is not MachineState.IDLE:
            self.idle_since.pop(machine.id, None)
        elif not was_idle:
            self.idle_since[machine.id] = self._now
        self._store.update(machine, self.idle_since.get(machine.id))


def begun(machine: Machine, action: Action) -> Machine:
    """Return the machine with its transition begun and the stamps of docs/spec/engine.md §11."""
    if action.kind is ActionKind.DELETE:
        return replace(machine.without_binding(), state=MachineState.DELETING)
    if action.kind in (ActionKind.RECLAIM, ActionKind.PREEMPT):
        preempted_for = PreemptedFor(*action.preemptor) if action.preemptor else None
        return replace(machine, state=MachineState.DRAINING, preempted_for=preempted_for)
    profile = action.profile
    assert profile is not None, "whoever gains a machine names the row's profile"
    stamped = replace(machine, assigned_need_fingerprint=profile.fingerprint, assigned_group=action.group)
    if action.kind is ActionKind.PROVISION:
        return replace(stamped, state=MachineState.CREATING, intended_cluster=action.cluster)
    return replace(
        stamped,
        state=MachineState.CONFIGURING,
        cluster=action.cluster,
        assigned_priority=profile.priority,
        assigned_interruption_penalty_dollars=bucket_upper_dollars(profile.interruption_bucket),
        assigned_reclamation_penalty_dollars=bucket_upper_dollars(profile.reclamation_bucket),
    )


# ---- rows that are equal -----------------------------------------------------------------------------------------


def rotated(demand: Sequence[Need], turn: int) -> list[Need]:
    """Let equal rows change places: those of one cluster wherever they stand, those of several where they neighbour.

    Rows are equal when profile, aggregate and min unit are. Unequal rows of one cluster keep their order: which of
    them comes first is demand, and another order is another demand (docs/spec/model.md §8).
    """
    rows = list(demand)
    by_kind: defaultdict[object, list[int]] = defaultdict(list)
    for place, need in enumerate(rows):
        by_kind[(need.cluster, _kind(need))].append(place)
    for places in by_kind.values():
        _rotate(rows, places, turn)
    for places in list(_runs(rows)):
        # Half as fast: the two turnings must never undo each other.
        if len({rows[place].cluster for place in places}) > 1:
            _rotate(rows, places, turn // 2)
    return rows


def _kind(need: Need) -> object:
    return (need.fingerprint, vector_key(need.aggregate), vector_key(need.min_unit), need.parked)


def _runs(rows: Sequence[Need]) -> Iterator[list[int]]:
    places: list[int] = []
    for place, need in enumerate(rows):
        if places and _kind(rows[places[-1]]) != _kind(need):
            yield places
            places = []
        places.append(place)
    if places:
        yield places


def _rotate(rows: list[Need], places: Sequence[int], turn: int) -> None:
    taken = [rows[place] for place in places]
    for number, place in enumerate(places):
        rows[place] = taken[(number + turn) % len(taken)]


# ---- what happened -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One cycle: what was seen and what was decided."""

    machines: Mapping[MachineId, Machine]
    decision: Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The cycles of one world until it rested, or until nobody waited any longer."""

    turns: Sequence[Turn]
    #: Cycles after which nothing was decided any more; None when actions went on.
    settled_after: int | None

    def actions(self, *kinds: ActionKind) -> list[tuple[int, Action]]:
        """Return the actions of some kinds, each with its cycle."""
        return [(n, a) for n, turn in enumerate(self.turns) for a in turn.decision.actions if a.kind in kinds]


def run(fleet: FleetInput, pace: Pace, *, cycles_max: int, quiet_cycles: int) -> Course:
    """Run a world until `quiet_cycles` in a row decided nothing, or for `cycles_max` cycles and as many quiet ones."""
    world, quiet = World(fleet, pace), 0
    turns: list[Turn] = []
    while len(turns) < cycles_max + quiet_cycles:
        decision = world.decide()
        turns.append(Turn(machines=dict(world.machines), decision=decision))
        quiet = 0 if decision.actions or world.is_moving else quiet + 1
        if quiet >= quiet_cycles:
            break
        world.step(decision)
    last = max((n for n, turn in enumerate(turns) if turn.decision.actions), default=-1)
    return Course(turns=turns, settled_after=last + 1 if quiet >= quiet_cycles else None)


@dataclass(frozen=True, slots=True)
class Trade:
    """A gang that kept changing what it holds, and another gang of its cluster whose machines it was credited with."""

    cluster: str
    gang: tuple[str, str]
    domains: frozenset[str]
    stamped_for: tuple[str, str]


def trading_gangs(course: Course, *, last: int) -> list[Trade]:
    """Return the trades within the last cycles of a course: what shows that a fleet is of the excepted kind.

    A trade is a gang row that did not hold the same bound machines throughout, and was credited with one that is
    stamped for another gang of the same cluster. With more than one domain it is the exception of aggregates.md §9.9;
    within one domain it needs gangs that change places in the list, and so another demand each cycle.
    """
    holdings: defaultdict[tuple[str, str, str], set[frozenset[MachineId]]] = defaultdict(set)
    domains: defaultdict[tuple[str, str, str], set[str]] = defaultdict(set)
    credits: defaultdict[tuple[str, str, str], set[tuple[str, str]]] = defaultdict(set)
    for turn in course.turns[-last:]:
        gangs = [row for row in turn.decision.rows if row.need.profile.same_key is not None and row.has_domain]
        stamps = {(row.need.cluster, row.need.fingerprint, row.need.group) for row in gangs}
        for row in gangs:
            held = frozenset(m for m in row.claimed if turn.machines[m].cluster == row.need.cluster)
            holdings[row.need.key].add(held)
            domains[row.need.key].add(row.domain)
            for stamp in _credited_stamps(row, turn.machines):
                if stamp != row.need.key[1:] and (row.need.cluster, *stamp) in stamps:
                    credits[row.need.key].add(stamp)
    return [
        Trade(key[0], key[1:], frozenset(domains[key]), stamp)
        for key in sorted(holdings)
        if len(holdings[key]) > 1
        for stamp in sorted(credits[key])
    ]


def trades_domains(course: Course, *, last: int) -> bool:
    """Return whether gangs trade domains: the one exception of docs/spec/aggregates.md §9.9."""
    return any(len(trade.domains) > 1 for trade in trading_gangs(course, last=last))


def _credited_stamps(row: RowResult, machines: Mapping[MachineId, Machine]) -> Iterator[tuple[str, str]]:
    for machine_id in row.claimed:
        machine = machines[machine_id]
        if machine.cluster == row.need.cluster:
            yield (machine.assigned_need_fingerprint, machine.assigned_group)
