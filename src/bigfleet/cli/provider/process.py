"""Runs the provider process: state, backend, core, gRPC and HTTP, started and stopped in order.

docs/spec/provider.md §12. This module does not decide anything.
"""

import asyncio
import gc
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry

import bigfleet
from bigfleet.cli.provider.admin_server import serve_admin
from bigfleet.cli.provider.process_settings import ProviderProcessSettings
from bigfleet.cli.provider.substrate import OpenSubstrate, Substrate
from bigfleet.cli.runtime.failures import RunFault, UsageFault
from bigfleet.cli.runtime.interpreter import TURN_SECONDS
from bigfleet.cli.runtime.large_memory import keep_large_memory
from bigfleet.cli.runtime.program import COLLECTOR_THRESHOLDS
from bigfleet.cli.runtime.service_notifier import ServiceNotifier
from bigfleet.cli.runtime.state_watch import StateWatch
from bigfleet.cli.runtime.system import (
    SystemClock,
    SystemIds,
    ended_by_signals,
    process_registry,
    serve_http,
    stop_on_signals,
    system_rng,
)
from bigfleet.provider.backend import Backend, ConfigureWaits, Ready
from bigfleet.provider.backends.fake import fake_slot
from bigfleet.provider.inventory.offerings import OfferingsUnreadable, read_offerings
from bigfleet.provider.inventory.offers import Offers, seed_offers
from bigfleet.provider.kit.core import CapacityCore
from bigfleet.provider.kit.options import CoreOptions
from bigfleet.provider.metrics import ProviderMetrics
from bigfleet.provider.operations.invoke import BackendFault
from bigfleet.provider.records.kinds import Kind
from bigfleet.provider.records.refusal import OfferingsRefused, StartRefused
from bigfleet.provider.storage.sqlite import SqliteProviderStore
from bigfleet.provider.storage.store import MemoryStore
from bigfleet.rpc.grpc_server import GrpcServer, ListenFault, check_can_listen
from bigfleet.rpc.security.identity import Gate
from bigfleet.rpc.security.tls import is_loopback, monitor_files
from bigfleet.rpc.servers.provider import (
    RECEIVE_BYTES_MAX,
    SEND_BYTES_MAX,
    SERVICE,
    ProviderServicer,
    encode_list_entry,
)

_log = structlog.get_logger("bigfleet.cli.provider.process")

_STOP_SECONDS_MAX = 30.0


async def serve_process(process: ProviderProcessSettings, options: CoreOptions, open_substrate: OpenSubstrate) -> int:
    """Lock the state, open the substrate and serve it until a signal; return the exit code.

    Raises UsageFault or RunFault.
    """
    with ended_by_signals(lambda: _log.info("provider.stopped", during="start")):
        return await _serve_process(process, options, open_substrate)


async def _serve_process(process: ProviderProcessSettings, options: CoreOptions, open_substrate: OpenSubstrate) -> int:
    store: SqliteProviderStore | MemoryStore = MemoryStore()
    if process.state_path is not None:
        store = SqliteProviderStore(process.state_path, is_power_safe=process.is_power_safe)
    try:
        if isinstance(store, SqliteProviderStore):
            # First, so that files of the substrate's own beside it have one owner as well.
            store.lock()
        substrate = open_substrate(process)
    except StartRefused as refused:
        store.close()
        raise RunFault(str(refused)) from refused
    except UsageFault:
        store.close()
        raise
    try:
        options = replace(options, offers=_first_offers(process, substrate))
        _check_intent_key(options, substrate.backend)
        return await serve_substrate(process, options, substrate, store)
    except OfferingsRefused as refused:
        raise UsageFault(f"--offerings {process.offerings_path}: {refused}") from refused
    except BackendFault as fault:
        raise RunFault(str(fault)) from fault
    finally:
        store.close()
        substrate.close()


def _first_offers(process: ProviderProcessSettings, substrate: Substrate) -> Offers | None:
    if process.offerings_path is not None:
        try:
            return _read_offers(process.offerings_path, process.provider)
        except OfferingsUnreadable as fault:
            raise UsageFault(f"--offerings {fault}") from fault
    if process.seed_count is None or substrate.seeds_itself:
        return None
    return seed_offers(fake_slot(number, id=f"{process.provider}-{number}") for number in range(process.seed_count))


def _read_offers(path: Path, provider: str) -> Offers:
    return Offers(read_offerings(path, provider), owner=provider)


def _check_intent_key(options: CoreOptions, backend: Backend) -> None:
    if options.intent_key is not None and Kind.CONFIGURE not in backend.limits.resumable:
        raise UsageFault(
            "--intent-key: this provider does not resume Configure and stores no blobs; leave --intent-key out"
        )


async def serve_provider(
    process: ProviderProcessSettings,
    options: CoreOptions,
    backend: Backend,
    readiness: Ready | ConfigureWaits,
    store: SqliteProviderStore | MemoryStore,
) -> int:
    """Serve a backend until a signal, and return the exit code. Raises RunFault."""
    return await serve_substrate(process, options, Substrate(backend=backend, readiness=readiness), store)


def _watch_of(store: SqliteProviderStore | MemoryStore, registry: CollectorRegistry) -> StateWatch:
    if isinstance(store, MemoryStore):
        return StateWatch(lambda: "", registry, "bigfleet_provider")
    # In a thread: a large state takes seconds, and reads and probes are answered meanwhile.
    return StateWatch(store.file_fault, registry, "bigfleet_provider", rescue=store.rescue, compute=asyncio.to_thread)


