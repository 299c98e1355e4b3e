"""docs/libvirt-provider.md is true: its commands are run in order, on two daemons whose guests boot nothing.

The daemons have no KVM, no bridge and no SSH, so the hosts file of the page gets emulation, user-mode networks and
their sockets. Stubs stand for apt-get and pip.
"""

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from bigfleet.provider.backends.libvirt.names import domain_name, overlay_name, seed_name
from bigfleet.rpc.wire.gen import provider_pb2 as pb
from bigfleet.rpc.wire.gen.provider_pb2_grpc import CapacityProviderStub
from tests.guides import Terminal, blocks, executable
from tests.libvirt.daemon import LibvirtDaemon, libvirt_daemon, require_libvirt
from tests.libvirt.nodes import node_server
from tests.libvirt.providers import SECRET, blob
from tests.patience import wait_until

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "libvirt-provider.md"
HOSTS = ("kvm-1", "kvm-2")
POOL_FOLDER = "/var/lib/libvirt/images"
IMAGE = "debian-12-generic-amd64.qcow2"
MACHINES = ("kvm/row-1/kvm-1/small/000", "kvm/row-1/kvm-1/small/001")
LOGGED_STUB = '#!/bin/sh\necho "$(basename "$0") $*" >> "$STUB_LOG"\n'


@pytest.fixture
def hosts() -> Iterator[dict[str, LibvirtDaemon]]:
    """The daemons of the page's hosts, without a pool of that name."""
    require_libvirt()
    with ExitStack() as stack:
        yield {name: stack.enter_context(libvirt_daemon()) for name in HOSTS}


def images(daemon: LibvirtDaemon) -> Path:
    """Return where the pool of the page is on this machine."""
    return daemon.directory / "images"


def hosts_on_this_machine(text: str, daemons: dict[str, LibvirtDaemon]) -> str:
    """Return the page's hosts file for the daemons."""
    for name, daemon in daemons.items():
        uri = f"qemu+ssh://root@{name}/system?no_tty=1"
        assert uri in text
        text = text.replace(uri, daemon.uri)
    assert "network: bridge:br0" in text
    return text.replace("network: bridge:br0", "virtualisation: qemu")


class Provider:
    """Calls a provider as a shard does."""

    def __init__(self, channel: grpc.Channel, failure: Callable[[], str]) -> None:
        self.stub = CapacityProviderStub(channel)
        self._failure = failure

    def until(self, machine_id: str, state: str) -> None:
        """Return once a machine rests in a state."""
        wanted = pb.MachineState.Value(f"MACHINE_STATE_{state}")
        wait_until(lambda: self.stub.Get(pb.MachineRef(id=machine_id)).state == wanted, self._failure)

    def create(self, machine_id: str) -> None:
        self.stub.Create(pb.CreateRequest(machine_id=machine_id))
        self.until(machine_id, "IDLE")


def assert_life(provider: Provider, daemon: LibvirtDaemon) -> None:
    """Assert what the page's table says of each step on the host."""
    machine_id = MACHINES[0]
    domain, folder = domain_name(machine_id), images(daemon)

    def volumes() -> list[str]:
        return sorted(path.name for path in folder.iterdir() if path.name.startswith("bf-"))

    provider.create(machine_id)
    assert (daemon.domains(), volumes()) == ([domain], sorted([overlay_name(domain), seed_name(domain)]))
    request = pb.ConfigureRequest(machine_id=machine_id, cluster_id="team-a", bootstrap_blob=blob("team-a"))
    provider.stub.Configure(request)
    provider.until(machine_id, "CONFIGURED")
    assert volumes() == sorted([overlay_name(domain), seed_name(domain)])
    assert SECRET not in (folder / seed_name(domain)).read_bytes()
    provider.stub.Drain(pb.DrainRequest(machine_id=machine_id, grace_period_seconds=0))
    provider.until(machine_id, "IDLE")
    assert (daemon.domains(), volumes()) == ([domain], [seed_name(domain)])
    provider.stub.Delete(pb.DeleteRequest(machine_id=machine_id))
    provider.until(machine_id, "SPECULATIVE")
    assert (daemon.domains(), volumes()) == ([], [])


@pytest.mark.slow
def test_the_commands_of_the_page_do_what_it_says(hosts: dict[str, LibvirtDaemon], tmp_path: Path) -> None:
    run = iter(blocks(PAGE, ("sh", "yaml")))
    stub_log = tmp_path / "stubs"
    for name in ("apt-get", "python"):
        executable(tmp_path / "bin" / name, LOGGED_STUB)
    terminal = Terminal(tmp_path, {"STUB_LOG": str(stub_log)})
    for daemon in hosts.values():
        images(daemon).mkdir(mode=0o755)
        daemon.give(images(daemon))
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", terminal.folder / IMAGE, "1M"], check=True)

    prepare = next(run)[1]
    assert POOL_FOLDER in prepare
    for daemon in hosts.values():
        terminal.run(prepare.replace(POOL_FOLDER, str(images(daemon))), LIBVIRT_DEFAULT_URI=daemon.uri)
    terminal.run(next(run)[1])
    assert_installed_as_ci_does(stub_log.read_text())
    (terminal.folder / "hosts.yaml").write_text(hosts_on_this_machine(next(run)[1], hosts))

    # The page takes the kubeconfig of a cluster from where it is run.
    with node_server(terminal.folder, ["team-a"], lambda _node: True):
        terminal.run(next(run)[1])
        serve, status, shard, machines, domains = (content for _language, content in run)
        with terminal.serving(serve, "--addr") as address, grpc.insecure_channel(address) as channel:
            assert re.search(r"SPECULATIVE\W+74\b", terminal.run(status), re.IGNORECASE)
            log = terminal.folder / "provider.log"
            provider = Provider(channel, log.read_text)
            assert_life(provider, hosts["kvm-1"])
            provider.create(MACHINES[1])
            with terminal.serving(shard, "--listen"):
                wanted = (MACHINES[1], *(f"kvm/row-2/kvm-2/large/{number:03d}" for number in range(7)))
                wait_until(lambda: all(each in terminal.run(machines) for each in wanted), "machines are not listed")
            listed = terminal.run(domains, LIBVIRT_DEFAULT_URI=hosts["kvm-1"].uri)
            assert re.search(rf"{domain_name(MACHINES[1])}\s+running\s+{MACHINES[1]}", listed)
            assert "bf-" not in terminal.run(domains, LIBVIRT_DEFAULT_URI=hosts["kvm-2"].uri)
            hosts["kvm-2"].kill()
            wait_until(lambda: "host kvm-2" in terminal.run(status), lambda: f"{terminal.run(status)}{log.read_text()}")
            shown = " ".join(terminal.run(status).split())
            assert re.search(r"host kvm-2\W+does not answer", shown), shown


def assert_installed_as_ci_does(commands: str) -> None:
    """Assert that the page installs an extra that there is, and the packages with which CI builds the binding."""
    packages, pip = commands.splitlines()
    assert pip == "python -m pip install --require-hashes --requirement requirements-libvirt.lock"
    assert (ROOT / "requirements-libvirt.lock").is_file()
    needed = packages.removeprefix("apt-get install ").split()
    installed = (ROOT / ".ci" / "run").read_text().split()
    assert [each for each in needed if each not in installed] == []
