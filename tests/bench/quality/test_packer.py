"""The packer hosts every pod that can be hosted, never below the cheapest fleet, and respects every rule."""

from dataclasses import replace

from hypothesis import given, settings

from bench.quality.bound import lower_bound
from bench.quality.claims import violations
from bench.quality.integer import best_integer
from bench.quality.judges import packed
from bench.quality.packer import pack
from bench.quality.reports.handmade import instance, offer, row
from bench.quality.values import (
    CPU,
    MILLI,
    Instance,
    PackingOverhead,
    PackingRequirement,
    PackingShape,
    PackingSpread,
    Settled,
)
from bigfleet.demo.trace import GPU_MILLI
from bigfleet.model import labels as keys
from tests.bench.quality.tiny import cheapest, tiny_instances
from tests.engine.proof import in_proportion


def held(settled: Settled, of: Instance) -> list[tuple[str, list[tuple[str, int]]]]:
    """Return each machine's type and claims."""
    return [
        (of.offers[h.offer].instance_type, [(claim.row, claim.count) for claim in h.claims]) for h in settled.holdings
    ]


@settings(deadline=None, max_examples=in_proportion(240))
@given(tiny_instances())
def test_bound_integer_answer_and_packer_lie_around_the_cheapest_fleet(of: Instance) -> None:
    """LP bound ≤ cheapest ≤ best integer answer ≤ packer, and the packer hosts all pods where any fleet does."""
    least = cheapest(of)
    (purchase,) = pack(of)

    assert (not purchase.unhosted) == (least is not None)
    if least is None:
        return
    found = best_integer(of)
    assert lower_bound(of) <= least + 1e-6
    assert least <= found.usd_per_hour + 1e-9
    assert found.usd_per_hour <= purchase.usd_per_hour + 1e-9
    assert violations(of, packed(of)) == []


def test_the_batch_is_as_large_as_a_type_hosts_and_goes_to_the_cheapest_type_that_hosts_it() -> None:
    """Worked by hand: 3 + 3 + 1 + 1 cpu fill 8; of the two types with 8 the cheaper is bought, the rest needs 1."""
    offers = [offer("m2", 2, 16, 0.2), offer("m8", 8, 64, 0.9), offer("n8", 8, 64, 0.8)]
    of = instance(offers, {"c": [row("a", [(3, 1, 2)]), row("b", [(1, 1, 3)])]})

    assert held(packed(of), of) == [("n8", [("a", 2), ("b", 2)]), ("m2", [("b", 1)])]


def test_machines_that_are_paid_for_come_first_and_those_with_gpus_last() -> None:
    metal = {"capacity_type": "BareMetal", "is_existing": True, "stock": 1}
    gpu = offer("a-gpu", 8, 64, 0.0, **metal)
    gpu = replace(gpu, allocatable={**gpu.allocatable, GPU_MILLI: MILLI * MILLI})
    of = instance([gpu, offer("b-cpu", 8, 64, 0.0, **metal), offer("m8", 8, 64, 0.4)], {"c": [row("a", [(8, 1, 3)])]})

    assert [kind for kind, _ in held(packed(of), of)] == ["b-cpu", "a-gpu", "m8"]


def test_stock_is_shared_by_clusters_and_what_nothing_hosts_is_reported() -> None:
    of = instance([offer("m8", 8, 64, 0.4, stock=1)], {"c": [row("a", [(8, 1, 1)])], "d": [row("b", [(8, 1, 1)])]})

    settled = packed(of)

    assert [h.cluster for h in settled.holdings] == ["c"]
    assert [(r.cluster, r.is_satisfied, dict(r.short)) for r in settled.rows] == [("c", True, {}), ("d", False, {0: 1})]


def test_one_pod_per_machine_and_overheads_are_respected() -> None:
    limited = row("a", [], shapes=(PackingShape({CPU: MILLI}, 3, 1),))
    of = instance([offer("m8", 8, 64, 0.4)], {"c": [limited, row("b", [(8, 1, 1)])]})
    clusters = (replace(of.clusters[0], overheads=(PackingOverhead({CPU: MILLI}),)),)
    of = replace(of, steps=(clusters,))

    settled = packed(of)

    assert [claims for _, claims in held(settled, of)] == [[("a", 1)]] * 3
    assert [dict(report.short) for report in settled.rows] == [{}, {0: 1}], "8 cpu of 8 are not free beside a DaemonSet"


def test_a_gang_is_bought_in_one_domain_and_in_the_cheapest() -> None:
    racks = [
        offer("m8", 8, 64, usd, id=rack, stock=stock, labels={keys.RACK: rack})
        for rack, usd, stock in (("r1", 0.5, 9), ("r2", 0.4, 1), ("r3", 0.45, 9))
    ]
    gang = row("g", [(8, 1, 2)], requirements=(PackingRequirement(keys.RACK, "Same"),), group="g")

    settled = packed(instance(racks, {"c": [gang]}))

    assert [h.machine_id for h in settled.holdings] == ["r3-00000", "r3-00001"]


def test_a_strict_spread_is_split_over_the_zones() -> None:
    zones = [offer("m8", 8, 64, usd, id=zone, zone=zone) for zone, usd in (("z1", 0.4), ("z2", 0.5), ("z3", 0.6))]
    spread = row("s", [(1, 1, 7)], spreads=(PackingSpread(keys.ZONE, 1, True),))
    of = instance(zones, {"c": [spread]})

    settled = packed(of)

    assert sorted(claim.count for h in settled.holdings for claim in h.claims) == [2, 2, 3]
    assert violations(of, settled) == []


def test_rows_with_a_high_penalty_are_kept_off_spot_where_that_is_cheaper() -> None:
    offers = [
        offer("m8", 8, 64, 0.4),
        offer("s8", 8, 64, 0.1, capacity_type="Spot", interruption_probability=0.001),
    ]
    rows = [row("dear", [(8, 1, 1)], interruption_bucket=13), row("free", [(8, 1, 1)])]
    of = instance(offers, {"c": rows})

    # $1,024 × 0.001 is more than a machine on demand; $0 × 0.001 is nothing.
    assert held(packed(of), of) == [("m8", [("dear", 1)]), ("s8", [("free", 1)])]
    # Beside 7 cpu each pod of 1 cpu would cost an eighth of $1.024: four are cheaper together on a machine on demand.
    mixed = instance(offers, {"c": [row("dear", [(1, 1, 4)], interruption_bucket=13), row("free", [(7, 1, 4)])]})
    assert held(packed(mixed), mixed) == [("m8", [("dear", 4)]), *[("s8", [("free", 1)])] * 4]
    pinned = instance(offers[1:], {"c": [row("never", [(1, 1, 1)], interruption_bucket=27)]})
    assert packed(pinned).holdings == ()
