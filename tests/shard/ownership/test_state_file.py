"""The state file on a real disk: epochs rise, and what cannot be used ends the start (docs/spec/shard.md §2)."""

import contextlib
import os
import sqlite3
from pathlib import Path

import pytest

from bigfleet.model.clock import NANOS_PER_SECOND
from bigfleet.shard.ownership.state_file import EPOCH_MAX, FILE_NAME, LOCK_NAME, SCHEMA, StateFile, StateFileFault
from tests.files.editing import edit

NOW_SECONDS = 1_800_000_000


class WallClock:
    """A clock whose wall stands at a given second."""

    def __init__(self, unix_seconds: float = NOW_SECONDS) -> None:
        self._unix_seconds = unix_seconds

    def monotonic_seconds(self) -> float:
        """Return nothing of interest."""
        return 0.0

    def unix_nanos(self) -> int:
        """Return the wall's time."""
        return int(self._unix_seconds * NANOS_PER_SECOND)

    async def sleep(self, seconds: float) -> None:
        """Not needed here."""
        raise AssertionError("a state file never waits")


def epoch_of(directory: Path, *, shard_id: str = "shard-0", unix_seconds: float = NOW_SECONDS) -> int:
    """Open the file, close it, and return the epoch it gave."""
    with StateFile.open(directory, shard_id=shard_id, clock=WallClock(unix_seconds)) as state_file:
        return state_file.epoch


def refusal(directory: Path, *, shard_id: str = "shard-0") -> str:
    """Return the sentence with which the file cannot be opened."""
    with pytest.raises(StateFileFault) as fault:
        StateFile.open(directory, shard_id=shard_id, clock=WallClock())
    return str(fault.value)


def execute(directory: Path, statement: str) -> None:
    """Change the file behind the shard's back."""
    edit(directory / FILE_NAME, statement)


@pytest.mark.rule("shard 2/9", "shard 15/2")
def test_a_new_file_starts_at_the_wall_clocks_seconds(tmp_path: Path) -> None:
    """A shard that lost its disk so outranks all its predecessors; the directory is made."""
    assert epoch_of(tmp_path / "deep" / "data") == NOW_SECONDS


@pytest.mark.rule("shard 2/9")
def test_a_wall_clock_at_zero_still_gives_an_epoch(tmp_path: Path) -> None:
    """At least 1: zero would say that there is no epoch."""
    assert epoch_of(tmp_path, unix_seconds=0.2) == 1


@pytest.mark.rule("shard 2/9", "shard 15/1")
def test_each_start_raises_the_epoch_by_one(tmp_path: Path) -> None:
    """Whatever the wall clock does meanwhile."""
    epochs = [epoch_of(tmp_path, unix_seconds=seconds) for seconds in (NOW_SECONDS, 5, NOW_SECONDS + 99)]

    assert epochs == [NOW_SECONDS, NOW_SECONDS + 1, NOW_SECONDS + 2]


@pytest.mark.rule("shard 1/13")
def test_the_epoch_is_on_disk_before_it_is_used(tmp_path: Path) -> None:
    """A process that dies right after its start is outranked by the next one."""
    state_file = StateFile.open(tmp_path, shard_id="shard-0", clock=WallClock())
    with contextlib.closing(sqlite3.connect(tmp_path / FILE_NAME)) as reader:
        stored = dict(reader.execute("SELECT key, value FROM meta"))
    state_file.close()

    assert stored == {"schema": str(SCHEMA), "shard_id": "shard-0", "epoch": str(NOW_SECONDS), "base": "all"}


@pytest.mark.rule("shard 2/7")
def test_a_second_process_is_told_who_holds_the_file(tmp_path: Path) -> None:
    """Nothing is raised meanwhile; when the holder ends, the file can be had."""
    with StateFile.open(tmp_path, shard_id="shard-0", clock=WallClock()):
        assert refusal(tmp_path) == (
            f"{tmp_path / LOCK_NAME}: held by process {os.getpid()}; stop it, or choose another --data-dir"
        )

    assert epoch_of(tmp_path) == NOW_SECONDS + 1


