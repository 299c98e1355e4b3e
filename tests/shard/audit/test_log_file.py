"""The audit log on disk: rotation, restarts, a file that is moved away, and disks that take nothing."""

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigfleet.model.compute import compute_inline
from bigfleet.model.states import MachineState
from bigfleet.recording.growing_file import OLD_FILES_MAX
from bigfleet.shard.audit.log import GENESIS, START, chained, read_line
from bigfleet.shard.audit.log_file import AuditFile, AuditFileFault
from bigfleet.shard.audit.verification import check
from bigfleet.shard.ports import ShardSettings
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.engine.proof import in_proportion
from tests.shard.world import ScriptedProvider, World, machine, need

S = MachineState
SIZE_BYTES_MAX = 1000


class Writer:
    """Writes records of a fixed size, as an audit does."""

    def __init__(self, path: Path, size_bytes_max: int = SIZE_BYTES_MAX) -> None:
        self.file = AuditFile(path, size_bytes_max=size_bytes_max)
        self.sequence, self.chain = self.file.head

    def write(self, count: int = 1) -> None:
        """Write that many records."""
        for _ in range(count):
            self.sequence += 1
            fields: dict[str, object] = {"time": "2026-01-01T00:00:00Z", "machine": f"m{self.sequence:04d}"}
            line, _chain = chained(fields, self.sequence, self.chain, has_previous=True)
            self.file.make_room(len(line))
            line, chain = chained(fields, self.sequence, self.chain, has_previous=self.file.is_new_file)
            self.file.append(line)
            self.chain = chain


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the log is."""
    return tmp_path / "audit.log"


def files_of(path: Path) -> Iterator[tuple[str, list[bytes]]]:
    """Yield the files of a log, oldest first."""
    for number in range(OLD_FILES_MAX + 1, -1, -1):
        each = path.with_name(f"{path.name}.{number}") if number else path
        if each.exists():
            yield each.name, each.read_bytes().splitlines(keepends=True)


def test_a_new_log_starts_with_the_first_record(path: Path) -> None:
    """Its first line says so, and nobody else may read it."""
    writer = Writer(path)
    assert (writer.file.head, writer.file.is_new_file) == (START, True)
    writer.write(2)
    writer.file.close()

    first, second = map(json.loads, path.read_text().splitlines())
    assert (first["sequence"], first["previous"], second["sequence"], "previous" in second) == (1, GENESIS, 2, False)
    assert path.stat().st_mode & 0o007 == 0


@pytest.mark.rule("shard 13/6")
def test_a_log_rotates_below_its_size_and_keeps_four_old_files(path: Path) -> None:
    """Every file is at most as large as asked for, each goes on from the one before."""
    writer = Writer(path)
    writer.write(60)
    writer.file.close()

    files = list(files_of(path))
    assert [name for name, _lines in files] == [*(f"audit.log.{number}" for number in range(4, 0, -1)), "audit.log"]
    assert all(sum(map(len, lines)) <= SIZE_BYTES_MAX for _name, lines in files)
    checked = check(files)
    assert checked.findings == ()
    assert checked.first_sequence > 1
    assert checked.head == (60, writer.chain)


def test_a_line_larger_than_a_file_is_written_all_the_same(path: Path) -> None:
    """Each into a file of its own."""
    writer = Writer(path, size_bytes_max=10)
    writer.write(3)
    writer.file.close()

    assert [len(lines) for _name, lines in files_of(path)] == [1, 1, 1]
    assert check(files_of(path)).findings == ()


@pytest.mark.rule("shard 13/9")
def test_the_next_process_goes_on_where_the_last_one_ended(path: Path) -> None:
    """Within the file, and from the file before when there is nothing in this one yet."""
    first = Writer(path)
    first.write(3)
    first.file.close()
    second = Writer(path)
    assert second.file.head == (3, first.chain)
    second.write(1)
    second.file.close()
    path.rename(path.with_name("audit.log.1"))
    third = Writer(path)
    third.write(1)
    third.file.close()

    assert third.file.head == (4, second.chain)
    assert check(files_of(path)).findings == ()


def test_what_a_crash_left_of_a_line_is_cut_off(path: Path) -> None:
    """The chain goes on from the last whole record."""
    first = Writer(path)
    first.write(2)
    first.file.close()
    whole = path.read_bytes()
    for rest in (b'{"time":"2026-01-01T00', b"{", whole[:-1].rpartition(b"\n")[2]):
        path.write_bytes(whole + rest)
        second = Writer(path)
        assert second.file.head == (2, first.chain)
        second.file.close()
        assert path.read_bytes() == whole


def test_a_torn_first_line_leaves_an_empty_log(path: Path) -> None:
    """There was no record yet."""
    path.write_bytes(b'{"time":"2026')
    writer = Writer(path)
    writer.write()
    writer.file.close()

    assert check(files_of(path)).findings == ()


@pytest.mark.parametrize("content", [b"127.0.0.1 localhost\n", b"no line feed", b"{}\n", b"\x00" * 2_000_000])
def test_a_file_that_is_no_audit_log_is_refused_and_kept(path: Path, content: bytes) -> None:
    """A path that was mistyped must not cost the file behind it."""
    path.write_bytes(content)
    with pytest.raises(
        AuditFileFault, match="is not a record of an audit log; move the file away to continue in a new one"
    ):
        AuditFile(path, size_bytes_max=SIZE_BYTES_MAX)

    assert path.read_bytes() == content


@settings(max_examples=in_proportion(150), deadline=None)
@given(data=st.data())
def test_a_flipped_bit_ends_the_start_or_is_found_by_the_check(data: st.DataObject) -> None:
    """The start reads the last two records alone; `bigfleet audit verify` finds what is wrong in all others."""
    with TemporaryDirectory() as name:
        path = Path(name) / "audit.log"
        first = Writer(path, size_bytes_max=10_000)
        first.write(data.draw(st.integers(1, 4)))
        first.file.close()
        content = bytearray(path.read_bytes())
        bit = data.draw(st.integers(0, len(content) * 8 - 1))
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        refusal = ""
        try:
            second = Writer(path, size_bytes_max=10_000)
        except AuditFileFault as fault:
            refusal = str(fault)
        if refusal:
            assert refusal.startswith(f"{path}: ")
            assert "move the file away" in refusal
            assert path.read_bytes() == content
        else:
            assert second.file.head == (first.sequence, first.chain)
            second.file.close()
            assert check(files_of(path)).findings


@pytest.mark.parametrize("damage", [b"x", b""], ids=["another byte", "no record"])
def test_a_log_that_was_rotated_last_goes_on_from_a_sound_file_only(path: Path, damage: bytes) -> None:
    """A damaged older file is no reason to count from one again."""
    first = Writer(path)
    first.write(2)
    first.file.close()
    older = path.with_name("audit.log.1")
    content = path.read_bytes()
    older.write_bytes(content[:-40] + damage + content[-40 + len(damage) :] if damage else b"text\n")
    path.write_bytes(b"")

    with pytest.raises(AuditFileFault, match=r"audit\.log\.1: .*move the file away"):
        AuditFile(path, size_bytes_max=SIZE_BYTES_MAX)


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A directory that is missing, a directory in its place, a pipe that nobody reads."""
    os.mkfifo(tmp_path / "pipe")
    for path, finding in [
        (tmp_path / "missing" / "audit.log", "No such file or directory"),
        (tmp_path, "Is a directory"),
        (tmp_path / "pipe", "is neither a file nor a device"),
    ]:
        with pytest.raises(AuditFileFault) as raised:
            AuditFile(path, size_bytes_max=SIZE_BYTES_MAX)
        assert str(raised.value) == f"{path}: {finding}; choose a file that can be written"


