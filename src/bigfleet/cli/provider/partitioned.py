"""Defines `bigfleet provider partitioned`: combines hosts file, allocator, driver and backend.

docs/spec/provider.md §22. The allocator is `bigfleet.partition`'s, behind the Protocol that the provider asks. Nothing
here decides where an instance goes.
"""

import functools
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from bigfleet.cli.provider.flags import ProviderFlags, provider_command
from bigfleet.cli.provider.serve import serve
from bigfleet.cli.runtime.failures import UsageFault

if TYPE_CHECKING:
    from bigfleet.cli.provider.process_settings import ProviderProcessSettings
    from bigfleet.cli.provider.substrate import Substrate
    from bigfleet.model.clock import Clock
    from bigfleet.provider.backends.partitioned.backend import PartitionedBackend
    from bigfleet.provider.backends.partitioned.hosts_file import HostsFile
    from bigfleet.provider.backends.partitioned.ports import Carved, Driver
    from bigfleet.provider.backends.simulated.cloud import SimulatedCloud
    from bigfleet.provider.programs.orphan_killer import OrphanKiller

SIMULATED = "simulated"
_EXEC = "exec:"


class PartitionFlags(NamedTuple):
    """The flags of `provider partitioned`, without those of every provider."""

    hosts_path: Path | None
    #: None is the simulated driver.
    program: str | None
    seed: int
    time_scale: float


@provider_command(without=("offerings", "use_fake_backend"))
def partitioned(
    flags: ProviderFlags,
    hosts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON file of the physical hosts; reloaded on SIGHUP.")
    ] = None,
    driver: Annotated[
        str, typer.Option(metavar="DRIVER", help="Driver that creates instances: simulated or exec:PROGRAM.")
    ] = SIMULATED,
    seed: Annotated[int | None, typer.Option(help="Seed of the simulated driver. [default: 1]")] = None,
    time_scale: Annotated[
        float | None, typer.Option(help="Factor for all durations of the simulated driver. [default: 1.0]")
    ] = None,
) -> None:
    """Run a provider whose machines are instances on physical hosts."""
    if hosts is None and flags.seed_count is None:
        raise UsageFault("--hosts is missing: name the file of the physical hosts, or give --seed-count")
    if hosts is not None and flags.seed_count is not None:
        raise UsageFault("--hosts and --seed-count contradict each other: both say which hosts there are")
    program = _program(driver)
    for flag, value in (("--seed", seed), ("--time-scale", time_scale)):
        if program is not None and value is not None:
            raise UsageFault(f"{flag} applies to the simulated driver only; leave it out with --driver {driver}")
    if time_scale is not None and not 0 < time_scale < math.inf:
        raise UsageFault(f"--time-scale: {time_scale} must be above 0")
    asked = PartitionFlags(hosts, program, 1 if seed is None else seed, 1.0 if time_scale is None else time_scale)
    serve(flags, functools.partial(open_partitioned, asked=asked), name="partitioned")


def _program(driver: str) -> str | None:
    if driver == SIMULATED:
        return None
    if not driver.startswith(_EXEC):
        raise UsageFault(f"--driver: {driver!r} is unknown; choose simulated or exec:PROGRAM")
    program = driver.removeprefix(_EXEC)
    found = shutil.which(program)
    if found is None:
        raise UsageFault(f"--driver: {program!r} is not an executable program; name its path")
    # A relative path means the directory of now, whatever becomes of it later.
    return os.path.abspath(found)


