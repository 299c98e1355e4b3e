"""The lower bound is what divisible, shared machines cost: worked by hand."""

from dataclasses import replace

import pytest

from bench.quality.bound import lower_bound
from bench.quality.reports.handmade import instance, offer, row
from bench.quality.values import CPU, MEMORY, MIB, MILLI, PODS, Instance, PackingOverhead, PackingShape


def bound(*offers: object, rows: object) -> float:
    """Return the bound of one cluster."""
    return lower_bound(instance(offers, {"c": rows}))  # type: ignore[arg-type, dict-item]


def test_the_cheapest_class_per_cpu_decides_whatever_its_size() -> None:
    small, large, dear = offer("m1", 1, 4, 0.05), offer("m64", 64, 256, 2.0), offer("n64", 64, 256, 4.0)

    assert bound(small, large, rows=[row("r", [(1, 1, 64)])]) == pytest.approx(2.0)
    assert bound(small, dear, rows=[row("r", [(1, 1, 64)])]) == pytest.approx(3.2)
    assert bound(small, large, rows=[row("r", [(1, 1, 32)])]) == pytest.approx(1.0), "half a machine"


def test_rows_share_machines_and_dimensions_mix() -> None:
    """8 cpu in one row and 8 GiB in the other fill one machine of 8 and 8 together."""
    rows = [row("cpu", [(2, 0.001, 4)]), row("memory", [(0.001, 2, 4)])]

    assert bound(offer("m8", 8, 8, 0.4), rows=rows) == pytest.approx(0.4, rel=0.01)


def test_whole_pods_waste_what_they_do_not_fill() -> None:
    """Of 3 cpu at $0.28 one pod of 2 cpu fits, of 4 cpu at $0.40 two: dearer per cpu, cheaper per pod."""
    three, four = offer("m3", 3, 99, 0.28), offer("m4", 4, 99, 0.4)

    assert bound(three, four, rows=[row("r", [(2, 1, 4)])]) == pytest.approx(0.8)
    assert bound(three, rows=[row("r", [(2, 1, 4)])]) == pytest.approx(1.12)


def test_limits_overheads_and_the_pods_limit_count() -> None:
    limited = row("r", [], shapes=(PackingShape({CPU: 100, MEMORY: MIB}, 5, 1),))
    crowded = replace(offer("m8", 8, 8, 0.4), allocatable={CPU: 8000, MEMORY: 8 * 1024 * MIB, PODS: 2 * MILLI})
    of = instance([offer("m8", 8, 8, 0.4)], {"c": [row("r", [(4, 1, 4)])]})
    daemons = replace(of.clusters[0], overheads=(PackingOverhead({CPU: 4000}),))

    assert bound(offer("m8", 8, 8, 0.4), rows=[limited]) == pytest.approx(2.0)
    assert bound(crowded, rows=[row("r", [(0.1, 0.1, 6)])]) == pytest.approx(1.2)
    assert lower_bound(of) == pytest.approx(0.8)
    assert lower_bound(replace(of, steps=((daemons,),))) == pytest.approx(1.6)


def paid(stock: int) -> Instance:
    """Return two clusters of 8 cpu each that share some paid machines of 8 cpu."""
    metal = offer("metal", 8, 8, 5.0, capacity_type="Reserved", is_existing=True, stock=stock)
    return instance([metal, offer("m8", 8, 8, 0.4)], {name: [row("r", [(2, 2, 4)])] for name in ("c", "d")})


def test_clusters_share_the_stock_of_paid_machines() -> None:
    assert [lower_bound(paid(stock)) for stock in (0, 1, 2)] == pytest.approx([0.8, 0.4, 0.0])


def test_expected_interruptions_are_part_of_the_bound_and_pinned_rows_use_no_spot() -> None:
    spot = offer("s8", 8, 8, 0.1, capacity_type="Spot", interruption_probability=0.001)
    demand = offer("m8", 8, 8, 0.4)

    # $64 × 0.001 on a full machine is $0.064; $1,024 × 0.001 is more than the machine on demand.
    assert bound(spot, demand, rows=[row("r", [(2, 2, 4)], interruption_bucket=9)]) == pytest.approx(0.164)
    assert bound(spot, demand, rows=[row("r", [(2, 2, 4)], interruption_bucket=13)]) == pytest.approx(0.4)
    assert bound(spot, demand, rows=[row("r", [(2, 2, 4)], interruption_bucket=27)]) == pytest.approx(0.4)


def test_what_nothing_hosts_costs_nothing() -> None:
    assert bound(offer("m8", 8, 8, 0.4), rows=[row("r", [(1000, 1, 1), (8, 8, 1)])]) == pytest.approx(0.4)
    assert bound(offer("m8", 8, 8, 0.4), rows=[row("r", [(1000, 1, 1)])]) == 0.0
