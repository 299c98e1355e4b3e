"""`bigfleet plan` reads machines from Parquet: the columns of CSV, nested forms beside, wrong files told by name."""

import json
import math
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from bigfleet.cli.main import app
from bigfleet.cli.plan import parquet as parquet_module
from bigfleet.cli.plan.inputs import MachineGiven, read_machines
from bigfleet.cli.runtime.failures import UsageFault
from tests.commands import run_here
from tests.engine_cases import load_fleets

MACHINE: dict[str, Any] = {
    "id": "m1",
    "state": "Configured",
    "cluster": "shop",
    "instance_type": "c.16",
    "zone": "a",
    "capacity_type": "OnDemand",
    "allocatable": {"cpu": "16", "memory": "30Gi"},
    "labels": {"rack": "r1"},
    "price_per_hour": 0.5,
    "assigned_priority": 50,
}
PAIRS = pa.map_(pa.string(), pa.string())


def write(path: Path, columns: dict[str, Any]) -> Path:
    """Write one column per name; the values are Arrow arrays or lists."""
    parquet.write_table(pa.table(columns), path)
    return path


def from_json(path: Path, machines: list[dict[str, Any]]) -> list[MachineGiven]:
    """Return the machines as JSON lines give them."""
    path.write_text("".join(json.dumps(machine) + "\n" for machine in machines), encoding="utf-8")
    return read_machines(path)


def refusal(path: Path) -> str:
    """Return what is said of a file that is refused with exit 2: one line that starts with its name."""
    with pytest.raises(UsageFault) as refused:
        read_machines(path)
    line = str(refused.value)
    assert (line.splitlines(), refused.value.exit_code) == ([line], 2)
    assert line.startswith(str(path))
    return line.removeprefix(str(path))


@pytest.mark.parametrize(
    ("allocatable", "labels"),
    [
        (["cpu=16;memory=30Gi"], ["rack=r1"]),
        (pa.array([[("cpu", "16"), ("memory", "30Gi")]], PAIRS), pa.array([[("rack", "r1")]], PAIRS)),
        ([{"cpu": "16", "memory": "30Gi", "gpu": None}], [{"rack": "r1", "row": None}]),
        (
            [[{"key": "cpu", "value": "16"}, {"key": "memory", "value": "30Gi"}]],
            [[{"name": "rack", "value": "r1"}, {"name": "row", "value": None}]],
        ),
        ([["cpu=16", "memory=30Gi"]], [["rack = r1"]]),
    ],
    ids=["text", "map", "struct", "list of structs", "list of texts"],
)
def test_maps_are_read_in_every_natural_form(tmp_path: Path, allocatable: Any, labels: Any) -> None:
    columns = {name: [value] for name, value in MACHINE.items()}

    path = write(tmp_path / "fleet.parquet", {**columns, "allocatable": allocatable, "labels": labels})

    assert read_machines(path) == from_json(tmp_path / "fleet.jsonl", [MACHINE])


def test_quantities_may_be_integers_and_prices_of_any_kind_of_number(tmp_path: Path) -> None:
    path = write(
        tmp_path / "fleet.PARQUET",
        {
            "id": pa.array(["a", "b", "c"]).dictionary_encode(),
            "allocatable": pa.array([[("cpu", 16)], [("cpu", 8)], []], pa.map_(pa.string(), pa.int32())),
            "price_per_hour": pa.array([Decimal("0.25"), None, Decimal("1.50")], pa.decimal128(8, 2)),
            "assigned_priority": pa.array([100.0, None, -3.0]),
            "unjoined": [True, None, False],
        },
    )

    assert read_machines(path) == from_json(
        tmp_path / "fleet.jsonl",
        [
            {"id": "a", "allocatable": {"cpu": 16}, "price_per_hour": 0.25, "assigned_priority": 100, "unjoined": True},
            {"id": "b", "allocatable": {"cpu": 8}},
            {"id": "c", "price_per_hour": 1.5, "assigned_priority": -3},
        ],
    )


