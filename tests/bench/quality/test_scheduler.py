"""Pods are placed as first-fit-decreasing and as kube-scheduler place them: worked by hand."""

from dataclasses import replace

import numpy as np

from bench.quality.placement import Machines, place
from bench.quality.reports.handmade import instance, offer, row
from bench.quality.scheduler import queue, simulate
from bench.quality.values import (
    CPU,
    MILLI,
    Instance,
    PackingRequirement,
    PackingRow,
    PackingShape,
    PackingSpread,
    Scheduler,
)
from bigfleet.model import labels as keys
from bigfleet.sim.packing.arrays import ClusterArrays


def machines(of: Instance, *classes: int) -> Machines:
    """Return machines of some classes that the only cluster holds."""
    return Machines(ClusterArrays(of.clusters[0], of.offers), classes)


def lost(of: Instance, classes: tuple[int, ...], scheduler: Scheduler, **fields: int) -> list[int]:
    """Return the pods lost in each order; gangs run where first-fit puts them."""
    held = machines(of, *classes)
    domains = place(held).domain_of_row
    by_order = simulate(held, domains, scheduler=scheduler, seed=1, **fields).lost.sum(axis=1)
    return [int(pods) for pods in by_order]


LEAST, MOST = Scheduler.LEAST_ALLOCATED, Scheduler.MOST_ALLOCATED
EIGHT = offer("m8", 8, 8, 0.4)


def test_least_allocated_fills_evenly_and_most_allocated_one_after_the_other() -> None:
    """Two pods of 2 cpu come first, then one of 8: only a scheduler that packs leaves a machine empty for it."""
    of = instance([EIGHT], {"c": [row("small", [(2, 2, 2)], priority=9), row("large", [(8, 8, 1)])]})

    assert lost(of, (0, 0), LEAST) == [1] * 6
    assert lost(of, (0, 0), MOST) == [0] * 6


def test_the_score_is_the_mean_of_cpu_and_memory() -> None:
    """One pod of 2 cpu and 1 GiB: free after it are 6/8 and 7/8 (mean 81) against 14/16 and 3/4 (mean 81, floors
    75 + 87 = 162 and 87 + 75 = 162: a tie); with one GiB more on the second machine, 87 and 80, the second wins."""
    first, tie, second = offer("a", 8, 8, 0.1), offer("b", 16, 4, 0.1), offer("c", 16, 5, 0.1)
    rows = [row("one", [(2, 1, 1)], priority=9), row("rest", [(8, 8, 1)])]

    # The second row runs on the first machine alone, so it is lost exactly when the first pod went there.
    assert set(lost(instance([first, tie], {"c": rows}), (0, 1), LEAST, orders=40)) == {0, 1}
    assert set(lost(instance([first, second], {"c": rows}), (0, 1), LEAST, orders=40)) == {0}


