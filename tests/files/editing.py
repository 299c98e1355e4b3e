"""Edits state files as a faulty program would that knows the checksums."""

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from bigfleet.files.checked_database import SUFFIX
from bigfleet.files.checksums import TABLE, count_commit, has_checksums, make_checksums


@contextlib.contextmanager
def editing(path: Path) -> Iterator[sqlite3.Connection]:
    """Yield a connection to a closed file; then give the file checksums of what it has now, if it had some."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN")
        yield connection
        if has_checksums(connection):
            query = f"SELECT entries FROM {TABLE} WHERE name = 'commits of the file'"
            commits = connection.execute(query).fetchone()[0]
            connection.execute(f"DROP TABLE {TABLE}")
            make_checksums(connection)
            count_commit(connection, commits)
        connection.execute("COMMIT")


def edit(path: Path, *statements: str) -> None:
    """Execute statements on a closed file, and give it checksums of the outcome if it had some."""
    with editing(path) as connection:
        for statement in statements:
            connection.execute(statement)


def as_of_schema(path: Path, *statements: str) -> None:
    """Make a closed file one of an earlier schema, without checksums and counter, by statements."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(f"DROP TABLE {TABLE}")
        for statement in statements:
            connection.execute(statement)
    path.with_name(path.name + SUFFIX).unlink()
