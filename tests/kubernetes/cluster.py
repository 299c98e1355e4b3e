"""One cluster as tests see it: clients of a real control plane, machines that boot on demand, waits for what follows.

`ClusterUnderTest` is the building block of closed loops: give `machine_booted` and `machine_gone` to what stands
for the provider, and pods run on the machines that it makes.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sized
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import yaml

from bigfleet.cli.runtime.system import SystemClock, SystemIds, system_rng
from bigfleet.demo.kubernetes.audit_log import AuditedRequest, read_audit_log
from bigfleet.demo.kubernetes.components import Component
from bigfleet.demo.kubernetes.control_plane import ControlPlane, ControlPlaneSettings
from bigfleet.demo.kubernetes.fake_node import FakeNode
from bigfleet.demo.kubernetes.kubelet import FakeKubelet, KubeletSettings
from bigfleet.demo.kubernetes.machine_nodes import follow_machines
from bigfleet.operator.kubernetes.api import ApiError, JsonObject, Resource
from bigfleet.operator.kubernetes.http import HttpKubernetesApi
from bigfleet.operator.kubernetes.kubeconfig import load_endpoint
from bigfleet.operator.kubernetes.objects import NodeObject, PodObject
from bigfleet.operator.kubernetes.resources import CAPACITY_REQUESTS, NODES, PODS
from tests.kubernetes.kinds import DEFINITIONS, NAMESPACES, SERVICE_ACCOUNTS
from tests.patience import PATIENCE_SECONDS, wait_until_async

T = TypeVar("T")

ROOT = Path(__file__).resolve().parent.parent.parent
DEFINITIONS_FOLDER = ROOT / "deploy" / "crds"
#: Fast enough that a test sees several, rare enough that many nodes cost little.
TEST_KUBELET = KubeletSettings(heartbeat_seconds=5.0, termination_seconds_max=0.2)
NOT_READY_TAINT = "node.kubernetes.io/not-ready"
_POLL_SECONDS = 0.1


def new_plane(
    program: Path, folder: Path, *, audit: bool = True, flags: Mapping[Component, tuple[str, ...]] | None = None
) -> ControlPlane:
    """Return a control plane that has not been started."""
    settings = ControlPlaneSettings(
        program=program, folder=folder, audit=audit, flags=flags or {}, ready_seconds_max=PATIENCE_SECONDS
    )
    return ControlPlane(settings, clock=SystemClock(), ids=SystemIds(), rng=system_rng())


def client_of(kubeconfig: Path, *, qps: float = 0.0) -> HttpKubernetesApi:
    """Return a client for a kubeconfig, without a limit on its rate unless `qps` is given."""
    clock = SystemClock()
    endpoint = load_endpoint(clock=clock, environment={}, kubeconfig=kubeconfig)
    return HttpKubernetesApi(endpoint, clock=clock, qps=qps, user_agent="bigfleet-tests")


async def eventually(read: Callable[[], Awaitable[T | None]], failure: str, *, held_seconds: float = 0.0) -> T:
    """Return what `read` returns once that is true. Raises AssertionError with what it returned last.

    `held_seconds` is for how long a rule may hold it back.
    """
    last: T | None = None

    async def holds() -> bool:
        nonlocal last
        try:
            last = await read()
        except ApiError as error:
            # An API server that was restarted says so for a while.
            if error.is_transient:
                return False
            raise
        return bool(last)

    try:
        await wait_until_async(holds, poll_seconds=_POLL_SECONDS, held_seconds=held_seconds)
    except TimeoutError:
        raise AssertionError(f"{failure}; at last it was {last!r}") from None
    assert last is not None
    return last


async def until_nothing(
    read: Callable[[], Awaitable[Sized]], failure: str, *, poll_seconds: float = _POLL_SECONDS
) -> None:
    """Return once `read` returns something empty. Raises AssertionError with what it returned last."""
    last: Sized = ""

    async def is_nothing() -> bool:
        nonlocal last
        try:
            last = await read()
        except ApiError as error:
            if not error.is_transient:
                raise
            last = str(error)
        return not last

    try:
        await wait_until_async(is_nothing, poll_seconds=poll_seconds)
    except TimeoutError:
        raise AssertionError(f"{failure}: {last!r}") from None


class ClusterUnderTest:
    """One control plane with an administrator's client and machines. Use it as an async context manager.

    The plane must run already and goes on afterwards; machines that are left are removed. Namespaces that are left are
    deleted, without waiting for their ends.
    """

    def __init__(self, plane: ControlPlane, *, kubelet: KubeletSettings = TEST_KUBELET) -> None:
        self.plane = plane
        self._kubelet_settings = kubelet
        self._namespaces: list[str] = []

    async def __aenter__(self) -> "ClusterUnderTest":
        self.api = client_of(self.plane.admin_kubeconfig)
        self.kubelet = FakeKubelet(self.api, clock=SystemClock(), rng=system_rng(), settings=self._kubelet_settings)
        self._running = asyncio.create_task(self.kubelet.run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await asyncio.gather(*(self.kubelet.remove_node(name) for name in list(self.kubelet.nodes)))
            await self.remove_namespaces()
        finally:
            self._running.cancel()
            (ended,) = await asyncio.gather(self._running, return_exceptions=True)
            await self.api.aclose()
        if isinstance(ended, Exception):
            raise ended

    # ---- machines

    def machine_booted(self, node: FakeNode) -> None:
        """Let a machine boot: its Node appears and becomes Ready as `node` says."""
        self.kubelet.add_node(node)

    async def machine_gone(self, name: str) -> None:
        """Let a machine vanish with its Node and its pods; an unknown one is ignored."""
        await self.kubelet.remove_node(name)

    async def follow_machines(self, read: Callable[[], Awaitable[Mapping[str, FakeNode]]]) -> None:
        """Boot and remove machines so that they are those that `read` returns, by name, until this is cancelled.

        `read` stands for the provider: what it names first has booted, what it no longer names has vanished.
        """
        await follow_machines(self.kubelet, read, clock=SystemClock(), poll_seconds=_POLL_SECONDS)

    # ---- objects

    async def make_namespace(self) -> str:
        """Create a namespace with a name of its own, in which pods are admitted, and return the name."""
        name = f"test-{uuid.uuid4().hex[:10]}"
        await self.api.create(NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        self._namespaces.append(name)
        # A pod is refused until the controller manager has made the service account of its namespace.
        await self.found(SERVICE_ACCOUNTS, "default", name)
        return name

    async def remove_namespaces(self) -> None:
        """Delete the namespaces that were made, without waiting for their ends."""
        while self._namespaces:
            name = self._namespaces.pop()
            # The namespace controller of a young cluster does not know our definitions yet. What it overlooks stays for
            # ever, and is demand in every later test.
            with suppress(ApiError):
                for request in (await self.api.list_page(CAPACITY_REQUESTS, namespace=name, limit=0)).items:
                    await self.api.delete(CAPACITY_REQUESTS, request.metadata.name, namespace=name)
            with suppress(ApiError):
                await self.api.delete(NAMESPACES, name)

    async def read(self, resource: Resource[T], name: str, namespace: str = "") -> T | None:
        """Return an object, None when it is absent."""
        try:
            return await self.api.get(resource, name, namespace=namespace)
        except ApiError as error:
            if error.is_not_found:
                return None
            raise

    async def found(self, resource: Resource[T], name: str, namespace: str = "") -> T:
        """Return an object once it exists."""
        return await eventually(
            lambda: self.read(resource, name, namespace), f"{resource.label} {namespace}/{name} did not appear"
        )

    async def gone(self, resource: Resource[T], name: str, namespace: str = "") -> None:
        """Return once an object does not exist."""

        async def is_gone() -> bool:
            return await self.read(resource, name, namespace) is None

        await eventually(is_gone, f"{resource.label} {namespace}/{name} did not go")

    async def pods(self, namespace: str) -> list[PodObject]:
        """Return the pods of a namespace by name."""
        page = await self.api.list_page(PODS, namespace=namespace, limit=0)
        return sorted(page.items, key=lambda pod: pod.metadata.name)

    async def running_pods(self, namespace: str, count: int) -> list[PodObject]:
        """Return the pods of a namespace once there are `count`, all of them running and Ready."""

        async def read() -> list[PodObject] | None:
            found = await self.pods(namespace)
            return found if len(found) == count and all(is_ready(pod) for pod in found) else None

        return await eventually(read, f"{namespace} has not {count} running pods: {await self.pods(namespace)}")

    async def unschedulable_pods(self, namespace: str, count: int) -> list[PodObject]:
        """Return the pods of a namespace that the scheduler has found no room for, once there are `count`."""

        async def read() -> list[PodObject] | None:
            found = [pod for pod in await self.pods(namespace) if is_unschedulable(pod)]
            return found if len(found) == count else None

        return await eventually(read, f"{namespace} has not {count} unschedulable pods")

    async def ready_node(self, name: str) -> NodeObject:
        """Return a Node once it is Ready and the controller manager lets pods onto it."""

        async def read() -> NodeObject | None:
            node = await self.read(NODES, name)
            taints = {taint.key for taint in (node.spec.taints or ())} if node else set()
            return node if node and node.is_ready and NOT_READY_TAINT not in taints else None

        return await eventually(read, f"node {name} is not Ready")

    async def install_definitions(self, folder: Path = DEFINITIONS_FOLDER) -> list[str]:
        """Install the custom resource definitions of a folder; return their names once all are served."""
        documents = definitions_in(folder)
        assert documents, f"{folder} has no custom resource definitions"
        for name, document in documents.items():
            await self.api.apply(DEFINITIONS, name, document, field_manager="bigfleet-tests")
        for name in documents:
            await eventually(partial(self._is_served, name), f"{name} is not Established")
        return list(documents)

    async def _is_served(self, name: str) -> bool:
        definition = await self.api.get(DEFINITIONS, name)
        return any(each.type == "Established" and each.status == "True" for each in definition.status.conditions or ())

    # ---- clients with fewer rights

    @asynccontextmanager
    async def as_service_account(self, namespace: str, name: str) -> AsyncIterator[HttpKubernetesApi]:
        """Open a client with a token of an existing service account."""
        async with client_of(await self.plane.service_account_kubeconfig(namespace, name)) as api:
            yield api

    def audited(self, *, is_eviction: bool = False) -> list[AuditedRequest]:
        """Return the changes that the API server has answered, in that order; all, or evictions alone."""
        requests = read_audit_log(self.plane.files.audit_log)
        return [each for each in requests if each.is_eviction] if is_eviction else requests


class ClosedLoop:
    """Several clusters of one test, each a control plane of its own with our custom resource definitions.

        async with ClosedLoop(program, tmp_path) as loop:
            east, west = await loop.add_clusters("east", "west")

    All of them end with the context. A cluster is never shared: Nodes, UpcomingNodes and AvailableCapacities are
    cluster-scoped. A control plane takes 0.7 GB of memory and most of a core while it starts.
    """

    def __init__(self, program: Path, folder: Path) -> None:
        self.clusters: dict[str, ClusterUnderTest] = {}
        self._program = program
        self._folder = folder
        self._exits = AsyncExitStack()

    async def __aenter__(self) -> "ClosedLoop":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._exits.aclose()

    async def add_clusters(self, *names: str) -> list[ClusterUnderTest]:
        """Start a control plane for each name, install our definitions, and return the clusters in that order."""
        planes = [new_plane(self._program, self._folder / name) for name in names]
        for plane in planes:
            self._exits.push_async_callback(plane.stop)
        await asyncio.gather(*(plane.start() for plane in planes))
        return [await self._open(name, plane) for name, plane in zip(names, planes, strict=True)]

    async def _open(self, name: str, plane: ControlPlane) -> ClusterUnderTest:
        cluster = await self._exits.enter_async_context(ClusterUnderTest(plane))
        await cluster.install_definitions()
        self.clusters[name] = cluster
        return cluster


def definitions_in(folder: Path) -> dict[str, JsonObject]:
    """Return the custom resource definitions of a folder by name."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.yaml"))]
    documents = [document for text in texts for document in yaml.safe_load_all(text) if document]
    return {each["metadata"]["name"]: each for each in documents if each["kind"] == DEFINITIONS.kind}


def is_ready(pod: PodObject) -> bool:
    """Return whether a pod runs and its condition Ready is True."""
    return pod.status.phase == "Running" and any(
        each.type == "Ready" and each.status == "True" for each in pod.status.conditions or ()
    )


def is_unschedulable(pod: PodObject) -> bool:
    """Return whether the scheduler has found no room for a pod."""
    return any(
        each.type == "PodScheduled" and each.status == "False" and each.reason == "Unschedulable"
        for each in pod.status.conditions or ()
    )