def open_partitioned(process: "ProviderProcessSettings", asked: PartitionFlags) -> "Substrate":
    """Return the backend over the hosts. Raises UsageFault for a wrong file, StartRefused for a damaged state."""
    from bigfleet.cli.provider.substrate import Substrate
    from bigfleet.cli.runtime.system import SystemClock
    from bigfleet.provider.backends.partitioned.backend import PartitionedBackend, PartitionedReadiness
    from bigfleet.provider.backends.partitioned.book import SqliteInstanceBook, read_records
    from bigfleet.provider.backends.partitioned.hosts_file import HostsFault
    from bigfleet.provider.backends.partitioned.metrics import export
    from bigfleet.provider.backends.partitioned.restoring import instances_of, restored
    from bigfleet.provider.programs.orphan_killer import OrphanKiller

    assert process.state_path is not None, "the provider owns the truth about machines, so it keeps a file"
    records = read_records(process.state_path)
    book = SqliteInstanceBook(
        process.state_path.with_name(f"{process.state_path.name}.rooms"), is_power_safe=process.is_power_safe
    )
    clock = SystemClock()
    cloud: SimulatedCloud | None = None
    orphans: OrphanKiller | None = None
    try:
        leases = restored(records, book.load())
        fleet = _read_fleet(process, asked, instances_of(leases))
        cloud = _open_cloud(process.state_path, asked, clock) if asked.program is None else None
        if asked.program is not None:
            orphans = OrphanKiller.of_state(process.state_path, clock=clock)
        driver = _driver(asked, cloud, orphans, clock)
        backend = PartitionedBackend(
            fleet, driver, provider=process.provider, book=book, records=records, leases=leases
        )
    except BaseException as error:
        book.close()
        if orphans is not None:
            orphans.close()
        if isinstance(error, HostsFault):
            raise UsageFault(f"--hosts {error}") from error
        raise
    _warn(fleet)

    def close() -> None:
        book.close()
        if cloud is not None:
            cloud.close()
        if orphans is not None:
            orphans.close()

    return Substrate(
        backend=backend,
        readiness=PartitionedReadiness(backend, driver),
        seeds_itself=True,
        close=close,
        reload=functools.partial(_reload, process, asked, backend),
        status=backend.status,
        export=functools.partial(export, backend),
    )


def _read_fleet(process: "ProviderProcessSettings", asked: PartitionFlags, ours: "Mapping[str, Carved]") -> "HostsFile":
    """Return the hosts. Raises HostsFault."""
    from bigfleet.cli.provider.allocator import make_allocator
    from bigfleet.provider.backends.partitioned.hosts_file import fleet_of, read_hosts
    from bigfleet.provider.backends.partitioned.seeds import seed_document

    if asked.hosts_path is None:
        assert process.seed_count is not None, "one of the two flags is there"
        return fleet_of(seed_document(process.seed_count), process.provider, make_allocator, ours)
    return read_hosts(asked.hosts_path, process.provider, make_allocator, ours)


def _open_cloud(state_path: Path, asked: PartitionFlags, clock: "Clock") -> "SimulatedCloud":
    """Open what the simulated driver carves in. Raises StartRefused."""
    from bigfleet.provider.backends.simulated.book import SqliteHostBook
    from bigfleet.provider.backends.simulated.cloud import SimulatedCloud
    from bigfleet.provider.backends.simulated.draws import KeyedDraws
    from bigfleet.provider.backends.simulated.world import CloudWorld

    return SimulatedCloud(
        world=CloudWorld(),
        offers=(),
        draws=KeyedDraws(asked.seed),
        book=SqliteHostBook(state_path.with_name(f"{state_path.name}.cloud")),
        clock=clock,
        time_scale=asked.time_scale,
        # Hosts of one's own are not taken away, cost what they cost, and are never out of stock.
        is_calm=True,
    )


def _driver(
    asked: PartitionFlags, cloud: "SimulatedCloud | None", orphans: "OrphanKiller | None", clock: "Clock"
) -> "Driver":
    from bigfleet.provider.backends.partitioned.exec_driver import ExecDriver
    from bigfleet.provider.backends.partitioned.simulated_driver import SimulatedDriver

    if cloud is not None:
        return SimulatedDriver(cloud, clock=clock, time_scale=asked.time_scale)
    assert asked.program is not None, "the one or the other"
    return ExecDriver(asked.program, clock=clock, orphans=orphans)


def _warn(fleet: "HostsFile") -> None:
    import structlog

    log = structlog.get_logger("bigfleet.cli.provider.partitioned")
    for text in fleet.warnings:
        log.warning("hosts.size_unplaceable", error=text)


def _reload(process: "ProviderProcessSettings", asked: PartitionFlags, backend: "PartitionedBackend") -> None:
    """Read the hosts file again; a file that cannot be read leaves the previous hosts in force."""
    import structlog

    from bigfleet.provider.backends.partitioned.hosts_file import HostsFault

    log = structlog.get_logger("bigfleet.cli.provider.partitioned")
    if asked.hosts_path is None:
        return
    try:
        fleet = _read_fleet(process, asked, backend.ours)
    except HostsFault as fault:
        log.error("hosts.load_failed", error=str(fault), advice="the previous hosts stay in force")
        return
    backend.replace_fleet(fleet)
    _warn(fleet)
    log.info("hosts.loaded", path=str(asked.hosts_path), hosts=len(fleet.hosts))
