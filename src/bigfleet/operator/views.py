"""Follows the objects of one cluster that the operator reads: one reflector per kind.

They run also in a process that does not lead, so that a new leader starts with what is stored. This module does not
write.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from bigfleet.model.clock import Clock
from bigfleet.model.ids import Rng
from bigfleet.operator.kubernetes.api import KubernetesApi, Resource
from bigfleet.operator.kubernetes.reflector import K, Reflector
from bigfleet.operator.kubernetes.resources import (
    AVAILABLE_CAPACITIES,
    CAPACITY_REQUESTS,
    DAEMON_SETS,
    NODES,
    PODS,
    UPCOMING_NODES,
)
from bigfleet.operator.kubernetes.shared_parts import SharedRequestParts
from bigfleet.operator.pod_reduction import PodReduction


class OperatorViews:
    """The reflectors of one cluster."""

    def __init__(self, api: KubernetesApi, *, clock: Clock, rng: Rng) -> None:
        def follow(resource: Resource[K], transform: Callable[[K], K] | None = None) -> Reflector[K]:
            return Reflector(api, resource, clock=clock, rng=rng, transform=transform)

        self.capacity_requests = follow(CAPACITY_REQUESTS, SharedRequestParts().of)
        self.pods = follow(PODS, PodReduction())
        self.nodes = follow(NODES)
        self.daemon_sets = follow(DAEMON_SETS)
        self.upcoming_nodes = follow(UPCOMING_NODES)
        self.available_capacities = follow(AVAILABLE_CAPACITIES)

    def _all(self) -> Iterator[Reflector[Any]]:
        yield from (
            self.capacity_requests,
            self.pods,
            self.nodes,
            self.daemon_sets,
            self.upcoming_nodes,
            self.available_capacities,
        )

    def unsynced(self) -> list[str]:
        """Return the kinds that have not been read completely since the process started."""
        return [each.resource.label for each in self._all() if not each.is_synced]

    async def wait_synced(self) -> None:
        """Return once every kind has been read."""
        for each in self._all():
            await each.wait_synced()

    async def run(self) -> None:
        """Follow all kinds until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for each in self._all():
                tasks.create_task(each.run(), name=f"follow-{each.resource.plural}")
