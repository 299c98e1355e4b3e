"""Runs handlers of keyed work on a bounded number of workers, one at a time per key (docs/spec/operator.md §4).

A key that is put again while it waits is handled once; while it is being handled it is handled once more afterwards, so
that the handler sees the newest state. What the API server may accept later is retried with back-off; anything else is
logged and dropped until the key is put again. A failing handler must never end the queue.
"""

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from bigfleet.model.clock import Clock
from bigfleet.model.ids import Rng
from bigfleet.operator.kubernetes.api import ApiError

log = structlog.get_logger(__name__)

WORKERS: Final = 32
RETRY_FIRST_SECONDS: Final = 1.0
RETRY_SECONDS_MAX: Final = 60.0

Handler = Callable[[str], Awaitable[None]]
_Key = tuple[Handler, str]


class WorkQueue:
    """Keys that wait for their handler. `put` may be called before `run`, and never waits."""

    def __init__(self, *, clock: Clock, rng: Rng, workers: int = WORKERS) -> None:
        self._clock = clock
        self._rng = rng
        self._workers = workers
        self._ready: deque[_Key] = deque()
        #: All and only the keys in `_ready`.
        self._waiting: set[_Key] = set()
        self._active: set[_Key] = set()
        #: Put while they were handled.
        self._again: set[_Key] = set()
        self._attempts: dict[_Key, int] = {}
        self._filled = asyncio.Event()
        #: (when, tie-break, key): to be put then.
        self._later: list[tuple[float, int, _Key]] = []
        self._later_changed = asyncio.Event()
        self._numbers = itertools.count()

    def __len__(self) -> int:
        """Return how many keys wait or are handled; those that are to be put later are not counted."""
        return len(self._waiting) + len(self._active)

    def put(self, handler: Handler, key: str) -> None:
        """Have `handler` called with `key` soon."""
        self._put((handler, key))

    def put_later(self, handler: Handler, key: str, delay_seconds: float) -> None:
        """Put the key after `delay_seconds`; it may be put, and put later, more than once meanwhile."""
        self._put_later((handler, key), delay_seconds)

    async def run(self) -> None:
        """Handle keys until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._wake())
            for _ in range(self._workers):
                tasks.create_task(self._work())

    def _put(self, key: _Key) -> None:
        if key in self._active:
            self._again.add(key)
        elif key not in self._waiting:
            self._waiting.add(key)
            self._ready.append(key)
            self._filled.set()

    def _put_later(self, key: _Key, delay_seconds: float) -> None:
        when_seconds = self._clock.monotonic_seconds() + delay_seconds
        heapq.heappush(self._later, (when_seconds, next(self._numbers), key))
        self._later_changed.set()

    async def _work(self) -> None:
        while True:
            while not self._ready:
                self._filled.clear()
                await self._filled.wait()
            key = self._ready.popleft()
            self._waiting.discard(key)
            self._active.add(key)
            try:
                await self._handle(key)
            finally:
                self._active.discard(key)
            if key in self._again:
                self._again.discard(key)
                self._put(key)

    async def _handle(self, key: _Key) -> None:
        handler, name = key
        try:
            await handler(name)
        except ApiError as error:
            # An API server that was restarted refuses everybody until it has read its roles.
            if error.is_transient or error.is_conflict or error.is_forbidden:
                self._retry(key, error)
                return
            log.error("operator.write_refused", key=name, status=error.status, error=str(error))
        except Exception:
            # A fault of ours: one key must not take the others down with it.
            log.exception("operator.write_failed", key=name)
        self._attempts.pop(key, None)

    def _retry(self, key: _Key, error: ApiError) -> None:
        attempt = self._attempts.get(key, 0)
        self._attempts[key] = attempt + 1
        # 2**10 is past the bound already; a larger exponent would only make a larger integer.
        delay_seconds = min(RETRY_SECONDS_MAX, RETRY_FIRST_SECONDS * 2 ** min(attempt, 10))
        delay_seconds = self._rng.uniform(0.5, 1.0) * delay_seconds
        if error.retry_after_seconds is not None:
            delay_seconds = max(delay_seconds, min(error.retry_after_seconds, RETRY_SECONDS_MAX))
        report = log.warning if error.is_forbidden else log.info
        report("operator.write_retried", key=key[1], error=str(error), retry_in=round(delay_seconds, 3))
        self._put_later(key, delay_seconds)

    async def _wake(self) -> None:
        while True:
            now_seconds = self._clock.monotonic_seconds()
            while self._later and self._later[0][0] <= now_seconds:
                self._put(heapq.heappop(self._later)[2])
            self._later_changed.clear()
            if not self._later:
                await self._later_changed.wait()
                continue
            timer = asyncio.ensure_future(self._clock.sleep(self._later[0][0] - now_seconds))
            change = asyncio.ensure_future(self._later_changed.wait())
            try:
                await asyncio.wait((timer, change), return_when=asyncio.FIRST_COMPLETED)
            finally:
                timer.cancel()
                change.cancel()
