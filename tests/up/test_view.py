"""What a person sees: on a terminal of any size, in a log, at the end, and in the report file."""

import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from rich.console import Console

from bigfleet.cli.get.moves import Move, MoveState
from bigfleet.cli.runtime.failures import RunFault
from bigfleet.cli.up.amounts import amount_text, covered_share, duration_text, plain_numbers
from bigfleet.cli.up.fleet_check import FleetCheck
from bigfleet.cli.up.fleet_observer import merged
from bigfleet.cli.up.observer import ActionTally, ClusterFigures, FleetFigures, SeenAction
from bigfleet.cli.up.report import COVERAGE_ROWS, RunResult, report_document, summary, write_report
from bigfleet.cli.up.shard_tables import SUMMARY_MOVES_MAX, moves_text, shard_table, shards_over_time
from bigfleet.cli.up.state_dir import ShardPoint, TimelinePoint
from bigfleet.cli.up.supervisor import ChildStatus
from bigfleet.cli.up.view import LiveView, RunStatus, look_words, short_words
from bigfleet.model.frames import UnmetReason
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.sim.packing.comparison import PackedCost
from bigfleet.sim.pods.placement import PodCounts

GIB_MILLI = 2**30 * 1000


def figures(clusters: int = 3) -> FleetFigures:
    short = ClusterFigures(
        demand={"cpu": 2641500, "memory": 1031 * GIB_MILLI, "nvidia.com/gpu": 14000},
        shortfall={"cpu": 8000, "memory": 40 * GIB_MILLI, "nvidia.com/gpu": 2000},
        bound={"cpu": 4090000, "memory": 2210 * GIB_MILLI, "nvidia.com/gpu": 12000},
        bound_machines=19,
        pending_machines=2,
        cost_usd_per_hour=1234.5,
    )
    return FleetFigures(
        cycle=7,
        clusters={f"cluster-{number}": short for number in range(clusters)},
        machines={(state, kind): 111 for state in MachineState if state for kind in CapacityType if kind},
        shortfall_by_model={"any": {"nvidia.com/gpu": 2000}},
        unmet={UnmetReason.PRIORITY_STARVED: 2, UnmetReason.NO_MATCHING_SUPPLY: 1},
        unjoined_machines=4,
    )


CHECK = FleetCheck(
    by_cluster={
        "cluster-0": PodCounts(pods=400, unplaced=0, booting=0),
        "cluster-1": PodCounts(pods=66, unplaced=0, booting=0),
    },
    machines=57,
    usd_per_hour=32.54,
    packed=PackedCost(usd_per_hour=26.0, machines=50, unhosted=0),
)
#: The same with pods that have no place.
SHORT_CHECK = replace(CHECK, by_cluster={**CHECK.by_cluster, "cluster-1": PodCounts(pods=66, unplaced=50, booting=13)})


def view(clusters: int = 3) -> LiveView:
    tally = ActionTally()
    for number in range(40):
        tally.take(
            SeenAction(
                action_id=str(number),
                kind="Provision",
                machine_id=f"simulated/on-demand/std.16x64/sim-1a/{number:03d}",
                cluster_id="cluster-1",
                reason="phase1.speculative",
                outcome="success" if number % 5 else "exhausted",
                decided_unix_nanos=number,
            )
        )
    children = [
        ChildStatus(name="provider", pid=12345, up=True),
        ChildStatus(name="shard", pid=54321, up=True, restarts_total=1, last_end="SIGKILL"),
    ]
    status = RunStatus(
        title=f"demo · {clusters} clusters · 120 machines · 60×",
        position_seconds=12345.0,
        run_seconds=75.0,
        done_share=0.43,
        children=children,
        clusters_connected=clusters,
        clusters=clusters,
        look=look_words("127.0.0.1:45001"),
        check=CHECK,
    )
    observer: Any = SimpleNamespace(figures=figures(clusters), actions=tally, answers=True, cycles_total=431)
    clock: Any = SimpleNamespace(monotonic_seconds=lambda: 5.0)
    return LiveView(observer, lambda: status, clock)


def several_shards() -> FleetFigures:
    each = figures()
    by_shard = {
        f"shard-{number}": FleetFigures(
            cycle=7,
            clusters={f"cluster-{number}": each.clusters["cluster-0"]},
            machines={(MachineState.CONFIGURED, CapacityType.SPOT): 40},
        )
        for number in range(3)
    }
    return merged(by_shard, tuple(f"cluster-{number}" for number in range(3)), moved_machines=11)


