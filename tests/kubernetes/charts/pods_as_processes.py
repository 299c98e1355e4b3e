"""Runs what the pods of BigFleet's charts run in several clusters, each as a process of this machine.

The pods themselves are on nodes that the fake kubelet plays, so that everything in the clusters is as if they ran.
"""

import asyncio
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from bigfleet.cli.runtime.system import SystemClock
from bigfleet.cli.up.kubernetes.run import ProviderMachines
from bigfleet.demo.kubernetes.fake_node import FakeNode
from bigfleet.demo.kubernetes.machine_nodes import nodes_of
from bigfleet.model.ids import ClusterId
from bigfleet.rpc.clients.provider import GrpcProvider
from bigfleet.rpc.security.tls import TlsFiles, TlsPaths
from tests.deploy.charts import NAMESPACE
from tests.kubernetes.cluster import ClusterUnderTest, eventually
from tests.kubernetes.pod_commands import pod_command
from tests.kubernetes.program import Program
from tests.patience import PATIENCE_SECONDS
from tests.processes import free_port

WORKLOADS = "statefulsets,deployments"
SHARD = "statefulset.apps/bigfleet-shard-shard-0"
PROVIDER = "statefulset.apps/bigfleet-provider"
POD_CONTROLLER = "deployment.apps/bigfleet-pod-controller"
#: A node of a real cluster is older than the pod controller demands; those of these clusters are new.
AGED = "--unmanaged-after=1s"


class PodsAsProcesses:
    """The processes of all clusters: one for each workload that is installed, as long as it is."""

    def __init__(
        self, clusters: Mapping[str, ClusterUnderTest], own_nodes: Mapping[str, FakeNode], folder: Path, *, shard: str
    ) -> None:
        """Take clusters, the node that each has of its own, and the address of the shard on this machine."""
        self.provider, self.shard = f"127.0.0.1:{free_port()}", shard
        self.processes: dict[tuple[str, str], Program] = {}
        self._clusters = clusters
        self._own_nodes = own_nodes
        self._folder = folder

    async def follow(self) -> None:
        """Start what was installed, until it is ready, and stop what was uninstalled."""
        for name in self._clusters:
            installed = await self._workloads(name)
            for key in [key for key in self.processes if key[0] == name and key[1] not in installed]:
                await self.processes.pop(key).stop()
            for workload in installed:
                if (name, workload) not in self.processes:
                    await self._start(name, workload)

    async def stop(self) -> None:
        """Stop all, those last that others call."""
        for process in reversed(self.processes.values()):
            await process.stop()

    def check_running(self) -> None:
        """Raise AssertionError with its log when a process has ended by itself."""
        for process in self.processes.values():
            assert not process.has_ended, f"{process.name} has ended:\n{process.log.read_text()[-3000:]}"

    def logs(self) -> str:
        """Return the ends of all logs, also of processes that were stopped."""
        return "\n".join(f"== {path}\n{path.read_text()[-3000:]}" for path in sorted(self._folder.rglob("*.log")))

    async def _workloads(self, cluster: str) -> list[str]:
        words = ("--namespace", NAMESPACE, "get", WORKLOADS, "--output=name")
        return (await self._clusters[cluster].plane.kubectl(*words)).split()

    async def _start(self, cluster: str, workload: str) -> None:
        plane = self._clusters[cluster].plane
        folder = self._folder / cluster / workload.rpartition("/")[2]
        command = await pod_command(plane.kubectl, NAMESPACE, workload, folder)
        metrics = f"127.0.0.1:{free_port()}"
        first, *words = command.with_flags({"--metrics-addr": metrics, **self._addresses(workload)})
        assert first == "bigfleet"
        more = [AGED] if workload == POD_CONTROLLER else []
        environment = {}
        if command.service_account != "default":
            access = await plane.service_account_kubeconfig(NAMESPACE, command.service_account)
            environment = {"KUBECONFIG": str(access)}
            more.append(f"--namespace={NAMESPACE}")
        process = Program(f"{cluster}: {workload}", [*words, *more], folder.with_suffix(".log"), environment)
        process.start()
        self.processes[cluster, workload] = process
        await eventually(partial(self._is_ready, metrics), f"{process.name} is not ready:\n{self.logs()}")

    def _addresses(self, workload: str) -> Mapping[str, str]:
        """Return the flags with addresses that are others on this machine than in a pod."""
        if workload == PROVIDER:
            return {"--addr": self.provider}
        return {"--listen": self.shard, "--provider-addr": self.provider} if workload == SHARD else {}

    async def _is_ready(self, metrics: str) -> bool:
        self.check_running()
        return await asyncio.to_thread(_answers, f"http://{metrics}/readyz")

    # ---- machines

    @asynccontextmanager
    async def machines(self, certs: Path) -> AsyncIterator[None]:
        """Boot what the provider calls Configured, in its cluster, while the context lasts."""
        paths = TlsPaths(certificate=certs / "readonly.crt", key=certs / "readonly.key", authority=certs / "ca.crt")
        client = GrpcProvider(self.provider, clock=SystemClock(), tls=TlsFiles(paths))
        listed = ProviderMachines(client, SystemClock())

        async def read(name: str) -> dict[str, FakeNode]:
            own = self._own_nodes[name]
            return {own.name: own, **nodes_of(await listed.read(), ClusterId(name))}

        following = [
            asyncio.create_task(cluster.follow_machines(partial(read, name)))
            for name, cluster in self._clusters.items()
        ]
        try:
            yield
        finally:
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)
            await client.close()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
