"""The demonstration's demand: seeded, never still, and never more than its fleet can carry."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigfleet.demo.fleet import MACHINES_PER_CLUSTER_MIN, default_fleet, zones_named
from bigfleet.demo.workload import ARCHETYPES, DAY_SECONDS, PEAK_SHARE, WorkloadReplay, daylight, peak_pods
from bigfleet.model.vector import Vector, parse_vector
from bigfleet.operator.requests import CapacityRequest


def clusters(count: int) -> list[str]:
    return [f"cluster-{number}" for number in range(count)]


def replay(seed: int, cluster_count: int, machines: int) -> WorkloadReplay:
    fleet = default_fleet(machines)
    return WorkloadReplay(
        seed=seed,
        clusters=clusters(cluster_count),
        cpu_machines=fleet.cpu_machines,
        gpu_machines=fleet.gpu_machines,
    )


def test_the_default_fleet_has_the_mix_of_the_specification() -> None:
    counts: dict[str, int] = {}
    for pool in default_fleet(120).pools:
        counts[pool["capacity_type"]] = counts.get(pool["capacity_type"], 0) + pool["count"]

    assert counts == {"bare_metal": 28, "reserved": 20, "on_demand": 48, "spot": 24}


@pytest.mark.parametrize("machines", [10, 11, 37, 120, 1000])
def test_a_fleet_has_exactly_the_machines_asked_for(machines: int) -> None:
    fleet = default_fleet(machines)

    assert sum(pool["count"] for pool in fleet.pools) == fleet.cpu_machines + fleet.gpu_machines == machines


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(0, 60), st.floats(0, 10**6))
def test_demand_fits_the_fleet_with_room_to_spare(seed: int, count: int, extra: int, second: float) -> None:
    machines = count * MACHINES_PER_CLUSTER_MIN + extra
    fleet = default_fleet(machines)
    workload = replay(seed, count, machines)
    used = {True: 0, False: 0}
    for cluster in clusters(count):
        for archetype in ARCHETYPES:
            pods = workload.pods(cluster, archetype, second)
            used[archetype.on_gpus] += math.ceil(pods / archetype.pods_per_machine)

    assert used[False] <= PEAK_SHARE * fleet.cpu_machines
    assert used[True] <= PEAK_SHARE * fleet.gpu_machines


@pytest.mark.parametrize("archetype", ARCHETYPES, ids=lambda archetype: archetype.name)
def test_as_many_pods_fit_a_machine_as_the_archetype_says(archetype: object) -> None:
    archetype = next(known for known in ARCHETYPES if known is archetype)
    pools = [
        pool for pool in default_fleet(120).pools if ("nvidia.com/gpu" in pool["allocatable"]) == archetype.on_gpus
    ]
    unit = parse_vector(archetype.resources)
    fitting: list[int] = [min(supply[name] // unit[name] for name in unit) for supply in map(_supply, pools)]

    assert set(fitting) == {archetype.pods_per_machine}


def _supply(pool: dict[str, dict[str, str]]) -> Vector:
    return parse_vector(pool["allocatable"])


def test_every_cluster_of_the_smallest_fleet_has_some_of_each() -> None:
    fleet = default_fleet(3 * MACHINES_PER_CLUSTER_MIN)
    for archetype in ARCHETYPES:
        machines = fleet.gpu_machines if archetype.on_gpus else fleet.cpu_machines
        assert peak_pods(archetype, machines=machines, clusters=3) >= archetype.pods_per_machine


def test_demand_rises_and_falls() -> None:
    workload = replay(1, 3, 120)
    for archetype in ARCHETYPES:
        seen = [workload.pods("cluster-0", archetype, second) for second in range(0, 7200, 60)]
        assert max(seen) > 1.5 * (min(seen) + 1)


def test_changes_add_up_to_the_demand_of_the_second_wherever_it_began() -> None:
    through, straight = replay(5, 2, 60), replay(5, 2, 60)
    alive: dict[str, dict[str, CapacityRequest]] = {cluster: {} for cluster in clusters(2)}
    for second in (0.0, 100.0, 950.0, 3000.0):
        for cluster, (came, went) in through.advance(second).items():
            for request_id in went:
                del alive[cluster][request_id]
            alive[cluster].update({request.id: request for request in came})

    fresh = straight.advance(3000.0)
    assert {cluster: sorted(alive[cluster]) for cluster in alive} == {
        cluster: sorted(request.id for request in came) for cluster, (came, _went) in fresh.items()
    }


def test_another_seed_is_another_demand() -> None:
    assert replay(1, 3, 120).advance(1000.0) != replay(2, 3, 120).advance(1000.0)


def in_groups(count: int, groups: int, machines: int, seed: int = 1) -> WorkloadReplay:
    fleet = default_fleet(machines)
    names = clusters(count)
    return WorkloadReplay(
        seed=seed,
        clusters=names,
        cpu_machines=fleet.cpu_machines,
        gpu_machines=fleet.gpu_machines,
        groups=[names[number::groups] for number in range(groups)],
    )


def wanted_machines(workload: WorkloadReplay, names: list[str], second: float, *, on_gpus: bool) -> int:
    return sum(
        math.ceil(workload.pods(cluster, archetype, second) / archetype.pods_per_machine)
        for cluster in names
        for archetype in ARCHETYPES
        if archetype.on_gpus is on_gpus
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 8), st.integers(0, 8), st.floats(0, 10**6))
def test_groups_together_fit_the_fleet(seed: int, groups: int, more: int, second: float) -> None:
    count = groups + more
    machines = count * MACHINES_PER_CLUSTER_MIN
    fleet = default_fleet(machines)
    workload = in_groups(count, groups, machines, seed)

    assert wanted_machines(workload, clusters(count), second, on_gpus=False) <= PEAK_SHARE * fleet.cpu_machines
    assert wanted_machines(workload, clusters(count), second, on_gpus=True) <= PEAK_SHARE * fleet.gpu_machines
    assert sum(daylight(group, groups, second) for group in range(groups)) == pytest.approx(1.0)


@pytest.mark.parametrize("groups", range(2, 9))
def test_each_group_wants_more_than_its_even_part_at_its_noon(groups: int) -> None:
    machines = 40 * groups
    even = default_fleet(machines).cpu_machines / groups
    workload = in_groups(groups, groups, machines)
    for group, cluster in enumerate(clusters(groups)):
        noon = (group + 0.5) / groups * DAY_SECONDS
        assert wanted_machines(workload, [cluster], noon, on_gpus=False) > even
        assert wanted_machines(workload, [cluster], noon + DAY_SECONDS / 2, on_gpus=False) < even


def test_one_group_is_no_group() -> None:
    for second in (0, 1234):
        assert in_groups(3, 1, 120).advance(second) == replay(1, 3, 120).advance(second)


@pytest.mark.parametrize("zones", [1, 2, 3, 8])
def test_zones_share_the_machines_evenly(zones: int) -> None:
    counts: dict[str, int] = {}
    for pool in default_fleet(120, zones_named(zones)).pools:
        counts[pool["zone"]] = counts.get(pool["zone"], 0) + pool["count"]

    assert sorted(counts) == [f"sim-1{letter}" for letter in "abcdefgh"[:zones]]
    assert sum(counts.values()) == 120
    assert max(counts.values()) - min(counts.values()) <= 8
