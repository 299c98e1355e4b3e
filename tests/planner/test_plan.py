"""Compositions keep every constraint, are equal in both forms of the loops, and do not depend on the caller's order."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigfleet.planner import (
    Composition,
    Effort,
    MachineClass,
    PlannerShape,
    PlannerSpread,
    Problem,
    ProblemFault,
    SchedulerOrder,
    UnhostedReason,
    closed_form,
    plan,
)
from bigfleet.planner.admission import admit
from bigfleet.planner.core import COMPILED
from bigfleet.planner.packing import FirstFit
from bigfleet.planner.plain import PLAIN
from bigfleet.planner.plan import THOROUGH
from bigfleet.planner.prepare import prepare
from bigfleet.planner.search import FleetCandidate, Search
from bigfleet.planner.starts import held
from tests.engine.proof import in_proportion
from tests.planner.building import CLOUD, DIMENSIONS, DOLLAR, kind, problem, services, shape, small_problems
from tests.planner.checking import faults, reasons

#: Enough to take every path, little enough for many examples.
LITTLE = Effort(rounds=3, proposals=40, simulated=6, orders=2, final_orders=2, finalists=3)
GPU = (*DIMENSIONS, "gpu")


@given(small_problems())
@settings(max_examples=in_proportion(150), deadline=None)
def test_claims_keep_every_rule(asked: Problem) -> None:
    """Every pod is hosted or named as not hosted, and every limit is kept, by the plan and by the closed form."""
    assert faults(asked, plan(asked, LITTLE)) == []
    assert faults(asked, closed_form(asked)) == []


@given(small_problems(most_pods=12))
@settings(max_examples=in_proportion(240), deadline=None)
def test_fast_equals_plain(asked: Problem) -> None:
    """The fast loops and the plain ones give the same composition, with the same effort."""
    assert plan(asked, LITTLE) == plan(asked, LITTLE, PLAIN)
    assert closed_form(asked) == closed_form(asked, PLAIN)


@given(small_problems(), st.integers(0, 1 << 30))
@settings(max_examples=in_proportion(240), deadline=None)
def test_order_of_shapes_and_classes_changes_nothing(asked: Problem, seed: int) -> None:
    """Shapes and classes in another order give the same composition, with positions renamed."""
    rng = Random(seed)
    classes, shapes = list(range(len(asked.classes))), list(range(len(asked.shapes)))
    rng.shuffle(classes)
    rng.shuffle(shapes)
    mixed = replace(
        asked,
        classes=tuple(asked.classes[c] for c in classes),
        shapes=tuple(_renamed(asked.shapes[s], classes) for s in shapes),
    )

    assert _by_key(mixed, plan(mixed, LITTLE), shapes) == _by_key(asked, plan(asked, LITTLE), range(len(shapes)))


def _renamed(asked: PlannerShape, classes: list[int]) -> PlannerShape:
    return replace(asked, matches=sum((asked.matches >> c & 1) << n for n, c in enumerate(classes)))


def _by_key(asked: Problem, found: Composition, shapes: list[int] | range) -> object:
    keys = [each.key for each in asked.classes]
    return (
        sorted(zip(keys, found.retained, found.added, strict=True)),
        sorted((keys[c.machine_class], c.first, c.machines, shapes[c.shape], c.count) for c in found.claims),
        sorted((shapes[u.shape], u.count, u.reason.value) for u in found.unhosted),
        (found.cost, found.lost_millipods, found.leader, found.runner_up, found.steps),
    )


@pytest.mark.parametrize("order", list(SchedulerOrder))
def test_services_cost_little_more_than_their_volume(order: SchedulerOrder) -> None:
    """A cluster of services is hosted near the cost of its volume, with at most 1 % of its pods lost in expectation."""
    asked = problem(CLOUD, services(1, 240), order=order)
    found = plan(asked)
    # At the cheapest mix a core costs $0.043 with 4 GiB; more memory costs $0.0035 a GiB.
    cpu = sum(each.request[0] * each.count for each in asked.shapes) / 1000
    memory = sum(each.request[1] * each.count for each in asked.shapes) / 1024
    volume = 0.043 * cpu + max(0.0, memory - 4 * cpu) * 0.0035 - max(0.0, 4 * cpu - memory) * 0.0025

    assert faults(asked, found) == []
    assert found.lost_millipods <= asked.pods * 10
    assert volume * 0.99 <= found.cost / DOLLAR <= volume * 1.25
    assert found.runner_up is not None
    assert found.runner_up.leader != found.leader


def test_equal_problems_give_equal_compositions_and_effort_is_counted() -> None:
    """A second run repeats the first; more rounds take more steps and cost no more."""
    asked = problem(CLOUD, services(2, 120))
    short, long = Effort(rounds=1), Effort(rounds=12)

    assert plan(asked, short) == plan(asked, short)
    assert plan(asked, short).steps < plan(asked, long).steps
    assert closed_form(asked).steps == 0


@pytest.mark.parametrize(("pods", "is_longer"), [(100, True), (399, True), (410, False)])
def test_small_clusters_are_searched_longer_when_they_are_planned_thoroughly(pods: int, is_longer: bool) -> None:
    asked = problem(CLOUD, services(1, pods))
    hurried, thorough = plan(asked), plan(asked, THOROUGH)

    assert (asked.pods < 400) == is_longer
    assert (thorough.steps > 2 * hurried.steps) == is_longer
    assert (thorough == hurried) != is_longer
    assert faults(asked, thorough) == []


def test_large_cluster_is_planned_on_a_sample() -> None:
    """Ten times the pods take about the same steps, and cost about ten times as much."""
    small = problem(CLOUD, services(3, 1200))
    large = replace(small, shapes=tuple(replace(each, count=each.count * 10) for each in small.shapes))
    effort = Effort(rounds=4)
    one, ten = plan(small, effort), plan(large, effort)

    assert faults(large, ten) == []
    assert ten.steps < 5 * one.steps
    assert 9 * one.cost < ten.cost < 11 * one.cost


# ---- single constraints ------------------------------------------------------------------------------------------


def test_pods_that_exclude_each_other_get_a_machine_each() -> None:
    """Groups of ten and of two with one pod a machine need ten machines, not twelve."""
    classes = [kind("m", 4000, 16384, 0.2)]
    shapes = [shape(100, 128, 10, 1, limit=1), shape(100, 128, 2, 1, limit=1, row=1)]

    assert plan(problem(classes, shapes)).added == (10,)


def test_pods_limit_counts() -> None:
    """A machine of three pods hosts three, however small they are."""
    assert plan(problem([kind("m", 4000, 16384, 0.2, pods=3)], [shape(10, 10, 9, 1)])).added == (3,)


def test_pinned_row_uses_no_interruptible_machine() -> None:
    """Cheap spot machines serve the other row only."""
    classes = [kind("od", 4000, 16384, 0.2), kind("spot", 4000, 16384, 0.05, probability=1000)]
    shapes = [shape(1000, 1024, 4, 2, is_pinned=True), shape(1000, 1024, 8, 2, row=1)]
    found = plan(problem(classes, shapes))

    assert found.added[0] >= 1
    assert {claim.machine_class for claim in found.claims if claim.shape == 0} == {0}


def test_penalty_decides_between_spot_and_on_demand() -> None:
    """Spot is taken while price + probability × penalty is less."""
    classes = [kind("od", 4000, 16384, 0.2), kind("spot", 4000, 16384, 0.08, probability=500_000)]

    assert plan(problem(classes, [shape(1000, 4096, 8, 2, penalty=4)])).added == (0, 2)
    assert plan(problem(classes, [shape(1000, 4096, 8, 2, penalty=1000)])).added == (2, 0)


def test_gang_runs_in_one_domain_and_its_machines_are_the_cheapest() -> None:
    """The domain that holds the whole gang at the least cost is taken; a dearer one and a smaller one are not."""
    classes = [
        kind("dear", 4000, 16384, 0.3, zone="a"),
        kind("small", 4000, 16384, 0.1, zone="b", stock=1),
        kind("good", 4000, 16384, 0.2, zone="c"),
    ]

    assert plan(problem(classes, [shape(4000, 4096, 3, 3, gang="job")])).added == (0, 0, 3)


def _two_racks(cheap: int, dear: int) -> list[MachineClass]:
    return [
        kind(f"{zone}-{name}", 4000, 16384, price, zone=zone, stock=stock)
        for zone in "ab"
        for name, price, stock in (("cheap", 0.2, cheap), ("dear", 0.9, dear))
    ]


def test_small_gangs_leave_the_cheap_machines_of_one_domain_to_a_large_one() -> None:
    """Two gangs of one pod and one of four, in racks with four cheap machines: one rack hosts the large one."""
    shapes = [shape(4000, 4096, count, 4, gang=f"g{n}", row=n, rank=n) for n, count in ((0, 1), (1, 1), (2, 4))]

    for order in (shapes, shapes[::-1]):
        assert sorted(plan(problem(_two_racks(4, 4), order)).added) == [0, 0, 2, 4]


def test_gangs_of_one_domain_share_machines() -> None:
    """Three pods of half a machine and one: together two machines, apart three."""
    shapes = [shape(2000, 4096, count, 4, gang=f"g{n}", row=n, rank=n) for n, count in ((0, 3), (1, 1))]

    assert sum(plan(problem(_two_racks(4, 4), shapes)).added) == 2


def test_a_gang_of_high_precedence_has_a_domain_before_larger_ones() -> None:
    """Each rack holds three pods: the first gang takes one, and of the two others only one has a domain."""
    shapes = [shape(4000, 4096, count, 4, gang=f"g{n}", row=n, rank=n) for n, count in ((0, 1), (1, 3), (2, 3))]

    assert reasons(plan(problem(_two_racks(3, 0), shapes))) == {2: UnhostedReason.NO_DOMAIN_HOLDS_GANG}


def test_gang_without_a_domain_is_set_aside_whole() -> None:
    """Two machines in each of two zones do not hold a gang of three; its neighbour is not affected."""
    classes = [kind("a", 4000, 16384, 0.2, zone="a", stock=2), kind("b", 4000, 16384, 0.2, zone="b", stock=2)]
    shapes = [shape(4000, 4096, 3, 2, gang="job"), shape(4000, 4096, 2, 2, row=1)]
    found = plan(problem(classes, shapes))

    assert reasons(found) == {0: UnhostedReason.NO_DOMAIN_HOLDS_GANG}
    assert sum(found.added) == 2


def test_strict_spread_is_even_over_zones() -> None:
    """Seven pods spread over three zones as 3, 2 and 2, also where one zone is dearer."""
    classes = [kind(zone, 1000, 4096, price, zone=zone) for zone, price in (("a", 0.1), ("b", 0.1), ("c", 0.5))]
    found = plan(problem(classes, [shape(1000, 1024, 7, 3, spread=PlannerSpread("zone"))]))

    assert found.added == (3, 2, 2)


def test_a_zone_with_little_stock_is_left_out_of_a_strict_spread() -> None:
    """With one machine of four pods in zone c, 14 of 30 pods would run; zones a and b host all of them."""
    classes = [kind(zone, 4000, 16384, 0.2, zone=zone, stock=1 if zone == "c" else None) for zone in "abc"]
    asked = problem(classes, [shape(1000, 1024, 30, 3, spread=PlannerSpread("zone"))])
    found = plan(asked)

    assert found.unhosted == ()
    assert found.added[2] == 0
    assert faults(asked, found) == []


def test_a_zone_in_which_machines_are_held_counts_in_a_strict_spread_however_little_stock_it_has() -> None:
    """Its nodes are there, and pods run: the shares stay even, and what has no machine is out of stock."""
    classes = [kind(zone, 4000, 16384, 0.2, zone=zone, stock=None) for zone in "ab"]
    classes.append(kind("c", 4000, 16384, 0.2, zone="c", held=1, stock=0))
    found = plan(problem(classes, [shape(1000, 1024, 30, 3, spread=PlannerSpread("zone"))]))

    assert [(each.count, each.reason) for each in found.unhosted] == [(6, UnhostedReason.OUT_OF_STOCK)]


def test_shapes_of_a_row_are_planned_as_far_as_its_spread_allows_them_together() -> None:
    """Large machines are in zone a alone; with two small pods the spread has room for one large one."""
    classes = [kind("large", 8000, 16384, 1.0, zone="a"), kind("small", 2000, 4096, 0.3, zone="b")]
    spread = PlannerSpread("zone")
    asked = problem(classes, [shape(8000, 1024, 6, 2, spread=spread), shape(1000, 1024, 2, 2, spread=spread)])
    found = plan(asked)

    assert [(each.shape, each.count, each.reason) for each in found.unhosted] == [
        (0, 5, UnhostedReason.SPREAD_HOLDS_BACK)
    ]


def test_disks_of_more_than_32_tebibytes_are_not_cut() -> None:
    """A machine with 120 TB hosts twelve pods of 10 TB."""
    tera = 10**15
    asked = problem(
        [kind("dense", 64000, 262144, 10.0, gpu=120 * tera)],
        [shape(1000, 1024, 12, 1, gpu=10 * tera)],
        dimensions=(*DIMENSIONS, "ephemeral-storage"),
    )

    assert plan(asked).added == (1,)


def test_a_demand_that_does_not_fit_64_bits_is_planned_at_the_least_cost() -> None:
    """The larger machines are cheaper for what they hold, and are not taken for dominated ones."""
    classes = [kind("small", 64000, 1 << 20, 1.0, gpu=1 << 54), kind("large", 64000, 1 << 20, 1.5, gpu=1 << 55)]
    asked = problem(classes, [shape(100, 128, 512, 2, gpu=1 << 54)], dimensions=(*DIMENSIONS, "ephemeral-storage"))
    found = plan(asked)

    assert faults(asked, found) == []
    assert found.cost <= 1.05 * 256 * 1.5 * DOLLAR


def test_stock_goes_to_the_row_that_is_served_first() -> None:
    """Three machines are there; the row of rank 0 gets its two, the other one has one pod too many."""
    classes = [kind("m", 1000, 4096, 0.1, stock=3)]
    shapes = [shape(1000, 1024, 2, 1, row=0, rank=1), shape(1000, 1024, 2, 1, row=1, rank=0)]
    found = plan(problem(classes, shapes))

    assert [(each.shape, each.count, each.reason) for each in found.unhosted] == [(0, 1, UnhostedReason.OUT_OF_STOCK)]
    assert found.added == (3,)


def test_impossible_shape_changes_nothing_for_others() -> None:
    """A pod of 1,000 cores is named with dimension, wish and largest machine; the rest is planned as without it."""
    shapes = services(4, 60)
    without = plan(problem(CLOUD, shapes), LITTLE)
    found = plan(problem(CLOUD, [*shapes, shape(1_000_000, 1024, 1, CLOUD, row=12)]), LITTLE)
    (named,) = found.unhosted

    assert (named.reason, named.dimension) == (UnhostedReason.REQUEST_TOO_LARGE, "cpu")
    assert (named.wanted, named.largest, named.count) == (1_000_000, 16_000, 1)
    assert (found.added, found.claims, found.cost) == (without.added, without.claims, without.cost)


def test_row_that_matches_nothing_is_named() -> None:
    """The reason is that no class matches."""
    found = plan(problem([kind("m", 1000, 4096, 0.1)], [shape(1, 1, 1, 1, on=())]))

    assert reasons(found) == {0: UnhostedReason.NO_CLASS_MATCHES}
    assert found.added == (0,)


def test_unused_gpus_lose_against_an_equal_cost() -> None:
    """Of two classes that cost nothing the one without GPUs is taken, whatever their keys."""
    classes = [kind("a-gpu", 4000, 16384, 0.0, gpu=8, stock=5), kind("z-cpu", 4000, 16384, 0.0, gpu=0, stock=5)]
    found = plan(problem(classes, [shape(1000, 1024, 6, 2, gpu=0)], dimensions=GPU))

    assert found.added[0] == 0
    assert found.added[1] >= 2


def test_gpu_pods_get_gpu_machines_and_others_do_not() -> None:
    """GPU demand is hosted on GPU machines, the rest on what is cheaper."""
    classes = [kind("gpu", 16000, 65536, 4.0, gpu=4), kind("cpu", 16000, 65536, 0.7, gpu=0)]
    shapes = [shape(2000, 4096, 8, 2, gpu=1, priority=1), shape(2000, 8192, 40, 2, gpu=0, row=1)]
    found = plan(problem(classes, shapes, dimensions=GPU))

    assert faults(problem(classes, shapes, dimensions=GPU), found) == []
    assert found.added[0] == 2
    assert 4 <= found.added[1] <= 6


# ---- what is held ------------------------------------------------------------------------------------------------


def test_held_machines_stay_and_others_are_added() -> None:
    """Dear machines that are needed stay; the cheaper class is added for what does not fit."""
    classes = [kind("dear", 4000, 16384, 1.0, held=2), kind("cheap", 4000, 16384, 0.2)]
    asked = problem(classes, [shape(1000, 4096, 12, 2)])

    assert (plan(asked).retained, plan(asked).added) == ((2, 0), (0, 1))
    free = plan(replace(asked, may_exchange=True))
    assert (free.retained, free.added) == ((0, 0), (0, 3))


def test_machines_that_may_be_exchanged_stay_where_they_are_cheaper() -> None:
    """Held machines are chosen as others are: at the price of what is held."""
    classes = [kind("dear", 4000, 16384, 1.0, held=1), kind("cheap", 4000, 16384, 0.2, held=2)]
    classes[1] = replace(classes[1], held_cost=classes[1].cost * 9 // 10)
    asked = problem(classes, [shape(1000, 4096, 12, 2)], may_exchange=True)

    assert (plan(asked).retained, plan(asked).added) == ((0, 2), (0, 1))


def test_held_machines_that_are_not_needed_go_dearest_first() -> None:
    """Four machines are held, two are needed: the cheap ones stay."""
    classes = [kind("cheap", 4000, 16384, 0.2, held=2), kind("dear", 4000, 16384, 1.0, held=2)]
    found = plan(problem(classes, [shape(1000, 4096, 8, 2)]))

    assert (found.retained, found.added) == ((2, 0), (0, 0))


@pytest.mark.parametrize("seed", [3, 11, 17])
def test_a_fleet_that_is_planned_again_loses_no_machine(seed: int) -> None:
    """A cluster is planned again when any of its rows changes; the others must keep their machines."""
    asked = problem(CLOUD, services(seed, 240))
    planned = plan(asked).counts
    held = [replace(each, held=n, held_cost=each.cost) for each, n in zip(CLOUD, planned, strict=True)]

    assert plan(replace(asked, classes=tuple(held))).retained == planned


def test_a_part_of_what_is_held_counts_only_where_simple_packers_fill_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fleets are compared by their expected cost; the cheapest one may leave over pods in every order of first-fit."""
    asked = problem([kind("held", 4000, 16384, 0.2, held=4)], [shape(1000, 4096, 12, 1)])
    scant = FleetCandidate(value=0, fleet=((0, 2),), lost_millipods=0)
    monkeypatch.setattr(Search, "prune", lambda search, fleet: [scant])

    assert plan(asked).retained == (4,)


