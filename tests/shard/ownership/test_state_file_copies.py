"""A shard's state file that was copied without its write-ahead log, backed up while the shard runs, and restored."""

import contextlib
import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from bigfleet.files.backup import BackupFault
from bigfleet.model.clock import NANOS_PER_SECOND
from bigfleet.model.ids import MachineId, ShardId
from bigfleet.model.ownership import Base, Owned, OwnershipRow, OwnershipVersion, RowKind
from bigfleet.shard.ownership.ownership_file import OwnershipNotWritten
from bigfleet.shard.ownership.state_file import FILE_NAME, StateFile, StateFileFault, back_up_state

NOW_SECONDS = 1_800_000_000


class Wall:
    """A clock whose wall stands at a given second."""

    def __init__(self, unix_seconds: int = NOW_SECONDS) -> None:
        self._unix_seconds = unix_seconds

    def monotonic_seconds(self) -> float:
        """Return nothing of interest."""
        return 0.0

    def unix_nanos(self) -> int:
        """Return the wall's time."""
        return self._unix_seconds * NANOS_PER_SECOND

    async def sleep(self, seconds: float) -> None:
        """Not needed here."""
        raise AssertionError("a state file never waits")


def opened(directory: Path, *, shard_id: str = "shard-0", unix_seconds: int = NOW_SECONDS) -> StateFile:
    """Open the state file of a directory."""
    return StateFile.open(directory, shard_id=shard_id, clock=Wall(unix_seconds))


def owned() -> Owned:
    """Return what a shard owns that has given one machine away."""
    row = OwnershipRow(RowKind.DISOWNED, OwnershipVersion(3, 7), ShardId("shard-1"), 5, None)
    return Owned(base=Base.ALL, domains=frozenset(), leaving=frozenset(), rows={MachineId("m-1"): row})


def header_only(path: Path) -> None:
    """Write the file that a copy without its write-ahead log leaves: a header, and no table."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA wal_autocheckpoint=0")
        connection.execute("CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT")
        connection.execute("INSERT INTO meta VALUES ('schema', '2'), ('epoch', '17'), ('shard_id', 'shard-0')")
        shutil.copyfile(path, path.with_name("copy"))
    path.with_name("copy").replace(path)


@pytest.mark.parametrize("shard_id", ["shard-0", "shard-9"])
def test_a_copy_without_its_log_is_no_new_shard(tmp_path: Path, shard_id: str) -> None:
    """Of a file that an earlier version wrote: it has pages and no meta row, and a shard with any id refuses it."""
    header_only(tmp_path / FILE_NAME)
    before = (tmp_path / FILE_NAME).read_bytes()

    with pytest.raises(StateFileFault, match=r"has no meta row: .*-wal"):
        opened(tmp_path, shard_id=shard_id)

    assert before == (tmp_path / FILE_NAME).read_bytes()


def test_an_empty_meta_table_is_no_new_shard(tmp_path: Path) -> None:
    opened(tmp_path).close()
    with contextlib.closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection, connection:
        connection.execute("DELETE FROM meta")

    with pytest.raises(StateFileFault, match="has no meta row"):
        opened(tmp_path)


def test_an_empty_file_is_new(tmp_path: Path) -> None:
    """A first start that was killed before its first commit leaves one."""
    (tmp_path / FILE_NAME).touch()

    with opened(tmp_path) as state_file:
        assert state_file.epoch == NOW_SECONDS


def test_the_file_alone_holds_the_epoch_while_the_shard_runs(tmp_path: Path) -> None:
    """A copy without the log knows the shard's id and the epoch of the process that it was copied from."""
    running, copied = tmp_path / "running", tmp_path / "copied"
    copied.mkdir()
    opened(running).close()
    with opened(running) as state_file:
        shutil.copyfile(running / FILE_NAME, copied / FILE_NAME)
        with opened(copied) as copy:
            assert copy.epoch == state_file.epoch + 1
    with pytest.raises(StateFileFault, match="belongs to shard 'shard-0', not 'shard-9'"):
        opened(copied, shard_id="shard-9")