def test_a_null_and_an_empty_text_are_the_default(tmp_path: Path) -> None:
    path = write(
        tmp_path / "fleet.parquet",
        {"id": ["a", "b"], "state": ["", None], "allocatable": ["", None], "price_per_hour": ["", "+Inf"]},
    )

    first, second = read_machines(path)

    assert (first.machine.state.label, dict(first.machine.allocatable), first.machine.price_usd_per_hour) == (
        "Idle",
        {},
        0.0,
    )
    assert math.isinf(second.machine.price_usd_per_hour)


@pytest.mark.parametrize("preemptor", ["list", "struct"])
@pytest.mark.parametrize("fleet", [pytest.param(fleet, id=str(fleet["seed"])) for fleet in load_fleets()[:8]])
def test_a_recorded_fleet_is_the_one_of_json_lines(tmp_path: Path, fleet: dict[str, Any], preemptor: str) -> None:
    """Every field of a machine is a column, preempted_for included."""
    text = json.dumps(fleet["inventory"])
    for quantity in ("lots", "many", "-4"):
        text = text.replace(f'"{quantity}"', '"0"')
    machines = json.loads(text)
    columns: dict[str, Any] = {name: [machine[name] for machine in machines] for name in machines[0]}
    for name, values in columns.items():
        if name.endswith(("_dollars", "_per_hour")):
            columns[name] = [float(value) for value in values]
        elif name in ("resources", "allocatable", "labels"):
            columns[name] = pa.array([list(value.items()) for value in values], PAIRS)
    if preemptor == "struct":
        names = ("cluster", "fingerprint", "group")
        columns["preempted_for"] = [
            dict(zip(names, value, strict=True)) if value else None for value in columns["preempted_for"]
        ]

    path = write(tmp_path / "fleet.parquet", columns)

    assert read_machines(path) == from_json(tmp_path / "fleet.jsonl", machines)


def test_the_command_says_the_same_of_parquet_as_of_json_lines(tmp_path: Path) -> None:
    demand, lines = tmp_path / "demand.json", tmp_path / "fleet.jsonl"
    demand.write_text(json.dumps([{"id": "n", "cluster": "shop", "aggregate": {"cpu": "20"}}]), encoding="utf-8")
    machines = [MACHINE, {**MACHINE, "id": "m2", "state": "Idle", "cluster": "", "assigned_priority": 0}]
    lines.write_text("".join(json.dumps(machine) + "\n" for machine in machines), encoding="utf-8")
    columns = {name: [machine[name] for machine in machines] for name in MACHINE}
    path = write(tmp_path / "fleet.parquet", columns)

    said = [
        CliRunner().invoke(app, ["plan", "--inventory", str(file), "--demand", str(demand)], catch_exceptions=False)
        for file in (path, lines)
    ]

    assert "1 to bind" in said[0].output
    assert said[0].output == said[1].output


# ---- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", [b"", b"id,state\nm,Idle\n", b"PAR1aaaaPAR1", b"PAR1" + b"x" * 100 + b"\x10\0\0\0PAR1"]
)
def test_what_is_no_parquet_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "fleet.parquet"
    path.write_bytes(content)

    assert refusal(path).startswith(": not a Parquet file that can be read (")


def test_a_file_that_breaks_off_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "fleet.parquet", {"id": [f"m{number}" for number in range(1000)]})
    content = bytearray(path.read_bytes())
    content[4:200] = b"\xff" * 196
    path.write_bytes(content)

    assert refusal(path).startswith(": not a Parquet file that can be read (")


def test_a_text_that_is_not_utf_8_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "fleet.parquet", {"id": pa.array([b"m", b"\xff"]).view(pa.string())})

    assert refusal(path) == ": a text is not UTF-8 (invalid start byte)"


def test_a_file_or_a_folder_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "parts.parquet"
    folder.mkdir()

    assert refusal(tmp_path / "absent.parquet") == ": No such file or directory; name a file that can be read"
    assert refusal(folder) == ": Is a directory; name a Parquet file"


