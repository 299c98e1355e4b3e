"""Opens a SQLite state file only with the content that was last committed to it, and counts its commits.

docs/adr/0180-state-files-have-checksums.md. `FILE.commits` next to a state file has the number of its commits. A file
with fewer commits is an older copy, or has lost its write-ahead log. A file that is missing or empty although its
counter exists was lost. Both end the start: a lost file is never replaced silently. The counter is written after each
commit without waiting for the disk, so it may be behind the file and never ahead of it.
"""

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

import structlog
import xxhash

from bigfleet.files.checksums import (
    RefusedContent,
    check_content,
    check_structure,
    count_commit,
    keep_checksums,
    make_checksums,
    mark_backup,
)
from bigfleet.files.private import open_file

SUFFIX: Final = ".commits"
#: Of the backup that a process makes of its open state file when the file is lost.
RESCUE_SUFFIX: Final = ".rescue"
_WORD: Final = b"commits"
_DIGITS: Final = 19
_LINE_BYTES: Final = len(_WORD) + 1 + _DIGITS + 1 + 8 + 1

#: Byte of SQLite's header that is 1 in a file without a write-ahead log, as each backup is, and 2 in one with a log.
_VERSION_AT: Final = 18
_WITHOUT_LOG: Final = b"\x01"

#: Ends a finding about a file that is older than its counter.
_OLDER: Final = ": it is an older copy, or its -wal file is missing or damaged (without the counter it is used)"

#: Raised for a damaged file; the second when SQLite's message quotes a damaged text.
_UNREADABLE: Final = (sqlite3.Error, UnicodeDecodeError)

#: SQLite's codes for what an operating system refuses.
_REFUSED_BY_DISK: Final = (
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
)

_log = structlog.get_logger("bigfleet.files.checked_database")


class CommitCounter:
    """The file that has the number of commits of another one. A damaged one is logged and counts as absent."""

    def __init__(self, database: Path) -> None:
        self.path = database.with_name(database.name + SUFFIX)
        self._file: int | None = None

    def read(self) -> int | None:
        """Return the number, None without a file. Raises OSError."""
        try:
            with self.path.open("rb") as file:
                content = file.read(_LINE_BYTES + 1)
        except FileNotFoundError:
            return None
        if not content:
            return None  # its process was killed before it wrote
        digits = content[len(_WORD) + 1 : -10]
        if digits.isdigit() and content == _line(int(digits)):
            return int(digits)
        _log.warning(
            "store.counter_damaged", file=str(self.path), advice="it is written again; an older state file would pass"
        )
        return None

    def open(self) -> None:
        """Make the file if it is new, and hold it open. Raises OSError."""
        self._file = open_file(self.path)

    def write(self, commits: int, *, is_synced: bool) -> None:
        """Replace the number; a disk that refuses leaves the former one, which is as good."""
        if self._file is None:
            return
        with suppress(OSError):
            os.pwrite(self._file, _line(commits), 0)
            if is_synced:
                os.fsync(self._file)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _line(commits: int) -> bytes:
    text = _WORD + b" %0*d" % (_DIGITS, commits)
    return text + b" %08x\n" % xxhash.xxh32_intdigest(text)


def remedy_of(error: BaseException, otherwise: str) -> str:
    """Return what to do about an error of a state file: about its disk if that refuses, else its own or the given."""
    if isinstance(error, OSError) or (
        isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF in _REFUSED_BY_DISK
    ):
        return "make room on its disk, or check disk, mount and mode; if it can no longer be read, restore a backup"
    return (error.remedy if isinstance(error, RefusedContent) else "") or otherwise


def text_of(error: BaseException) -> str:
    """Return the text of an error without what the caller says anyway, the name of the file."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def rescue_of(database: Path) -> Path:
    """Return the name of the backup that a process makes when it loses its state file."""
    return database.with_name(database.name + RESCUE_SUFFIX)


def check_presence(database: Path) -> None:
    """Raise RefusedContent when a state file is gone or empty that was there before, or its log is another file's.

    Raises OSError.
    """
    wal = database.with_name(database.name + "-wal")
    with suppress(FileNotFoundError):
        if database.stat().st_size:
            _check_log(database, wal)
            return
    state = "is empty" if database.exists() else "does not exist"
    rescued = rescue_of(database)
    if state == "does not exist" and rescued.exists():
        raise RefusedContent(
            f"does not exist, and {rescued.name} is the backup that its process made when the file was lost",
            remedy=f"move {wal.name} away if it exists, rename {rescued.name} to {database.name} and start again",
        )
    for trace in (wal, CommitCounter(database).path):
        # A first start that was killed leaves an empty file, an empty log and no counter. A link is refused later.
        with suppress(FileNotFoundError):
            if trace.stat().st_size and not trace.is_symlink():
                raise RefusedContent(f"{state}, and {trace.name} shows that it was written before")


def _check_log(database: Path, wal: Path) -> None:
    """Raise RefusedContent for a backup next to the log of the file that it replaces: SQLite would mix the two."""
    with database.open("rb") as file:
        header = file.read(_VERSION_AT + 1)
    if header[_VERSION_AT:] == _WITHOUT_LOG:
        with suppress(FileNotFoundError):
            if wal.stat().st_size:
                raise RefusedContent(
                    f"is a backup, and {wal.name} is not of it", remedy=f"move {wal.name} away and start again"
                )


def forget_lost(database: Path) -> None:
    """Remove the counter of a state file that is gone, because another one is about to be made. Raises OSError."""
    if not database.exists():
        CommitCounter(database).path.unlink(missing_ok=True)


def open_unchanged(path: Path) -> sqlite3.Connection:
    """Return a connection for reading, which leaves the file and its log as they are. Raises sqlite3.Error."""
    # What a killed first start left can be read only by who may take it back; such a file has no log.
    mode = "rw" if path.with_name(path.name + "-journal").exists() else "ro"
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True, isolation_level=None, timeout=0)


def close_unchanged(connection: sqlite3.Connection, path: Path) -> None:
    """Close the connection to a file that was refused, and leave the file and its log as they are.

    The last connection to close would write the log into the file and delete it; a reader closes last and does neither.
    """
    with suppress(*_UNREADABLE), closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as reader:
        with suppress(*_UNREADABLE):
            reader.execute("SELECT count(*) FROM sqlite_master").fetchone()
        connection.close()
    connection.close()


class Format(NamedTuple):
    """Identifies one kind of file by values of SQLite's header. The first schema has no checksums."""

    application_id: int
    schema: int
    #: What is said of another file.
    foreign: str


