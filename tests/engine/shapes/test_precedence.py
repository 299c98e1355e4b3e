"""A target that does not suffice: higher rows are served first, and the lowest ones yield."""

import dataclasses
from collections.abc import Sequence

from bigfleet.engine.decision import Decision
from bigfleet.engine.targets import Target, TargetClaim, class_key
from bigfleet.model.ids import ClusterId
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need
from bigfleet.model.profile import Operator, Requirement
from tests.engine.shapes import test_rules
from tests.engine.shapes.shape_fleets import ZONE
from tests.engine.shapes.test_rules import C, S, acted, decided, m4, pods, row

D = ClusterId("d")
IN_A = (Requirement(ZONE, Operator.IN, ("a",)),)
TOGETHER = (Requirement(ZONE, Operator.SAME),)


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


def test_a_row_that_is_displaced_leaves_others_what_it_cannot_use() -> None:
    a, spare = m4("a", S.CONFIGURED), m4("spare", S.IDLE, "b")
    high, between = row(1000, pods(4000, 1), requirements=IN_A), row(500, pods(4000, 1), requirements=IN_A)
    low = of_d(row(100, pods(4000, 1)))

    decision = decided_beside_filler([a, spare], [high, between, low], planned((a, between, 1)))

    assert placed(decision) == [1, 0, 1]
    assert acted(decision) == [("Bootstrap", "spare")]
