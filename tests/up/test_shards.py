"""Several shards in one run: one that starves is served by others, and nobody waits for the coordinator."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from bigfleet.cli.up.children import child_specs, port_names, zones_of
from bigfleet.cli.up.settings import StoreChoice, UpSettings, settings_from_flags
from bigfleet.cli.up.state_dir import StateDir
from bigfleet.demo.fleet import default_fleet
from tests.up.up_process import UpProcess, run_command


def settings(state_dir: Path, *, shards: int, store: str | None = None) -> UpSettings:
    return settings_from_flags(
        for_duration=None,
        speed=None,
        clusters=None,
        machines=None,
        seed=1,
        state_dir=state_dir,
        fresh=False,
        report=None,
        nodes=None,
        pods=None,
        shards=shards,
        store=store,
    )


def commands(chosen: UpSettings) -> dict[str, list[str]]:
    """The command lines of a run by name, in start order."""
    with StateDir.open(chosen.state_dir, identity=chosen.identity, fresh=False) as state:
        ports = state.ports(port_names(chosen))
        fleet = default_fleet(chosen.machines, zones_of(chosen))
        return {spec.name: list(spec.arguments) for spec in child_specs(chosen, state, ports, fleet, 0.01)}


def flag(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_one_shard_has_no_coordinator_and_no_words_for_one(tmp_path: Path) -> None:
    told = commands(settings(tmp_path, shards=1))

    assert list(told) == ["provider", "shard"]
    assert flag(told["shard"], "--id") == "shard-0"
    assert flag(told["shard"], "--reclaim-after") == "2s"
    assert not {"--coordinator-addr", "--ownership", "--report-interval", "--advertise-addr"} & set(told["shard"])


def test_several_shards_share_a_provider_and_a_coordinator_that_starts_first(tmp_path: Path) -> None:
    told = commands(settings(tmp_path, shards=3))

    assert list(told) == ["provider", "coordinator", "shard-0", "shard-1", "shard-2"]
    assert flag(told["coordinator"], "--store") == f"sqlite://{tmp_path / 'coordinator.db'}"
    shards = [told[f"shard-{number}"] for number in range(3)]
    assert {flag(shard, "--coordinator-addr") for shard in shards} == {flag(told["coordinator"], "--listen")}
    assert {flag(shard, "--provider-addr") for shard in shards} == {flag(told["provider"], "--addr")}
    assert {flag(shard, "--ownership") for shard in shards} == {"assigned"}
    assert {flag(shard, "--report-interval") for shard in shards} == {flag(told["coordinator"], "--report-interval")}
    assert len({flag(shard, "--data-dir") for shard in shards}) == 3
    assert all(flag(shard, "--advertise-addr") == flag(shard, "--listen") for shard in shards)


def test_an_etcd_starts_before_the_coordinator_that_keeps_its_tables_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/opt/{name}")
    chosen = settings(tmp_path, shards=2, store="etcd")
    told = commands(chosen)

    assert list(told) == ["provider", "etcd", "coordinator", "shard-0", "shard-1"]
    assert (chosen.store, chosen.etcd_program) == (StoreChoice.ETCD, "/opt/etcd")
    client = flag(told["etcd"], "--listen-client-urls").removeprefix("http://")
    assert flag(told["coordinator"], "--store") == f"etcd://{client}/bigfleet"


@pytest.mark.parametrize("shards", [2, 3, 8])
def test_each_shard_has_a_zone_and_its_clusters(tmp_path: Path, shards: int) -> None:
    chosen = settings(tmp_path, shards=shards)

    assert len(set(zones_of(chosen))) == shards
    assert sorted(cluster for own in chosen.clusters_of.values() for cluster in own) == sorted(chosen.cluster_ids)
    assert all(chosen.clusters_of.values())


def starved_and_was_served(report: dict[str, Any]) -> list[str]:
    """Return the shards that at some time covered less than they were asked for, and later all of it with more."""
    served = []
    for shard in report["shards"]:
        points = [point["shards"][shard] for point in report["timeline"]]
        starving = [place for place, point in enumerate(points) if point["covered"] < 0.99]
        if starving and any(
            point["covered"] > 0.99 and point["machines"] > points[starving[0]]["machines"]
            for point in points[starving[0] :]
        ):
            served.append(shard)
    return served


def assert_all_is_well(report: dict[str, Any]) -> None:
    assert starved_and_was_served(report), report["timeline"]
    arrived = [move for move in report["move_log"] if move["state"] == "arrived"]
    assert report["moves"] == sum(move["machines"] for move in arrived) > 0
    for move in arrived:
        assert move["from"] != move["to"]
        if "released for this shard" in move["why"]:
            # A coordinator died between the two halves of the move, and its reason with it.
            assert report["restarts"]
            continue
        assert f"{move['to']} lacks " in move["why"]
        assert f" from {move['from']}" in move["why"]
    # What is between two shards at the end belongs to nobody for a moment; nothing is ever counted twice.
    assert 110 <= sum(shard["machines"] for shard in report["by_shard"].values()) <= 120
    for shard in report["by_shard"].values():
        assert shard["covered"] > 0.8


@pytest.mark.slow
def test_a_shard_that_starves_is_served_and_a_coordinator_that_hangs_and_dies_is_missed_by_nobody(
    tmp_path: Path,
) -> None:
    with UpProcess(tmp_path / "state", "--shards", "3", "--for", "90s") as up:
        up.wait_until(lambda: ": arrived" in up.output, "a move")
        told = len(up.output)
        coordinator = up.child("coordinator")
        assert coordinator is not None
        os.kill(coordinator, signal.SIGSTOP)
        up.wait_until(lambda: up.output[told:].count("shard-2 covers") >= 3, "shards that go on without it")
        assert "does not answer" not in up.output[told:]
        up.kill_child("coordinator")
        arrived = up.output.count(": arrived")
        up.wait_until(lambda: up.output.count(": arrived") > arrived, "a move under the next coordinator")
        report = up.finish()

    assert report["restarts"] == 1
    assert_all_is_well(report)
    assert "Traceback" not in up.output


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("etcd") is None, reason="NO etcd ON THIS MACHINE: --store etcd is NOT PROVEN")
def test_etcd_keeps_the_tables_and_may_be_killed(tmp_path: Path) -> None:
    with UpProcess(tmp_path / "state", "--shards", "2", "--store", "etcd", "--for", "75s") as up:
        up.wait_until(lambda: "shard-1 covers" in up.output, "a first line of the view")
        up.kill_child("etcd")
        up.wait_until(lambda: ": arrived" in up.output, "a move")
        report = up.finish()
    refused = run_command("up", "--state-dir", str(up.state_dir), "--shards", "2")

    assert report["restarts"] == 1
    assert_all_is_well(report)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "--store: the run in" in refused.stderr
