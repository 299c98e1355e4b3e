"""Catalogue and world files: what is wrong is named with its place (docs/spec/provider.md §21)."""

from pathlib import Path

import pytest

from bigfleet.model import labels as keys
from bigfleet.model.states import CapacityType
from bigfleet.provider.backends.simulated.catalogue import CatalogueFault, load_catalogue, parse_catalogue
from bigfleet.provider.backends.simulated.fleet import build_fleet
from bigfleet.provider.backends.simulated.world import (
    CloudWorld,
    WorldFault,
    load_world,
    parse_capacity_type,
    parse_world,
)

HEADER = "architecture,instance_type,vcpu,memory_gib,gpus,gpu_model,on_demand_usd_per_hour,comment"
GOOD = "amd64,a.1,4,16,0,,0.2,x"

BAD_ROWS = [
    ("amd64,a.1,four,16,0,,0.2,x", "line 3: column vcpu: 'four' is not a whole number from 1 to"),
    ("amd64,a.2,4,-1,0,,0.2,x", "line 3: column memory_gib: '-1' is not"),
    ("amd64,a.2,4,nan,0,,0.2,x", "line 3: column memory_gib: 'nan' is not"),
    ("amd64,a.2,4,16,-2,,0.2,x", "line 3: column gpus: '-2' is not"),
    ("amd64,a.2,4,16,2,,0.2,x", "line 3: column gpu_model: '' is not the model of the GPUs"),
    ("amd64,a.2,4,16,0,,free,x", "line 3: column on_demand_usd_per_hour: 'free' is not a price above 0"),
    ("amd64,a.2,0,16,0,,0.2,x", "line 3: column vcpu: '0' is not a whole number from 1 to 1000000"),
    ("amd64,a.2,4,1e9,0,,0.2,x", "line 3: column memory_gib: '1e9' is not a number of GiB up to 1000000"),
    ("amd64,a.2,4,0.001,0,,0.2,x", "line 3: column memory_gib: '0.001' is not a number of GiB"),
    (",a.2,4,16,0,,0.2,x", "line 3: column architecture: '' is not"),
    ("amd64,a b,4,16,0,,0.2,x", "line 3: column instance_type: 'a b' is not"),
    ("amd64,a.1,4,16,0,,0.2,x", "line 3: column instance_type: 'a.1' was there before"),
    ("amd64,a.2", "line 3: column vcpu: '' is not"),
]


@pytest.mark.parametrize(("row", "message"), BAD_ROWS)
def test_a_bad_row_is_named_by_file_line_and_column(row: str, message: str) -> None:
    with pytest.raises(CatalogueFault) as caught:
        parse_catalogue([HEADER, GOOD, row], "types.csv")
    assert str(caught.value).startswith(f"types.csv: {message}")


def test_missing_columns_and_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CatalogueFault, match=r"types.csv: line 1: column vcpu is missing"):
        parse_catalogue(["instance_type,memory_gib"], "types.csv")
    with pytest.raises(CatalogueFault, match="no instance type"):
        parse_catalogue([HEADER], "types.csv")
    with pytest.raises(CatalogueFault, match=r"nowhere.csv: No such file"):
        load_catalogue(tmp_path / "nowhere.csv")


def test_the_sample_has_shapes_that_pods_get() -> None:
    types = load_catalogue(None)
    assert len(types) == 14
    big = types["gpu-l.96x1024"]
    assert big.allocatable == {"cpu": "92160m", "memory": f"{1024 * 1024 * 9 // 10}Mi", "nvidia.com/gpu": "8"}
    assert big.labels == {keys.ARCH: "amd64", keys.GPU_PRODUCT: "Accelerator-L-80GB"}


