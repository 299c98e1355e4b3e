"""The provider process: state, backend, core, gRPC and HTTP put together, and taken down in order.

docs/spec/provider.md §12. Nothing here decides anything.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry

import bigfleet
from bigfleet.cli.faults import RunFault, UsageFault
from bigfleet.cli.runtime import SystemClock, SystemIds, serve_http, stop_on_signals, system_rng
from bigfleet.provider.backend import Backend, ConfigureWaits, Ready
from bigfleet.provider.core import CapacityCore
from bigfleet.provider.metrics import ProviderMetrics
from bigfleet.provider.options import CoreOptions
from bigfleet.provider.refusal import StartRefused
from bigfleet.provider.simulated.backend import SimulatedBackend, SimulatedReadiness
from bigfleet.provider.simulated.book import SqliteBook
from bigfleet.provider.simulated.catalogue import CatalogueFault, load_catalogue
from bigfleet.provider.simulated.cloud import SimulatedCloud
from bigfleet.provider.simulated.draws import Draws
from bigfleet.provider.simulated.fleet import Offer, build_fleet, build_seed_fleet
from bigfleet.provider.simulated.world import World, WorldFault, load_world
from bigfleet.provider.sqlite_store import SqliteStore
from bigfleet.rpc.grpc_server import GrpcServer, ListenFault
from bigfleet.rpc.identity import Gate
from bigfleet.rpc.provider_server import (
    RECEIVE_BYTES_MAX,
    SEND_BYTES_MAX,
    SERVICE,
    ProviderServicer,
    encode_list_entry,
)
from bigfleet.rpc.tls import TlsFiles, export_expiry, is_loopback

_log = structlog.get_logger("bigfleet.cli.provider_process")

_STOP_SECONDS_MAX = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderPlace:
    """Where a provider runs."""

    address: tuple[str, int]
    metrics_address: tuple[str, int] | None
    state_path: Path
    is_power_safe: bool
    #: HostRef.provider and the prefix of ids.
    provider: str
    reflect: bool
    #: None is plain text.
    tls: TlsFiles | None = None
    #: Whether an admin may change machines with any token (docs/spec/provider.md §17).
    certify: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedWorld:
    """Which world is simulated, and how."""

    catalogue_path: Path | None
    world_path: Path | None
    seed: int
    time_scale: float
    is_calm: bool
    seed_count: int | None


async def serve_simulated(place: ProviderPlace, options: CoreOptions, simulation: SimulatedWorld) -> int:
    """Serve the simulated cloud until a signal, and return the exit code. Raises UsageFault or RunFault."""
    world, offers = _read_world(place.provider, simulation)
    clock = SystemClock()
    # The cloud's own file is locked by the state file's lock, which the core takes first.
    store = SqliteStore(place.state_path, is_power_safe=place.is_power_safe)
    try:
        store.lock()
        cloud = SimulatedCloud(
            world=world,
            offers=offers,
            draws=Draws(simulation.seed),
            book=SqliteBook(place.state_path.with_name(place.state_path.name + ".cloud")),
            clock=clock,
            time_scale=simulation.time_scale,
            is_calm=simulation.is_calm,
        )
    except StartRefused as refused:
        store.close()
        raise RunFault(str(refused)) from refused
    backend = SimulatedBackend(cloud, provider=place.provider, clock=clock)
    readiness = SimulatedReadiness(cloud, time_scale=simulation.time_scale)
    try:
        return await serve_provider(place, options, backend, readiness, store)
    finally:
        cloud.close()


def _read_world(provider: str, simulation: SimulatedWorld) -> tuple[World, list[Offer]]:
    try:
        catalogue = load_catalogue(simulation.catalogue_path)
    except CatalogueFault as fault:
        raise UsageFault(f"--catalog {fault}") from fault
    try:
        world = load_world(simulation.world_path)
        if simulation.seed_count is not None:
            return world, build_seed_fleet(simulation.seed_count, provider)
        return world, build_fleet(world, catalogue, provider)
    except WorldFault as fault:
        file = "" if str(fault).startswith(str(simulation.world_path)) else f"{simulation.world_path}: "
        raise UsageFault(f"--world {file}{fault}") from fault


async def serve_provider(
    place: ProviderPlace,
    options: CoreOptions,
    backend: Backend,
    readiness: Ready | ConfigureWaits,
    store: SqliteStore,
) -> int:
    """Serve a backend until a signal, and return the exit code. Raises RunFault."""
    registry = CollectorRegistry()
    metrics = ProviderMetrics(registry)
    metrics.build_info.labels(bigfleet.installed_version()).set(1)
    clock = SystemClock()
    core = CapacityCore(
        backend,
        readiness=readiness,
        store=store,
        clock=clock,
        ids=SystemIds(),
        rng=system_rng(),
        encode=encode_list_entry,
        metrics=metrics,
        options=options,
    )
    gate = Gate(registry, "bigfleet_provider", services=(SERVICE,), certify=place.certify)
    if place.tls is not None:
        export_expiry(place.tls, registry, "bigfleet_provider")
    server = GrpcServer(
        services=(SERVICE,),
        register=ProviderServicer(core, clock, gate).register,
        receive_bytes_max=RECEIVE_BYTES_MAX,
        send_bytes_max=SEND_BYTES_MAX,
        reflect=place.reflect,
        # Every call to a provider has a deadline (docs/spec/wire.md §2).
        keep_alive=False,
        tls=place.tls,
        gate=gate,
    )
    stop = stop_on_signals()
    try:
        await core.start()
        async with serve_http(place.metrics_address, registry, lambda: core.is_ready):
            await _serve(place, core, server, stop, metrics)
    except StartRefused as refused:
        raise RunFault(str(refused)) from refused
    except ListenFault as fault:
        raise RunFault(f"--addr: {fault}") from fault
    finally:
        await server.stop(_STOP_SECONDS_MAX)
        await core.stop()
    _log.info("provider.stopped")
    return 0


async def _serve(
    place: ProviderPlace, core: CapacityCore, server: GrpcServer, stop: asyncio.Event, metrics: ProviderMetrics
) -> None:
    host, port = place.address
    bound = await server.start(host, port)
    is_plain = place.tls is None and not is_loopback(host)
    metrics.insecure.set(1 if is_plain or place.certify else 0)
    if place.certify:
        _log.warning("provider.certify", text="an admin may change machines with any token or none")
    health = asyncio.create_task(_follow_health(core, server))
    stopping = asyncio.create_task(stop.wait())
    loaded = asyncio.create_task(core.loaded())
    try:
        await asyncio.wait({stopping, loaded}, return_when=asyncio.FIRST_COMPLETED)
        if loaded.done():
            loaded.result()
            _log.info("provider.serving", address=f"{host}:{bound}", machines=len((await core.list()).records))
        await stopping
    finally:
        for task in (health, stopping, loaded):
            task.cancel()
        await asyncio.gather(health, stopping, loaded, return_exceptions=True)


async def _follow_health(core: CapacityCore, server: GrpcServer) -> None:
    """Keep the health service in step with the core."""
    changed = asyncio.Event()
    core.on_ready_change(lambda _is_ready: changed.set())
    while True:
        changed.clear()
        await server.set_serving(serving=core.is_ready)
        await changed.wait()
