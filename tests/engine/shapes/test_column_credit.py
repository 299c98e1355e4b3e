"""Credit on columns of machines, without an object for each, gives what first fit on objects gives."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from bigfleet.engine.columnar.kernels import pod_credit
from bigfleet.engine.columns.store import ColumnStore
from bigfleet.engine.decision import ActionKind, Decision, Options
from bigfleet.engine.shapes import credit
from bigfleet.engine.shapes.columns.actions import PodActions
from bigfleet.engine.shapes.columns.credit import credit_on_columns
from bigfleet.engine.shapes.columns.loops import PodLoops
from bigfleet.engine.shapes.columns.machines import ColumnMachines
from bigfleet.engine.shapes.decide import decide
from bigfleet.engine.shapes.fleet import DecisionState
from bigfleet.engine.shapes.pod_engine import PodEngine
from bigfleet.engine.shapes.state import ClusterState
from bigfleet.engine.snapshot import Snapshot
from bigfleet.model.ids import ClusterId
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need, amounts_of
from bigfleet.model.profile import Profile
from bigfleet.model.shapes import DemandShape
from bigfleet.model.states import MachineState
from tests.engine.proof import in_proportion
from tests.engine.shapes.shape_fleets import TYPES, fleet, machine

FLEETS = in_proportion(480, least=40)


def _plain_rows(demand: tuple[Need, ...]) -> tuple[Need, ...]:
    return tuple(n for n in demand if n.shapes and n.profile.same_key is None and n.profile.strict_spread is None)


@pytest.fixture(params=(None, pod_credit), ids=("arrays", "loops"))
def loops(request: pytest.FixtureRequest) -> PodLoops | None:
    """Return the compiled loops, or none."""
    found: PodLoops | None = request.param
    return found


def _decided(snapshot: Snapshot, demand: tuple[Need, ...], options: Options, loops: PodLoops | None) -> Decision:
    return PodEngine(loops=loops).decide(ColumnStore.from_snapshot(snapshot).snapshot(), demand, options)


def test_it_equals_first_fit_on_objects(monkeypatch: pytest.MonkeyPatch, loops: PodLoops | None) -> None:
    """Every field of every action and row is equal, also where rows are short and the cluster acquires."""
    credited = complete = 0

    def counted(state: DecisionState, machines: ColumnMachines) -> list[ClusterState]:
        nonlocal credited, complete
        others = credit_on_columns(state, machines)
        found = [cluster for cluster in state.clusters.values() if cluster.claims is not None]
        credited += len(found)
        complete += sum(not any(row.has_left for row in cluster.rows) for cluster in found)
        return others

    monkeypatch.setattr(credit, "credit_on_columns", counted)
    for seed in range(FLEETS):
        drawn = fleet(seed, machines_max=20 * (1 + seed % 6), rows_max=4 * (1 + seed % 5))
        demand = _plain_rows(drawn.demand)
        if not demand:
            continue
        kept = _decided(drawn.snapshot, demand, drawn.options, loops)
        full = decide(drawn.snapshot, demand, drawn.options)
        assert (kept.actions, kept.rows) == (full.actions, full.rows), seed
    assert complete > FLEETS // 6
    assert credited > complete + FLEETS // 6


def test_a_cluster_that_it_credited_can_lose_machines_to_another_one(loops: PodLoops | None) -> None:
    """The hosts of a cluster are made with their claims when another cluster looks for victims."""
    preempted = 0
    for seed in range(FLEETS):
        drawn = fleet(seed, machines_max=60, rows_max=12)
        demand = _plain_rows(drawn.demand)
        # Without free machines, what is short preempts.
        machines = [m for m in drawn.machines if m.cluster]
        options = replace(drawn.options, reported=frozenset({"ca", "cb", "cc"}))
        if not demand or not machines:
            continue
        kept = _decided(Snapshot.of(machines), demand, options, loops)
        full = decide(Snapshot.of(machines), demand, options)
        assert (kept.actions, kept.rows) == (full.actions, full.rows), seed
        preempted += sum(len(row.victims) for row in kept.rows)
    assert preempted


def test_actions_are_counted_and_found_without_being_made(loops: PodLoops | None) -> None:
    """What a decision says of its actions in columns is what the actions say, read one by one or all in turn."""
    kinds: Counter[ActionKind] = Counter()
    for seed in range(FLEETS // 3):
        drawn = fleet(seed, machines_max=60, rows_max=6)
        options = replace(drawn.options, reported=frozenset({"ca", "cb", "cc"}))
        view = ColumnStore.from_snapshot(drawn.snapshot).snapshot()
        actions = PodEngine(loops=loops).decide(view, drawn.demand, options).actions
        assert isinstance(actions, PodActions)
        made = list(actions)
        assert [actions[place] for place in range(len(actions))] == made, seed
        assert [view.ids[row] for row in actions.machines().tolist()] == [a.machine_id for a in made], seed
        assert actions.counts() == {kind: sum(a.kind is kind for a in made) for kind in ActionKind}, seed
        assert actions.excess() == [a.machine_id for a in made if a.reason == "phase3.excess"], seed
        kinds.update(a.kind for a in made)
    assert kinds.keys() >= {ActionKind.BOOTSTRAP, ActionKind.PROVISION, ActionKind.RECLAIM}


def test_excess_machines_are_reclaimed_by_cluster_price_and_what_they_would_cost(loops: PodLoops | None) -> None:
    """Of machines of one price, the one whose reclamation costs most goes first, then the lowest id, as on objects."""
    rng = random.Random(1)
    machines = [
        replace(
            machine(f"m{number:02}", MachineState.CONFIGURED, next(iter(TYPES)), rng),
            cluster=ClusterId(rng.choice(("ca", "cb"))),
            price_usd_per_hour=rng.choice((1.0, 2.0)),
            assigned_reclamation_penalty_dollars=rng.choice((0.0, 8.0, 64.0)),
        )
        for number in range(40)
    ]
    shapes = (DemandShape({"cpu": 100}, 1),)
    demand = tuple(
        Need(ClusterId(name), Profile(priority=100), {"cpu": 100}, {"cpu": 100}, 1, shapes=shapes)
        for name in ("ca", "cb")
    )
    options = Options(now_seconds=0.0, reported=frozenset({"ca", "cb"}))
    kept = _decided(Snapshot.of(machines), demand, options, loops)
    full = decide(Snapshot.of(machines), demand, options)
    assert kept.actions == full.actions
    assert len(kept.actions) == len(machines) - len(demand)


def test_no_amount_is_too_large(loops: PodLoops | None) -> None:
    """A request, a number of pods or a machine that does not fit in 64 bits has an answer, the one on objects."""
    rng = random.Random(2)
    odd = reported = 0
    for seed in range(FLEETS):
        drawn = fleet(seed, machines_max=40, rows_max=8)
        demand = tuple(_odd(need, rng) for need in _plain_rows(drawn.demand))
        machines = [_odd_machine(m, rng) if rng.random() < 0.1 else m for m in drawn.machines]
        if not demand:
            continue
        odd += any(max(shape.resources.values()) > 1 << 62 for need in demand for shape in need.shapes)
        kept = _decided(Snapshot.of(machines), demand, drawn.options, loops)
        full = decide(Snapshot.of(machines), demand, drawn.options)
        assert (kept.actions, kept.rows) == (full.actions, full.rows), seed
        for need, row in zip(demand, kept.rows, strict=True):
            for each in row.impossible:
                assert each.shape is not None, seed
                resources = (*need.shapes, *need.waiting)[each.shape].resources
                reported += each.dimension in resources and each.wanted > 1 << 63
                assert each.wanted == resources.get(each.dimension, each.wanted), seed
    assert odd > FLEETS // 4
    assert reported


def _odd(need: Need, rng: random.Random) -> Need:
    """Return the row with some shapes of odd amounts: up to what an API server takes, and beyond."""
    shapes = tuple(
        replace(
            shape,
            resources={
                name: rng.choice((milli, milli, 1, (1 << 52) + 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 63) * 1000))
                for name, milli in shape.resources.items()
            },
            count=rng.choice((shape.count, shape.count, 1 << 31, (1 << 53) + 1)),
        )
        for shape in need.shapes
    )
    amounts = amounts_of(shapes, aggregate={}, min_unit={})
    return replace(need, aggregate=amounts.aggregate, min_unit=amounts.min_unit, shapes=amounts.shapes)


def _odd_machine(found: Machine, rng: random.Random) -> Machine:
    """Return the machine with an amount that no machine has."""
    name = rng.choice(("cpu", "memory"))
    return replace(found, allocatable={**found.allocatable, name: rng.choice(("9007199254740993", "9Ei", "9000E"))})