@pytest.mark.rule("shard 2/8")
def test_a_damaged_file_is_named_and_kept(tmp_path: Path) -> None:
    """It is never made again silently: its epoch may be the only one that outranks a process elsewhere."""
    epoch_of(tmp_path)
    (tmp_path / FILE_NAME).write_bytes(b"this is no database, and it is long enough to be read as one" * 40)

    assert f"{tmp_path / FILE_NAME}: file is not a database; restore the file from a backup" in refusal(tmp_path)
    assert (tmp_path / FILE_NAME).read_bytes().startswith(b"this is no database")


@pytest.mark.rule("shard 2/8")
def test_a_file_with_a_damaged_page_is_refused(tmp_path: Path) -> None:
    """The header alone proves nothing."""
    epoch_of(tmp_path)
    execute(tmp_path, "CREATE TABLE filler (text TEXT)")
    execute(tmp_path, "INSERT INTO filler VALUES (hex(zeroblob(20000)))")
    content = bytearray((tmp_path / FILE_NAME).read_bytes())
    content[4096 : 3 * 4096] = b"\xa5" * 2 * 4096
    (tmp_path / FILE_NAME).write_bytes(bytes(content))

    assert str(tmp_path / FILE_NAME) in refusal(tmp_path)


@pytest.mark.rule("shard 2/8", "shard 15/3")
@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (
            "UPDATE meta SET value = '5' WHERE key = 'schema'",
            "has schema 5, this program knows 4; run a newer bigfleet",
        ),
        ("UPDATE meta SET value = '' WHERE key = 'schema'", "has no readable schema and epoch"),
        ("UPDATE meta SET value = '0' WHERE key = 'schema'", "has no readable schema and epoch"),
        ("DELETE FROM meta WHERE key = 'epoch'", "has no readable schema and epoch"),
        ("UPDATE meta SET value = '-4' WHERE key = 'epoch'", "has no readable schema and epoch"),
        ("UPDATE meta SET value = '²' WHERE key = 'epoch'", "has no readable schema and epoch"),
        (f"UPDATE meta SET value = '{EPOCH_MAX}' WHERE key = 'epoch'", "has no readable schema and epoch"),
        ("UPDATE meta SET value = 'shard-7' WHERE key = 'shard_id'", "belongs to shard 'shard-7', not 'shard-0'"),
        ("DROP TABLE meta", ""),
    ],
)
def test_a_file_that_is_not_this_shards_is_refused(tmp_path: Path, change: str, finding: str) -> None:
    """The sentence names the file, the finding and what to do; the file stays as it is."""
    epoch_of(tmp_path)
    if change.startswith("DROP"):
        execute(tmp_path, "CREATE TABLE customers (name TEXT)")
        finding = "is not a state file of a shard, it holds 'customers'; move it away"
    execute(tmp_path, change)
    before = (tmp_path / FILE_NAME).read_bytes()

    assert finding in refusal(tmp_path)
    assert before == (tmp_path / FILE_NAME).read_bytes()


def test_another_programs_table_of_that_name_is_refused(tmp_path: Path) -> None:
    """Other columns are another file."""
    with contextlib.closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection:
        connection.execute("CREATE TABLE meta (name TEXT)")

    assert f"{tmp_path / FILE_NAME}: no such column" in refusal(tmp_path)


def test_a_refused_file_is_let_go(tmp_path: Path) -> None:
    """Whoever mends it can start at once."""
    epoch_of(tmp_path)
    execute(tmp_path, "UPDATE meta SET value = '9' WHERE key = 'schema'")
    refusal(tmp_path)
    execute(tmp_path, f"UPDATE meta SET value = '{SCHEMA}' WHERE key = 'schema'")

    assert epoch_of(tmp_path) == NOW_SECONDS + 1


@pytest.mark.rule("shard 2/8")
@pytest.mark.parametrize("name", [FILE_NAME, LOCK_NAME])
def test_a_path_that_cannot_be_opened_is_named(tmp_path: Path, name: str) -> None:
    """Not a traceback."""
    (tmp_path / name).mkdir()

    assert str(tmp_path) in refusal(tmp_path)


def test_a_data_dir_that_is_a_file_is_named(tmp_path: Path) -> None:
    """With the flag that chose it."""
    path = tmp_path / "data"
    path.write_text("")

    assert refusal(path).startswith(f"--data-dir {path}: ")
