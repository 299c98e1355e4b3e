"""Builds a shard's link to the coordinator.

docs/spec/coordinator.md §8. The package `bigfleet.shard` does not import the link; without --coordinator-addr there is
none. This module does not decide anything.
"""

import socket

from bigfleet.cli.flags.values import address_text
from bigfleet.cli.runtime.system import SystemClock
from bigfleet.cli.shard.process_settings import ShardProcessSettings
from bigfleet.link.client import Client
from bigfleet.link.inbox import Inbox
from bigfleet.link.report_conversion import pools_of
from bigfleet.link.report_source import LinkCounts, ShardReportSource
from bigfleet.link.reporter import CoordinatorLink
from bigfleet.rpc.clients.shard_reports import GrpcCoordinator
from bigfleet.rpc.security.tls import is_loopback
from bigfleet.shard.cycle.controller import Shard
from bigfleet.shard.ports import ShardSettings


def make_reporter(
    process: ShardProcessSettings, shard: Shard, settings: ShardSettings, clock: SystemClock, *, port: int
) -> CoordinatorLink | None:
    """Return the link of a shard that listens on a port, not running yet; None without a coordinator."""
    if not process.coordinators:
        return None
    ownership = shard.ownership
    assert ownership is not None, "a shard that listens to a coordinator has a state file"
    assert process.provider_address is not None, "a shard of fake machines has no coordinator"
    counts = LinkCounts(shard.metrics, clock)
    return CoordinatorLink(
        shard_id=process.shard_id,
        epoch=shard.epoch,
        advertised_address=process.advertised_address or _own_address(process, port),
        interval_seconds=settings.report_interval_seconds,
        source=ShardReportSource(shard, ownership.file, provider_address=address_text(*process.provider_address)),
        inbox=Inbox(ownership.handover, accepted_term=ownership.file.accepted_term, on_answer=counts.answered),
        client=Client(process.coordinators, GrpcCoordinator(tls=process.tls), clock, on_redirect=counts.redirected),
        clock=clock,
        on_report=counts.reported,
        on_sold_out=lambda pools: shard.stockouts.others_report(pools_of(pools)),
    )


def _own_address(process: ShardProcessSettings, port: int) -> str:
    host = process.listen_address[0]
    return address_text(host if is_loopback(host) else socket.gethostname(), port)
