"""Runs a fleet of virtual machines that boot: `bigfleet provider libvirt` over a daemon of the test's own.

Each machine makes its own Node, through the API server and with the token of its bootstrap data (`join.sh.j2`).
"""

import asyncio
import json
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from tests.kubernetes.cluster import ClusterUnderTest
from tests.kubernetes.fleet import MANIFESTS, PROVIDER, SYSTEM_NAMESPACE, FleetUnderTest
from tests.kubernetes.program import Program
from tests.libvirt.daemon import LibvirtDaemon
from tests.libvirt.providers import BOOTED_MEMORY, hosts_file

_HERE: Final = Path(__file__).parent
_COMPONENT: Final = MANIFESTS.parent / "components" / "token-request" / "rights.yaml"
_PROVIDER_ACCOUNT: Final = "kvm-provider"
#: The loopback address of the host, as a guest with user-mode networking reaches it.
_HOST_SEEN_BY_GUESTS: Final = "10.0.2.2"
#: Less than what the kernel leaves of the guest's memory.
ALLOCATABLE: Final = {"cpu": "1", "memory": "96Mi"}


class LibvirtFleet(FleetUnderTest):
    """A fleet of one cluster and one host."""

    def __init__(self, folder: Path, name: str, cluster: ClusterUnderTest, daemon: LibvirtDaemon) -> None:
        self._template = folder / "join.sh.j2"
        super().__init__(
            folder,
            {name: cluster},
            pools=[],
            bootstrap_flags=(
                *("--bootstrap-template", str(self._template)),
                *("--bootstrap-token", "tokenrequest"),
                *("--bootstrap-service-account", "kube-system/bigfleet-node"),
            ),
        )
        self._daemon = daemon

    async def __aenter__(self) -> "LibvirtFleet":
        kubeconfigs = self.folder / "kubeconfigs"
        kubeconfigs.mkdir(parents=True)
        hosts_file(self._daemon, self.folder, guest_memory=BOOTED_MEMORY, allocatable=ALLOCATABLE)
        for name, cluster in self.clusters.items():
            plane = cluster.plane
            files = (MANIFESTS / "namespace.yaml", _COMPONENT, _HERE / "rights.yaml")
            await plane.kubectl("apply", *(part for path in files for part in ("-f", str(path))))
            access = await plane.service_account_kubeconfig(SYSTEM_NAMESPACE, _PROVIDER_ACCOUNT)
            (kubeconfigs / f"{name}.kubeconfig").write_bytes(access.read_bytes())
            self._template.write_text(_template(cluster), encoding="utf-8")
        await super().__aenter__()
        return self

    def _provider(self) -> Program:
        arguments = (
            "provider", "libvirt",
            "--addr", self.address_of(PROVIDER),
            "--metrics-addr", self.address_of(f"{PROVIDER}-metrics"),
            "--state", str(self._state),
            "--hosts", str(self.folder / "hosts.yaml"),
            "--kubeconfig-dir", str(self.folder / "kubeconfigs"),
            "--transition-timeout", "900s",
            "--reconcile-interval", "1s",
        )  # fmt: skip
        return Program(PROVIDER, arguments, self.folder / "provider.log")

    async def _follow(self, name: str) -> None:
        """Do nothing: the machines make their Nodes."""
        await asyncio.Event().wait()


def _template(cluster: ClusterUnderTest) -> str:
    """Return the bootstrap template of a cluster."""
    address = urlsplit(cluster.plane.url)
    values = {
        "server": f"{_HOST_SEEN_BY_GUESTS}:{address.port}",
        "server_name": address.hostname,
        "authority": cluster.plane.files.certificate.read_text(encoding="utf-8"),
    }
    head = "".join(f"{{%- set {name} = {json.dumps(value)} -%}}\n" for name, value in values.items())
    return head + (_HERE / "join.sh.j2").read_text(encoding="utf-8")
