"""Waits for the next cycle: the timer, or a wake-up on changed demand (docs/spec/shard.md §3)."""

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from bigfleet.model.clock import Clock

#: A cycle that asks for it is repeated after so long; after each further one in a row the wait doubles.
RETRY_FIRST_SECONDS: Final = 0.5
#: The longest rest between two cycles that follow each other; shorter ones last as long as the cycle before them.
REST_SECONDS_MAX: Final = 1.0
#: By then every interval is over.
_DOUBLINGS_MAX: Final = 16


class CycleTrigger:
    """Starts the cycles of one shard; many wake-ups give one cycle."""

    def __init__(self, clock: Clock, wake_gap_seconds: float | None) -> None:
        """`wake_gap_seconds` is the least time between starts of woken cycles; None starts them on the timer only."""
        self._clock = clock
        self._wake_gap_seconds = wake_gap_seconds
        self._wakeup = asyncio.Event()
        #: Cycles in a row that asked to be repeated, and whether this one has.
        self._retries = 0
        self._is_retry_wanted = False

    def retry_soon(self) -> None:
        """Let the timer fire sooner after this cycle; twice as late each time in a row, its interval at most."""
        self._is_retry_wanted = True

    def wake(self) -> None:
        """Ask for a cycle soon."""
        self._wakeup.set()

    async def cycles(self, interval_seconds: float) -> AsyncIterator[bool]:
        """Yield at the start of each cycle whether it is a timer cycle, the first time at once."""
        next_tick_seconds, woken_at_seconds = self._clock.monotonic_seconds(), float("-inf")
        while True:
            is_timer = await self.next(next_tick_seconds, woken_at_seconds)
            started_seconds = self._clock.monotonic_seconds()
            if is_timer:
                # Several ticks may have passed; they are still one.
                while next_tick_seconds <= started_seconds:
                    next_tick_seconds += interval_seconds
            self._is_retry_wanted = False
            yield is_timer
            woken_at_seconds = self._woken_at_seconds(started_seconds, self._clock.monotonic_seconds())
            if not self._is_retry_wanted:
                self._retries = 0
                continue
            wait_seconds = RETRY_FIRST_SECONDS * 2.0 ** min(self._retries, _DOUBLINGS_MAX)
            self._retries += 1
            next_tick_seconds = min(next_tick_seconds, self._clock.monotonic_seconds() + wait_seconds)

    def _woken_at_seconds(self, started_seconds: float, ended_seconds: float) -> float:
        """Return when the next woken cycle may start.

        Sessions share the loop with cycles: where those take longer than the gap, half of the time stays for sessions.
        """
        if self._wake_gap_seconds is None:
            return float("inf")
        rest_seconds = min(ended_seconds - started_seconds, REST_SECONDS_MAX)
        return max(started_seconds + self._wake_gap_seconds, ended_seconds + rest_seconds)

    async def next(self, next_tick_seconds: float, woken_at_seconds: float) -> bool:
        """Wait for the next cycle; return whether the ticker has fired."""
        while True:
            now_seconds = self._clock.monotonic_seconds()
            if now_seconds >= next_tick_seconds:
                self._wakeup.clear()
                return True
            if self._wakeup.is_set():
                if now_seconds >= woken_at_seconds:
                    self._wakeup.clear()
                    return False
                await self._clock.sleep(min(next_tick_seconds, woken_at_seconds) - now_seconds)
                continue
            try:
                async with asyncio.timeout(next_tick_seconds - now_seconds):
                    await self._wakeup.wait()
            except TimeoutError:
                continue
