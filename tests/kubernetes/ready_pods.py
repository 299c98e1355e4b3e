"""Watches the pods of one app and remembers how few healthy ones an eviction left.

Healthy is what a disruption budget counts: Ready and not being deleted. It is judged by a watch of the API server, not
by what an operator or a shard says. Only evictions count, because a budget limits nothing else: a ReplicaSet controller
whose API server is killed deletes pods again that it has deleted, and may leave fewer than the budget wants.
"""

import asyncio
from collections.abc import AsyncIterator, Collection
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
        #: Pods that went, and how many healthy ones were left, in that order.
        self._left: list[tuple[str, int]] = []
        self._displaced: set[str] = set()

    @property
    def count(self) -> int:
        return len(self._healthy)

    def lowest_left(self, evicted: Collection[str]) -> int:
        """Return the lowest number of healthy pods that an eviction left, the number now when there was none.

        `evicted` are the pods that the audit log calls so; the watch saw more of them when an API server was killed.
        """
        return min(
            (left for name, left in self._left if name in self._displaced or name in evicted), default=self.count
        )

    def put(self, stored: PodObject, former: PodObject | None) -> None:
        if (stored.metadata.labels or {}).get("app") != self._app:
            return
        if is_ready(stored) and stored.metadata.deletion_timestamp is None:
            self._healthy.add(stored.metadata.uid)
            return
        if stored.is_displaced:
            self._displaced.add(stored.metadata.name)
        self._drop(stored)

    def remove(self, former: PodObject) -> None:
        self._drop(former)

    def _drop(self, pod: PodObject) -> None:
        if pod.metadata.uid in self._healthy:
            self._healthy.remove(pod.metadata.uid)
            self._left.append((pod.metadata.name, self.count))


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
        yield pods
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
