"""The directory of a run: whose it is, what it was made for, and what it never does to strangers' files."""

import json
import socket
from pathlib import Path

import msgspec
import pytest

from bigfleet.cli.runtime.failures import RunFault, UsageFault
from bigfleet.cli.up.settings import RunIdentity
from bigfleet.cli.up.state_dir import Progress, ShardPoint, StateDir, TimelinePoint

IDENTITY = RunIdentity(clusters=3, machines=120, seed=1, trace_digest="")
POINT = TimelinePoint(
    seconds=5, demand={"cpu": 1.5}, bound={}, shortfall={}, bound_machines=0, shortfall_by_model={"": {"cpu": 1.5}}
)


def open_dir(path: Path, identity: RunIdentity = IDENTITY, *, fresh: bool = False) -> StateDir:
    return StateDir.open(path, identity=identity, fresh=fresh)


def test_a_second_run_is_told_who_has_the_directory(tmp_path: Path) -> None:
    with open_dir(tmp_path / "s"), pytest.raises(RunFault, match=r"another bigfleet up \(process \d+\)"):
        open_dir(tmp_path / "s")


def test_the_lock_ends_with_the_run(tmp_path: Path) -> None:
    open_dir(tmp_path / "s").close()

    open_dir(tmp_path / "s").close()


def test_progress_is_kept_over_runs(tmp_path: Path) -> None:
    progress = Progress(position_seconds=7.25, finished=True, timeline=(POINT,))
    with open_dir(tmp_path / "s") as state:
        assert state.progress() == Progress()
        state.save_progress(progress)
    with open_dir(tmp_path / "s") as state:
        assert state.progress() == progress


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (RunIdentity(4, 120, 1, ""), "--clusters: the run in .* was started with 3, not 4"),
        (RunIdentity(3, 60, 1, ""), "--machines"),
        (RunIdentity(3, 120, 2, ""), "--seed"),
        (RunIdentity(3, 120, 1, "abc"), "--nodes and --pods: the run in .* replays no trace"),
        (RunIdentity(5, 120, 1, "", shards=5, store="sqlite"), "--shards: the run in .* was started with 1, not 5"),
    ],
)
def test_another_run_is_not_resumed(tmp_path: Path, changed: RunIdentity, said: str) -> None:
    open_dir(tmp_path / "s").close()
    with pytest.raises(UsageFault, match=said) as caught:
        open_dir(tmp_path / "s", changed)
    assert "--fresh" in str(caught.value)

    open_dir(tmp_path / "s", changed, fresh=True).close()


def test_several_shards_stay_on_their_store(tmp_path: Path) -> None:
    open_dir(tmp_path / "s", RunIdentity(3, 120, 1, "", shards=3, store="sqlite")).close()

    with pytest.raises(UsageFault, match=r"--store: the run in .* was started with sqlite, not etcd; --fresh"):
        open_dir(tmp_path / "s", RunIdentity(3, 120, 1, "", shards=3, store="etcd"))


def test_fresh_forgets_everything_of_ours(tmp_path: Path) -> None:
    with open_dir(tmp_path / "s") as state:
        state.save_progress(Progress(position_seconds=9.0))
        state.logs.mkdir()
        (state.logs / "shard.log").write_text("old")
    with open_dir(tmp_path / "s", fresh=True) as state:
        assert state.progress() == Progress()
        assert not state.logs.exists()


PLANES = RunIdentity(2, 60, 1, "", kubernetes=2)


def test_a_run_on_control_planes_leaves_the_state_of_another_run(tmp_path: Path) -> None:
    """Without `fresh`: hours of a trace may be in it."""
    with open_dir(tmp_path / "s") as state:
        state.save_progress(Progress(position_seconds=9.0))

    with pytest.raises(UsageFault, match=r"--kubernetes: the run in .* was started with 0, not 2; --fresh starts over"):
        open_dir(tmp_path / "s", PLANES)

    with open_dir(tmp_path / "s") as state:
        assert state.progress() == Progress(position_seconds=9.0)
    open_dir(tmp_path / "s", PLANES, fresh=True).close()