BAD_WORLDS = [
    ("colour: blue", "colour"),
    ("pools: [{instance_type: std.2x8, zone: z, count: 1, cout: 2}]", "pools[0]"),
    ("pools: [{instance_type: std.2x8, zone: z, count: one}]", "pools[0].count"),
    ("pools: [{instance_type: std.2x8, zone: z, count: -1}]", "pools[0].count"),
    ("pools: [{instance_type: std.2x8, zone: z, count: 1, capacity_type: gold}]", "pools[0].capacity_type"),
    ("zones: [a]\npools: [{instance_type: std.2x8, zone: z, count: 1}]", "pools[0].zone"),
    ("pools: [{instance_type: std.2x8, zone: z}]", "pools[0]"),
    ("rack_size: 0", "rack_size"),
    ("zones: []", "zones"),
    ("price: {spot_mean: .nan}", "price.spot_mean"),
    ("price: {spot_mean: 2}", "price.spot_mean"),
    ("dwell: {join: {median_seconds: 10, p99_seconds: 5}}", "dwell.join.p99_seconds"),
    ("dwell: {slow_share: 2}", "dwell.slow_share"),
    ("faults: {transient: 1.5}", "faults.transient"),
    ("faults: {gremlins: 1}", "faults"),
    ("interruption: {probabilities: [0]}", "interruption.probabilities"),
    ("stockouts: [{from_seconds: 5, to_seconds: 5}]", "stockouts[0].to_seconds"),
    ("stockouts: [{from_seconds: 5, to_seconds: 6, capacity_type: gold}]", "stockouts[0].capacity_type"),
    ("pools: [", "not YAML"),
    (
        "pools: [{instance_type: std.2x8, zone: z, count: 1, cout: 2}]",
        "pools[0].cout: unknown key; did you mean count?",
    ),
    ("pools: [{instance_type: std.2x8, zone: z}]", "pools[0].count: is missing"),
    ("colour: blue", "colour: unknown key; there are region, zones, rack_size"),
    ("dwell: {join: {median: 10}}", "dwell.join.median: unknown key; there are median_seconds, p99_seconds"),
    ("dwell: {create_spot: {median_seconds: 10}}", "dwell.create_spot.p99_seconds: is missing"),
    (
        "interruption: {waves: [{pool: p, time: 3, share: 1}]}",
        "interruption.waves[0].time: unknown key; there are pool, at_seconds, share",
    ),
    (
        "interruption: {zone_outages: [{zone: a, from: 3, to: 4}]}",
        "interruption.zone_outages[0].from: unknown key; there are zone, from_seconds, to_seconds",
    ),
    ("interruption: {waves: [{pool: p, at_seconds: -1, share: 1}]}", "interruption.waves[0].at_seconds: -1"),
    ("interruption: {waves: [{pool: p, at_seconds: 1, share: 1.5}]}", "interruption.waves[0].share: 1.5 is a"),
    (
        "interruption: {zone_outages: [{zone: a, from_seconds: 3, to_seconds: 3}]}",
        "interruption.zone_outages[0].to_seconds: must be after",
    ),
    ("stockouts: [{from_seconds: .nan, to_seconds: 6}]", "stockouts[0].from_seconds: nan must be finite"),
    ("1: 2", "Expected `str` - at `key`"),
    ("- a", "Expected"),
    ("a: &a [*a]", "a"),
    ("region: 2026-01-01", "region: Expected"),
]


@pytest.mark.parametrize(("text", "place"), BAD_WORLDS)
def test_a_bad_world_is_named_by_file_and_path(text: str, place: str) -> None:
    with pytest.raises(WorldFault) as caught:
        parse_world(text.encode(), "world.yaml")
    assert str(caught.value).startswith("world.yaml: ")
    assert place in str(caught.value)


BAD_POOLS = [
    ("instance_type: unknown, count: 1", r"pools\[0\].instance_type.*give allocatable"),
    ("instance_type: unknown, count: 1, allocatable: {cpu: '4'}", r"pools\[0\].instance_type.*give price_per_hour"),
    ("instance_type: std.2x8, count: 1, price_per_hour: -1", r"pools\[0\]: price_per_hour is -1"),
    ("instance_type: std.2x8, count: 1, price_per_hour: 0", r"pools\[0\]: price_per_hour is 0"),
    ("instance_type: std.2x8, count: 1, interruption_probability: 2", r"pools\[0\]: interruption_probability is 2"),
    ("instance_type: std.2x8, count: 1, labels: {zone: a}", r"pools\[0\]: label 'zone'"),
    ("instance_type: std.2x8, count: 1, allocatable: {cpu: four}", r"pools\[0\]: .*'four'"),
    ("instance_type: 'a b', count: 1, allocatable: {cpu: '4'}, price_per_hour: 1", r"pools\[0\]: id "),
]


@pytest.mark.parametrize(("fields", "message"), BAD_POOLS)
def test_a_pool_that_cannot_be_offered_is_named(fields: str, message: str) -> None:
    world = parse_world(f"pools: [{{{fields}, zone: z}}]".encode(), "w.yaml")
    with pytest.raises(WorldFault, match=message):
        build_fleet(world, load_catalogue(None), "sim")


