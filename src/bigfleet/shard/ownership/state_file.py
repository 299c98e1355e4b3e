"""Stores a shard's epoch and what it owns in a SQLite file that one process locks.

docs/spec/shard.md §2. Each start commits epoch + 1 before anything is served, so that a predecessor is fenced. A file
of an older schema is brought up to this one in the same transaction. A file that is damaged, lost, older than the last
commit, copied without its write-ahead log, of a newer schema or held by another process ends the start; it is never
recreated silently.
"""

import errno
import fcntl
import os
import sqlite3
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from bigfleet.files.backup import BackupFault, Finish, back_up, back_up_open, check_source
from bigfleet.files.checked_database import SUFFIX as COUNTER_SUFFIX
from bigfleet.files.checked_database import CheckedDatabase, check_presence, close_unchanged, remedy_of
from bigfleet.files.checksums import TABLE as CHECKSUMS_TABLE
from bigfleet.files.checksums import RefusedContent, check_structure, has_checksums
from bigfleet.files.private import make_directory, make_file, warn_of_loose_modes
from bigfleet.files.watch import FileWatch
from bigfleet.model.clock import NANOS_PER_SECOND, Clock
from bigfleet.model.ownership import Base
from bigfleet.shard.exchange.exchange_records import ExchangeFile
from bigfleet.shard.ownership.ownership_file import DamagedRow, OwnershipFile, make_tables
from bigfleet.shard.ownership.retired_clusters import TABLE as RETIRED_CLUSTERS_TABLE
from bigfleet.shard.ownership.retired_clusters import RetirementFile

#: 1 held the epoch alone, 2 also what the shard owns, 3 also the clusters that are retired, 4 also checksums.
SCHEMA = 4
#: The first schema that has checksums.
CHECKSUMS_SCHEMA = 4
FILE_NAME = "shard.db"
LOCK_NAME = "shard.lock"
#: The largest number that fits the wire's int64.
EPOCH_MAX = 2**63 - 1

#: Row of `meta` in a backup: the first start after a restore outranks every start since the backup. A backup of the
#: present schema also has this in its checksums.
BACKUP_KEY = "backup"

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_REMEDY = (
    f"restore the file from a backup, or move {FILE_NAME} and {FILE_NAME}{COUNTER_SUFFIX} away: a new one starts at a "
    "higher epoch"
)
_NO_META = (
    "has no meta row: it was copied without its -wal file, or is damaged; copy a file of a stopped shard, use "
    "bigfleet shard backup, or move the file away to start a new shard"
)


class StateFileFault(Exception):
    """The state file cannot be used; the message names file, finding and remedy."""


