"""Stores which clusters are retired, in a table of the shard's state file.

docs/spec/shard.md §2 and §4.3. The demand of a cluster that has a record is empty, also when its operator reports some.
Each change is one transaction. A row that cannot be read ends the start and is named; it is never skipped.
"""

import sqlite3
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from bigfleet.model.ids import IDENTIFIER_BYTES_MAX, ClusterId, identifier_fault
from bigfleet.shard.ownership.ownership_file import DamagedRow

#: Of the table that schema 3 added.
TABLE = (
    "CREATE TABLE retired_clusters (cluster_id TEXT PRIMARY KEY, since_unix_nanos INTEGER NOT NULL,"
    " until_unix_nanos INTEGER NOT NULL, owner TEXT NOT NULL, reason TEXT NOT NULL) STRICT"
)
#: Records at a time; a file holds each of them, and each cycle looks at each.
RETIRED_CLUSTERS_MAX = 1_000
REASON_BYTES_MAX = 1_024


@dataclass(frozen=True, slots=True, kw_only=True)
class RetiredCluster:
    """A cluster whose demand is empty until the record ends."""

    cluster: ClusterId
    since_unix_nanos: int
    #: The record ends when no machine is left, no session is open and this moment has passed.
    until_unix_nanos: int
    #: URI of the identity that asked for it; empty for a caller in plain text.
    owner: str
    reason: str


class RetirementStore(Protocol):
    """Where the records are. `put` and `remove` raise OwnershipNotWritten when nothing was changed."""

    @property
    def records(self) -> Mapping[ClusterId, RetiredCluster]:
        """The records in force; replaced, never changed."""
        ...

    def put(self, record: RetiredCluster) -> None:
        """Add a record, or replace that of the same cluster."""
        ...

    def remove(self, cluster: ClusterId) -> None:
        """Delete the record of a cluster."""
        ...


class MemoryRetirements:
    """Records of a shard without a state file; they end with the process."""

    def __init__(self) -> None:
        self.records: Mapping[ClusterId, RetiredCluster] = {}

    def put(self, record: RetiredCluster) -> None:
        """Add a record, or replace that of the same cluster."""
        self.records = {**self.records, record.cluster: record}

    def remove(self, cluster: ClusterId) -> None:
        """Delete the record of a cluster."""
        self.records = {name: record for name, record in self.records.items() if name != cluster}


class RetirementFile:
    """The table of one open state file. Invariant: `records` is what a process that opens the file now would read."""

    def __init__(self, connection: sqlite3.Connection, transaction: Callable[[], AbstractContextManager[None]]) -> None:
        """Read everything. `transaction` makes the changes of a block durable as a whole. Raises DamagedRow."""
        self._connection = connection
        self._transaction = transaction
        self.records: Mapping[ClusterId, RetiredCluster] = _read(connection)

    def put(self, record: RetiredCluster) -> None:
        """Make a record durable. Raises OwnershipNotWritten."""
        with self._transaction():
            self._connection.execute(
                "INSERT OR REPLACE INTO retired_clusters VALUES (?, ?, ?, ?, ?)",
                (record.cluster, record.since_unix_nanos, record.until_unix_nanos, record.owner, record.reason),
            )
        self.records = {**self.records, record.cluster: record}

    def remove(self, cluster: ClusterId) -> None:
        """Delete a record durably. Raises OwnershipNotWritten."""
        with self._transaction():
            self._connection.execute("DELETE FROM retired_clusters WHERE cluster_id = ?", (cluster,))
        self.records = {name: record for name, record in self.records.items() if name != cluster}


def _read(connection: sqlite3.Connection) -> dict[ClusterId, RetiredCluster]:
    records: dict[ClusterId, RetiredCluster] = {}
    query = "SELECT cluster_id, since_unix_nanos, until_unix_nanos, owner, reason FROM retired_clusters"
    for cluster, since, until, owner, reason in connection.execute(query):
        fault = identifier_fault(cluster)
        if fault is not None:
            raise DamagedRow(f"table retired_clusters: cluster {cluster[:IDENTIFIER_BYTES_MAX]!r}: {fault}")
        records[ClusterId(cluster)] = RetiredCluster(
            cluster=ClusterId(cluster), since_unix_nanos=since, until_unix_nanos=until, owner=owner, reason=reason
        )
    return records
