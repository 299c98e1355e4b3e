"""Serves objects to flows in place of an API server, at virtual time and with faults that tests inject."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar, cast

import msgspec

from bigfleet.operator.kubernetes.api import (
    ApiError,
    EventType,
    JsonObject,
    Page,
    PatchKind,
    Resource,
    WatchEvent,
)
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.operator.kubernetes.object_store import ObjectStore

T = TypeVar("T")

BOOKMARK_SECONDS = 60.0


def unreachable(message: str = "connection refused") -> ApiError:
    return ApiError(0, "Unreachable", message)


class Watcher:
    """One open watch."""

    def __init__(self, position: int) -> None:
        self.position = position
        self.wake = asyncio.Event()
        #: How it ends before its time: an error, or True for a clean end.
        self.end: ApiError | bool = False
        #: Sends nothing any more, as a connection whose other side is gone.
        self.is_stalled = False


class FakeApi:
    """A KubernetesApi over one ObjectStore a resource."""

    def __init__(self) -> None:
        self.stores: dict[str, ObjectStore] = {}
        self.watchers: list[Watcher] = []
        self.requests: list[tuple[str, str]] = []
        self.bodies: list[Any] = []
        #: Raised by every request while it is set.
        self.fault: ApiError | None = None
        #: Raised by the next requests, one each, before they do anything.
        self.faults: list[ApiError] = []
        self.seconds_per_request = 0.0
        self.clock = LoopClock()

    def store(self, resource: Resource[Any]) -> ObjectStore:
        return self.stores.setdefault(resource.plural, ObjectStore())

    def changed(self) -> None:
        """Wake the watches after changes of a store."""
        for watcher in self.watchers:
            watcher.wake.set()

    def end_watches(self, end: ApiError | bool) -> None:
        """End every open watch before it sends another event."""
        for watcher in self.watchers:
            watcher.end = end
        self.changed()

    async def request(self, verb: str, resource: Resource[Any]) -> None:
        self.requests.append((verb, resource.label))
        await self.clock.sleep(self.seconds_per_request)
        if self.faults:
            raise self.faults.pop(0)
        if self.fault is not None:
            raise self.fault

    async def list_page(
        self,
        resource: Resource[T],
        *,
        namespace: str = "",
        limit: int = 500,
        continue_token: str = "",
        resource_version: str = "",
        label_selector: str = "",
        field_selector: str = "",
    ) -> Page[T]:
        await self.request("list", resource)
        items, version, token = self.store(resource).page(limit, continue_token)
        return Page(
            items=[msgspec.convert(item, resource.type) for item in items],
            resource_version=str(version),
            continue_token=token,
        )

    def watch(
        self,
        resource: Resource[T],
        *,
        resource_version: str,
        namespace: str = "",
        label_selector: str = "",
        field_selector: str = "",
        timeout_seconds: int = 300,
    ) -> AbstractAsyncContextManager[AsyncIterator[WatchEvent[T]]]:
        return self._watch(resource, int(resource_version), timeout_seconds)

    @asynccontextmanager
    async def _watch(
        self, resource: Resource[T], version: int, timeout_seconds: int
    ) -> AsyncIterator[AsyncIterator[WatchEvent[T]]]:
        await self.request("watch", resource)
        store = self.store(resource)
        watcher = Watcher(store.position(version))
        self.watchers.append(watcher)
        try:
            yield self._events(resource, store, watcher, timeout_seconds)
        finally:
            self.watchers.remove(watcher)

    async def _events(
        self, resource: Resource[T], store: ObjectStore, watcher: Watcher, timeout_seconds: int
    ) -> AsyncIterator[WatchEvent[T]]:
        end_seconds = self.clock.monotonic_seconds() + timeout_seconds
        while True:
            watcher.wake.clear()
            while True:
                if isinstance(watcher.end, ApiError):
                    raise watcher.end
                if watcher.end or self.clock.monotonic_seconds() >= end_seconds:
                    return
                if watcher.is_stalled or watcher.position >= len(store.history):
                    break
                change = store.history[watcher.position]
                watcher.position += 1
                found = msgspec.convert(change.object, resource.type)
                yield WatchEvent(EventType(change.type), found, str(change.version))
            left_seconds = end_seconds - self.clock.monotonic_seconds()
            try:
                async with asyncio.timeout(min(BOOKMARK_SECONDS, left_seconds)):  # expires: bookmarks are due
                    await watcher.wake.wait()
            except TimeoutError:
                if not watcher.is_stalled:
                    yield WatchEvent(EventType.BOOKMARK, None, str(store.version))

    async def get(self, resource: Resource[T], name: str, *, namespace: str = "") -> T:
        await self.request("get", resource)
        return msgspec.convert(self._stored(resource, name, namespace), resource.type)

    def _stored(self, resource: Resource[Any], name: str, namespace: str) -> Any:
        found = self.store(resource).objects.get((namespace, name))
        if found is None:
            raise ApiError(404, "NotFound", f"{resource.label} {name!r} not found")
        return found

    async def create(self, resource: Resource[T], body: JsonObject, *, namespace: str = "", name: str = "") -> T:
        await self.request("create", resource)
        self.bodies.append(body)
        metadata = cast(dict[str, str], body["metadata"])
        if (namespace, metadata["name"]) in self.store(resource).objects:
            raise ApiError(409, "AlreadyExists", f"{metadata['name']!r} exists")
        return self._write(resource, body, metadata["name"], namespace)

    async def replace(self, resource: Resource[T], name: str, body: JsonObject, *, namespace: str = "") -> T:
        await self.request("replace", resource)
        found = self._stored(resource, name, namespace)
        metadata = cast(dict[str, str], body["metadata"])
        if metadata.get("resourceVersion") != found["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", "the object has been modified")
        return self._write(resource, body, name, namespace)

    def _write(self, resource: Resource[T], body: JsonObject, name: str, namespace: str) -> T:
        fields = {field: value for field, value in body.items() if field != "metadata"}
        stored = self.store(resource).put(name, namespace, **fields)
        self.changed()
        return msgspec.convert(stored, resource.type)

    async def apply(
        self,
        resource: Resource[T],
        name: str,
        body: JsonObject,
        *,
        namespace: str = "",
        field_manager: str,
        force: bool = True,
    ) -> T:
        raise AssertionError("nothing here applies")

    async def patch(
        self,
        resource: Resource[T],
        name: str,
        body: JsonObject | list[JsonObject],
        *,
        namespace: str = "",
        kind: PatchKind = PatchKind.MERGE,
    ) -> T:
        raise AssertionError("nothing here patches")

    async def delete(
        self,
        resource: Resource[T],
        name: str,
        *,
        namespace: str = "",
        uid: str = "",
        grace_seconds: int | None = None,
    ) -> None:
        raise AssertionError("nothing here deletes")
