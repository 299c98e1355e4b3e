"""Fleets in which gangs tie: few racks, few sizes, little that is free; and both kinds of fleets with everything on.

What is drawn is written once over a `Pick`, so that Hypothesis can draw and shrink small fleets and a seeded generator
can make large ones. Every machine holds the invariant of docs/spec/model.md §2.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from hypothesis import strategies as st

from bigfleet.engine.decision import DEFAULT_HOLD_SECONDS, CapacityPool, Options, ParkingKey, Weights
from bigfleet.engine.snapshot import Snapshot
from bigfleet.model import labels as keys
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import NO_HOST, Machine, PreemptedFor
from bigfleet.model.need import Need
from bigfleet.model.profile import Operator, Profile, Requirement, SpreadMode, TopologySpread
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.model.vector import parse_vector
from tests.strategies import HOST, LIST_ORDER, NOW_SECONDS, RACK, FleetInput, fleets, unusual_machines

T = TypeVar("T")


class Pick(Protocol):
    """Picks one of some things; earlier ones are the simpler ones."""

    def __call__(self, things: Sequence[T], /) -> T:
        """Return one of the things; there is at least one."""


def drawing(draw: st.DrawFn) -> Pick:
    """Let Hypothesis pick."""

    def pick(things: Sequence[T], /) -> T:
        return draw(st.sampled_from(things))

    return pick


def seeded(seed: int) -> Pick:
    """Let a generator pick: the same seed, the same things."""
    return random.Random(seed).choice


CROWD = ("c0", "c1", "c2")
GROUPS = ("", "g0", "g1", "g2", "g3")
_RACK_SAME = Requirement(RACK, Operator.SAME)
_ZONE_SAME = Requirement(keys.ZONE, Operator.SAME)
_TYPE_X = Requirement(keys.INSTANCE_TYPE, Operator.IN, ("x",))
_GANG = Profile(requirements=(_RACK_SAME,), priority=900, interruption_bucket=5)
#: Mostly gangs, and few profiles: what differs between two rows is the cluster, the group or nothing.
PROFILES = (
    _GANG,
    _GANG,
    replace(_GANG, priority=100),
    Profile(requirements=(_RACK_SAME, _TYPE_X), priority=900, interruption_bucket=5),
    Profile(requirements=(_ZONE_SAME,), priority=900, interruption_bucket=27),
    Profile(requirements=(_TYPE_X,), priority=900, interruption_bucket=5),
    Profile(priority=100),
    Profile(spreads=(TopologySpread(RACK, 1, SpreadMode.DO_NOT_SCHEDULE),), priority=500),
)
AGGREGATES = ({"gpu": "2"}, {"gpu": "2"}, {"gpu": "1"}, {"gpu": "3"}, {"gpu": "4"})
STATES = (
    *(MachineState.CONFIGURED for _ in range(5)),
    *(MachineState.CONFIGURING for _ in range(3)),
    *(MachineState.CREATING for _ in range(2)),
    *(MachineState.SPECULATIVE for _ in range(2)),
    MachineState.IDLE,
    MachineState.DRAINING,
    MachineState.DELETING,
    MachineState.FAILED,
)
BOUND = (MachineState.CONFIGURING, MachineState.CONFIGURED, MachineState.DRAINING)
HOSTLESS = (MachineState.SPECULATIVE, MachineState.CREATING)


def crowd_need(pick: Pick, clusters: Sequence[str] = CROWD) -> Need:
    """Pick a row that looks like many others."""
    return Need(
        cluster=ClusterId(pick(clusters)),
        profile=pick(PROFILES),
        aggregate=parse_vector(pick(AGGREGATES)),
        min_unit=parse_vector(pick(({}, {"gpu": "1"}))),
        arrival_unix_nanos=pick((0, 1)),
        group=pick(GROUPS),
    )


def crowd_machine(pick: Pick, machine_id: str, *, rows: Sequence[Need], clusters: Sequence[str] = CROWD) -> Machine:
    """Pick a machine that looks like many others."""
    machine = Machine(
        id=MachineId(machine_id),
        state=MachineState.SPECULATIVE,
        instance_type=pick(("x", "x", "x", "y")),
        zone=pick(("za", "zb")),
        capacity_type=pick((CapacityType.BARE_METAL, CapacityType.ON_DEMAND, CapacityType.SPOT)),
        resources=pick(({"gpu": "1"}, {"gpu": "1"}, {"gpu": "1"}, {"gpu": "2"})),
        labels={RACK: pick(("r0", "r0", "r1", "r1", "r2"))},
        price_usd_per_hour=pick((1.0, 1.0, 1.0, 2.0)),
        interruption_probability=pick((0.0, 0.0, 0.05)),
    )
    return in_state(pick, machine, pick(STATES), rows=rows, clusters=clusters)


def in_state(
    pick: Pick, machine: Machine, state: MachineState, *, rows: Sequence[Need], clusters: Sequence[str] = CROWD
) -> Machine:
    """Return the machine in another state; most carry the stamps of a row there, not always of their own cluster."""
    host = NO_HOST if state in HOSTLESS else HOST
    bare = replace(machine.without_binding(), state=state, host=host, last_error="")
    if state is MachineState.FAILED:
        return replace(bare, last_error="broken")
    if state not in BOUND and state is not MachineState.CREATING:
        return bare
    is_stamped = bool(rows) and pick((True, True, True, True, False))
    row = pick(rows) if is_stamped else None
    cluster = ClusterId(row.cluster if row is not None and pick((True, True, True, False)) else pick(clusters))
    if row is not None:
        bare = replace(bare, assigned_need_fingerprint=row.fingerprint, assigned_group=row.group)
    if state is MachineState.CREATING:
        return replace(bare, intended_cluster=pick((ClusterId(""), cluster)))
    coming_for = PreemptedFor(*row.key) if row is not None and state is MachineState.DRAINING else None
    return replace(
        bare,
        cluster=cluster,
        assigned_priority=row.profile.priority if row is not None else 0,
        assigned_reclamation_penalty_dollars=pick((0.0, 0.0, 64.0)),
        preempted_for=pick((coming_for, None)),
    )


def crowd(pick: Pick, *, machines: int, rows: int, clusters: Sequence[str] = CROWD) -> FleetInput:
    """Pick a fleet of so many machines, and at most so many rows: no two of one key, as in a demand table."""
    drawn = {need.key: need for need in (crowd_need(pick, clusters) for _ in range(rows))}
    demand = sorted(drawn.values(), key=LIST_ORDER)
    fleet = [crowd_machine(pick, f"m{n:03}", rows=demand, clusters=clusters) for n in range(machines)]
    idle = [machine.id for machine in fleet if machine.state is MachineState.IDLE]
    return FleetInput(
        snapshot=Snapshot.of(fleet, {machine_id: NOW_SECONDS - pick((0.0, 599.0)) for machine_id in idle}),
        demand=tuple(demand),
        options=Options(now_seconds=NOW_SECONDS, reported=frozenset(clusters)),
    )


@st.composite
def crowds(draw: st.DrawFn, *, machines_max: int = 14, rows_max: int = 7) -> FleetInput:
    """Draw a small crowd."""
    machines, rows = draw(st.integers(2, machines_max)), draw(st.integers(1, rows_max))
    return crowd(drawing(draw), machines=machines, rows=rows)


@st.composite
def varied_fleets(draw: st.DrawFn) -> FleetInput:
    """Draw a fleet with everything on: both kinds of fleets, rare values, all options, gangs that are due to park."""
    fleet = draw(fleets(machines_max=24, rows_max=8) | crowds(machines_max=20, rows_max=8))
    machines_by_id = dict(fleet.snapshot.machines)
    ids = sorted(machines_by_id)
    for machine_id in draw(st.lists(st.sampled_from(ids), max_size=3)) if ids else ():
        machines_by_id[machine_id] = draw(unusual_machines(machines_by_id[machine_id], fleet.demand))
    ages = {
        ParkingKey(need.cluster, need.group, need.fingerprint): draw(st.sampled_from([0, 7, 8, 31, 32, 33]))
        for need in fleet.demand
        if need.profile.same_key is not None and draw(st.integers(0, 3)) == 0
    }
    pools = sorted({CapacityPool.of(machine) for machine in machines_by_id.values()})
    flagged = st.frozensets(st.sampled_from(ids), max_size=3) if ids else st.just(frozenset())
    options = replace(
        fleet.options,
        parking_ages=ages,
        weights=draw(st.just(Weights()) | st.just(Weights(priority=0.0, drain=0.5, interruption=100.0))),
        drain_seconds=draw(st.sampled_from([30.0, 30.0, 0.0, 600.0])),
        hold_seconds=draw(
            st.just(DEFAULT_HOLD_SECONDS) | st.sampled_from([{}, {CapacityType.SPOT: 0.0, CapacityType.ON_DEMAND: 1.0}])
        ),
        unjoined=draw(flagged),
        reserved=draw(flagged),
        sold_out=draw(st.frozensets(st.sampled_from(pools), max_size=3)) if pools else frozenset(),
        probes=draw(flagged),
        set_aside=draw(flagged),
    )
    return FleetInput(Snapshot.of(machines_by_id.values(), fleet.snapshot.idle_since_seconds), fleet.demand, options)
