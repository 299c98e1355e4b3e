"""`bigfleet plan`: what it shows, what a change changes, and which inputs it refuses in one line."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from bigfleet.cli.main import app
from bigfleet.cli.plan.inputs import read_demand, read_machines
from bigfleet.cli.plan.patches import apply_patches
from bigfleet.cli.plan.planning import difference_of, make_plan, plan_input
from bigfleet.cli.runtime.failures import UsageFault
from bigfleet.engine.reference.decide import decide
from tests.commands import run_here
from tests.engine_cases import fleet_need_of, fleet_options_of, fleet_snapshot_of, load_fleets
from tests.processes import run_bigfleet

TRACE_NODES = Path(__file__).parents[2] / "cases" / "trace" / "nodes.csv"
CPU = {"instance_type": "c.16", "capacity_type": "OnDemand", "allocatable": {"cpu": "16"}, "price_per_hour": 0.5}
SERVING = {**CPU, "state": "Configured", "cluster": "shop", "assigned_priority": 50}
MACHINES: list[dict[str, Any]] = [
    {**SERVING, "id": "s1"},
    {**SERVING, "id": "s2", "price_per_hour": 0.75},
    {**CPU, "id": "i1", "zone": "a"},
    {**CPU, "id": "n1", "state": "Speculative", "zone": "b", "price_per_hour": 2.0},
    {**CPU, "id": "n2", "state": "Speculative", "zone": "b", "price_per_hour": 3.5},
]
NEEDS: list[dict[str, Any]] = [
    {"id": "web", "cluster": "shop", "priority": 100, "aggregate": {"cpu": "16"}},
    {"id": "jobs", "cluster": "lab", "priority": 10, "aggregate": {"cpu": "30"}, "min_unit": {"cpu": "500m"}},
]


class Files:
    """The files of one plan."""

    def __init__(self, folder: Path) -> None:
        self.inventory = folder / "fleet.jsonl"
        self.demand = folder / "demand.yaml"
        self.patches = folder / "what-if.yaml"
        self.write_machines(MACHINES)
        self.write_needs(NEEDS)

    def write_machines(self, machines: list[dict[str, Any]]) -> None:
        self.inventory.write_text("".join(json.dumps(machine) + "\n" for machine in machines), encoding="utf-8")

    def write_needs(self, needs: object) -> None:
        self.demand.write_text(yaml.safe_dump(needs), encoding="utf-8")

    def write_patches(self, patches: object) -> None:
        self.patches.write_text(yaml.safe_dump(patches), encoding="utf-8")

    def arguments(self, *more: str) -> list[str]:
        return ["plan", "--inventory", str(self.inventory), "--demand", str(self.demand), *more]

    def text(self, *more: str) -> str:
        result = CliRunner().invoke(app, self.arguments(*more), catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    def document(self, *more: str) -> Any:
        return json.loads(self.text("--output", "json", *more))

    def with_patches(self, *patches: dict[str, Any]) -> Any:
        self.write_patches(list(patches))
        return self.document("--what-if", str(self.patches))["what_if"]

    def refusal(self, *more: str) -> str:
        """Return the one line of a call that is refused with exit 2."""
        result = CliRunner().invoke(app, self.arguments(*more))
        assert isinstance(result.exception, UsageFault), result.output
        assert (result.output, result.exception.exit_code) == ("", 2)
        line = str(result.exception)
        assert line.splitlines() == [line]
        return f"bigfleet: {line}"


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def kinds(actions: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    return [(action["kind"], action["machine"], action["row"]) for action in actions]


def test_a_plan_tells_actions_costs_and_that_nothing_is_short(files: Files) -> None:
    plan = files.document()["plan"]

    assert kinds(plan["actions"]) == [("Bootstrap", "i1", "jobs"), ("Provision", "n1", "jobs"), ("Reclaim", "s2", "")]
    assert plan["cost_before"]["serving_usd_per_hour"] == 1.25
    assert plan["cost_before"]["total_usd_per_hour"] == 1.75
    assert plan["cost_after"] == {
        "serving_usd_per_hour": 3.0,
        "idle_usd_per_hour": 0.75,
        "total_usd_per_hour": 3.75,
        "serving_machines": 3,
        "idle_machines": 1,
    }
    assert plan["shortfalls"] == []


def test_the_table_says_the_same_to_a_person(files: Files) -> None:
    lines = files.text().splitlines()

    assert "Bootstrap  1  c.16           a     OnDemand  lab      jobs  $0.50  i1" in [line.rstrip() for line in lines]
    assert "In all: 1 to bind, 1 to make, 1 to reclaim, 0 to preempt, 0 to release." in lines
    assert any(line.startswith("total") and line.rstrip().endswith("+$2.00/h") for line in lines)
    assert lines[-1] == "Nothing stays short."


def test_a_shortfall_comes_with_its_reasons(files: Files) -> None:
    files.write_needs([*NEEDS, {"id": "gpu", "cluster": "lab", "aggregate": {"gpu": 8}, "min_unit": {"gpu": "8"}}])

    (short,) = files.document()["plan"]["shortfalls"]

    assert (short["row"], short["lacks"], short["priority"]) == ("gpu", {"gpu": "8"}, 0)
    assert "Machines that fit it, held or free: 0 idle, 0 that could be made, 0 in service." in short["reasons"]
    assert (
        "Among the machines that could be made, 1 is too small (n2: it has no gpu, one machine must have gpu 8): n2."
    ) in short["reasons"]
    assert "gpu of lab lacks gpu 8." in files.text()


def test_a_row_that_preempts_says_for_what_it_waits(files: Files) -> None:
    files.write_machines([{**SERVING, "id": "s1"}])
    files.write_needs([{"id": "new", "cluster": "lab", "priority": 900, "aggregate": {"cpu": "8"}}])

    (short,) = files.document()["plan"]["shortfalls"]

    assert (short["lacks"], short["waits_for"]) == ({}, ["s1"])
    assert "new waits until s1 has drained." in files.text()


def test_explain_answers_for_a_row_and_for_a_machine(files: Files) -> None:
    said = files.document("--explain", "jobs")["explanation"]
    assert said["about"] == "jobs"
    assert "The runner-up n2 costs $1.50/h more." in said["sentences"]
    assert "n2 would go first if the price of n1 exceeded $3.50/h, $1.50/h more than now." in said["sentences"]
    assert said["values"]["acquired"][1]["record"]["runner_up"] == "n2"

    assert "s1 stays with shop: web holds it." in files.text("--explain", "s1")
    assert "s1 stays with shop: web holds it." in files.text("--explain", "machine:s1")


def test_gangs_that_fold_share_a_row_and_are_explained_by_either_id(files: Files) -> None:
    gang = {"cluster": "lab", "requirements": [["topology.kubernetes.io/zone", "Same"]], "aggregate": {"cpu": "16"}}
    files.write_needs([{**gang, "id": "ga", "group": "a"}, {**gang, "id": "gb", "group": "b"}])

    document = files.document("--explain", "gb")

    taken = [action for action in document["plan"]["actions"] if action["row"]]
    assert {action["row"] for action in taken} == {"ga+gb"}
    assert document["explanation"]["sentences"][1] == (
        "It stands for 2 gangs, which need no common domain, because i1 alone could host any one of them whole."
    )


def test_an_id_of_both_kinds_or_of_neither_is_refused(files: Files) -> None:
    files.write_needs([*NEEDS, {"id": "s1", "cluster": "lab", "aggregate": {}}])

    assert "'s1' is a row and a machine; write need:s1 or machine:s1" in files.refusal("--explain", "s1")
    assert "Why s1" in files.text("--explain", "need:s1")
    nowhere = "rows have their ids in --demand, machines in --inventory"
    assert files.refusal("--explain", "zz").endswith(f"'zz' is not the id of a row or machine; {nowhere}")
    assert files.refusal("--explain", "machine:web").endswith(f"'web' is not the id of a machine; {nowhere}")
    assert files.refusal("--explain", "wed").endswith("'wed' is not the id of a row or machine; did you mean 'web'?")


def test_what_a_change_took_away_is_said_to_be_gone(files: Files) -> None:
    files.write_patches([{"lose_machines": {"zone": "a"}}, {"remove_cluster": "lab"}])

    for asked in ("i1", "jobs", "machine:i1", "need:jobs"):
        line = files.refusal("--what-if", str(files.patches), "--explain", asked)
        assert f"{asked.split(':')[-1]!r} does not exist after the change; explain it without --what-if" in line
    line = files.refusal("--what-if", str(files.patches), "--explain", "machine:jobs")
    assert "'jobs' is not the id of a machine" in line


@pytest.mark.parametrize("text", ["", "[]\n", "# nothing\n"])
def test_an_empty_patch_changes_nothing(files: Files, text: str) -> None:
    files.patches.write_text(text, encoding="utf-8")

    document = files.document("--what-if", str(files.patches))

    assert document["what_if"]["changes_nothing"]
    assert document["what_if"]["plan"] == document["plan"]
    assert files.text("--what-if", str(files.patches)).splitlines()[-2:] == ["What if", "Nothing changes."]


def test_added_machines_are_used(files: Files) -> None:
    machine = {**CPU, "id": "cheap", "count": 2, "state": "Speculative", "price_per_hour": 0.25}

    changed = files.with_patches({"add_machines": machine})

    assert kinds(changed["actions_added"]) == [("Provision", "cheap-000", "jobs")]
    assert kinds(changed["actions_dropped"]) == [("Provision", "n1", "jobs")]


def test_lost_machines_are_missed_in_the_order_of_their_ids(files: Files) -> None:
    changed = files.with_patches({"lose_machines": {"zone": "b", "count": 1}})
    assert kinds(changed["actions_added"]) == [("Provision", "n2", "jobs")]

    changed = files.with_patches({"lose_machines": {"zone": "b"}})
    assert changed["shortfalls_changed"] == [{"row": "jobs", "lacks": {"cpu": "14"}, "lacked": {}}]


def test_a_price_factor_turns_a_choice_and_the_costs(files: Files) -> None:
    changed = files.with_patches({"price_factor": {"instance_type": "c.16", "capacity_type": "OnDemand", "factor": 2}})

    assert changed["actions_added"] == []
    assert changed["plan"]["cost_before"]["total_usd_per_hour"] == 3.5
    assert not changed["changes_nothing"]


def test_a_priority_that_rises_preempts(files: Files) -> None:
    jobs = {"id": "jobs", "cluster": "lab", "priority": 10, "aggregate": {"cpu": "60"}}
    files.write_needs([{"id": "web", "cluster": "shop", "priority": 100, "aggregate": {"cpu": "32"}}, jobs])

    changed = files.with_patches({"set_need": {"id": "jobs", "priority": 1000, "interruption_bucket": 5}})

    assert [kind for kind, _machine, row in kinds(changed["actions_added"]) if row == "jobs"] == ["Preempt"]


def test_a_removed_cluster_gives_everything_back(files: Files) -> None:
    changed = files.with_patches({"remove_cluster": "shop"})

    assert kinds(changed["actions_added"]) == [("Reclaim", "s1", "")]


def test_a_cluster_without_demand_is_silent_and_loses_nothing(files: Files) -> None:
    files.write_needs(NEEDS[1:])

    assert {kind for kind, _machine, _row in kinds(files.document()["plan"]["actions"])} == {"Bootstrap", "Provision"}


def test_csv_says_the_same_as_json_lines(files: Files, tmp_path: Path) -> None:
    expected = files.document()
    columns = "id,state,cluster,instance_type,zone,capacity_type,allocatable,price_per_hour,assigned_priority"
    rows = [
        ",".join(
            [
                machine["id"],
                machine.get("state", ""),
                machine.get("cluster", ""),
                machine["instance_type"],
                machine.get("zone", ""),
                machine["capacity_type"],
                "cpu=16",
                str(machine["price_per_hour"]),
                str(machine.get("assigned_priority", "")),
            ]
        )
        for machine in MACHINES
    ]
    files.inventory = tmp_path / "fleet.csv"
    files.inventory.write_text("\n".join([columns, *rows]) + "\n", encoding="utf-8")

    assert files.document() == expected


def test_the_nodes_of_a_trace_are_idle_bare_metal(files: Files) -> None:
    files.inventory = TRACE_NODES

    plan = files.document()["plan"]

    assert plan["cost_before"]["idle_machines"] == 12
    assert {action["capacity_type"] for action in plan["actions"]} == {"BareMetal"}


@pytest.mark.parametrize("fleet", [pytest.param(fleet, id=str(fleet["seed"])) for fleet in load_fleets()])
def test_a_plan_of_a_recorded_fleet_is_the_engine_s_decision(tmp_path: Path, fleet: dict[str, Any]) -> None:
    """What the files say reaches the engine whole: every field of a machine and of a row is read."""
    inventory, demand = tmp_path / "fleet.jsonl", tmp_path / "demand.json"
    # The engine ignores a quantity that cannot be read and a group without Same; a shard and a plan refuse both.
    text = json.dumps(fleet)
    for quantity in ("lots", "many", "-4"):
        text = text.replace(f'"{quantity}"', '"0"')
    fleet = json.loads(text)
    for row in fleet["demand"]:
        if all(operator != "Same" for _key, operator, *_values in row.get("requirements", [])):
            row["group"] = ""
    inventory.write_text("".join(json.dumps(machine) + "\n" for machine in fleet["inventory"]), encoding="utf-8")
    demand.write_text(json.dumps(fleet["demand"]), encoding="utf-8")

    given = plan_input(read_machines(inventory), read_demand(demand).needs, now_seconds=fleet["options"]["now"])

    plan, options = make_plan(given), fleet_options_of(fleet)
    assert plan.snapshot == fleet_snapshot_of(fleet)
    assert plan.demand == tuple(fleet_need_of(record) for record in fleet["demand"])
    asked = (plan.options.now_seconds, plan.options.unjoined, plan.options.reserved)
    assert asked == (options.now_seconds, options.unjoined, options.reserved)
    assert plan.decision == decide(plan.snapshot, plan.demand, plan.options)


WRONG_MACHINES = [
    ("{", "line 1: Input data was truncated"),
    ('{"id": 3}', "line 1: id: Expected `str`, got `int`"),
    ('{"id": "m", "colour": "red"}', "line 1: colour: unknown key; there are id, state, host, cluster, instance_type"),
    ('{"id": ""}', "line 1: id is empty"),
    ('{"id": "m", "state": "Sleeping"}', "line 1: state: 'Sleeping' is unknown; choose one of"),
    ('{"id": "m", "capacity_type": "Leased"}', "line 1: capacity_type: 'Leased' is unknown"),
    ('{"id": "m", "allocatable": {"cpu": "4 cores"}}', "line 1: allocatable.cpu: '4 cores' is no quantity"),
    ('{"id": "m", "price_per_hour": -1}', "line 1: price_per_hour: -1"),
    ('{"id": "m", "price_per_hour": "free"}', "line 1: price_per_hour: 'free' is not an amount"),
    ('{"id": "m", "interruption_probability": 2}', "line 1: interruption_probability is 2"),
    ('{"id": "m", "state": "Configured"}', "line 1: a Configured machine must have a cluster"),
    ('{"id": "m", "assigned_priority": 3000000000}', "line 1: assigned_priority: 3000000000 is out of range"),
    ('{"id": "m"}\n{"id": "m"}', "line 2: the id 'm' is already used at"),
    ("", "no machines; a plan needs at least one"),
    ('{"id": "m", "state": "Idle", "id": "n"}', "line 1: the key 'id' is given twice in an object; remove one"),
    ('{"id":"m","labels":{"a":"b","a":"c"}}', "line 1: the key 'a' is given twice"),
    ('{"id" :"m","id":"n"}', "line 1: the key 'id' is given twice"),
    ('{"id": "a\\u0007b"}', "line 1: id has the character"),
    (f'{{"id": "{"m" * 254}"}}', "line 1: id has 254 bytes, at most 253 are allowed"),
    ('{"id": "m", "labels": {"a": "\\u0007"}}', "line 1: a text has the control character"),
    ('{"id": "m", "state": "Configured", "cluster": "a b"}', "line 1: cluster has the character ' '"),
    *(
        (f'{{"id": "m", "price_per_hour": "{text}"}}', f"line 1: price_per_hour: {text!r} is not an amount")
        for text in ("１", "1_0", "Inf", "inf", "+inf", "infinity", "nan", " 1", "0x1", "+1", "")
    ),
]


@pytest.mark.parametrize("price", ['"+Inf"', '"1"', '"0.25"', '"1e3"', '".5"', "1", "1e-3"])
def test_a_price_is_a_number_or_unbounded(files: Files, price: str) -> None:
    files.inventory.write_text(f'{{"id": "m", "price_per_hour": {price}}}', encoding="utf-8")

    assert read_machines(files.inventory)[0].machine.price_usd_per_hour == float(price.strip('"'))


def test_keys_that_are_unlike_are_read_in_any_form(files: Files) -> None:
    """Text that looks like a key counts as one only until the line is read again."""
    lines = ['{"id":"a\\":","labels":{"id":"x"}}', '{"id" : "b" , "labels": {"a": "\\":\\":"}}', '{"id":"c"}']
    files.inventory.write_text("\n".join(lines), encoding="utf-8")

    assert [given.machine.id for given in read_machines(files.inventory)] == ['a":', "b", "c"]


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        (
            "d.yaml",
            "- id: n\n  cluster: c\n  priority: 5\n  priority: 900\n",
            "line 4: the key 'priority' is already in",
        ),
        ("d.yaml", "- {id: n, cluster: c, shapes: [], shapes: []}", "line 1: the key 'shapes' is already in line 1"),
        ("d.yaml", "- id: n\n  cluster: c\n  aggregate: {cpu: 1:30}\n", "line 3: 1:30 would be read as 90"),
        (
            "d.json",
            '[{"id": "n",\n "id": "m"}]',
            "the key 'id' is given twice in an object; remove one of the two: line 1",
        ),
    ],
)
def test_demand_that_is_probably_not_meant_is_refused(files: Files, name: str, text: str, fault: str) -> None:
    files.demand = files.inventory.with_name(name)
    files.demand.write_text(text, encoding="utf-8")
    files.write_machines([{"id": "m"}])

    said = files.refusal()

    assert said.startswith(f"bigfleet: {files.demand}: not ")
    assert fault in said


@pytest.mark.parametrize(("text", "fault"), WRONG_MACHINES)
def test_a_wrong_machine_is_named_with_file_and_line(files: Files, text: str, fault: str) -> None:
    files.inventory.write_text(text, encoding="utf-8")

    line = files.refusal()

    assert line.startswith(f"bigfleet: {files.inventory}")
    assert fault in line


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "the file is empty"),
        ("id,size\nm,3\n", "line 1: column 'size' is unknown; write id, state"),
        ("zone,state\na,Idle\n", "line 1: there is no column 'id', which every machine needs"),
        ("id,id\nm,m\n", "line 1: a column is given twice"),
        ("id,zone\nm\n", "line 2: 1 cells where the header has 2 columns"),
        ("id,allocatable\nm,cpu:4\n", "line 2: column allocatable: 'cpu:4' is not name=value"),
        ("id,assigned_priority\nm,high\n", "line 2: assigned_priority: Expected `int`, got `str`"),
        ("id,idle_since\nm,nan\n", "line 2: idle_since: nan is not a time; use seconds"),
        ("id,price_per_hour\nm,cheap\n", "line 2: price_per_hour: 'cheap' is not an amount"),
        ('id,zone\nm,"a\n', "not CSV"),
        ("sn,cpu_milli,memory_mib,gpu,model\nn1,x,1,0,\n", "line 2, column cpu_milli: 'x' is no whole number"),
    ],
)
def test_a_wrong_csv_is_named_with_line_and_column(files: Files, tmp_path: Path, text: str, fault: str) -> None:
    files.inventory = tmp_path / "fleet.csv"
    files.inventory.write_text(text, encoding="utf-8")

    assert fault in files.refusal()


ROW = {"id": "n", "cluster": "c", "aggregate": {"cpu": "1"}}


@pytest.mark.parametrize(
    ("needs", "fault"),
    [
        ("text", ": a list of rows is expected"),
        ([3], "[0]: Expected `object`, got `int`"),
        ([{"id": "n", "cluster": "c"}], "[0] (n): aggregate is missing; give the aggregate of the row or its shapes"),
        ([{**ROW, "cluster": ""}], "[0] (n): cluster is empty"),
        ([{**ROW, "aggregate": {"cpu": 1.5}}], "[0] (n): aggregate.*: Expected `int | str`, got `float`"),
        ([{**ROW, "aggregate": {"cpu": "-1"}}], "[0] (n): aggregate.cpu: '-1' is negative"),
        ([{**ROW, "priority": 2**40}], "[0] (n): priority: 1099511627776 is out of range"),
        ([{**ROW, "interruption_bucket": 28}], "[0] (n): interruption_bucket: 28 is not a penalty bucket; use 0 to 27"),
        (
            [{**ROW, "requirements": [["zone", "Is", ["a"]]]}],
            "[0] (n): requirements[0]: 'Is' is unknown; choose one of In",
        ),
        (
            [{**ROW, "requirements": [["zone"]]}],
            "[0] (n): requirements[0]: Expected `array` of at least length 2, got 1",
        ),
        ([{**ROW, "spreads": [["zone", 1, "Maybe"]]}], "[0] (n): spreads[0]: 'Maybe' is unknown"),
        ([ROW, ROW], "[1] (n): the id is already used at [0]"),
        ([{**ROW, "id": "a\x07"}], "id has the character '\\x07' at position 1"),
        ([{**ROW, "id": "n" * 254}], "id has 254 bytes, at most 253 are allowed"),
        ([{**ROW, "group": "g" * 1025}], "[0] (n): group: has 1025 bytes, at most 1024 are allowed"),
        ([{**ROW, "arrival": 2**63}], "[0] (n): arrival: 9223372036854775808 is out of range; use"),
        ([{**ROW, "requirements": [["a", "In", []]]}], "[0] (n): requirements[0].values: is empty, the operator In"),
        ([{**ROW, "requirements": [["", "Exists"]]}], "[0] (n): requirements[0].key: is empty"),
        ([{**ROW, "requirements": [["a", "In", ["\x07"]]]}], "requirements[0].values[0]: has the control character"),
        ([{**ROW, "group": "g"}], "[0] (n): group: is set, but none of the row's requirements has the operator Same"),
        ([ROW, {**ROW, "id": "o", "cluster": "d", "group": "g"}], "[1] (o): group: is set, but none"),
        ([{**ROW, "aggregate": {"c\x07": 1}}], "[0] (n): aggregate['c\\x07']: the name has the control character"),
        ([{**ROW, "min_unit": {"c\x07": 1}}], "[0] (n): min_unit['c\\x07']: the name has the control character"),
        (
            [{**ROW, "aggregate": dict.fromkeys(map(str, range(33)), 1)}],
            "aggregate: has 33 names, at most 32",
        ),
        (
            [{**ROW, "requirements": [[str(n), "Exists"] for n in range(65)]}],
            "requirements: has 65 requirements",
        ),
        (
            [{**ROW, "requirements": [["a", "In", [*map(str, range(1001))]]]}],
            "requirements[0].values: has 1001 values",
        ),
        ([{**ROW, "spreads": [["z\x07", 1, "DoNotSchedule"]]}], "spreads[0].topology_key: has the control character"),
        (
            [{**ROW, "id": str(n)} for n in range(20_001)],
            ": cluster c: needs: has 20001 rows",
        ),
        (
            {"rows": [ROW], "overheads": [{"cluster": "c", "resources": {"c\x07": 1}}]},
            ": cluster c: overheads.resources['c\\x07']: the name has the control character",
        ),
        ([{**ROW, "colour": "red"}], "[0] (n): colour: unknown key; there are id, cluster, aggregate"),
    ],
)
def test_a_wrong_row_is_named_with_file_place_and_field(files: Files, needs: object, fault: str) -> None:
    files.write_needs(needs)

    line = files.refusal()

    assert line.startswith(f"bigfleet: {files.demand}")
    assert fault in line


@pytest.mark.parametrize(
    ("patches", "fault"),
    [
        ({"add": 1}, ": a list of at most 1000 patches is expected"),
        ([{"a": 1, "b": 2}], " [0]: one key is expected, one of add_machines"),
        ([{"grow": 1}], " [0]: 'grow' is unknown; there are add_machines"),
        ([{"add_machines": {"count": 0}}], " [0].add_machines.count: 0 is not a count"),
        ([{"add_machines": {"size": 1}}], " [0].add_machines: size: unknown key; there are id, state"),
        (
            [{"add_machines": {"id": "x"}}, {"add_machines": {"id": "x"}}],
            " [1].add_machines: there is a machine",
        ),
        ([{"lose_machines": {"zone": "nowhere"}}], " [0].lose_machines: no machine matches"),
        (
            [{"lose_machines": {"zone": "a", "count": 2}}],
            " [0].lose_machines.count: 2 cannot be lost; 1 match",
        ),
        ([{"lose_machines": {"capacity_type": "Leased"}}], " [0].lose_machines.capacity_type: 'Leased' is unknown"),
        ([{"price_factor": {"zone": "a"}}], " [0].price_factor: factor: is missing"),
        ([{"price_factor": {"factor": -1}}], " [0].price_factor.factor: -1.0 is not a factor"),
        (
            [{"add_machines": {"instance_type": "free"}}, {"price_factor": {"instance_type": "free", "factor": 2}}],
            " [1].price_factor: the machines that match (1) cost nothing and stay so at any factor",
        ),
        ([{"set_need": {"id": "web"}}], " [0].set_need: nothing is set"),
        ([{"set_need": {"id": "zz", "priority": 1}}], " [0].set_need.id: the demand has no row 'zz'"),
        ([{"set_need": {"id": "web", "reclamation_bucket": 99}}], " [0].set_need.reclamation_bucket: 99 is not a"),
        ([{"remove_cluster": "zz"}], " [0].remove_cluster: neither the demand nor the machines have a cluster 'zz'"),
        ([{"remove_cluster": 7}], " [0].remove_cluster: the id of a cluster is expected"),
    ],
)
def test_a_wrong_patch_is_named_with_file_place_and_field(files: Files, patches: object, fault: str) -> None:
    files.write_patches(patches)

    line = files.refusal("--what-if", str(files.patches))

    assert line.startswith(f"bigfleet: {files.patches}{fault}")


def test_the_process_refuses_in_one_line_without_a_traceback(files: Files) -> None:
    files.write_needs([{**ROW, "requirements": [["zone", "Is"]]}])

    finished = run_bigfleet(*files.arguments())

    assert (finished.returncode, finished.stdout, len(finished.stderr.splitlines())) == (2, "", 1)
    assert finished.stderr.startswith(f"bigfleet: {files.demand} [0] (n): requirements[0]: 'Is' is unknown")
    assert "Missing option '--demand'" in run_here("plan", "--inventory", str(files.inventory)).stderr


def test_files_that_cannot_be_read_are_named(files: Files, tmp_path: Path) -> None:
    files.demand.write_text("a: [", encoding="utf-8")
    assert f"{files.demand}: not YAML" in files.refusal()
    files.demand = tmp_path / "demand.json"
    files.demand.write_text("{", encoding="utf-8")
    assert f"{files.demand}: not JSON" in files.refusal()
    files.demand.write_bytes(b"\xff\xfe\x00")
    assert f"{files.demand}: not UTF-8 text" in files.refusal()
    files.demand = tmp_path / "absent.yaml"
    assert "No such file or directory; name a file that can be read" in files.refusal()


def test_wrong_flags_are_refused(files: Files) -> None:
    assert "--output: 'xml' is unknown; choose one of table, json" in files.refusal("--output", "xml")
    assert "--now: nan is not a time" in files.refusal("--now", "nan")


def test_the_time_is_that_of_the_latest_stamp_unless_it_is_given(files: Files) -> None:
    files.write_needs([])
    files.write_machines([{**CPU, "id": "old", "idle_since": 0}, {**CPU, "id": "young", "idle_since": 700}])

    assert kinds(files.document()["plan"]["actions"]) == [("Delete", "old", "")]
    assert len(files.document("--now", "1300")["plan"]["actions"]) == 2


def test_an_unbounded_price_stays_a_plan_that_can_be_written(files: Files) -> None:
    files.write_machines([{**CPU, "id": "i1", "price_per_hour": "+Inf"}])

    document = files.document("--explain", "jobs")

    assert document["plan"]["cost_before"]["total_usd_per_hour"] == "+Inf"
    assert "unbounded dollars/h" in files.text()


def test_a_price_factor_leaves_an_unbounded_price_unbounded(files: Files) -> None:
    files.write_machines([{**CPU, "id": "i1", "price_per_hour": "+Inf"}])
    files.write_patches([{"price_factor": {"factor": 0}}])
    given = plan_input(read_machines(files.inventory), read_demand(files.demand).needs)

    changed = apply_patches(given, files.patches)

    assert [math.isinf(one.machine.price_usd_per_hour) for one in changed.machines.values()] == [True]
    assert difference_of(make_plan(given), make_plan(changed)).is_empty
