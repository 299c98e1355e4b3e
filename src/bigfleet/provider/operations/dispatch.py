"""Limits the calls to the backend by kind: how many at a time, how fast, and none while it is unhealthy.

docs/spec/provider.md §15. An operation takes a place (concurrency), then passes the breaker and the token bucket; a
retry passes the latter two again. This module must not hold a place for longer than the call behind it runs.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from bigfleet.model.clock import Clock

BREAKER_FAILURES_MAX = 10
BREAKER_OPEN_SECONDS = 30.0


class BreakerState(IntEnum):
    """The values are those of the metric."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Breaker:
    """Opens after too many transient failures in a row, over all machines; later one call probes."""

    def __init__(self, clock: Clock, on_change: Callable[[BreakerState], None]) -> None:
        self._clock = clock
        self._on_change = on_change
        self._state = BreakerState.CLOSED
        self._failures_in_row = 0
        self._probe_at_seconds = 0.0
        #: Set and replaced at each change of state.
        self._changed = asyncio.Event()
        on_change(self._state)

    @property
    def refuses_new_work(self) -> bool:
        """Return whether it is open and no probe is due, or the probe is under way."""
        if self._state is BreakerState.OPEN:
            return self._clock.monotonic_seconds() < self._probe_at_seconds
        return self._state is BreakerState.HALF_OPEN

    async def wait(self) -> None:
        """Return when a call may begin; the caller must then report how it ended."""
        while self._state is not BreakerState.CLOSED:
            left_seconds = self._probe_at_seconds - self._clock.monotonic_seconds()
            if self._state is BreakerState.HALF_OPEN:
                await self._changed.wait()
            elif left_seconds > 0:
                await self._clock.sleep(left_seconds)
            else:
                self._become(BreakerState.HALF_OPEN)
                return

    def succeeded(self) -> None:
        """Note that the substrate answered, be it with a final error."""
        self._failures_in_row = 0
        self._become(BreakerState.CLOSED)

    def failed(self) -> None:
        """Note a transient failure."""
        self._failures_in_row += 1
        if self._state is BreakerState.HALF_OPEN or self._failures_in_row >= BREAKER_FAILURES_MAX:
            self._probe_at_seconds = self._clock.monotonic_seconds() + BREAKER_OPEN_SECONDS
            self._become(BreakerState.OPEN)

    def ended_without_word(self) -> None:
        """Note a call that was cut off: it proves nothing, and another one may probe."""
        if self._state is BreakerState.HALF_OPEN:
            self._probe_at_seconds = self._clock.monotonic_seconds()
            self._become(BreakerState.OPEN)

    def _become(self, state: BreakerState) -> None:
        if state is self._state:
            return
        self._state = state
        self._on_change(state)
        self._changed.set()
        self._changed = asyncio.Event()


class TokenBucket:
    """So many calls per second, and a burst after a pause."""

    def __init__(self, rate_per_second: float, burst: int, clock: Clock) -> None:
        self._rate_per_second = rate_per_second
        self._burst = burst
        self._clock = clock
        #: Below zero: calls that wait for their token already.
        self._tokens = float(burst)
        self._filled_at_seconds: float | None = None

    async def take(self) -> None:
        """Return when a call may begin; a wait that is cut off gives its token back."""
        now_seconds = self._clock.monotonic_seconds()
        if self._filled_at_seconds is not None:
            gained = (now_seconds - self._filled_at_seconds) * self._rate_per_second
            self._tokens = min(float(self._burst), self._tokens + gained)
        self._filled_at_seconds = now_seconds
        self._tokens -= 1
        if self._tokens >= 0:
            return
        try:
            await self._clock.sleep(-self._tokens / self._rate_per_second)
        except asyncio.CancelledError:
            self._tokens += 1
            raise


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchLane:
    """The bounds of one kind, resolved: docs/spec/provider.md §15 has what an author leaves open."""

    concurrency_max: int
    queue_max: int
    rate_per_second: float | None
    burst: int


class Dispatch:
    """One kind's way to the backend."""

    def __init__(self, lane: DispatchLane, clock: Clock, on_breaker: Callable[[BreakerState], None]) -> None:
        self._lane = lane
        self._places = asyncio.Semaphore(lane.concurrency_max)
        self._bucket = None if lane.rate_per_second is None else TokenBucket(lane.rate_per_second, lane.burst, clock)
        self.breaker = Breaker(clock, on_breaker)
        #: Ids of operations that were accepted, or are about to be, and are not in the backend's hands yet.
        self.waiting: set[str] = set()
        #: Operations whose call began and has not ended.
        self._in_progress = 0

    @property
    def has_room(self) -> bool:
        """Return whether one more operation may be accepted."""
        return self._in_progress + len(self.waiting) < self._lane.concurrency_max + self._lane.queue_max

    async def enter(self) -> None:
        """Take a place, then wait until a call may begin. `leave` gives the place back."""
        await self._places.acquire()
        try:
            await self.pass_again()
        except BaseException:
            self._places.release()
            raise
        self._in_progress += 1

    async def pass_again(self) -> None:
        """Wait until the next call of an operation that has a place may begin."""
        await self.breaker.wait()
        if self._bucket is not None:
            try:
                await self._bucket.take()
            except BaseException:
                self.breaker.ended_without_word()
                raise

    def leave(self) -> None:
        """Give the place back: the call behind it has ended."""
        self._in_progress -= 1
        self._places.release()
