"""A state file is lost while its process runs: the process copies what it has open, and nothing is lost."""

import asyncio
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from bigfleet.cli.runtime.state_watch import LOOK_SECONDS, RESCUE_AGAIN_SECONDS, StateWatch
from bigfleet.files.backup import BackupFault
from bigfleet.model.ids import MachineId, ShardId
from bigfleet.model.ownership import Base, Owned, OwnershipRow, OwnershipVersion, RowKind
from bigfleet.provider.records.refusal import StartRefused
from bigfleet.provider.storage.sqlite import SqliteProviderStore, back_up_provider
from bigfleet.provider.storage.store import Batch
from bigfleet.shard.ownership.state_file import StateFile, StateFileFault, back_up_state
from tests.files.stored import Wall, record
from tests.patience import PATIENCE_SECONDS

#: Commits of the open file since its start: all of them are in the write-ahead log only.
COMMITS = 20


class Running(Protocol):
    """A process with an open state file."""

    path: Path
    refusal: type[Exception]

    def fault(self) -> str: ...
    def rescue(self) -> bool: ...
    def change(self) -> None: ...
    def stop(self) -> None: ...
    def content(self) -> object: ...


class Provider:
    """A provider with bindings."""

    refusal: type[Exception] = StartRefused

    def __init__(self, directory: Path) -> None:
        self.path = directory / "provider.db"
        directory.mkdir(exist_ok=True)
        self._store = SqliteProviderStore(self.path)
        self._content: object = replace(self._store.load(b"incarnat"), incarnation=b"")
        self._changes = 0

    def change(self) -> None:
        """Commit one more binding."""
        for _ in range(COMMITS):
            self._changes += 1
            self._store.commit(Batch(head=self._changes, floor=0, records=(record(self._changes),)))

    def content(self) -> object:
        """Return what the file had at the start."""
        return self._content

    def fault(self) -> str:
        """Return what is wrong with the file."""
        return self._store.file_fault()

    def rescue(self) -> bool:
        """Copy the file if it is lost."""
        return self._store.rescue()

    def stop(self) -> None:
        """Close the file."""
        self._store.close()

    @staticmethod
    def back_up(path: Path, target: Path) -> int:
        """Do what the command does."""
        return back_up_provider(path, target)


class Shard:
    """A shard that owns some machines."""

    refusal: type[Exception] = StateFileFault

    def __init__(self, directory: Path) -> None:
        self.path = directory / "shard.db"
        self._file = StateFile.open(directory, shard_id="shard-0", clock=Wall())
        self._content = self._file.ownership.owned
        self._changes = 0

    def change(self) -> None:
        """Give one more machine away."""
        for _ in range(COMMITS):
            self._changes += 1
            row = OwnershipRow(RowKind.DISOWNED, OwnershipVersion(3, self._changes), ShardId("shard-1"), 5, None)
            held = self._file.ownership
            rows = {**held.owned.rows, MachineId(f"m-{self._changes}"): row}
            held.commit(
                Owned(base=Base.ALL, domains=frozenset(), leaving=frozenset(), rows=rows), dict(held.reservations)
            )

    def content(self) -> object:
        """Return what the file had at the start."""
        return self._content

    def fault(self) -> str:
        """Return what is wrong with the file."""
        return self._file.fault()

    def rescue(self) -> bool:
        """Copy the file if it is lost."""
        return self._file.rescue()

    def stop(self) -> None:
        """Close the file."""
        self._file.close()

    @staticmethod
    def back_up(path: Path, target: Path) -> int:
        """Do what the command does."""
        return back_up_state(path.parent, target)


def delete(path: Path) -> None:
    """Delete the database and leave its log."""
    path.unlink()


def delete_all(path: Path) -> None:
    """Delete the directory."""
    shutil.rmtree(path.parent)


def delete_log(path: Path) -> None:
    """Delete the log, which has all that was committed since the start."""
    path.with_name(f"{path.name}-wal").unlink()


def replace_by_copy(path: Path) -> None:
    """Put a copy without the log in the place of the database."""
    copy = path.with_name("copy")
    shutil.copy(path, copy)
    copy.replace(path)