class CheckedDatabase:
    """Checks the content of an open SQLite file, and makes changes to it durable.

    Must be used by one thread at a time. `check` or `make` comes first.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path, *, is_power_safe: bool = True) -> None:
        """`is_power_safe` False: a lost power supply may take commits, so only what is on the disk is counted."""
        self._connection = connection
        self._counter = CommitCounter(path)
        self._is_power_safe = is_power_safe
        self._commits = 0
        #: Whether the file came from elsewhere: it has no counter, or is a backup.
        self.is_moved = False

    @property
    def commits(self) -> int:
        """The number of commits of the file."""
        return self._commits

    def prepare(self, file_format: Format, make_tables: Callable[[sqlite3.Connection], None]) -> None:
        """Check a file of two schemas, or make a new one or one of the first schema what the second is.

        Raises RefusedContent, sqlite3.Error, OSError. `make_tables` makes those of a new file.
        """
        connection = self._connection
        version, application, pages = (
            connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("user_version", "application_id", "page_count")
        )
        if pages and (application != file_format.application_id or version not in (1, file_format.schema)):
            raise RefusedContent(file_format.foreign)
        if version == file_format.schema:
            self.check()
            if self.is_moved:
                with self.transaction():
                    self.settle_origin()
            return
        with self.transaction():
            if not pages:
                make_tables(connection)
                connection.execute(f"PRAGMA application_id={file_format.application_id}")
            check_structure(connection)
            connection.execute(f"PRAGMA user_version={file_format.schema}")
            self.make()

    def make(self, *, is_backup: bool = False) -> None:
        """Give a file of an earlier schema, or a new one, checksums within the caller's transaction.

        Raises RefusedContent, sqlite3.Error, OSError. A damaged number of the schema may look like an earlier one; the
        checksums are there then, which SQLite refuses.
        """
        counted = self._counter.read()
        if counted is not None and not is_backup:
            raise RefusedContent(f"has no checksums, and {self._counter.path.name} shows {counted} commits{_OLDER}")
        self.is_moved = is_backup
        make_checksums(self._connection)
        self._begin()

    def check(self) -> None:
        """Check a file that has checksums, and keep them from then on, within the caller's transaction if there is one.

        Raises RefusedContent, sqlite3.Error, OSError.
        """
        self.inspect()
        self._begin()

    def inspect(self) -> None:
        """Check a file that has checksums, and may be open for reading only. Raises as `check` does."""
        found = check_content(self._connection)
        self._commits = found.commits
        counted = self._counter.read()
        if counted is not None and found.commits < counted and not found.is_backup:
            raise RefusedContent(f"has {found.commits} commits, and {self._counter.path.name} shows {counted}{_OLDER}")
        self.is_moved = found.is_backup or counted is None

    def settle_origin(self) -> None:
        """Take a file that came from elsewhere for the one that is here, within the caller's transaction."""
        if self.is_moved:
            # First: a counter that is ahead of a file that is no backup any more would have it refused.
            self._counter.write(self._commits, is_synced=True)
            mark_backup(self._connection, is_backup=False)

    def _begin(self) -> None:
        keep_checksums(self._connection)
        self._counter.open()

    def settle(self) -> None:
        """Move all commits from the write-ahead log into the file, and count them. Raises sqlite3.Error."""
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._counter.write(self._commits, is_synced=True)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Make the changes of a block durable as a whole. Raises sqlite3.Error; then nothing was changed."""
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            count_commit(connection, self._commits + 1)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        self._commits += 1
        if self._is_power_safe:
            self._counter.write(self._commits, is_synced=False)

    def close(self) -> None:
        """Count what a clean end leaves, and close the counter; the connection is its owner's."""
        if not self._is_power_safe:
            with suppress(sqlite3.Error):
                self.settle()
        self._counter.close()
