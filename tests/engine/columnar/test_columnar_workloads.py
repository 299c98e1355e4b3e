"""The workloads of the benchmarks, at a size that the reference engine can answer, decided alike by both engines."""

from collections.abc import Callable

import pytest

from bench.engine_fleets import Workload, fleet_workload, gangs, inversions, one_type_fleet, shrink, steady
from bigfleet.engine.columnar.engine import ColumnarEngine
from bigfleet.engine.columns.objects import snapshot_of
from bigfleet.engine.reference import decide as reference

WORKLOADS: dict[str, Callable[[], Workload]] = {
    "W1 aggregated": lambda: steady(3_000, is_raw=False),
    "W1 raw": lambda: steady(1_500, is_raw=True),
    "W3": lambda: inversions(2_000),
    "W4": lambda: shrink(3_000),
    "W5": lambda: one_type_fleet(2_000),
    "W8": lambda: fleet_workload(4_000, 8),
    "W8, one cluster": lambda: fleet_workload(3_000, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKLOADS)
def test_both_engines_decide_a_workload_alike(name: str) -> None:
    workload = WORKLOADS[name]()
    view = workload.store.snapshot()

    decision = ColumnarEngine().decide(view, workload.demand, workload.options)

    assert reference.decide(snapshot_of(view), workload.demand, workload.options) == decision


def test_the_gangs_of_w2_are_as_many_as_the_workload_says() -> None:
    workload = gangs()

    assert len(workload.store) == 18_000
    assert len(workload.demand) == 2_580