def apply_advice(path: Path) -> None:
    """Do what the message says after the process has stopped."""
    aside = path.with_name("lost")
    aside.mkdir()
    for name in (path.name, f"{path.name}-wal"):
        if path.with_name(name).exists():
            path.with_name(name).rename(aside / name)
    path.with_name(f"{path.name}.rescue").rename(path)


PROGRAMS = pytest.mark.parametrize("program", [Provider, Shard])


@PROGRAMS
@pytest.mark.parametrize("loss", [delete, delete_all, delete_log, replace_by_copy])
def test_everything_survives_the_loss_of_a_state_file(
    tmp_path: Path, program: Callable[[Path], Running], loss: Callable[[Path], None]
) -> None:
    """The advice of the process, carried out, restores each binding and ownership row."""
    directory = tmp_path / "state"
    process = program(directory)
    process.change()
    loss(process.path)
    assert "do not stop this process" in process.fault()

    assert process.rescue()

    assert f"rename {process.path.name}.rescue to {process.path.name}, start again" in process.fault()
    process.stop()
    apply_advice(process.path)
    again = program(directory)
    again.stop()
    undisturbed = program(tmp_path / "other")
    undisturbed.change()
    undisturbed.stop()
    expected = program(tmp_path / "other")
    expected.stop()
    assert again.content() == expected.content()
    assert process.path.stat().st_mode & 0o777 == 0o600


@PROGRAMS
def test_a_log_of_the_lost_file_is_not_mixed_with_what_was_rescued(
    tmp_path: Path, program: Callable[[Path], Running]
) -> None:
    """A killed process leaves one. The start names it and changes nothing, and goes on when it was moved away."""
    process = program(tmp_path / "state")
    process.change()
    log = process.path.with_name(f"{process.path.name}-wal")
    process.path.unlink()
    process.rescue()
    left = log.read_bytes()
    process.stop()
    rescued = process.path.with_name(f"{process.path.name}.rescue")
    rescued.rename(process.path)
    before = process.path.read_bytes()
    log.write_bytes(left)

    with pytest.raises(process.refusal, match=rf"; move {process.path.name}-wal away and start again$"):
        program(tmp_path / "state")

    assert process.path.read_bytes() == before
    log.unlink()
    program(tmp_path / "state").stop()


@PROGRAMS
def test_a_start_without_the_file_names_the_rescue_and_never_begins_empty(
    tmp_path: Path, program: Callable[[Path], Running]
) -> None:
    """Also when the whole directory was deleted, with the counter that shows that there was a file."""
    process = program(tmp_path / "state")
    delete_all(process.path)
    process.rescue()
    process.stop()

    with pytest.raises(process.refusal, match=rf"rename {process.path.name}\.rescue to {process.path.name}"):
        program(tmp_path / "state")


@pytest.mark.parametrize("program", [Provider, Shard])
def test_a_backup_without_the_file_names_the_rescue(tmp_path: Path, program: type[Provider | Shard]) -> None:
    process = program(tmp_path / "state")
    process.path.unlink()
    process.rescue()

    with pytest.raises(BackupFault, match=rf"{process.path.name}\.rescue is the backup that its process made"):
        program.back_up(process.path, tmp_path / "backup")
    process.stop()


@PROGRAMS
def test_a_file_that_is_there_is_not_rescued(tmp_path: Path, program: Callable[[Path], Running]) -> None:
    """Nor is the lock file, which has no content."""
    process = program(tmp_path / "state")
    rescued = process.path.with_name(f"{process.path.name}.rescue")
    assert process.rescue()
    assert not rescued.exists()

    (lock,) = (path for path in process.path.parent.iterdir() if path.suffix == ".lock")
    lock.unlink()

    assert process.rescue()
    assert not rescued.exists()
    assert f"{process.path.name} is there: restart this process" in process.fault()
    process.stop()


@PROGRAMS
def test_a_file_that_came_back_and_is_lost_again_is_rescued_again(
    tmp_path: Path, program: Callable[[Path], Running]
) -> None:
    """The earlier rescue, which lacks what was written since, is retained under another name."""
    process = program(tmp_path / "state")
    aside = tmp_path / "aside"
    rescued = process.path.with_name(f"{process.path.name}.rescue")
    process.path.rename(aside)
    process.rescue()
    first = rescued.read_bytes()
    aside.rename(process.path)
    assert process.fault() == ""
    process.change()
    process.path.unlink()

    process.rescue()

    assert rescued.with_name(f"{rescued.name}.old").read_bytes() == first
    assert rescued.read_bytes() != first
    process.stop()