MOVE = Move(
    move_id="7-1",
    tier="idle",
    donor="shard-1",
    recipient="shard-0",
    state=MoveState.ARRIVED,
    machines=4,
    machine_ids=("a", "b", "c", "d"),
    instance_type="std.16x64",
    zone="sim-1b",
    why="shard-0 lacks cpu 60 for 4 cycles: 4 idle machines of std.16x64 in sim-1b come from shard-1",
    reason="",
    enqueued_unix_nanos=1,
)


def view_of_several(moves: int = 1) -> LiveView:
    one = view()
    status: Any = replace(one._status(), moves=(MOVE,) * moves)
    observer: Any = one._observer
    observer.figures = several_shards()
    return LiveView(observer, lambda: status, one._clock)


def rendered(content: Any, width: int, height: int | None = None) -> list[str]:
    console = Console(width=width, height=height or 25, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(content, height=height)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().rstrip("\n").split("\n")


@pytest.mark.parametrize(("width", "height"), [(100, 30), (160, 50)])
@pytest.mark.parametrize("clusters", [1, 3, 12, 64])
def test_the_screen_fills_the_terminal_and_no_more(width: int, height: int, clusters: int) -> None:
    lines = rendered(view(clusters), width, height)

    assert len(lines) == height
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize(("width", "height"), [(100, 30), (160, 50)])
def test_the_screen_tells_clusters_machines_decisions_and_restarts(width: int, height: int) -> None:
    text = "\n".join(rendered(view(), width, height))

    for expected in (
        "2641.5 → 4090",
        "8 cpu 40.0GiB 2 gpus",
        "14 → 12",
        "Speculative",
        "BareMetal",
        "888",
        "no idle machine fits",
        "on-demand/std.16x64/sim-1a/039",
        "shard 54321 restarted 1× (SIGKILL)",
        "43%",
        "Inspect it with: bigfleet get clusters --addr 127.0.0.1:45001",
    ):
        assert expected in text


@pytest.mark.parametrize("height", [24, 30])
def test_a_narrow_screen_drops_columns_and_cuts_nothing(height: int) -> None:
    lines = rendered(view(), 80, height)
    text = " ".join("\n".join(lines).split())

    assert len(lines) == height
    assert max(map(len, lines)) <= 80
    # The outcome of an action may be cut, its reason not.
    assert "…" not in text.replace("(ex…", "")
    for expected in (
        "demo · 3 clusters · 120 machines · 60× up 1m15s at 3h25m 0.0 actions/s",
        "● provider 12345 ● shard 54321 restarted 1× (SIGKILL) ● 3/3 clusters connected",
        "pods: 466, without a place: 0; $32.54/h, packer $26.00/h, ratio 1.25",
        "needs short: 2 outranked, 1 nothing fits; 4 machines never joined",
        "cluster cpu gpus machines short $/h",
        "cluster-0 2641.5 → 4090 14 → 12 19 8 cpu 40.0GiB 2 gpus 1234",
        "machines Speculative Idle Configured Failed in transition all",
        "BareMetal 111 111 111 111 444 888",
        "no idle machine fits on-demand/std.16x64/sim-1a/039",
    ):
        assert expected in text


@pytest.mark.parametrize(("width", "height"), [(100, 30), (120, 40), (160, 60)])
@pytest.mark.parametrize("moves", [0, 1, 40])
def test_the_screen_of_several_shards_fills_the_terminal_and_tells_their_moves(
    width: int, height: int, moves: int
) -> None:
    lines = rendered(view_of_several(moves), width, height)
    text = "\n".join(lines)

    assert len(lines) == height
    assert max(map(len, lines)) <= width
    for expected in ("shards: wanted → bound", "shard-2", "cluster-2", "moves: 11 machines so far", "last decisions"):
        assert expected in text
    assert ("shard-1 → shard-0" in text) == bool(moves)
    assert ("machines ───" in text) == (height >= 40)


def test_a_narrow_screen_of_several_shards_cuts_no_table() -> None:
    lines = rendered(view_of_several(0), 80, 40)
    text = " ".join("\n".join(lines).split())

    assert max(map(len, lines)) <= 80
    assert "shard machines covered cpu gpus short" in text
    assert "shard-2 40 86% 2641.5 → 4090 14 → 12 8 cpu 40.0GiB 2 gpus" in text


def test_a_log_line_of_several_shards_says_what_each_covers() -> None:
    line = view_of_several().plain_line()

    assert "; shard-0 covers 86% with 19 of 40, shard-1 covers 86% with 19 of 40, shard-2 covers" in line
    assert ", 11 moved [" in line


def test_the_summary_of_several_shards_explains_their_moves() -> None:
    point = replace_point(
        shards={"shard-0": ShardPoint(machines=43, bound_machines=42, covered=0.84)}, moved_machines=4
    )
    parts = (
        shard_table(several_shards(), title="shards"),
        shards_over_time([POINT, point]),
        moves_text([MOVE] * (SUMMARY_MOVES_MAX + 2)),
    )
    text = "\n".join(rendered(summary(several_result(), *parts), 110))

    for expected in (
        "11 moved between 3 shards",
        "cluster-1        40",
        "84%   43",
        "and 2 before",
        "7-1 shard-1 → shard-0, 4 std.16x64 in sim-1b, idle (tier 1): arrived",
        "shard-0 lacks cpu 60 for 4 cycles",
    ):
        assert expected in text


def test_the_report_of_several_shards_has_each_of_them_and_every_move() -> None:
    document = report_document(several_result())

    assert document["moves"] == 11
    assert document["by_shard"]["shard-1"]["clusters"] == ["cluster-1"]
    assert (document["by_shard"]["shard-1"]["machines"], document["by_shard"]["shard-1"]["covered"]) == (40, 0.8571)
    assert document["move_log"] == [
        {
            "id": "7-1",
            "tier": "idle",
            "from": "shard-1",
            "to": "shard-0",
            "state": "arrived",
            "machines": 4,
            "instance_type": "std.16x64",
            "zone": "sim-1b",
            "why": MOVE.why,
            "reason": None,
            "enqueued_unix_nanos": 1,
        }
    ]
    assert "by_shard" not in report_document(result())


def test_a_log_line_says_the_same_in_one_line() -> None:
    line = view().plain_line()

    assert line.startswith("1m15s 43% at 3h25m: wanted/bound cpu 7924.5/12.3k")
    assert "57 machines" in line
    assert line.endswith("[shard restarted 1x, last SIGKILL]")


def test_the_line_says_why_needs_are_short_and_who_never_joined() -> None:
    words = "needs short: 2 outranked, 1 nothing fits; 4 machines never joined"

    assert f"; {words}; pods: 466, without a place: 0; $32.54/h, packer $26.00/h, ratio 1.25 [" in view().plain_line()
    assert words in "\n".join(rendered(view(), 200, 40))
    assert short_words(FleetFigures()) == ""


POINT = TimelinePoint(
    seconds=60.0,
    demand={"cpu": 10.0, "gpu-milli": 2500.0},
    bound={"cpu": 8.0},
    shortfall={"cpu": 2.0},
    bound_machines=3,
    shortfall_by_model={"H100": {"cpu": 2.0}, "": {"cpu": 1.0}},
)


def result(*, is_trace: bool = True, points: int = 61) -> RunResult:
    return RunResult(
        figures=figures(),
        actions={"Bootstrap": {"success": 4, "running": 1}},
        timeline=[POINT] * points,
        shard_ids=("shard-0",),
        cycles=9,
        seconds=12.3456,
        restarts=2,
        is_trace=is_trace,
        finished=True,
        check=CHECK,
    )


def replace_point(**changes: Any) -> TimelinePoint:
    return msgspec.structs.replace(POINT, **changes)


def several_result() -> RunResult:
    return replace(result(is_trace=False), figures=several_shards(), moves=(MOVE,))


def test_the_report_has_plain_numbers_in_base_units(tmp_path: Path) -> None:
    write_report(tmp_path / "report.json", result())
    report = json.loads((tmp_path / "report.json").read_text())

    assert report["clusters"]["cluster-1"] == {
        "demand": {"cpu": 2641.5, "memory": 1031 * 2**30, "nvidia.com/gpu": 14},
        "bound_machines": 19,
        "bound": {"cpu": 4090, "memory": 2210 * 2**30, "nvidia.com/gpu": 12},
        "shortfall": {"cpu": 8, "memory": 40 * 2**30, "nvidia.com/gpu": 2},
        "cost_usd_per_hour": 1234.5,
    }
    assert report["machines"]["Configured"] == 444
    assert report["actions"] == {"Bootstrap": {"success": 4, "running": 1}}
    assert (report["shards"], report["moves"], report["cycles"]) == (["shard-0"], 0, 9)
    assert (report["seconds"], report["restarts"]) == (12.346, 2)
    assert report["timeline"][0]["demand"] == {"cpu": 10.0, "gpu-milli": 2500.0}
    assert report_document(result()) == report


def test_a_report_that_cannot_be_written_is_a_failed_run(tmp_path: Path) -> None:
    with pytest.raises(RunFault, match="--report"):
        write_report(tmp_path, result())


def test_the_summary_is_one_page() -> None:
    lines = rendered(summary(result()), 110)

    text = "\n".join(lines)
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 110
    for expected in ("H100", "no GPU", "61 of 61", "peak 3 machines", "80%", "4 success", "restarted 2×"):
        assert expected in text
    assert text.count("1m00s") == COVERAGE_ROWS


def summary_lines(check: FleetCheck) -> list[str]:
    """Return the summary's lines about pods and cost on a terminal of 80 columns."""
    lines = [" ".join(line.split()) for line in rendered(summary(replace(result(is_trace=False), check=check)), 80)]
    start = lines.index("pods and cost")
    return lines[start : next(n for n, line in enumerate(lines) if n > start and line.startswith("machines Spec"))][:-1]


def test_the_summary_tells_pods_without_a_place_and_the_cost_beside_a_packer_s() -> None:
    assert summary_lines(CHECK) == [
        "pods and cost",
        "pods 466",
        "without a place 0 placed one by one as kube-scheduler does",
        "machines in service 57 the fleet with its idle machines: $32.54/h",
        "a packer takes 50 its fleet, for the same pods: $26.00/h",
        "cost ratio 1.25 this fleet ÷ the packer's",
    ]
    assert summary_lines(SHORT_CHECK) == [
        "pods and cost",
        "pods 466",
        "without a place 50 cluster-1: 50",
        "booting 13 their machines are being created or configured",
        "machines in service 57 the fleet with its idle machines: $32.54/h",
        "a packer takes 50 its fleet, for the same pods: $26.00/h",
        "cost ratio - no comparison: some pods have no place",
    ]


def test_a_fleet_that_cannot_host_the_pods_gets_words_and_no_ratio() -> None:
    unhosted = replace(SHORT_CHECK, packed=PackedCost(usd_per_hour=1.0, machines=3, unhosted=37))

    assert summary_lines(unhosted)[-1] == "a packer takes - no comparison: 37 pods fit on no machine that is left"
    assert summary_lines(replace(CHECK, packed=None))[-1] == (
        "machines in service 57 free: no machine of this fleet has a price"
    )
    free = summary_lines(replace(CHECK, packed=PackedCost(usd_per_hour=0.0, machines=3, unhosted=0)))
    assert free[-1] == "cost ratio - no comparison: the packer pays nothing"


def test_the_summary_names_the_clusters_with_the_most_pods_without_a_place() -> None:
    counts = {f"cluster-{n}": PodCounts(pods=10, unplaced=n, booting=0) for n in range(7)}

    text = "\n".join(rendered(summary(replace(result(), check=replace(CHECK, by_cluster=counts))), 110))
    assert "cluster-6: 6, cluster-5: 5, cluster-4: 4, cluster-3: 3, and 2 more clusters" in text


def test_a_demonstration_s_summary_speaks_of_no_trace() -> None:
    text = "\n".join(rendered(summary(result(is_trace=False)), 110))

    assert "trace" not in text
    assert "GPU model" not in text


@pytest.mark.parametrize(
    ("milli", "dimension", "text"),
    [
        (0, "cpu", "0"),
        (1500, "cpu", "1.5"),
        (12000, "cpu", "12"),
        (12_345_000, "cpu", "12.3k"),
        (0, "memory", "0"),
        (5 * 2**40 * 1000, "memory", "5.0TiB"),
        (3 * 2**20 * 1000, "memory", "3.0MiB"),
        (512_000, "memory", "512B"),
    ],
)
def test_amounts_read_well(milli: int, dimension: str, text: str) -> None:
    assert amount_text(milli, dimension) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.9, "0s"), (185, "3m05s"), (7800, "2h10m"), (12902960, "149d 8h")])
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_coverage_is_that_of_the_worst_dimension() -> None:
    assert covered_share({"cpu": 100, "memory": 100}, {"cpu": 25, "memory": 10}) == 0.75
    assert covered_share({}, {}) == 1.0


def test_plain_numbers_are_whole_where_they_can_be() -> None:
    assert repr(plain_numbers({"cpu": 1500, "gpu": 2000})) == "{'cpu': 1.5, 'gpu': 2}"
