"""Shapes and overheads in demand files: what they say, and what is refused in one line."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bigfleet.cli.main import app
from bigfleet.cli.plan.inputs import NeedGiven, read_demand
from bigfleet.cli.plan.patches import apply_patches
from bigfleet.cli.plan.planning import plan_input, question_of
from bigfleet.model.profile import Operator, Requirement
from bigfleet.model.quantity import Family
from bigfleet.model.shapes import SHAPES_MAX, DemandShape, Overhead, total_of
from tests.cli.plan.test_plan_command import Files, kinds

ROW: dict[str, Any] = {"id": "n", "cluster": "c"}
WEB = {"resources": {"cpu": "500m", "memory": "1Gi"}, "count": 40, "max_per_machine": 1}
DB = {"resources": {"cpu": 2}, "count": 3}
GIB = 1000 << 30


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def read(files: Files, demand: object) -> tuple[NeedGiven, ...]:
    files.write_needs(demand)
    return read_demand(files.demand).needs


def test_a_row_says_which_pods_it_consists_of(files: Files) -> None:
    """The aggregate may be left out; quantities are printed as they were written."""
    (given,) = read(files, [{**ROW, "shapes": [WEB, DB], "waiting": [{"resources": {"cpu": "2"}, "count": 1}]}])

    need = given.need
    assert need.shapes == (DemandShape({"cpu": 2000}, 3), DemandShape({"cpu": 500, "memory": GIB}, 40, 1))
    assert need.waiting == (DemandShape({"cpu": 2000}, 1),)
    assert (need.aggregate, need.min_unit) == (
        {"cpu": 26_000, "memory": 40 * GIB},
        {"cpu": 2000, "memory": GIB},
    )
    assert need.families["memory"] is Family.BINARY


def test_what_is_given_beside_the_shapes_stays(files: Files) -> None:
    amounts = {"aggregate": {"cpu": "26", "memory": "40Gi"}, "min_unit": {"cpu": "4"}}
    (given,) = read(files, [{**ROW, "shapes": [WEB, DB], **amounts}])

    assert given.need.min_unit == {"cpu": 4000}
    assert given.need.aggregate == total_of(given.need.shapes)


def test_more_than_64_requests_are_merged_upwards_as_an_operator_does(files: Files) -> None:
    """The aggregate is the sum of the pods that are written."""
    shapes = [{"resources": {"cpu": f"{1000 + n}m"}, "count": 1} for n in range(100)]
    (given,) = read(files, [{**ROW, "shapes": shapes}])

    assert len(given.need.shapes) <= SHAPES_MAX
    assert given.need.aggregate == {"cpu": sum(range(1000, 1100))}
    assert total_of(given.need.shapes)["cpu"] > given.need.aggregate["cpu"]


def test_requirements_and_spreads_may_be_copied_from_a_pod(files: Files) -> None:
    """Lists and the field names of Kubernetes are read alike."""
    lists = {
        "requirements": [["zone", "In", ["a", "b"]], ["gpu", "Exists"]],
        "spreads": [["zone", 1, "DoNotSchedule"]],
    }
    mappings = {
        "requirements": [
            {"key": "zone", "operator": "In", "values": ["a", "b"]},
            {"key": "gpu", "operator": "Exists"},
        ],
        "spreads": [{"topologyKey": "zone", "maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"}],
    }
    rows = [{**ROW, "id": id, "shapes": [DB], **profile} for id, profile in (("a", lists), ("b", mappings))]

    one, other = read(files, rows)

    assert one.need.profile == other.need.profile
    assert one.need.profile.requirements[1] == Requirement("zone", Operator.IN, ("a", "b"))


def test_a_spread_of_a_pod_has_to_be_complete(files: Files) -> None:
    row = {**ROW, "shapes": [DB], "spreads": [{"topologyKey": "zone", "maxSkew": 1}]}
    files.write_needs([row])

    assert "(n): spreads[0].whenUnsatisfiable: is missing" in files.refusal()


def test_a_plan_decides_on_rows_of_shapes(files: Files) -> None:
    """A shape of 16 cpu is the row's min unit."""
    rows = [{"id": "web", "cluster": "shop", "priority": 100, "shapes": [{"resources": {"cpu": "16"}, "count": 3}]}]
    files.write_needs(rows)

    assert kinds(files.document()["plan"]["actions"]) == [("Bootstrap", "i1", "web")]


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({}, "aggregate is missing; give the aggregate of the row or its shapes"),
        (
            {"shapes": [WEB, DB], "aggregate": {"cpu": "25", "memory": "40Gi"}},
            "aggregate.cpu: 25 is not the sum of the shapes, which is 26; correct it or leave it out",
        ),
        (
            {"shapes": [WEB], "aggregate": {"cpu": "20"}},
            "aggregate.memory: 0 is not the sum of the shapes, which is 40Gi; correct it or leave it out",
        ),
        (
            {"shapes": [WEB, {**DB, "count": 0}]},
            "shapes[1].count: 0 is not a number of pods; write 1 to 1,000,000,000",
        ),
        (
            {"shapes": [{**WEB, "max_per_machine": -1}]},
            "shapes[0].max_per_machine: -1 is not a limit; write a number, 0 for no limit",
        ),
        ({"shapes": [{**DB, "resources": {"cpu": "-2"}}]}, "shapes[0].resources.cpu: '-2' is negative"),
        ({"waiting": [{**DB, "count": -1}], "aggregate": {}}, "waiting[0].count: -1 is not a number of pods"),
        ({"shapes": [{"resources": {}}]}, "shapes[0].count: is missing"),
        ({"shapes": [{**DB, "pods": 1}]}, "shapes[0].pods: unknown key; there are resources, count, max_per_machine"),
        ({"shapes": [{**DB, "count": "many"}]}, "shapes[0].count: Expected `int`, got `str`"),
    ],
)
def test_a_wrong_shape_is_named_with_file_row_and_field(files: Files, row: dict[str, Any], fault: str) -> None:
    files.write_needs([{**ROW, **row}])

    assert f"{files.demand} [0] (n): {fault}" in files.refusal()


