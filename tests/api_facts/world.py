"""What facts about API servers have in common: the world that each is stated in, and the objects that it uses.

What a real server needs some time for, a fact awaits with `eventually`.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from bigfleet.model.clock import Clock
from bigfleet.operator.kubernetes.api import ApiError, EventType, Json, JsonObject, KubernetesApi, Resource, WatchEvent
from bigfleet.operator.kubernetes.objects import CapacityRequestObject, PodObject
from bigfleet.operator.kubernetes.resources import (
    CAPACITY_REQUESTS,
    GROUP,
    PODS,
)

T = TypeVar("T")

#: A rule of an RBAC role.
RoleRule = Mapping[str, Sequence[str]]
_ATTEMPTS = 120


@dataclass(frozen=True, slots=True)
class FactWorld:
    """An API server and a place in it that nothing else uses."""

    #: May do everything.
    api: KubernetesApi
    #: Exists, and is empty.
    namespace: str
    #: Makes names of objects of the cluster unique.
    suffix: str
    clock: Clock
    #: Returns a client that may do in the namespace what the rules of a Role allow, and nothing else.
    restricted: Callable[[Sequence[RoleRule]], Awaitable[KubernetesApi]]
    #: Lets the server forget the history of changes, where that can be asked for.
    forget_history: Callable[[], Awaitable[None]]

    async def eventually(self, check: Callable[[], Awaitable[T | None]]) -> T:
        """Return the first result of `check` that is not None."""
        for _ in range(_ATTEMPTS):
            found = await check()
            if found is not None:
                return found
            await self.clock.sleep(0.5)
        raise AssertionError(f"{check.__qualname__} never held")

    async def create_request(self, name: str, **metadata: Json) -> CapacityRequestObject:
        """Create a CapacityRequest."""
        body = request(name, **metadata)
        return await self.api.create(CAPACITY_REQUESTS, body, namespace=self.namespace)

    async def create_pod(self, name: str, *, node: str = "", labels: Mapping[str, str] | None = None) -> PodObject:
        """Create a pod; one on a node is made Running and Ready."""
        body = pod(name, node=node, labels=labels or {})
        created = await self.api.create(PODS, body, namespace=self.namespace)
        if not node:
            return created
        status: JsonObject = {"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}}
        return await self.api.patch(PODS.status, name, status, namespace=self.namespace)


Fact = Callable[[FactWorld], Awaitable[None]]


def request(name: str, **metadata: Json) -> dict[str, Any]:
    """Return a CapacityRequest as it is written."""
    return {
        "apiVersion": f"{GROUP}/v1alpha1",
        "kind": "CapacityRequest",
        "metadata": {"name": name, **metadata},
        "spec": {"priority": 0, "resources": {"cpu": "1"}},
    }


def pod(name: str, *, node: str, labels: Mapping[str, str]) -> dict[str, Any]:
    """Return a pod as it is written."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels},
        "spec": {"containers": [{"name": "main", "image": "none"}], **({"nodeName": node} if node else {})},
    }


def eviction(name: str, namespace: str, **options: Json) -> dict[str, Any]:
    """Return an Eviction as it is written."""
    return {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name, "namespace": namespace},
        "deleteOptions": options,
    }


async def refused(call: Awaitable[Any]) -> ApiError:
    """Return the error with which a call is refused."""
    with pytest.raises(ApiError) as caught:
        await call
    return caught.value


async def events_until(
    world: FactWorld, resource: Resource[T], version: str, count: int, label_selector: str = ""
) -> list[WatchEvent[T]]:
    """Return the first `count` events of a watch, bookmarks apart."""
    events: list[WatchEvent[T]] = []
    async with world.api.watch(
        resource, resource_version=version, namespace=world.namespace, label_selector=label_selector
    ) as stream:
        async for event in stream:
            if event.type is not EventType.BOOKMARK:
                events.append(event)
            if len(events) == count:
                return events
    raise AssertionError(f"the watch ended after {events}")
