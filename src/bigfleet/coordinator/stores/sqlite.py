"""Stores the coordinator's tables in one SQLite file; the process that locks it leads (docs/spec/coordinator.md §3).

WAL, synchronous=FULL, locked for the life of the process. The term is a counter in the file, raised and committed at
each start. One file means one coordinator: there is no second replica. A file that is damaged, lost, older than the
last commit, or of a newer schema, ends the start; it is never recreated silently.
"""

import asyncio
import os
import socket
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

from bigfleet.coordinator.commands import Command, edits
from bigfleet.coordinator.stores.codec import UnreadableRow, decode_row, encode_row
from bigfleet.coordinator.stores.protocol import (
    TERM_MAX,
    TERM_STEP,
    LeaderInfo,
    Leadership,
    NotLeader,
    StoreUnavailable,
)
from bigfleet.coordinator.tables import Edit, RowKey, Table, Tables
from bigfleet.files.checked_database import SUFFIX as COUNTER_SUFFIX
from bigfleet.files.checked_database import CheckedDatabase, check_presence, open_unchanged, remedy_of, text_of
from bigfleet.files.checksums import RefusedContent, check_structure
from bigfleet.files.private import make_directory, make_file, warn_of_loose_modes, write_file
from bigfleet.files.watch import FileWatch

#: 2 has checksums.
SCHEMA_VERSION: Final = 2
#: Marks the file as ours in its header: "BFCO".
_APPLICATION_ID: Final = 0x4246434F
#: Parts the keys of a row; commands refuse it in every part, and a snapshot that has it is not written.
_SEPARATOR: Final = "\x00"

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE rows (name TEXT NOT NULL, key TEXT NOT NULL, value BLOB NOT NULL, PRIMARY KEY (name, key))
  STRICT, WITHOUT ROWID;
"""
_RAISE_REVISION = """
INSERT INTO meta VALUES ('revision', 1) ON CONFLICT (key) DO UPDATE SET value = value + 1
"""


#: Reads are answered from memory, so a snapshot is still complete.
_LOST = (
    "only this process has its content: put the file back, or save a snapshot with bigfleet snapshot save before you "
    "stop this process, restore the snapshot and start again"
)


class StoreFault(Exception):
    """The file cannot be used; the message names file, finding and remedy."""


class SqliteStateStore:
    """A `StateStore` on one file; open from the constructor on, leading from `campaign` on."""

    def __init__(self, path: Path, *, leader: LeaderInfo) -> None:
        """Open the file, making it when it is new. Raises StoreFault."""
        self._path = path
        self._leader = leader
        self._is_leading = False
        self._lost = asyncio.Event()
        self._connection, self._database = _opened(path)
        try:
            self._tables = Tables().with_edits(_read(self._connection))
        except (UnreadableRow, sqlite3.Error, UnicodeDecodeError) as error:
            self._database.close()
            self._connection.close()
            raise StoreFault(f"{path}: {error}; {_remedy(path)}") from error
        self._watch = FileWatch(path, remedy=_LOST)
        warn_of_loose_modes((path, _holder_file(path)))

    def file_fault(self) -> str:
        """Return what happened to the file on disk, "" while it is the one that this process opened."""
        return self._watch.fault()

    async def campaign(self) -> Leadership:
        """Raise the term and lead: no other process has the file."""
        self._lost.clear()
        term = self._put_term(self._term() + 1)
        # The file alone then holds the term and all rows, also in a copy without its log.
        self._database.settle()
        self._is_leading = True
        return Leadership(term, self._tables)

    async def lost(self) -> str:
        """Wait until `resign` or `close`; the file cannot be taken away."""
        await self._lost.wait()
        return "leadership was given up"

    async def load(self) -> Tables:
        """Return the tables."""
        return self._tables

    async def is_leader(self) -> bool:
        """Return whether this process leads; the lock on the file is the proof."""
        return self._is_leading

    async def commit(self, command: Command) -> Tables:
        """Apply a command in one transaction. Raises CommandRefused, NotLeader, StoreUnavailable."""
        self._need_lead()
        written = edits(command, self._tables)
        if written:
            self._write(written)
            self._tables = self._tables.with_edits(written)
        return self._tables

    async def raise_term(self, above: int) -> int:
        """Make the term `above` + 1,000,000 and return it. Raises NotLeader, StoreUnavailable."""
        self._need_lead()
        return self._put_term(max(self._term(), above) + TERM_STEP)

    def revision(self) -> int:
        """Return how many transactions have written rows."""
        found = self._connection.execute("SELECT value FROM meta WHERE key = 'revision'").fetchone()
        return 0 if found is None else int(found[0])

    def leader(self) -> LeaderInfo | None:
        """Return this replica while it leads."""
        return self._leader if self._is_leading else None

    async def resign(self) -> None:
        """Lead no more; the file stays held."""
        self._is_leading = False
        self._lost.set()

    async def close(self) -> None:
        """Let go of the file."""
        await self.resign()
        self._database.close()
        self._connection.close()

    def restore(self, rows: Iterable[Edit], *, term: int) -> None:
        """Replace everything by a snapshot's rows and set the term, in one transaction. Raises StoreUnavailable."""
        restored = tuple(rows)
        gone = [Edit(key, None) for key, _ in self._tables.rows()]
        self._write((*gone, *restored), term=term)
        self._tables = Tables().with_edits(restored)

    # ---- the file -----------------------------------------------------------------------------------------------

    def _need_lead(self) -> None:
        if not self._is_leading:
            raise NotLeader("this replica does not lead")

    def _term(self) -> int:
        (term,) = self._connection.execute("SELECT value FROM meta WHERE key = 'term'").fetchone()
        return int(term)

    def _put_term(self, term: int) -> int:
        self._write((), term=term)
        return term

    def _write(self, written: Sequence[Edit], *, term: int | None = None) -> None:
        fault = self.file_fault() or _key_fault(written)
        if fault:
            raise StoreUnavailable(fault)
        try:
            connection = self._connection
            with self._database.transaction():
                if term is None:
                    connection.execute(_RAISE_REVISION)
                for (table, parts), row in written:
                    named = (table.value, _SEPARATOR.join(parts))
                    if row is None:
                        connection.execute("DELETE FROM rows WHERE name = ? AND key = ?", named)
                    else:
                        connection.execute("INSERT OR REPLACE INTO rows VALUES (?, ?, ?)", (*named, encode_row(row)))
                if term is not None:
                    connection.execute("INSERT OR REPLACE INTO meta VALUES ('term', ?)", (term,))
        except sqlite3.Error as error:
            raise StoreUnavailable(f"{self._path}: {error}") from error


