"""Gathers the report of a running shard, and counts what was reported in the shard's metrics.

docs/spec/coordinator.md §8, docs/spec/shard.md §11.3. Everything is read from the shard's own records, on its loop.
Before its first finished cycle a shard has no figures, and its report has no machines. This module must not change a
shard.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Protocol

from bigfleet.link.report_conversion import holding_of, sold_out_of
from bigfleet.link.reporter import ReportOutcome, ReportSnapshot
from bigfleet.model.clock import NANOS_PER_SECOND, Clock
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.instructions import KIND_LABELS, Ack, Instruction
from bigfleet.model.ownership import Owned, Reservation
from bigfleet.model.shard_report import ShardSummary
from bigfleet.shard.metrics import ShardMetrics
from bigfleet.shard.status.reports import Report


class Reporting(Protocol):
    """A shard, as far as it is reported on."""

    def report(self) -> Report | None:
        """Return the figures and shortfalls of the last finished cycle; None before there is one."""
        ...

    @property
    def reported_clusters(self) -> Iterable[str]:
        """The clusters that have reported since the process started."""
        ...


class OwnershipSource(Protocol):
    """What a shard owns and reserves for others, as it is on disk."""

    @property
    def owned(self) -> Owned: ...

    @property
    def reservations(self) -> Mapping[MachineId, Reservation]: ...


class ShardReportSource:
    """Reports for one shard; `bigfleet.link.reporter.ReportSource`."""

    def __init__(self, shard: Reporting, ownership: OwnershipSource, *, provider_address: str) -> None:
        """`provider_address` is the same for all shards between which machines may move."""
        self._shard = shard
        self._ownership = ownership
        self._provider_address = provider_address

    def snapshot(self) -> ReportSnapshot:
        """Return the current report. Cost: milliseconds for the largest fleet."""
        report = self._shard.report()
        holding = holding_of(self._ownership.owned, self._ownership.reservations)
        clusters = frozenset(map(ClusterId, self._shard.reported_clusters))
        if report is None:
            nothing = ShardSummary(provider_address=self._provider_address)
            return ReportSnapshot(summary=nothing, shortfalls=(), clusters=clusters, holding=holding)
        return ReportSnapshot(
            summary=replace(report.summary, provider_address=self._provider_address),
            shortfalls=report.shortfalls,
            clusters=clusters,
            holding=holding,
            sold_out=sold_out_of(report.sold_out),
        )


class LinkCounts:
    """Counts reports and answers of the link, among the shard's own metrics."""

    def __init__(self, metrics: ShardMetrics, clock: Clock) -> None:
        self._metrics = metrics
        self._clock = clock

    def reported(self, outcome: ReportOutcome) -> None:
        """Count how a report ended."""
        self._metrics.reports.labels(outcome.value).inc()
        if outcome is ReportOutcome.OK:
            self._metrics.report_last_success.set(self._clock.unix_nanos() / NANOS_PER_SECOND)

    def redirected(self) -> None:
        """Count a report that a follower handed on to its leader."""
        self._metrics.reports.labels("redirected").inc()

    def answered(self, instruction: Instruction, ack: Ack) -> None:
        """Count how an instruction was answered."""
        kind = "unknown" if instruction.payload is None else KIND_LABELS[type(instruction.payload)]
        self._metrics.instructions.labels(kind, ack.outcome.value).inc()
