"""Queues keyed work: each key waits once, one worker at a time handles it, and it may be queued again with a delay.

A key that is added again while it waits is handled once. If a worker has it, it is queued again afterwards, so that the
newest state is always handled. `KeyQueue` has keys only, never the work itself; `WorkQueue` runs handlers of keys, with
retries. A failing handler must never end a queue.
"""

import asyncio
import heapq
import itertools
from collections.abc import Awaitable, Callable, Hashable
from typing import Final, Generic, TypeVar

import structlog

from bigfleet.model.clock import Clock
from bigfleet.model.ids import Rng
from bigfleet.operator.backoff import retry_delay_seconds
from bigfleet.operator.kubernetes.api import ApiError

log = structlog.get_logger(__name__)

WORKERS: Final = 32
RETRY_FIRST_SECONDS: Final = 1.0
RETRY_SECONDS_MAX: Final = 60.0
#: A shorter delay might be rounded away when it is added to the time, and the key would come back without a pause.
_DELAY_SECONDS_MIN: Final = 0.01

K = TypeVar("K", bound=Hashable)

Handler = Callable[[str], Awaitable[None]]
_HandledKey = tuple[Handler, str]


class KeyQueue(Generic[K]):
    """Keys that wait for a worker, now or at a later time: the most urgent first, then in the order they were put.

    An urgency is a small number, and a smaller one comes first. A key that is put again while it waits keeps the more
    urgent of both. Nothing is dropped.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        #: Ready keys by urgency, which ascends.
        self._ready: dict[int, dict[K, None]] = {}
        #: All and only the keys of `_ready`.
        self._urgency: dict[K, int] = {}
        self._active: set[K] = set()
        #: Active keys that were put meanwhile.
        self._again: dict[K, int] = {}
        #: (when, tie-break, key)
        self._later: list[tuple[float, int, K]] = []
        #: When each delayed key is due; entries of `_later` that differ are stale.
        self._due_seconds: dict[K, float] = {}
        self._numbers = itertools.count()
        self._filled = asyncio.Event()
        self._later_changed = asyncio.Event()
        self._is_closed = False

    def __len__(self) -> int:
        """Return how many keys are ready."""
        return len(self._urgency)

    @property
    def unfinished(self) -> int:
        """How many keys are ready, or are worked on."""
        return len(self._urgency) + len(self._active)

    @property
    def backlog(self) -> int:
        """How many keys are ready, worked on or delayed."""
        return len(self._urgency.keys() | self._active | self._due_seconds.keys())

    def put(self, key: K, urgency: int = 0) -> None:
        """Have a key handled soon."""
        if key in self._active:
            self._again[key] = min(urgency, self._again.get(key, urgency))
            return
        known = self._urgency.get(key)
        if known is not None:
            if known <= urgency:
                return
            del self._ready[known][key]
        if urgency not in self._ready:
            self._ready = dict(sorted([*self._ready.items(), (urgency, {})]))
        self._ready[urgency][key] = None
        self._urgency[key] = urgency
        self._filled.set()

    def put_later(self, key: K, delay_seconds: float) -> None:
        """Have a key handled after a delay, unless it is due before that. Needs `run_timer`."""
        due_seconds = self._clock.monotonic_seconds() + max(delay_seconds, _DELAY_SECONDS_MIN)
        if self._due_seconds.get(key, float("inf")) > due_seconds:
            self._due_seconds[key] = due_seconds
            heapq.heappush(self._later, (due_seconds, next(self._numbers), key))
            self._later_changed.set()

    def close(self) -> None:
        """Hand out no more keys: `take` returns None and `run_timer` ends."""
        self._is_closed = True
        self._filled.set()
        self._later_changed.set()

    async def take(self) -> tuple[K, int] | None:
        """Return the next key with its urgency, once there is one; None when the queue is closed. `done` follows."""
        while not self._is_closed:
            for urgency, keys in self._ready.items():
                if keys:
                    key = next(iter(keys))
                    del keys[key], self._urgency[key]
                    self._active.add(key)
                    return key, urgency
            self._filled.clear()
            await self._filled.wait()
        return None

    def done(self, key: K) -> None:
        """Say that the worker of a key is finished with it."""
        self._active.discard(key)
        urgency = self._again.pop(key, None)
        if urgency is not None:
            self.put(key, urgency)

    async def run_timer(self) -> None:
        """Put delayed keys when they are due, until cancelled or until the queue is closed."""
        while not self._is_closed:
            now_seconds = self._clock.monotonic_seconds()
            while self._later and self._later[0][0] <= now_seconds:
                due_seconds, _number, key = heapq.heappop(self._later)
                if self._due_seconds.get(key) == due_seconds:
                    del self._due_seconds[key]
                    self.put(key)
            self._later_changed.clear()
            if not self._later:
                await self._later_changed.wait()
                continue
            pause_seconds = max(self._later[0][0] - now_seconds, _DELAY_SECONDS_MIN)
            timer = asyncio.ensure_future(self._clock.sleep(pause_seconds))
            change = asyncio.ensure_future(self._later_changed.wait())
            try:
                await asyncio.wait((timer, change), return_when=asyncio.FIRST_COMPLETED)
            finally:
                timer.cancel()
                change.cancel()


def is_retried(error: ApiError) -> bool:
    """Return whether the API server may accept later what it has refused so."""
    # An API server that was restarted refuses everybody until it has read its roles.
    return error.is_transient or error.is_conflict or error.is_forbidden


class WorkQueue:
    """Runs handlers of keys on a bounded number of workers. `put` may be called before `run`, and never waits.

    What the API server may accept later is retried with back-off; anything else is logged and dropped until the key is
    put again.
    """

    def __init__(self, *, clock: Clock, rng: Rng, workers: int = WORKERS) -> None:
        self._rng = rng
        self._workers = workers
        self._keys: KeyQueue[_HandledKey] = KeyQueue(clock)
        self._attempts: dict[_HandledKey, int] = {}

    def __len__(self) -> int:
        """Return how many keys wait or are handled; those that are to be put later are not counted."""
        return self._keys.unfinished

    def put(self, handler: Handler, key: str) -> None:
        """Have `handler` called with `key` soon."""
        self._keys.put((handler, key))

    def put_later(self, handler: Handler, key: str, delay_seconds: float) -> None:
        """Have `handler` called with `key` after a delay, unless it is due before that."""
        self._keys.put_later((handler, key), delay_seconds)

    async def run(self) -> None:
        """Handle keys until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keys.run_timer())
            for _ in range(self._workers):
                tasks.create_task(self._work())

    async def _work(self) -> None:
        while (taken := await self._keys.take()) is not None:
            key, _urgency = taken
            try:
                await self._handle(key)
            finally:
                self._keys.done(key)

    async def _handle(self, key: _HandledKey) -> None:
        handler, name = key
        try:
            await handler(name)
        except ApiError as error:
            if is_retried(error):
                self._retry(key, error)
                return
            log.error("operator.write_refused", key=name, status=error.status, error=str(error))
        except Exception:
            # A fault of ours: one key must not take the others down with it.
            log.exception("operator.write_failed", key=name)
        self._attempts.pop(key, None)

    def _retry(self, key: _HandledKey, error: ApiError) -> None:
        attempt = self._attempts.get(key, 0)
        self._attempts[key] = attempt + 1
        delay_seconds = retry_delay_seconds(
            attempt, error, self._rng, first_seconds=RETRY_FIRST_SECONDS, seconds_max=RETRY_SECONDS_MAX
        )
        report = log.warning if error.is_forbidden else log.info
        report("operator.write_retried", key=key[1], error=str(error), retry_in=round(delay_seconds, 3))
        self._keys.put_later(key, delay_seconds)
