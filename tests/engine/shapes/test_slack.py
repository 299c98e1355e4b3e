"""Machines that a target retains without a claim: for which rows of other clusters they are preempted."""

import dataclasses
from typing import Any

from bigfleet.engine.columns.store import ColumnStore
from bigfleet.engine.decision import Decision, Options
from bigfleet.engine.shapes.pod_engine import PodEngine
from bigfleet.engine.snapshot import Snapshot
from bigfleet.engine.targets import Target, TargetClaim, class_key
from bigfleet.model.ids import ClusterId
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need
from bigfleet.model.profile import Operator, Requirement
from tests.engine.shapes.shape_fleets import ZONE
from tests.engine.shapes.test_rules import C, S, acted, decided, m4, pods, row

D = ClusterId("d")
BOTH = frozenset({"c", "d"})
#: Bound for the highest row of cluster c, as what completes a target is.
USED, SLACK = (m4(name, S.CONFIGURED, assigned_priority=1000) for name in ("m0", "m1"))
HIGH, LOW = row(1000, pods(1000, 1)), row(0, pods(1000, 3))
#: The highest row of cluster c as good as fills a machine, the lowest has a small part of it.
LARGE, SMALL = row(1000, pods(3000, 1)), row(0, pods(100, 1))


def target(*rows: Need) -> Target:
    """Return a target of two machines of which one hosts everything."""
    claims = tuple(TargetClaim(class_key(USED), 0, 1, need.key, 0, need.shapes[0].count) for need in rows)
    return Target({class_key(USED): 2}, claims)


def of_d(priority: int, **fields: Any) -> Need:
    """Return a row of cluster d with one pod that nothing is free for."""
    return dataclasses.replace(row(priority, pods(4000, 1), **fields), cluster=D)


def decided_on(machines: list[Machine], rows: list[Need], other: Need, **options: Any) -> Decision:
    """Return the decision on rows of cluster c, whose target is `target`, and a row of cluster d; engines agree."""
    options = {"reported": BOTH, "targets": {C: target(*rows)}, **options}
    demand = sorted([*rows, other], key=lambda need: -need.profile.priority)
    decision = decided(machines, demand, **options)
    view = ColumnStore.from_snapshot(Snapshot.of(machines)).snapshot()
    assert PodEngine(loops=None).decide(view, demand, Options(now_seconds=0.0, **options)) == decision
    return decision


def test_slack_is_preempted_for_a_row_that_is_not_below_the_lowest_pods_that_would_fill_it() -> None:
    """Without the machine the scheduler could leave pods of the lowest row without a place, not the higher ones."""
    for priority in (100, 0):
        assert acted(decided_on([USED, SLACK], [HIGH, LOW], of_d(priority))) == [("Preempt", "m1")]


def test_slack_is_not_preempted_for_a_row_below_all_of_its_cluster() -> None:
    """The scheduler may need the machine for pods that come first."""
    assert acted(decided_on([USED, SLACK], [HIGH, LOW], of_d(-1))) == []


def test_slack_protects_higher_pods_if_the_lowest_would_not_fill_it() -> None:
    """If the low pod yields to the high one, that is still without a place."""
    assert acted(decided_on([USED, SLACK], [LARGE, SMALL], of_d(999))) == []
    assert acted(decided_on([USED, SLACK], [LARGE, SMALL], of_d(1000))) == [("Preempt", "m1")]


def test_pods_that_may_not_use_slack_do_not_yield_for_it() -> None:
    """The low pods are in another zone."""
    other_zone = m4("m2", S.CONFIGURED, "b")
    in_a, in_b = ((Requirement(ZONE, Operator.IN, (zone,)),) for zone in "ab")
    low = row(0, pods(1000, 3), requirements=in_b)
    options = {"targets": {C: Target({class_key(USED): 2, class_key(other_zone): 1})}}

    assert acted(decided_on([USED, SLACK, other_zone], [HIGH, low], of_d(999, requirements=in_a), **options)) == []
    assert acted(decided_on([USED, SLACK, other_zone], [HIGH, low], of_d(1000, requirements=in_a), **options)) == [
        ("Preempt", "m1")
    ]


def test_slack_is_preempted_before_a_machine_that_hosts_pods() -> None:
    """No pod loses its place."""
    hosting = m4("m0a", S.CONFIGURED, cluster="e", assigned_priority=-5)
    of_e = dataclasses.replace(row(-5, pods(1000, 1)), cluster=ClusterId("e"))

    decision = decided_on([USED, SLACK, hosting], [HIGH, LOW, of_e], of_d(0), reported=BOTH | {"e"})

    assert acted(decision) == [("Preempt", "m1")]


def test_what_no_target_retains_is_preempted_before_slack() -> None:
    """It is excess; of a short row of its own cluster it is not reclaimed."""
    excess = m4("m9", S.CONFIGURED, "b")

    assert acted(decided_on([USED, SLACK, excess], [HIGH, LOW], of_d(0))) == [("Preempt", "m9")]


def test_slack_of_a_cluster_with_waiting_pods_is_protected_by_its_stamp() -> None:
    """The scheduler has found no room on it: it is not empty."""
    waiting = dataclasses.replace(HIGH, waiting=(pods(500, 1),))

    assert acted(decided_on([USED, SLACK], [waiting, LOW], of_d(1000))) == []
    assert acted(decided_on([USED, SLACK], [waiting, LOW], of_d(1001))) == [("Preempt", "m1")]


def test_slack_of_a_cluster_that_has_not_reported_is_protected_by_its_stamp() -> None:
    """What runs there is not known."""
    reported = frozenset({"d"})

    assert acted(decided_on([USED, SLACK], [HIGH, LOW], of_d(1000), reported=reported)) == []
