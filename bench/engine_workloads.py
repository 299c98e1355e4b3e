"""What is timed on the engine's workloads W1 to W6, W8 and W9, on the columnar engine (docs/spec/benchmarks.md).

A decision is timed from a view to an answer in columns; action and row objects are made when looked at, and are not
part of the time. The yardstick beside it is one NumPy copy of the same columns.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from bench.engine_fleets import (
    TYPES,
    Workload,
    cluster_rows,
    fleet_workload,
    gangs,
    in_list_order,
    inversions,
    one_type_fleet,
    shrink,
    steady,
    store_of,
)
from bench.harness import Benchmark, Repeated
from bigfleet.engine import reference
from bigfleet.engine.columnar.answer import ActionColumns
from bigfleet.engine.columnar.engine import ColumnarEngine
from bigfleet.engine.columnar.objects import snapshot_of
from bigfleet.engine.columnar.store import Columns, ColumnSnapshot
from bigfleet.engine.decision import Action, Decision
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import Host, Machine
from bigfleet.model.states import MachineState

COLUMN_BYTES = sum(column.itemsize for column in Columns.empty(0))

# ---- what is timed -----------------------------------------------------------------------------------------------


def summary(decision: Decision) -> list[tuple[str, int]]:
    """Return how many actions there are of each kind: what a time is printed beside."""
    actions: Sequence[Action] = decision.actions
    assert isinstance(actions, ActionColumns), "the columns could not hold the workload"
    return [(kind.label, count) for kind, count in sorted(actions.counts().items()) if count]


def decision_of(name: str, machines: int, rows: int, workload: Callable[[], Workload]) -> Benchmark:
    """One decision from a view that the engine has not seen, orders included; matching is kept from the call before."""

    def prepare() -> Repeated:
        made, engine = workload(), ColumnarEngine()
        assert len(made.demand) == rows
        views: list[ColumnSnapshot] = []

        def renew() -> None:
            # A machine that is written again makes a new view, so nothing about the view itself is kept.
            made.store.update(made.witness, made.witness_idle_since)
            views[:] = [made.store.snapshot()]

        return Repeated(renew, lambda: summary(engine.decide(views[0], made.demand, made.options)))

    return Benchmark(
        name=name,
        size=f"{machines:,} machines, {rows:,} rows",
        prepare=prepare,
        items=machines,
        column_bytes=machines * COLUMN_BYTES,
        is_slow=machines > 20_000,
    )


def kept_orders(name: str, machines: int, rows: int, workload: Callable[[], Workload]) -> Benchmark:
    """The same with the view's orders at hand, as after a cycle that changed demand alone."""

    def prepare() -> Repeated:
        made, engine = workload(), ColumnarEngine()
        assert len(made.demand) == rows
        view = made.store.snapshot()
        silent = [0]

        def change() -> None:
            silent[0] += 1

        def work() -> object:
            # A cluster more that has reported is another input: the last answer cannot be given again.
            options = replace(made.options, reported=made.options.reported | {f"silent-{silent[0]}"})
            return summary(engine.decide(view, made.demand, options))

        return Repeated(change, work)

    return Benchmark(
        name=f"{name}, orders kept",
        size=f"{machines:,} machines, {rows:,} rows",
        prepare=prepare,
        items=machines,
        column_bytes=machines * COLUMN_BYTES,
        is_slow=machines > 20_000,
    )


def small_fleet(machines: int, *, is_reference: bool) -> Benchmark:
    """W8 at a size that both engines answer, decided and with every action and row looked at."""

    def prepare() -> Callable[[], object]:
        made = fleet_workload(machines, 5)
        view, engine = made.store.snapshot(), ColumnarEngine()
        snapshot = snapshot_of(view)

        def work() -> object:
            if is_reference:
                decision = reference.decide(snapshot, made.demand, made.options)
            else:
                decision = engine.decide(view, made.demand, made.options)
            return [action.machine_id for action in decision.actions], [row.deficit for row in decision.rows]

        return work

    return Benchmark(
        name=f"W8 fleet, {'reference engine' if is_reference else 'columns, all objects made'}",
        size=f"{machines:,} machines",
        prepare=prepare,
        items=machines,
        column_bytes=machines * COLUMN_BYTES,
    )


def cold_fleet(machines: int) -> Benchmark:
    """W8 with a new engine: nothing is known of machines, rows or vocabulary."""

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


def churn(machines: int, *, per_mille: int) -> Benchmark:
    """W9: W8 again after some clusters changed: their rows anew by ±2 %, and as many of their machines."""

    def prepare() -> Repeated:
        made, engine = fleet_workload(machines), ColumnarEngine()
        changed = 100 * per_mille // 1000
        turn, demands, views = [0], [list(made.demand)], [made.store.snapshot()]

        def change() -> None:
            turn[0] += 1
            if not changed:
                return
            percent = (103, 107)[turn[0] % 2]
            names = {f"c-{c:03}" for c in range(changed)}
            rows = [row for c in range(changed) for row in cluster_rows(c, machines * 8 // 10 // 100, percent=percent)]
            kept = [need for need in made.demand if need.cluster not in names]
            demands[:] = [in_list_order(kept + rows)]
            made.store.update(made.witness, made.witness_idle_since)
            views[:] = [made.store.snapshot()]

        def work() -> object:
            decision = engine.decide(views[0], demands[0], made.options)
            return len(summary(decision))

        return Repeated(change, work)

    return Benchmark(
        name="W9 churn",
        size=f"{machines:,} machines, {per_mille / 10:g} % of clusters",
        prepare=prepare,
        items=machines,
        column_bytes=machines * COLUMN_BYTES,
        is_slow=True,
    )


def snapshots(machines: int, changed: int) -> Benchmark:
    """W6: a view after some rows changed; the writes themselves are not timed."""
    states = (MachineState.IDLE, MachineState.CONFIGURED, MachineState.CONFIGURING, MachineState.DRAINING)

    def prepare() -> Repeated:
        fleet = [
            Machine(
                id=MachineId(f"seed-{i}"),
                state=states[i % 4],
                host=Host("bench", f"host-{i}"),
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
    )


FLEET_ROWS = 100 * len(cluster_rows(0, 4_000))
DECISIONS: tuple[tuple[str, int, int, Callable[[], Workload]], ...] = (
    ("W1 steady, aggregated", 50_000, 500, lambda: steady(50_000, is_raw=False)),
    ("W1 steady, aggregated", 500_000, 500, lambda: steady(500_000, is_raw=False)),
    ("W1 steady, raw", 500_000, 50_000, lambda: steady(500_000, is_raw=True)),
    ("W2 gangs", 18_000, 2_580, gangs),
    ("W3 inversions", 100_000, 100, inversions),
    ("W4 shrink", 500_000, 150, shrink),
    ("W5 one type", 450_000, 50, one_type_fleet),
    ("W8 fleet", 500_000, FLEET_ROWS, fleet_workload),
)
ENGINE = (
    *(make(*decision) for decision in DECISIONS for make in (decision_of, kept_orders)),
    cold_fleet(500_000),
    *(small_fleet(5_000, is_reference=is_reference) for is_reference in (True, False)),
    *(churn(500_000, per_mille=share) for share in (0, 10, 100)),
    *(snapshots(machines, changed) for machines in (60_000, 500_000) for changed in (0, 1_000, 50_000)),
)
