"""Reports a shard to the coordinator at intervals, hands answers to the shard, and reports again when done.

docs/spec/coordinator.md §8, points 1, 3, 4, 6 and 8. One exchange at a time. Acks and views are repeated until a leader
has acknowledged them. No failure here may affect the shard's cycle.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

import structlog

from bigfleet.coordinator.ephemeral_state import ReportAnswer
from bigfleet.link.client import Client
from bigfleet.link.inbox import Inbox, MayYetSucceed
from bigfleet.model.clock import Clock
from bigfleet.model.ids import ClusterId, ShardId
from bigfleet.model.shard_report import Holding, ShardReport, ShardSummary, Shortfall, SoldOutPool

#: Least time before the report that carries the answers to instructions.
AGAIN_SECONDS: Final = 1.0
#: Reports in a row that were not taken, after which another process of this shard must be newer.
UNTAKEN_MAX: Final = 3
#: Of one report; the others follow with the next.
ACKS_MAX: Final = 1_000

_log = structlog.get_logger("bigfleet.link.reporter")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSnapshot:
    """The content of a shard's report at one moment."""

    summary: ShardSummary
    shortfalls: tuple[Shortfall, ...]
    #: Clusters that have reported to this process.
    clusters: frozenset[ClusterId]
    holding: Holding
    #: Pools in which this shard's creations failed for want of stock.
    sold_out: tuple[SoldOutPool, ...] = ()


class ReportOutcome(Enum):
    """How a report ended; the values are metric labels."""

    OK = "ok"
    #: Nobody answered.
    ERROR = "error"
    #: Answered by a leader of a lower term than the accepted one.
    STALE_TERM = "stale_term"
    #: Out of order, or of a process that another one has superseded.
    REJECTED = "rejected"


class ReportSource(Protocol):
    """The shard, as far as a report goes."""

    def snapshot(self) -> ReportSnapshot:
        """Return the current report. Cost: milliseconds for the largest fleet."""
        ...


class CoordinatorLink:
    """The link of one shard process."""

    def __init__(
        self,
        *,
        shard_id: ShardId,
        epoch: int,
        advertised_address: str,
        interval_seconds: float,
        source: ReportSource,
        inbox: Inbox,
        client: Client,
        clock: Clock,
        on_report: Callable[[ReportOutcome], None] = lambda _outcome: None,
        on_sold_out: Callable[[Iterable[SoldOutPool]], None] = lambda _pools: None,
    ) -> None:
        """`on_report` is called with the end of each report, `on_sold_out` with the pools that other shards report."""
        self._shard_id = shard_id
        self._epoch = epoch
        self._address = advertised_address
        self._interval_seconds = interval_seconds
        self._source = source
        self._inbox = inbox
        self._client = client
        self._clock = clock
        self._on_report = on_report
        self._on_sold_out = on_sold_out
        #: Counter of this process's reports, from 1.
        self.cycle = 0
        #: Reports in a row that a leader refused to take.
        self.untaken_in_a_row = 0
        #: What a leader has last acknowledged; None when it is to be said again.
        self._acknowledged: tuple[Holding, frozenset[ClusterId]] | None = None

    async def run(self) -> None:
        """Report at once and then at every interval, until cancelled."""
        while True:
            has_more = False
            started_seconds = self._clock.monotonic_seconds()
            try:
                has_more = await self.exchange()
            except Exception:  # the link must outlive every defect of its own
                _log.exception("link.report_failed", cycle=self.cycle)
            pause_seconds = AGAIN_SECONDS if has_more else self._interval_seconds
            elapsed_seconds = 0.0 if has_more else self._clock.monotonic_seconds() - started_seconds
            await self._clock.sleep(max(AGAIN_SECONDS, pause_seconds - elapsed_seconds))

    async def exchange(self) -> bool:
        """Report once and handle the answer; return whether it brought instructions, whose acks wait now."""
        report = self._report()
        answer = await self._client.send(report)
        if answer is None:
            self._on_report(ReportOutcome.ERROR)
            return False
        if answer.term < self._inbox.accepted_term:
            # A former leader: what it says of this report counts for nothing.
            await self._inbox.take(answer.term, (), ())
            self._on_report(ReportOutcome.STALE_TERM)
            return False
        if not answer.acknowledged:
            self._not_taken()
            self._on_report(ReportOutcome.REJECTED)
            return False
        self._on_report(ReportOutcome.OK)
        self.untaken_in_a_row = 0
        self._on_sold_out(answer.sold_out)
        self._inbox.carried(report.acks)
        if report.holding is not None and report.clusters is not None:
            self._acknowledged = report.holding, report.clusters
        if answer.want_ownership:
            self._acknowledged = None
        return await self._handle(answer)

    def _report(self) -> ShardReport:
        current = self._source.snapshot()
        self.cycle += 1
        is_known = self._acknowledged == (current.holding, current.clusters)
        return ShardReport(
            shard_id=self._shard_id,
            epoch=self._epoch,
            cycle=self.cycle,
            timestamp_unix_nanos=self._clock.unix_nanos(),
            address=self._address,
            echoed_term=self._inbox.accepted_term,
            summary=current.summary,
            shortfalls=current.shortfalls,
            acks=self._inbox.waiting()[:ACKS_MAX],
            clusters=None if is_known else current.clusters,
            holding=None if is_known else current.holding,
            sold_out=current.sold_out,
        )

    async def _handle(self, answer: ReportAnswer) -> bool:
        # A new term starts with an empty memory: its leader has no view of ours, whatever another one acknowledged.
        if answer.term > self._inbox.accepted_term:
            self._acknowledged = None
        try:
            await self._inbox.take(answer.term, answer.confirmed, answer.instructions)
        except MayYetSucceed as failure:
            # Nothing of the answer was handled; the leader says all of it again.
            _log.error("link.answer_failed", error=str(failure))
            return False
        return bool(answer.instructions)

    def _not_taken(self) -> None:
        self.untaken_in_a_row += 1
        if self.untaken_in_a_row == UNTAKEN_MAX:
            _log.error(
                "link.shard_superseded",
                shard=self._shard_id,
                epoch=self._epoch,
                reports=self.untaken_in_a_row,
                advice="another process of this shard is newer: stop one of the two",
            )
        else:
            _log.warning("link.report_rejected", cycle=self.cycle, epoch=self._epoch)
