"""Target compositions of a decision's clusters: what is planned is what the decision then does."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigfleet.compositions import targets as targets_module
from bigfleet.compositions.targets import FEW_CLUSTERS, targets_of
from bigfleet.engine.decision import ActionKind, Options
from bigfleet.engine.shapes.decide import decide
from bigfleet.engine.snapshot import Snapshot
from bigfleet.engine.targets import class_key
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import HostRef, Machine
from bigfleet.model.need import Need, amounts_of
from bigfleet.model.profile import Profile, SpreadMode, TopologySpread
from bigfleet.model.shapes import DemandShape
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.planner.composition import Composition
from bigfleet.planner.plan import DEFAULT, THOROUGH, plan
from bigfleet.planner.problem import PlanSettings, Problem, SchedulerOrder
from bigfleet.planner.search import Effort
from tests.engine.proof import in_proportion
from tests.engine.shapes.claims_checker import violations

GIB = 2**30 * 1000


def offer(name: str, cpu: int, memory_gib: int, price: float, **fields: object) -> Machine:
    """Return a Speculative machine."""
    values: dict[str, object] = {
        "id": MachineId(name),
        "state": MachineState.SPECULATIVE,
        "instance_type": f"t{cpu}.{memory_gib}",
        "zone": "a",
        "capacity_type": CapacityType.ON_DEMAND,
        "allocatable": {"cpu": str(cpu), "memory": f"{memory_gib}Gi", "pods": "110"},
        "price_usd_per_hour": price,
        **fields,
    }
    return Machine(**values)  # type: ignore[arg-type]


def held(machine: Machine, cluster: str) -> Machine:
    """Return the machine Configured in a cluster."""
    return replace(machine, state=MachineState.CONFIGURED, host=HostRef("p", machine.id), cluster=ClusterId(cluster))


def need(cluster: str, *shapes: DemandShape, priority: int = 100) -> Need:
    """Return a row of pods."""
    amounts = amounts_of(shapes, aggregate={}, min_unit={})
    return Need(
        cluster=ClusterId(cluster),
        profile=Profile(priority=priority, interruption_bucket=1, reclamation_bucket=1),
        aggregate=amounts.aggregate,
        min_unit=amounts.min_unit,
        shapes=amounts.shapes,
    )


def pods(cpu_milli: int, memory_gib: int, count: int) -> DemandShape:
    """Return equal pods."""
    return DemandShape({"cpu": cpu_milli, "memory": memory_gib * GIB}, count)


OPTIONS = Options(now_seconds=0.0, reported=frozenset({"c", "d"}))


@pytest.mark.parametrize(("clusters", "effort"), [(FEW_CLUSTERS, THOROUGH), (FEW_CLUSTERS + 1, DEFAULT)])
def test_few_clusters_are_planned_thoroughly(clusters: int, effort: Effort, monkeypatch: pytest.MonkeyPatch) -> None:
    efforts: list[Effort] = []

    def planned(asked: Problem, chosen: Effort) -> Composition:
        efforts.append(chosen)
        return plan(asked, chosen)

    monkeypatch.setattr(targets_module, "plan", planned)
    machines = [offer(f"m-{n}", 4, 16, 1.0) for n in range(clusters)]
    demand = [need(f"c-{n}", pods(1000, 2, 3)) for n in range(clusters)]

    assert len(targets_of(Snapshot.of(machines), demand, OPTIONS)) == clusters
    assert efforts == [effort] * clusters


def test_a_decision_acquires_its_target_and_nothing_else() -> None:
    """Actions equal the counts of the composition, and the claims are sound."""
    machines = [offer(f"m{n:02}", 8, 32, 0.4) for n in range(20)] + [offer(f"r{n:02}", 8, 64, 0.5) for n in range(20)]
    demand = [need("c", pods(1000, 2, 30), pods(500, 4, 20)), need("c", pods(2000, 3, 5), priority=10)]
    targets = targets_of(Snapshot.of(machines), demand, OPTIONS)

    decision = decide(Snapshot.of(machines), demand, replace(OPTIONS, targets=targets))

    by_id = {machine.id: machine for machine in machines}
    taken = [class_key(by_id[a.machine_id]) for a in decision.actions if a.kind is ActionKind.PROVISION]
    assert {key: taken.count(key) for key in set(taken)} == dict(targets["c"].counts)
    assert all(row.satisfied for row in decision.rows)
    assert violations(machines, demand, OPTIONS, decision) == []


def test_rows_of_one_key_get_what_is_planned_for_each() -> None:
    """Rows of one profile and group are several rows: a decision acquires the target and nothing else."""
    machines = [offer(f"m{n:02}", 8, 32, 0.4) for n in range(20)] + [offer(f"r{n:02}", 8, 64, 0.5) for n in range(20)]
    demand = [need("c", pods(1000, 2, 30)), need("c", pods(500, 4, 20), pods(2000, 3, 5)), need("c", pods(250, 8, 9))]
    assert len({each.key for each in demand}) == 1
    targets = targets_of(Snapshot.of(machines), demand, OPTIONS)

    decision = decide(Snapshot.of(machines), demand, replace(OPTIONS, targets=targets))

    by_id = {machine.id: machine for machine in machines}
    taken = [class_key(by_id[a.machine_id]) for a in decision.actions if a.kind is ActionKind.PROVISION]
    assert {key: taken.count(key) for key in set(taken)} == dict(targets["c"].counts)
    assert all(row.satisfied for row in decision.rows)
    assert violations(machines, demand, OPTIONS, decision) == []


@given(st.lists(st.lists(st.tuples(st.integers(1, 16), st.integers(1, 8), st.integers(1, 6)), max_size=3), max_size=4))
@settings(max_examples=in_proportion(60))
def test_rows_of_one_key_are_decided_as_rows_of_different_groups(rows: list[list[tuple[int, int, int]]]) -> None:
    """A group that does no more than give rows different keys changes no action."""
    machines = [offer(f"m{n:02}", 8, 32, 0.4) for n in range(20)] + [offer(f"s{n:02}", 4, 32, 0.25) for n in range(20)]
    demand = [need("c", *(pods(250 * cpu, gib, count) for cpu, gib, count in shapes)) for shapes in rows]
    apart = [replace(each, group=f"g{place}") for place, each in enumerate(demand)]

    first, second = (
        decide(Snapshot.of(machines), each, replace(OPTIONS, targets=targets_of(Snapshot.of(machines), each, OPTIONS)))
        for each in (demand, apart)
    )

    assert [(a.kind, a.machine_id) for a in first.actions] == [(a.kind, a.machine_id) for a in second.actions]


def test_a_fleet_that_equals_its_target_stays() -> None:
    """What was acquired, held and planned again, leads to no action."""
    machines = [offer(f"m{n:02}", 8, 32, 0.4) for n in range(20)]
    demand = [need("c", pods(1000, 2, 30), pods(500, 4, 20))]
    first = decide(
        Snapshot.of(machines), demand, replace(OPTIONS, targets=targets_of(Snapshot.of(machines), demand, OPTIONS))
    )
    taken = {action.machine_id for action in first.actions}
    settled = Snapshot.of(held(m, "c") if m.id in taken else m for m in machines)

    again = decide(settled, demand, replace(OPTIONS, targets=targets_of(settled, demand, OPTIONS)))

    assert taken
    assert again.actions == ()


def test_a_fleet_that_equals_its_target_stays_when_spot_prices_change() -> None:
    """A target means the same machines after the price of a market has changed, whatever single offers say."""
    spot = {"capacity_type": CapacityType.SPOT, "interruption_probability": 0.0001}
    machines = [offer(f"{zone}{n}", 8, 32, 0.1, zone=zone, **spot) for zone in ("a", "b") for n in range(8)]
    demand = [need("c", pods(1000, 2, 30), pods(500, 4, 20))]
    targets = targets_of(Snapshot.of(machines), demand, OPTIONS)
    first = decide(Snapshot.of(machines), demand, replace(OPTIONS, targets=targets))
    taken = {action.machine_id for action in first.actions}
    dearer = [replace(held(m, "c"), price_usd_per_hour=0.12) if m.id in taken else m for m in machines]

    again = decide(Snapshot.of(dearer), demand, replace(OPTIONS, targets=targets))

    assert taken
    assert again.actions == ()


def test_a_cluster_that_shrinks_gives_its_dearest_machines_back() -> None:
    """Of held on-demand machines the ones that are not needed are reclaimed, not the cheap ones."""
    cheap = [held(offer(f"cheap-{n}", 8, 32, 0.4), "c") for n in range(2)]
    dear = [held(offer(f"dear-{n}", 8, 32, 0.9, instance_type="dear"), "c") for n in range(3)]
    demand = [need("c", pods(1000, 2, 12))]
    snapshot = Snapshot.of([*cheap, *dear])

    decision = decide(snapshot, demand, replace(OPTIONS, targets=targets_of(snapshot, demand, OPTIONS)))

    assert [(a.kind, a.machine_id) for a in decision.actions] == [(ActionKind.RECLAIM, f"dear-{n}") for n in range(3)]


def test_a_machine_that_cannot_leave_stays_and_another_goes() -> None:
    """While its hold lasts it is paid for: what is dear and not needed any more goes first, then what is cheap."""
    cheap = [held(offer(f"cheap-{n}", 8, 32, 0.4), "c") for n in range(2)]
    dear = [held(offer(f"dear-{n}", 8, 32, 0.9, instance_type="dear"), "c") for n in range(3)]
    demand = [need("c", pods(1000, 2, 12))]
    snapshot = Snapshot.of([*cheap, *dear])

    targets = targets_of(snapshot, demand, OPTIONS, refused={MachineId("dear-0")})

    assert targets["c"].counts == {class_key(cheap[0]): 1, class_key(dear[0]): 1}


def test_scarce_machines_go_to_the_cluster_with_the_higher_row() -> None:
    """Two clusters want the one machine there is: the higher priority has it, and the other is short."""
    machines = [offer("only", 8, 32, 0.4)]
    demand = [need("c", pods(1000, 2, 5), priority=500), need("d", pods(1000, 2, 5), priority=10)]
    targets = targets_of(Snapshot.of(machines), demand, OPTIONS)

    decision = decide(Snapshot.of(machines), demand, replace(OPTIONS, targets=targets))

    assert [(row.need.cluster, row.satisfied) for row in decision.rows] == [("c", True), ("d", False)]


def test_a_stale_target_does_no_harm() -> None:
    """A composition whose machines are gone, or made for other demand, leaves nothing short that could run."""
    machines = [offer(f"m{n:02}", 8, 32, 0.4) for n in range(9)] + [offer(f"r{n:02}", 16, 64, 0.9) for n in range(3)]
    planned = [need("c", pods(1000, 2, 8))]
    targets = targets_of(Snapshot.of(machines), planned, OPTIONS)
    grown = [need("c", pods(1000, 2, 30), pods(3000, 9, 2))]

    for left in (machines, machines[9:]):
        decision = decide(Snapshot.of(left), grown, replace(OPTIONS, targets=targets))

        assert all(row.satisfied for row in decision.rows)
        assert violations(left, grown, OPTIONS, decision) == []


def test_the_order_of_the_scheduler_is_asked_for() -> None:
    """Both orders give a target that hosts everything."""
    machines = [offer(f"m{n:02}", 8, 32, 0.4) for n in range(20)]
    demand = [need("c", pods(1500, 2, 20), pods(700, 9, 6))]
    for order in SchedulerOrder:
        targets = targets_of(Snapshot.of(machines), demand, OPTIONS, settings={"c": PlanSettings(order=order)})
        decision = decide(Snapshot.of(machines), demand, replace(OPTIONS, targets=targets))
        assert all(row.satisfied for row in decision.rows)


def test_a_cluster_with_a_row_without_shapes_has_no_target() -> None:
    """Sums cannot be planned pod by pod; the decision serves them without a composition."""
    machines = [offer(f"m{n:02}", 8, 32, 0.4) for n in range(4)]
    plain = replace(need("c", pods(1000, 2, 5), priority=7), shapes=())

    assert targets_of(Snapshot.of(machines), [need("c", pods(1000, 2, 5)), plain], OPTIONS) == {}


def test_a_demand_beyond_all_measure_is_decided_without_a_target() -> None:
    """A billion pods are no problem of the planner's; what there is of machines is used, the rest is short."""
    machines = [offer("m", 8, 32, 0.4)]
    demand = [need("c", pods(1000, 2, 10**9))]

    assert targets_of(Snapshot.of(machines), demand, OPTIONS) == {}
    (row,) = decide(Snapshot.of(machines), demand, OPTIONS).rows
    assert row.unplaced == ((0, 10**9 - 8),)