async def serve_substrate(
    process: ProviderProcessSettings,
    options: CoreOptions,
    substrate: Substrate,
    store: SqliteProviderStore | MemoryStore,
) -> int:
    """Serve a substrate until a signal, and return the exit code. Raises RunFault."""
    registry = process_registry()
    substrate.export(registry)
    metrics = ProviderMetrics(registry)
    metrics.build_info.labels(bigfleet.installed_version()).set(1)
    clock, notifier = SystemClock(), ServiceNotifier.from_environment(os.environ, os.getpid())
    core = CapacityCore(
        substrate.backend,
        readiness=substrate.readiness,
        store=store,
        clock=clock,
        ids=SystemIds(),
        rng=system_rng(),
        encode=encode_list_entry,
        metrics=metrics,
        options=options,
    )
    gate = Gate(registry, "bigfleet_provider", services=(SERVICE,), certify=process.certify)
    if process.tls is not None:
        monitor_files(process.tls, registry, "bigfleet_provider")
    server = GrpcServer(
        services=(SERVICE,),
        register=ProviderServicer(core, clock, gate).register,
        receive_bytes_max=RECEIVE_BYTES_MAX,
        send_bytes_max=SEND_BYTES_MAX,
        reflect=process.reflect,
        # Every call to a provider has a deadline (docs/spec/wire.md §2).
        keep_alive=False,
        tls=process.tls,
        gate=gate,
    )
    watch = _watch_of(store, registry)

    def readiness() -> str:
        return watch.fault or substrate.fault() or core.why_waiting

    try:
        check_can_listen(*process.address)
        await _start(core)
        stop = stop_on_signals()
        substrate.take_offers(core.offered)
        async with (
            watch.watching(clock),
            serve_http(process.metrics_address, registry, readiness),
            serve_admin(process.state_path, core.administration, substrate.status),
            _read_again(process, core, substrate, notifier),
            notifier.reporting(readiness, stop),
        ):
            await _serve(process, core, server, stop, metrics)
    except OfferingsRefused:
        raise
    except StartRefused as refused:
        raise RunFault(str(refused)) from refused
    except ListenFault as fault:
        raise RunFault(f"--addr: {fault}") from fault
    finally:
        await server.stop(_STOP_SECONDS_MAX)
        await core.stop()
    _log.info("provider.stopped")
    return 0


async def _start(core: CapacityCore) -> None:
    """Start the core with its fleet out of the collector's sight, which would look at all of it again and again.

    A record is a value without cycles; what is replaced goes by its count of references. The collector goes on for what
    an author's backend leaves behind. Short turns let the loop answer while a thread joins a long List.
    """
    sys.setswitchinterval(TURN_SECONDS)
    gc.disable()
    try:
        await core.start()
    finally:
        gc.freeze()
        gc.set_threshold(*COLLECTOR_THRESHOLDS)
        gc.enable()
    # Now, as what is loaded once would only fragment what is to be retained.
    keep_large_memory()


@asynccontextmanager
async def _read_again(
    process: ProviderProcessSettings, core: CapacityCore, substrate: Substrate, notifier: ServiceNotifier
) -> AsyncIterator[None]:
    """Read files again on SIGHUP while the context lasts; what cannot be read leaves the former in force."""
    asked = asyncio.Event()

    async def reload() -> None:
        while True:
            await asked.wait()
            asked.clear()
            notifier.reload_began()
            substrate.reload()
            if process.offerings_path is not None:
                await _replace_offers(process.offerings_path, process.provider, core, substrate)
            notifier.reload_ended()

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, asked.set)
    task = asyncio.create_task(reload())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _replace_offers(path: Path, provider: str, core: CapacityCore, substrate: Substrate) -> None:
    try:
        offers = await asyncio.to_thread(_read_offers, path, provider)
    except OfferingsUnreadable as fault:
        _log.error("offerings.load_failed", error=str(fault), advice="the previous offerings stay in force")
        return
    await core.replace_offers(offers)
    substrate.take_offers(core.offered)
    _log.info("offerings.loaded", path=str(path), faults=len(offers.faults))


async def _serve(
    process: ProviderProcessSettings,
    core: CapacityCore,
    server: GrpcServer,
    stop: asyncio.Event,
    metrics: ProviderMetrics,
) -> None:
    """Open the port once there is an inventory to serve, and serve it until `stop`.

    Other programs take an open port for a provider that answers.
    """
    host, port = process.address
    if not await _is_loaded_before(core, stop):
        return
    bound = await server.start(host, port, serving=core.is_ready)
    is_plain = process.tls is None and not is_loopback(host)
    metrics.insecure.set(1 if is_plain or process.certify else 0)
    if process.certify:
        _log.warning(
            "provider.certification_allowed",
            advice="an admin may change machines with any token or none; use it in tests only",
        )
    health = asyncio.create_task(_follow_health(core, server))
    try:
        _log.info("provider.started", address=f"{host}:{bound}", machines=len((await core.list()).records))
        await stop.wait()
    finally:
        health.cancel()
        await asyncio.gather(health, return_exceptions=True)


async def _is_loaded_before(core: CapacityCore, stop: asyncio.Event) -> bool:
    """Wait for the first inventory; return False when `stop` comes first. Raises StartRefused for an unusable one."""
    if not core.is_ready:
        _log.info("inventory.awaited", advice="the port opens once the first inventory was read; /readyz is 503")
    loaded, stopping = asyncio.create_task(core.loaded()), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({loaded, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if loaded.done():
            loaded.result()
        return loaded.done()
    finally:
        for task in (loaded, stopping):
            task.cancel()
        await asyncio.gather(loaded, stopping, return_exceptions=True)


async def _follow_health(core: CapacityCore, server: GrpcServer) -> None:
    """Keep the health service in step with the core."""
    changed = asyncio.Event()
    core.on_ready_change(lambda _is_ready: changed.set())
    while True:
        changed.clear()
        await server.set_serving(serving=core.is_ready)
        await changed.wait()
