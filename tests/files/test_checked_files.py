"""State files under damage: what is read is what was committed, or the start is refused with the file's name.

Each kind of file is written as its process writes it, damaged, and read as its process reads it (docs/operating.md,
"Damaged and lost state files").
"""

import os
import re
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigfleet.coordinator.stores.protocol import TERM_STEP
from bigfleet.files.backup import BackupFault, back_up
from bigfleet.files.checksums import check_content, has_checksums
from tests.engine.proof import in_proportion
from tests.files.editing import as_of_schema
from tests.files.stored import CLOUD, COORDINATOR, NOW_SECONDS, PROVIDER, ROOMS, SHARD, STATE_FILES, Stored

#: Changes that each file has.
CHANGES = 6
#: What a remedy tells to do, of which each refusal names one.
REMEDIES = ("restore", "move it", "move the file away", "choose another", "run a newer", "start the newer", "make room")


class StoredFiles:
    """One kind of file: what each of its files has, and what a start on them reads."""

    def __init__(self, stored: Stored, *, is_killed: bool) -> None:
        self.stored = stored
        with folder() as place:
            if is_killed:
                write_and_be_killed(stored, stored.path(place))
            else:
                stored.write(stored.path(place), CHANGES)
            # The index of the log is in shared memory only in name: it is made anew from the log.
            self.files: dict[str, bytes] = {
                path.name: path.read_bytes() for path in place.iterdir() if not path.name.endswith("-shm")
            }
            self.content = stored.read(stored.path(place))

    def outcome(self, files: dict[str, bytes]) -> str:
        """Start on other files; return "" when the content is read, else the refusal. Fails for everything else."""
        with folder() as place:
            for name, content in files.items():
                (place / name).write_bytes(content)
            path = self.stored.path(place)
            try:
                read = self.stored.read(path)
            except self.stored.refusal as refusal:
                text = str(refusal)
                assert str(path) in text, "the file is not named"
                assert any(remedy in text for remedy in REMEDIES), text
                for name, content in files.items():
                    left = place / name
                    assert left.suffix in (".lock", ".holder") or left.read_bytes() == content, f"{name} was changed"
                return text
            assert read == self.content, "other content was read"
            return ""


