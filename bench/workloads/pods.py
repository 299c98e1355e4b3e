"""Times the decision over pods: at a start, and on W8 and W9 with demand shapes (docs/spec/benchmarks.md)."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from bench.engine_fleets import Workload, fleet_workload, in_list_order, options_of, store_of
from bench.harness import Benchmark, Repeated
from bench.workloads.engine import COLUMN_BYTES, Churn
from bigfleet.engine.columnar.kernels import pod_credit
from bigfleet.engine.columns.store import ColumnSnapshot
from bigfleet.engine.decision import Decision, Options
from bigfleet.engine.demand_order import ListedRows
from bigfleet.engine.shapes.columns.actions import PodActions
from bigfleet.engine.shapes.columns.results import PodRows
from bigfleet.engine.shapes.pod_engine import PodEngine
from bigfleet.model import labels
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import HostRef, Machine
from bigfleet.model.need import Need, amounts_of
from bigfleet.model.profile import Operator, Profile, Requirement
from bigfleet.model.shapes import DemandShape
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.model.vector import scale
from bigfleet.shard.sessions.demand import NeedsTable


def with_shapes(need: Need, shapes: int) -> Need:
    """Return the row as pods of its min unit, in so many shapes of falling size, each with as many pods."""
    name, milli = next(iter(need.min_unit.items()))
    pods = max(shapes, need.aggregate[name] // milli)
    found = tuple(
        DemandShape({d: max(1, each * (shapes - number) // shapes) for d, each in need.min_unit.items()}, count, 0)
        for number, count in enumerate(pods // shapes + (number < pods % shapes) for number in range(shapes))
    )
    amounts = amounts_of(found, aggregate={}, min_unit={})
    return replace(need, aggregate=amounts.aggregate, min_unit=amounts.min_unit, shapes=amounts.shapes)


def new_engine() -> PodEngine:
    """Return an engine that knows nothing, with the compiled loops, as a shard has it."""
    return PodEngine(loops=pod_credit)


def summary(decision: Decision) -> object:
    """Return what a checksum is made of, from columns: actions of each kind, their machines, the short rows."""
    actions, rows = decision.actions, decision.rows
    assert isinstance(actions, PodActions)
    assert isinstance(rows, PodRows)
    machines = actions.machines()
    counts = [(kind.label, count) for kind, count in sorted(actions.counts().items()) if count]
    weighted = int((machines * np.arange(1, len(machines) + 1) % 1_000_003).sum())
    return counts, weighted, len(rows), [row.need.key for row in rows.short()]


def everything(decision: Decision) -> object:
    """Return what a checksum is made of, of every action and every row as an object."""
    return [action.machine_id for action in decision.actions], [bool(row.deficit) for row in decision.rows]


def pod_fleet(machines: int, shapes: int) -> Benchmark:
    """W8 with shapes, by an engine that knows nothing."""

    def prepare() -> Callable[[], object]:
        made = fleet_workload(machines)
        view, demand = made.store.snapshot(), tuple(with_shapes(need, shapes) for need in made.demand)
        return lambda: summary(new_engine().decide(view, demand, made.options))

    return Benchmark(
        name=f"W8 fleet, {shapes} shapes a row",
        size=f"{machines:,} machines",
        prepare=prepare,
        items=machines,
        column_bytes=machines * COLUMN_BYTES,
        is_slow=True,
    )


#: cpus, and GiB of memory for each.
_TYPES = {"m6i.2xlarge": (8, 4), "c6i.4xlarge": (16, 2), "r6i.2xlarge": (8, 8), "m6i.8xlarge": (32, 4)}


def _held_machine(number: int, clusters: int) -> Machine:
    name, (cpus, memory) = list(_TYPES.items())[number // clusters % len(_TYPES)]
    return Machine(
        id=MachineId(f"seed-{number:07}"),
        state=MachineState.CONFIGURED,
        host=HostRef("bench", f"host-{number}"),
        cluster=ClusterId(f"c-{number % clusters:04}"),
        instance_type=name,
        zone="abc"[number // clusters // 5 % 3],
        capacity_type=CapacityType.ON_DEMAND,
        allocatable={"cpu": f"{cpus}", "memory": f"{cpus * memory}Gi", "pods": "110"},
        price_usd_per_hour=0.05 * cpus,
        assigned_reclamation_penalty_dollars=float(number % 3),
    )


def _held_row(cluster: int, number: int, cpus: int, shapes: int) -> Need:
    """Return a row of about so many cpus; one in five is limited to two zones."""
    zones = (Requirement(labels.ZONE, Operator.IN, ("a", "b")),) if number % 5 == 4 else ()
    unit = {"cpu": (500, 1000, 2000, 4000)[number % 4], "memory": (2 << 30) * 1000}
    need = Need(
        cluster=ClusterId(f"c-{cluster:04}"),
        profile=Profile(requirements=zones, priority=100 + number, interruption_bucket=5, reclamation_bucket=4),
        aggregate=scale(unit, max(shapes, cpus * 1000 // unit["cpu"])),
        min_unit=unit,
        arrival_unix_nanos=1 + number,
    )
    return with_shapes(need, shapes)


def held_fleet(machines: int, clusters: int, rows: int, shapes: int) -> Workload:
    """Return a fleet of Configured machines of which every cluster needs about 80 %."""
    store = store_of((_held_machine(number, clusters) for number in range(machines)), machines)
    # 16 cpus a machine; the shapes of a row have (shapes + 1) / (2 × shapes) of its min unit on average.
    cpus = 16 * machines // clusters * 8 // 10 // rows * 2 * shapes // (shapes + 1)
    demand = [_held_row(c, number, cpus, shapes) for c in range(clusters) for number in range(rows)]
    return Workload(store, in_list_order(demand), options_of(demand))


def as_listed(demand: Sequence[Need]) -> ListedRows:
    """Return rows as a shard hands them to its engine: from a demand table, which read them when they arrived."""
    table, by_cluster = NeedsTable(), defaultdict[str, list[Need]](list)
    for need in demand:
        by_cluster[need.cluster].append(need)
    for cluster, rows in by_cluster.items():
        table.replace(cluster, rows, now_unix_nanos=1)
    return table.in_list_order()


def pod_start(
    machines: int, clusters: int, rows: int, shapes: int, *, is_read: bool = False, is_bare: bool = False
) -> Benchmark:
    """The first cycle after a start: every pod runs, and the engine knows nothing.

    Like a decision over aggregates it is timed to an answer in columns; with `is_read`, every action and row is made.
    Rows come from a demand table; with `is_bare` they are mere objects, which the decision has to read.
    """
    note = ", all objects made" if is_read else ", rows not read before" if is_bare else ""

    def prepare() -> Callable[[], object]:
        made = held_fleet(machines, clusters, rows, shapes)
        view, demand = made.store.snapshot(), tuple(made.demand) if is_bare else as_listed(made.demand)

        def work() -> object:
            decision = new_engine().decide(view, demand, made.options)
            assert isinstance(decision.rows, PodRows)
            assert not decision.rows.short(), "every pod has a place"
            return everything(decision) if is_read else summary(decision)

        return work

    return Benchmark(
        name=f"Pods at a start, {shapes} shapes a row{note}",
        size=f"{machines:,} machines, {clusters:,} clusters, {clusters * rows:,} rows",
        prepare=prepare,
        items=machines,
        column_bytes=machines * COLUMN_BYTES,
        is_slow=True,
    )


def pod_churn(machines: int, *, per_mille: int) -> Benchmark:
    """W9 with four shapes a row; each decision is compared with a whole one, outside of what is timed."""

    def prepare() -> Repeated:
        world, engine = Churn(machines, 100 * per_mille // 1000), new_engine()
        known: dict[int, tuple[Need, Need]] = {}
        last: list[tuple[ColumnSnapshot, Sequence[Need], Options, Decision]] = []
        demand: list[tuple[Need, ...]] = []

        def shaped(need: Need) -> Need:
            if id(need) not in known or known[id(need)][0] is not need:
                known[id(need)] = (need, with_shapes(need, 4))
            return known[id(need)][1]

        def change() -> None:
            if last:
                view, rows, options, decision = last.pop()
                full = new_engine().decide(view, rows, options)
                assert everything(decision) == everything(full), "not what a whole one decides"
            world.change()
            if per_mille or not demand:
                demand[:] = [tuple(shaped(need) for need in world.demand)]

        def work() -> object:
            decision = engine.decide(world.view, demand[0], world.options)
            last.append((world.view, demand[0], world.options, decision))
            return len(decision.rows)

        return Repeated(change, work)

    return Benchmark(
        name="W9 churn, 4 shapes a row",
        size=f"{machines:,} machines, {per_mille / 10:g} % of clusters",
        prepare=prepare,
        items=machines,
        column_bytes=machines * COLUMN_BYTES,
        is_slow=True,
    )


POD_WORKLOADS = (
    pod_start(50_000, 1_000, 10, 4),
    *(pod_start(500_000, 500, 50, shapes) for shapes in (1, 4, 8)),
    pod_start(500_000, 500, 50, 4, is_bare=True),
    pod_start(500_000, 500, 50, 4, is_read=True),
    *(pod_fleet(50_000, shapes) for shapes in (1, 4, 8)),
    *(pod_churn(50_000, per_mille=share) for share in (0, 10, 100)),
)
