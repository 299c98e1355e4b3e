"""Hypothesis strategies for machines, needs and small fleets; new features of the model join them here.

Fleets full of gangs that tie are in `tests.engine.crowds`.

The universes are tiny on purpose: a few clusters, zones, types and sizes, so that rows meet, compete and tie. Every
machine holds the invariant of docs/spec/model.md §2.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from bigfleet.engine.decision import CapacityPool, Options
from bigfleet.engine.folding import folded_need
from bigfleet.engine.snapshot import Snapshot
from bigfleet.model import labels as keys
from bigfleet.model.ids import ClusterId, Fingerprint, MachineId
from bigfleet.model.machine import NO_HOST, HostRef, Machine, PreemptedFor
from bigfleet.model.need import Need, amounts_of
from bigfleet.model.profile import Operator, Profile, Requirement, SpreadMode, TopologySpread
from bigfleet.model.shapes import DemandShape, Overhead, canonical_overheads, canonical_shapes
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.model.vector import ZERO, parse_vector

CLUSTERS = ("c1", "c2")
RACK = "example.com/rack"
HOST = HostRef("test", "host")
NOW_SECONDS = 100_000.0

#: Any text that may stand in a key or a value, separators of the fingerprint included. No shard accepts control
#: characters.
texts = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), max_size=8) | st.sampled_from(
    ["", "%", ":", ";", ",", "|", "=", "a,b", "%2C", "reqs=", "|spr=", " ", "ü"]
)
priorities = st.sampled_from([-5, 0, 100, 900])
buckets = st.sampled_from([0, 1, 5, 27])
dollars = st.sampled_from([0.0, 0.5, 64.0, float("inf")])
prices = st.sampled_from([0.0, 0.5, 1.0, 3.0])
groups = st.sampled_from(["", "ga", "gb"])
sizes = st.sampled_from(
    [{"cpu": "4"}, {"cpu": "8"}, {"cpu": "4", "gpu": "1"}, {"gpu": "2"}, {"cpu": "3", "memory": "8Gi"}]
)
aggregates = st.sampled_from(
    [
        {},
        {"cpu": "4"},
        {"cpu": "10"},
        {"cpu": "24"},
        {"gpu": "2"},
        {"cpu": "8", "gpu": "3"},
        {"cpu": "6", "memory": "16Gi"},
    ]
)
#: Pods of a row; a few of them add up to what small fleets can host.
demand_shapes = st.builds(
    DemandShape,
    st.sampled_from([{}, {"cpu": "500m"}, {"cpu": "2"}, {"cpu": "4"}, {"gpu": "1"}, {"cpu": "1", "memory": "4Gi"}]).map(
        parse_vector
    ),
    st.integers(1, 4),
    st.sampled_from([0, 0, 0, 1, 2]),
)
min_units = st.sampled_from([{}, {"cpu": "1"}, {"cpu": "4"}, {"gpu": "1"}])
states = st.sampled_from(
    [
        MachineState.IDLE,
        MachineState.IDLE,
        MachineState.SPECULATIVE,
        MachineState.CONFIGURED,
        MachineState.CONFIGURED,
        MachineState.CONFIGURING,
        MachineState.CREATING,
        MachineState.DRAINING,
        MachineState.DELETING,
        MachineState.FAILED,
    ]
)

#: Requirements that test one machine.
plain_requirements = st.sampled_from(
    [
        Requirement(keys.INSTANCE_TYPE, Operator.IN, ("x",)),
        Requirement(keys.INSTANCE_TYPE, Operator.IN, ("x", "y")),
        Requirement(keys.ZONE, Operator.IN, ("za",)),
        Requirement(keys.ZONE, Operator.NOT_IN, ("zb",)),
        Requirement(RACK, Operator.EXISTS),
        Requirement(RACK, Operator.DOES_NOT_EXIST),
    ]
)
#: What DaemonSets take, by cluster, as a demand table hands it out.
overheads_by_cluster = st.dictionaries(
    st.sampled_from(CLUSTERS),
    st.lists(
        st.builds(
            Overhead,
            st.lists(plain_requirements, max_size=1).map(tuple),
            st.sampled_from([{"cpu": "100m"}, {"cpu": "1", "memory": "1Gi"}]).map(parse_vector),
        ),
        min_size=1,
        max_size=2,
    ).map(canonical_overheads),
    max_size=2,
)
same_requirements = st.sampled_from(
    [
        Requirement(RACK, Operator.SAME),
        Requirement(keys.ZONE, Operator.SAME),
        Requirement(RACK, Operator.SAME, ("r0", "r1")),
    ]
)
topology_spreads = st.sampled_from(
    [
        TopologySpread(keys.ZONE, 1, SpreadMode.DO_NOT_SCHEDULE),
        TopologySpread(RACK, 2, SpreadMode.DO_NOT_SCHEDULE),
        TopologySpread(keys.ZONE, 1, SpreadMode.SCHEDULE_ANYWAY),
    ]
)

#: Profiles of any content, for identity and round trips.
any_profiles = st.builds(
    Profile,
    requirements=st.lists(
        st.builds(Requirement, texts, st.sampled_from(Operator), st.lists(texts, max_size=3).map(tuple)), max_size=4
    ).map(tuple),
    spreads=st.lists(
        st.builds(TopologySpread, texts, st.integers(-(2**31), 2**31 - 1), st.sampled_from(SpreadMode)), max_size=3
    ).map(tuple),
    priority=st.integers(-(2**31), 2**31 - 1),
    interruption_bucket=st.integers(0, 27),
    reclamation_bucket=st.integers(0, 27),
)


@st.composite
def profiles(draw: st.DrawFn, *, same: bool = True, spread: bool = True) -> Profile:
    """Draw a profile that small fleets can meet; `same` and `spread` allow gangs and strict spreads."""
    requirements = draw(st.just([]) | st.lists(plain_requirements, max_size=2))
    if same and draw(st.integers(0, 2)) == 0:
        requirements.append(draw(same_requirements))
    return Profile(
        requirements=tuple(requirements),
        spreads=tuple(draw(st.lists(topology_spreads, max_size=1))) if spread else (),
        priority=draw(priorities),
        interruption_bucket=draw(buckets),
        reclamation_bucket=draw(buckets),
    )


@st.composite
def needs(draw: st.DrawFn, *, same: bool = True, spread: bool = True) -> Need:
    """Draw one row of demand, every other one with shapes; only gangs are ever parked."""
    profile = draw(profiles(same=same, spread=spread))
    shapes = draw(st.lists(demand_shapes, max_size=3)) if draw(st.booleans()) else []
    min_unit = parse_vector(draw(min_units))
    aggregate = ZERO if shapes else parse_vector(draw(aggregates))
    amounts = amounts_of(shapes, aggregate=aggregate, min_unit=min_unit)
    return Need(
        cluster=ClusterId(draw(st.sampled_from(CLUSTERS))),
        profile=profile,
        aggregate=amounts.aggregate,
        min_unit=amounts.min_unit,
        arrival_unix_nanos=draw(st.integers(0, 3)),
        group=draw(groups),
        parked=profile.same_key is not None and draw(st.integers(0, 5)) == 0,
        shapes=amounts.shapes,
        waiting=canonical_shapes(draw(st.lists(demand_shapes, max_size=1))) if shapes else (),
    )


def _host_of(state: MachineState) -> HostRef:
    return NO_HOST if state in (MachineState.SPECULATIVE, MachineState.CREATING) else HOST


@st.composite
def machines(
    draw: st.DrawFn,
    machine_id: str = "m0",
    *,
    rows: Sequence[Need] = (),
    in_states: st.SearchStrategy[MachineState] = states,
) -> Machine:
    """Draw a machine that holds the invariant; stamps name one of `rows` now and then."""
    state = draw(in_states)
    bound = state in (MachineState.CONFIGURING, MachineState.CONFIGURED, MachineState.DRAINING)
    stamped = bound or state is MachineState.CREATING
    row = draw(st.none() | st.sampled_from(rows)) if rows and stamped else None
    if row is not None and row.profile.same_key is not None and draw(st.integers(0, 3)) == 0:
        row = folded_need(row)
    rack = draw(st.sampled_from([None, "r0", "r1", "r2", ""]))
    is_creating, is_draining = state is MachineState.CREATING, state is MachineState.DRAINING
    return Machine(
        id=MachineId(machine_id),
        state=state,
        host=_host_of(state),
        cluster=ClusterId(draw(st.sampled_from(CLUSTERS)) if bound else ""),
        instance_type=draw(st.sampled_from(["x", "x", "y", ""])),
        zone=draw(st.sampled_from(["za", "zb", ""])),
        capacity_type=draw(st.sampled_from(CapacityType)),
        resources=draw(sizes),
        allocatable=draw(st.just({}) | sizes),
        labels={} if rack is None else {RACK: rack},
        price_usd_per_hour=draw(prices),
        interruption_probability=draw(st.sampled_from([0.0, 0.05])),
        last_error="broken" if state is MachineState.FAILED else "",
        assigned_priority=draw(priorities) if bound else 0,
        assigned_interruption_penalty_dollars=draw(dollars) if bound else 0.0,
        assigned_reclamation_penalty_dollars=draw(dollars) if bound else 0.0,
        assigned_need_fingerprint=row.fingerprint if row else Fingerprint(""),
        assigned_group=row.group if row else "",
        intended_cluster=ClusterId(draw(st.sampled_from(["", row.cluster]))) if row and is_creating else ClusterId(""),
        preempted_for=PreemptedFor(*row.key) if row and is_draining else None,
    )


@dataclass(frozen=True, slots=True)
class FleetInput:
    """Everything that one decision takes."""

    snapshot: Snapshot
    demand: tuple[Need, ...]
    options: Options


#: The order in which a demand table lists rows: priority descending, arrival, cluster (docs/spec/model.md §8).
LIST_ORDER: Callable[[Need], tuple[int, int, str]] = lambda need: (  # noqa: E731
    -need.profile.priority,
    need.arrival_unix_nanos,
    need.cluster,
)


@st.composite
def fleets(
    draw: st.DrawFn,
    *,
    same: bool = True,
    spread: bool = True,
    flags: bool = True,
    machines_max: int = 14,
    rows_max: int = 6,
) -> FleetInput:
    """Draw a small fleet with its demand in list order; `flags` allows unjoined, reserved and silent clusters."""
    rows = draw(st.lists(needs(same=same, spread=spread), max_size=rows_max))
    # Twins of one class but another group: gangs that may fold together, rows that compete as equals.
    rows += [replace(rows[n], group="twin") for n in draw(st.frozensets(st.integers(0, 2))) if n < len(rows)]
    demand = sorted(rows, key=LIST_ORDER)
    count = draw(st.integers(0, machines_max) | st.integers(machines_max // 2, machines_max))
    fleet = [draw(machines(f"m{n:02}", rows=demand)) for n in range(count)]
    ids = [machine.id for machine in fleet]
    pools = sorted({CapacityPool.of(machine) for machine in fleet})
    flagged = st.frozensets(st.sampled_from(ids), max_size=2) if ids and flags else st.just(frozenset())
    idle_since = {
        machine.id: NOW_SECONDS - draw(st.sampled_from([0.0, 60.0, 599.0, 600.0]))
        for machine in fleet
        if machine.state is MachineState.IDLE and draw(st.integers(0, 4))
    }
    return FleetInput(
        snapshot=Snapshot.of(fleet, idle_since),
        demand=tuple(demand),
        options=Options(
            now_seconds=NOW_SECONDS,
            reported=draw(st.sampled_from([frozenset(CLUSTERS), frozenset({"c1"})])) if flags else frozenset(CLUSTERS),
            unjoined=draw(flagged),
            reserved=draw(flagged),
            overheads=draw(overheads_by_cluster),
            sold_out=draw(st.frozensets(st.sampled_from(pools), max_size=2)) if pools and flags else frozenset(),
            probes=draw(flagged),
            set_aside=draw(flagged),
        ),
    )


# ---- what is legal and rare --------------------------------------------------------------------------------------

unusual_prices = st.sampled_from([float("inf"), -0.0, 0.1 + 0.2, 0.3, 5e-324])
unusual_dollars = st.sampled_from([float("inf"), 0.01, 0.009, 1e300])
unusual_priorities = st.sampled_from([-(2**31), 2**31 - 1, 99, 100, 101])
FREE_STATES = (MachineState.IDLE, MachineState.SPECULATIVE, MachineState.DELETING)


@st.composite
def unusual_machines(draw: st.DrawFn, machine: Machine, rows: Sequence[Need]) -> Machine:
    """Draw a change of a machine that the invariant allows and providers rarely make."""
    kind = draw(st.integers(0, 4))
    if kind == 0:
        return replace(machine, price_usd_per_hour=draw(unusual_prices), interruption_probability=1.0)
    if kind == 1:
        return replace(
            machine,
            assigned_priority=draw(unusual_priorities),
            assigned_need_fingerprint=draw(st.sampled_from([machine.assigned_need_fingerprint, Fingerprint("gone")])),
            assigned_interruption_penalty_dollars=draw(unusual_dollars),
            assigned_reclamation_penalty_dollars=draw(unusual_dollars),
        )
    if kind == 2 and machine.state in FREE_STATES and rows:
        # A free machine may come with the stamps, and some with the cluster, of whom it served.
        row = draw(st.sampled_from(rows))
        cluster = "" if machine.state is MachineState.SPECULATIVE else row.cluster
        stamped = replace(machine, assigned_need_fingerprint=row.fingerprint, assigned_group=row.group)
        return replace(stamped, cluster=ClusterId(cluster), intended_cluster=ClusterId(row.cluster))
    if kind == 3:
        return replace(machine, labels={**machine.labels, keys.ZONE: "za", keys.INSTANCE_TYPE: "y"}, zone="")
    return replace(machine, resources={}, allocatable=draw(st.sampled_from([{}, {"cpu": "0"}, {"gpu": "64"}])))
