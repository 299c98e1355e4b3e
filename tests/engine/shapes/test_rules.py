"""Rules of the decision over pods, one by one (docs/spec/engine.md)."""

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Any

from bigfleet.engine.decision import ActionKind, CapacityPool, Decision, Options, WithheldPools
from bigfleet.engine.folding import folded_need
from bigfleet.engine.shapes.decide import decide
from bigfleet.engine.snapshot import Snapshot
from bigfleet.engine.targets import Target, TargetClaim, class_key
from bigfleet.model.ids import ClusterId, Fingerprint
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need, amounts_of
from bigfleet.model.profile import Operator, Profile, Requirement, SpreadMode, TopologySpread
from bigfleet.model.shapes import DemandShape
from bigfleet.model.states import CapacityType, MachineState
from tests.engine.proof import in_proportion
from tests.engine.shapes.shape_fleets import GIB, ZONE, machine

S = MachineState
C = ClusterId("c")
#: All that a machine of 4 cpu has.
WHOLE = DemandShape({"cpu": 4000, "memory": GIB}, 1)


def row(priority: int, *shapes: DemandShape, group: str = "", **fields: Any) -> Need:
    """Return a row of cluster c; `requirements` and `spreads` go to its profile."""
    profile = Profile(
        priority=priority,
        interruption_bucket=1,
        requirements=fields.pop("requirements", ()),
        spreads=fields.pop("spreads", ()),
    )
    amounts = amounts_of(shapes, aggregate={}, min_unit={})
    return Need(
        cluster=C,
        profile=profile,
        aggregate=amounts.aggregate,
        min_unit=amounts.min_unit,
        group=group,
        shapes=amounts.shapes,
        **fields,
    )


