"""Counts and times the calls of a store, for the metrics of one replica (docs/spec/coordinator.md §11).

It changes no answer and no error.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from bigfleet.coordinator.commands import Command, CommandRefused
from bigfleet.coordinator.metrics import CoordinatorMetrics
from bigfleet.coordinator.stores.protocol import (
    LeaderInfo,
    Leadership,
    NotLeader,
    OutcomeUnknown,
    RevisedStore,
    StoreUnavailable,
)
from bigfleet.coordinator.tables import Tables
from bigfleet.model.clock import Clock


class MeteredStore:
    """A `RevisedStore` in front of another one, which it owns."""

    def __init__(self, store: RevisedStore, metrics: CoordinatorMetrics, clock: Clock) -> None:
        self._store = store
        self._metrics = metrics
        self._clock = clock
        self._tables: Tables | None = None

    async def campaign(self) -> Leadership:
        """Wait until this replica leads."""
        won = await self._store.campaign()
        self._tables = won.tables
        return won

    async def lost(self) -> str:
        """Wait until this replica leads no more."""
        return await self._store.lost()

    async def load(self) -> Tables:
        """Return the tables."""
        with self._timed("load"):
            return await self._store.load()

    async def commit(self, command: Command) -> Tables:
        """Apply a command; one that finds everything as it should be is no write, and is not counted."""
        applied = self._metrics.applied
        try:
            with self._timed("commit"):
                tables = await self._store.commit(command)
        except CommandRefused:
            applied.labels("fsm_error").inc()
            raise
        except (StoreUnavailable, OutcomeUnknown, NotLeader):
            applied.labels("error").inc()
            raise
        if tables is not self._tables:
            applied.labels("success").inc()
        self._tables = tables
        return tables

    async def is_leader(self) -> bool:
        """Ask the store who leads."""
        with self._timed("is_leader"):
            return await self._store.is_leader()

    async def raise_term(self, above: int) -> int:
        """Raise the term."""
        with self._timed("raise_term"):
            term = await self._store.raise_term(above)
        self._metrics.term_raised.inc()
        return term

    def revision(self) -> int:
        """Return the revision of the tables."""
        return self._store.revision()

    def leader(self) -> LeaderInfo | None:
        """Return the leader, as the store knows it."""
        return self._store.leader()

    async def resign(self) -> None:
        """Give leadership up."""
        await self._store.resign()

    async def close(self) -> None:
        """Let go of everything."""
        await self._store.close()

    @contextmanager
    def _timed(self, operation: str) -> Iterator[None]:
        began_seconds = self._clock.monotonic_seconds()
        try:
            yield
        finally:
            self._metrics.store_seconds.labels(operation).observe(self._clock.monotonic_seconds() - began_seconds)
