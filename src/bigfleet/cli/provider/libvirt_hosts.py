"""Defines `bigfleet provider libvirt`: combines hosts file, connections, driver and backend.

docs/spec/libvirt-provider.md. It makes no call to libvirt itself, and without its Python binding the command ends at
once.
"""

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from bigfleet.cli.provider.flags import ProviderFlags, provider_command
from bigfleet.cli.provider.serve import serve
from bigfleet.cli.runtime.failures import UsageFault

if TYPE_CHECKING:
    from bigfleet.cli.provider.process_settings import ProviderProcessSettings
    from bigfleet.cli.provider.substrate import Substrate
    from bigfleet.provider.backends.libvirt.backend import LibvirtBackend
    from bigfleet.provider.backends.libvirt.driver import BootstrapPlan
    from bigfleet.provider.backends.libvirt.hosts_file import KvmHosts
    from bigfleet.provider.backends.libvirt.hypervisor import Connect

RESEED = "reseed"
AGENT = "agent"


class LibvirtFlags(NamedTuple):
    """The command's own flags."""

    hosts_path: Path
    by_agent: bool
    base_user_data: bytes
    kubeconfig_dir: Path | None


@provider_command(without=("offerings", "seed_count", "use_fake_backend"))
def libvirt_hosts(
    flags: ProviderFlags,
    hosts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML file of the hosts that run libvirt; reloaded on SIGHUP.")
    ] = None,
    bootstrap: Annotated[
        str,
        typer.Option(
            help="How a machine joins a cluster: reseed boots a new disk with cloud-init, agent runs a program in it."
        ),
    ] = RESEED,
    kubeconfig_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory of CLUSTER.kubeconfig files, to see that nodes are Ready."),
    ] = None,
    base_user_data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="User data of cloud-init before a machine is in a cluster.")
    ] = None,
) -> None:
    """Run a provider whose machines are virtual machines on hosts of your own."""
    if hosts is None:
        raise UsageFault("--hosts is missing: name the file of the hosts that run libvirt")
    if bootstrap not in (RESEED, AGENT):
        raise UsageFault(f"--bootstrap: {bootstrap!r} is unknown; choose reseed or agent")
    if kubeconfig_dir is None and bootstrap == RESEED:
        raise UsageFault(
            "--kubeconfig-dir is missing: with --bootstrap reseed only the cluster can say that a node is Ready"
        )
    if kubeconfig_dir is not None and not kubeconfig_dir.is_dir():
        raise UsageFault(
            f"--kubeconfig-dir: {kubeconfig_dir} is not a directory; name the one with the files CLUSTER.kubeconfig"
        )
    asked = LibvirtFlags(hosts.absolute(), bootstrap == AGENT, _user_data(base_user_data), kubeconfig_dir)
    _read_hosts(asked)
    if importlib.util.find_spec("libvirt") is None:
        raise UsageFault(
            "libvirt's Python binding is not installed; run make libvirt in a checkout, or "
            "pip install 'libvirt-python>=10'; it is built with the package libvirt-dev, a C compiler and pkg-config"
        )
    serve(flags, functools.partial(open_libvirt, asked=asked), name="libvirt")


def _user_data(path: Path | None) -> bytes:
    from bigfleet.files.bounded import CONFIGURATION_BYTES_MAX, read_bounded
    from bigfleet.provider.backends.libvirt.seed import USER_DATA_BYTES_MAX

    if path is None:
        return b""
    try:
        content = read_bounded(path, CONFIGURATION_BYTES_MAX)
    except OSError as error:
        raise UsageFault(f"--base-user-data: {path}: {error.strerror}; name a file that can be read") from error
    if len(content) > USER_DATA_BYTES_MAX:
        raise UsageFault(
            f"--base-user-data: {path} has {len(content)} bytes, at most {USER_DATA_BYTES_MAX} are possible"
        )
    return content


def _read_hosts(asked: LibvirtFlags) -> "KvmHosts":
    from bigfleet.provider.backends.libvirt.hosts_file import KvmHostsFault, read_kvm_hosts

    try:
        return read_kvm_hosts(asked.hosts_path)
    except KvmHostsFault as fault:
        raise UsageFault(f"--hosts {fault}") from fault