def pods(cpu_milli: int, count: int) -> DemandShape:
    """Return small pods."""
    return DemandShape({"cpu": cpu_milli, "memory": GIB // 4}, count)


def m4(name: str, state: MachineState, zone: str = "a", **fields: Any) -> Machine:
    """Return an on-demand machine of 4 cpu."""
    if state in (S.CONFIGURED, S.CONFIGURING):
        fields.setdefault("cluster", C)
    values = {
        "zone": zone,
        "capacity_type": CapacityType.ON_DEMAND,
        "allocatable": {"cpu": "4", "memory": "16Gi"},
        "price_usd_per_hour": 0.2,
        "interruption_probability": 0.0,
    }
    return machine(name, state, "m4", random.Random(0), **{**values, **fields})


def stamped(need: Need) -> dict[str, Any]:
    """Return the fields of a machine that was bound for a row."""
    return {"assigned_need_fingerprint": Fingerprint(need.fingerprint), "assigned_group": need.group}


def decided(machines: Sequence[Machine], demand: Sequence[Need], **options: Any) -> Decision:
    """Return the decision; cluster c has reported."""
    since: Mapping[Any, float] = options.pop("idle_since", {})
    given: dict[str, Any] = {"now_seconds": 0.0, "reported": frozenset({"c"}), **options}
    return decide(Snapshot.of(machines, since), demand, Options(**given))


def placed(decision: Decision) -> list[int]:
    """Return how many pods of each row have a place."""
    return [sum(placement.count for placement in result.placements) for result in decision.rows]


def acted(decision: Decision) -> list[tuple[str, str]]:
    """Return (kind, machine) of each action."""
    return [(action.kind.label, str(action.machine_id)) for action in decision.actions]


# ---- targets -----------------------------------------------------------------------------------------------------


def _whole(count: int) -> DemandShape:
    return DemandShape(WHOLE.resources, count)


def test_a_target_of_older_demand_leaves_nothing_to_a_lower_row_that_a_higher_one_lacks() -> None:
    """The plan gives all machines to the lower row; the higher row came after it, and nothing is on offer."""
    machines = [m4(f"m{n:02}", S.CONFIGURED) for n in range(14)]
    high, low = row(1000, _whole(9)), row(100, _whole(14))
    claim = TargetClaim(class_key(machines[0]), 0, 14, low.key, 0, 1)

    decision = decided(machines, [high, low], targets={"c": Target({class_key(machines[0]): 14}, (claim,))})

    assert placed(decision) == [9, 5]


def test_what_a_higher_row_takes_back_of_a_lower_one_is_acquired_anew() -> None:
    """A pinned row can use the planned machine alone; the lower row gets another one in the same cycle."""
    held, spare = m4("held", S.CONFIGURED), m4("spare", S.IDLE, zone="b")
    high = row(1000, _whole(1), requirements=(Requirement(ZONE, Operator.IN, ("a",)),))
    low = row(100, _whole(1))
    claim = TargetClaim(class_key(held), 0, 1, low.key, 0, 1)

    decision = decided([held, spare], [high, low], targets={"c": Target({class_key(held): 1}, (claim,))})

    assert placed(decision) == [1, 1]
    assert acted(decision) == [("Bootstrap", "spare")]


def test_what_is_planned_for_the_highest_rows_is_on_the_machines_that_the_cluster_still_has() -> None:
    """Machines of a class are alike: a cluster that loses one waits with its lowest rows, whatever the plan's numbers.

    Else the highest row would take the machine that another cluster's row was drained for, again and again.
    """
    held, drained = m4("held", S.CONFIGURED), m4("drained", S.IDLE)
    high, low = row(1000, _whole(1)), row(100, _whole(1))
    between = dataclasses.replace(row(500, _whole(1)), cluster=ClusterId("d"))
    key = class_key(held)
    claims = (TargetClaim(key, 0, 1, low.key, 0, 1), TargetClaim(key, 1, 1, high.key, 0, 1))

    decision = decided([held, drained], [high, between, low], targets={"c": Target({key: 2}, claims)})

    assert [result.claimed for result in decision.rows] == [("held",), ("drained",), ()]
    assert [(action.kind.label, action.cluster) for action in decision.actions] == [("Bootstrap", "d")]


def test_a_cluster_acquires_nothing_of_a_withheld_pool_but_its_probe() -> None:
    """What it holds of the pool stays, and other clusters use the pool."""
    pool = CapacityPool.of(m4("n", S.IDLE))
    held, free = m4("h", S.CONFIGURED), [m4(f"f{n}", S.SPECULATIVE) for n in range(3)]
    other = m4("o", S.SPECULATIVE, zone="b", price_usd_per_hour=9.0)
    rows = [row(100, dataclasses.replace(WHOLE, count=2)), row(90, WHOLE, group="other")]
    rows[1] = dataclasses.replace(rows[1], cluster=ClusterId("d"))

    def acquired(*, probes: frozenset[str]) -> list[list[str]]:
        withheld = {"c": WithheldPools(pools=frozenset({pool}), probes=probes)}
        decision = decided([held, m4("i", S.IDLE), *free, other], rows, withheld=withheld)
        return [sorted(result.claimed) for result in decision.rows]

    assert acquired(probes=frozenset()) == [["h", "o"], ["i"]]
    assert acquired(probes=frozenset({"f2"})) == [["f2", "h"], ["i"]]


def test_of_a_planned_class_idle_machines_come_first() -> None:
    """They cost the same and serve minutes earlier, regardless of their ids."""
    slow, fast = m4("a-slow", S.SPECULATIVE), m4("b-fast", S.IDLE)
    need = row(100, _whole(1))
    claim = TargetClaim(class_key(slow), 0, 1, need.key, 0, 1)

    for claims in ((claim,), ()):
        decision = decided([slow, fast], [need], targets={"c": Target({class_key(slow): 1}, claims)})
        assert acted(decision) == [("Bootstrap", "b-fast")]


def test_of_machines_that_are_alike_the_emptiest_is_excess() -> None:
    """Its pods are the fewest that have to move."""
    machines = [m4(f"m{n}", S.CONFIGURED) for n in range(3)]
    need = row(100, _whole(2))

    decision = decided(machines, [need], fullness={"m0": 1, "m1": 4, "m2": 2})

    assert decision.rows[0].claimed == ("m1", "m2")
    assert acted(decision) == [("Reclaim", "m0")]


def test_how_full_nodes_are_chooses_only_among_machines_that_are_alike() -> None:
    """The dearer machine is excess, however full its node is."""
    cheap, dear = m4("cheap", S.CONFIGURED), m4("dear", S.CONFIGURED, price_usd_per_hour=0.3)

    decision = decided([cheap, dear], [row(100, _whole(1))], fullness={"dear": 4})

    assert acted(decision) == [("Reclaim", "dear")]


# ---- machines that leave -----------------------------------------------------------------------------------------


def test_of_machines_that_are_alike_the_one_that_leaves_is_excess() -> None:
    """Its id, its node and its penalties play no part."""
    machines = [m4("m0", S.CONFIGURED, assigned_reclamation_penalty_dollars=8.0), m4("m1", S.CONFIGURED)]

    decision = decided(machines, [row(100, _whole(1))], leaving=frozenset({"m0"}), fullness={"m0": 4})

    assert acted(decision) == [("Reclaim", "m0")]


def test_a_cheap_machine_that_leaves_hosts_after_a_dear_one() -> None:
    """Which machines an exchange replaces is decided where it is proposed."""
    cheap, dear = m4("cheap", S.CONFIGURED), m4("dear", S.CONFIGURED, price_usd_per_hour=0.3)

    decision = decided([cheap, dear], [row(100, _whole(1))], leaving=frozenset({"cheap"}))

    assert acted(decision) == [("Reclaim", "cheap")]


def test_a_target_retains_the_machines_of_a_class_that_do_not_leave() -> None:
    """A machine that leaves is retained only where the target counts it."""
    machines = [m4(f"m{n}", S.CONFIGURED) for n in range(3)]
    key = class_key(machines[0])
    demand, leaving = [row(100, _whole(1))], frozenset({"m0", "m1"})

    assert acted(decided(machines, demand, leaving=leaving, targets={"c": Target({key: 2})})) == [("Reclaim", "m1")]
    assert acted(decided(machines, demand, leaving=leaving, targets={"c": Target({key: 3})})) == []


def test_a_machine_that_leaves_serves_before_another_one_is_acquired_or_preempted() -> None:
    """No pod lacks a place because of an exchange."""
    held, idle = m4("held", S.CONFIGURED), m4("idle", S.IDLE)
    foreign = m4("foreign", S.CONFIGURED, cluster=ClusterId("d"), assigned_priority=1)

    decision = decided([held, idle, foreign], [row(1000, _whole(1))], leaving=frozenset({"held"}))

    assert acted(decision) == []
    assert placed(decision) == [1]


def test_a_gang_leaves_its_own_machines_for_those_that_its_target_has() -> None:
    """Without an exchange it stays with its own; with one it moves whole, or stays whole."""
    need = row(100, _whole(2), requirements=(Requirement(ZONE, Operator.SAME),), group="g")
    old = [m4(f"old{n}", S.CONFIGURED, **stamped(need)) for n in range(2)]
    new = [m4(f"new{n}", S.CONFIGURED, zone="b") for n in range(2)]
    claim = TargetClaim(class_key(new[0]), 0, 2, need.key, 0, 1)
    targets = {"c": Target({class_key(new[0]): 2}, (claim,))}
    leaving = frozenset({"old0", "old1"})

    assert acted(decided([*old, *new], [need], targets=targets)) == []
    moved = decided([*old, *new], [need], targets=targets, leaving=leaving)
    assert (moved.rows[0].domain, acted(moved)) == ("b", [("Reclaim", "old0"), ("Reclaim", "old1")])
    stays = decided([*old, new[0]], [need], targets=targets, leaving=leaving)
    assert (stays.rows[0].domain, stays.rows[0].claimed, acted(stays)) == ("a", ("old0", "old1"), [])


def test_a_gang_that_keeps_its_own_machines_leaves_others_of_their_class_to_be_reclaimed() -> None:
    """The target counts the machines of a class, and not which ones: what a gang of the past had is excess."""
    past, need = (row(100, _whole(2), requirements=(Requirement(ZONE, Operator.SAME),), group=g) for g in ("f", "g"))
    machines = [
        *(m4(f"a{n}", S.CONFIGURED, **stamped(past)) for n in range(2)),
        *(m4(f"b{n}", S.CONFIGURED, **stamped(need)) for n in range(2)),
    ]
    key = class_key(machines[0])
    claim = TargetClaim(key, 0, 2, need.key, 0, 1)

    exact, one_more = (decided(machines, [need], targets={"c": Target({key: n}, (claim,))}) for n in (2, 3))

    assert exact.rows[0].claimed == one_more.rows[0].claimed == ("b0", "b1")
    assert acted(exact) == [("Reclaim", "a0"), ("Reclaim", "a1")]
    assert acted(one_more) == [("Reclaim", "a1")]


# ---- what is not claimed -----------------------------------------------------------------------------------------


def test_machines_are_not_acquired_for_nothing_and_not_bound_and_deleted_at_once() -> None:
    """Among random fleets each acquired machine hosts something; Idle ones whose hold is over have one action."""
    from tests.engine.shapes.claims_checker import violations
    from tests.engine.shapes.shape_fleets import fleet

    for seed in range(in_proportion(2400, least=150)):
        drawn = fleet(seed)
        since = {m.id: -1e6 for m in drawn.machines if m.state is S.IDLE}
        decision = decide(Snapshot.of(drawn.machines, since), drawn.demand, drawn.options)
        claimed = {machine_id for result in decision.rows for machine_id in result.claimed}
        acquired = {a.machine_id for a in decision.actions if a.kind in (ActionKind.BOOTSTRAP, ActionKind.PROVISION)}
        assert acquired <= claimed, f"seed {seed}"
        assert violations(drawn.machines, drawn.demand, drawn.options, decision) == [], f"seed {seed}"


# ---- machines in creation of which the cluster is not known ------------------------------------------------------


def test_a_machine_in_creation_without_a_known_cluster_counts_in_a_spread() -> None:
    """Four pods over two zones at skew 1, one zone full with one: the machine in creation takes two, not three."""
    need = row(100, pods(500, 4), spreads=(TopologySpread(ZONE, 1, SpreadMode.DO_NOT_SCHEDULE),))
    held = m4("held", S.CONFIGURED, zone="a", allocatable={"cpu": "500m", "memory": "16Gi"})
    coming = m4("coming", S.CREATING, zone="b", **stamped(need))

    decision = decided([held, coming], [need])

    assert placed(decision) == [3]
    counts = {placement.machine_id: placement.count for placement in decision.rows[0].placements}
    assert counts == {"held": 1, "coming": 2}


def test_a_gang_counts_its_own_machines_in_creation_after_a_restart() -> None:
    """What is being created for it is not acquired a second time."""
    gang = row(100, _whole(2), group="g", requirements=(Requirement(ZONE, Operator.SAME, ()),))
    coming = [m4(f"coming-{n}", S.CREATING, **stamped(gang)) for n in range(2)]

    decision = decided([*coming, *(m4(f"spare-{n}", S.IDLE) for n in range(2))], [gang])

    assert placed(decision) == [2]
    assert acted(decision) == []


# ---- rows --------------------------------------------------------------------------------------------------------


def test_a_row_of_waiting_pods_alone_is_served() -> None:
    """It has no pods that run, and wants a machine as any other row does."""
    need = row(100, waiting=(_whole(1),))

    decision = decided([m4("full", S.CONFIGURED), m4("spare", S.IDLE)], [need])

    assert ("Bootstrap", "spare") in acted(decision)


def test_a_gang_with_a_pod_that_nothing_hosts_keeps_what_it_has_and_buys_nothing() -> None:
    """It can never run whole; its neighbours are not affected."""
    same = (Requirement(ZONE, Operator.SAME, ()),)
    gang = row(1000, _whole(3), DemandShape({"cpu": 1_000_000}, 1), group="g", requirements=same)
    other = row(100, _whole(1))
    held = m4("held", S.CONFIGURED, **stamped(gang))

    decision = decided([held, *(m4(f"spare-{n}", S.IDLE) for n in range(4))], [gang, other])

    assert placed(decision) == [1, 1]
    assert not decision.rows[0].satisfiable
    assert acted(decision) == [("Bootstrap", "spare-0")]


def test_a_machine_that_was_bound_for_a_folded_gang_stays_while_the_gang_is_short() -> None:
    """A cluster whose operator begins to send shapes keeps what decisions over aggregates bound for it."""
    same = (Requirement(ZONE, Operator.SAME, ()),)
    gang = row(1000, _whole(2), group="g", requirements=same)
    folded = m4("folded", S.CONFIGURED, zone="b", allocatable={"cpu": "1"}, **stamped(folded_need(gang)))

    decision = decided([m4("held", S.CONFIGURED), folded], [gang])

    assert placed(decision) == [1]
    assert acted(decision) == []


def test_a_gang_whose_domain_a_higher_row_used_up_takes_another_one_and_preempts_nothing() -> None:
    """Zone a was the cheaper one for the whole gang; two of its machines went to a higher row of another cluster."""
    same = (Requirement(ZONE, Operator.SAME, ()),)
    cheap = [m4(f"a{n}", S.SPECULATIVE) for n in range(4)]
    dear = [m4(f"b{n}", S.SPECULATIVE, zone="b", price_usd_per_hour=0.4) for n in range(4)]
    victims = [m4(f"victim{n}", S.CONFIGURED, cluster=ClusterId("v"), assigned_priority=10) for n in range(4)]
    higher = dataclasses.replace(row(2000, _whole(2)), cluster=ClusterId("p"))
    gang = row(1000, _whole(4), group="g", requirements=same)
    lower = dataclasses.replace(row(10, _whole(4)), cluster=ClusterId("v"))

    decision = decided([*cheap, *dear, *victims], [higher, gang, lower], reported=frozenset({"c", "p", "v"}))

    assert placed(decision) == [2, 4, 4]
    assert [result.domain for result in decision.rows] == ["", "b", ""]
    assert sorted(acted(decision)) == [("Provision", name) for name in ("a0", "a1", "b0", "b1", "b2", "b3")]


def test_a_gang_whose_only_domain_a_higher_row_used_up_is_short_of_machines_and_not_of_a_domain() -> None:
    """It would be parked as one that no domain can host, and look again only every 32 cycles."""
    same = (Requirement(ZONE, Operator.SAME, ()),)
    higher = dataclasses.replace(row(2000, _whole(4)), cluster=ClusterId("p"))
    gang = row(1000, _whole(4), group="g", requirements=same)

    decision = decided([m4(f"a{n}", S.IDLE) for n in range(4)], [higher, gang], reported=frozenset({"c", "p"}))

    assert placed(decision) == [4, 0]
    assert decision.rows[1].satisfiable


# ---- victims -----------------------------------------------------------------------------------------------------


def test_the_lowest_priority_of_all_protects_a_machine_from_its_equals() -> None:
    """Two clusters of this priority would drain one machine from each other for ever."""
    lowest = -(2**31)
    short = row(lowest, _whole(1))
    serving = dataclasses.replace(row(lowest, _whole(1)), cluster=ClusterId("d"))
    held = m4("held", S.CONFIGURED, cluster=ClusterId("d"), assigned_priority=lowest)
    reported = frozenset({"c", "d"})

    assert acted(decided([held], [short, serving], reported=reported)) == []
    higher = row(lowest + 1, _whole(1))
    assert acted(decided([held], [higher, serving], reported=reported)) == [("Preempt", "held")]
