"""Checks the content of a SQLite file against checksums of its tables, which each statement keeps up to date.

docs/adr/0180-state-files-have-checksums.md. SQLite detects a damaged page only by its structure: a flipped bit in a
value reads as another value. The table `checksums` has the number of rows and a digest of each other table, of the
schema and of the number of commits. Triggers of the connection change it in the transaction that changes a row. It
detects accidents only: a user who can write the file can also write the checksums.
"""

import sqlite3
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
import xxhash

TABLE: Final = "checksums"
_CREATE: Final = (
    "CREATE TABLE checksums (name TEXT PRIMARY KEY, entries INTEGER NOT NULL, digest INTEGER NOT NULL) WITHOUT ROWID"
)
#: Names of the rows that stand for no table. The last one is in backups only.
_SCHEMA, _COMMITS, _BACKUP = "schema of the file", "commits of the file", "backup of the file"
#: What a statement of a trigger calls: a digest without or with the values of a row.
_FOLD: Final = "bigfleet_fold"
_SIGN: Final = 1 << 63

_encode = msgspec.msgpack.Encoder().encode


class RefusedContent(Exception):
    """A file differs from its last commit. The message gives the difference; the caller adds the file's name."""

    def __init__(self, finding: str, *, remedy: str = "") -> None:
        """`remedy` is what to do in place of what helps with other findings."""
        super().__init__(finding)
        self.remedy = remedy


def has_checksums(connection: sqlite3.Connection) -> bool:
    """Return whether the file has checksums; one of an older schema has none."""
    return connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (TABLE,)).fetchone() is not None


def make_checksums(connection: sqlite3.Connection) -> None:
    """Give a file checksums of what it holds now, within the caller's transaction; the schema must be complete."""
    connection.execute(_CREATE)
    rows = [(name, *_content_of(connection, name)) for name in _tables(connection)]
    rows.append((_SCHEMA, *_schema_of(connection)))
    rows.append((_COMMITS, 0, _digest((_COMMITS, 0))))
    connection.executemany("INSERT INTO checksums VALUES (?, ?, ?)", rows)


def check_structure(connection: sqlite3.Connection) -> None:
    """Check pages and indexes, which is all that a file without checksums allows. Raises RefusedContent."""
    finding = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if finding != "ok":
        # SQLite names the database in a line of its own, then what it found.
        raise RefusedContent(f"damaged: {finding.splitlines()[-1]}")


class CheckedContent(NamedTuple):
    """What is known of a file whose content is as it was committed."""

    commits: int
    is_backup: bool


def check_content(connection: sqlite3.Connection) -> CheckedContent:
    """Read every row. Raises RefusedContent and sqlite3.Error."""
    check_structure(connection)
    if not has_checksums(connection):
        raise RefusedContent("damaged: its checksums are missing")
    rows = connection.execute("SELECT name, entries, digest FROM checksums")
    stored = {name: (entries, digest) for name, entries, digest in rows}
    commits, digest = stored.pop(_COMMITS, (-1, 0))
    if not isinstance(commits, int) or commits < 0 or digest != _digest((_COMMITS, commits)):
        raise RefusedContent("damaged: the number of commits does not match its checksum")
    is_backup = stored.pop(_BACKUP, None) is not None
    if stored.pop(_SCHEMA, None) != _schema_of(connection):
        raise RefusedContent("damaged: the schema does not match its checksum")
    tables = _tables(connection)
    if stored.keys() != set(tables):
        raise RefusedContent("damaged: the tables are not those of the checksums")
    for name in tables:
        if stored[name] != _content_of(connection, name):
            raise RefusedContent(f"damaged: table {name} does not match its checksum")
    return CheckedContent(commits, is_backup)


def keep_checksums(connection: sqlite3.Connection) -> None:
    """Have every later statement of this connection change the checksums too; no other connection may write."""
    connection.create_function(_FOLD, -1, _fold, deterministic=True)
    # Without it the row that INSERT OR REPLACE replaces would go without a trigger.
    connection.execute("PRAGMA recursive_triggers = ON")
    for name in _tables(connection):
        old, new = (", ".join(f'{row}."{column}"' for column in _columns(connection, name)) for row in ("OLD", "NEW"))
        changes = {
            "INSERT": (1, f"{_FOLD}(digest, {new})"),
            "DELETE": (-1, f"{_FOLD}(digest, {old})"),
            "UPDATE": (0, f"{_FOLD}({_FOLD}(digest, {old}), {new})"),
        }
        for event, (entries, digest) in changes.items():
            counted = f"entries = entries + {entries}, digest = {digest}"
            change = f"UPDATE checksums SET {counted} WHERE name = '{name}'"  # noqa: S608 - names of our schema
            connection.execute(
                f'CREATE TEMP TRIGGER "{name} {event}" AFTER {event} ON main."{name}" BEGIN {change}; END'
            )


def count_commit(connection: sqlite3.Connection, commits: int) -> None:
    """Write how many commits the file has, within the caller's transaction."""
    changed = (commits, _digest((_COMMITS, commits)), _COMMITS)
    connection.execute("UPDATE checksums SET entries = ?, digest = ? WHERE name = ?", changed)


def mark_backup(connection: sqlite3.Connection, *, is_backup: bool) -> None:
    """Mark a file as a backup, or as one no more, within the caller's transaction."""
    connection.execute("DELETE FROM checksums WHERE name = ?", (_BACKUP,))
    if is_backup:
        connection.execute("INSERT INTO checksums VALUES (?, 0, 0)", (_BACKUP,))


# ---- digests -----------------------------------------------------------------------------------------------------


def _fold(digest: int, *values: object) -> int:
    return digest ^ _digest(values)


def _digest(values: Sequence[object]) -> int:
    # msgpack has one form for each sequence of the values that SQLite has, and SQLite's integers have a sign.
    unsigned: int = xxhash.xxh3_64_intdigest(_encode(values))
    return unsigned - (unsigned & _SIGN) * 2


def _content_of(connection: sqlite3.Connection, table: str) -> tuple[int, int]:
    """Return the number of rows and their digest, which does not depend on their order."""
    entries = digest = 0
    columns = ", ".join(f'"{column}"' for column in _columns(connection, table))
    for row in connection.execute(f'SELECT {columns} FROM main."{table}"'):  # noqa: S608 - names of our schema
        entries += 1
        digest ^= _digest(row)
    return entries, digest


def _schema_of(connection: sqlite3.Connection) -> tuple[int, int]:
    query = "SELECT type, name, tbl_name, sql FROM main.sqlite_master ORDER BY type, name"
    described = connection.execute(query).fetchall()
    return len(described), _digest(described)


def _tables(connection: sqlite3.Connection) -> list[str]:
    query = "SELECT name FROM main.sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%' ORDER BY name"
    return [name for (name,) in connection.execute(query) if name != TABLE]


def _columns(connection: sqlite3.Connection, table: str) -> list[str]:
    return [name for (name,) in connection.execute("SELECT name FROM pragma_table_info(?)", (table,))]
