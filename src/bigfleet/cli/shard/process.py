"""Runs one shard process: state file, provider channel, sessions, HTTP, link, and a clean stop.

docs/spec/shard.md §1. The epoch is committed before anything is served. Sessions and health are served before the first
reconcile, and while the engine's kernels are loaded or compiled. This module does not decide anything.
"""

import asyncio
import gc
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TypeVar

import structlog
from grpc import aio
from prometheus_client import CollectorRegistry

from bigfleet.cli.flags.values import address_text
from bigfleet.cli.replay.recorder import open_recorder
from bigfleet.cli.runtime import interpreter
from bigfleet.cli.runtime.failures import RunFault
from bigfleet.cli.runtime.plan_workers import ProcessPlanWorkers
from bigfleet.cli.runtime.service_notifier import ServiceNotifier
from bigfleet.cli.runtime.state_watch import StateWatch
from bigfleet.cli.runtime.system import (
    SystemClock,
    SystemIds,
    ended_by_signals,
    process_registry,
    serve_http,
    stop_on_signals,
)
from bigfleet.cli.shard.engines import ShardEngines
from bigfleet.cli.shard.link import make_reporter
from bigfleet.cli.shard.process_settings import ShardProcessSettings
from bigfleet.engine.shapes.decide import says_pods
from bigfleet.link.reporter import CoordinatorLink
from bigfleet.model.clock import Clock
from bigfleet.model.compute import Compute
from bigfleet.rpc.clients.provider import GrpcProvider, ProviderDeadlines
from bigfleet.rpc.grpc_server import GrpcServer, ListenFault
from bigfleet.rpc.security.identity import Gate
from bigfleet.rpc.security.tls import monitor_files
from bigfleet.rpc.servers import session as session_server
from bigfleet.rpc.servers import shardadmin as shardadmin_server
from bigfleet.rpc.servers import shardread as shardread_server
from bigfleet.shard.audit.log_file import AuditFile, AuditFileFault
from bigfleet.shard.cluster_policy import PolicyFile
from bigfleet.shard.cycle.controller import Shard
from bigfleet.shard.cycle.engine_runner import EngineMaker
from bigfleet.shard.exchange.proposals import ExchangeProposals
from bigfleet.shard.ownership.state_file import StateFile, StateFileFault
from bigfleet.shard.ports import ShardSettings
from bigfleet.shard.sessions.demand import RollUpOutcome
from bigfleet.shard.sessions.registry import RollUpOffer, Session
from bigfleet.shard.sessions.rollup_intake import OnRollUp

T = TypeVar("T")

#: Streams that have not ended by themselves after this are cut.
STREAM_GRACE_SECONDS = 2.0

_log = structlog.get_logger("bigfleet.cli.shard.command")


async def compute_in_thread(work: Callable[[], T]) -> T:
    """Run pure work off the loop, so that streams are served meanwhile."""
    return await asyncio.to_thread(work)


def compute_in_turns(clock: Clock) -> Compute:
    """Return what runs the work of cycles off the loop, in turns that are long enough for it to end."""
    turns = interpreter.ComputeTurns(clock)

    async def compute(work: Callable[[], T]) -> T:
        return await asyncio.to_thread(turns.timed, work)

    return compute


