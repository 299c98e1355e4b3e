"""Stores the machines of the simulated cloud: one row each, in a SQLite file or in memory.

docs/spec/provider.md §21. The cloud outlives the provider's process, so an effect is committed before the call that
caused it returns. A row must never be written in part.
"""

import sqlite3
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import msgspec

from bigfleet.files.checked_database import CheckedDatabase, Format, check_presence, close_unchanged, remedy_of, text_of
from bigfleet.files.checksums import RefusedContent
from bigfleet.files.private import make_file, warn_of_loose_modes
from bigfleet.provider.records.refusal import StartRefused

#: 2 has checksums.
_FORMAT: Final = Format(0x4246434C, 2, "this is no simulated cloud that this version reads")


class SimulatedHost(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A host of the simulated cloud. Where it is in its life is a function of these times and now; Unix nanoseconds.

    `bigfleet.provider.backends.simulated.life` reads them.
    """

    ref: str
    #: How many-th host of its machine.
    number: int
    created_by: str
    requested_unix_nanos: int = 0
    running_unix_nanos: int
    dies_unix_nanos: int | None = None
    notice_unix_nanos: int | None = None
    hint_unix_nanos: int | None = None
    cluster: str = ""
    configured_by: str = ""
    configured_unix_nanos: int = 0
    #: None with a cluster: the node never becomes Ready.
    ready_unix_nanos: int | None = None
    drained_by: str = ""
    #: From then on it is in no cluster, whether the caller waited or not.
    drained_unix_nanos: int = 0
    deleted_by: str = ""
    #: From then on there is no host, whether the caller waited or not.
    gone_unix_nanos: int = 0


class Made(msgspec.Struct, kw_only=True, frozen=True):
    """What a host was made as: it stays listed when its offer is gone."""

    instance_type: str
    zone: str
    capacity_type: int
    resources: dict[str, str]
    allocatable: dict[str, str]
    labels: dict[str, str]
    price_usd_per_hour: float
    interruption_probability: float
    fixed: bool


class Entry(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the cloud knows of one machine id."""

    host: SimulatedHost | None = None
    #: Set with the first host.
    made: Made | None = None
    #: What its hosts of before were billed; every begun second of a host counts.
    billed_seconds: int = 0
    #: How often each topic was drawn for this machine.
    counters: dict[str, int] = {}


class HostBook(Protocol):
    """Where entries are stored."""

    def load(self, now_unix_nanos: int) -> tuple[int, dict[str, Entry]]:
        """Return when the world began, and every entry; an empty book begins now."""
        ...

    def save(self, entries: Iterable[tuple[str, Entry]]) -> None:
        """Make entries durable."""
        ...

    def close(self) -> None:
        """Release what is held."""
        ...


class MemoryHostBook:
    """Keeps entries for as long as the object lives; for tests and the simulation."""

    def __init__(self) -> None:
        self._began_unix_nanos: int | None = None
        self._rows: dict[str, bytes] = {}

    def load(self, now_unix_nanos: int) -> tuple[int, dict[str, Entry]]:
        """Return what was saved."""
        if self._began_unix_nanos is None:
            self._began_unix_nanos = now_unix_nanos
        return self._began_unix_nanos, {key: msgspec.json.decode(row, type=Entry) for key, row in self._rows.items()}

    def save(self, entries: Iterable[tuple[str, Entry]]) -> None:
        """Keep copies."""
        for machine_id, entry in entries:
            self._rows[machine_id] = msgspec.json.encode(entry)

    def close(self) -> None:
        """Keep what there is: the cloud outlives its provider."""


class SqliteHostBook:
    """One file. It survives a killed process; a lost power supply may take the last moments of a simulation."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._database: CheckedDatabase | None = None

    def load(self, now_unix_nanos: int) -> tuple[int, dict[str, Entry]]:
        """Open the file and read it. Raises StartRefused naming the file and the finding."""
        try:
            check_presence(self._path)
            make_file(self._path)
            connection = sqlite3.connect(self._path, isolation_level=None)
            self._connection = connection
            self._database = CheckedDatabase(connection, self._path, is_power_safe=False)
            connection.execute("PRAGMA synchronous=NORMAL")
            self._database.prepare(_FORMAT, partial(_make_tables, now_unix_nanos))
            # Not before the schema: a new file has all of it or no page at all.
            connection.execute("PRAGMA journal_mode=WAL")
            warn_of_loose_modes((self._path,))
            began = connection.execute("SELECT value FROM meta WHERE key = 'began_unix_nanos'").fetchone()[0]
            rows = connection.execute("SELECT id, entry FROM machines ORDER BY id").fetchall()
            self._database.settle()
            return int(began), {machine_id: msgspec.json.decode(row, type=Entry) for machine_id, row in rows}
        except (OSError, sqlite3.Error, RefusedContent, msgspec.MsgspecError, UnicodeDecodeError) as error:
            if self._connection is not None:
                close_unchanged(self._connection, self._path)
            self.close()
            remedy = f"restore it from a backup, or move {self._path.name}* away to begin a new world"
            raise StartRefused(f"{self._path}: {text_of(error)}; {remedy_of(error, remedy)}") from error

    def save(self, entries: Iterable[tuple[str, Entry]]) -> None:
        """Write entries in one transaction."""
        assert self._connection is not None, "the book is open"
        assert self._database is not None, "the book is open"
        rows = [(machine_id, msgspec.json.encode(entry)) for machine_id, entry in entries]
        with self._database.transaction():
            self._connection.executemany("INSERT OR REPLACE INTO machines VALUES (?, ?)", rows)

    def close(self) -> None:
        """Close the file."""
        if self._database is not None:
            self._database.close()
            self._database = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _make_tables(began_unix_nanos: int, connection: sqlite3.Connection) -> None:
    connection.execute("CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID")
    connection.execute("CREATE TABLE machines (id TEXT PRIMARY KEY, entry BLOB NOT NULL) WITHOUT ROWID")
    connection.execute("INSERT INTO meta VALUES ('began_unix_nanos', ?)", (began_unix_nanos,))
