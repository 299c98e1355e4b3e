"""Rows under a strict spread acquire what helps them, in domains that can keep up, and no more."""

import dataclasses
from collections import Counter

from bigfleet.engine.decision import Decision
from bigfleet.engine.targets import Target, TargetClaim, class_key
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need
from bigfleet.model.profile import Operator, Requirement, SpreadMode, TopologySpread
from bigfleet.model.shapes import DemandShape
from bigfleet.model.states import CapacityType
from tests.engine.shapes.claims_checker import violations
from tests.engine.shapes.shape_fleets import ZONE
from tests.engine.shapes.test_rules import C, S, acted, decided, m4, placed, pods, row

SPREAD = (TopologySpread(ZONE, 1, SpreadMode.DO_NOT_SCHEDULE),)


def offers(zone: str, count: int, cpu: int = 4, price: float = 0.2) -> list[Machine]:
    """Return Speculative machines of a zone."""
    allocatable = {"cpu": str(cpu), "memory": "64Gi"}
    return [
        m4(
            f"{zone}{cpu}-{n:02}",
            S.SPECULATIVE,
            zone,
            instance_type=f"t{cpu}",
            allocatable=allocatable,
            price_usd_per_hour=price,
        )
        for n in range(count)
    ]


def full(zone: str, cpu: int) -> Machine:
    """Return a Configured machine of cluster c."""
    allocatable = {"cpu": str(cpu), "memory": "64Gi"}
    return m4(f"held-{zone}", S.CONFIGURED, zone, instance_type=f"t{cpu}", allocatable=allocatable)


def acquired(decision: Decision) -> Counter[str]:
    """Return how many machines are acquired in each zone."""
    return Counter(machine[0] for kind, machine in acted(decision) if kind in ("Bootstrap", "Provision"))


def sound(machines: list[Machine], demand: list[Need], decision: Decision) -> bool:
    """Return whether the checker of claims finds nothing."""
    assert decision.basis is not None
    return violations(machines, demand, decision.basis.options, decision) == []


def test_a_row_takes_no_machine_that_does_not_help_it() -> None:
    """Large pods fit in zone a alone; their spread has room for them once, and another cluster gets a machine."""
    machines = [*offers("a", 6, cpu=8, price=1.0), *offers("b", 6, cpu=2, price=0.3)]
    spread = row(100, pods(8000, 2), pods(1000, 3), spreads=SPREAD)
    other = dataclasses.replace(row(1, pods(8000, 1)), cluster=ClusterId("d"))

    decision = decided(machines, [spread, other], reported=frozenset({"c", "d"}))

    assert placed(decision) == [5, 1]
    assert sound(machines, [spread, other], decision)


def test_what_a_spread_can_never_place_leaves_the_machines_to_others() -> None:
    """Zone b hosts two small pods: zone a may have three pods, however many machines are on offer."""
    machines = [*offers("a", 8, cpu=8, price=1.0), *offers("b", 8, cpu=2, price=0.3)]
    spread = row(100, pods(8000, 6), pods(1000, 2), spreads=SPREAD)
    other = dataclasses.replace(row(1, pods(8000, 3)), cluster=ClusterId("d"))

    decision = decided(machines, [spread, other], reported=frozenset({"c", "d"}))

    assert placed(decision)[1] == 3
    assert acquired(decision)["a"] <= 6
    assert sound(machines, [spread, other], decision)


def test_a_zone_with_one_machine_is_not_opened_where_others_host_all() -> None:
    """With it 14 of 30 pods would run; without it all of them."""
    machines = [*offers("a", 10), *offers("b", 10), *offers("c", 1, price=0.1)]
    need = row(100, pods(1000, 30), spreads=SPREAD)

    decision = decided(machines, [need])

    assert placed(decision) == [30]
    assert acquired(decision)["c"] == 0
    assert sound(machines, [need], decision)


def test_one_cheap_machine_of_another_zone_does_not_unsettle_a_row() -> None:
    """Twenty pods run in two zones; one more pod needs a machine there, not the one that is paid for elsewhere."""
    idle = m4("c-idle", S.IDLE, "c", allocatable={"cpu": "1", "memory": "16Gi"}, capacity_type=CapacityType.BARE_METAL)
    machines = [full("a", 10), full("b", 10), *offers("a", 3), idle]
    need = row(100, pods(1000, 21), spreads=SPREAD)

    decision = decided(machines, [need])

    assert placed(decision) == [21]
    assert acquired(decision) == {"a": 1}


def test_a_new_zone_is_opened_where_only_several_machines_of_it_help() -> None:
    """The first of them lowers what the other zones may host; the eighth has made up for that."""
    machines = [full("a", 10), full("b", 10), *offers("c", 12, cpu=1, price=0.05)]
    need = row(100, pods(1000, 25), spreads=SPREAD)

    decision = decided(machines, [need])

    assert placed(decision) == [25]
    assert acquired(decision) == {"c": 8}
    assert sound(machines, [need], decision)


