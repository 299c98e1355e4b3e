"""W8 and W9 with demand shapes: the decision over pods, whole and incremental (docs/spec/benchmarks.md)."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from bench.engine_fleets import fleet_workload
from bench.harness import Benchmark, Repeated
from bench.workloads.engine import COLUMN_BYTES, Churn
from bigfleet.engine.columns.store import ColumnSnapshot
from bigfleet.engine.decision import Decision, Options
from bigfleet.engine.shapes.pod_engine import PodEngine
from bigfleet.model.need import Need, amounts_of
from bigfleet.model.shapes import DemandShape


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


def summary(decision: Decision) -> object:
    """Return what a checksum is made of."""
    return [action.machine_id for action in decision.actions], [bool(row.deficit) for row in decision.rows]


def pod_fleet(machines: int, shapes: int) -> Benchmark:
    """W8 with shapes, by an engine that knows nothing."""

    def prepare() -> Callable[[], object]:
        made = fleet_workload(machines)
        view, demand = made.store.snapshot(), tuple(with_shapes(need, shapes) for need in made.demand)
        return lambda: summary(PodEngine().decide(view, demand, made.options))

    return Benchmark(
        name=f"W8 fleet, {shapes} shapes a row",
        size=f"{machines:,} machines",
        prepare=prepare,
        items=machines,
        column_bytes=machines * COLUMN_BYTES,
        is_slow=True,
    )


def pod_churn(machines: int, *, per_mille: int) -> Benchmark:
    """W9 with four shapes a row; each decision is compared with a whole one, outside of what is timed."""

    def prepare() -> Repeated:
        world, engine = Churn(machines, 100 * per_mille // 1000), PodEngine()
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
                full = PodEngine().decide(view, rows, options)
                assert summary(decision) == summary(full), "not what a whole one decides"
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
    *(pod_fleet(50_000, shapes) for shapes in (1, 4, 8)),
    *(pod_churn(50_000, per_mille=share) for share in (0, 10, 100)),
)