@contextmanager
def folder() -> Iterator[Path]:
    """Yield a new directory, in memory where there is some."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as name:
        yield Path(name)


#: Writes one of the files, and dies before it closes anything.
_KILLED = """
import os, pathlib, sys
from tests.files.stored import STATE_FILES
STATE_FILES[int(sys.argv[1])].write(pathlib.Path(sys.argv[2]), int(sys.argv[3]), lambda: os._exit(9))
"""


def write_and_be_killed(stored: Stored, path: Path) -> None:
    """Write in another process that dies before it closes anything, so that the log stays."""
    arguments = (str(STATE_FILES.index(stored)), str(path), str(CHANGES))
    assert subprocess.run([sys.executable, "-c", _KILLED, *arguments], check=False).returncode == 9


@pytest.fixture(scope="module", params=STATE_FILES, ids=lambda stored: stored.name)
def closed(request: pytest.FixtureRequest) -> StoredFiles:
    """Return the files of a process that ended cleanly."""
    return StoredFiles(request.param, is_killed=False)


@pytest.fixture(scope="module", params=[s for s in STATE_FILES if s.is_power_safe], ids=lambda stored: stored.name)
def killed(request: pytest.FixtureRequest) -> StoredFiles:
    """Return the files of a process that was killed: all that it committed is in the log."""
    return StoredFiles(request.param, is_killed=True)


def flipped(content: bytes, bit: int) -> bytes:
    """Return the content with one bit changed, the bits of its used bytes counted around."""
    place = bit // 8 % len(content)
    return content[:place] + bytes([content[place] ^ 1 << bit % 8]) + content[place + 1 :]


BITS = st.integers(0, 2**24)


@settings(max_examples=in_proportion(60), deadline=None)
@given(bit=BITS, is_used=st.booleans())
def test_a_flipped_bit_changes_nothing_or_is_refused(closed: StoredFiles, bit: int, is_used: bool) -> None:
    """Anywhere in the file; half of the tries in bytes that are not zero, which most of the others are."""
    name = closed.stored.name
    content = closed.files[name]
    if is_used:
        used = [place for place, byte in enumerate(content) if byte]
        bit = used[bit // 8 % len(used)] * 8 + bit % 8
    closed.outcome({**closed.files, name: flipped(content, bit)})


def test_names_of_tables_that_are_no_text_are_refused(closed: StoredFiles, tmp_path: Path) -> None:
    """One bit in the type of a value makes bytes of its text."""
    edited = tmp_path / closed.stored.name
    edited.write_bytes(closed.files[closed.stored.name])
    with closing(sqlite3.connect(edited, isolation_level=None)) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        changed = connection.execute("UPDATE sqlite_master SET name = CAST(name AS BLOB) WHERE name = 'meta'").rowcount
    if changed:
        assert closed.outcome({**closed.files, closed.stored.name: edited.read_bytes()})


@settings(max_examples=in_proportion(25), deadline=None)
@given(size=st.integers(0, 2**24))
def test_a_file_that_is_cut_anywhere_is_refused(closed: StoredFiles, size: int) -> None:
    name = closed.stored.name
    content = closed.files[name]
    size %= len(content)
    # SQLite reads zeros where a file ends early: without zeros at its end it has the same content.
    assert closed.outcome({**closed.files, name: content[:size]}) or not any(content[size:])


@settings(max_examples=in_proportion(25), deadline=None)
@given(bit=BITS)
def test_a_flipped_bit_in_the_log_changes_nothing_or_is_refused(killed: StoredFiles, bit: int) -> None:
    """SQLite reads a log up to the first damaged frame and takes the rest for never written."""
    name = f"{killed.stored.name}-wal"
    killed.outcome({**killed.files, name: flipped(killed.files[name], bit)})


@settings(max_examples=in_proportion(25), deadline=None)
@given(size=st.integers(0, 2**24))
def test_a_log_that_is_cut_anywhere_is_refused(killed: StoredFiles, size: int) -> None:
    name = f"{killed.stored.name}-wal"
    content = killed.files[name]
    assert killed.outcome({**killed.files, name: content[: size % len(content)]})


@settings(max_examples=in_proportion(25), deadline=None)
@given(bit=BITS)
def test_a_damaged_counter_costs_nothing(closed: StoredFiles, bit: int) -> None:
    """A higher number would have the file refused, so the counter has a checksum; the file has all the rest."""
    name = f"{closed.stored.name}.commits"
    with folder() as place:
        for each, content in {**closed.files, name: flipped(closed.files[name], bit)}.items():
            (place / each).write_bytes(content)
        assert closed.stored.read(closed.stored.path(place))[1] == closed.content[1]


#: By name: what happens to the files of a process that ended cleanly, and what the refusal says.
Harm = Callable[[StoredFiles, str], dict[str, bytes]]
HARMS: dict[str, tuple[Harm, str]] = {
    "empty": (lambda found, name: {**found.files, name: b""}, "is empty, and .* shows that it was written before"),
    "deleted": (
        lambda found, name: {each: content for each, content in found.files.items() if each != name},
        "does not exist, and .* shows that it was written before",
    ),
    "zeros": (lambda found, name: {**found.files, name: bytes(len(found.files[name]))}, r"not a database|malformed"),
    "a page of zeros": (
        lambda found, name: {**found.files, name: found.files[name][:4096] + bytes(4096) + found.files[name][8192:]},
        "malformed|damaged",
    ),
    "another type of a column": (
        lambda found, name: {**found.files, name: found.files[name].replace(b" TEXT", b" TEXU")},
        "schema",
    ),
    "another file": (lambda found, name: {**found.files, name: b"text of somebody\n" * 400}, "not a database"),
    "older": (lambda found, name: {**found.files, name: older(found.stored)}, r"it is an older copy"),
}


def older(stored: Stored) -> bytes:
    """Return the file as it was before its last changes."""
    with folder() as place:
        stored.write(stored.path(place), CHANGES - 2)
        return stored.path(place).read_bytes()


@pytest.mark.rule("shard 2/8", "shard 15/3", "coordinator 3/13")
@pytest.mark.parametrize("harm", HARMS)
def test_each_harm_is_refused(closed: StoredFiles, harm: str) -> None:
    """None of them is a new, empty state."""
    change, finding = HARMS[harm]
    assert re.search(finding, closed.outcome(change(closed, closed.stored.name)) or "it was not refused")


# ---- files that come from elsewhere ------------------------------------------------------------------------------


def put(directory: Path, files: Mapping[str, bytes]) -> None:
    """Write files into a directory."""
    for name, content in files.items():
        (directory / name).write_bytes(content)


def outranks(stored: Stored, later: object, former: object) -> bool:
    """Return whether the later of two starts wins, also over starts that its file does not know."""
    if stored is SHARD:
        assert isinstance(later, int)
        return later >= LATER_SECONDS
    if stored is COORDINATOR:
        assert isinstance(later, int)
        assert isinstance(former, int)
        return later >= former + TERM_STEP
    # A reader of a provider starts again with a full list; what belongs to a provider has no readers.
    return stored in (CLOUD, ROOMS) or later != former


LATER_SECONDS = NOW_SECONDS + 3600


def test_a_copy_without_a_counter_outranks_every_start_since(
    closed: StoredFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that was put somewhere else, or back after a disk was lost."""
    stored = closed.stored
    monkeypatch.setattr("tests.files.stored.NOW_SECONDS", LATER_SECONDS)
    with folder() as place:
        put(place, {stored.name: closed.files[stored.name]})
        first, state = stored.read(stored.path(place))
        second, again = stored.read(stored.path(place))
    assert state == again == closed.content[1]
    assert outranks(stored, first, closed.content[0])
    # Where there is a counter again, the next start is an ordinary one.
    if stored in (SHARD, COORDINATOR):
        assert isinstance(first, int)
        assert second == first + 1
    else:
        assert second == first