def test_half_of_a_cluster_may_be_in_one_spot_pool() -> None:
    """The decision follows the composition into the dearer pool; the explanation names the pool that is limited."""
    spot = {"capacity_type": CapacityType.SPOT, "interruption_probability": 0.0001}
    machines = [offer(f"a{n:02}", 4, 16, 0.1, **spot) for n in range(30)]
    machines += [offer(f"b{n:02}", 4, 16, 0.2, zone="b", **spot) for n in range(30)]
    row = need("c", pods(1000, 4, 60))
    demand = [replace(row, profile=replace(row.profile, interruption_bucket=4))]
    snapshot = Snapshot.of(machines)

    def acquired(settings: PlanSettings) -> tuple[int, int, tuple[str, ...]]:
        targets = targets_of(snapshot, demand, OPTIONS, settings={"c": settings})
        actions = decide(snapshot, demand, replace(OPTIONS, targets=targets)).actions
        cheap = sum(action.machine_id.startswith("a") for action in actions)
        return cheap, len(actions) - cheap, targets["c"].limited_pools

    cheap, dear, limited = acquired(PlanSettings())
    assert cheap <= dear
    assert "t4.16/a" in limited
    assert acquired(PlanSettings(spot_pool_percent_max=0))[1:] == (0, ())


def test_disks_of_more_than_32_tebibytes_are_planned_with() -> None:
    """A machine with 120 TB hosts twelve pods of 10 TB: one is acquired, not four."""
    allocatable = {"cpu": "64", "memory": "256Gi", "pods": "110", "ephemeral-storage": "120T"}
    machines = [offer(f"m{n}", 64, 256, 10.0, allocatable=allocatable) for n in range(6)]
    shape = DemandShape({"cpu": 1000, "memory": GIB, "ephemeral-storage": 10**16}, 12)
    demand = [need("c", shape)]
    targets = targets_of(Snapshot.of(machines), demand, OPTIONS)

    decision = decide(Snapshot.of(machines), demand, replace(OPTIONS, targets=targets))

    assert targets["c"].counts == {class_key(machines[0]): 1}
    assert [action.machine_id for action in decision.actions] == ["m0"]


def test_a_target_has_no_more_pods_than_the_spread_of_their_row_allows() -> None:
    """Large machines are in zone a alone: beyond the small pods of zone b nothing could be scheduled there."""
    machines = [offer(f"a{n}", 8, 32, 1.0) for n in range(8)]
    machines += [offer(f"{zone}-small{n}", 2, 8, 0.3, zone=zone) for zone in ("a", "b") for n in range(4)]
    row = need("c", pods(8000, 2, 6), pods(1000, 1, 2))
    strict = (TopologySpread("topology.kubernetes.io/zone", 1, SpreadMode.DO_NOT_SCHEDULE),)
    demand = [replace(row, profile=replace(row.profile, spreads=strict))]
    targets = targets_of(Snapshot.of(machines), demand, OPTIONS)

    decision = decide(Snapshot.of(machines), demand, replace(OPTIONS, targets=targets))

    assert violations(machines, demand, OPTIONS, decision) == []
    assert not decision.rows[0].satisfied
    assert len(decision.actions) <= 4