def test_a_mapping_holds_rows_and_overheads(files: Files) -> None:
    gpu = {"cluster": "shop", "requirements": [["gpu", "Exists"]], "resources": {"cpu": "50m"}}
    daemons = [{"cluster": "shop", "resources": {"cpu": "100m"}}, {"cluster": "shop", "resources": {"cpu": "150m"}}]
    files.write_needs({"rows": [{**ROW, "shapes": [DB]}], "overheads": [gpu, *daemons]})
    demand = read_demand(files.demand)

    assert [given.id for given in demand.needs] == ["n"]
    assert demand.overheads == {
        "shop": (Overhead((), {"cpu": 250}), Overhead((Requirement("gpu", Operator.EXISTS),), {"cpu": 50}))
    }
    given = plan_input([], demand.needs, overheads=demand.overheads)
    assert question_of(given).options.overheads == demand.overheads
    assert files.document()["plan"]["shortfalls"] == []


@pytest.mark.parametrize(
    ("demand", "fault"),
    [
        ({"overheads": []}, ": rows: is missing"),
        ({"rows": [], "daemons": []}, ": daemons: unknown key; there are rows, overheads"),
        ({"rows": [3]}, " [0]: Expected `object`, got `int`"),
        ({"rows": [], "overheads": [{"cluster": "", "resources": {}}]}, " overheads[0]: cluster is empty"),
        (
            {"rows": [], "overheads": [{"cluster": "c", "resources": {"cpu": "x"}}]},
            " overheads[0]: resources.cpu: 'x' is no quantity",
        ),
        (
            {"rows": [], "overheads": [{"cluster": "c", "requirements": [["z", "Same"]], "resources": {}}]},
            " overheads[0]: requirements: has the operator Same, which says nothing about one machine",
        ),
        (
            {"rows": [], "overheads": [{"cluster": "c", "requirements": [["z", "Is"]], "resources": {}}]},
            " overheads[0]: requirements[0]: 'Is' is unknown",
        ),
    ],
)
def test_a_wrong_overhead_is_named_with_file_place_and_field(files: Files, demand: object, fault: str) -> None:
    files.write_needs(demand)

    assert f"bigfleet: {files.demand}{fault}" in files.refusal()


