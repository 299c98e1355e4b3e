"""Implements `KubernetesApi` on a simulated API server: one client of it.

It has its user, rights and faults, and records its calls.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from bigfleet.operator.kubernetes.api import Json, JsonObject, Page, PatchKind, Resource, WatchEvent
from bigfleet.sim.kubernetes.faults import ApiCall, ApiFaults
from bigfleet.sim.kubernetes.kinds import Stored, kind_key, plain
from bigfleet.sim.kubernetes.refusals import AnyResource, forbidden, unreachable
from bigfleet.sim.kubernetes.rights import EVERYTHING, Rights
from bigfleet.sim.kubernetes.selectors import select
from bigfleet.sim.kubernetes.server import InMemoryApiServer, version_number
from bigfleet.sim.kubernetes.watching import WatchStream

T = TypeVar("T")

#: How long a client waits for the answer of a server that hangs.
REQUEST_TIMEOUT_SECONDS = 30.0
_CALLS_MAX = 10_000


class InMemoryApi:
    """One client of a simulated API server.

    Each call waits at least one turn of the event loop before it takes effect, so that flows interleave as they do with
    a real server. What fails is said by `faults` and by the faults of the server.
    """

    def __init__(
        self,
        server: InMemoryApiServer,
        *,
        user: str = "admin",
        rights: Rights = EVERYTHING,
        faults: ApiFaults | None = None,
    ) -> None:
        self.server = server
        self.user = user
        self.rights = rights
        self.faults = faults or ApiFaults()
        #: The last calls in order, those that failed among them.
        self.calls: deque[ApiCall] = deque(maxlen=_CALLS_MAX)
        #: The open watches, each with what ends its subscription.
        self._watches: dict[WatchStream[Any], Callable[[], None]] = {}

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
        """Return one page of the objects by namespace and name; all pages of a list are as of one version."""
        call = await self._begin("list", resource, namespace, "")
        page = self.server.list_objects(
            resource,
            namespace=namespace,
            limit=limit,
            continue_token=continue_token,
            resource_version=resource_version,
            label_selector=label_selector,
            field_selector=field_selector,
        )
        items = [self.server.decode(resource, stored) for stored in page.items]
        self._check_answer(call)
        return Page(items=items, resource_version=str(page.version), continue_token=page.continue_token)

    @asynccontextmanager
    async def watch(
        self,
        resource: Resource[T],
        *,
        resource_version: str,
        namespace: str = "",
        label_selector: str = "",
        field_selector: str = "",
        timeout_seconds: int = 300,
    ) -> AsyncIterator[AsyncIterator[WatchEvent[T]]]:
        """Open a watch; an expired version raises ApiError 410 from the iterator, not when the watch is opened."""
        await self._begin("watch", resource, namespace, "")
        server = self.server
        server.check_served(resource)
        stream: WatchStream[T] = WatchStream(
            resource.label,
            namespace,
            select(resource, label_selector, field_selector),
            lambda stored: server.decode(resource, stored),
            self._is_silent,
        )
        if resource_version in ("", "0"):
            for record in server.store.records(kind_key(resource), namespace):
                stream.list_first(record.object)
        else:
            server.replay(stream, resource, version_number(resource_version))
        unsubscribe = server.store.subscribe(kind_key(resource), stream.hear)
        timer = asyncio.get_running_loop().create_task(self._keep_time(stream, timeout_seconds))
        server.watches.append(stream)
        self._watches[stream] = unsubscribe
        try:
            yield stream.events()
        finally:
            timer.cancel()
            self._forget(stream)
            # Not awaited itself: the caller's own cancellation may arrive here, and must not be taken for the timer's.
            await asyncio.wait((timer,))

    async def get(self, resource: Resource[T], name: str, *, namespace: str = "") -> T:
        """Return one object."""
        call = await self._begin("get", resource, namespace, name)
        return self._answer(call, resource, self.server.get(resource, (namespace, name)))

    async def create(self, resource: Resource[T], body: JsonObject, *, namespace: str = "", name: str = "") -> T:
        """Create an object, evict a pod, request a token, or ask for the rights of this client."""
        call = await self._begin("create", resource, namespace, name)
        server, key = self.server, (namespace, name)
        match (resource.plural, resource.subresource):
            case ("selfsubjectaccessreviews", _):
                stored = self._review(plain(body))
            case ("pods", "eviction"):
                stored = server.evict(resource, body, key)
            case ("serviceaccounts", "token"):
                stored = server.request_token(resource, body, key)
            case _:
                stored = server.create(resource, body, key, self.user)
        return self._answer(call, resource, stored)

    async def replace(self, resource: Resource[T], name: str, body: JsonObject, *, namespace: str = "") -> T:
        """Replace an object or its status."""
        call = await self._begin("update", resource, namespace, name)
        return self._answer(call, resource, self.server.replace(resource, body, (namespace, name), self.user))

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
        """Apply server-side; creating an absent object takes the right to create as well."""
        call = await self._begin("patch", resource, namespace, name)
        key = (namespace, name)
        if self.server.store.get(kind_key(resource), key) is None:
            self._check_right("create", resource, namespace, name)
        stored = self.server.apply(resource, body, key, field_manager, force=force)
        return self._answer(call, resource, stored)

    async def patch(
        self,
        resource: Resource[T],
        name: str,
        body: JsonObject | list[JsonObject],
        *,
        namespace: str = "",
        kind: PatchKind = PatchKind.MERGE,
    ) -> T:
        """Patch an object or its status."""
        call = await self._begin("patch", resource, namespace, name)
        given: Json = [*body] if isinstance(body, list) else body
        return self._answer(call, resource, self.server.patch(resource, given, (namespace, name), kind, self.user))

    async def delete(
        self,
        resource: Resource[T],
        name: str,
        *,
        namespace: str = "",
        uid: str = "",
        grace_seconds: int | None = None,
    ) -> None:
        """Delete an object; a pod on a node goes on terminating until it is deleted with grace 0."""
        call = await self._begin("delete", resource, namespace, name)
        self.server.delete(resource, (namespace, name), uid, grace_seconds)
        self._check_answer(call)

    def disconnect(self) -> None:
        """Cut this client off from the server: its watches break, and its calls fail until `reconnect`."""
        self.faults.is_down = True
        for watch in list(self._watches):
            watch.break_connection("no route to host")

    def vanish(self) -> None:
        """Forget the open watches, as a server does with those of a client that was killed."""
        for watch in list(self._watches):
            self._forget(watch)

    def reconnect(self) -> None:
        """Let this client reach the server again."""
        self.faults.is_down = False

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _forget(self, stream: WatchStream[Any]) -> None:
        unsubscribe = self._watches.pop(stream, None)
        if unsubscribe is not None:
            unsubscribe()
            self.server.watches.remove(stream)

    def _is_silent(self) -> bool:
        return self.faults.is_hanging or self.server.faults.is_hanging

    async def _begin(self, verb: str, resource: AnyResource, namespace: str, name: str) -> ApiCall:
        """Bring a call to the server. Raises ApiError when it does not arrive, or may not be made."""
        call = ApiCall(verb, resource.label, namespace, name)
        self.calls.append(call)
        both = (self.server.faults, self.faults)
        await self.server.clock.sleep(sum(faults.latency_seconds for faults in both))
        if any(faults.is_down for faults in both):
            raise unreachable(str(call), "connection refused")
        if self._is_silent():
            await self.server.clock.sleep(REQUEST_TIMEOUT_SECONDS)
            raise unreachable(str(call), f"no answer for {REQUEST_TIMEOUT_SECONDS:g} s")
        for faults in both:
            refusal = faults.refuse(call)
            if refusal is not None:
                raise refusal
        self._check_right(verb, resource, namespace, name)
        return call

    def _check_right(self, verb: str, resource: AnyResource, namespace: str, name: str) -> None:
        # Everybody may ask for their own rights.
        if resource.plural == "selfsubjectaccessreviews":
            return
        path = f"{resource.plural}/{resource.subresource}" if resource.subresource else resource.plural
        if not self.rights.allow(verb, resource.group, path, namespace, name):
            raise forbidden(resource, name, self.user, verb, namespace)

    def _answer(self, call: ApiCall, resource: Resource[T], stored: Stored) -> T:
        self._check_answer(call)
        return self.server.decode(resource, stored)

    def _check_answer(self, call: ApiCall) -> None:
        if any(faults.lose_answer(call) for faults in (self.server.faults, self.faults)):
            raise unreachable(str(call), "connection reset by peer before the answer")

    def _review(self, given: Stored) -> Stored:
        asked = given.get("spec", {}).get("resourceAttributes") or {}
        parts = [asked["resource"], asked.get("subresource", "")]
        path = "/".join(part for part in parts if part)
        allowed = self.rights.allow(
            asked["verb"], asked.get("group", ""), path, asked.get("namespace", ""), asked.get("name", "")
        )
        return {**given, "status": {"allowed": allowed}}

    async def _keep_time(self, stream: WatchStream[Any], timeout_seconds: float) -> None:
        """Send bookmarks, and end the watch when its time is over or when it has been silent for too long."""
        clock, interval = self.server.clock, self.server.bookmark_seconds
        left, was_silent = float(timeout_seconds), False
        while True:
            await clock.sleep(min(interval, left))
            left -= min(interval, left)
            if self._is_silent():
                # Two missed bookmarks, or one and the end.
                if was_silent or left <= 0:
                    stream.break_connection("silent for too long")
                    return
                was_silent, left = True, max(left, interval)
                continue
            was_silent = False
            stream.bookmark(self.server.store.version)
            if left <= 0:
                stream.end()
                return