def test_a_backup_of_a_running_shard_is_restored_above_every_later_epoch(tmp_path: Path) -> None:
    """It is one file, has what was committed, and starts at the wall clock, because the shard has restarted since."""
    running, restored, backup = tmp_path / "running", tmp_path / "restored", tmp_path / "backup.db"
    with opened(running) as state_file:
        state_file.ownership.commit(owned())
        back_up_state(running, backup)
        epoch = state_file.epoch
    for _ in range(3):
        opened(running).close()
    restored.mkdir()
    shutil.copyfile(backup, restored / FILE_NAME)

    with opened(restored, unix_seconds=NOW_SECONDS + 60) as state_file:
        assert state_file.epoch == NOW_SECONDS + 60 > epoch + 3
        assert state_file.ownership.owned == owned()
    with opened(restored, unix_seconds=NOW_SECONDS + 3600) as state_file:
        assert state_file.epoch == NOW_SECONDS + 61
    assert [path.name for path in tmp_path.glob("backup*")] == ["backup.db"]
    assert backup.stat().st_mode & 0o777 == 0o600


def test_a_backup_overwrites_nothing(tmp_path: Path) -> None:
    opened(tmp_path).close()
    backup = tmp_path / "backup.db"
    backup.write_text("mine")

    with pytest.raises(BackupFault, match="exists"):
        back_up_state(tmp_path, backup)

    assert backup.read_text() == "mine"


def test_what_is_no_state_file_is_not_backed_up(tmp_path: Path) -> None:
    """Better known on the day of the backup than on that of the restore."""
    backup = tmp_path / "backup.db"
    with pytest.raises(BackupFault, match="does not exist"):
        back_up_state(tmp_path, backup)
    header_only(tmp_path / FILE_NAME)
    with pytest.raises(BackupFault, match="has no meta row"):
        back_up_state(tmp_path, backup)
    (tmp_path / FILE_NAME).write_bytes(b"no database at all" * 400)
    with pytest.raises(BackupFault, match="not a database"):
        back_up_state(tmp_path, backup)

    assert [path.name for path in tmp_path.iterdir() if "backup" in path.name] == []


def test_nothing_is_written_to_a_file_that_has_no_name_any_more(tmp_path: Path) -> None:
    """An instruction whose effect would be lost with the process fails."""
    with opened(tmp_path) as state_file:
        assert state_file.fault() == ""
        (tmp_path / FILE_NAME).unlink()

        assert "was deleted" in state_file.fault()
        with pytest.raises(OwnershipNotWritten, match="was deleted"):
            state_file.ownership.commit(owned())
        with pytest.raises(OwnershipNotWritten, match="was deleted"):
            state_file.ownership.accept_term(9)
        assert (state_file.ownership.accepted_term, dict(state_file.ownership.owned.rows)) == (0, {})


@pytest.mark.parametrize("name", ["shard.db-wal", "shard.lock"])
def test_files_beside_the_state_file_count_too(tmp_path: Path, name: str) -> None:
    """What is committed lies in the log first, and the lock keeps a second process out."""
    with opened(tmp_path) as state_file:
        (tmp_path / name).unlink()

        assert f"{name} was deleted" in state_file.fault()


def test_a_backup_by_a_user_who_may_not_search_the_directory_is_refused_in_words(tmp_path: Path) -> None:
    """As an administrator without sudo finds the directory of a systemd unit."""
    directory = tmp_path / "data"
    directory.mkdir(mode=0)
    user = os.geteuid()
    if user == 0:
        # Modes do not stop root.
        os.seteuid(65534)
    try:
        with pytest.raises(BackupFault, match=r"shard\.db: Permission denied; run this as a user who may read it"):
            back_up_state(directory, tmp_path / "backup")
    finally:
        os.seteuid(user)
