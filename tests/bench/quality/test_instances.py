"""Instances are deterministic, legal demand, and made from files or by arithmetic."""

from pathlib import Path

import pytest

from bench.quality.catalogue import DataFault, InstanceType, load, read_catalogue
from bench.quality.families import IMPOSSIBLE_CPU_MILLI
from bench.quality.instances import FAMILIES, SHAPES_MAX, SIZES, STEPS, build, merged, with_impossible_pod
from bench.quality.reports.handmade import row
from bench.quality.values import CPU, MEMORY, MIB, PODS, Instance, PackingShape

DATA = load(None)
PODS_OF_SIZE = {"small": (100, 300), "medium": (500, 2000), "large": (1500, 6000)}


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_arguments_give_equal_instances_and_seeds_differ(family: str) -> None:
    first, again, other = (build(family, "small", seed, DATA) for seed in (3, 3, 4))

    assert first == again
    assert first.steps != other.steps


@pytest.mark.parametrize("family", FAMILIES)
def test_an_instance_is_legal_demand_of_its_size(family: str) -> None:
    for size in SIZES:
        made = build(family, size, 0, DATA)
        least, most = PODS_OF_SIZE[size]

        assert least <= made.pods <= most
        assert len(made.steps) == STEPS + 1
        assert len({offer.id for offer in made.offers}) == len(made.offers)
        for clusters in made.steps:
            assert [c.id for c in clusters] == [c.id for c in made.clusters]
            for cluster in clusters:
                profiles = [
                    (r.requirements, r.spreads, r.priority, r.interruption_bucket, r.reclamation_bucket, r.group)
                    for r in cluster.rows
                ]
                assert len(set(profiles)) == len(profiles), "two rows of one profile are one row on the wire"
                assert all(0 < len(r.shapes) <= SHAPES_MAX for r in cluster.rows)
                assert all(shape.count > 0 for r in cluster.rows for shape in r.shapes)


def impossible(made: Instance, step: int) -> int:
    """Return how many impossible pods a step has."""
    shapes = [shape for cluster in made.steps[step] for row in cluster.rows for shape in row.shapes]
    return sum(shape.count for shape in shapes if shape.resources[CPU] >= IMPOSSIBLE_CPU_MILLI)


def test_an_impossible_pod_joins_the_largest_row_in_the_last_step() -> None:
    made = with_impossible_pod(build("F1", "small", 0, DATA))

    assert [impossible(made, step) for step in range(STEPS + 1)] == [0] * STEPS + [1]
    largest = max(made.clusters[0].rows, key=lambda r: r.pods)
    assert any(shape.resources[CPU] >= IMPOSSIBLE_CPU_MILLI for shape in largest.shapes)
    assert [impossible(build("F8b", "small", 1, DATA), step) for step in (0, STEPS)] == [0, 1]


def test_rows_of_one_profile_become_one_with_equal_shapes_added_up() -> None:
    rows = merged([row("a", [(1, 1, 2)]), row("b", [(1, 1, 3), (2, 1, 1)]), row("c", [(1, 1, 1)], priority=5)])

    assert [(r.id, [(s.resources[CPU], s.count) for s in r.shapes]) for r in rows] == [
        ("a", [(1000, 5), (2000, 1)]),
        ("c", [(1000, 1)]),
    ]


def test_groups_that_exclude_themselves_stay_apart() -> None:
    limited = PackingShape({CPU: 1000, MEMORY: MIB}, 2, 1)

    (made,) = merged([row("a", [], shapes=(limited,)), row("b", [], shapes=(limited,))])

    assert made.shapes == (limited, limited)


def test_more_than_64_shapes_are_rounded_up_until_64_are_left() -> None:
    (made,) = merged([row("a", [(1 + n / 1000, 1, 1) for n in range(100)])])

    assert len(made.shapes) <= SHAPES_MAX
    assert made.pods == 100
    assert min(shape.resources[CPU] for shape in made.shapes) >= 1000
    assert max(shape.resources[CPU] for shape in made.shapes) >= 1099


def test_allocatable_is_what_a_kubelet_leaves() -> None:
    kind = InstanceType(name="m", vcpu=8, memory_gib=32, gpus=0, gpu_model="", usd_per_hour=0.4, architecture="amd64")

    # 60m + 10m + 2 × 5m + 4 × 2.5m; 95 % of 32 GiB less 255, 58 × 11 and 100 MiB.
    assert kind.allocatable() == {CPU: 8000 - 90, MEMORY: (31129 - 255 - 638 - 100) * MIB, PODS: 58_000}


HEADER = "instance_type,vcpu,memory_gib,gpus,gpu_model,on_demand_usd_per_hour,architecture\n"


def test_a_catalogue_is_read(tmp_path: Path) -> None:
    path = tmp_path / "types.csv"
    path.write_text(HEADER + "g4.xlarge,4,16,1,T4,0.526,amd64\n")

    (kind,) = read_catalogue(path)

    assert (kind.name, kind.vcpu, kind.gpus, kind.gpu_model, kind.usd_per_hour) == ("g4.xlarge", 4, 1, "T4", 0.526)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "column instance_type is missing"),
        (HEADER, "no types after the header"),
        (HEADER + "m,four,16,0,,0.1,amd64\n", ":2: vcpu: 'four' is not a number"),
        (HEADER + "m,4,16,0,,-1,amd64\n", ":2: on_demand_usd_per_hour: '-1' is not a number"),
        (HEADER + "m,4\n", ":2: memory_gib: '' is not a number"),
    ],
)
def test_a_wrong_catalogue_is_named_with_line_and_value(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "types.csv"
    path.write_text(text)

    with pytest.raises(DataFault) as fault:
        read_catalogue(path)

    assert str(path) in str(fault.value)
    assert says in str(fault.value)


def test_a_folder_without_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataFault, match="no CSV file"):
        load(tmp_path)
    (tmp_path / "ec2-catalog").mkdir()
    (tmp_path / "ec2-catalog" / "a.csv").write_text(HEADER + "m,4,16,0,,0.1,amd64\n")
    with pytest.raises(DataFault, match="openb_node_list_all_node"):
        load(tmp_path)