def test_two_processes_never_share_a_log(path: Path) -> None:
    """Their records would break each other's chain."""
    first = AuditFile(path, size_bytes_max=SIZE_BYTES_MAX)
    with pytest.raises(AuditFileFault, match="another process writes it"):
        AuditFile(path, size_bytes_max=SIZE_BYTES_MAX)
    first.close()
    AuditFile(path, size_bytes_max=SIZE_BYTES_MAX).close()


@pytest.mark.rule("shard 13/7")
def test_a_log_that_was_moved_away_is_begun_anew_when_told(path: Path) -> None:
    """Until then records go where the file went; both parts are one chain."""
    writer = Writer(path)
    writer.write(2)
    moved = path.with_name("audit.log.1")
    path.rename(moved)
    writer.write(1)
    writer.file.reopen()
    writer.write(1)
    writer.file.reopen()
    writer.write(1)
    writer.file.close()

    assert [len(lines) for _name, lines in files_of(path)] == [3, 2]
    assert check(files_of(path)).findings == ()


def test_a_log_that_cannot_be_opened_anew_goes_on_in_the_old_file(path: Path) -> None:
    """No record is lost for it."""
    place = path.parent / "logs"
    place.mkdir()
    writer = Writer(place / "audit.log")
    writer.write(1)
    moved = path.parent / "moved"
    place.rename(moved)
    writer.file.reopen()
    writer.write(1)
    writer.file.close()

    assert len((moved / "audit.log").read_bytes().splitlines()) == 2


