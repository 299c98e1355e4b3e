"""Stores the placements of instances: one durable row per machine, written before the driver carves.

docs/spec/provider.md §22. The provider's own state names the host of a machine only after its Create has ended. These
rows have the host during the Create and after one that failed. A row is valid only for the operation that it was
written for.
"""

import asyncio
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Final, Protocol

import msgspec

from bigfleet.files.checked_database import (
    CheckedDatabase,
    Format,
    check_presence,
    close_unchanged,
    open_unchanged,
    remedy_of,
    text_of,
)
from bigfleet.files.checksums import RefusedContent
from bigfleet.files.private import make_file, warn_of_loose_modes
from bigfleet.provider.backends.partitioned.ports import Carved
from bigfleet.provider.records.record import Record
from bigfleet.provider.records.refusal import StartRefused
from bigfleet.provider.storage.codec import decode_record
from bigfleet.provider.storage.sqlite import SCHEMA_VERSION as STATE_SCHEMA_VERSION

#: 2 has checksums.
_FORMAT: Final = Format(0x42465054, 2, "these are no rooms that this version reads")


class StoredChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What was chosen for one operation."""

    operation_id: str
    carved: Carved


class InstanceBook(Protocol):
    """Keeps the latest row of each machine."""

    def load(self) -> dict[str, StoredChoice]:
        """Return every row by machine id. Raises StartRefused."""
        ...

    async def put(self, machine_id: str, row: StoredChoice) -> None:
        """Make a row durable."""
        ...

    def close(self) -> None:
        """Release what is held."""
        ...


class MemoryInstanceBook:
    """Keeps rows for as long as the object lives; for tests and the simulation."""

    def __init__(self) -> None:
        self._rows: dict[str, StoredChoice] = {}

    def load(self) -> dict[str, StoredChoice]:
        """Return what was put."""
        return dict(self._rows)

    async def put(self, machine_id: str, row: StoredChoice) -> None:
        """Keep the row."""
        self._rows[machine_id] = row

    def close(self) -> None:
        """Keep what there is."""


class SqliteInstanceBook:
    """One file beside the state, under the state's lock. `is_power_safe` False survives a killed process only."""

    def __init__(self, path: Path, *, is_power_safe: bool) -> None:
        self._path = path
        self._is_power_safe = is_power_safe
        self._connection: sqlite3.Connection | None = None
        self._database: CheckedDatabase | None = None
        # One thread: a connection is used by one at a time, and the loop waits for no disk.
        self._writer = ThreadPoolExecutor(1, "rooms")

    def load(self) -> dict[str, StoredChoice]:
        """Open the file and read it. Raises StartRefused naming the file and the finding."""
        try:
            check_presence(self._path)
            make_file(self._path)
            connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
            self._connection = connection
            self._database = CheckedDatabase(connection, self._path, is_power_safe=self._is_power_safe)
            connection.execute(f"PRAGMA synchronous={'FULL' if self._is_power_safe else 'NORMAL'}")
            self._database.prepare(_FORMAT, _make_tables)
            # Not before the schema: a new file has all of it or no page at all.
            connection.execute("PRAGMA journal_mode=WAL")
            warn_of_loose_modes((self._path,))
            rows = connection.execute("SELECT machine_id, row FROM rooms").fetchall()
            self._database.settle()
            return {machine_id: msgspec.json.decode(row, type=StoredChoice) for machine_id, row in rows}
        except (OSError, sqlite3.Error, RefusedContent, msgspec.MsgspecError, UnicodeDecodeError) as error:
            if self._connection is not None:
                close_unchanged(self._connection, self._path)
            self.close()
            remedy = remedy_of(error, "restore it from a backup together with the state")
            raise StartRefused(f"{self._path}: {text_of(error)}; {remedy}") from error

    async def put(self, machine_id: str, row: StoredChoice) -> None:
        """Write a row, off the loop. Raises sqlite3.Error."""
        content = msgspec.json.encode(row)
        await asyncio.get_running_loop().run_in_executor(self._writer, self._write, machine_id, content)

    def _write(self, machine_id: str, content: bytes) -> None:
        assert self._connection is not None, "the book is open"
        assert self._database is not None, "the book is open"
        with self._database.transaction():
            self._connection.execute("INSERT OR REPLACE INTO rooms VALUES (?, ?)", (machine_id, content))

    def close(self) -> None:
        """Close the file, once what is being written was written."""
        self._writer.shutdown()
        if self._database is not None:
            self._database.close()
            self._database = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _make_tables(connection: sqlite3.Connection) -> None:
    connection.execute("CREATE TABLE rooms (machine_id TEXT PRIMARY KEY, row BLOB NOT NULL) WITHOUT ROWID")


def read_records(path: Path) -> tuple[Record, ...]:
    """Return the machines of a provider's state file in revision order; none when there is no such file yet.

    The caller holds the file's lock. A file that is not the store's, or newer, is left for the store to refuse. Raises
    StartRefused naming the file and the finding: without its records every room would look free.
    """
    if not path.exists():
        return ()
    try:
        # The store checks it afterwards, and has to find it as it is.
        with closing(open_unchanged(path)) as connection:
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if not 1 <= version <= STATE_SCHEMA_VERSION:
                return ()
            rows = connection.execute(
                "SELECT id, revision, state_since_unix_nanos, record, operation FROM machines ORDER BY revision"
            )
            return tuple(
                decode_record(machine_id, revision, since_unix_nanos, text, operation, None)
                for machine_id, revision, since_unix_nanos, text, operation in rows
            )
    except (sqlite3.Error, msgspec.MsgspecError, ValueError) as error:
        raise StartRefused(f"{path}: {error}; restore it from a backup or move it away") from error
