"""Opens the simulated cloud for `bigfleet provider simulated`: catalogue, world, and the cloud's own file.

docs/spec/provider.md §21. This module does not decide anything.
"""

from dataclasses import dataclass
from pathlib import Path

from bigfleet.cli.provider.process_settings import ProviderProcessSettings
from bigfleet.cli.provider.substrate import Substrate
from bigfleet.cli.runtime.failures import UsageFault
from bigfleet.cli.runtime.system import SystemClock
from bigfleet.provider.backends.simulated.backend import SimulatedBackend, SimulatedReadiness
from bigfleet.provider.backends.simulated.book import SqliteHostBook
from bigfleet.provider.backends.simulated.catalogue import CatalogueFault, load_catalogue
from bigfleet.provider.backends.simulated.cloud import SimulatedCloud
from bigfleet.provider.backends.simulated.draws import KeyedDraws
from bigfleet.provider.backends.simulated.fleet import SimulatedOffer, build_fleet, build_seed_fleet
from bigfleet.provider.backends.simulated.world import CloudWorld, WorldFault, load_world
from bigfleet.provider.records.validate import is_id


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedWorld:
    """Which world is simulated, and how."""

    catalogue_path: Path | None
    world_path: Path | None
    seed: int
    time_scale: float
    is_calm: bool


def open_simulated(process: ProviderProcessSettings, simulation: SimulatedWorld) -> Substrate:
    """Return the backend over the cloud. Raises UsageFault for a wrong file, StartRefused for a damaged cloud."""
    assert process.state_path is not None, "the simulated cloud outlives its provider, so both keep a file"
    world, offers = _read_world(process, simulation)
    clock = SystemClock()
    cloud = SimulatedCloud(
        world=world,
        offers=offers,
        draws=KeyedDraws(simulation.seed),
        # Locked by the state file's lock.
        book=SqliteHostBook(process.state_path.with_name(process.state_path.name + ".cloud")),
        clock=clock,
        time_scale=simulation.time_scale,
        is_calm=simulation.is_calm,
    )
    backend = SimulatedBackend(cloud, provider=process.provider, clock=clock)
    return Substrate(
        backend=backend,
        readiness=SimulatedReadiness(cloud, time_scale=simulation.time_scale),
        seeds_itself=True,
        close=cloud.close,
        status=backend.status,
    )


def _read_world(
    process: ProviderProcessSettings, simulation: SimulatedWorld
) -> tuple[CloudWorld, list[SimulatedOffer]]:
    if not is_id(process.provider):
        raise UsageFault(
            f"--provider: {process.provider!r} begins the ids of machines, which have only the characters "
            "A-Za-z0-9._:/@-"
        )
    try:
        catalogue = load_catalogue(simulation.catalogue_path)
    except CatalogueFault as fault:
        raise UsageFault(f"--catalog {fault}") from fault
    try:
        world = load_world(simulation.world_path)
        if process.seed_count is not None:
            return world, build_seed_fleet(process.seed_count, process.provider)
        return world, build_fleet(world, catalogue, process.provider)
    except WorldFault as fault:
        if simulation.world_path is None:
            raise UsageFault(f"the built-in world: {fault}") from fault
        file = "" if str(fault).startswith(str(simulation.world_path)) else f"{simulation.world_path}: "
        raise UsageFault(f"--world {file}{fault}") from fault
