"""Simulates disks: a provider's store, the simulated cloud, an audit log; reports each write.

A commit happens completely or not at all, and a disk that is down refuses it (`StoreDown`). Stored content must never
change by itself.
"""

from collections.abc import Callable, Iterable

from bigfleet.provider.backends.simulated.book import Entry, MemoryHostBook, SimulatedHost
from bigfleet.provider.records.fence import Mark
from bigfleet.provider.records.record import Record
from bigfleet.provider.records.refusal import StoreDown
from bigfleet.provider.storage.blob_encryption import Sealed
from bigfleet.provider.storage.store import Batch, Loaded
from bigfleet.provider.storage.view import Tombstone
from bigfleet.shard.audit.log import START, AuditHead, read_line

HostListener = Callable[[str, SimulatedHost | None, SimulatedHost | None], None]


class DurableStore:
    """A provider's durable state in memory; implements `bigfleet.provider.storage.store.Store`."""

    def __init__(
        self, *, on_record: Callable[[Record | None, Record | None], None], on_mark: Callable[[Mark], None]
    ) -> None:
        """`on_record` is called with (record before, record after) of each change; either may be None.

        `on_mark` is called with each mark of a commit, before the records of the same commit.
        """
        self.records: dict[str, Record] = {}
        self.is_down = False
        self._on_record = on_record
        self._on_mark = on_mark
        self._incarnation = b""
        self._head = self._floor = 0
        self._tombstones: dict[str, Tombstone] = {}
        self._marks: dict[tuple[str, str], Mark] = {}
        self._sealed: dict[str, Sealed] = {}

    def load(self, new_incarnation: bytes) -> Loaded:
        """Return what was committed; an empty store takes the incarnation."""
        self._incarnation = self._incarnation or new_incarnation
        return Loaded(
            incarnation=self._incarnation,
            head=self._head,
            floor=self._floor,
            records=tuple(sorted(self.records.values(), key=lambda record: record.revision)),
            tombstones=tuple(sorted(self._tombstones.values(), key=lambda tombstone: tombstone.revision)),
            marks=tuple(sorted(self._marks.values(), key=lambda mark: (mark.used_unix_nanos, mark.machine_id))),
            sealed=tuple(self._sealed.values()),
        )

    def commit(self, batch: Batch) -> None:
        """Take a batch. Raises StoreDown while the disk is down, and then nothing of it happened."""
        if self.is_down:
            raise StoreDown("the simulated disk takes nothing")
        self._head, self._floor = batch.head, batch.floor
        self._incarnation = batch.incarnation or self._incarnation
        for mark in batch.marks:
            self._on_mark(mark)
            self._marks[mark.machine_id, mark.shard_id] = mark
        for mark in batch.marks_dropped:
            self._marks.pop((mark.machine_id, mark.shard_id), None)
        for record in batch.records:
            before = self.records.get(record.id)
            self.records[record.id] = record
            self._on_record(before, record)
        for tombstone in batch.tombstones:
            gone = self.records.pop(tombstone.machine_id, None)
            self._tombstones[tombstone.machine_id] = tombstone
            self._on_record(gone, None)
        for machine_id in batch.tombstones_dropped:
            self._tombstones.pop(machine_id, None)
        self._sealed.update({sealed.machine_id: sealed for sealed in batch.sealed})
        for machine_id in batch.sealed_dropped:
            self._sealed.pop(machine_id, None)

    def size_bytes(self) -> int:
        """Return 0: memory is not counted."""
        return 0

    def close(self) -> None:
        """Keep everything: the disk outlives its process."""


class WatchedBook(MemoryHostBook):
    """The cloud's book; reports each change of a host."""

    def __init__(self, on_host: HostListener) -> None:
        """`on_host` is called with (machine, host before, host after)."""
        super().__init__()
        #: The host of each machine as it was last written.
        self.hosts: dict[str, SimulatedHost] = {}
        self._on_host = on_host

    def save(self, entries: Iterable[tuple[str, Entry]]) -> None:
        """Keep copies."""
        taken = list(entries)
        super().save(taken)
        for machine_id, entry in taken:
            before = self.hosts.get(machine_id)
            if entry.host is None:
                self.hosts.pop(machine_id, None)
            else:
                fields = {name: getattr(entry.host, name) for name in entry.host.__struct_fields__}
                self.hosts[machine_id] = SimulatedHost(**fields)
            self._on_host(machine_id, before, self.hosts.get(machine_id))


class DurableAudit:
    """The audit log of one shard process; implements `bigfleet.shard.audit.log.AuditLog`."""

    def __init__(self, on_line: Callable[[bytes], None]) -> None:
        self.lines: list[bytes] = []
        self._on_line = on_line

    @property
    def head(self) -> AuditHead:
        """The last record."""
        line = read_line(self.lines[-1].removesuffix(b"\n")) if self.lines else None
        return START if line is None else AuditHead(line.sequence, line.chain)

    @property
    def is_new_file(self) -> bool:
        """Return whether nothing was written yet."""
        return not self.lines

    def make_room(self, size_bytes: int) -> None:
        """Do nothing: there is room."""

    def append(self, line: bytes) -> None:
        """Keep the line."""
        self.lines.append(line)
        self._on_line(line)
