"""Stores a shard's disk in the world, and reads from it which shard owns which machine.

The tables are the real ones of `bigfleet.shard.ownership.ownership_file`, in memory; a process finds what its
predecessor has committed. A disk has one holder: a process whose successor has started writes nothing more. After each
commit the disk is read again, so that its content counts, and not its writer's memory.
"""

import sqlite3
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bigfleet.model.clock import NANOS_PER_SECOND, Clock
from bigfleet.model.ids import MachineId, ShardId
from bigfleet.model.machine import Machine
from bigfleet.model.ownership import Base, Domain, Owned, Reservation, RowKind
from bigfleet.shard.ownership.ownership_file import OwnershipFile, OwnershipNotWritten, make_tables

_PATH = Path("/simulated/shard.db")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnershipRecord:
    """The content of one shard's disk."""

    owned: Owned
    reservations: Mapping[MachineId, Reservation] = field(default_factory=dict)
    accepted_term: int = 0
    #: Of the process that holds the disk.
    epoch: int = 0

    def owns(self, me: ShardId, machine: Machine, assigned_shard: str, *, stays: bool = False) -> bool:
        """Return whether the machine is this shard's by its disk; `stays` is `Owned.owns`'."""
        return self.owned.owns(machine, assigned_shard, me=me, inherits=frozenset(), stays=stays)

    @property
    def released(self) -> frozenset[MachineId]:
        """The machines that were released and are not known to have arrived."""
        return frozenset(m for m, row in self.owned.rows.items() if row.kind is RowKind.RELEASED)


def owners(ownerships: Mapping[ShardId, OwnershipRecord], machine: Machine, assigned_shard: str) -> list[ShardId]:
    """Return the shards whose disks say that the machine is theirs."""
    return [shard_id for shard_id, ownership in ownerships.items() if ownership.owns(shard_id, machine, assigned_shard)]


class HeldFile(OwnershipFile):
    """The disk as one process has it."""

    def __init__(self, disk: "ShardDisk", connection: sqlite3.Connection, epoch: int) -> None:
        super().__init__(connection, _PATH)
        self._disk = disk
        self._epoch = epoch

    def accept_term(self, term: int) -> None:
        """Make a term durable. Raises OwnershipNotWritten."""
        self._disk.check(self._epoch)
        super().accept_term(term)
        self._disk.written()

    def commit(self, owned: Owned, reservations: Mapping[MachineId, Reservation] | None = None) -> None:
        """Make what is owned and reserved durable. Raises OwnershipNotWritten."""
        self._disk.check(self._epoch)
        super().commit(owned, reservations)
        self._disk.written()


class ShardDisk:
    """One shard's disk."""

    def __init__(
        self,
        shard_id: ShardId,
        *,
        domains: Iterable[Domain],
        clock: Clock,
        on_change: Callable[[OwnershipRecord, OwnershipRecord], None],
        on_full: Callable[[], None],
    ) -> None:
        """`domains` are those that it holds at first. `on_change` takes what the disk said, and what it says now."""
        self.shard_id = shard_id
        #: It takes nothing.
        self.is_full = False
        self.epoch = 0
        self._clock = clock
        self._on_change = on_change
        self._on_full = on_full
        self._connection = _fresh(domains)
        self.ownership = self._read()

    def open(self) -> HeldFile:
        """Return the disk for another process, and take it from the one before; its epoch is the next."""
        self.epoch += 1
        file = HeldFile(self, self._connection, self.epoch)
        self.written()
        return file

    def lose(self) -> None:
        """Put an empty disk in its place; the next process outranks every one before (docs/spec/shard.md §2)."""
        self._connection = _fresh(())
        self.epoch = max(self.epoch, self._clock.unix_nanos() // NANOS_PER_SECOND)
        self.written()

    def check(self, epoch: int) -> None:
        """Raise OwnershipNotWritten unless that process may write now."""
        if epoch != self.epoch:
            raise OwnershipNotWritten(f"{_PATH}: another process has the disk")
        if self.is_full:
            self._on_full()
            raise OwnershipNotWritten(f"{_PATH}: the simulated disk is full")

    def written(self) -> None:
        """Read what stands there now, and report the change."""
        before, self.ownership = self.ownership, self._read()
        self._on_change(before, self.ownership)

    def _read(self) -> OwnershipRecord:
        file = OwnershipFile(self._connection, _PATH)
        return OwnershipRecord(
            owned=file.owned,
            reservations=dict(file.reservations),
            accepted_term=file.accepted_term,
            epoch=self.epoch,
        )


def _fresh(domains: Iterable[Domain]) -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.execute("CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT")
    make_tables(connection, Base.DOMAINS)
    connection.executemany("INSERT INTO domains VALUES (?, ?, 'held')", [tuple(each) for each in sorted(domains)])
    return connection