def test_a_row_that_no_zone_helps_stays_as_it_is() -> None:
    """Three machines of a third zone host three pods, and would take fourteen from the others."""
    machines = [full("a", 10), full("b", 10), *offers("c", 3, cpu=1, price=0.05)]
    need = row(100, pods(1000, 25), spreads=SPREAD)

    decision = decided(machines, [need])

    assert placed(decision) == [20]
    assert acted(decision) == []


def test_claims_of_a_target_that_break_the_spread_are_not_called_satisfied() -> None:
    """The target has six pods in zone a and two in zone b: three may run in a, on three machines."""
    machines = [*offers("a", 6, cpu=8, price=1.0), *offers("b", 2, cpu=2, price=0.3)]
    need = row(100, pods(8000, 6), pods(1000, 2), spreads=SPREAD)
    large, small = class_key(machines[0]), class_key(machines[-1])
    claims = (TargetClaim(large, 0, 6, need.key, 0, 1), TargetClaim(small, 0, 1, need.key, 1, 2))

    decision = decided(machines, [need], targets={C: Target({large: 6, small: 1}, claims)})

    assert placed(decision) == [5]
    assert not decision.rows[0].satisfied
    assert acquired(decision) == {"a": 3, "b": 1}
    assert sound(machines, [need], decision)


def test_a_row_that_lost_machines_of_one_zone_stands_as_planned() -> None:
    """Ten pods run in each of two zones, two in the third, which has no machine more: the twenty keep their places."""
    machines = [full("a", 10), full("b", 10), full("c", 2)]
    need = row(100, DemandShape(pods(1000, 1).resources, 30), spreads=SPREAD)
    keys = [class_key(machine) for machine in machines]
    claims = tuple(TargetClaim(key, 0, 1, need.key, 0, n) for key, n in zip(keys, (10, 10, 2), strict=True))

    decision = decided(machines, [need], targets={C: Target(dict.fromkeys(keys, 1), claims)})

    assert placed(decision) == [22]
    assert acted(decision) == []


def test_a_row_with_room_in_its_own_cluster_preempts_nothing() -> None:
    """Its composition left zone c out; the machine there, which came later, has room for the pod that is short."""
    machines = [full("a", 4), full("b", 4), full("c", 1)]
    victim = m4("victim", S.CONFIGURED, "a", cluster=ClusterId("v"), assigned_priority=10)
    need = row(100, DemandShape(pods(1000, 1).resources, 9), spreads=SPREAD)
    low = dataclasses.replace(row(10, pods(1000, 1)), cluster=ClusterId("v"))
    keys = [class_key(machine) for machine in machines]
    claims = tuple(TargetClaim(key, 0, 1, need.key, 0, 4) for key in keys[:2])

    decision = decided(
        [*machines, victim],
        [need, low],
        reported=frozenset({"c", "v"}),
        targets={C: Target(dict.fromkeys(keys, 1), claims)},
    )

    assert acted(decision) == []
    assert placed(decision) == [8, 1]


def test_a_zone_in_which_only_another_row_has_machines_counts() -> None:
    """kube-scheduler counts each zone with a node that the pods may use, also a full one: one pod may run in zone a."""
    machines = [full("a", 4), full("b", 1)]
    need = row(100, pods(1000, 3), spreads=SPREAD)
    other = row(500, pods(1000, 1), requirements=(Requirement(ZONE, Operator.IN, ("b",)),))
    a, b = [class_key(machine) for machine in machines]
    claims = (TargetClaim(a, 0, 1, need.key, 0, 3), TargetClaim(b, 0, 1, other.key, 0, 1))

    decision = decided(machines, [other, need], targets={C: Target({a: 1, b: 1}, claims)})

    assert not decision.rows[1].satisfied
    assert placed(decision) == [1, 1]


def victims(zone: str, cpu: int) -> tuple[Machine, Need]:
    """Return a machine of another cluster and the low row that it serves."""
    machine = dataclasses.replace(full(zone, cpu), id=MachineId("victim"), cluster=ClusterId("v"), assigned_priority=10)
    return machine, dataclasses.replace(row(10, pods(1000, 1)), cluster=ClusterId("v"))


def test_a_row_preempts_no_machine_that_it_would_not_acquire() -> None:
    """With a machine for one pod in a second zone, two of the four pods in the first one would have no place."""
    victim, low = victims("b", 1)
    need = row(100, pods(1000, 8), spreads=SPREAD)

    decision = decided([full("a", 4), victim], [need, low], reported=frozenset({"c", "v"}))

    assert acted(decision) == []
    assert placed(decision) == [4, 1]


def test_a_row_preempts_a_machine_in_a_new_zone_that_helps_it() -> None:
    victim, low = victims("b", 4)
    need = row(100, pods(1000, 8), spreads=SPREAD)

    decision = decided([full("a", 4), victim], [need, low], reported=frozenset({"c", "v"}))

    assert acted(decision) == [("Preempt", "victim")]