def test_a_rescue_that_cannot_be_written_says_why_and_succeeds_later(tmp_path: Path) -> None:
    """A file is in the place of the new rescue's directory entry until it is removed."""
    provider = Provider(tmp_path / "state")
    provider.change()
    provider.path.unlink()
    obstacle = provider.path.with_name("provider.db.rescue.new")
    obstacle.mkdir()

    assert not provider.rescue()

    assert "could not write it to" in provider.fault()
    assert "do not stop this process" in provider.fault()
    obstacle.rmdir()
    assert provider.rescue()
    provider.stop()


def test_a_commit_that_has_begun_when_the_file_is_lost_is_in_the_rescue(tmp_path: Path) -> None:
    """Its result is reported to a shard, so a rescue that was made before it would lack a binding."""
    checked, may_go_on = threading.Event(), threading.Event()

    class Slow(SqliteProviderStore):
        def file_fault(self) -> str:
            fault = super().file_fault()
            checked.set()
            assert may_go_on.wait(PATIENCE_SECONDS)
            return fault

    path = tmp_path / "provider.db"
    store = Slow(path)
    store.load(b"incarnat")
    committing = threading.Thread(target=store.commit, args=(Batch(head=1, floor=0, records=(record(1),)),))
    committing.start()
    assert checked.wait(PATIENCE_SECONDS)
    path.unlink()
    rescuing = threading.Thread(target=store.rescue)
    rescuing.start()
    rescuing.join(0.3)  # expires
    may_go_on.set()
    committing.join(PATIENCE_SECONDS)
    rescuing.join(PATIENCE_SECONDS)
    store.close()
    apply_advice(path)

    again = SqliteProviderStore(path)
    assert [one.id for one in again.load(b"another1").records] == ["m-1"]
    again.close()


class VirtualClock:
    """A clock that ends the test after some seconds."""

    def __init__(self, seconds: float) -> None:
        self._now = 0.0
        self._end = seconds

    def monotonic_seconds(self) -> float:
        """Return the virtual time."""
        return self._now

    def unix_nanos(self) -> int:
        """Not needed here."""
        raise AssertionError

    async def sleep(self, seconds: float) -> None:
        """Advance the time, and wait forever at its end."""
        self._now += seconds
        if self._now >= self._end:
            await asyncio.Event().wait()
        await asyncio.sleep(0)


def watch_for(seconds: float, look: Callable[[], str], rescue: Callable[[], bool]) -> list[str]:
    """Return what a watch of so many virtual seconds logs."""

    async def main() -> None:
        watch = StateWatch(look, CollectorRegistry(), "p", rescue=rescue)
        async with watch.watching(VirtualClock(seconds)):
            for _ in range(int(seconds / LOOK_SECONDS) * 3):
                await asyncio.sleep(0)

    with capture_logs() as logs:
        asyncio.run(main())
    return [f"{line['event']}: {line['error']}" for line in logs]


def test_the_watch_rescues_a_lost_file_within_a_look_and_logs_what_to_do(tmp_path: Path) -> None:
    provider = Provider(tmp_path / "state")
    provider.path.unlink()

    logged = watch_for(2.5, provider.fault, provider.rescue)

    assert [line.partition(":")[0] for line in logged] == ["store.file_lost", "store.file_rescued"]
    assert ["do not stop this process" in line for line in logged] == [True, False]
    assert "rename provider.db.rescue to provider.db" in logged[-1]
    provider.stop()


def test_a_rescue_that_failed_is_tried_again_every_minute() -> None:
    """A disk may get room later; without a pause each look would read all of the state."""
    calls: list[None] = []

    def rescue() -> bool:
        calls.append(None)
        return False

    watch_for(RESCUE_AGAIN_SECONDS * 2 + 1.5, lambda: "lost", rescue)

    assert len(calls) == 3
