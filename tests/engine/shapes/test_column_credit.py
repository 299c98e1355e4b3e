"""Credit on columns of machines, without an object for each, gives what first fit on objects gives."""

from dataclasses import replace

import pytest

from bigfleet.engine.columns.store import ColumnStore
from bigfleet.engine.decision import Decision, Options
from bigfleet.engine.shapes import credit
from bigfleet.engine.shapes.columns.credit import credit_on_columns
from bigfleet.engine.shapes.columns.machines import ColumnMachines
from bigfleet.engine.shapes.decide import decide
from bigfleet.engine.shapes.fleet import DecisionState
from bigfleet.engine.shapes.pod_engine import PodEngine
from bigfleet.engine.shapes.state import ClusterState
from bigfleet.engine.snapshot import Snapshot
from bigfleet.model.need import Need
from tests.engine.shapes.shape_fleets import fleet

FLEETS = 120


def _plain_rows(demand: tuple[Need, ...]) -> tuple[Need, ...]:
    return tuple(n for n in demand if n.shapes and n.profile.same_key is None and n.profile.strict_spread is None)


def _decided(snapshot: Snapshot, demand: tuple[Need, ...], options: Options) -> Decision:
    return PodEngine().decide(ColumnStore.from_snapshot(snapshot).snapshot(), demand, options)


def test_it_equals_first_fit_on_objects(monkeypatch: pytest.MonkeyPatch) -> None:
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
        kept, full = _decided(drawn.snapshot, demand, drawn.options), decide(drawn.snapshot, demand, drawn.options)
        assert (kept.actions, kept.rows) == (full.actions, full.rows), seed
    assert complete > FLEETS // 6
    assert credited > complete + FLEETS // 6


def test_a_cluster_that_it_credited_can_lose_machines_to_another_one() -> None:
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
        kept, full = _decided(Snapshot.of(machines), demand, options), decide(Snapshot.of(machines), demand, options)
        assert (kept.actions, kept.rows) == (full.actions, full.rows), seed
        preempted += sum(len(row.victims) for row in kept.rows)
    assert preempted