PLANNED = [
    (
        "waves: [{pool: spot/std.2x8/z, at_seconds: 1, share: 1}]",
        r"^interruption.waves\[0\].pool: there is no pool 'spot/std.2x8/z'; there are on-demand/std.2x8/z$",
    ),
    (
        "zone_outages: [{zone: z, from_seconds: 1, to_seconds: 2}, {zone: y, from_seconds: 1, to_seconds: 2}]",
        r"^interruption.zone_outages\[1\].zone: no machine is in 'y', but in z$",
    ),
]


@pytest.mark.parametrize(("planned", "message"), PLANNED)
def test_what_is_planned_for_nobody_is_refused(planned: str, message: str) -> None:
    text = f"pools: [{{instance_type: std.2x8, zone: z, count: 1}}]\ninterruption: {{{planned}}}"
    with pytest.raises(WorldFault, match=message):
        build_fleet(parse_world(text.encode(), "w.yaml"), load_catalogue(None), "sim")


def test_what_pods_get_is_exact_to_the_mebibyte() -> None:
    rows = ["x86,a.1,3,1.1,0,,0.2,x", "x86,a.2,3,10,0,,0.2,x"]
    types = parse_catalogue([HEADER, *rows], "types.csv")
    assert [dict(kind.allocatable) for kind in types.values()] == [
        {"cpu": "2880m", "memory": "1013Mi"},
        {"cpu": "2880m", "memory": "9216Mi"},
    ]


def test_a_pool_may_say_everything_itself() -> None:
    text = """
    pools:
      - instance_type: rack-server
        zone: dc-1
        count: 2
        capacity_type: bare-metal
        allocatable: {cpu: "96", memory: 380Gi, nvidia.com/gpu: "8"}
        resources: {cpu: "12", memory: 40Gi}
        labels: {topology.bigfleet/rack: own-rack, team: blue}
      - {instance_type: rack-server, zone: dc-1, count: 1, capacity_type: bare_metal, allocatable: {cpu: "4"},
         fixed: false}
    """
    offers = build_fleet(parse_world(text.encode(), "w.yaml"), load_catalogue(None), "sim")
    assert [offer.slot.id for offer in offers] == [f"sim/bare-metal/rack-server/dc-1/00{n}" for n in range(3)]
    assert [offer.slot.fixed for offer in offers] == [True, True, False]
    first = offers[0].slot
    assert first.labels[keys.RACK] == "own-rack"
    assert first.labels["team"] == "blue"
    assert first.labels[keys.CAPACITY_TYPE] == "bare-metal"
    assert dict(first.resources) == {"cpu": "12", "memory": "40Gi"}
    assert all(offer.is_idle_at_start for offer in offers)


@pytest.mark.parametrize("text", ["", "# rack_size: 3\n", "{}"])
def test_a_world_file_without_keys_is_the_default_world(text: str) -> None:
    """Each key has a default, and people comment keys out."""
    assert parse_world(text.encode(), "w.yaml") == CloudWorld()


def test_json_and_yaml_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "w.json").write_text('{"rack_size": 3}')
    (tmp_path / "w.yaml").write_text("rack_size: 3")
    assert load_world(tmp_path / "w.json") == load_world(tmp_path / "w.yaml") == CloudWorld(rack_size=3)
    assert load_world(None) == CloudWorld()
    with pytest.raises(WorldFault, match="No such file"):
        load_world(tmp_path / "none.yaml")


@pytest.mark.parametrize("text", ["on_demand", "on-demand", "OnDemand", "ON_DEMAND", "ondemand"])
def test_capacity_types_may_be_spelled_in_many_ways(text: str) -> None:
    assert parse_capacity_type(text) is CapacityType.ON_DEMAND


def test_racks_fill_in_order_by_zone_and_family() -> None:
    pools = "{instance_type: std.2x8, zone: z, count: 3}, {instance_type: std.4x16, zone: z, count: 2}"
    text = f"rack_size: 2\npools: [{pools}]"
    offers = build_fleet(parse_world(text.encode(), "w.yaml"), load_catalogue(None), "sim")
    assert [offer.slot.labels[keys.RACK] for offer in offers] == [f"z-std-rack-{n}" for n in (0, 0, 1, 1, 2)]