async def serve_shard(
    process: ShardProcessSettings, settings: ShardSettings, engine_maker: EngineMaker | None = None
) -> int:
    """Run the shard until a signal stops it; return the exit code. Raises RunFault when it cannot start.

    Its engine comes from `engine_maker`, or from `ShardEngines`.
    """
    clock, notifier = SystemClock(), ServiceNotifier.from_environment(os.environ, os.getpid())
    interpreter.settle()
    registry, shard_id = process_registry(), process.shard_id
    async with AsyncExitStack() as stack:
        stack.enter_context(ended_by_signals(lambda: _log.info("shard.stopped", shard=shard_id, during="start")))
        state_file = _open_state(process, clock, stack)
        audit_file = _open_audit(process, stack)
        host, port = process.provider_address or await _serve_fake(process, clock, stack)
        provider = GrpcProvider(
            address_text(host, port),
            deadlines=ProviderDeadlines(
                call_seconds=settings.execute_timeout_seconds, list_seconds=settings.list_timeout_seconds
            ),
            clock=clock,
            on_call=lambda method, code, seconds: shard.metrics.provider_rpc.labels(method, code).observe(seconds),
            tls=process.tls if process.provider_address else None,  # what is in this process needs no certificate
        )
        stack.push_async_callback(provider.close)
        engines = ShardEngines(registry)
        stack.callback(engines.close)
        workers = stack.enter_context(ProcessPlanWorkers(process.plan_workers)) if process.plan_workers else None
        shard = Shard(
            shard_id=shard_id,
            epoch=state_file.epoch,
            settings=settings,
            provider=provider,
            clock=clock,
            ids=SystemIds(),
            compute=compute_in_turns(clock),
            registry=registry,
            make_engine=engine_maker or engines.make,
            audit_log=audit_file,
            ownership_file=state_file.ownership,
            retirements=state_file.retirements,
            exchange_store=state_file.exchanges,
            plan_workers=workers,
            on_inventory=_inventory_is_there,
            on_rollup=planners_started(workers),
        )
        recording = open_recorder(process, state_file.epoch, settings, clock, registry, compute_in_thread)
        shard.recorder = await stack.enter_async_context(recording)
        await stack.enter_async_context(_files_maintained(process.cluster_policy, audit_file, clock, shard, notifier))
        watch = StateWatch(state_file.fault, registry, "bigfleet_shard", rescue=state_file.rescue)
        await stack.enter_async_context(watch.watching(clock))
        stop = stop_on_signals()
        exchanges = ExchangeProposals(
            shard=shard, mode=process.exchange, clock=clock, compute=compute_in_thread, workers=workers
        )
        server = _grpc_server(shard, exchanges, clock, registry, process)
        try:
            shard.metrics.insecure.set(server.is_insecure_at(process.listen_address[0]))
            bound = await server.start(*process.listen_address)
        except ListenFault as fault:
            raise RunFault(f"--listen: {fault}") from fault
        readiness = partial(_readiness, shard, engines, watch)
        await stack.enter_async_context(serve_http(process.metrics_address, registry, readiness))
        await stack.enter_async_context(notifier.reporting(readiness, stop))
        _log.info("shard.started", shard=shard_id, epoch=state_file.epoch, port=bound)
        reporter = make_reporter(process, shard, settings, clock, port=bound)
        await _run_until(stop, shard, exchanges, server, clock, reporter)
    _log.info("shard.stopped", shard=shard_id)
    return 0


def _inventory_is_there() -> None:
    """Settle the memory of the first List."""
    # Half a million machines hold no garbage, and looking through them would take a collection a second.
    gc.freeze()
    interpreter.give_memory_back()


def planners_started(workers: ProcessPlanWorkers | None) -> OnRollUp:
    """Return what starts the workers at the first demand over pods.

    Only pods are planned for, and a worker takes more than a second of processor time to start: it does so while the
    rest of the demand arrives.
    """

    def on_rollup(_session: Session, offer: RollUpOffer, outcome: RollUpOutcome) -> None:
        if workers is not None and outcome is RollUpOutcome.ACCEPTED and says_pods(offer.needs()):
            workers.start()

    return on_rollup


def _readiness(shard: Shard, engines: ShardEngines, watch: StateWatch) -> str:
    """Return why the shard is not ready, "" when it is."""
    reason = watch.fault or engines.why_waiting
    if reason or shard.is_ready:
        return reason
    if shard.has_reconciled:
        return "making the engine"
    return "waiting for the provider's first list of machines; see reconcile.failed in the log"


async def _serve_fake(process: ShardProcessSettings, clock: SystemClock, stack: AsyncExitStack) -> tuple[str, int]:
    """Serve fake machines until the stack ends, after their callers; return the address."""
    # A shard with a real provider loads nothing of the kit.
    from bigfleet.cli.shard.fake import serving_fake

    assert process.fake_slots is not None, "a shard has a provider"
    try:
        return await stack.enter_async_context(serving_fake(process.fake_slots, clock))
    except ListenFault as fault:
        raise RunFault(f"--fake-provider: {fault}") from fault


def _open_state(process: ShardProcessSettings, clock: SystemClock, stack: AsyncExitStack) -> StateFile:
    try:
        opened = StateFile.open(
            process.data_dir, shard_id=process.shard_id, clock=clock, new_file_owns=process.new_file_owns
        )
        return stack.enter_context(opened)
    except StateFileFault as fault:
        raise RunFault(str(fault)) from fault