@pytest.mark.parametrize(
    "stored", [each for each in STATE_FILES if each is not COORDINATOR], ids=lambda each: each.name
)
def test_a_backup_is_restored_over_a_file_that_went_on(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counter that is left shows more commits than the backup has; it is used all the same, and outranks them."""
    with folder() as place, folder() as elsewhere:
        path, backup = stored.path(place), elsewhere / "backup"
        stored.write(path, CHANGES)
        content = stored.read(path)
        assert back_up(path, backup, lambda _copy: None) == backup.stat().st_size
        stored.write(path, CHANGES)
        monkeypatch.setattr("tests.files.stored.NOW_SECONDS", LATER_SECONDS)
        path.write_bytes(backup.read_bytes())

        first, state = stored.read(path)
        assert (state, outranks(stored, first, content[0])) == (content[1], True)
        # It is a backup no more: from now on an older copy is refused.
        now = path.read_bytes()
        stored.write(path, CHANGES + 2)
        path.write_bytes(now)
        with pytest.raises(stored.refusal, match="it is an older copy"):
            stored.read(path)


def test_a_damaged_file_is_not_backed_up(closed: StoredFiles) -> None:
    """Better known on the day of the backup than on that of the restore."""
    name = closed.stored.name
    content = closed.files[name]
    with folder() as place:
        path, backup = place / name, place / "backup"
        for place_of_byte in range(len(content) - 1, 0, -1499):
            put(place, {**closed.files, name: flipped(content, place_of_byte * 8)})
            refusal = ""
            try:
                back_up(path, backup, lambda _copy: None)
            except BackupFault as fault:
                refusal = str(fault)
            if refusal:
                assert str(path) in refusal
                assert not backup.exists()
                continue
            with folder() as elsewhere:
                closed.stored.path(elsewhere).write_bytes(backup.read_bytes())
                assert closed.stored.read(closed.stored.path(elsewhere))[1] == closed.content[1]
            backup.unlink()


def test_an_older_file_is_not_backed_up(closed: StoredFiles) -> None:
    """A backup would be used without a look at the counter."""
    name = closed.stored.name
    with folder() as place:
        put(place, {**closed.files, name: older(closed.stored)})
        with pytest.raises(BackupFault, match=r"commits, and .*\.commits shows"):
            back_up(place / name, place / "backup", lambda _copy: None)


def test_a_file_of_the_former_schema_gets_checksums(closed: StoredFiles) -> None:
    """With the same content; from then on damage is found."""
    stored = closed.stored
    with folder() as place:
        path = stored.path(place)
        put(place, closed.files)
        as_of_schema(path, stored.former)
        assert stored.read(path)[1] == closed.content[1]
        with closing(sqlite3.connect(path)) as connection:
            assert has_checksums(connection)
            check_content(connection)
        path.write_bytes(b"")
        with pytest.raises(stored.refusal, match="is empty"):
            stored.read(path)


def test_a_file_of_the_former_schema_in_the_place_of_a_newer_one_is_an_older_copy(closed: StoredFiles) -> None:
    with folder() as place:
        path, counter = closed.stored.path(place), f"{closed.stored.name}.commits"
        put(place, closed.files)
        as_of_schema(path, closed.stored.former)
        put(place, {counter: closed.files[counter]})
        with pytest.raises(closed.stored.refusal, match=r"has no checksums, and .*\.commits shows \d+ commits"):
            closed.stored.read(path)


LOCKS = {SHARD: "shard.lock", PROVIDER: "provider.db.lock", COORDINATOR: "coordinator.db.holder"}


@pytest.mark.parametrize("stored", LOCKS, ids=lambda each: each.name)
def test_a_damaged_lock_file_names_its_holder_all_the_same(stored: Stored) -> None:
    """Only people read its text; the lock is held by the operating system."""
    with folder() as place:

        def second() -> None:
            with (place / LOCKS[stored]).open("r+b") as lock:
                lock.write(b"\xff")
            with pytest.raises(stored.refusal, match=r"held by|in use by"):
                stored.read(stored.path(place))

        stored.write(stored.path(place), 1, second if stored is not COORDINATOR else partial(_in_thread, second))


def _in_thread(work: Callable[[], None]) -> None:
    # Reading a coordinator's file runs a loop of its own.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()