def open_libvirt(
    process: "ProviderProcessSettings", asked: LibvirtFlags, connect: "Connect | None" = None
) -> "Substrate":
    """Return the backend over the hosts; `connect` None is libvirt. Raises UsageFault, StartRefused."""
    import asyncio

    from bigfleet.cli.provider.substrate import Substrate
    from bigfleet.cli.runtime.system import SystemClock
    from bigfleet.provider.backends.libvirt.backend import LibvirtBackend, LibvirtReadiness
    from bigfleet.provider.backends.libvirt.connections import HostThreads
    from bigfleet.provider.backends.libvirt.driver import LibvirtDriver
    from bigfleet.provider.backends.libvirt.hosts_file import KvmHost, KvmHostsFault
    from bigfleet.provider.backends.partitioned.book import SqliteInstanceBook, read_records

    if connect is None:
        from bigfleet.provider.backends.libvirt import binding

        connect = binding.connect
    assert process.state_path is not None, "the provider owns the truth about machines, so it keeps a file"
    clock, loop, opened = SystemClock(), asyncio.get_running_loop(), connect
    changed: list[Callable[[str], None]] = []

    def on_change(name: str) -> None:
        # On the thread of libvirt's events, perhaps after the loop has ended.
        if changed and not loop.is_closed():
            loop.call_soon_threadsafe(changed[0], name)

    def open_host(host: KvmHost) -> HostThreads:
        return HostThreads(host.uri, opened, on_change, clock)

    driver = LibvirtDriver(
        _read_hosts(asked), provider=process.provider, bootstrap=_plan(asked), open_host=open_host, clock=clock
    )
    records = read_records(process.state_path)
    book = SqliteInstanceBook(
        process.state_path.with_name(f"{process.state_path.name}.rooms"), is_power_safe=process.is_power_safe
    )
    try:
        backend = LibvirtBackend(driver, provider=process.provider, book=book, records=records, clock=clock)
    except BaseException as error:
        book.close()
        if isinstance(error, KvmHostsFault):
            raise UsageFault(f"--hosts {asked.hosts_path}: {error}") from error
        raise
    changed.append(backend.domain_changed)
    _warn(backend)

    def close() -> None:
        driver.close()
        book.close()

    return Substrate(
        backend=backend,
        readiness=LibvirtReadiness(backend, driver),
        seeds_itself=True,
        close=close,
        reload=functools.partial(_reload, asked, backend),
        status=backend.status,
    )


def _plan(asked: LibvirtFlags) -> "BootstrapPlan":
    from bigfleet.cli.runtime.system import SystemClock
    from bigfleet.provider.backends.libvirt.driver import BootstrapPlan

    nodes = None
    if asked.kubeconfig_dir is not None:
        from bigfleet.cli.provider.node_readiness import KubeconfigNodes

        nodes = KubeconfigNodes(asked.kubeconfig_dir, SystemClock())
    return BootstrapPlan(by_agent=asked.by_agent, base_user_data=asked.base_user_data, nodes=nodes)


def _warn(backend: "LibvirtBackend") -> None:
    import structlog

    log = structlog.get_logger("bigfleet.cli.provider.libvirt_hosts")
    for text in backend.slots.fleet.warnings:
        log.warning("hosts.size_unplaceable", error=text)


def _reload(asked: LibvirtFlags, backend: "LibvirtBackend") -> None:
    """Read the hosts file again; a file that cannot be read leaves the previous hosts in force."""
    import structlog

    from bigfleet.provider.backends.libvirt.hosts_file import KvmHostsFault

    log = structlog.get_logger("bigfleet.cli.provider.libvirt_hosts")
    try:
        hosts = _read_hosts(asked)
        backend.replace_hosts(hosts)
    except (UsageFault, KvmHostsFault) as fault:
        log.error("hosts.load_failed", error=str(fault), advice="the previous hosts stay in force")
        return
    _warn(backend)
    log.info("hosts.loaded", path=str(asked.hosts_path), hosts=len(hosts.hosts))