def test_the_queue_is_sorted_by_priority_and_random_within_it() -> None:
    orders = [queue(np.array([3, 3, 1]), np.array([5, 5, 9]), seed) for seed in range(8)]

    assert all(order[0] == 2 for order in orders)
    assert all(sorted(order[1:]) == [0, 0, 0, 1, 1, 1] for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    assert orders == [queue(np.array([3, 3, 1]), np.array([5, 5, 9]), seed) for seed in range(8)]


def test_a_limit_of_one_pod_per_machine_and_the_pods_limit_hold() -> None:
    limited = instance([EIGHT], {"c": [row("a", [], shapes=(PackingShape({CPU: MILLI}, 3, 1),))]})
    crowded = instance([offer("m8", 8, 8, 0.4, allocatable={CPU: 8000, "pods": 2000})], {"c": [row("a", [(1, 0, 3)])]})

    assert lost(limited, (0, 0), LEAST) == [1] * 6
    assert lost(limited, (0, 0, 0), LEAST) == [0] * 6
    assert lost(crowded, (0,), MOST) == [1] * 6


def zoned(of: PackingRow, *, per_zone: tuple[int, ...]) -> tuple[Instance, tuple[int, ...]]:
    """Return an instance of one row over zones, and so many machines of 8 cpu in each zone."""
    offers = [offer("m8", 8, 8, 0.4, id=f"z{n}", zone=f"z{n}") for n in range(len(per_zone))]
    return instance(offers, {"c": [of]}), tuple(n for n, number in enumerate(per_zone) for _ in range(number))


def test_a_strict_spread_waits_for_the_emptiest_zone() -> None:
    """9 pods of 2 cpu over two zones with 4 and 12 places: 4 and 5 within a skew of 1."""
    spread = row("s", [(2, 2, 10)], spreads=(PackingSpread(keys.ZONE, 1, True),))
    of, held = zoned(spread, per_zone=(1, 3))

    assert lost(of, held, LEAST) == [1] * 6
    assert lost(of, held, MOST) == [1] * 6


def test_a_gang_stays_in_the_domain_that_holds_it() -> None:
    gang = row("g", [(4, 4, 4)], requirements=(PackingRequirement(keys.ZONE, "Same"),), group="g")
    fits, both = zoned(gang, per_zone=(1, 2))
    never, single = zoned(gang, per_zone=(1, 1))

    assert place(machines(fits, *both)).domain_of_row == {0: "z1"}
    assert lost(fits, both, LEAST) == [0] * 6
    assert place(machines(never, *single)).domain_of_row == {}
    assert lost(never, single, LEAST) == [4] * 6


def test_first_fit_takes_the_order_that_loses_least() -> None:
    """Pods of 5, 3 and 4, 4 cpu fill two machines of 8 only when the large ones come first."""
    of = instance([EIGHT], {"c": [row("a", [(3, 1, 1), (5, 1, 1), (4, 1, 2)])]})
    full = place(machines(of, 0, 0))

    assert full.pods_lost == 0
    assert (full.on.sum(axis=1) == [1, 1, 2]).all()
    assert place(machines(of, 0)).pods_lost == 2
    assert place(machines(of)).pods_lost == 4


def test_first_fit_tries_orders_until_one_loses_nothing() -> None:
    """By cpu the pods come with 3, 4, 4 and 5 GiB, and the last finds no room; by memory 5 + 3 and 4 + 4 fill both."""
    of = instance([EIGHT], {"c": [row("a", [(1, 5, 1), (4, 3, 1), (2, 4, 2)])]})

    assert place(machines(of, 0, 0)).pods_lost == 0


def test_a_pod_that_nothing_hosts_does_not_change_the_order_of_the_others() -> None:
    """Only in the order of GPUs, which are scarce, do these pods fill three machines."""
    gpus = "nvidia.com/gpu"
    gpu_offer = replace(EIGHT, allocatable={**EIGHT.allocatable, gpus: 8 * MILLI})
    pods = row("a", [(4, 2, 2), (1, 1, 2), (1, 2, 2), (3, 1, 2)])
    shapes = zip(pods.shapes, (1, 3, 3, 3), strict=True)
    wanted = replace(pods, shapes=tuple(replace(s, resources={**s.resources, gpus: n * MILLI}) for s, n in shapes))
    of = instance([gpu_offer], {"c": [wanted, row("huge", [(1000, 1, 1)])]})

    assert place(machines(of, 0, 0, 0)).pods_lost == 1


def test_a_gang_takes_the_domain_with_the_least_room_that_holds_it() -> None:
    gang = row("g", [(4, 4, 4)], requirements=(PackingRequirement(keys.ZONE, "Same"),), group="g")
    of, held = zoned(gang, per_zone=(3, 1, 2))

    assert place(machines(of, *held)).domain_of_row == {0: "z2"}


def test_first_fit_keeps_pinned_rows_off_interrupted_machines_when_asked() -> None:
    spot = offer("s8", 8, 8, 0.1, capacity_type="Spot", interruption_probability=0.01)
    of = instance([EIGHT, spot], {"c": [row("pinned", [(4, 4, 2)], interruption_bucket=27), row("any", [(4, 4, 2)])]})

    kept_off = place(machines(of, 0, 1), avoid_interruption=True)

    assert kept_off.pods_lost == 0
    assert kept_off.on.tolist() == [[2, 0], [0, 2]]
    assert place(machines(of, 1), avoid_interruption=True).pods_lost == 2


def test_equal_seeds_lose_equally() -> None:
    of = instance([EIGHT], {"c": [row("a", [(3, 1, 7), (1, 3, 7)]), row("b", [(2, 2, 5)], priority=5)]})
    held = machines(of, 0, 0, 0, 0)

    runs = [simulate(held, {}, scheduler=LEAST, seed=s).lost.tolist() for s in (1, 1, 2)]

    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
