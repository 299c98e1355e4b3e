"""Watches the pods of one app and remembers the lowest number of them that was healthy.

Healthy is what a disruption budget counts: Ready and not being deleted. It is judged by a watch of the API server, not
by what an operator or a shard says.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bigfleet.cli.runtime.system import SystemClock, system_rng
from bigfleet.operator.kubernetes.objects import PodObject
from bigfleet.operator.kubernetes.reflector import Reflector
from bigfleet.operator.kubernetes.resources import PODS
from tests.kubernetes.cluster import ClusterUnderTest, eventually, is_ready


class HealthyPods:
    """An ObjectListener that counts the healthy pods of an app."""

    def __init__(self, app: str) -> None:
        self._app = app
        self._healthy: set[str] = set()
        #: The lowest number since `expect`.
        self.lowest = 0

    @property
    def count(self) -> int:
        return len(self._healthy)

    def expect(self) -> None:
        """Remember the lowest number from now on."""
        self.lowest = self.count

    def put(self, stored: PodObject, former: PodObject | None) -> None:
        if (stored.metadata.labels or {}).get("app") != self._app:
            return
        if is_ready(stored) and stored.metadata.deletion_timestamp is None:
            self._healthy.add(stored.metadata.uid)
        else:
            self._drop(stored.metadata.uid)

    def remove(self, former: PodObject) -> None:
        self._drop(former.metadata.uid)

    def _drop(self, uid: str) -> None:
        self._healthy.discard(uid)
        self.lowest = min(self.lowest, self.count)


@asynccontextmanager
async def watched_pods(cluster: ClusterUnderTest, namespace: str, app: str, count: int) -> AsyncIterator[HealthyPods]:
    """Watch the pods of an app, from when `count` of them are healthy."""
    pods = HealthyPods(app)
    reflector = Reflector(cluster.api, PODS, clock=SystemClock(), rng=system_rng(), namespace=namespace)
    reflector.add_listener(pods)
    running = asyncio.create_task(reflector.run())

    async def all_healthy() -> bool:
        return pods.count == count

    try:
        await eventually(all_healthy, f"{namespace}: {app} has not {count} healthy pods")
        pods.expect()
        yield pods
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
