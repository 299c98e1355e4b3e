"""Runs the real replica and the real link beside a closed world, over tables that can be cut off.

docs/spec/coordinator.md §3, §8. The replica's process can be gone, and its store can be partitioned from it; what it
had heard goes with its process, what it had written stays. No shard may decide otherwise because of either. Nothing
here may reach into a shard but through its link.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Final

from prometheus_client import CollectorRegistry

from bigfleet.coordinator.commands import Command, CommandRefused, apply
from bigfleet.coordinator.ephemeral_state import ReportAnswer
from bigfleet.coordinator.leader_term import CoordinatorSettings
from bigfleet.coordinator.metrics import CoordinatorMetrics
from bigfleet.coordinator.replica import NotTheLeader, Replica
from bigfleet.coordinator.stores.protocol import (
    TERM_STEP,
    LeaderInfo,
    Leadership,
    NotLeader,
    OutcomeUnknown,
    StoreUnavailable,
)
from bigfleet.coordinator.tables import Tables
from bigfleet.link.client import CALL_SECONDS, Client, NotAnswered
from bigfleet.link.inbox import Inbox
from bigfleet.link.reporter import CoordinatorLink, ReportOutcome
from bigfleet.model import labels
from bigfleet.model.clock import Clock
from bigfleet.model.ids import ShardId
from bigfleet.model.ownership import Domain
from bigfleet.model.shard_report import ShardReport
from bigfleet.shard.cycle.controller import Shard
from bigfleet.shard.ownership.ownership_file import OwnershipFile
from bigfleet.sim.sites.link import coordinator_link

ADDRESS: Final = "coordinator:7790"
REPORT_SECONDS: Final = 30.0
#: How long a leader that cannot reach its store still leads.
LEASE_SECONDS: Final = 15.0
_LOOK_SECONDS: Final = 1.0
ATTEMPTS_MAX: Final = 120


class HeldTables:
    """The tables of one coordinator in memory; implements `bigfleet.coordinator.stores.protocol.RevisedStore`."""

    def __init__(self, clock: Clock) -> None:
        self.is_cut = False
        self._clock = clock
        self._tables = Tables()
        self._term = 0
        self._revision = 0
        self._leads = False

    async def campaign(self) -> Leadership:
        """Lead as soon as the store can be reached."""
        while self.is_cut:
            await self._clock.sleep(_LOOK_SECONDS)
        self._term += 1
        self._leads = True
        return Leadership(self._term, self._tables)

    async def lost(self) -> str:
        """Return when the store could not be reached for the length of a lease."""
        cut_seconds = 0.0
        while cut_seconds < LEASE_SECONDS:
            await self._clock.sleep(_LOOK_SECONDS)
            cut_seconds = cut_seconds + _LOOK_SECONDS if self.is_cut else 0.0
        self._leads = False
        return "the lease ran out"

    async def load(self) -> Tables:
        """Return the tables."""
        self._check()
        return self._tables

    async def commit(self, command: Command) -> Tables:
        """Apply a command. Raises CommandRefused, NotLeader, StoreUnavailable."""
        self._check()
        if not self._leads:
            raise NotLeader("the lease ran out")
        self._tables = apply(self._tables, command)
        self._revision += 1
        return self._tables

    async def is_leader(self) -> bool:
        """Say whether the lease stands."""
        self._check()
        return self._leads

    async def raise_term(self, above: int) -> int:
        """Raise the term over one that shards have seen."""
        self._check()
        self._term = max(above, self._term) + TERM_STEP
        return self._term

    def leader(self) -> LeaderInfo | None:
        """Return the one replica while it leads."""
        return LeaderInfo("replica-0", ADDRESS) if self._leads else None

    def revision(self) -> int:
        """Return how many commands were applied."""
        return self._revision

    async def resign(self) -> None:
        """Lead no more."""
        self._leads = False

    async def close(self) -> None:
        """There is nothing to let go of."""

    def _check(self) -> None:
        if self.is_cut:
            raise StoreUnavailable("the store is partitioned away")


class Coordinator:
    """One replica, as the shard's link reaches it; implements `bigfleet.link.client.Coordinators`."""

    def __init__(self, clock: Clock) -> None:
        self.store = HeldTables(clock)
        #: How each report ended.
        self.reports: Counter[ReportOutcome] = Counter()
        self._clock = clock
        self._replica: Replica | None = None
        self._leading: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Bring a process up, which knows nothing but what is written."""
        self._replica = Replica(
            self.store,
            clock=self._clock,
            settings=CoordinatorSettings(report_interval_seconds=REPORT_SECONDS),
            metrics=CoordinatorMetrics(CollectorRegistry()),
        )
        self._leading = asyncio.create_task(self._replica.run())

    def stop(self) -> None:
        """Take the process away."""
        if self._leading is not None:
            self._leading.cancel()
        self._replica = self._leading = None

    async def assign(self, zone: str, shard: ShardId) -> None:
        """Give a zone to a shard, as an administrator does; waits until the shard has reported."""
        for _attempt in range(ATTEMPTS_MAX):
            try:
                if self._replica is not None:
                    await self._replica.change(lambda term: term.assign(Domain(labels.ZONE, zone), shard))
                    return
            except (NotTheLeader, CommandRefused):
                pass
            await self._clock.sleep(_LOOK_SECONDS)
        raise RuntimeError(f"the coordinator did not take zone {zone} for {shard}")

    async def addresses(self, name: str) -> Sequence[str]:
        """Return the name: there is no resolver."""
        return (name,)

    async def report(self, address: str, report: ShardReport) -> ReportAnswer:
        """Return the replica's answer. Raises NotAnswered."""
        if self._replica is None:
            await self._clock.sleep(CALL_SECONDS)
            raise NotAnswered(f"{address}: no process listens")
        try:
            return await self._replica.change(lambda term: term.report(report))
        except (NotTheLeader, NotLeader, StoreUnavailable, OutcomeUnknown) as fault:
            raise NotAnswered(f"{address}: {fault}") from fault

    def link(self, shard: Shard, file: OwnershipFile) -> CoordinatorLink:
        """Return the link of one process of the shard. Raises ValueError for a shard that has no file."""
        if shard.ownership is None:
            raise ValueError("a shard without a file of what it owns has no link")
        return coordinator_link(
            shard,
            file,
            interval_seconds=REPORT_SECONDS,
            inbox=Inbox(shard.ownership.handover, accepted_term=file.accepted_term),
            client=Client([ADDRESS], self, self._clock),
            clock=self._clock,
            on_report=self._reported,
        )

    def _reported(self, outcome: ReportOutcome) -> None:
        self.reports[outcome] += 1
