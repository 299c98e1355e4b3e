"""State files of real processes: copied without their log, backed up in use, restored, readable by others."""

import json
import os
import shutil
import sqlite3
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from bigfleet.shard.ownership.state_file import FILE_NAME, LOCK_NAME
from tests.coordinator.coordinator_process import coordinator
from tests.e2e.disks.small_disk import needs_small_disk, small_disk
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.processes import bigfleet, free_port, run_bigfleet, serving

pytestmark = pytest.mark.slow


@contextmanager
def shard(directory: Path, *more: str, shard_id: str = "shard-0") -> Iterator[Path]:
    """Run a shard with a few machines of its own on a state directory; yield its log."""
    address, log = f"127.0.0.1:{free_port()}", directory.with_name(f"{directory.name}.log")
    flags = ("--id", shard_id, "--listen", address, "--metrics-addr", "off", "--fake-provider", "4")
    with serving(address, log, "shard", *flags, "--data-dir", str(directory), *more):
        yield log


@contextmanager
def provider(state: Path, *more: str) -> Iterator[Path]:
    """Run a simulated provider on a state file; yield its log."""
    address, log = f"127.0.0.1:{free_port()}", state.with_name(f"{state.name}.log")
    flags = ("--addr", address, "--metrics-addr", "off", "--state", str(state), "--seed-count", "20")
    with serving(address, log, "provider", "simulated", *flags, *more):
        yield log


def refused_shard(directory: Path, shard_id: str) -> str:
    """Return what a shard says that does not start on a directory."""
    flags = ("--id", shard_id, "--listen", "127.0.0.1:0", "--metrics-addr", "off", "--fake-provider", "4")
    done = run_bigfleet("shard", *flags, "--data-dir", str(directory))
    assert done.returncode == 1, done.stderr
    return done.stderr


def epoch_of(path: Path) -> int:
    """Return the epoch in a state file."""
    with closing(sqlite3.connect(path)) as connection:
        return int(connection.execute("SELECT value FROM meta WHERE key = 'epoch'").fetchone()[0])


def events(log: Path, event: str) -> list[dict[str, Any]]:
    """Return the log lines of an event."""
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == event]


def modes_of(*folders: Path) -> dict[str, int]:
    """Return the permission bits of folders and of all that is in them but logs and sockets."""
    found = [*folders, *(path for folder in folders for path in folder.rglob("*"))]
    is_state = [path for path in found if path.suffix not in (".log", ".admin")]
    return {str(path): stat.S_IMODE(path.stat().st_mode) for path in is_state}


def test_a_copy_of_a_running_shards_file_without_its_log_is_the_same_shard(tmp_path: Path) -> None:
    """It is refused under every other id, and is no new shard that owns everything."""
    copied = tmp_path / "copied"
    copied.mkdir()
    with shard(tmp_path / "data"):
        shutil.copyfile(tmp_path / "data" / FILE_NAME, copied / FILE_NAME)

    assert "belongs to shard 'shard-0', not 'evil'" in refused_shard(copied, "evil")


