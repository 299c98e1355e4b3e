"""Keeps a local copy of the objects of one kind up to date: lists them, then watches, and calls listeners.

A list replaces the copy by its difference: objects that vanished while nothing was watched are removed like deleted
ones. The copy is never emptied because the server is away; `failing_seconds` says for how long it may have been out of
date. Listeners are called on the event loop, in order. One that raises ends `run` with its exception, because
it is unknown what it has missed.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import structlog

from bigfleet.model.clock import Clock
from bigfleet.model.ids import Rng
from bigfleet.operator.backoff import doubled_seconds
from bigfleet.operator.kubernetes.api import (
    INVALID_RESPONSE,
    SILENT,
    ApiError,
    EventType,
    KubernetesApi,
    Resource,
    WatchEvent,
)
from bigfleet.operator.kubernetes.objects import KubernetesObject
from bigfleet.operator.kubernetes.views import ObjectListener

K = TypeVar("K", bound=KubernetesObject)

_TOO_MANY_REQUESTS = 429

log = structlog.get_logger(__name__)

_Key = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReflectorSettings:
    """Sizes and times of a reflector."""

    page_size: int = 500
    #: The server ends a watch after this long to the double of it, drawn for each, so that not all end at once.
    watch_seconds: int = 300
    backoff_first_seconds: float = 0.8
    backoff_seconds_max: float = 30.0
    #: A watch that was open for this long, or carried an event, is healthy.
    healthy_seconds: float = 1.0
    #: A watch that was open for this long starts the back-off over.
    steady_seconds: float = 10.0
    #: After so many changes of a list the loop runs other tasks.
    changes_at_once_max: int = 500


class Reflector(Generic[K]):
    """An ObjectView that follows the API server while `run` runs."""

    def __init__(
        self,
        api: KubernetesApi,
        resource: Resource[K],
        *,
        clock: Clock,
        rng: Rng,
        namespace: str = "",
        label_selector: str = "",
        field_selector: str = "",
        transform: Callable[[K], K] | None = None,
        settings: ReflectorSettings | None = None,
    ) -> None:
        """Take what to follow; `namespace` "" is all. `transform` returns what is stored in place of an object, with
        the same name, namespace, UID and resource version; it saves memory where most of an object is never read.
        """
        self._api = api
        self._resource = resource
        self._clock = clock
        self._rng = rng
        self._namespace = namespace
        self._label_selector = label_selector
        self._field_selector = field_selector
        self._transform = transform
        self._settings = settings or ReflectorSettings()
        self._listeners: list[ObjectListener[K]] = []
        self._objects: dict[_Key, K] = {}
        self._synced = asyncio.Event()
        #: Where the next watch starts; "" when the next step is a list.
        self._version = ""
        self._failing_since_seconds: float | None = None
        #: When the watch that is open now was opened.
        self._opened_seconds: float | None = None
        self._last_event_seconds: float | None = None
        self.lists_total = 0
        self.watches_total = 0
        self.failures_total = 0

    # ---- the view -----------------------------------------------------------------------------------------------

    @property
    def is_synced(self) -> bool:
        """Return whether a complete list has been read and handed to the listeners since the process started."""
        return self._synced.is_set()

    @property
    def last_event_at(self) -> float | None:
        """When the server last sent anything (a list, an event, a bookmark), on the clock's monotonic time."""
        return self._last_event_seconds

    @property
    def resource(self) -> Resource[K]:
        """What is followed."""
        return self._resource

    async def wait_synced(self) -> None:
        """Return once `is_synced`."""
        await self._synced.wait()

    def failing_seconds(self) -> float:
        """Return for how long the view may have been out of date.

        0 while a watch is healthy. Else the time since the first failure after the last healthy watch; if the
        connection went silent, since the server was last heard. A watch is healthy once it has carried an event or has
        been open for a second, so that one which is refused as soon as it is open ends nothing.
        """
        if self._failing_since_seconds is None or self._is_healthy():
            return 0.0
        return max(self._clock.monotonic_seconds() - self._failing_since_seconds, 0.0)

    def get(self, name: str, namespace: str = "") -> K | None:
        """Return one object, None when it is absent."""
        return self._objects.get((namespace, name))

    def __iter__(self) -> Iterator[K]:
        """Iterate over all objects as of now, in no particular order."""
        return iter(list(self._objects.values()))

    def __len__(self) -> int:
        """Return how many objects there are."""
        return len(self._objects)

    def add_listener(self, listener: ObjectListener[K]) -> None:
        """Call a listener for every change from now on, and first for every object that is there."""
        self._listeners.append(listener)
        for stored in self:
            listener.put(stored, None)

    # ---- the flow -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Follow the server until cancelled. Raises what a listener or the transform raises, and nothing else."""
        attempt = 0
        try:
            while True:
                try:
                    if not self._version:
                        await self._list()
                    await self._watch()
                    continue
                except ApiError as error:
                    if self._failed(error):
                        attempt = 0
                    attempt += 1
                    delay_seconds = self._delay_seconds(attempt, error)
                    report = log.info if _is_routine(error) else log.warning
                    report(
                        "operator.watch_failed",
                        resource=self._resource.label,
                        error=str(error),
                        lists_again=not self._version,
                        retry_seconds=round(delay_seconds, 3),
                    )
                await self._clock.sleep(delay_seconds)
        finally:
            self._close_watch()
            if self._failing_since_seconds is None:
                self._failing_since_seconds = self._clock.monotonic_seconds()

    async def _list(self) -> None:
        """Read all pages and bring the copy to what they say."""
        fresh: dict[_Key, K] = {}
        token = ""
        while True:
            page = await self._api.list_page(
                self._resource,
                namespace=self._namespace,
                limit=self._settings.page_size,
                continue_token=token,
                label_selector=self._label_selector,
                field_selector=self._field_selector,
            )
            for found in page.items:
                key = found.metadata.key
                former = self._objects.get(key)
                unchanged = former is not None and _is_same(former, found)
                # The one in memory stays, so that a list of an unchanged cluster takes no second copy of it.
                fresh[key] = former if unchanged and former is not None else self._slim(found)
            self._last_event_seconds = self._clock.monotonic_seconds()
            token = page.continue_token
            if not token:
                break
        await self._replace(fresh)
        self._version = page.resource_version
        self.lists_total += 1
        self._synced.set()

    async def _replace(self, fresh: dict[_Key, K]) -> None:
        """Make the copy equal to `fresh`.

        What is new comes before what is gone: a reader between two steps may see both, never less than what both the
        old and the new state hold.
        """
        changes = 0
        for key, found in fresh.items():
            if self._objects.get(key) is not found:
                self._put(key, found)
                changes += 1
                if changes % self._settings.changes_at_once_max == 0:
                    await self._clock.sleep(0)
        for key in [key for key in self._objects if key not in fresh]:
            self._remove(key)
            changes += 1
            if changes % self._settings.changes_at_once_max == 0:
                await self._clock.sleep(0)

    async def _watch(self) -> None:
        """Apply events until the server ends the watch. Raises ApiError when it ended before its time."""
        opened_seconds = 0.0
        first_version = self._version
        timeout_seconds = int(self._settings.watch_seconds * self._rng.uniform(1.0, 2.0))
        try:
            async with self._api.watch(
                self._resource,
                resource_version=self._version,
                namespace=self._namespace,
                label_selector=self._label_selector,
                field_selector=self._field_selector,
                timeout_seconds=timeout_seconds,
            ) as events:
                self._opened_seconds = opened_seconds = self._clock.monotonic_seconds()
                self.watches_total += 1
                async for event in events:
                    self._apply(event)
        except ApiError as error:
            if error.is_expired or error.reason == INVALID_RESPONSE:
                # What cannot be read now would not be read at the next attempt either.
                self._version = ""
            raise
        lasted_seconds = self._clock.monotonic_seconds() - opened_seconds
        if self._version == first_version and lasted_seconds < self._settings.healthy_seconds:
            # Without this a server that ends every watch at once would be asked without end.
            raise ApiError(0, "ShortWatch", f"watch {self._resource.label}: the server ended it at once")
        self._close_watch()

    def _apply(self, event: WatchEvent[K]) -> None:
        self._last_event_seconds = self._clock.monotonic_seconds()
        self._failing_since_seconds = None
        found = event.object
        if found is not None:
            key = found.metadata.key
            if event.type is EventType.DELETED:
                if key in self._objects:
                    self._remove(key)
            else:
                former = self._objects.get(key)
                if former is None or not _is_same(former, found):
                    self._put(key, self._slim(found))
        if event.resource_version:
            self._version = event.resource_version

    # ---- the copy -----------------------------------------------------------------------------------------------

    def _slim(self, found: K) -> K:
        return found if self._transform is None else self._transform(found)

    def _put(self, key: _Key, found: K) -> None:
        former = self._objects.get(key)
        if former is not None and former.metadata.uid != found.metadata.uid:
            # Deleted and created again under the same name while no watch was open: not the same object.
            self._remove(key)
            former = None
        self._objects[key] = found
        for listener in self._listeners:
            listener.put(found, former)

    def _remove(self, key: _Key) -> None:
        former = self._objects.pop(key)
        for listener in self._listeners:
            listener.remove(former)

    # ---- failures -----------------------------------------------------------------------------------------------

    def _open_seconds(self) -> float:
        """Return for how long the watch has been open, 0 without one."""
        return 0.0 if self._opened_seconds is None else self._clock.monotonic_seconds() - self._opened_seconds

    def _is_healthy(self) -> bool:
        return self._opened_seconds is not None and self._open_seconds() >= self._settings.healthy_seconds

    def _close_watch(self) -> None:
        if self._is_healthy():
            self._failing_since_seconds = None
        self._opened_seconds = None

    def _failed(self, error: ApiError) -> bool:
        """Note a failure; say whether the watch before it was steady, so that the back-off starts over."""
        open_seconds = self._open_seconds()
        since_seconds = self._clock.monotonic_seconds()
        if error.reason == SILENT and self._opened_seconds is not None:
            # When the server was lost is unknown: what it sent last is the last that is known.
            since_seconds = max(self._opened_seconds, self._last_event_seconds or 0.0)
        self._close_watch()
        if self._failing_since_seconds is None:
            self._failing_since_seconds = since_seconds
        self.failures_total += 1
        return open_seconds >= self._settings.steady_seconds

    def _delay_seconds(self, attempt: int, error: ApiError) -> float:
        """Return how long to wait before the next attempt (from 1): full jitter, but what the server asks for."""
        ceiling_seconds = doubled_seconds(
            attempt - 1,
            first_seconds=self._settings.backoff_first_seconds,
            seconds_max=self._settings.backoff_seconds_max,
        )
        return max(self._rng.uniform(0.0, ceiling_seconds), error.retry_after_seconds or 0.0)


def _is_same(former: KubernetesObject, found: KubernetesObject) -> bool:
    """Return whether two objects of one name are the same at the same version."""
    return (
        former.metadata.resource_version == found.metadata.resource_version
        and former.metadata.uid == found.metadata.uid
    )


def _is_routine(error: ApiError) -> bool:
    """Return whether an API server that is well ends a watch so.

    It ends those that fall behind, asks clients to come later while it starts, and sends no bookmarks for a kind of
    which it has seen no change since its start.
    """
    return error.is_expired or error.status == _TOO_MANY_REQUESTS or error.reason == SILENT