def test_patches_change_pods_and_overheads(files: Files) -> None:
    files.write_needs({"rows": [{**ROW, "shapes": [DB]}], "overheads": [{"cluster": "c", "resources": {"cpu": 1}}]})
    demand = read_demand(files.demand)
    given = plan_input([], demand.needs, overheads=demand.overheads)
    files.write_patches(
        [
            {"set_need": {"id": "n", "priority": 7, "shapes": [WEB]}},
            {"set_overheads": {"cluster": "c", "overheads": [{"resources": {"memory": "1Gi"}}]}},
        ]
    )
    changed = apply_patches(given, files.patches)

    (need,) = (one.need for one in changed.needs)
    assert (need.profile.priority, need.shapes) == (7, (DemandShape({"cpu": 500, "memory": GIB}, 40, 1),))
    assert (need.aggregate, need.min_unit) == (total_of(need.shapes), {"cpu": 500, "memory": GIB})
    assert changed.overheads == {"c": (Overhead((), {"memory": GIB}),)}
    files.write_patches([{"remove_cluster": "c"}])
    assert apply_patches(given, files.patches).overheads == {}


@pytest.mark.parametrize(
    ("patch", "fault"),
    [
        ({"set_need": {"id": "web", "shapes": []}}, "set_need: aggregate is missing; give the aggregate of the row"),
        ({"set_need": {"id": "web", "shapes": [{**DB, "count": 0}]}}, "set_need: shapes[0].count: 0 is not a number"),
        ({"set_need": {"id": "web"}}, "set_need: nothing is set; give priority, interruption_bucket"),
        ({"set_overheads": {"cluster": "x", "overheads": []}}, "set_overheads.cluster: the demand has no cluster 'x'"),
        (
            {"set_overheads": {"cluster": "shop", "overheads": [{"resources": {"cpu": "x"}}]}},
            "set_overheads overheads[0]: resources.cpu: 'x' is no quantity",
        ),
    ],
)
def test_a_wrong_patch_is_named_with_file_place_and_field(files: Files, patch: dict[str, Any], fault: str) -> None:
    files.write_patches([patch])

    assert f"{files.patches} [0].{fault}" in files.refusal("--what-if", str(files.patches))


def test_a_fleet_of_shapes_is_decided(tmp_path: Path) -> None:
    """`bigfleet engine decide` reads shapes and overheads, and repeats the shapes in its answer."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    first = Path(__file__).parents[2] / "cases" / "engine" / "decisions.jsonl"
    fleet = json.loads(first.read_text(encoding="utf-8").splitlines()[0])
    row = next(row for row in fleet["demand"] if not any(key == "Same" for _k, key, _v in row["requirements"]))
    fleet["options"]["overheads"] = [{"cluster": row["cluster"], "resources": {"cpu": "100m"}}]
    del row["aggregate"], row["min_unit"]
    row["shapes"] = [DB]
    source.write_text(json.dumps(fleet), encoding="utf-8")

    result = CliRunner().invoke(app, ["engine", "decide", str(source), "--out", str(target)], catch_exceptions=False)

    assert result.exit_code == 0, result.output
    decided = json.loads(target.read_text(encoding="utf-8"))["decision"]["rows"]
    (row_record,) = [one for one in decided if one["id"] == row["id"]]
    assert row_record["shapes"] == [{"resources_milli": {"cpu": 2000}, "count": 3, "max_per_machine": 0}]
    assert (row_record["aggregate_milli"], row_record["min_unit_milli"]) == ({"cpu": 6000}, {"cpu": 2000})
    row["shapes"] = [{**DB, "count": 0}]
    source.write_text(json.dumps(fleet), encoding="utf-8")
    refused = CliRunner().invoke(app, ["engine", "decide", str(source), "--out", str(target)])
    assert "in.jsonl line 1: a field has a wrong value (shapes[0].count: 0 is not a number of pods" in str(
        refused.exception
    )


def test_cases_of_shapes_are_checked(tmp_path: Path) -> None:
    """A case may give shapes and overheads; a wrong count fails the case with its field."""
    case = """
- name: pods
  stage: cycle
  overheads: [{cluster: c1, reqs: [[Z, Exists]], resources: {cpu: 100m}}]
  machines: [{id: m, t: T4, st: Idle}]
  needs: [{id: n, t: P4, shapes: [{resources: {cpu: "2"}, count: COUNT}]}]
  expect: {acts: [Bootstrap m c1]}
"""
    (tmp_path / "shapes.yaml").write_text(case.replace("COUNT", "2"), encoding="utf-8")
    result = CliRunner().invoke(app, ["engine", "check", str(tmp_path)])
    assert result.output == "1 passed, 0 failed\n"
    (tmp_path / "shapes.yaml").write_text(case.replace("COUNT", "0"), encoding="utf-8")
    result = CliRunner().invoke(app, ["engine", "check", str(tmp_path)])
    assert "shapes[0].count: 0 is not a number of pods" in result.output
    assert result.exit_code == 1
