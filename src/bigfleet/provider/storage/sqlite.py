"""Stores records in one locked SQLite file, one transaction a batch (docs/spec/provider.md §11).

A change is a few rows. A file that is damaged, lost, older than the last commit, or of a newer schema, ends the start
with its name and the finding. It must never be recreated silently.
"""

import fcntl
import os
import socket
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import IO, Final

import msgspec

from bigfleet.files.backup import BackupFault, Finish, back_up, back_up_open
from bigfleet.files.checked_database import SUFFIX as COUNTER_SUFFIX
from bigfleet.files.checked_database import CheckedDatabase, check_presence, close_unchanged, remedy_of
from bigfleet.files.checksums import RefusedContent, check_structure, has_checksums
from bigfleet.files.private import make_file, open_file, warn_of_loose_modes
from bigfleet.files.watch import FileWatch
from bigfleet.provider.records.fence import Mark
from bigfleet.provider.records.record import Pushed, Record
from bigfleet.provider.records.refusal import StartRefused, StoreDown
from bigfleet.provider.storage.blob_encryption import Sealed
from bigfleet.provider.storage.codec import decode_record, encode_operation, encode_record
from bigfleet.provider.storage.store import Batch, Loaded
from bigfleet.provider.storage.view import Tombstone

SCHEMA_VERSION: Final = 3
#: A store that was full takes commits again when the disk has so much room.
ROOM_BYTES: Final = 1024 * 1024
#: Marks the file as ours in its header: "BFPR".
_APPLICATION_ID: Final = 0x42465052

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE machines (
  id TEXT PRIMARY KEY, revision INTEGER NOT NULL, state_since_unix_nanos INTEGER NOT NULL,
  record BLOB NOT NULL, operation BLOB);
CREATE TABLE marks (
  machine_id TEXT NOT NULL, shard_id TEXT NOT NULL, epoch INTEGER NOT NULL, sequence INTEGER NOT NULL,
  used_unix_nanos INTEGER NOT NULL, PRIMARY KEY (machine_id, shard_id)) WITHOUT ROWID;