def test_a_file_without_its_meta_row_starts_no_shard(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    with closing(sqlite3.connect(data / FILE_NAME)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
    assert (data / FILE_NAME).stat().st_size > 0

    assert "has no meta row" in refused_shard(data, "shard-0")


def test_a_shard_is_backed_up_while_it_runs_and_restored(tmp_path: Path) -> None:
    """As docs/operating.md says; the restored shard outranks what ran after the backup."""
    data, backup = tmp_path / "data", tmp_path / "backup.db"
    with shard(data):
        done = run_bigfleet("shard", "backup", str(backup), "--data-dir", str(data))
        assert done.returncode == 0, done.stderr
    for _ in range(2):
        with shard(data):
            pass
    former = epoch_of(data / FILE_NAME)
    again = run_bigfleet("shard", "backup", str(backup), "--data-dir", str(data))
    assert (again.returncode, "exists" in again.stderr) == (1, True)

    for path in data.glob(f"{FILE_NAME}*"):
        path.unlink()
    shutil.copy(backup, data / FILE_NAME)
    wait_until(lambda: time.time() > former + 1, "the wall clock stands")
    with shard(data):
        assert epoch_of(data / FILE_NAME) > former


def test_a_provider_is_backed_up_while_it_runs_and_restored(tmp_path: Path) -> None:
    """As docs/providers-operating.md says: state and simulated cloud, with all machines."""
    state, backup = tmp_path / "p" / "state.db", tmp_path / "b" / "state.db"
    for folder in (state.parent, backup.parent):
        folder.mkdir()
    with provider(state):
        done = run_bigfleet("provider", "backup", "--state", str(state), str(backup))
        assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in backup.parent.iterdir()) == ["state.db", "state.db.cloud"]

    with provider(backup) as log:
        wait_until(lambda: events(log, "provider.started"), "the restored provider never lists its machines")
        assert [line["machines"] for line in events(log, "provider.started")] == [20]
        reset = run_bigfleet("provider", "admin", "--state", str(backup), "reset-cursors")
        assert reset.returncode == 0, reset.stderr


def test_a_copy_of_a_providers_file_without_its_log_does_not_start_empty(tmp_path: Path) -> None:
    state = tmp_path / "state.db"
    with closing(sqlite3.connect(state)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
    flags = ("--addr", "127.0.0.1:0", "--metrics-addr", "off", "--state", str(state))
    done = run_bigfleet("provider", "simulated", *flags)

    assert (done.returncode, "has no tables" in done.stderr) == (1, True)


def test_a_copy_of_a_coordinators_file_without_its_log_does_not_start_empty(tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
    done = run_bigfleet("coordinator", "--store", f"sqlite://{path}", "--metrics-addr", "off")

    assert (done.returncode, "has no tables" in done.stderr) == (1, True)


def test_nobody_else_can_use_a_new_state(tmp_path: Path) -> None:
    """Files are 0600 and directories 0700 under every umask."""
    former = os.umask(0)
    try:
        with shard(tmp_path / "data"), provider(tmp_path / "state.db"):
            found = modes_of(tmp_path / "data")
            found |= {path: mode for path, mode in modes_of(tmp_path).items() if "state.db" in path}
        found |= _coordinators_modes(tmp_path)
    finally:
        os.umask(former)

    assert len(found) > 8
    assert {path: oct(mode) for path, mode in found.items() if mode & 0o077} == {}


def _coordinators_modes(folder: Path) -> dict[str, int]:
    store = folder / "store"
    with coordinator(folder, "--store", f"sqlite://{store}/c.db") as running:
        saved = running.run("snapshot", "save", str(folder / "saved"))
        assert saved.returncode == 0, saved.stderr
        return modes_of(store, folder / "saved")


def test_a_loose_mode_is_a_warning_at_the_start(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with shard(data) as log:
        assert events(log, "store.mode_loose") == []
    (data / FILE_NAME).chmod(0o644)
    with shard(data) as log:
        (line,) = events(log, "store.mode_loose")

    assert (line["file"], line["mode"], line["level"]) == (str(data / FILE_NAME), "0644", "warning")


@needs_small_disk
def test_a_shard_on_a_full_disk_names_it_and_starts_when_there_is_room(tmp_path: Path) -> None:
    """The lock file is the first that takes a block of the disk."""
    flags = ("--id", "shard-0", "--listen", "127.0.0.1:0", "--metrics-addr", "off", "--fake-provider", "4")
    with small_disk(tmp_path / "disk") as disk:
        command = disk.command([*bigfleet("shard"), *flags, "--data-dir", str(disk.folder)])
        disk.fill()
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
        assert done.returncode == 1, done.stderr
        assert f"--data-dir {disk.folder}: No space left on device; make room on its disk" in done.stderr
        assert "Traceback" not in done.stderr
        assert not (disk.inside / LOCK_NAME).read_bytes()

        disk.make_room()
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                wait_until((disk.inside / FILE_NAME).exists, "the shard does not start")
            finally:
                process.kill()
        # nsenter becomes the shard, with the same id.
        assert (disk.inside / LOCK_NAME).read_text() == f"{process.pid}\n"
