"""Queues keys for workers: each key waits once, is worked on by one worker at a time, and may come back later.

A key that is added while a worker has it is queued again when the worker is done, so that the newest state is always
looked at. The queue holds keys alone, never what is to be done with them.
"""

import asyncio
import heapq
from collections import deque

from bigfleet.model.clock import Clock

#: How late a delayed key may become ready.
_TICK_SECONDS = 0.25
#: A shorter delay might be rounded away when it is added to the time, and the key would come back without a pause.
_DELAY_SECONDS_MIN = 0.01


class PodWorkQueue:
    """Keys that wait for a worker, now or at a later time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ready: deque[str] = deque()
        #: All and only the keys of `_ready`.
        self._waiting: set[str] = set()
        self._active: set[str] = set()
        #: Active keys that were added meanwhile.
        self._again: set[str] = set()
        self._later: list[tuple[float, str]] = []
        #: When each delayed key is due; entries of `_later` that differ are stale.
        self._due_seconds: dict[str, float] = {}
        self._changed = asyncio.Event()
        self._is_closed = False

    def __len__(self) -> int:
        """Return how many keys are ready, active or delayed."""
        return len(self._waiting | self._active | set(self._due_seconds))

    def add(self, key: str) -> None:
        """Queue a key now, unless it waits already."""
        if key in self._active:
            self._again.add(key)
        elif key not in self._waiting:
            self._waiting.add(key)
            self._ready.append(key)
            self._changed.set()

    def add_later(self, key: str, delay_seconds: float) -> None:
        """Queue a key after a delay, unless it is due before that."""
        due_seconds = self._clock.monotonic_seconds() + max(delay_seconds, _DELAY_SECONDS_MIN)
        if self._due_seconds.get(key, float("inf")) > due_seconds:
            self._due_seconds[key] = due_seconds
            heapq.heappush(self._later, (due_seconds, key))
            self._changed.set()

    def close(self) -> None:
        """Hand out no more keys: `next` returns None and `run_timer` ends."""
        self._is_closed = True
        self._changed.set()

    async def next(self) -> str | None:
        """Return the key that has waited longest, once there is one; None when the queue is closed."""
        while not self._is_closed:
            if self._ready:
                key = self._ready.popleft()
                self._waiting.discard(key)
                self._active.add(key)
                return key
            await self._wait()
        return None

    def done(self, key: str) -> None:
        """Say that the worker of a key is finished with it."""
        self._active.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    async def run_timer(self) -> None:
        """Queue delayed keys when they are due, until the queue is closed."""
        while not self._is_closed:
            if not self._later:
                await self._wait()
                continue
            now_seconds = self._clock.monotonic_seconds()
            while self._later and self._later[0][0] <= now_seconds:
                due_seconds, key = heapq.heappop(self._later)
                if self._due_seconds.get(key) == due_seconds:
                    del self._due_seconds[key]
                    self.add(key)
            if self._later:
                pause_seconds = min(self._later[0][0] - now_seconds, _TICK_SECONDS)
                await self._clock.sleep(max(pause_seconds, _DELAY_SECONDS_MIN))

    async def _wait(self) -> None:
        """Return after the next change; every waiting task looks again."""
        self._changed.clear()
        await self._changed.wait()
