"""Represents one cluster of `bigfleet up --kubernetes`: a real control plane, its machines, its workloads.

Each machine that the provider reports as Configured is a Node, simulated by the fake kubelet. The scheduler, the
controllers, the operator and the pod controller are the real programs. This module does not place a pod or binds a
machine.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bigfleet.demo.kubernetes.control_plane import ControlPlane
from bigfleet.demo.kubernetes.fake_node import FakeNode
from bigfleet.demo.kubernetes.kubelet import FakeKubelet, KubeletSettings
from bigfleet.demo.kubernetes.machine_nodes import follow_machines, nodes_of
from bigfleet.demo.kubernetes.workloads import DEPLOYMENTS, NAMESPACE, WorkloadManifest
from bigfleet.model.clock import Clock
from bigfleet.model.ids import ClusterId, Rng
from bigfleet.model.machine import Machine
from bigfleet.operator.demand.capacity_requests import request_of_spec
from bigfleet.operator.kubernetes.api import ApiError
from bigfleet.operator.kubernetes.http import HttpKubernetesApi
from bigfleet.operator.kubernetes.kubeconfig import load_endpoint
from bigfleet.operator.kubernetes.objects import KubernetesObject, PodObject
from bigfleet.operator.kubernetes.reflector import Reflector
from bigfleet.operator.kubernetes.resources import CAPACITY_REQUESTS, PODS
from bigfleet.operator.requests import CapacityRequest, UnmappableRequest

SYSTEM_NAMESPACE: Final = "bigfleet-system"
OPERATOR: Final = "bigfleet-operator"
POD_CONTROLLER: Final = "bigfleet-pod-controller"
_RETRY_SECONDS: Final = 0.5
#: A new namespace refuses pods until its service account is there.
_ATTEMPTS_MAX: Final = 60
_FIELD_MANAGER: Final = "bigfleet-demo"
#: The manifests without the workloads: in the demonstration the two programs run outside of the cluster.
_MANIFESTS: Final = ("namespace.yaml", "operator-rights.yaml", "pod-controller-rights.yaml")

MachineReader = Callable[[], Awaitable[Sequence[Machine]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneFigures:
    """The pods and nodes of one cluster at one moment."""

    running: int = 0
    #: Neither running nor finished, with a node.
    starting: int = 0
    #: Without a node.
    pending: int = 0
    nodes: int = 0

    @property
    def pods(self) -> int:
        """All that have not finished."""
        return self.running + self.starting + self.pending


class DemoPlane:
    """One cluster; `prepare` must have returned before `run`."""

    def __init__(self, cluster: ClusterId, plane: ControlPlane, *, clock: Clock, rng: Rng) -> None:
        self.cluster = cluster
        self._plane = plane
        self._clock = clock
        self._rng = rng
        self._api: HttpKubernetesApi | None = None
        self._kubelet: FakeKubelet | None = None
        self._pods: Reflector[PodObject] | None = None

    async def prepare(self, deploy: Path) -> tuple[Path, Path]:
        """Install definitions and rights; return the kubeconfigs of operator and pod controller."""
        plane = self._plane
        await plane.kubectl("apply", "-f", str(deploy / "crds"))
        for name in _MANIFESTS:
            await plane.kubectl("apply", "-f", str(deploy / "kubernetes" / "base" / name))
        await plane.kubectl("wait", "--for=condition=Established", "--timeout=60s", "-f", str(deploy / "crds"))
        endpoint = load_endpoint(clock=self._clock, environment={}, kubeconfig=plane.admin_kubeconfig)
        self._api = HttpKubernetesApi(endpoint, clock=self._clock, qps=0, user_agent=_FIELD_MANAGER)
        self._kubelet = FakeKubelet(self._api, clock=self._clock, rng=self._rng, settings=KubeletSettings())
        self._pods = Reflector(self._api, PODS, clock=self._clock, rng=self._rng)
        return (
            await plane.service_account_kubeconfig(SYSTEM_NAMESPACE, OPERATOR),
            await plane.service_account_kubeconfig(SYSTEM_NAMESPACE, POD_CONTROLLER),
        )

    async def close(self) -> None:
        """Close the client."""
        if self._api is not None:
            await self._api.aclose()

    async def run(self, read_machines: MachineReader) -> None:
        """Play the machines until cancelled."""
        kubelet, pods = self._kubelet, self._pods
        assert kubelet is not None, "prepare comes first"
        assert pods is not None, "prepare comes first"

        async def read() -> dict[str, FakeNode]:
            return nodes_of(await read_machines(), self.cluster)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(kubelet.run())
            tasks.create_task(pods.run())
            tasks.create_task(follow_machines(kubelet, read, clock=self._clock))

    # ---- workloads ----------------------------------------------------------------------------------------------

    async def create(self, manifests: Sequence[WorkloadManifest[KubernetesObject]]) -> None:
        """Create objects in order. Raises ApiError when the API server refuses one for good."""
        assert self._api is not None, "prepare comes first"
        for manifest in manifests:
            for attempt in range(_ATTEMPTS_MAX):
                try:
                    await self._api.apply(
                        manifest.resource,
                        manifest.name,
                        manifest.body,
                        namespace=manifest.namespace,
                        field_manager=_FIELD_MANAGER,
                    )
                    break
                except ApiError as error:
                    if not (error.is_transient or error.is_not_found) or attempt == _ATTEMPTS_MAX - 1:
                        raise
                    await self._clock.sleep(_RETRY_SECONDS)

    async def scale(self, deployment: str, replicas: int) -> None:
        """Change the number of a Deployment's pods. Raises ApiError."""
        assert self._api is not None, "prepare comes first"
        await self._api.patch(DEPLOYMENTS, deployment, {"spec": {"replicas": replicas}}, namespace=NAMESPACE)

    # ---- figures ------------------------------------------------------------------------------------------------

    def figures(self) -> PlaneFigures:
        """Return what the API server last showed."""
        if self._pods is None or self._kubelet is None:
            return PlaneFigures()
        kinds = Counter(_kind(pod) for pod in self._pods)
        return PlaneFigures(
            running=kinds["running"],
            starting=kinds["starting"],
            pending=kinds["pending"],
            nodes=len(self._kubelet.nodes),
        )

    async def requests(self) -> list[CapacityRequest]:
        """Return the demand as the CapacityRequests say it, for a comparison with a packer."""
        assert self._api is not None, "prepare comes first"
        found: list[CapacityRequest] = []
        token = ""
        while True:
            page = await self._api.list_page(CAPACITY_REQUESTS, continue_token=token)
            for stored in page.items:
                metadata = stored.metadata
                try:
                    found.append(request_of_spec(stored.spec, metadata.namespace, "/".join(metadata.key)))
                except UnmappableRequest:
                    # It is no demand, and says so in its own status.
                    continue
            token = page.continue_token
            if not token:
                return found


def _kind(pod: PodObject) -> str:
    if pod.status.phase in ("Succeeded", "Failed"):
        return "finished"
    if not pod.spec.node_name:
        return "pending"
    return "running" if pod.status.phase == "Running" else "starting"
