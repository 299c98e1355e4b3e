"""Serves `bigfleet provider libvirt` over a daemon of the test's own, and calls it."""

import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc
import yaml

from bigfleet.provider.backends.libvirt.names import domain_name, seed_name
from bigfleet.rpc.wire.gen import provider_pb2 as pb
from bigfleet.rpc.wire.gen.provider_pb2_grpc import CapacityProviderStub
from tests.libvirt.daemon import IMAGE, POOL, LibvirtDaemon
from tests.libvirt.nodes import node_server
from tests.patience import wait_until
from tests.processes import bigfleet, free_port, serving_command

#: For guests that boot; a stub has a disk of zeros, at which the firmware stops.
BOOTED_MEMORY, STUB_MEMORY = "192Mi", "16Mi"
HOSTS: dict[str, Any] = {
    "defaults": {"image": IMAGE, "pool": POOL, "virtualisation": "qemu"},
    "types": {"small": {"vcpus": 1, "memory": BOOTED_MEMORY, "disk": "64Mi"}},
    "hosts": [
        {
            "zone": "z",
            "name": "h",
            "uri": "test:///default",
            "cpus": 4,
            "memory": "2Gi",
            "disk": "1Gi",
            "price_usd_per_vcpu_hour": 0.01,
        }
    ],
}
CLUSTERS = ["team-a", "team-b"]
#: How long a guest may take to shut down.
GRACE_SECONDS = 600
SECRET = b"4f1c-bootstrap-token-0a9b"


def machine_id(number: int) -> str:
    return f"libvirt/z/h/small/{number:03d}"


def blob(cluster: str) -> bytes:
    """Return bootstrap data that the guest understands."""
    return b"#cloud-config\n# join " + cluster.encode() + b"\n# token " + SECRET + b"\n"


@dataclass(frozen=True, slots=True)
class Running:
    """A provider that serves."""

    stub: CapacityProviderStub
    log: Path
    process: "subprocess.Popen[bytes]"

    def state(self, number: int) -> str:
        name = pb.MachineState.Name(self.machine(number).state)
        return name.removeprefix("MACHINE_STATE_")

    def machine(self, number: int) -> pb.Machine:
        return self.stub.Get(pb.MachineRef(id=machine_id(number)))

    def ids(self) -> list[str]:
        """Return the ids of all machines."""
        return sorted(machine.id for machine in self.stub.List(pb.ListFilter()).machines)

    def until(self, number: int, state: str) -> None:
        """Return once a machine rests in a state. Raises AssertionError when it has failed instead."""

        def is_there() -> bool:
            machine = self.machine(number)
            assert state == "FAILED" or not machine.last_error, f"{machine.last_error}\n{self.log.read_text()}"
            return self.state(number) == state

        wait_until(is_there, self.log.read_text, poll_seconds=0.2)

    def is_over(self, number: int, state: str) -> bool:
        """Return whether a machine rests in a state, or the provider was killed."""
        try:
            return self.state(number) == state
        except grpc.RpcError:
            self.process.wait()
            return True

    def was_killed(self) -> bool:
        """Return whether the provider was killed."""
        return self.process.poll() == -signal.SIGKILL

    def create(self, number: int) -> None:
        self.stub.Create(pb.CreateRequest(machine_id=machine_id(number)))

    def configure(self, number: int, cluster: str) -> None:
        request = pb.ConfigureRequest(machine_id=machine_id(number), cluster_id=cluster, bootstrap_blob=blob(cluster))
        self.stub.Configure(request)

    def drain(self, number: int, grace_seconds: int = 0) -> None:
        self.stub.Drain(pb.DrainRequest(machine_id=machine_id(number), grace_period_seconds=grace_seconds))

    def delete(self, number: int) -> None:
        self.stub.Delete(pb.DeleteRequest(machine_id=machine_id(number)))

    def call(self, verb: str) -> None:
        """Call a verb for the first machine."""
        if verb == "configure":
            self.configure(0, "team-a")
        else:
            getattr(self, verb)(0)