def test_wrong_columns_are_named(tmp_path: Path) -> None:
    path = tmp_path / "fleet.parquet"

    assert refusal(write(path, {"zone": ["a"]})) == ": there is no column 'id', which every machine needs"
    assert refusal(write(path, {"id": ["a"], "size": [3]})).startswith(": column 'size' is unknown; write id, state")
    parquet.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["id", "id"]), path)
    assert refusal(path) == ": a column is given twice"
    assert refusal(write(path, {"id": pa.array([], pa.string())})) == ": no machines; a plan needs at least one"


@pytest.mark.parametrize(
    ("column", "fault"),
    [
        ({"id": ["a", None]}, " row 2: id is empty; every machine needs an id"),
        ({"id": [1, 2]}, " row 1: id: Expected `str`, got `int`"),
        ({"id": ["a", "a"]}, " row 2: the id 'a' is already used at"),
        ({"state": ["Idle", "Asleep"]}, " row 2: state: 'Asleep' is unknown; choose one of"),
        ({"price_per_hour": ["1", "cheap"]}, " row 2: price_per_hour: 'cheap' is not an amount"),
        ({"price_per_hour": [0.0, math.nan]}, " row 2: price_per_hour: nan is not an amount"),
        ({"assigned_priority": ["5", "high"]}, " row 2: assigned_priority: Expected `int`, got `str`"),
        ({"assigned_priority": [1.0, 1.5]}, " row 2: assigned_priority: Expected `int`, got `float`"),
        ({"zone": [b"a", b"\xff"]}, " row 1: zone: Expected `str`, got `bytes`"),
        ({"labels": [None, {"rack": 3}]}, " row 2: labels.*: Expected `str`, got `int`"),
        ({"allocatable": [{"cpu": 1.0}, {"cpu": 1.5}]}, " row 2: allocatable.*: Expected `int | str`, got `float`"),
        ({"allocatable": ["cpu=4", "cpu:4"]}, " row 2: column allocatable: 'cpu:4' is not name=value"),
        ({"allocatable": [["cpu=4"], ["cpu=4", "cpu=8"]]}, " row 2: column allocatable: 'cpu' is given twice"),
        ({"allocatable": [["cpu=4"], ["cpu"]]}, " row 2: column allocatable: 'cpu' is not a pair; use a map"),
        ({"allocatable": [4, 4]}, " row 1: allocatable: Expected `object`, got `int`"),
        ({"allocatable": [{"cpu": "4"}, {"cpu": "4 cores"}]}, " row 2: allocatable.cpu: '4 cores' is no quantity"),
    ],
)
def test_a_wrong_cell_is_named_with_its_row(tmp_path: Path, column: dict[str, Any], fault: str) -> None:
    path = write(tmp_path / "fleet.parquet", {"id": ["a", "b"], **column})

    assert refusal(path).startswith(fault)


def test_rows_are_counted_across_batches_and_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_module, "BATCH_ROWS", 2)
    path = tmp_path / "fleet.parquet"
    states = ["Idle"] * 6 + ["Asleep"]
    table = pa.table({"id": [f"m{number}" for number in range(7)], "state": states})
    parquet.write_table(table, path, row_group_size=3)

    assert refusal(path).startswith(" row 7: state: 'Asleep' is unknown")
    parquet.write_table(table.slice(0, 6), path, row_group_size=3)
    assert [one.machine.id for one in read_machines(path)] == [f"m{number}" for number in range(6)]


def test_without_pyarrow_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "fleet.parquet", {"id": ["a"]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    assert refusal(path) == (
        ": Parquet needs pyarrow, which is not installed; run make setup in a checkout, or pip install 'pyarrow>=21'"
    )


def test_the_process_refuses_in_one_line_without_a_traceback(tmp_path: Path) -> None:
    path, demand = tmp_path / "fleet.parquet", tmp_path / "demand.yaml"
    path.write_bytes(b"not parquet at all")
    demand.write_text("[]", encoding="utf-8")

    finished = run_here("plan", "--inventory", str(path), "--demand", str(demand))

    assert (finished.returncode, finished.stdout, len(finished.stderr.splitlines())) == (2, "", 1)
    assert finished.stderr.startswith(f"bigfleet: {path}: not a Parquet file that can be read")