class StateFile:
    """The open state file of one shard process; a context manager that closes it."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        database: CheckedDatabase,
        lock: IO[str],
        epoch: int,
        ownership: OwnershipFile,
        retirements: RetirementFile,
        exchanges: ExchangeFile,
        watch: FileWatch,
        path: Path,
    ) -> None:
        self._connection = connection
        self._database = database
        self._lock = lock
        self._watch = watch
        self._path = path
        #: The epoch of this process, committed.
        self.epoch = epoch
        #: What the shard owns, and the term that it has accepted.
        self.ownership = ownership
        #: The clusters that are retired.
        self.retirements = retirements
        #: The exchanges that were begun.
        self.exchanges = exchanges

    @classmethod
    def open(cls, directory: Path, *, shard_id: str, clock: Clock, new_file_owns: Base = Base.ALL) -> Self:
        """Lock and open the file in `directory`, making both when they are new, and raise the epoch.

        A new file starts at the wall clock's Unix seconds, so that a shard that lost its disk outranks its
        predecessors; `new_file_owns` is its base, and no other file's. Raises StateFileFault.
        """
        try:
            make_directory(directory)
            lock = _lock(directory / LOCK_NAME)
        except OSError as error:
            is_full = error.errno in _DISK_FULL
            advice = "make room on its disk" if is_full else "choose a directory that is writable"
            raise StateFileFault(f"--data-dir {directory}: {error.strerror}; {advice}") from error
        path = directory / FILE_NAME
        with ExitStack() as on_fault:
            on_fault.callback(lock.close)
            try:
                check_presence(path)
                make_file(path)
                connection = sqlite3.connect(path, isolation_level=None)
                on_fault.callback(close_unchanged, connection, path)
                connection.execute("PRAGMA synchronous=FULL")
                database = CheckedDatabase(connection, path)
                on_fault.callback(database.close)
                epoch = _raise_epoch(connection, database, path, shard_id, clock, new_file_owns)
                # Not before the first transaction: a new file has its rows or no page at all.
                connection.execute("PRAGMA journal_mode=WAL")
                watch = FileWatch(path, directory / LOCK_NAME)
                ownership = OwnershipFile(connection, path, watch.fault, database.transaction)
                retirements = RetirementFile(connection, ownership.transaction)
                exchanges = ExchangeFile(connection, ownership.transaction)
                # The file alone then holds the epoch, also in a copy without its log. SQLite refuses it until tables
                # have been read.
                database.settle()
                # The log is there now, and is remembered too.
                watch.fault()
            except OSError as error:
                raise StateFileFault(f"{path}: {error.strerror}; check its disk and its mode") from error
            except (DamagedRow, RefusedContent, sqlite3.Error, UnicodeDecodeError) as error:
                raise StateFileFault(f"{path}: {error}; {remedy_of(error, _REMEDY)}") from error
            on_fault.pop_all()
        warn_of_loose_modes((directory, path, directory / LOCK_NAME))
        return cls(connection, database, lock, epoch, ownership, retirements, exchanges, watch, path)

    def fault(self) -> str:
        """Return what happened to the files on disk, "" while they are those that this process opened."""
        return self._watch.fault()

    def rescue(self) -> bool:
        """Copy the open database to `shard.db.rescue` if its file is lost; return False if that failed."""
        return self._watch.rescue(
            lambda new: back_up_open(
                self._connection, self._path, new, _finish_of(self._path), commits_min=self._database.commits
            )
        )

    def close(self) -> None:
        """Close the file and let go of the lock."""
        self._database.close()
        self._connection.close()
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()


def back_up_state(directory: Path, target: Path) -> int:
    """Copy the state file in `directory` to a new file, also while a shard uses it; return the size in bytes.

    Raises BackupFault.
    """
    source = directory / FILE_NAME
    check_source(source, "name the data directory of the shard with --data-dir")
    return back_up(source, target, _finish_of(source))


def _finish_of(source: Path) -> Finish:
    """Return the check that a copy is that of a shard's state, which also marks it as a backup."""

    def finish(copy: sqlite3.Connection) -> None:
        tables = {name for (name,) in copy.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        stored = dict(copy.execute("SELECT key, value FROM meta")) if "meta" in tables else {}
        if not stored:
            raise BackupFault(f"{source}: {_NO_META}")
        if not (_is_number(stored.get("epoch", "")) and _is_number(stored.get("schema", ""))):
            raise BackupFault(f"{source}: has no readable schema and epoch; no backup was made")
        if int(stored["schema"]) >= CHECKSUMS_SCHEMA and not has_checksums(copy):
            raise BackupFault(f"{source}: damaged: its checksums are missing; no backup was made")
        copy.execute("INSERT OR REPLACE INTO meta VALUES (?, '1')", (BACKUP_KEY,))

    return finish


def _lock(path: Path) -> IO[str]:
    make_file(path)
    lock = path.open("r+", encoding="utf-8", errors="replace")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.seek(0)
        holder = lock.read().strip() or "unknown"
        lock.close()
        raise StateFileFault(f"{path}: held by process {holder}; stop it, or choose another --data-dir") from error
    try:
        os.ftruncate(lock.fileno(), 0)
        os.pwrite(lock.fileno(), f"{os.getpid()}\n".encode(), 0)
    except OSError:
        lock.close()
        raise
    return lock


def _raise_epoch(
    connection: sqlite3.Connection,
    database: CheckedDatabase,
    path: Path,
    shard_id: str,
    clock: Clock,
    new_file_owns: Base,
) -> int:
    # Also after SQLite took back what a killed first start left: then there is no page.
    has_pages = connection.execute("PRAGMA page_count").fetchone()[0] > 0
    with database.transaction():
        stored = _stored(connection, path)
        if stored:
            _check(stored, path, shard_id)
        elif has_pages:
            raise StateFileFault(f"{path}: {_NO_META}")
        schema = int(stored.get("schema", "0"))
        if schema >= CHECKSUMS_SCHEMA:
            database.check()
        else:
            check_structure(connection)
        unix_seconds = clock.unix_nanos() // NANOS_PER_SECOND
        if not stored:
            epoch = max(1, unix_seconds)
        elif database.is_moved or BACKUP_KEY in stored:
            # Of the starts since it was copied, the wall clock alone knows.
            epoch = max(int(stored["epoch"]) + 1, unix_seconds)
        else:
            epoch = int(stored["epoch"]) + 1
        connection.execute("DELETE FROM meta WHERE key = ?", (BACKUP_KEY,))
        if schema < 2:
            # A shard without ownership in its file took everything for its own.
            make_tables(connection, Base.ALL if stored else new_file_owns)
        if schema < 3:
            connection.execute(RETIRED_CLUSTERS_TABLE)
        connection.executemany(
            "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
            [("schema", str(SCHEMA)), ("shard_id", shard_id), ("epoch", str(epoch))],
        )
        if schema < CHECKSUMS_SCHEMA:
            database.make(is_backup=BACKUP_KEY in stored)
        database.settle_origin()
    return epoch


def _stored(connection: sqlite3.Connection, path: Path) -> dict[str, str]:
    """Return the rows of `meta`, which is made in a file without tables. Raises StateFileFault."""
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if tables and "meta" not in tables:
        # A damaged name may be no text.
        held = sorted(tables - {CHECKSUMS_TABLE} or tables, key=str)[0]
        raise StateFileFault(f"{path}: is not a state file of a shard, it holds {held!r}; move it away")
    connection.execute("CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT")
    return dict(connection.execute("SELECT key, value FROM meta"))


def _check(stored: dict[str, str], path: Path, shard_id: str) -> None:
    schema, epoch = stored.get("schema", ""), stored.get("epoch", "")
    if not _is_number(schema) or not _is_number(epoch) or int(schema) < 1 or int(epoch) >= EPOCH_MAX:
        raise StateFileFault(f"{path}: has no readable schema and epoch; {_REMEDY}")
    if int(schema) > SCHEMA:
        raise StateFileFault(f"{path}: has schema {schema}, this program knows {SCHEMA}; run a newer bigfleet")
    if stored.get("shard_id") != shard_id:
        raise StateFileFault(
            f"{path}: belongs to shard {stored.get('shard_id')!r}, not {shard_id!r}; choose another --data-dir or --id"
        )


def _is_number(text: str) -> bool:
    # Nineteen digits hold every int64; more would be no number of ours.
    return text.isascii() and text.isdigit() and len(text) <= 19