def test_a_rotation_that_fails_goes_on_in_the_same_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again when as much has been written once more."""
    writer = Writer(path)
    real_open = os.open
    tries: list[object] = []

    def no_room(target: object, *arguments: object) -> int:
        tries.append(target)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "open", no_room)
    writer.write(12)
    monkeypatch.setattr(os, "open", real_open)
    writer.write(6)
    writer.file.close()

    assert 0 < len(tries) < 6
    assert len(list(files_of(path))) == 2
    assert check(files_of(path)).findings == ()


def test_a_disk_that_takes_half_a_line_keeps_none_of_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in the file is always whole."""
    writer = Writer(path)
    writer.write(1)
    whole = path.read_bytes()
    real_write = os.write
    left = [10]

    def nearly_full(opened: int, content: bytes) -> int:
        if not left:
            raise OSError(28, "No space left on device")
        return real_write(opened, content[: left.pop()])

    monkeypatch.setattr(os, "write", nearly_full)
    with pytest.raises(OSError, match="No space left"):
        writer.write(1)
    monkeypatch.setattr(os, "write", real_write)
    assert path.read_bytes() == whole
    writer.sequence -= 1
    writer.write(1)
    writer.file.close()

    assert check(files_of(path)).findings == ()


@pytest.mark.rule("shard 13/4")
@pytest.mark.virtual_time
async def test_the_disk_is_asked_once_a_second_and_only_when_something_was_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that were replaced meanwhile are asked for too, and every descriptor is closed again."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    before = len(os.listdir("/proc/self/fd"))
    writer = Writer(path)
    syncing = asyncio.create_task(writer.file.keep_synced(LoopClock(), compute_inline, lambda: None))
    clock = LoopClock()
    await clock.sleep(3.5)
    assert synced == []
    writer.write(3)
    await clock.sleep(1)
    assert len(synced) == 1
    await clock.sleep(5)
    assert len(synced) == 1
    writer.write(9)
    await clock.sleep(1)
    assert len(synced) > 2
    syncing.cancel()
    await asyncio.gather(syncing, return_exceptions=True)
    writer.file.close()

    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.virtual_time
async def test_a_disk_that_cannot_keep_what_was_written_is_counted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log goes on."""

    def broken(_opened: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    failures: list[int] = []
    writer = Writer(path)
    syncing = asyncio.create_task(writer.file.keep_synced(LoopClock(), compute_inline, lambda: failures.append(1)))
    for _ in range(2):
        writer.write(1)
        await LoopClock().sleep(1.5)
    syncing.cancel()
    await asyncio.gather(syncing, return_exceptions=True)
    writer.file.close()

    assert len(failures) == 2


@pytest.mark.rule("shard 15/26")
@pytest.mark.virtual_time
async def test_a_device_that_is_always_full_costs_records_and_nothing_else() -> None:
    """`/dev/full` refuses every write: each is counted, and actions are carried out."""
    log = AuditFile(Path("/dev/full"), size_bytes_max=SIZE_BYTES_MAX)
    provider = ScriptedProvider(synchronous=True)
    provider.add(*(machine(f"m{number}", S.IDLE) for number in range(3)))
    world = World(provider, audit_log=log)
    world.connect("c1").report(need("c1", "12"))
    await world.cycle()
    log.close()

    assert [outcome for _kind, _machine, outcome in world.outcomes()] == ["success"] * 3
    assert (world.metric("audit_write_errors_total"), world.metric("cycle_failures_total")) == (3, 0)


@pytest.mark.rule("shard 13/4")
@pytest.mark.virtual_time
async def test_a_shard_writes_a_log_that_verifies(path: Path) -> None:
    """Through the real file, over a rotation and a restart."""
    provider = ScriptedProvider(synchronous=True)
    provider.add(*(machine(f"m{number}", S.IDLE) for number in range(12)))
    for epoch in (1, 2):
        log = AuditFile(path, size_bytes_max=4096)
        settings = ShardSettings(empty_rollup_guard=False)
        world = World(provider, settings=settings, epoch=epoch, audit_log=log)
        operator = world.connect("c1")
        operator.report(need("c1", "24"))
        await world.settle()
        operator.report()
        await world.settle(8)
        log.close()

    files = list(files_of(path))
    checked = check(files)
    assert (checked.findings, len(files) > 1) == ((), True)
    last = read_line(files[-1][1][-1].removesuffix(b"\n"))
    assert last is not None
    assert checked.head == (last.sequence, last.chain)
