"""Delivers the changes of one kind to one watch: which of them it sees, and as what.

An object that comes to match the selectors is ADDED, one that ceases to is DELETED.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

from bigfleet.operator.kubernetes.api import ApiError, EventType, WatchEvent
from bigfleet.sim.kubernetes.kinds import Stored
from bigfleet.sim.kubernetes.refusals import unreachable
from bigfleet.sim.kubernetes.selectors import Selects
from bigfleet.sim.kubernetes.store import StoredChange

T = TypeVar("T")


class WatchStream(Generic[T]):
    """The events of one open watch, in order; what is delivered while `is_silent` says so arrives later."""

    def __init__(
        self,
        label: str,
        namespace: str,
        selects: Selects,
        decode: Callable[[Stored], T],
        is_silent: Callable[[], bool],
    ) -> None:
        self._label = label
        self._namespace = namespace
        self._selects = selects
        self._decode = decode
        self._is_silent = is_silent
        self._held: list[WatchEvent[T]] = []
        #: None ends the watch.
        self._arrived: asyncio.Queue[WatchEvent[T] | ApiError | None] = asyncio.Queue()

    def hear(self, change: StoredChange) -> None:
        """Deliver a change if the watch selects it."""
        before, after = self._selected(change.before), self._selected(change.after)
        if after is not None:
            kind = EventType.ADDED if before is None else EventType.MODIFIED
        elif before is not None:
            # The object as it is now, with the version of the change; of a removed one the last that it was.
            kind = EventType.DELETED
            metadata = {**(change.after or before)["metadata"], "resourceVersion": str(change.version)}
            after = {**(change.after or before), "metadata": metadata}
        else:
            return
        self._deliver(WatchEvent(kind, self._decode(after), str(change.version)))

    def list_first(self, stored: Stored) -> None:
        """Deliver an object that exists when the watch opens without a version."""
        if self._selected(stored) is not None:
            self._deliver(WatchEvent(EventType.ADDED, self._decode(stored), stored["metadata"]["resourceVersion"]))

    def bookmark(self, version: int) -> None:
        """Deliver a bookmark."""
        self._deliver(WatchEvent(EventType.BOOKMARK, None, str(version)))

    def end(self) -> None:
        """End the watch, as a server does when its time is over."""
        self._arrived.put_nowait(None)

    def fail(self, error: ApiError) -> None:
        """End the watch with an error."""
        self._arrived.put_nowait(error)

    def break_connection(self, why: str) -> None:
        """End the watch as a connection that is lost."""
        self.fail(unreachable(f"watch {self._label}", why))

    async def events(self) -> AsyncIterator[WatchEvent[T]]:
        """Yield the events until the watch ends. Raises the error that it ends with."""
        while True:
            item = await self._arrived.get()
            if item is None:
                return
            if isinstance(item, ApiError):
                raise item
            yield item

    def _selected(self, stored: Stored | None) -> Stored | None:
        if stored is None or (self._namespace and stored["metadata"].get("namespace") != self._namespace):
            return None
        return stored if self._selects(stored) else None

    def _deliver(self, event: WatchEvent[T]) -> None:
        self._held.append(event)
        if not self._is_silent():
            for each in self._held:
                self._arrived.put_nowait(each)
            self._held.clear()
