"""Draws small fleets with demand shapes from a seed."""

import random
from dataclasses import dataclass

from bigfleet.engine.decision import Options
from bigfleet.engine.snapshot import Snapshot
from bigfleet.model.ids import ClusterId, Fingerprint, MachineId
from bigfleet.model.machine import NO_HOST, HostRef, Machine
from bigfleet.model.need import Need, amounts_of
from bigfleet.model.profile import Operator, Profile, Requirement, SpreadMode, TopologySpread
from bigfleet.model.shapes import DemandShape, Overhead
from bigfleet.model.states import CapacityType, MachineState

ZONE = "topology.kubernetes.io/zone"
GIB = 2**30 * 1000
TYPES = {"c2": (2, 4, 0.1), "m4": (4, 16, 0.22), "c8": (8, 16, 0.38), "r8": (8, 64, 0.5), "m16": (16, 64, 0.8)}


@dataclass(frozen=True)
class Drawn:
    """One input of a decision."""

    machines: tuple[Machine, ...]
    demand: tuple[Need, ...]
    options: Options

    @property
    def snapshot(self) -> Snapshot:
        """Return the machines as a snapshot."""
        return Snapshot.of(self.machines)


def machine(name: str, state: MachineState, kind: str, rng: random.Random, **fields: object) -> Machine:
    """Return a machine of a drawn zone and capacity type."""
    cpu, memory, price = TYPES[kind]
    is_spot = rng.random() < 0.25
    hosted = state not in (MachineState.SPECULATIVE, MachineState.CREATING)
    pods = {"pods": str(rng.choice([3, 8, 29, 110]))} if rng.random() < 0.8 else {}
    capacity = CapacityType.SPOT if is_spot else rng.choice([CapacityType.ON_DEMAND, CapacityType.BARE_METAL])
    values = {
        "id": MachineId(name),
        "state": state,
        "host": HostRef("p", name) if hosted else NO_HOST,
        "instance_type": kind,
        "zone": rng.choice("abc"),
        "capacity_type": capacity,
        "allocatable": {
            "cpu": str(cpu),
            "memory": f"{memory}Gi",
            **pods,
            **({"gpu": "2"} if rng.random() < 0.1 else {}),
        },
        "price_usd_per_hour": 0.0
        if capacity is CapacityType.BARE_METAL
        else round(price * (0.35 if is_spot else 1), 4),
        "interruption_probability": rng.choice([0.001, 0.05]) if is_spot else 0.0,
        **fields,
    }
    return Machine(**values)  # type: ignore[arg-type]


def profile(rng: random.Random, *, gang: bool = False) -> Profile:
    """Return a profile, pinned to a type, spread, or a gang now and then."""
    requirements = []
    if rng.random() < 0.2:
        requirements.append(
            Requirement("node.kubernetes.io/instance-type", Operator.IN, tuple(sorted(rng.sample([*TYPES], 3))))
        )
    if gang:
        requirements.append(Requirement(ZONE, Operator.SAME, ()))
    spreads: tuple[TopologySpread, ...] = ()
    if not gang and rng.random() < 0.15:
        spreads = (TopologySpread(ZONE, rng.choice([1, 2]), SpreadMode.DO_NOT_SCHEDULE),)
    return Profile(
        requirements=tuple(requirements),
        spreads=spreads,
        priority=rng.choice([5, 100, 500, 1000, 2000, 1_000_000]),
        interruption_bucket=rng.choice([1, 2, 5, 10, 27]),
        reclamation_bucket=rng.choice([1, 4, 9]),
    )


def shapes(rng: random.Random) -> tuple[DemandShape, ...]:
    """Return one to four shapes; now and then one that no machine can host."""
    drawn = []
    for _ in range(rng.choice([1, 1, 2, 4])):
        cpu = rng.choice([100, 250, 500, 1000, 1500, 3000, 5000])
        memory = rng.choice([1, 2, 4, 8, 24]) * GIB // rng.choice([1, 2, 4])
        resources = {"cpu": cpu, "memory": memory}
        if rng.random() < 0.08:
            resources["gpu"] = 1000
        if rng.random() < 0.06:
            resources["cpu"] = 1_000_000
        drawn.append(DemandShape(resources, rng.randint(1, 7), rng.choice([0, 0, 0, 1, 2])))
    return tuple(drawn)


def need(cluster: str, rng: random.Random, arrival: int, gangs: float = 0.15) -> Need:
    """Return a row, a gang in a share of cases; one in ten has no shapes."""
    gang = rng.random() < gangs
    found = profile(rng, gang=gang)
    amounts = amounts_of(shapes(rng), aggregate={}, min_unit={})
    has_shapes = rng.random() < 0.9
    return Need(
        cluster=ClusterId(cluster),
        profile=found,
        aggregate=amounts.aggregate,
        min_unit=amounts.min_unit,
        arrival_unix_nanos=arrival,
        group=f"g{arrival}" if gang else "",
        shapes=amounts.shapes if has_shapes else (),
        waiting=amounts_of(shapes(rng)[:1], aggregate={}, min_unit={}).shapes
        if has_shapes and rng.random() < 0.1
        else (),
    )


def fleet(seed: int, *, machines_max: int = 24, rows_max: int = 8, gangs: float = 0.15) -> Drawn:
    """Return the fleet of a seed; so large a share of its rows are gangs, on average."""
    rng = random.Random(seed)
    clusters = ["ca", "cb", "cc"][: rng.randint(1, 3)]
    demand = [need(rng.choice(clusters), rng, number + 1, gangs) for number in range(rng.randint(1, rows_max))]
    states = [MachineState.CONFIGURED] * 4 + [MachineState.IDLE] * 2 + [MachineState.SPECULATIVE] * 4
    states += [MachineState.CONFIGURING, MachineState.CREATING, MachineState.DRAINING]
    machines = []
    for number in range(rng.randint(1, machines_max)):
        state = rng.choice(states)
        fields: dict[str, object] = {}
        if state in (MachineState.CONFIGURED, MachineState.CONFIGURING, MachineState.DRAINING):
            fields["cluster"] = ClusterId(rng.choice(clusters))
        if state is MachineState.CREATING and rng.random() < 0.7:
            fields["intended_cluster"] = ClusterId(rng.choice(clusters))
        if state not in (MachineState.IDLE, MachineState.SPECULATIVE) and rng.random() < 0.8:
            row = rng.choice(demand)
            fields["assigned_need_fingerprint"] = Fingerprint(row.fingerprint)
            fields["assigned_group"] = row.group
            fields["assigned_priority"] = row.profile.priority
        machines.append(machine(f"m{number:03}", state, rng.choice([*TYPES]), rng, **fields))
    overheads = {
        cluster: (Overhead((), {"cpu": 200, "memory": GIB // 4, "pods": 1000}),)
        for cluster in clusters
        if rng.random() < 0.4
    }
    ids = [m.id for m in machines]
    options = Options(
        now_seconds=0.0,
        reported=frozenset(c for c in clusters if rng.random() < 0.9),
        unjoined=frozenset(i for i in ids if rng.random() < 0.03),
        reserved=frozenset(i for i in ids if rng.random() < 0.03),
        overheads=overheads,
        fullness={i: rng.randint(1, 5) for i in ids if rng.random() < 0.4},
        leaving=frozenset(i for i in ids if rng.random() < 0.1),
    )
    unique = {row.key: row for row in demand}
    return Drawn(
        tuple(machines),
        tuple(sorted(unique.values(), key=lambda r: (-r.profile.priority, r.arrival_unix_nanos))),
        options,
    )
