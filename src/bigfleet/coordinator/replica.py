"""Runs one replica: campaigns, leads until it loses the lease, discards its ephemeral state, campaigns again.

docs/spec/coordinator.md §1, §3 to §7, §10. While it leads, passes and exports run concurrently with answers. Everything
that changes its state holds one lock and runs to its end, also if the caller is gone. This module does not decide which
machine moves or which shard owns it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import structlog

from bigfleet.coordinator.leader import Leader
from bigfleet.coordinator.leader_term import CoordinatorSettings, Term
from bigfleet.coordinator.metrics import CoordinatorMetrics, Figures
from bigfleet.coordinator.stores.protocol import LeaderInfo, RevisedStore, StoreUnavailable
from bigfleet.coordinator.stores.snapshot import SnapshotFault, TablesSnapshot, content_digest, export, snapshot_of
from bigfleet.model.clock import NANOS_PER_SECOND, Clock

_log = structlog.get_logger("bigfleet.coordinator.replica")

#: Before a store that refused is asked again.
_RETRY_SECONDS = 1.0
#: Calls that may wait for their turn: a few times as many shards as a fleet has, and then a store that stalls is
#: reported.
CHANGES_MAX = 1_024

T = TypeVar("T")


class NotTheLeader(Exception):
    """This replica does not lead; it may know who does."""

    def __init__(self, leader: LeaderInfo | None) -> None:
        super().__init__("this replica is not the leader" + (f"; {leader.replica} is" if leader is not None else ""))
        self.leader = leader


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """Where and how often the leader writes snapshots."""

    directory: Path
    interval_seconds: float
    keep: int


async def _in_place(work: Callable[[], T]) -> T:
    return work()


class Replica:
    """One replica of the coordinator."""

    def __init__(
        self,
        store: RevisedStore,
        *,
        clock: Clock,
        settings: CoordinatorSettings,
        metrics: CoordinatorMetrics,
        export_to: Export | None = None,
        compute: Callable[[Callable[[], Path]], Awaitable[Path]] = _in_place,
    ) -> None:
        """`compute` does blocking file work off the loop."""
        self._store = store
        self._clock = clock
        self._settings = settings
        self._metrics = metrics
        self._export_to = export_to
        self._compute = compute
        self._lock = asyncio.Lock()
        self._term: Term | None = None
        #: Under way or waiting for their turn.
        self._changes: set[asyncio.Task[Any]] = set()
        self._exported: bytes | None = None

    @property
    def is_ready(self) -> bool:
        """Whether this replica leads or knows a leader."""
        return self._term is not None or self._store.leader() is not None

    @property
    def is_leading(self) -> bool:
        """Whether this replica answers."""
        return self._term is not None

    def figures(self) -> Figures:
        """Return what the gauges show."""
        term = self._term
        return Figures() if term is None else term.figures()

    # ---- its life ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Campaign and lead, again and again, until cancelled; a store that refuses is asked again."""
        while True:
            try:
                won = await self._store.campaign()
            except StoreUnavailable as error:
                _log.warning("coordinator.campaign_failed", error=str(error), retry_seconds=_RETRY_SECONDS)
                await self._clock.sleep(_RETRY_SECONDS)
                continue
            leader = Leader(
                self._store,
                won,
                clock=self._clock,
                report_cycle_seconds=self._settings.report_interval_seconds,
                on_report=self._metrics.report,
            )
            term = Term(leader, settings=self._settings, clock=self._clock, metrics=self._metrics)
            await self._lead(term)

    async def _lead(self, term: Term) -> None:
        """Serve as the leader until leadership is lost; the ephemeral state ends with the term."""
        _log.info("coordinator.leadership_acquired", term=term.term, shards=len(term.tables.shards))
        self._term = term
        work = [asyncio.create_task(self._keep_rebalancing(term)), asyncio.create_task(self._keep_exporting(term))]
        lost = asyncio.create_task(self._store.lost())
        try:
            done, _ = await asyncio.wait({lost, *work}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {lost}:
                # They end by a fault alone, and a leader without them is none: the process ends and says so.
                task.result()
            _log.warning("coordinator.leadership_lost", term=term.term, reason=await lost)
        finally:
            self._term = None
            for task in (lost, *work):
                task.cancel()
            await asyncio.gather(lost, *work, return_exceptions=True)

    async def _keep_rebalancing(self, term: Term) -> None:
        interval_seconds = self._settings.rebalance_interval_seconds
        while True:
            # Without passes the task still waits, so that its end always means a fault.
            await self._clock.sleep(interval_seconds or 3_600.0)
            if interval_seconds:
                async with self._lock:
                    self._pass(term)

    def _pass(self, term: Term) -> None:
        """Run a pass; one that cannot be made is logged, and membership and domains go on without."""
        try:
            term.rebalance()
        except Exception:
            _log.exception("coordinator.rebalance_failed", term=term.term, advice="the next pass runs at its time")

    async def _keep_exporting(self, term: Term) -> None:
        to = self._export_to
        while True:
            await self._clock.sleep(3_600.0 if to is None else to.interval_seconds)
            if to is not None:
                await self._export(term, to)

    async def _export(self, term: Term, to: Export) -> None:
        """Write a snapshot when the tables differ from those of the last one; a failure waits for the next time."""
        digest = content_digest(term.tables)
        if digest == self._exported:
            return
        taken = self._snapshot(term)
        try:
            folder = await self._compute(lambda: export(to.directory, taken, keep=to.keep))
        except SnapshotFault as fault:
            _log.error("coordinator.snapshot_failed", error=str(fault), advice="retried at the next interval")
            return
        self._exported = digest
        self._metrics.snapshot_last_success.set(self._clock.unix_nanos() / NANOS_PER_SECOND)
        _log.info("coordinator.snapshot_exported", directory=str(folder))

    # ---- what it answers -----------------------------------------------------------------------------------------

    def leading(self) -> Term:
        """Return the present term, to read from. Raises NotTheLeader."""
        if self._term is None:
            raise NotTheLeader(self._store.leader())
        return self._term

    async def change(self, work: Callable[[Term], Coroutine[Any, Any, T]]) -> T:
        """Do something in the present term, after everything before it.

        It is done to its end even if the caller goes away meanwhile: half a change could not be repaired. Raises
        NotTheLeader, StoreUnavailable when too many wait already, and what `work` raises.
        """
        self.leading()
        if len(self._changes) >= CHANGES_MAX:
            raise StoreUnavailable(f"{CHANGES_MAX} calls wait for it already; try again")
        task = asyncio.create_task(self._alone(work))
        self._changes.add(task)
        task.add_done_callback(self._changed)
        return await asyncio.shield(task)

    def _changed(self, task: "asyncio.Task[Any]") -> None:
        self._changes.discard(task)
        if not task.cancelled():
            # Raised to the caller, if there still is one.
            task.exception()

    async def _alone(self, work: Callable[[Term], Coroutine[Any, Any, T]]) -> T:
        async with self._lock:
            term = self.leading()
            answer = await work(term)
            if self._term is not term:
                # A decision of a term that has ended meanwhile is no answer any more.
                raise NotTheLeader(self._store.leader())
            return answer

    async def snapshot(self) -> TablesSnapshot:
        """Return a snapshot of what the store holds now. Raises NotTheLeader, StoreUnavailable."""
        term = self.leading()
        async with self._lock:
            term.leader.tables = await self._store.load()
            return self._snapshot(term)

    def _snapshot(self, term: Term) -> TablesSnapshot:
        return snapshot_of(
            term.tables,
            term=term.term,
            index=self._store.revision(),
            saved_at_unix_nanos=self._clock.unix_nanos(),
        )
