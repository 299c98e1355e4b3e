"""Random histories of one fleet: what changes between two decisions, as data that a test carries out and can print.

The changes are those that hurt a decider with a memory: equal rows in another order, clusters that come and go, racks
that tie, machines that move, slots that turn up, stamps that change hands, equal rows as new objects, views that nobody
decided on. Each change says the whole new truth of what it touches, so any history is legal in any order.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from hypothesis import strategies as st

from bigfleet.engine.decision import DEFAULT_HOLD_SECONDS, CapacityPool, Options, ParkingKey, Weights, WithheldPools
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import Machine, PreemptedFor
from bigfleet.model.need import Need
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.model.vector import parse_vector
from tests.engine.crowds import AGGREGATES, CROWD, Pick, crowd, crowd_machine, crowd_need, drawing, in_state, seeded
from tests.strategies import LIST_ORDER, NOW_SECONDS, RACK, FleetInput

STAMPED: Final = (MachineState.CREATING, MachineState.CONFIGURING, MachineState.CONFIGURED)
STEPS_MAX: Final = 8
CHANGES_MAX: Final = 3


class Put(NamedTuple):
    """A machine is new, or is another."""

    machine: Machine
    idle_since_seconds: float | None


class Remove(NamedTuple):
    """A machine is gone."""

    machine_id: MachineId


class Rows(NamedTuple):
    """The demand is another, or the same in other objects."""

    demand: tuple[Need, ...]


class Settings(NamedTuple):
    """The options are others."""

    options: Options


class Look(NamedTuple):
    """Somebody takes a view and decides nothing on it."""


class CarryOut(NamedTuple):
    """What was decided last has begun."""


Change = Put | Remove | Rows | Settings | Look | CarryOut


@dataclass(frozen=True, slots=True)
class History:
    """A fleet, and what changes before each further decision on it."""

    first: FleetInput
    steps: tuple[tuple[Change, ...], ...]


@dataclass(slots=True)
class _Writer:
    """Writes a history: keeps what the changes so far have made of the fleet."""

    pick: Pick
    clusters: Sequence[str]
    machines: dict[MachineId, Machine]
    demand: list[Need]
    options: Options
    #: Options that come back are likelier to be mistaken for known ones.
    before: list[Options] = field(default_factory=list)

    # ---- machines ------------------------------------------------------------------------------------------------

    def _put(self, machine: Machine) -> Put:
        self.machines[machine.id] = machine
        since = self.pick((None, self.options.now_seconds, NOW_SECONDS - 599.0))
        return Put(machine, since if machine.state is MachineState.IDLE else None)

    def _some_machine(self) -> Machine:
        return self.machines[self.pick(sorted(self.machines))]

    def insert(self) -> Change:
        """Ids are taken again, in the middle of the order, or new at its end."""
        number = self.pick(range(len(self.machines) + 3))
        machine_id = self.pick((f"m{number:03}", f"m{number:03}b"))
        return self._put(crowd_machine(self.pick, machine_id, rows=self.demand, clusters=self.clusters))

    def remove(self) -> Change:
        machine = self._some_machine()
        if len(self.machines) == 1:
            return self._put(machine)
        del self.machines[machine.id]
        return Remove(machine.id)

    def another_state(self) -> Change:
        machine = self._some_machine()
        states = tuple(state for state in MachineState if state is not MachineState.UNSPECIFIED)
        # What frees and what binds matters most.
        state = self.pick((MachineState.IDLE, MachineState.CONFIGURED, MachineState.SPECULATIVE, *states))
        return self._put(in_state(self.pick, machine, state, rows=self.demand, clusters=self.clusters))

    def matures(self) -> Change:
        ends = {
            MachineState.CONFIGURING: MachineState.CONFIGURED,
            MachineState.CREATING: MachineState.IDLE,
            MachineState.DRAINING: MachineState.IDLE,
        }
        moving = [machine.id for machine in self.machines.values() if machine.state in ends]
        if not moving:
            return self.another_state()
        machine = self.machines[self.pick(sorted(moving))]
        if machine.state is MachineState.CONFIGURING and machine.cluster:
            return self._put(replace(machine, state=MachineState.CONFIGURED))
        return self._put(in_state(self.pick, machine, MachineState.IDLE, rows=self.demand, clusters=self.clusters))

    def another_stamp(self) -> Change:
        machine = self._some_machine()
        return self._put(in_state(self.pick, machine, machine.state, rows=self.demand, clusters=self.clusters))

    def one_field(self) -> Change:
        """One field of a machine alone, of those that its state lets matter: nothing else gives the change away."""
        machine = self._some_machine()
        row = self.pick(self.demand) if self.demand else None
        fields: list[dict[str, object]] = [
            {"price_usd_per_hour": self.pick((1.0, 2.0, 0.5))},
            {"labels": {RACK: self.pick(("r0", "r1", "r2", "a-new-rack"))}},
            {"zone": self.pick(("za", "zb"))},
            {"resources": self.pick(({"gpu": "1"}, {"gpu": "2"}, {"gpu": "1", "disk": "1"}, {"gpu": "1500m"}))},
        ]
        if machine.state is MachineState.SPECULATIVE:
            fields.append({"interruption_probability": self.pick((0.0, 0.05, 1.0))})
        if machine.state is MachineState.CONFIGURED:
            fields.append({"assigned_priority": self.pick((0, 100, 899, 900))})
            fields.append({"assigned_reclamation_penalty_dollars": self.pick((0.0, 64.0, float("inf")))})
            fields.append({"assigned_interruption_penalty_dollars": self.pick((0.0, 64.0, float("inf")))})
            fields.append({"cluster": ClusterId(self.pick(self.clusters))})
        if row is not None and machine.state in STAMPED:
            fields.append({"assigned_need_fingerprint": row.fingerprint, "assigned_group": row.group})
            fields.append({"assigned_group": row.group})
        if machine.state is MachineState.CREATING:
            fields.append({"intended_cluster": ClusterId(self.pick(("", *self.clusters)))})
        if machine.state is MachineState.DRAINING and row is not None:
            fields.append({"preempted_for": self.pick((PreemptedFor(*row.key), None))})
        return self._put(replace(machine, **self.pick(fields)))  # type: ignore[arg-type]

    def idle_for_another_time(self) -> Change:
        """Of a machine that no row can use, so that its release hangs on time alone."""
        idle = sorted(machine.id for machine in self.machines.values() if machine.state is MachineState.IDLE)
        machine = self.machines[self.pick(idle)] if idle else self._some_machine()
        unbound = in_state(self.pick, machine, MachineState.IDLE, rows=(), clusters=self.clusters)
        return self._put(replace(unbound, resources={"cpu": "4"}, capacity_type=CapacityType.ON_DEMAND))

    def drains_for_another(self) -> Change:
        draining = sorted(machine.id for machine in self.machines.values() if machine.state is MachineState.DRAINING)
        if not draining or not self.demand:
            return self.another_state()
        row, machine = self.pick(self.demand), self.machines[self.pick(draining)]
        return self._put(replace(machine, preempted_for=self.pick((PreemptedFor(*row.key), None))))

    def created_for_another(self) -> Change:
        creating = sorted(machine.id for machine in self.machines.values() if machine.state is MachineState.CREATING)
        if not creating:
            return self.another_state()
        cluster = ClusterId(self.pick(("", *self.clusters)))
        return self._put(replace(self.machines[self.pick(creating)], intended_cluster=cluster))

    # ---- rows ----------------------------------------------------------------------------------------------------

    def _rows(self, demand: Sequence[Need]) -> Rows:
        self.demand = sorted(demand, key=LIST_ORDER)
        return Rows(tuple(self.demand))

    def cluster_reports(self) -> Change:
        """A cluster's rows are others; it may be new, and it may want nothing any more."""
        cluster = self.pick((*self.clusters, "a-late-one"))
        count = self.pick((0, 1, 2, 3))
        drawn = {need.key: need for need in (crowd_need(self.pick, (cluster,)) for _ in range(count))}
        return self._rows([*(need for need in self.demand if need.cluster != cluster), *drawn.values()])

    def row_added(self) -> Change:
        need = crowd_need(self.pick, self.clusters)
        return self._rows([*(known for known in self.demand if known.key != need.key), need])

    def row_removed(self) -> Change:
        gone = self.pick(range(len(self.demand))) if self.demand else 0
        return self._rows([need for place, need in enumerate(self.demand) if place != gone])

    def row_resized(self) -> Change:
        if not self.demand:
            return self.row_added()
        place, aggregate = self.pick(range(len(self.demand))), parse_vector(self.pick(AGGREGATES))
        return self._rows([replace(n, aggregate=aggregate) if i == place else n for i, n in enumerate(self.demand)])

    def row_of_another_group(self) -> Change:
        if not self.demand:
            return self.row_added()
        place, group = self.pick(range(len(self.demand))), self.pick(("g0", "g1", "late"))
        if (*self.demand[place].key[:2], group) in {need.key for need in self.demand}:
            return self.equals_change_places()
        return self._rows([replace(n, group=group) if i == place else n for i, n in enumerate(self.demand)])

    def equals_change_places(self) -> Change:
        """Rows of equal precedence stand in another order; this is what list order decides."""
        by_precedence: defaultdict[object, list[int]] = defaultdict(list)
        for place, need in enumerate(self.demand):
            by_precedence[need.profile.precedence].append(place)
        several = [places for places in by_precedence.values() if len(places) > 1]
        if not several:
            return self.cluster_reports()
        places = self.pick(several)
        rows = list(self.demand)
        for place, need in zip(places, [rows[place] for place in (*places[1:], places[0])], strict=True):
            rows[place] = need
        self.demand = rows
        return Rows(tuple(rows))

    def equal_objects(self) -> Change:
        """The same rows, as after a restart of whoever keeps them: nothing changed but identity."""
        self.demand = [replace(need) for need in self.demand]
        return Rows(tuple(self.demand))

    # ---- options -------------------------------------------------------------------------------------------------

    def _settings(self, options: Options) -> Settings:
        self.before.append(self.options)
        self.options = options
        return Settings(options)

    def time_passes(self) -> Change:
        return self._settings(
            replace(self.options, now_seconds=self.options.now_seconds + self.pick((1.0, 60.0, 600.0)))
        )

    def reports(self) -> Change:
        cluster = self.pick((*self.clusters, "a-late-one"))
        return self._settings(replace(self.options, reported=self.options.reported ^ {cluster}))

    def flags(self) -> Change:
        machine = self._some_machine()
        pool = CapacityPool.of(machine)
        if self.pick((True, False, False)):
            cluster, withheld = self.pick(self.clusters), dict(self.options.withheld)
            known = withheld.pop(cluster, WithheldPools(pools=frozenset()))
            pools, probes = known.pools ^ {pool}, known.probes ^ ({machine.id} if self.pick((True, False)) else set())
            if pools:
                withheld[cluster] = WithheldPools(pools=pools, probes=probes)
            return self._settings(replace(self.options, withheld=withheld))
        if self.pick((True, False, False)):
            return self._settings(replace(self.options, sold_out=self.options.sold_out ^ {pool}))
        name = self.pick(("reserved", "unjoined", "probes", "set_aside"))
        return self._settings(replace(self.options, **{name: getattr(self.options, name) ^ {machine.id}}))

    def ages(self) -> Change:
        gangs = [need for need in self.demand if need.profile.same_key is not None]
        chosen = [self.pick(gangs) for _ in range(self.pick((0, 1, 2)))] if gangs else []
        ages = {ParkingKey(n.cluster, n.group, n.fingerprint): self.pick((8, 32, 7)) for n in chosen}
        return self._settings(replace(self.options, parking_ages=ages))

    def policy(self) -> Change:
        weights = self.pick((Weights(), Weights(priority=0.0, interruption=100.0)))
        holds = self.pick((DEFAULT_HOLD_SECONDS, {CapacityType.SPOT: 1.0}))
        return self._settings(replace(self.options, weights=weights, hold_seconds=holds))

    def options_of_before(self) -> Change:
        if not self.before:
            return self.flags()
        return self._settings(replace(self.pick(self.before), now_seconds=self.options.now_seconds))

    def steps(self) -> Iterator[tuple[Change, ...]]:
        """Yield the steps; now and then nothing changes at all, and the same is decided again."""
        kinds = (
            *(self.another_state, self.matures, self.another_stamp, *(self.one_field for _ in range(8))),
            *(self.cluster_reports, self.row_added, self.row_removed, self.row_resized, self.row_of_another_group),
            *(self.equals_change_places, self.equals_change_places, self.equal_objects, self.another_state),
            *(self.insert, self.insert, self.remove, self.matures, self.reports, self.flags, self.ages, self.ages),
            *(self.time_passes, self.time_passes, self.idle_for_another_time, self.idle_for_another_time),
            *(self.drains_for_another, self.drains_for_another, self.policy, self.options_of_before),
            *(self.created_for_another, self.created_for_another, Look, CarryOut, CarryOut, CarryOut),
        )
        for _ in range(self.pick(range(1, STEPS_MAX + 1))):
            count = self.pick((1, 1, 0, *range(2, CHANGES_MAX + 1)))
            yield tuple(self.pick(kinds)() for _ in range(count))


def history(pick: Pick, first: FleetInput, clusters: Sequence[str]) -> History:
    """Pick what happens to a fleet."""
    writer = _Writer(pick, clusters, dict(first.snapshot.machines), list(first.demand), first.options)
    return History(first, tuple(writer.steps()))


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Draw a small crowd and what happens to it."""
    pick = drawing(draw)
    first = crowd(pick, machines=draw(st.integers(3, 12)), rows=draw(st.integers(1, 7)))
    return history(pick, first, CROWD)


LARGE_CLUSTERS: Final = tuple(f"c{n}" for n in range(10))
LARGE_MACHINES: Final = 200
LARGE_ROWS: Final = 30


def large_history(seed: int) -> History:
    """Make a crowd of ten clusters and what happens to it: the same seed, the same history."""
    pick = seeded(seed)
    return history(pick, crowd(pick, machines=LARGE_MACHINES, rows=LARGE_ROWS, clusters=LARGE_CLUSTERS), LARGE_CLUSTERS)
