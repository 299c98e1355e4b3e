"""What a shard reports of its machines and of what it lacks (docs/spec/shard.md §11.1, §11.3)."""

from typing import Any

import numpy as np
import pytest

from bigfleet.engine.columns.store import ColumnSnapshot, ColumnStore
from bigfleet.model.machine import Machine
from bigfleet.model.shard_report import CapacityCount
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.model.vector import parse_vector
from bigfleet.shard.status.reports import CAPACITY_ROWS_MAX, NAMES_MAX, summary_of
from tests.shard.world import ScriptedProvider, World, machine, need

S = MachineState
NOTHING = np.zeros(0, np.int64)


def view_of(*machines: Machine) -> ColumnSnapshot:
    """Return the columns of some machines."""
    store = ColumnStore()
    for each in machines:
        store.insert(each, 0.0 if each.state is S.IDLE else None)
    return store.snapshot()


def kind(name: str, count: int, state: MachineState = S.IDLE, **facts: Any) -> list[Machine]:
    """Return equal machines."""
    return [machine(f"{name}-{number}", state, **facts) for number in range(count)]


@pytest.mark.rule("shard 11.3/1")
def test_total_counts_every_state_and_free_the_idle_and_speculative() -> None:
    view = view_of(
        *kind("i", 2),
        *kind("s", 3, S.SPECULATIVE),
        *kind("c", 4, S.CONFIGURED, cluster="c1"),
        *kind("f", 1, S.FAILED, last_error="x"),
    )
    summary = summary_of(view, NOTHING)

    assert (summary.total_machines, summary.free_machines) == (10, 5)


def test_names_are_counted_in_any_state_largest_first() -> None:
    view = view_of(
        *kind("a", 1, instance_type="a", zone="z2"),
        *kind("c", 2, S.CONFIGURED, cluster="c1", instance_type="b", zone="z1"),
        *kind("d", 2, instance_type="d", zone="z1"),
    )
    summary = summary_of(view, NOTHING)

    assert list(summary.type_counts.items()) == [("b", 2), ("d", 2), ("a", 1)]
    assert list(summary.zone_counts.items()) == [("z1", 4), ("z2", 1)]


@pytest.mark.rule("shard 11.3/2")
def test_names_and_rows_are_bounded() -> None:
    """The largest stay."""
    view = view_of(*(machine(f"m{n:03}", S.IDLE, instance_type=f"t{n:03}") for n in range(300)), machine("x", S.IDLE))
    summary = summary_of(view, NOTHING)

    assert (len(summary.type_counts), len(summary.idle)) == (NAMES_MAX, CAPACITY_ROWS_MAX)
    assert summary.idle[0].instance_type == "t000"


@pytest.mark.rule("shard 11.3/2")
def test_capacity_stands_by_type_zone_and_capacity_type_largest_first() -> None:
    """Then type, zone, capacity type ascending; Idle and Speculative apart."""
    spot = CapacityType.SPOT
    view = view_of(
        *kind("a", 1, zone="zb"),
        *kind("b", 2, zone="za", capacity_type=spot),
        *kind("c", 1, zone="za"),
        *kind("s", 1, S.SPECULATIVE, zone="zc"),
    )
    summary = summary_of(view, NOTHING)

    assert [(row.zone, row.capacity_type, row.count) for row in summary.idle] == [
        ("za", spot, 2),
        ("za", CapacityType.BARE_METAL, 1),
        ("zb", CapacityType.BARE_METAL, 1),
    ]
    assert [row.zone for row in summary.speculative] == ["zc"]


def test_a_rows_allocatable_is_what_each_of_its_machines_has() -> None:
    """Smallest per dimension; a dimension that one lacks is absent."""
    view = view_of(
        *kind("a", 1, allocatable={"cpu": "8", "memory": "16Gi", "gpu": "1"}),
        *kind("b", 1, allocatable={"cpu": "4", "memory": "32Gi"}),
    )

    assert summary_of(view, NOTHING).idle == (
        CapacityCount(
            instance_type="t4",
            zone="za",
            capacity_type=CapacityType.BARE_METAL,
            count=2,
            allocatable=parse_vector({"cpu": "4", "memory": "16Gi"}),
        ),
    )


@pytest.mark.rule("shard 11.3/2")
def test_machines_that_are_taken_count_and_are_not_offered() -> None:
    view = view_of(*kind("a", 3))
    summary = summary_of(view, np.array([0, 2]))

    assert (summary.total_machines, summary.free_machines) == (3, 3)
    assert [row.count for row in summary.idle] == [1]


def test_an_empty_shard_reports_nothing() -> None:
    summary = summary_of(view_of(), NOTHING)

    assert (summary.total_machines, summary.zone_counts, summary.idle) == (0, {}, ())


@pytest.mark.rule("shard 11.3/2")
@pytest.mark.virtual_time
async def test_a_shard_reports_its_last_cycle() -> None:
    """What was claimed is not offered, what was short is lacking; before a cycle there is no report."""
    world = World(ScriptedProvider())
    world.provider.add(*kind("m", 3), machine("other", S.IDLE, instance_type="other"))
    assert world.shard.report() is None
    world.connect("c1").report(need("c1", "4"), need("c1", "400", priority=5))
    await world.cycle()
    report = world.shard.report()
    assert report is not None

    assert (report.cycle, report.summary.total_machines) == (1, 4)
    assert [(row.instance_type, row.count) for row in report.summary.idle] == [("other", 1)]
    assert [(entry.priority, entry.age_cycles) for entry in report.shortfalls] == [(5, 1)]
