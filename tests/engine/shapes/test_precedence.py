"""A target that does not suffice: higher rows are served first, and the lowest ones yield."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from bigfleet.engine.decision import Decision
from bigfleet.engine.targets import Target, TargetClaim, class_key
from bigfleet.model.ids import ClusterId
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need
from bigfleet.model.profile import Operator, Requirement, SpreadMode, TopologySpread
from bigfleet.model.shapes import DemandShape
from tests.engine.shapes import test_rules
from tests.engine.shapes.shape_fleets import ZONE
from tests.engine.shapes.test_rules import C, S, acted, decided, m4, pods, row

D = ClusterId("d")
IN_A = (Requirement(ZONE, Operator.IN, ("a",)),)
TOGETHER = (Requirement(ZONE, Operator.SAME),)
#: Not where the filler is.
ELSEWHERE = (Requirement(ZONE, Operator.NOT_IN, ("f",)),)
SPREAD = (TopologySpread(ZONE, 1, SpreadMode.DO_NOT_SCHEDULE),)


#: A machine and a row beside the others: a cluster of more than 40 pods is not searched for the best packing.
FILLED = m4("filled", S.CONFIGURED, "f")
FILLER = row(5000, pods(97, 41), requirements=(Requirement(ZONE, Operator.IN, ("f",)),))


def planned(*entries: tuple[Machine, Need, int]) -> Target:
    """Return a target with one machine of each class, and pods of the first shape of some rows on them."""
    claims = tuple(
        TargetClaim(class_key(machine), 0, 1, need.key, 0, count)
        for machine, need, count in ((FILLED, FILLER, 41), *entries)
    )
    return Target(dict.fromkeys((claim.machine_class for claim in claims), 1), claims)


def decided_beside_filler(machines: Sequence[Machine], demand: Sequence[Need], target: Target) -> Decision:
    """Return the decision on the machines and rows, of clusters c and d, and the filler, which comes first."""
    both = frozenset({"c", "d"})
    return decided([FILLED, *machines], [FILLER, *demand], reported=both, targets={C: target})


def placed(decision: Decision) -> list[int]:
    """Return how many pods of each row but the filler have a place."""
    return test_rules.placed(decision)[1:]


def of_d(need: Need) -> Need:
    """Return a row of cluster d."""
    return dataclasses.replace(need, cluster=D)


def m8(name: str, zone: str = "a") -> Machine:
    """Return a machine of 8 cpu that cluster c has."""
    allocatable = {"cpu": "8", "memory": "64Gi"}
    return m4(name, S.CONFIGURED, zone, instance_type="m8", allocatable=allocatable, price_usd_per_hour=1.0)


def limited(cpu_milli: int, count: int, *, most: int) -> DemandShape:
    """Return pods of which a machine may have so many at most."""
    return dataclasses.replace(pods(cpu_milli, count), max_per_machine=most)


def test_a_short_row_displaces_the_lowest_row_and_not_the_one_between() -> None:
    """Placed without the plan, the highest row would fill the only zone of the row between."""
    a, b = m4("a", S.CONFIGURED), m4("b", S.CONFIGURED, "b")
    high, low = row(1000, pods(2000, 3)), row(1, pods(1000, 2))
    between = row(500, pods(1000, 2), requirements=IN_A)
    target = planned((a, high, 1), (a, between, 2), (b, high, 1), (b, low, 2))

    decision = decided_beside_filler([a, b], [high, between, low], target)

    assert placed(decision) == [3, 2, 0]


def test_a_lower_whole_gang_yields_where_a_planned_machine_is_gone() -> None:
    """Two pods of the row wait for that machine while the gang is placed."""
    a, gone = m4("a", S.CONFIGURED), m4("gone", S.IDLE, "g")
    high, gang = row(1000, pods(1000, 4)), row(100, pods(1000, 2), requirements=TOGETHER, group="g")

    decision = decided_beside_filler([a], [high, gang], planned((a, high, 2), (gone, high, 2), (a, gang, 2)))

    assert placed(decision) == [4, 0]


def test_a_lower_whole_gang_keeps_its_place_where_others_yield() -> None:
    a, gone = m4("a", S.CONFIGURED), m4("gone", S.IDLE, "g")
    high, gang = row(1000, pods(1000, 2)), row(100, pods(1000, 2), requirements=TOGETHER, group="g")
    low = row(10, pods(1000, 1))
    target = planned((a, high, 1), (gone, high, 1), (a, gang, 2), (a, low, 1))

    decision = decided_beside_filler([a], [high, gang, low], target)

    assert placed(decision) == [2, 2, 0]


def test_a_row_that_is_displaced_after_its_turn_gets_what_a_lower_row_of_another_cluster_took() -> None:
    """Without that it would preempt the machine in the next cycle."""
    a, spare = m4("a", S.CONFIGURED), m4("spare", S.IDLE, "b")
    high, between = row(1000, pods(4000, 1), requirements=IN_A), row(500, pods(4000, 1))
    low = of_d(row(100, pods(4000, 1)))

    decision = decided_beside_filler([a, spare], [high, between, low], planned((a, between, 1)))

    assert placed(decision) == [1, 1, 0]
    assert [(action.kind.label, action.cluster) for action in decision.actions] == [("Bootstrap", C)]


def test_a_row_that_is_displaced_after_its_turn_gets_what_only_completes_the_target_of_another_cluster() -> None:
    """Cluster b comes first and would have the spare machine without a claim."""
    other, a, spare = m4("o", S.CONFIGURED, cluster="b"), m4("a", S.CONFIGURED), m4("spare", S.IDLE, "b")
    high, between = row(1000, pods(4000, 1), requirements=IN_A), row(500, pods(4000, 1))
    of_b = dataclasses.replace(row(2000, pods(4000, 1)), cluster=ClusterId("b"))
    targets = {C: planned((a, between, 1)), "b": Target({class_key(other): 1, class_key(spare): 1})}

    decision = decided(
        [FILLED, other, a, spare], [FILLER, of_b, high, between], reported=frozenset({"b", "c"}), targets=targets
    )

    assert placed(decision) == [1, 1, 1]
    assert [(action.kind.label, action.cluster) for action in decision.actions] == [("Bootstrap", C)]


def test_a_row_that_displaced_others_gets_what_a_lower_row_of_another_cluster_took_before() -> None:
    """Only after it displaced the row in zone b does its spread allow another pod in zone a."""
    a, b, spare = m4("a", S.CONFIGURED), m4("b", S.CONFIGURED, "b"), m4("spare", S.IDLE)
    high, low = row(1000, pods(3000, 3), spreads=SPREAD, requirements=ELSEWHERE), row(1, pods(4000, 1))
    between = of_d(row(100, pods(4000, 1)))

    decision = decided_beside_filler([a, b, spare], [high, between, low], planned((a, high, 1), (b, low, 1)))

    assert placed(decision) == [3, 0, 0]


def test_a_lower_row_under_a_strict_spread_yields_to_a_higher_one_that_keeps_its_places() -> None:
    """Placed without the plan, the higher row would have its large pod where only one of its others fits."""
    first, large, last = m4("a1", S.CONFIGURED), m8("a2"), m4("a3", S.CONFIGURED)
    high = row(1000, pods(3500, 1), limited(2100, 4, most=2))
    low = row(1, pods(3500, 1), spreads=SPREAD)
    claims = tuple(
        TargetClaim(class_key(machine), number, 1, need.key, shape, count)
        for machine, number, need, shape, count in (
            (large, 0, high, 0, 1),
            (large, 0, high, 1, 2),
            (first, 0, high, 1, 1),
            (first, 1, low, 0, 1),
            (FILLED, 0, FILLER, 0, 41),
        )
    )
    target = Target({class_key(first): 2, class_key(large): 1, class_key(FILLED): 1}, claims)

    decision = decided_beside_filler([first, large, last], [high, low], target)

    assert placed(decision) == [5, 0]


def test_a_gang_that_no_domain_hosts_whole_displaces_lower_rows_in_its_domain() -> None:
    """Placed without the plan, the row above it would take the room of one of its pods."""
    a, b = m4("a", S.CONFIGURED), m4("b", S.CONFIGURED, "b")
    top, low = row(1200, pods(1500, 1)), row(10, pods(2000, 2))
    gang = row(1000, pods(2000, 3), requirements=(*IN_A, *TOGETHER), group="g")

    decision = decided_beside_filler([a, b], [top, gang, low], planned((a, low, 2), (b, top, 1)))

    assert placed(decision) == [1, 2, 1]


def test_a_gang_that_no_domain_hosts_whole_keeps_its_places_when_lower_rows_yield() -> None:
    """Placed again, it would have its large pod where two of the others fit."""
    large, small = m8("a2"), m4("a1", S.CONFIGURED)
    shapes = pods(3500, 1), limited(2000, 5, most=2)
    gang, low = row(1000, *shapes, requirements=(*IN_A, *TOGETHER), group="g"), row(10, pods(2500, 1))

    decision = decided_beside_filler([large, small], [gang, low], planned((small, low, 1)))

    assert placed(decision) == [5, 0]


def test_a_machine_is_not_handed_over_if_the_next_decision_does_not_find_the_room_without_it() -> None:
    """Its zone holds a spread row down; without the machine that row takes the room back."""
    b, c = m8("b", "b"), m4("c", S.CONFIGURED, "c")
    spare = m4("spare", S.IDLE, instance_type="m2", allocatable={"cpu": "2", "memory": "8Gi"})
    spread = row(1500, pods(3000, 3), spreads=SPREAD, requirements=ELSEWHERE)
    other = row(500, pods(1000, 3))
    short, low = row(100, pods(2000, 1)), of_d(row(10, pods(2000, 1)))
    target = planned((b, spread, 2), (b, other, 2), (c, spread, 1), (c, other, 1))

    decision = decided_beside_filler([b, c, spare], [spread, other, short, low], target)

    assert [(action.kind.label, action.cluster) for action in decision.actions] == [("Bootstrap", C)]
    assert placed(decision) == [2, 3, 1, 0]


def test_a_machine_that_one_row_cannot_use_goes_to_the_next_one_that_was_displaced() -> None:
    """Zone a holds the row above down to the pod that it has in zone b, where the machine is."""
    a, b, spare = m4("a", S.CONFIGURED), m4("b", S.CONFIGURED, "b"), m4("spare", S.IDLE, "b")
    high, low = row(1000, pods(4000, 1), requirements=IN_A), of_d(row(100, pods(4000, 1)))
    spread, between = row(600, pods(4000, 2), spreads=SPREAD, requirements=ELSEWHERE), row(500, pods(4000, 1))

    demand = [high, spread, between, low]
    decision = decided_beside_filler([a, b, spare], demand, planned((a, between, 1), (b, spread, 1)))

    assert placed(decision) == [1, 1, 1, 0]


def test_a_row_that_lacks_other_pods_after_its_turn_gets_what_a_lower_row_of_another_cluster_took() -> None:
    """The search finds a place for its large pod and not for the small one, which the machine can host."""
    size = {"instance_type": "m2", "allocatable": {"cpu": "2", "memory": "8Gi"}}
    a, b, spare = m4("a", S.CONFIGURED), m4("b", S.CONFIGURED, "b", **size), m4("spare", S.IDLE, "b", **size)
    gone = class_key(m4("gone", S.IDLE, "g"))
    high, both = row(1000, pods(1500, 1)), row(500, pods(3500, 1), pods(1000, 1))
    claims = (
        TargetClaim(class_key(a), 0, 1, high.key, 0, 1),
        TargetClaim(class_key(a), 0, 1, both.key, 1, 1),
        TargetClaim(gone, 0, 1, both.key, 0, 1),
    )
    target = Target({class_key(a): 1, gone: 1}, claims)

    demand, reported = [high, both, of_d(row(100, pods(2000, 1)))], frozenset({"c", "d"})
    decision = decided([a, b, spare], demand, reported=reported, targets={C: target})

    assert test_rules.placed(decision) == [1, 2, 0]


def test_a_row_that_lacks_pods_only_after_its_cluster_was_served_ends_no_decision() -> None:
    """A target has a machine in a new zone, whose spread takes a pod back; two other clusters hand a machine over."""
    a, spare = m4("a", S.CONFIGURED), m4("spare", S.IDLE, "b")
    high, between = row(1000, pods(4000, 1), requirements=IN_A), row(500, pods(4000, 1))
    served = m4("served", S.CONFIGURED, "c", cluster=ClusterId("e"))
    tiny = m4("tiny", S.IDLE, "d", instance_type="m1", allocatable={"cpu": "1", "memory": "8Gi"})
    spread = dataclasses.replace(row(400, pods(2000, 2), spreads=SPREAD), cluster=ClusterId("e"))
    both = {class_key(served): 1, class_key(tiny): 1}
    target = Target(both, (TargetClaim(class_key(served), 0, 1, spread.key, 0, 2),))

    demand = [FILLER, high, between, spread, of_d(row(100, pods(4000, 1)))]
    targets, reported = {C: planned((a, between, 1)), "e": target}, frozenset({"c", "d", "e"})
    decision = decided([FILLED, a, spare, served, tiny], demand, reported=reported, targets=targets)

    assert placed(decision) == [1, 1, 1, 0]


def test_a_row_that_is_displaced_leaves_others_what_it_cannot_use() -> None:
    a, spare = m4("a", S.CONFIGURED), m4("spare", S.IDLE, "b")
    high, between = row(1000, pods(4000, 1), requirements=IN_A), row(500, pods(4000, 1), requirements=IN_A)
    low = of_d(row(100, pods(4000, 1)))

    decision = decided_beside_filler([a, spare], [high, between, low], planned((a, between, 1)))

    assert placed(decision) == [1, 0, 1]
    assert acted(decision) == [("Bootstrap", "spare")]


def test_a_machine_that_was_given_back_goes_to_a_row_that_had_its_turn_before() -> None:
    """The gang acquires it in zone b, and then has all its pods in zone a, where the target has a lower row."""
    a, spare = m8("a"), m4("spare", S.IDLE, "b")
    gang = row(1000, pods(4000, 2), requirements=(*TOGETHER, *ELSEWHERE), group="g")
    between, low = of_d(row(500, pods(4000, 1))), row(10, pods(1000, 8), requirements=IN_A)

    decision = decided_beside_filler([a, spare], [gang, between, low], planned((a, low, 8)))

    assert placed(decision) == [2, 1, 0]
    assert [(action.kind.label, action.cluster) for action in decision.actions] == [("Bootstrap", D)]


def test_a_whole_gang_moves_to_where_the_target_has_it_if_another_gang_lacks_its_room() -> None:
    """First fit has the first gang on the large machine, where the second one would lack room for its pod."""
    size: dict[str, Any] = {"instance_type": "m8", "allocatable": {"cpu": "8", "memory": "64Gi"}}
    large, small = m4("large", S.CONFIGURED, **size), m4("small", S.CONFIGURED)
    spare = m4("spare", S.IDLE, **size)
    first = row(100, pods(4000, 1), requirements=(*TOGETHER, *IN_A), group="g")
    second = row(100, pods(6000, 1), requirements=(*TOGETHER, *IN_A), group="h")
    target = planned((small, first, 1), (large, second, 1))

    decision = decided_beside_filler([large, small, spare], [first, second], target)

    assert placed(decision) == [1, 1]
    assert decision.actions == ()


def test_a_machine_beyond_the_target_is_not_acquired_if_all_fit_as_planned() -> None:
    """The first gang is on the large machine until the small one is there, and the second one would acquire another."""
    size: dict[str, Any] = {"instance_type": "m8", "allocatable": {"cpu": "8", "memory": "64Gi"}}
    large, small, spare = m4("large", S.CONFIGURED, **size), m4("small", S.IDLE), m4("spare", S.IDLE, **size)
    first = row(100, pods(4000, 1), requirements=(*TOGETHER, *IN_A), group="g")
    second = row(100, pods(6000, 1), requirements=(*TOGETHER, *IN_A), group="h")
    target = planned((small, first, 1), (large, second, 1))

    decision = decided_beside_filler([large, small, spare], [first, second], target)

    assert placed(decision) == [1, 1]
    assert acted(decision) == [("Bootstrap", "small")]
