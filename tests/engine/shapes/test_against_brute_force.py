"""Tiny clusters, decided by the engine and by trying every assignment: nobody starves who could run."""

import random

import pytest

from bigfleet.engine.decision import Options
from bigfleet.engine.shapes.decide import decide
from bigfleet.engine.snapshot import Snapshot
from bigfleet.model.ids import ClusterId
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need, amounts_of
from bigfleet.model.profile import Profile
from bigfleet.model.shapes import DemandShape
from bigfleet.model.states import MachineState
from tests.engine.proof import EQUALITY_EXAMPLES
from tests.engine.shapes.brute_force import best, groups_of
from tests.engine.shapes.claims_checker import violations
from tests.engine.shapes.shape_fleets import GIB, TYPES, machine

CHUNK = 100
CHUNKS = max(1, EQUALITY_EXAMPLES // CHUNK // 4)
REQUESTS = ((500, 1), (1000, 2), (1500, 2), (1000, 6), (2500, 4), (3000, 8), (5000, 10))


def tiny(seed: int) -> tuple[list[Machine], list[Need]]:
    """Return up to five machines and seven pods of one cluster; of even seeds the cluster holds the machines."""
    rng = random.Random(seed)
    demand: list[Need] = []
    pods = rng.randint(2, 7)
    while pods > 0:
        count = rng.randint(1, min(4, pods))
        pods -= count
        cpu, memory = rng.choice(REQUESTS)
        shape = DemandShape({"cpu": cpu, "memory": memory * GIB}, count, rng.choice([0, 0, 0, 1]))
        amounts = amounts_of([shape], aggregate={}, min_unit={})
        profile = Profile(priority=rng.choice([5, 100, 1000]), interruption_bucket=rng.choice([1, 2, 5, 27]))
        demand.append(
            Need(
                cluster=ClusterId("c"),
                profile=profile,
                aggregate=amounts.aggregate,
                min_unit=amounts.min_unit,
                arrival_unix_nanos=len(demand) + 1,
                group=f"row-{len(demand)}",
                shapes=amounts.shapes,
            )
        )
    is_held = seed % 2 == 0
    state = MachineState.CONFIGURED if is_held else MachineState.SPECULATIVE
    bound = {"cluster": ClusterId("c")} if is_held else {}
    machines = [machine(f"m{n}", state, rng.choice([*TYPES]), rng, **bound) for n in range(rng.randint(1, 5))]
    return machines, sorted(demand, key=lambda row: (-row.profile.priority, row.arrival_unix_nanos))


#: In one of the first 10,000 clusters two machines differed in nothing but their interruption probability.
FIRST = [range(chunk * CHUNK, (chunk + 1) * CHUNK) for chunk in range(CHUNKS)] + [range(9218, 9219)]


@pytest.mark.parametrize("seeds", FIRST, ids=lambda seeds: f"from {seeds.start}")
def test_no_pod_starves_that_could_run_without_harming_a_higher_row(seeds: range) -> None:
    """Group by group in order of precedence the engine serves as many pods as the best of all assignments."""
    for seed in seeds:
        machines, demand = tiny(seed)
        options = Options(now_seconds=0.0, reported=frozenset({"c"}))

        decision = decide(Snapshot.of(machines), demand, options)

        served = tuple(
            sum(p.count for p in decision.rows[row].placements if p.shape == shape)
            for row, shape in groups_of(demand, machines)
        )
        assert violations(machines, demand, options, decision) == [], f"seed {seed}"
        assert served == best(demand, machines).served, f"seed {seed}"


def test_the_brute_force_finds_what_first_fit_misses() -> None:
    """Three pods of 6, 4 and 4 cpu and one of 2 fill two machines of 8 cpu in one way alone."""
    rng = random.Random(0)
    pair = [
        machine(
            f"m{n}",
            MachineState.CONFIGURED,
            "c8",
            rng,
            cluster=ClusterId("c"),
            allocatable={"cpu": "8", "memory": "64Gi"},
        )
        for n in range(2)
    ]
    shapes = [DemandShape({"cpu": cpu * 1000}, count) for cpu, count in ((6, 1), (4, 2), (2, 1))]
    amounts = amounts_of(shapes, aggregate={}, min_unit={})
    row = Need(
        cluster=ClusterId("c"),
        profile=Profile(priority=1, interruption_bucket=1),
        aggregate=amounts.aggregate,
        min_unit=amounts.min_unit,
        shapes=amounts.shapes,
    )

    assert best([row], pair).served == (1, 2, 1)
