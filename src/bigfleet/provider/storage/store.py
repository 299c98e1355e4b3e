"""Defines the Protocol of stores, and a store in memory.

docs/spec/provider.md §11. `bigfleet.provider.storage.sqlite` is the durable one, `bigfleet.provider.storage.ledger` the
only caller. A commit must never be applied in part.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from bigfleet.provider.records.fence import Mark
from bigfleet.provider.records.record import Record
from bigfleet.provider.records.refusal import StoreDown
from bigfleet.provider.storage.blob_encryption import Sealed
from bigfleet.provider.storage.view import Tombstone


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One transaction. Rows are replaced by key; everything in it happens, or nothing."""

    #: Revision of the last change or removal after this batch.
    head: int
    #: Tombstone floor after this batch.
    floor: int
    records: tuple[Record, ...] = ()
    #: Their machines leave the table of machines.
    tombstones: tuple[Tombstone, ...] = ()
    #: Ids whose tombstone goes: too old, or back in the inventory.
    tombstones_dropped: tuple[str, ...] = ()
    marks: tuple[Mark, ...] = ()
    marks_dropped: tuple[Mark, ...] = ()
    #: Stored blobs, one a machine.
    sealed: tuple[Sealed, ...] = ()
    #: Machines whose stored blob goes, also one of this batch.
    sealed_dropped: tuple[str, ...] = ()
    #: Replaces the store's incarnation.
    incarnation: bytes | None = None
    #: Replaces what the backend stores about the place of its hosts.
    identity: Mapping[str, str] | None = None
    #: The store was down: it takes the batch only if it has room for many more.
    needs_room: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Everything that a store holds."""

    #: 8 bytes that differ for every store that ever began.
    incarnation: bytes
    head: int = 0
    floor: int = 0
    #: In revision order, verbatim.
    records: tuple[Record, ...] = ()
    #: In revision order.
    tombstones: tuple[Tombstone, ...] = ()
    #: Least recently used first.
    marks: tuple[Mark, ...] = ()
    sealed: tuple[Sealed, ...] = ()
    #: What the backend stored about the place of its hosts.
    identity: Mapping[str, str] = field(default_factory=dict)


class Store(Protocol):
    """Durable state of one provider, used by one thread at a time."""

    def load(self, new_incarnation: bytes) -> Loaded:
        """Return what is there; an empty store takes the incarnation. Raises StartRefused naming the finding."""
        ...

    def commit(self, batch: Batch) -> None:
        """Make a batch durable. Raises StoreDown, and then nothing of it happened."""
        ...

    def size_bytes(self) -> int:
        """Return the size on disk."""
        ...

    def close(self) -> None:
        """Release what is held."""
        ...


@dataclass(slots=True)
class MemoryStore:
    """For tests and fakes: its incarnation is new at each start, and nothing survives."""

    #: Set by tests: commits raise StoreDown while it is True.
    is_failing: bool = False

    def load(self, new_incarnation: bytes) -> Loaded:
        """Return an empty store."""
        return Loaded(incarnation=new_incarnation)

    def commit(self, batch: Batch) -> None:
        """Take the batch, or fail when a test asked for it."""
        if self.is_failing:
            raise StoreDown("the memory store was set to fail")

    def size_bytes(self) -> int:
        """Return 0: there is no disk."""
        return 0

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
