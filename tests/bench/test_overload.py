"""What `python -m bench.overload` measures and compares, and that it finds a shard without limits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.overload.http2 import header_fields
from bench.overload.judge import bounds, is_reason
from bench.overload.run import Outcome, Phase, run
from bench.overload.scenario import FLOOD, FRAMES, MEBIBYTE, Flood, Scenario, quick
from bench.overload.watch import Memory, MemoryLimit, Scrapes, parse

TINY = Scenario(
    name="tiny",
    machines=100,
    honest=3,
    steps=1,
    quiet_seconds=3.0,
    flood_seconds=15.0,
    after_seconds=3.0,
    flood=Flood(
        sessions=10,
        greedy=1,
        silent_readers=4,
        slow_writers=6,
        reconnects=30,
        reconnects_at_once=5,
        frames=4,
        frame_bytes=20_000_000,
        frames_at_once=2,
    ),
)
#: Bounds of time, which a test on a busy machine must not compare with.
OF_TIME = {"cycle time, flood", "cycle time, after", "all is back after"}
REASON = "over the limit of 2,000 rows a second for a cluster; the newest roll-up is read in 4.2 s"


def phase(name: str, cycle_ms: float) -> Phase:
    """Return a phase whose cycles took that long."""
    return Phase(name, 60.0, cycle_ms, [cycle_ms], {"p50_ms": 1.0, "p99_ms": 2.0, "most_ms": 3.0}, 1.0, 1.0)


def good() -> Outcome:
    """Return an outcome that meets every bound of FLOOD."""
    wanted = FLOOD.wanted_at_the_end
    return Outcome(
        limit="none",
        memory=Memory(start=300.0, peak=900.0, end=600.0),
        phases={name: phase(name, ms) for name, ms in (("quiet", 10.0), ("flood", 29.0), ("after", 12.0))},
        decided={"after": [(wanted, wanted)] * FLOOD.honest},
        back_seconds=12.0,
        crowds={"greedy": {"reasons": {f"rollup_deferred: {REASON}": 3}}},
        counted={'bigfleet_shard_shed_total{limit="rollup_rows"}': 3.0},
    )


def missed(scenario: Scenario, outcome: Outcome, expected: str) -> list[str]:
    """Return the names of the bounds that are missed."""
    return [bound.name for bound in bounds(scenario, outcome, expected) if not bound.is_met]


def test_a_good_outcome_misses_nothing() -> None:
    assert missed(FLOOD, good(), good().checksum) == []


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"memory": Memory(peak=1025.0)}, "memory, peak"),
        ({"has_survived": False}, "the shard survives"),
        ({"faults": ["the flood did not come to its end"]}, "the run came to its end"),
        ({"sessions_lost": 1, "lost_because": ["UNAVAILABLE"]}, "honest sessions lost"),
        ({"back_seconds": 61.0}, "all is back after"),
        ({"back_seconds": float("inf")}, "all is back after"),
        ({"crowds": {"greedy": {"reasons": {"CANCELLED: ": 3}}}}, "those who are shed are given the reason"),
        ({"counted": {}}, "what is shed is counted"),
        ({"phases": {**good().phases, "flood": phase("flood", 31.0)}}, "cycle time, flood"),
        ({"phases": {**good().phases, "after": phase("after", float("inf"))}}, "cycle time, after"),
    ],
    ids=str,
)
def test_each_bound_is_found_missed(change: dict[str, Any], name: str) -> None:
    assert missed(FLOOD, replace(good(), **change), good().checksum) == [name]


def test_a_cluster_without_its_machines_is_found() -> None:
    wanted = FLOOD.wanted_at_the_end
    outcome = replace(good(), decided={"after": [(wanted, wanted - 1), *[(wanted, wanted)] * (FLOOD.honest - 1)]})
    names = ["honest demand that was not carried out", "decisions for honest clusters"]

    assert missed(FLOOD, outcome, good().checksum) == names


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"rollup_deferred: {REASON}", True),
        ("UNAVAILABLE: too many sessions wait for their first frame; come again in 10 s", True),
        ("RESOURCE_EXHAUSTED: no", False),
        ("cut: ", False),
    ],
)
def test_a_reason_names_a_limit_and_a_time(text: str, expected: bool) -> None:
    assert is_reason(text) is expected


def test_a_quick_run_is_the_same_with_fewer() -> None:
    for scenario in (FLOOD, FRAMES):
        small = quick(scenario)
        assert (small.name, small.memory_bytes) == (scenario.name, 1024 * MEBIBYTE)
        assert small.flood.frames <= scenario.flood.frames / 50
        assert (small.flood.greedy > 0) == (scenario.flood.greedy > 0)


def test_trailers_without_compression_are_read() -> None:
    literal = b"\x00\x0bgrpc-status\x018" + b"\x00\x0cgrpc-message\x03a b"

    assert header_fields(b"\x20\x88" + literal) == {":status": "", "grpc-status": "8", "grpc-message": "a b"}


def test_the_length_of_cycles_comes_from_what_a_scrape_adds() -> None:
    scrapes = Scrapes(cycles=[(0.0, 10, 1.0), (1.0, 12, 1.2), (2.0, 12, 1.2), (3.0, 13, 1.5), (9.0, 99, 99.0)])

    assert scrapes.cycle_ms(0.0, 3.0) == pytest.approx([100.0, 300.0])
    assert scrapes.median_cycle_ms(0.0, 3.0) == pytest.approx(200.0)
    assert scrapes.median_cycle_ms(4.0, 5.0) == float("inf")
    assert parse('# HELP x y\nx_total{a="b c"} 3.0\n') == {'x_total{a="b c"}': 3.0}


def test_a_cgroup_holds_the_shard_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder stands in for the file system of cgroup v2; without its memory controller memory is watched."""
    monkeypatch.setattr("os.geteuid", lambda: 0)
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory\n", "ascii")
    limit = MemoryLimit(1_000, tmp_path)
    limit.hold(42)
    (group,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert limit.kind == "cgroup v2 memory.max"
    assert [(group / name).read_text("ascii") for name in ("memory.max", "cgroup.procs")] == ["1000", "42"]

    (tmp_path / "cgroup.subtree_control").write_text("cpu\n", "ascii")
    assert MemoryLimit(1_000, tmp_path).kind.startswith("resident memory watched")


@pytest.mark.long
def test_a_small_flood_costs_honest_clusters_nothing_and_those_who_flood_get_reasons() -> None:
    expected = run(TINY, floods=False).checksum
    outcome = run(TINY)

    assert set(missed(TINY, outcome, expected)) <= OF_TIME
    assert outcome.crowds["frames"]["counts"]["ended"] == TINY.flood.frames
    assert outcome.crowds["reconnects"]["counts"]["ended"] == TINY.flood.reconnects


@pytest.mark.long
def test_a_shard_without_limits_is_found() -> None:
    """The planted defect: roll-ups over the rate are read, and no operator is sent a reason."""
    outcome = run(TINY, shard_module="tests.bench.unlimited_shard")
    found = set(missed(TINY, outcome, outcome.checksum)) - OF_TIME

    assert found == {"those who are shed are given the reason", "what is shed is counted"}