@pytest.mark.parametrize("identity", [PLANES, RunIdentity(3, 90, 2, "", kubernetes=3)], ids=["the same", "another"])
def test_a_run_on_control_planes_starts_over_where_one_was(tmp_path: Path, identity: RunIdentity) -> None:
    """Control planes start empty, so that such a run is never resumed."""
    with open_dir(tmp_path / "s", PLANES) as state:
        state.write_text("provider.db", "old")

    with open_dir(tmp_path / "s", identity) as state:
        assert not (state.path / "provider.db").exists()


def test_the_directory_of_another_run_inside_is_no_stranger_and_is_never_deleted(tmp_path: Path) -> None:
    """As that of `make kubernetes-demo` is inside the default directory, perhaps of a run that goes on."""
    with open_dir(tmp_path / "s" / "kubernetes", PLANES) as inner:
        inner.write_text("provider.db", "in use")
        open_dir(tmp_path / "s").close()
        open_dir(tmp_path / "s", fresh=True).close()

        assert (inner.path / "provider.db").read_text() == "in use"


def test_fresh_follows_no_link_out_of_the_directory(tmp_path: Path) -> None:
    treasure = tmp_path / "treasure"
    treasure.mkdir()
    (treasure / "file").write_text("kept")
    open_dir(tmp_path / "s").close()
    (tmp_path / "s" / "link").symlink_to(treasure)
    open_dir(tmp_path / "s", fresh=True).close()

    assert (treasure / "file").read_text() == "kept"
    assert not (tmp_path / "s" / "link").exists()


@pytest.mark.parametrize("fresh", [False, True])
def test_a_directory_without_our_marker_is_refused_and_left_alone(tmp_path: Path, fresh: bool) -> None:
    (tmp_path / "precious").write_text("kept")
    with pytest.raises(UsageFault, match="precious"):
        open_dir(tmp_path, fresh=fresh)

    assert [entry.name for entry in tmp_path.iterdir()] == ["precious"]


def test_an_empty_directory_is_taken(tmp_path: Path) -> None:
    open_dir(tmp_path).close()


@pytest.mark.parametrize("name", ["progress.json", "bigfleet-up.json"])
def test_a_damaged_file_is_named_with_the_way_out(tmp_path: Path, name: str) -> None:
    open_dir(tmp_path).close()
    (tmp_path / name).write_text("{half")

    def resume() -> None:
        with open_dir(tmp_path) as state:
            state.progress()

    with pytest.raises(UsageFault, match=f"{name}.*--fresh"):
        resume()
    open_dir(tmp_path, fresh=True).close()


NAMES = ("provider", "provider_metrics", "shard", "shard_metrics")


def test_ports_stay_as_long_as_they_are_free(tmp_path: Path) -> None:
    with open_dir(tmp_path) as state:
        ports = state.ports(NAMES)
        assert tuple(ports) == NAMES
        assert len(set(ports.values())) == 4
        assert state.ports(NAMES) == ports
        with socket.socket() as squatter:
            squatter.bind(("127.0.0.1", ports["shard"]))
            squatter.listen()

            assert state.ports(NAMES)["shard"] != ports["shard"]


def test_a_directory_of_a_version_that_knew_one_shard_goes_on_with_one(tmp_path: Path) -> None:
    open_dir(tmp_path).close()
    marker = tmp_path / "bigfleet-up.json"
    known = json.loads(marker.read_text())
    del known["identity"]["shards"], known["identity"]["store"]
    marker.write_text(json.dumps(known))
    open_dir(tmp_path).close()

    with pytest.raises(UsageFault, match=r"--shards: the run in .* was started with 1, not 3; --fresh starts over"):
        open_dir(tmp_path, RunIdentity(3, 120, 1, "", shards=3, store="sqlite"))


def test_a_point_tells_of_shards_where_there_are_several(tmp_path: Path) -> None:
    one = ShardPoint(machines=40, bound_machines=31, covered=0.75)
    several = msgspec.structs.replace(POINT, shards={"shard-0": one}, moved_machines=4)
    with open_dir(tmp_path) as state:
        state.save_progress(Progress(timeline=(POINT, several)))
        assert state.progress().timeline == (POINT, several)

    assert "shards" not in msgspec.to_builtins(POINT)