CREATE TABLE tombstones (
  id TEXT PRIMARY KEY, revision INTEGER NOT NULL, removed_unix_nanos INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE pushed (
  id TEXT PRIMARY KEY, price REAL, price_baseline REAL, probability REAL,
  reclaim_notice INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE secrets (
  machine_id TEXT PRIMARY KEY, operation_id TEXT NOT NULL, sealed BLOB NOT NULL) WITHOUT ROWID;
"""
#: What makes a schema of this version the next one.
_MIGRATIONS: Final = {
    1: "CREATE TABLE secrets (machine_id TEXT PRIMARY KEY, operation_id TEXT NOT NULL, sealed BLOB NOT NULL) "
    "WITHOUT ROWID",
    2: "",  # it has checksums
}
#: A first start that was killed leaves no page at all.
_NO_TABLES: Final = (
    "has no tables: it was copied without its -wal file, or is damaged; copy the file of a stopped provider, use "
    "bigfleet provider backup, or move the file away to start empty"
)


class FileLock:
    """An exclusive lock beside a state file, with the holder's name in it."""

    def __init__(self, path: Path) -> None:
        #: The file that is locked; a state that loses it can be opened by a second process.
        self.path = path
        self._file: IO[str] | None = None

    @property
    def is_held(self) -> bool:
        """Return whether this object holds the lock."""
        return self._file is not None

    def acquire(self) -> None:
        """Take the lock. Raises StartRefused naming the holder, or why the file cannot be opened."""
        try:
            descriptor = open_file(self.path)
        except OSError as error:
            raise StartRefused(f"{self.path}: {error.strerror}; the state needs a directory to write in") from error
        handle = os.fdopen(descriptor, "r+", encoding="utf-8", errors="replace")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = handle.read(256).strip() or "another process"
            handle.close()
            state = self.path.with_suffix("")
            raise StartRefused(f"{state} is in use by {holder}; stop it, or choose another file") from error
        # A full disk takes no name; the lock is held all the same, and opening the state says what is wrong.
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        self._file = handle

    def release(self) -> None:
        """Give the lock back; the file stays, so that two processes never lock two different files."""
        if self._file is not None:
            self._file.close()
            self._file = None


class SqliteProviderStore:
    """State in one file. `is_power_safe` False survives a killed process, not a lost power supply."""

    def __init__(self, path: Path, *, is_power_safe: bool = True) -> None:
        self._path = path
        self._is_power_safe = is_power_safe
        self._lock = FileLock(path.with_name(path.name + ".lock"))
        self._connection: sqlite3.Connection | None = None
        self._database: CheckedDatabase | None = None
        self._watch: FileWatch | None = None
        #: Held by a commit from its look at the file on, and by a rescue, which then has all commits.
        self._using = threading.Lock()

    def file_fault(self) -> str:
        """Return what happened to the files on disk, "" while they are those that this process opened."""
        return self._watch.fault() if self._watch is not None else ""

    def rescue(self) -> bool:
        """Copy the open database to `FILE.rescue` if its file is lost; return False if that failed.

        Any thread may call it: a commit that has begun ends first, and no other is made while the file is lost.
        """
        connection, database, watch = self._connection, self._database, self._watch
        if connection is None or database is None or watch is None:
            return True
        finish = _finish_of(self._path)
        with self._using:
            return watch.rescue(
                lambda new: back_up_open(connection, self._path, new, finish, commits_min=database.commits)
            )

    def lock(self) -> None:
        """Take the file for this process, if that was not done. Raises StartRefused naming the holder."""
        if not self._lock.is_held:
            self._lock.acquire()

    def load(self, new_incarnation: bytes) -> Loaded:
        """Lock, open, check and read the file. Raises StartRefused naming the file and the finding."""
        self.lock()
        try:
            return self._load(new_incarnation)
        except BaseException:
            if self._connection is not None:
                close_unchanged(self._connection, self._path)
            self.close()
            raise

    def _load(self, new_incarnation: bytes) -> Loaded:
        remedy = f"restore it from a backup or move {self._path.name} and {self._path.name}{COUNTER_SUFFIX} away"
        try:
            check_presence(self._path)
            make_file(self._path)
            # Rows are read by one thread and written by another, never by two at once.
            connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
            self._connection = connection
            connection.execute(f"PRAGMA synchronous={'FULL' if self._is_power_safe else 'NORMAL'}")
            self._database = database = CheckedDatabase(connection, self._path, is_power_safe=self._is_power_safe)
            self._check(connection)
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version < SCHEMA_VERSION:
                with database.transaction():
                    _bring_up(connection, version, new_incarnation)
                    database.make()
            else:
                _check_content(connection, database, new_incarnation)
            # Not before the schema: a new file has all of it or no page at all.
            connection.execute("PRAGMA journal_mode=WAL")
            loaded = _read(connection)
            # What was committed so far is then in the file alone, also in a copy without its log.
            database.settle()
            self._watch = FileWatch(self._path, self._lock.path)
            warn_of_loose_modes((self._path, self._lock.path))
            return loaded
        except OSError as error:
            raise StartRefused(f"{self._path}: {error.strerror}; the state needs a file to write to") from error
        except (sqlite3.Error, RefusedContent, UnicodeDecodeError) as error:
            raise StartRefused(f"{self._path}: {error}; {remedy_of(error, remedy)}") from error
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise StartRefused(f"{self._path}: a row does not read back: {error}; {remedy}") from error

    def _check(self, connection: sqlite3.Connection) -> None:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        is_empty = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
        if application != _APPLICATION_ID and not (is_empty and version == 0):
            raise StartRefused(f"{self._path}: this is not a provider's state file; choose another file")
        if is_empty and connection.execute("PRAGMA page_count").fetchone()[0]:
            raise StartRefused(f"{self._path}: {_NO_TABLES}")
        if version > SCHEMA_VERSION:
            raise StartRefused(
                f"{self._path}: written by a newer BigFleet (schema {version}, this one reads {SCHEMA_VERSION}); "
                "start the newer one"
            )
        if version < SCHEMA_VERSION:
            check_structure(connection)

    def commit(self, batch: Batch) -> None:
        """Write a batch in one transaction. Raises StoreDown when the disk refuses it."""
        connection, database = self._connection, self._database
        if connection is None or database is None:
            raise StoreDown(f"{self._path} is closed")
        with self._using:
            fault = self.file_fault()
            if fault:
                raise StoreDown(fault)
            try:
                if batch.needs_room:
                    self._check_room()
                with database.transaction():
                    _write(connection, batch)
            except sqlite3.Error as error:
                raise StoreDown(f"{self._path}: {error}") from error
            except OSError as error:
                raise StoreDown(f"{self._path}: {error.strerror}: {ROOM_BYTES} bytes are needed") from error

    def _check_room(self) -> None:
        """Raise OSError unless the disk has room for many commits: a small one may fit where the next does not."""
        path = self._path.with_name(self._path.name + ".room")
        descriptor = open_file(path)
        try:
            os.posix_fallocate(descriptor, 0, ROOM_BYTES)
        finally:
            os.close(descriptor)
            path.unlink(missing_ok=True)

    def size_bytes(self) -> int:
        """Return the size of the file and of its write-ahead log."""
        paths = (self._path, self._path.with_name(self._path.name + "-wal"))
        return sum(path.stat().st_size for path in paths if path.exists())

    def close(self) -> None:
        """Close the file and give the lock back."""
        if self._database is not None:
            self._database.close()
            self._database = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._lock.release()


def back_up_provider(state: Path, target: Path) -> int:
    """Copy a state file to a new file, also while a provider uses it; return the size in bytes. Raises BackupFault."""
    return back_up(state, target, _finish_of(state))


def _finish_of(state: Path) -> Finish:
    """Return the check that a copy is that of a provider's state."""

    def finish(copy: sqlite3.Connection) -> None:
        application = copy.execute("PRAGMA application_id").fetchone()[0]
        if application != _APPLICATION_ID:
            raise BackupFault(f"{state}: this is not a provider's state file; name the file of --state")
        version = copy.execute("PRAGMA user_version").fetchone()[0]
        if version >= SCHEMA_VERSION and not has_checksums(copy):
            raise BackupFault(f"{state}: damaged: its checksums are missing; no backup was made")

    return finish


def _bring_up(connection: sqlite3.Connection, version: int, incarnation: bytes) -> None:
    """Bring a new file, version 0, or one of an older schema to this one, within the caller's transaction."""
    if version == 0:
        for statement in _SCHEMA.split(";"):
            connection.execute(statement)
        connection.executemany(
            "INSERT INTO meta VALUES (?, ?)", [("incarnation", incarnation), ("head", 0), ("tombstone_floor", 0)]
        )
        connection.execute(f"PRAGMA application_id={_APPLICATION_ID}")
    else:
        for number in range(version, SCHEMA_VERSION):
            connection.execute(_MIGRATIONS[number])
    connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")


def _check_content(connection: sqlite3.Connection, database: CheckedDatabase, incarnation: bytes) -> None:
    """Check a file of this schema. Raises RefusedContent, sqlite3.Error, OSError."""
    database.check()
    if database.is_moved:
        with database.transaction():
            # It may repeat revision numbers; with another incarnation every reader starts with a full list.
            connection.execute("UPDATE meta SET value = ? WHERE key = 'incarnation'", (incarnation,))
            database.settle_origin()


def _read(connection: sqlite3.Connection) -> Loaded:
    meta = dict(connection.execute("SELECT key, value FROM meta"))
    pushed = {
        row[0]: Pushed(
            price_usd_per_hour=row[1],
            price_baseline_usd_per_hour=row[2],
            probability=row[3],
            reclaim_notice=bool(row[4]),
        )
        for row in connection.execute("SELECT id, price, price_baseline, probability, reclaim_notice FROM pushed")
    }
    return Loaded(
        incarnation=bytes(meta["incarnation"]),
        head=int(meta["head"]),
        floor=int(meta["tombstone_floor"]),
        identity=msgspec.json.decode(bytes(meta.get("identity", b"{}")), type=dict[str, str]),
        # Sorted here: SQLite would carry the rows through its sorter whole, and beyond some size over the disk.
        records=tuple(sorted(_read_records(connection, pushed.get), key=attrgetter("revision"))),
        tombstones=tuple(
            Tombstone(machine_id=row[0], revision=row[1], removed_unix_nanos=row[2])
            for row in connection.execute("SELECT id, revision, removed_unix_nanos FROM tombstones ORDER BY revision")
        ),
        marks=tuple(
            Mark(machine_id=row[0], shard_id=row[1], epoch=row[2], sequence=row[3], used_unix_nanos=row[4])
            for row in connection.execute(
                "SELECT machine_id, shard_id, epoch, sequence, used_unix_nanos FROM marks "
                "ORDER BY used_unix_nanos, machine_id, shard_id"
            )
        ),
        sealed=tuple(
            Sealed(machine_id=row[0], operation_id=row[1], text=row[2])
            for row in connection.execute("SELECT machine_id, operation_id, sealed FROM secrets")
        ),
    )


def _read_records(connection: sqlite3.Connection, pushed_of: Callable[[str], Pushed | None]) -> Iterator[Record]:
    rows = connection.execute("SELECT id, revision, state_since_unix_nanos, record, operation FROM machines")
    for machine_id, revision, since_unix_nanos, text, operation in rows:
        try:
            yield decode_record(machine_id, revision, since_unix_nanos, text, operation, pushed_of(machine_id))
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ValueError(f"machine {machine_id}: {error}") from error


def _write(connection: sqlite3.Connection, batch: Batch) -> None:
    connection.executemany(
        "INSERT INTO machines VALUES (?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET revision = excluded.revision, "
        "state_since_unix_nanos = excluded.state_since_unix_nanos, record = excluded.record, "
        "operation = excluded.operation",
        [
            (r.id, r.revision, r.state_since_unix_nanos, encode_record(r), encode_operation(r.operation))
            for r in batch.records
        ],
    )
    _write_pushed(connection, batch)
    gone = [(t.machine_id,) for t in batch.tombstones]
    connection.executemany("DELETE FROM machines WHERE id = ?", gone)
    connection.executemany("DELETE FROM pushed WHERE id = ?", gone)
    connection.executemany("DELETE FROM tombstones WHERE id = ?", [(i,) for i in batch.tombstones_dropped])
    connection.executemany(
        "INSERT OR REPLACE INTO tombstones VALUES (?, ?, ?)",
        [(t.machine_id, t.revision, t.removed_unix_nanos) for t in batch.tombstones],
    )
    connection.executemany(
        "INSERT OR REPLACE INTO marks VALUES (?, ?, ?, ?, ?)",
        [(m.machine_id, m.shard_id, m.epoch, m.sequence, m.used_unix_nanos) for m in batch.marks],
    )
    connection.executemany(
        "DELETE FROM marks WHERE machine_id = ? AND shard_id = ?",
        [(m.machine_id, m.shard_id) for m in batch.marks_dropped],
    )
    connection.executemany(
        "INSERT OR REPLACE INTO secrets VALUES (?, ?, ?)",
        [(entry.machine_id, entry.operation_id, entry.text) for entry in batch.sealed],
    )
    connection.executemany("DELETE FROM secrets WHERE machine_id = ?", [(i,) for i in batch.sealed_dropped])
    meta: list[tuple[int | bytes, str]] = [(batch.head, "head"), (batch.floor, "tombstone_floor")]
    if batch.incarnation is not None:
        meta.append((batch.incarnation, "incarnation"))
    connection.executemany("UPDATE meta SET value = ? WHERE key = ?", meta)
    if batch.identity is not None:
        content = msgspec.json.encode(batch.identity, order="sorted")
        connection.execute("INSERT OR REPLACE INTO meta VALUES ('identity', ?)", (content,))


def _write_pushed(connection: sqlite3.Connection, batch: Batch) -> None:
    connection.executemany("DELETE FROM pushed WHERE id = ?", [(r.id,) for r in batch.records if r.pushed is None])
    connection.executemany(
        "INSERT OR REPLACE INTO pushed VALUES (?, ?, ?, ?, ?)",
        [
            (r.id, p.price_usd_per_hour, p.price_baseline_usd_per_hour, p.probability, p.reclaim_notice)
            for r in batch.records
            if (p := r.pushed) is not None
        ],
    )
