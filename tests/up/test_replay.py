"""Whole replays with real processes: what is reported is what the trace says, also when processes are killed."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.data_dirs import TRACE_ABSENT, TRACE_NODES, TRACE_PODS, trace_dir
from tests.up.csv_demand import demand_at, machines_in
from tests.up.up_process import UpProcess

SAMPLE = Path(__file__).parent.parent / "cases" / "trace"
SAMPLE_FLAGS = ("--nodes", str(SAMPLE / "nodes.csv"), "--pods", str(SAMPLE / "pods.csv"))
COMPARED = 10


def assert_demand_is_the_trace_s(report: dict[str, Any], pods: Path) -> None:
    """Compare ten points, spread over the timeline, with the second opinion."""
    timeline = report["timeline"]
    step = (len(timeline) - 1) / (COMPARED - 1)
    points = [timeline[round(number * step)] for number in range(COMPARED)]
    expected = {point["seconds"]: demand_at(pods, point["seconds"]) for point in points}

    assert {point["seconds"]: point["demand"] for point in points} == expected
    assert len(expected) == COMPARED


def lives(log: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Split a shard's log into its processes."""
    segments: list[list[dict[str, Any]]] = []
    for line in log:
        if line["event"] == "shard.started":
            segments.append([])
        if segments:
            segments[-1].append(line)
    return segments


def assert_nothing_was_taken_before_its_cluster_spoke(life: Iterable[dict[str, Any]]) -> None:
    connected = set()
    for line in life:
        if line["event"] == "session.opened":
            connected.add(line["cluster"])
        if line["event"] == "action.finished" and line["kind"] in ("Reclaim", "Preempt"):
            assert line["cluster"] in connected, line


def assert_no_machine_changed_cluster_without_a_drain(provider_log: Iterable[dict[str, Any]]) -> None:
    calls: dict[str, list[str]] = {}
    for line in provider_log:
        if line["event"] == "operation.accepted":
            calls.setdefault(line["machine"], []).append(line["kind"])

    assert calls
    for machine, kinds in calls.items():
        expected = ["configure" if number % 2 == 0 else "drain" for number in range(len(kinds))]
        assert kinds == expected, machine


@pytest.mark.slow
def test_the_sample_is_replayed_as_its_files_say(tmp_path: Path) -> None:
    with UpProcess(tmp_path / "state", "--for", "6s", *SAMPLE_FLAGS) as up:
        report = up.finish()

    assert_demand_is_the_trace_s(report, SAMPLE / "pods.csv")
    assert sum(report["machines"].values()) == machines_in(SAMPLE / "nodes.csv")
    assert sorted(report["clusters"]) == ["cluster-0", "cluster-1", "cluster-2", "cluster-3"]
    assert (report["shards"], report["moves"], report["restarts"]) == (["shard-0"], 0, 0)
    assert report["actions"]["Bootstrap"]["success"] > 0
    seconds = [point["seconds"] for point in report["timeline"]]
    assert seconds == [6000 * number // 60 for number in range(61)]


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["shard", pytest.param("provider", marks=pytest.mark.long)])
def test_a_replay_outlives_a_killed_process(tmp_path: Path, victim: str) -> None:
    with UpProcess(tmp_path / "state", "--for", "6s", *SAMPLE_FLAGS) as up:
        up.wait_until(lambda: up.samples() >= 20, "a third of the samples")
        up.kill_child(victim)
        report = up.finish()
        shard_lives = lives(up.log("shard"))
        provider_log = up.log("provider")

    assert_demand_is_the_trace_s(report, SAMPLE / "pods.csv")
    assert_no_machine_changed_cluster_without_a_drain(provider_log)
    assert len(report["timeline"]) == 61
    assert report["restarts"] == 1, up.ends()
    assert f"{victim} restarted 1x, last SIGKILL" in up.output
    assert len(shard_lives) == (2 if victim == "shard" else 1)
    epochs = [life[0]["epoch"] for life in shard_lives]
    assert epochs == sorted(set(epochs))
    for life in shard_lives:
        assert_nothing_was_taken_before_its_cluster_spoke(life)


@pytest.mark.slow
def test_a_replay_that_was_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    with UpProcess(tmp_path / "state", "--for", "6s", *SAMPLE_FLAGS) as up:
        up.wait_until(lambda: up.samples() >= 10, "some samples")
        up.interrupt()
        first = up.finish()
    assert 10 <= len(first["timeline"]) < 61
    with UpProcess(tmp_path / "state", "--for", "6s", *SAMPLE_FLAGS) as up:
        report = up.finish()
        shard_lives = lives(up.log("shard"))

    assert report["timeline"][: len(first["timeline"])] == first["timeline"]
    assert_demand_is_the_trace_s(report, SAMPLE / "pods.csv")
    assert shard_lives[0][0]["epoch"] < shard_lives[1][0]["epoch"]
    assert_nothing_was_taken_before_its_cluster_spoke(shard_lives[1])


@pytest.mark.long
@pytest.mark.skipif(trace_dir() is None, reason=TRACE_ABSENT)
def test_the_public_trace_is_replayed_as_its_files_say(tmp_path: Path) -> None:
    folder = trace_dir()
    assert folder is not None
    flags = ("--nodes", str(folder / TRACE_NODES), "--pods", str(folder / TRACE_PODS))
    with UpProcess(tmp_path / "state", "--for", "20s", *flags) as up:
        report = up.finish()

    assert_demand_is_the_trace_s(report, folder / TRACE_PODS)
    assert sum(report["machines"].values()) == machines_in(folder / TRACE_NODES)
    # A shortfall may be seen while a cluster waits for its plan; what is served in the end is everything.
    assert not report["timeline"][-1]["shortfall"]