def test_what_is_paid_for_anyway_is_used_first() -> None:
    """Machines at no cost host what they can, and only the rest is bought."""
    classes = [kind("paid", 4000, 16384, 0.0, stock=2), kind("bought", 4000, 16384, 0.2)]
    found = plan(problem(classes, [shape(1000, 4096, 12, 2)]))

    assert found.added == (2, 1)
    assert found.cost == 200_000_000


def test_empty_demand_needs_nothing() -> None:
    """Without pods nothing is kept and nothing is added."""
    found = plan(problem([kind("m", 1000, 4096, 0.1, held=3)], []))

    assert (found.retained, found.added, found.claims, found.cost) == ((0,), (0,), (), 0)


# ---- wrong input -------------------------------------------------------------------------------------------------

M = kind("m", 1000, 4096, 0.1)


@pytest.mark.parametrize(
    ("classes", "shapes", "text"),
    [
        ([M, M], [], r"classes\[1\]\.key: 'm' occurs twice"),
        ([replace(M, supply=(1,))], [], r"classes\[0\] \(m\): supply and allocatable need 3 entries"),
        ([replace(M, cost=-1)], [], r"classes\[0\] \(m\): cost.*: -1 is out of range"),
        ([M], [shape(1, 1, 1, 2)], r"shapes\[0\] \(row 0\)\.matches: a bit above the last of 1 classes"),
        ([M], [replace(shape(1, 1, 1, 1), request=(1,))], r"shapes\[0\] \(row 0\)\.request: 1 entries"),
        ([M], [replace(shape(1, 1, 1, 1), gang="g")], r"gang 'g' with same_key ''"),
        ([M], [shape(1, 1, 1 << 25, 1)], r"shapes: 33554432 pods"),
        ([M], [shape(1, 1, 1, 1, spread=PlannerSpread("zone", 0))], r"spread\.skew: 0"),
        ([replace(M, held=2, held_use=(1,))], [], r"held_use: 1 entries for 2 held machines"),
    ],
)
def test_wrong_problems_are_named(classes: list[MachineClass], shapes: list[PlannerShape], text: str) -> None:
    """The fault names the place, the value and what to do."""
    with pytest.raises(ProblemFault, match=text):
        plan(problem(classes, shapes))


