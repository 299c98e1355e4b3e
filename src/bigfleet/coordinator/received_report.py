"""Defines a shard's report as the leader's rules use it (docs/spec/wire.md §10).

Base, freshness and ready machines are filled in before each pass. This module does not validate a report: bounds are
checked when it is read from the wire.
"""

from bigfleet.coordinator.ephemeral_state import ReceivedReport
from bigfleet.coordinator.reports import prepared
from bigfleet.model.ownership import Base, Reservation
from bigfleet.model.shard_report import Holding, ShardReport


def received_of(report: ShardReport) -> ReceivedReport:
    """Return the report as a leader takes it; base, freshness and ready machines are filled in before each pass."""
    summary = report.summary
    return ReceivedReport(
        shard_id=report.shard_id,
        epoch=report.epoch,
        cycle=report.cycle,
        address=report.address,
        echoed_term=report.echoed_term,
        provider_address=summary.provider_address,
        figures=prepared(
            shard_id=report.shard_id,
            provider_address=summary.provider_address,
            base=Base.ALL,
            shortfalls=report.shortfalls,
            idle=summary.idle,
            speculative=summary.speculative,
            type_counts=summary.type_counts,
        ),
        owned=None if report.holding is None else report.holding.owned,
        clusters=report.clusters,
        acks=report.acks,
        sold_out=report.sold_out,
    )


def ready_in(holding: Holding | None) -> tuple[Reservation, ...]:
    """Return the machines that are drained and wait, by id."""
    reservations = () if holding is None else holding.reservations
    return tuple(sorted((each for each in reservations if each.is_ready), key=lambda each: each.machine_id))
