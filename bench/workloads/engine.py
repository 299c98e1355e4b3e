"""What is timed on the engine's workloads W1 to W6, W8 and W9, on the columnar engine (docs/spec/benchmarks.md).

A decision is timed from a view to an answer in columns; action and row objects are made when looked at, and are not
part of the time. The yardstick beside it is one NumPy copy of the same columns.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from bench.engine_fleets import (
    TYPES,
    Workload,
    cluster_rows,
    fleet_machines,
    fleet_workload,
    gangs,
    inversions,
    one_type_fleet,
    shrink,
    steady,
    store_of,
    workload_of,
)
from bench.harness import Benchmark, Repeated
from bigfleet.engine.columnar.answer import ActionColumns
from bigfleet.engine.columnar.engine import ColumnarEngine
from bigfleet.engine.columns.objects import snapshot_of
from bigfleet.engine.columns.store import Columns, ColumnSnapshot
from bigfleet.engine.decision import Action, Decision
from bigfleet.engine.reference import decide as reference
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import HostRef, Machine
from bigfleet.model.states import MachineState
from bigfleet.shard.sessions.demand import NeedsTable

CLUSTERS = 100
COLUMN_BYTES = sum(column.itemsize for column in Columns.empty(0))

# ---- what is timed -----------------------------------------------------------------------------------------------


def columns_of(decision: Decision) -> ActionColumns:
    """Return the actions in columns."""
    actions: Sequence[Action] = decision.actions
    assert isinstance(actions, ActionColumns), "the columns could not hold the workload"
    return actions


def summary(decision: Decision) -> list[tuple[str, int]]:
    """Return how many actions there are of each kind, and a sum over their machines: what a time is printed beside."""
    actions = columns_of(decision)
    counts = [(kind.label, count) for kind, count in sorted(actions.counts().items()) if count]
    machines = actions.machines().astype(np.int64)
    return [*counts, ("machines", int((machines * np.arange(1, len(machines) + 1) % 1_000_003).sum()))]


def whole_decision(
    name: str, machines: int, rows: int, workload: Callable[[], Workload], target_ms: float | None
) -> Benchmark:
    """A whole decision from a snapshot and its orders; of the one before, only what matching said is kept."""

    def prepare() -> Callable[[], object]:
        made, engine = workload(), ColumnarEngine(is_incremental=False)
        assert len(made.demand) == rows
        view = made.store.snapshot()
        return lambda: summary(engine.decide(view, made.demand, made.options))

    return Benchmark(
        name=name,
        size=f"{machines:,} machines, {rows:,} rows",
        prepare=prepare,
        items=machines,
        column_bytes=machines * COLUMN_BYTES,
        is_slow=machines > 20_000,
        target_ms=target_ms,
    )


def next_decision(name: str, machines: int, rows: int, workload: Callable[[], Workload]) -> Benchmark:
    """The decision after one machine was written again: view, orders and credits are followed."""

    def prepare() -> Repeated:
        made, engine = workload(), ColumnarEngine()
        assert len(made.demand) == rows
        views: list[ColumnSnapshot] = []

        def renew() -> None:
            made.store.update(made.witness, made.witness_idle_since)
            views[:] = [made.store.snapshot()]

        return Repeated(renew, lambda: summary(engine.decide(views[0], made.demand, made.options)))

    return Benchmark(
        name=f"{name}, one machine written",
        size=f"{machines:,} machines, {rows:,} rows",
        prepare=prepare,
        items=machines,
        column_bytes=machines * COLUMN_BYTES,
        is_slow=machines > 20_000,
    )


def small_fleet(machines: int) -> Benchmark:
    """W8 at a size that both engines answer, decided and with every action and row looked at."""

    def looked_at(decision: Decision) -> object:
        return [action.machine_id for action in decision.actions], [row.deficit for row in decision.rows]

    def prepare() -> Callable[[], object]:
        made, engine = fleet_workload(machines, 5), ColumnarEngine(is_incremental=False)
        view = made.store.snapshot()
        return lambda: looked_at(engine.decide(view, made.demand, made.options))

    def reference_work() -> Callable[[], object]:
        made = fleet_workload(machines, 5)
        snapshot = snapshot_of(made.store.snapshot())
        return lambda: looked_at(reference.decide(snapshot, made.demand, made.options))

    return Benchmark(
        name="W8 fleet, all objects made",
        size=f"{machines:,} machines",
        prepare=prepare,
        items=machines,
        column_bytes=machines * COLUMN_BYTES,
        reference=reference_work,
    )


def first_decision(machines: int) -> Benchmark:
    """W8 with a new engine: nothing is known of machines, rows or vocabulary, and everything is sorted."""

    def prepare() -> Callable[[], object]:
        made = fleet_workload(machines)
        view = made.store.snapshot()
        return lambda: summary(ColumnarEngine().decide(view, made.demand, made.options))

    return Benchmark(
        name="W8 fleet, new engine",
        size=f"{machines:,} machines",
        prepare=prepare,
        items=machines,
        column_bytes=machines * COLUMN_BYTES,
        is_slow=True,
    )


class Churn:
    """W9: W8 in which some clusters change: their rows by ±2 %, and 2 % of their machines change hands.

    In turn the machines are given back, with less demand, and bound again, with more.
    """

    def __init__(self, machines: int, changed: int) -> None:
        fleet = fleet_machines(machines, CLUSTERS)
        self._made = workload_of(fleet, CLUSTERS)
        self._per_cluster = machines * 8 // 10 // CLUSTERS
        self._names = [ClusterId(f"c-{c:03}") for c in range(changed)]
        self._turn = 0
        self.options = self._made.options
        #: Demand is listed by a shard's own table: rows that are reported again as they were stay the same objects.
        self._table = NeedsTable()
        for c in range(CLUSTERS):
            self._table.replace(f"c-{c:03}", cluster_rows(c, self._per_cluster), now_unix_nanos=1)
        self.demand = self._table.in_list_order()
        self.view = self._made.store.snapshot()
        names = set(self._names)
        self._movers = [machine for machine in fleet if machine.cluster in names][::50]

    def change(self) -> None:
        """Change what changes between two decisions; nothing when no cluster does."""
        if not self._names:
            return
        self._turn += 1
        is_leaner = self._turn % 2 == 1
        percent = 103 if is_leaner else 107
        for c, name in enumerate(self._names):
            rows = cluster_rows(c, self._per_cluster, percent=percent)
            self._table.replace(name, rows, now_unix_nanos=1 + self._turn)
        self.demand = self._table.in_list_order()
        for machine in self._movers:
            freed = replace(machine, state=MachineState.IDLE, cluster=ClusterId(""))
            self._made.store.update(freed if is_leaner else machine, 0.0 if is_leaner else None)
        self.view = self._made.store.snapshot()


def churn(machines: int, *, per_mille: int, target_ms: float | None = None) -> Benchmark:
    """W9: the incremental decision; each is compared with a whole one, outside of what is timed."""

    def prepare() -> Repeated:
        world, engine = Churn(machines, CLUSTERS * per_mille // 1000), ColumnarEngine()
        last: list[Decision] = []

        def change() -> None:
            if last:
                judge = ColumnarEngine(is_incremental=False)
                full = columns_of(judge.decide(world.view, world.demand, world.options))
                assert np.array_equal(columns_of(last[-1]).machines(), full.machines()), "not what a whole one decides"
            # A shard answers from the last decision until the next one is made.
            del last[:-1]
            world.change()

        def work() -> object:
            last.append(engine.decide(world.view, world.demand, world.options))
            return len(columns_of(last[-1])) > 0

        return Repeated(change, work)

    return Benchmark(
        name="W9 churn",
        size=f"{machines:,} machines, {per_mille / 10:g} % of clusters",
        prepare=prepare,
        items=machines,
        column_bytes=machines * COLUMN_BYTES,
        is_slow=True,
        target_ms=target_ms,
    )


def snapshots(machines: int, changed: int) -> Benchmark:
    """W6: a view after some rows changed; the writes themselves are not timed."""
    states = (MachineState.IDLE, MachineState.CONFIGURED, MachineState.CONFIGURING, MachineState.DRAINING)

    def prepare() -> Repeated:
        fleet = [
            Machine(
                id=MachineId(f"seed-{i}"),
                state=states[i % 4],
                host=HostRef("bench", f"host-{i}"),
                cluster=ClusterId("" if i % 4 == 0 else f"c-{i % 50}"),
                instance_type=TYPES[i % 5][0],
                zone="abc"[i % 3],
                allocatable=TYPES[i % 5][1],
            )
            for i in range(machines)
        ]
        store = store_of(fleet, machines).store
        views: list[ColumnSnapshot] = [store.snapshot()]
        turn = [0]

        def change() -> None:
            turn[0] += 1
            for machine in fleet[:changed]:
                store.update(replace(machine, assigned_priority=turn[0] % 7))
            # The engine holds the newest view; older ones are gone.
            views[:] = views[-1:]

        def work() -> int:
            views.append(store.snapshot())
            return len(views[-1])

        return Repeated(change, work)

    return Benchmark(
        name=f"W6 columns snapshot, {COLUMN_BYTES} bytes a machine",
        size=f"{machines:,} machines, {changed:,} changed",
        prepare=prepare,
        items=machines,
        column_bytes=machines * COLUMN_BYTES,
        is_slow=True,
        # The target for 500,000 machines is a time, or O(changed): 50,000 changed rows are a tenth of the fleet.
        target_ms=6.0 if machines == 500_000 and changed < machines // 10 else None,
    )


FLEET_ROWS = 100 * len(cluster_rows(0, 4_000))
DECISIONS: tuple[tuple[str, int, int, Callable[[], Workload], float | None], ...] = (
    ("W1 steady, aggregated", 50_000, 500, lambda: steady(50_000, is_raw=False), None),
    ("W1 steady, aggregated", 500_000, 500, lambda: steady(500_000, is_raw=False), 10.0),
    ("W1 steady, raw", 500_000, 50_000, lambda: steady(500_000, is_raw=True), 100.0),
    ("W2 gangs", 18_000, 2_580, gangs, 10.0),
    ("W3 inversions", 100_000, 100, inversions, 10.0),
    ("W4 shrink", 500_000, 150, shrink, 20.0),
    ("W5 one type", 450_000, 50, one_type_fleet, 5.0),
    ("W8 fleet", 500_000, FLEET_ROWS, fleet_workload, 50.0),
)
ENGINE = (
    *(
        benchmark
        for name, machines, rows, workload, target_ms in DECISIONS
        for benchmark in (
            whole_decision(name, machines, rows, workload, target_ms),
            next_decision(name, machines, rows, workload),
        )
    ),
    first_decision(500_000),
    small_fleet(5_000),
    *(churn(500_000, per_mille=share, target_ms=target) for share, target in ((0, 1.0), (10, 5.0), (100, None))),
    *(snapshots(machines, changed) for machines in (60_000, 500_000) for changed in (0, 1_000, 50_000)),
)