def hosts_file(
    daemon: LibvirtDaemon,
    folder: Path,
    *,
    guest_memory: str,
    allocatable: Mapping[str, str] | None = None,
    **host: Any,
) -> Path:
    """Write a hosts file with the daemon as its one host."""
    defaults = {**HOSTS["defaults"], "console_log_dir": str(daemon.console_directory)}
    types = {"small": {**HOSTS["types"]["small"], "memory": guest_memory, "allocatable": allocatable}}
    hosts = [{**HOSTS["hosts"][0], "uri": daemon.uri, **host}]
    path = folder / "hosts.yaml"
    path.write_text(yaml.safe_dump({"defaults": defaults, "types": types, "hosts": hosts}))
    return path


def last_boot(daemon: LibvirtDaemon, domain: str) -> str:
    """Return what a guest wrote to its console since it booted last."""
    return daemon.console(domain).replace("\r", "").rpartition("BF-BOOT")[2]


def has_joined(daemon: LibvirtDaemon, node: str) -> bool:
    """Return whether the guest of a node wrote to its console, since its last boot, that it joined."""
    text = last_boot(daemon, node.rpartition("-")[0])
    return f"host={node}\n" in text and "BF-JOIN" in text


@contextmanager
def provider(
    daemon: LibvirtDaemon,
    folder: Path,
    *flags: str,
    memory: str = BOOTED_MEMORY,
    is_ready: Callable[[str], bool] | None = None,
    program: Sequence[str] = (),
    host: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[Running]:
    """Serve a provider over the daemon, with a server of nodes that are Ready once their guests joined.

    `program` is run in place of `bigfleet`; `host` has keys of the host that are not as usual.
    """
    address, kubeconfigs = f"127.0.0.1:{free_port()}", folder / "kubeconfigs"
    kubeconfigs.mkdir(exist_ok=True)
    arguments = (
        "provider",
        "libvirt",
        *("--hosts", str(hosts_file(daemon, folder, guest_memory=memory, **host)), "--state", str(folder / "s.db")),
        *("--addr", address, "--metrics-addr=off", "--transition-timeout=900s", "--reconcile-interval=1s"),
        *(flags or ("--kubeconfig-dir", str(kubeconfigs))),
    )
    command = [*program, *arguments] if program else bigfleet(*arguments)
    log = folder / "log"
    with (
        node_server(kubeconfigs, CLUSTERS, is_ready or (lambda node: has_joined(daemon, node))),
        serving_command(address, log, command) as process,
        grpc.insecure_channel(address) as channel,
    ):
        yield Running(CapacityProviderStub(channel), log, process)


def assert_nowhere(secret: bytes, *folders: Path) -> None:
    """Assert that no file below the folders holds the bytes."""
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file():
                assert secret not in path.read_bytes(), path


def assert_a_machine_boots_and_goes(daemon: LibvirtDaemon, folder: Path, program: Sequence[str] = ()) -> None:
    """Create a machine that boots into a cluster, shuts down and is removed, by what its guest says on the console."""
    domain = domain_name(machine_id(0))
    with provider(daemon, folder, program=program) as running:
        running.create(0)
        running.until(0, "IDLE")
        running.configure(0, "team-a")
        running.until(0, "CONFIGURED")
        node = running.machine(0).node_name
        assert f"host={node}\nBF-DISK clean\nBF-JOIN by=seed cluster=team-a\n" in last_boot(daemon, domain)
        assert_nowhere(SECRET, folder, daemon.directory)
        running.drain(0, GRACE_SECONDS)
        running.until(0, "IDLE")
        assert "BF-OFF" in last_boot(daemon, domain)
        assert daemon.volumes() == [seed_name(domain)]
        running.delete(0)
        running.until(0, "SPECULATIVE")
        assert (daemon.domains(), daemon.volumes()) == ([], [])
