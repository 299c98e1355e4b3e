"""Runs several clusters, each a control plane of its own with our custom resource definitions, for closed loops.

    async with ClosedLoop(program, tmp_path) as loop:
        east, west = await loop.add_clusters("east", "west")
        following = asyncio.create_task(east.follow_machines(read_machines_of_the_provider))
        ...  # the operator and the pod controller of each cluster: `cluster.plane.service_account_kubeconfig(...)`
        await east.running_pods(namespace, 300)

A cluster is never shared: Nodes, UpcomingNodes and AvailableCapacities are cluster-scoped. A control plane takes 0.7 GB
of memory and most of a core while it starts.
"""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType

from bigfleet.demo.kubernetes.control_plane import ControlPlane
from tests.kubernetes.cluster import ClusterUnderTest, new_plane


class ClosedLoop:
    """The clusters of one test; all of them end with the context."""

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