def _opened(path: Path) -> tuple[sqlite3.Connection, CheckedDatabase]:
    try:
        make_directory(path.parent)
        check_presence(path)
        make_file(path)
        connection = sqlite3.connect(path, isolation_level=None, timeout=0)
    except RefusedContent as error:
        raise StoreFault(f"{path}: {error}; {_remedy(path)}") from error
    except (OSError, sqlite3.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise StoreFault(f"{path}: {reason}; choose a file in a directory that can be written") from error
    database = CheckedDatabase(connection, path)
    try:
        _inspect_unlocked(path)
        # Held from the first statement until the connection is closed, by the death of the process too.
        connection.execute("PRAGMA locking_mode=EXCLUSIVE")
        connection.execute("PRAGMA synchronous=FULL")
        _check(connection, database, path)
        connection.execute("PRAGMA journal_mode=WAL")
        write_file(_holder_file(path), f"process {os.getpid()} on {socket.gethostname()}\n")
    except BaseException as error:
        database.close()
        connection.close()
        if isinstance(error, sqlite3.Error) and "locked" in str(error):
            raise StoreFault(f"{path}: held by {_holder(path)}; stop it, or choose another file") from error
        if isinstance(error, sqlite3.Error | OSError | RefusedContent | UnicodeDecodeError):
            raise StoreFault(f"{path}: {text_of(error)}; {remedy_of(error, _remedy(path))}") from error
        raise
    return connection, database


def _remedy(path: Path) -> str:
    counter = path.name + COUNTER_SUFFIX
    return f"move it and {counter} away, then restore a snapshot or start empty"


def _inspect_unlocked(path: Path) -> None:
    """Check a file by a reader first, which leaves it and its log as they are if it is refused.

    Raises StoreFault, RefusedContent, sqlite3.Error.
    """
    if not path.stat().st_size:
        return
    with closing(open_unchanged(path)) as reader:
        if _version(reader, path, has_pages=_has_pages(reader)) == SCHEMA_VERSION:
            CheckedDatabase(reader, path).inspect()


def _check(connection: sqlite3.Connection, database: CheckedDatabase, path: Path) -> None:
    """Take the lock, check the file, and make the schema in a new one. Raises StoreFault, sqlite3.Error."""
    has_pages = _has_pages(connection)
    with database.transaction():
        version = _version(connection, path, has_pages=has_pages)
        if version == SCHEMA_VERSION:
            database.check()
            if database.is_moved:
                # Shards may have seen the terms of commits that this file does not have.
                raised = "UPDATE meta SET value = min(value + ?, ?) WHERE key = 'term'"
                connection.execute(raised, (TERM_STEP, TERM_MAX))
                database.settle_origin()
            return
        if version == 0:
            for statement in _SCHEMA.split(";"):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            connection.execute("INSERT INTO meta VALUES ('term', 0)")
        check_structure(connection)
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        database.make()


def _has_pages(connection: sqlite3.Connection) -> bool:
    # Must be asked outside of a transaction. After SQLite took back what a killed first start left there is no page.
    return bool(connection.execute("PRAGMA page_count").fetchone()[0])


def _version(connection: sqlite3.Connection, path: Path, *, has_pages: bool) -> int:
    """Return the schema of a file, 0 for a new one. Raises StoreFault for one that is not ours."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if has_pages and not tables:
        finding = "has no tables: it was copied without its -wal file, or is damaged"
        raise StoreFault(f"{path}: {finding}; {_remedy(path)}")
    if not tables:
        return 0
    if application != _APPLICATION_ID:
        raise StoreFault(f"{path}: is not a coordinator's file; choose another one")
    if not 1 <= version <= SCHEMA_VERSION:
        raise StoreFault(f"{path}: has schema {version}, this program knows {SCHEMA_VERSION}; run a newer bigfleet")
    return int(version)


def _read(connection: sqlite3.Connection) -> Iterable[Edit]:
    names = {table.value: table for table in Table}
    for name, text, value in connection.execute("SELECT name, key, value FROM rows ORDER BY name, key"):
        if name not in names:
            raise UnreadableRow(f"there is no table {name!r}")
        key = RowKey(names[name], tuple(text.split(_SEPARATOR)))
        yield Edit(key, decode_row(key, value))


def _key_fault(written: Iterable[Edit]) -> str:
    """Return what is wrong with a key that would not read back, empty without one."""
    for (table, parts), _row in written:
        if any(_SEPARATOR in part for part in parts):
            return f"{table.value}: the key {parts!r} has a NUL character, which this store cannot hold"
    return ""


def _holder_file(path: Path) -> Path:
    return path.with_name(path.name + ".holder")


def _holder(path: Path) -> str:
    try:
        return _holder_file(path).read_text(encoding="utf-8", errors="replace").strip() or "another process"
    except OSError:
        return "another process"
