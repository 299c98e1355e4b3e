"""Runs one coordinator process: store, replica, gRPC, HTTP, and a clean stop.

docs/spec/coordinator.md §1. The servers listen before the replica leads: while the store cannot be reached, the process
runs and is not ready. A clean stop releases leadership last, so that the next leader is elected at once. This module
does not decide anything.
"""

import asyncio
import os
from contextlib import AsyncExitStack
from dataclasses import dataclass

import structlog
from grpc import aio
from prometheus_client import CollectorRegistry

from bigfleet.cli.coordinator.store_url import EtcdUrl, SqliteUrl, open_store
from bigfleet.cli.runtime import interpreter
from bigfleet.cli.runtime.failures import RunFault
from bigfleet.cli.runtime.service_notifier import ServiceNotifier
from bigfleet.cli.runtime.state_watch import StateWatch
from bigfleet.cli.runtime.system import (
    SystemClock,
    ended_by_signals,
    process_registry,
    serve_http,
    stop_on_signals,
)
from bigfleet.coordinator.leader_term import CoordinatorSettings
from bigfleet.coordinator.metrics import CoordinatorMetrics, Figures
from bigfleet.coordinator.replica import Export, Replica
from bigfleet.coordinator.stores.metered import MeteredStore
from bigfleet.coordinator.stores.protocol import LeaderInfo
from bigfleet.coordinator.stores.sqlite import SqliteStateStore
from bigfleet.rpc.grpc_server import GrpcServer, ListenFault
from bigfleet.rpc.security.identity import Gate
from bigfleet.rpc.security.tls import TlsFiles, monitor_files
from bigfleet.rpc.servers import coordinator as coordinator_server
from bigfleet.rpc.wire.message_limits import REPORT_BYTES_MAX

#: What `/readyz` says of a replica that neither leads nor knows a leader.
_WITHOUT_LEADER = "no leader is known; if the store cannot be reached, the log says why"
#: Calls that have not ended by themselves after this are cut.
CALL_GRACE_SECONDS = 2.0
#: How soon health follows a change of leader.
HEALTH_SECONDS = 0.25
#: A follower that knows no leader for so long says so.
_LEADERLESS_SECONDS = 10.0

_log = structlog.get_logger("bigfleet.cli.coordinator")


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorProcessSettings:
    """One replica: its identity, its store, the addresses it listens on."""

    me: LeaderInfo
    store: EtcdUrl | SqliteUrl
    #: None is plain text, or a file.
    store_tls: TlsFiles | None
    lease_ttl_seconds: int
    listen_address: tuple[str, int]
    #: None serves no HTTP.
    metrics_address: tuple[str, int] | None
    #: None is plain text.
    tls: TlsFiles | None = None
    #: None exports no snapshots.
    export: Export | None = None


async def serve_coordinator(process: CoordinatorProcessSettings, settings: CoordinatorSettings) -> int:
    """Run the replica until a signal stops it; return the exit code. Raises RunFault when it cannot start."""
    clock = SystemClock()
    notifier = ServiceNotifier.from_environment(os.environ, os.getpid())
    interpreter.settle()
    registry = process_registry()
    async with AsyncExitStack() as stack:
        replica: Replica | None = None

        def figures() -> Figures:
            return Figures() if replica is None else replica.figures()

        metrics = CoordinatorMetrics(registry, figures)
        if process.store_tls is not None:
            monitor_files(process.store_tls, registry, "bigfleet_coordinator_store")
        stack.enter_context(
            ended_by_signals(lambda: _log.info("coordinator.stopped", replica=process.me.replica, during="start"))
        )
        opened = open_store(
            process.store,
            me=process.me,
            tls=process.store_tls,
            lease_ttl_seconds=process.lease_ttl_seconds,
            clock=clock,
        )
        store = MeteredStore(opened, metrics, clock)
        stack.push_async_callback(store.close)
        stop = stop_on_signals()
        replica = Replica(
            store, clock=clock, settings=settings, metrics=metrics, export_to=process.export, compute=asyncio.to_thread
        )
        server = _grpc_server(replica, clock, metrics, registry, process.tls)
        ready = replica
        watch = StateWatch(
            opened.file_fault if isinstance(opened, SqliteStateStore) else lambda: "", registry, "bigfleet_coordinator"
        )
        await stack.enter_async_context(watch.watching(clock))

        def readiness() -> str:
            return watch.fault or ("" if ready.is_ready else _WITHOUT_LEADER)

        # Before gRPC, whose server would have to be stopped if this failed.
        await stack.enter_async_context(serve_http(process.metrics_address, registry, readiness))
        await stack.enter_async_context(notifier.reporting(readiness, stop))
        try:
            metrics.insecure.set(server.is_insecure_at(process.listen_address[0]))
            bound = await server.start(*process.listen_address)
        except ListenFault as fault:
            raise RunFault(f"--listen: {fault}") from fault
        _log.info("coordinator.started", replica=process.me.replica, port=bound, advertised=process.me.address)
        await _run_until(stop, replica, server, clock)
    _log.info("coordinator.stopped", replica=process.me.replica)
    return 0


def _grpc_server(
    replica: Replica,
    clock: SystemClock,
    metrics: CoordinatorMetrics,
    registry: CollectorRegistry,
    tls: TlsFiles | None,
) -> GrpcServer:
    gate = Gate(registry, "bigfleet_coordinator", services=(coordinator_server.SERVICE_NAME,))
    if tls is not None:
        monitor_files(tls, registry, "bigfleet_coordinator")

    def register(server: aio.Server) -> None:
        servicer = coordinator_server.CoordinatorServicer(
            replica, clock, gate, on_refused=lambda: metrics.report("refused")
        )
        coordinator_server.add_to_server(servicer, server)

    return GrpcServer(
        services=(coordinator_server.SERVICE_NAME,),
        register=register,
        receive_bytes_max=REPORT_BYTES_MAX,
        tls=tls,
        gate=gate,
    )


async def _run_until(stop: asyncio.Event, replica: Replica, server: GrpcServer, clock: SystemClock) -> None:
    running = asyncio.create_task(replica.run(), name="replica")
    health = asyncio.create_task(_report_health(replica, server, clock), name="health")
    collecting = asyncio.create_task(interpreter.collect_when_due(clock), name="garbage")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
    await server.stop(CALL_GRACE_SECONDS)
    tasks = (running, health, collecting, stopping)
    for task in tasks:
        task.cancel()
    failure, *_ = await asyncio.gather(*tasks, return_exceptions=True)
    if isinstance(failure, Exception):
        raise RunFault(f"the coordinator stopped by itself: {failure}") from failure


async def _report_health(replica: Replica, server: GrpcServer, clock: SystemClock) -> None:
    """Keep the health of the service as readiness is, and log when there is no leader."""
    was_ready: bool | None = None
    since_seconds = clock.monotonic_seconds()
    has_warned = False
    while True:
        if replica.is_ready is not was_ready:
            was_ready, since_seconds, has_warned = replica.is_ready, clock.monotonic_seconds(), False
            await server.set_service(coordinator_server.SERVICE_NAME, serving=was_ready)
        if not was_ready and not has_warned and clock.monotonic_seconds() - since_seconds > _LEADERLESS_SECONDS:
            has_warned = True
            advice = "shards continue by themselves; transfers and membership wait for the store"
            _log.warning("coordinator.leader_missing", advice=advice)
        await clock.sleep(HEALTH_SECONDS)
