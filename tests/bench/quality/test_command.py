"""`python -m bench.quality` prints tables of 120 columns, writes its figures, and names wrong options in one line."""

import ast
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import bench.quality
import bigfleet.sim.packing
from bench.quality.__main__ import main
from bench.quality.candidates import CANDIDATES, Candidate
from bench.quality.catalogue import Data, load
from bench.quality.evaluation import Figure, Task, checksum, evaluate
from bench.quality.reports.criteria import Criterion, criteria
from bench.quality.reports.findings import (
    Finding,
    dear_idle,
    dear_victim,
    empty_rollup,
    idle_gpu,
    impossible_pod,
    many_small,
    opposite_shapes,
    other_cluster,
    sold_out,
    swinging_demand,
    ten_rows,
)
from bench.quality.values import Scheduler, Start

JUDGES = ("bound", "claims", "integer", "judges", "packer", "placement", "reports/criteria", "scheduler", "values")
#: Of `bigfleet.sim.packing`: `bigfleet up` uses them as well.
PACKING = ("arrays", "packer", "values")
SOURCES = [
    *(Path(bench.quality.__file__).parent / f"{module}.py" for module in JUDGES),
    *(Path(bigfleet.sim.packing.__file__).parent / f"{module}.py" for module in PACKING),
]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_judge_shares_no_code_with_what_it_judges(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported += [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]

    packing = ("bigfleet.sim.packing", *(f"bigfleet.sim.packing.{module}" for module in PACKING))
    allowed = ("bigfleet.model.labels", "bigfleet.model", "bigfleet.demo.trace", *packing)
    assert [name for name in imported if name.startswith("bigfleet") and name not in allowed] == []
    assert [name for name in imported if "candidate" in name] == []


@pytest.fixture(autouse=True)
def _no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BIGFLEET_QUALITY_DATA", raising=False)


def test_a_run_prints_its_tables_and_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "quality.json"
    options = ["--families", "F1,F8b", "--sizes", "small", "--seeds", "0..1", "--candidate", "packer"]

    assert main([*options, "--integer-effort", "0", "--json", str(record)]) == 0

    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 120
    for text in ("synthetic data: packer, least-allocated", "F8b", "claims: rules broken", "4 figures, checksum"):
        assert text in printed
    written = json.loads(record.read_text())
    assert [(f["family"], f["seed"]) for f in written["figures"]] == [("F1", 0), ("F1", 1), ("F8b", 0), ("F8b", 1)]
    assert all(figure["over_packer"] == 1.0 for figure in written["figures"])
    assert written["checksum"] in printed


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--families", "F9"], "'F9' is no family"),
        (["--sizes", "huge"], "'huge' is no size"),
        (["--seeds", "3..1"], "'3..1' is no seed"),
        (["--scheduler", "fair"], "'fair' is no scheduler"),
        (["--candidate", "magic"], "'magic' is no candidate"),
        (["--jobs", "0"], "'0' is not a number from 1"),
        (["--json", "/nowhere/at/all.json"], "/nowhere/at: no such folder"),
    ],
)
def test_a_wrong_option_is_named(options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(options)

    assert exit_.value.code == 2
    assert says in capsys.readouterr().err


def test_missing_data_ends_with_one_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--data", str(tmp_path)])

    assert "no CSV file" in str(exit_.value.code)
    assert "\n" not in str(exit_.value.code)


def task(family: str, *candidates: str, starts: Sequence[Start] = (Start.NOTHING,), effort: int = 0) -> Task:
    """Return a small task on the synthetic data."""
    return Task(
        family=family,
        size="small",
        seed=0,
        starts=tuple(starts),
        schedulers=(Scheduler.LEAST_ALLOCATED,),
        candidates=candidates,
        orders=3,
        integer_effort=effort,
        has_impossible_pod=False,
        data=None,
    )


def test_evaluations_are_equal_from_run_to_run() -> None:
    first, again = evaluate(task("F8f", "packer", "engine")), evaluate(task("F8f", "packer", "engine"))

    assert checksum(first) == checksum(again)
    assert checksum(first) != checksum(first[:1])


def test_the_bound_lies_below_the_best_integer_answer_and_that_below_the_packer() -> None:
    (figure,) = evaluate(task("F7", "packer", effort=1))

    assert figure.integer is not None
    assert 0 < figure.bound <= figure.integer + 1e-6
    assert figure.integer <= figure.cost + 1e-6
    assert figure.violations == 0


def test_the_engine_settles_from_nothing_and_after_steps() -> None:
    nothing, steps = evaluate(task("F6", "engine", starts=tuple(Start)))

    assert nothing.is_at_rest
    assert steps.is_at_rest
    assert nothing.actions - nothing.actions_unneeded == 2 * nothing.machines, "each is created and bound"
    assert steps.cost > 0
    assert nothing.bound == steps.bound


DATA = load(None)
#: What the engine of this version does; a change of its decisions changes these figures on purpose.
MEASURED: dict[Callable[[Candidate, Data], Finding], str] = {
    impossible_pod: "0 of 13 machines reclaimed, 200 pods lose their place",
    opposite_shapes: "0 machines bound, 2 of 2 pods starve",
    many_small: "64 machines, $3.20/h",
    other_cluster: "60 cpu of another cluster preempted",
    dear_victim: "a-dear preempted",
    sold_out: "36 creations wasted in 36 cycles",
    swinging_demand: "75 reclaims, 80 bootstraps",
    empty_rollup: "held",
}


@pytest.mark.parametrize("find", MEASURED, ids=lambda find: find.__name__)
def test_a_finding_measures_what_the_engine_does(find: Callable[[Candidate, Data], Finding]) -> None:
    assert find(CANDIDATES["engine"](), DATA).measured == MEASURED[find]


@pytest.mark.parametrize(
    ("find", "measured"),
    [
        (opposite_shapes, "2 machines bound, 0 of 2 pods starve"),
        (ten_rows, "1 machines, $0.40/h"),
        (many_small, "1 machines, $1.60/h"),
        (dear_idle, "$0.20/h"),
        (idle_gpu, "0 of 1 GPU pods starve"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_finding_is_gone_where_pods_are_packed(find: Callable[[Candidate, Data], Finding], measured: str) -> None:
    assert find(CANDIDATES["packer"](), DATA).measured == measured


def figure(**fields: object) -> Figure:
    """Return a figure that meets every threshold, with some fields changed."""
    values: dict[str, object] = {
        "candidate": "x",
        "family": "F1",
        "size": "medium",
        "seed": 0,
        "start": "nothing",
        "scheduler": "least-allocated",
        "pods": 1000,
        "clusters": 1,
        "cost": 1.0,
        "completed": 1.0,
        "packer": 1.1,
        "bound": 0.95,
        "integer": None,
        "machines": 5,
        "violations": 0,
        "first_violations": (),
        "unplaced": 0,
        "lost": 0.0,
        "lost_worst": 0,
        "lost_unprotected": 0.0,
        "short": 0,
        "short_hostable": 0,
        "impossible": 0,
        "lost_to_neighbour": 0,
        "held_ratio": {},
        "cycles": 3,
        "actions": 10,
        "actions_unneeded": 0,
        "is_at_rest": True,
        "engine_seconds": 0.1,
    }
    return Figure(**{**values, **fields})  # type: ignore[arg-type]


def met(*figures: Figure) -> dict[str, bool | None]:
    """Return which thresholds are met."""
    found: Sequence[Criterion] = criteria(figures)
    return {one.what: one.is_met for one in found}


def test_a_good_figure_meets_what_concerns_it_and_nothing_else() -> None:
    verdicts = met(figure())

    assert False not in verdicts.values()
    assert {what for what, is_met in verdicts.items() if is_met is None} == {
        "pods lost, most-allocated",
        "÷ packer, F5",
        "÷ bound, from nothing, most",
        "÷ bound, ten steps, least",
        "÷ bound, ten steps, most",
        "÷ best integer, ≤ 300 pods",
        "lost to an impossible pod",
    }


@pytest.mark.parametrize(
    ("fields", "missed"),
    [
        ({"violations": 1}, "claims: rules broken"),
        ({"unplaced": 4}, "pods not placeable, first-fit"),
        ({"lost": 6.0}, "pods lost, least-allocated"),
        ({"lost": 6.0, "scheduler": "most-allocated"}, "pods lost, most-allocated"),
        ({"short_hostable": 1}, "called short, could be hosted"),
        ({"packer": 1.04}, "÷ packer, ≥ 100 pods, not F5"),
        ({"family": "F5", "packer": 0.98}, "÷ packer, F5"),
        ({"bound": 0.9}, "÷ bound, from nothing, least"),
        ({"bound": 0.9, "scheduler": "most-allocated"}, "÷ bound, from nothing, most"),
        ({"bound": 0.88, "start": "steps"}, "÷ bound, ten steps, least"),
        ({"integer": 0.96}, "÷ best integer, ≤ 300 pods"),
        ({"impossible": 1, "lost_to_neighbour": 1}, "lost to an impossible pod"),
        ({"actions_unneeded": 1}, "actions beyond those needed"),
        ({"is_at_rest": False}, "did not come to rest"),
    ],
)
def test_each_threshold_can_be_missed(fields: dict[str, object], missed: str) -> None:
    assert [what for what, is_met in met(figure(**fields)).items() if is_met is False] == [missed]


def test_thresholds_leave_out_what_they_do_not_concern() -> None:
    """The bound says nothing of small clusters, of F5 and of the pods limit; the worst counts beside the median."""
    for fields in ({"pods": 400}, {"clusters": 20}, {"family": "F8e"}, {"family": "F5"}):
        assert met(figure(bound=0.5, **fields))["÷ bound, from nothing, least"] is None
    assert met(figure(), figure(), figure(bound=0.8))["÷ bound, from nothing, least"] is False