def _open_audit(process: ShardProcessSettings, stack: AsyncExitStack) -> AuditFile | None:
    if process.audit_log is None:
        return None
    try:
        audit_file = AuditFile(process.audit_log, size_bytes_max=process.audit_log_bytes_max)
    except AuditFileFault as fault:
        raise RunFault(f"--audit-log {fault}") from fault
    stack.callback(audit_file.close)
    return audit_file


@asynccontextmanager
async def _files_maintained(
    policy_file: PolicyFile | None,
    audit_file: AuditFile | None,
    clock: SystemClock,
    shard: Shard,
    notifier: ServiceNotifier,
) -> AsyncIterator[None]:
    """Keep the audit log on disk while the context lasts; on SIGHUP open it again and read the policies again."""
    loop, asked = asyncio.get_running_loop(), asyncio.Event()
    tasks: list[asyncio.Task[None]] = []
    if policy_file is not None:
        shard.policies = policy_file.policies
        tasks.append(asyncio.create_task(_policies_followed(policy_file, shard, asked, notifier), name="policies"))
    if audit_file is not None:
        count = shard.metrics.audit_write_errors.inc
        tasks.append(asyncio.create_task(audit_file.keep_synced(clock, compute_in_thread, count), name="audit"))

    def hang_up() -> None:
        notifier.reload_began()
        asked.set()
        if audit_file is not None:
            audit_file.reopen()
        if policy_file is None:
            notifier.reload_ended()

    # A shard without either file ends at SIGHUP, as programs do.
    if tasks:
        loop.add_signal_handler(signal.SIGHUP, hang_up)
    try:
        yield
    finally:
        if tasks:
            loop.remove_signal_handler(signal.SIGHUP)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _policies_followed(
    policy_file: PolicyFile, shard: Shard, asked: asyncio.Event, notifier: ServiceNotifier
) -> None:
    while True:
        await asked.wait()
        asked.clear()
        is_read = await compute_in_thread(policy_file.read_again)
        shard.metrics.cluster_policy_reads.labels("ok" if is_read else "refused").inc()
        shard.policies = policy_file.policies
        shard.wake()
        notifier.reload_ended()


def _grpc_server(
    shard: Shard,
    exchanges: ExchangeProposals,
    clock: SystemClock,
    registry: CollectorRegistry,
    process: ShardProcessSettings,
) -> GrpcServer:
    answered = (shardread_server.SERVICE_NAME, shardadmin_server.SERVICE_NAME)
    gate = Gate(registry, "bigfleet_shard", services=answered)
    if process.tls is not None:
        monitor_files(process.tls, registry, "bigfleet_shard")
    sessions = session_server.SessionServicer(shard, gate, hello_bytes_max=process.hello_bytes_max)

    def register(server: aio.Server) -> None:
        session_server.add_to_server(sessions, server)
        shardread_server.add_to_server(shardread_server.ShardReadServicer(shard, clock, exchanges), server)
        shardadmin_server.add_to_server(shardadmin_server.ShardAdminServicer(shard), server)

    services = (session_server.SERVICE_NAME, *answered)
    return GrpcServer(
        services=services, register=register, receive_bytes_max=process.frame_bytes_max, tls=process.tls, gate=gate
    )


async def _run_until(
    stop: asyncio.Event,
    shard: Shard,
    exchanges: ExchangeProposals,
    server: GrpcServer,
    clock: SystemClock,
    reporter: CoordinatorLink | None,
) -> None:
    running = asyncio.create_task(shard.run(), name="shard")
    collecting = asyncio.create_task(interpreter.collect_when_due(clock), name="garbage")
    looking = asyncio.create_task(exchanges.run(), name="exchanges")
    beside = (
        [collecting, looking]
        if reporter is None
        else [collecting, looking, asyncio.create_task(reporter.run(), name="link")]
    )
    stopping = asyncio.create_task(stop.wait(), name="stop")
    await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
    # Streams close first: a graceful gRPC stop would wait for them for ever. Nor does an instruction begin any more.
    shard.stop_sessions()
    for task in (*beside, stopping):
        task.cancel()
    running.cancel()
    results = await asyncio.gather(running, *beside, return_exceptions=True)
    await server.stop(STREAM_GRACE_SECONDS)
    failure = results[0]
    if isinstance(failure, Exception):
        raise RunFault(f"the shard stopped by itself: {failure}") from failure
