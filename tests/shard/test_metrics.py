"""Which figures a shard exports, and what they count (docs/spec/shard.md §14)."""

import asyncio

import pytest
from prometheus_client.metrics import MetricWrapperBase

from bigfleet.model.frames import CAPABILITY_NEED_STATUS
from bigfleet.model.states import MachineState
from tests.shard.world import ScriptedProvider, World, machine, need

pytestmark = pytest.mark.virtual_time

S = MachineState


def labelled(world: World, name: str) -> dict[tuple[str, ...], float]:
    """Return the samples of a gauge by the values of its labels."""
    return {
        tuple(value for _label, value in sorted(sample.labels.items())): sample.value
        for family in world.registry.collect()
        for sample in family.samples
        if sample.name == f"bigfleet_shard_{name}"
    }


@pytest.mark.rule("shard 14/2")
async def test_every_bounded_label_is_exported_from_the_start_at_zero() -> None:
    world = World()

    assert set(labelled(world, "shortfalls_aged")) == {("1-9",), ("10-59",), ("60-299",), ("300+",)}
    assert {("unspecified",), ("0",), ("pinned",)} <= set(labelled(world, "demand_machines"))
    zeros = ("demand_machines", "shortfalls_aged", "machines_unjoined", "clusters_silent")
    assert {value for name in zeros for value in labelled(world, name).values()} == {0}


@pytest.mark.rule("shard 14/2")
async def test_every_label_that_has_an_end_of_values_starts_with_all_of_them() -> None:
    """So that a rate has a zero to begin with; labels with the ids of clusters have none."""
    world = World()
    labels = {
        name: metric._labelnames
        for name, metric in vars(world.shard.metrics).items()
        if isinstance(metric, MetricWrapperBase)
    }
    samples = {name: len(getattr(world.shard.metrics, name)._metrics) for name, names in labels.items() if names}

    assert {name for name, count in samples.items() if not count} == {
        "observed_jumps",
        "provider_rpc",
        "rollups_rejected",
        "rollup_quarantined",
        "shortfall_rows",
    }
    assert all(len(labels[name]) > 1 or labels[name] == ("cluster",) for name, count in samples.items() if not count)


@pytest.mark.rule("shard 14/2")
async def test_combinations_of_labels_exist_once_they_occur() -> None:
    """A shortfall that ends leaves its series at zero."""
    world = World(ScriptedProvider())
    operator = world.connect("c1")
    await world.cycle()
    assert not labelled(world, "shortfall_rows")
    operator.report(need("c1", "4"))
    await world.cycle()
    assert list(labelled(world, "shortfall_rows").values()) == [1]
    operator.report()
    await world.cycle()

    assert list(labelled(world, "shortfall_rows").values()) == [0]


@pytest.mark.rule("shard 14/2")
async def test_machines_of_no_capacity_type_are_not_exported_while_there_are_none() -> None:
    world = World()
    unknown = {labels for labels in labelled(world, "inventory_machines") if "Unspecified" in labels}

    assert unknown == set()
    assert len(labelled(world, "inventory_machines")) == 8 * 4


@pytest.mark.rule("shard 14/6")
async def test_demand_counts_held_machines_and_those_of_the_cheapest_class_that_would_cover_the_rest() -> None:
    """Two are held; of 24 cpu that are missing the cheap class of 8 cpu would need three, though none is free."""
    world = World(ScriptedProvider())
    world.provider.add(
        *(machine(f"m{i}", S.IDLE) for i in range(2)),
        machine("dear", S.CONFIGURED, cluster="c2", allocatable={"cpu": "24"}, price_usd_per_hour=9.0),
        machine("cheap", S.CONFIGURED, cluster="c2", allocatable={"cpu": "8"}, price_usd_per_hour=0.5),
    )
    world.connect("c1").report(need("c1", "32", interruption_bucket=2))
    await world.cycle()

    assert labelled(world, "demand_machines")[("0.5",)] == 2 + 3


@pytest.mark.rule("shard 14/6")
async def test_demand_that_no_class_covers_is_counted_in_min_units() -> None:
    """At least one machine per short row."""
    world = World(ScriptedProvider())
    world.connect("c1").report(need("c1", "5"), need("c1", "500m", priority=1))
    await world.cycle()

    assert labelled(world, "demand_machines")[("unspecified",)] == 5 + 1


@pytest.mark.rule("shard 14/7")
async def test_shortfalls_are_told_by_age_and_rows_by_reason_and_class() -> None:
    world = World(ScriptedProvider())
    operator = world.connect("c1")
    operator.report(need("c1", "4", priority=1_000_000), need("c1", "4", priority=1))
    for _ in range(12):
        await world.cycle()

    assert world.metric("shortfalls_aged", bucket="10-59") == world.metric("shortfalls") == 2
    assert world.metric("shortfall_rows", **{"reason": "no_matching_supply", "class": "critical"}) == 1
    assert world.metric("shortfall_rows", **{"reason": "no_matching_supply", "class": "other"}) == 1


@pytest.mark.rule("shard 14/7")
async def test_what_is_met_again_leaves_every_gauge() -> None:
    world = World(ScriptedProvider())
    operator = world.connect("c1", CAPABILITY_NEED_STATUS)
    operator.report(need("c1", "4"))
    await world.cycle()
    operator.report()
    await world.cycle()
    gauges = ("demand_machines", "shortfalls", "shortfalls_aged", "shortfall_rows", "demand_rows")

    assert {value for name in gauges for value in labelled(world, name).values()} == {0}


@pytest.mark.rule("shard 14/9")
async def test_the_fullest_outbox_is_told() -> None:
    world = World(ScriptedProvider())
    world.provider.add(*(machine(f"m{i}", S.CONFIGURED, cluster="c1") for i in range(3)))
    await world.cycle()
    operator = world.connect("c1")
    await asyncio.sleep(1)
    for task in operator._tasks:
        task.cancel()
    for name in ("m0", "m1"):
        world.provider.fail(name, "broken")
    await world.cycle()

    assert world.metric("outbox_frames") == 2