def test_no_pod_is_out_of_stock_that_held_machines_host_in_some_order() -> None:
    """A greedy fill leaves pods in some of these fleets, first-fit-decreasing in one of its orders leaves none."""
    hosted = 0
    for seed in range(150):
        random = Random(seed)
        kinds = (("small", 1900, 7318, 8), ("medium", 3900, 30_000, 3), ("large", 7900, 14_937, 3))
        classes = [
            kind(key, cpu, memory, cpu / 25_000, held=random.randint(1, most)) for key, cpu, memory, most in kinds
        ]
        classes = [replace(one, stock=0) for one in classes]
        cpus, memories = (100, 250, 500, 1000, 1700), (256, 512, 2048, 4096, 7000)
        rows = range(random.randint(2, 8))
        shapes = [
            shape(random.choice(cpus), random.choice(memories), random.randint(1, 6), 3, priority=n) for n in rows
        ]
        asked = problem(classes, shapes)
        core = prepare(asked, COMPILED).every_column
        if not FirstFit(core).pack(held(core)).left.any():
            hosted += 1
            assert plan(asked, LITTLE).unhosted == (), seed
    assert hosted > 100


def test_a_machine_that_can_host_no_pod_is_not_planned() -> None:
    """It is idle and paid for anyway. Its number among the machines would change how the scheduler breaks ties."""
    classes = [
        kind("gpu", 32_000, 131_072, 0.96, gpu=8, pods=3, stock=1),
        kind("small-gpu", 32_000, 262_144, 0.0, gpu=2, stock=1),
        kind("large", 32_000, 131_072, 0.0, gpu=0, pods=8, stock=1),
        *(kind(f"tiny{n}", 2_000, 8_192, 0.0, gpu=0, pods=3, stock=1) for n in range(4)),
    ]
    shapes = [shape(9_000, 1_024, 6, classes, row=0, gpu=2), shape(5_000, 2_048, 2, classes, row=1, gpu=0)]

    core = admit(prepare(problem(classes, shapes, dimensions=GPU), COMPILED)).core

    assert int(core.count.sum()) == 6, "two pods are out of stock, so that all classes are looked at"
    assert {classes[column.machine_class].key for column in core.columns} == {"gpu", "small-gpu", "large"}
