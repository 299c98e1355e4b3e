"""Defines the interface of the coordinator's stores: how tables are stored, and which replica may write them.

docs/spec/coordinator.md §2 and §3. It has two implementations: etcd, for any number of replicas, and a SQLite file for
one. The term is the fence: a write is admitted by the term in the store, never by a clock. The lease only determines
how soon a dead leader is replaced.
"""

from dataclasses import dataclass
from typing import Protocol

from bigfleet.coordinator.commands import Command
from bigfleet.coordinator.tables import Tables

#: Added to a term when it must rise above one that shards have seen; leaves room for unrecorded leaders.
TERM_STEP = 1_000_000
#: A term above this is no term of ours.
TERM_MAX = 2**62


class StoreUnavailable(Exception):
    """The store cannot be reached or refuses the call; nothing was written. The message names address and cause."""


class OutcomeUnknown(Exception):
    """A write got no answer and could not be read back either; it may or may not have happened."""


class NotLeader(Exception):
    """This replica does not lead, or not any more; nothing was written."""


@dataclass(frozen=True, slots=True)
class LeaderInfo:
    """Who leads, as the store reports it."""

    replica: str
    #: Where it is dialled; empty when it did not say.
    address: str


@dataclass(frozen=True, slots=True)
class Leadership:
    """What a replica has won."""

    #: Strictly higher than that of every leader before.
    term: int
    #: The tables at that moment.
    tables: Tables


class StateStore(Protocol):
    """The hard state of one coordinator; used by one event loop."""

    async def campaign(self) -> Leadership:
        """Wait until this replica leads, however long that takes; an unreachable store is tried again and again."""
        ...

    async def lost(self) -> str:
        """Wait until this replica leads no more and return why, in words; only after `campaign` has returned."""
        ...

    async def load(self) -> Tables:
        """Return the tables as they are now. Raises StoreUnavailable."""
        ...

    async def commit(self, command: Command) -> Tables:
        """Apply a command and return the tables after it, or those that are where it writes nothing.

        Written in one transaction that holds only while this replica leads and each row that it touches is as it was
        read. Raises CommandRefused, NotLeader, StoreUnavailable, OutcomeUnknown.
        """
        ...

    async def is_leader(self) -> bool:
        """Ask the store itself whether this replica leads. Raises StoreUnavailable."""
        ...

    async def raise_term(self, above: int) -> int:
        """Make this replica's term `above` + 1,000,000 and return it. Raises NotLeader, StoreUnavailable."""
        ...

    def leader(self) -> LeaderInfo | None:
        """Return who leads as far as this replica knows, itself included."""
        ...

    async def resign(self) -> None:
        """Give leadership up, so that the next replica need not wait; harmless when there is none to give up."""
        ...

    async def close(self) -> None:
        """Let go of everything."""
        ...


class RevisedStore(StateStore, Protocol):
    """A store that can name the state of its tables, for snapshots."""

    def revision(self) -> int:
        """Return a number that rises with every write, as of what was last read or written."""
        ...
