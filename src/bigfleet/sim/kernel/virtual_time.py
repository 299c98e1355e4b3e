"""Runs an event loop whose clock jumps to the next timer when nothing is ready.

Code under it runs the same lines as in production, because it reads time from its loop through a `Clock`. Real I/O
still works (a socket that is ready is served before time moves), but time does not wait for it: this loop is for flows
whose peers live in the same process. It must never be used to serve real clients.
"""

import asyncio
import selectors
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from bigfleet.model.clock import NANOS_PER_SECOND

T = TypeVar("T")

#: 2026-01-01T00:00:00Z, so that labels in tests read as dates.
START_UNIX_SECONDS = 1_767_225_600
#: How long a loop with nothing scheduled waits for a thread or a socket before it calls that a deadlock.
_DEADLOCK_REAL_SECONDS = 5.0


class Deadlock(RuntimeError):
    """Every task waits, no timer is set, and nothing arrived from outside."""


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that moves virtual time instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now_seconds = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            ready = super().select(_DEADLOCK_REAL_SECONDS)
            if not ready:
                raise Deadlock("every task waits for something that no timer and no peer will bring")
            return ready
        self.now_seconds += max(timeout, 0.0)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An asyncio loop on virtual time, starting at 0 seconds."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Return virtual seconds since the loop was made."""
        return self._jumping.now_seconds

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Wait until the threads have ended.

        `timeout`, which a Runner sets from Python 3.12 on, is ignored: a thread takes no virtual time, so that any
        limit would pass at once.
        """
        if sys.version_info >= (3, 12):
            await super().shutdown_default_executor(None)
        else:
            await super().shutdown_default_executor()


class LoopClock:
    """A `Clock` on the running loop's time; with a VirtualTimeLoop all of it is virtual."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def monotonic_seconds(self) -> float:
        """Return the loop's time; in a thread that runs none, that of the loop that asked last."""
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            if self._loop is None:
                raise
        return self._loop.time()

    def unix_nanos(self) -> int:
        """Return `START_UNIX_SECONDS` plus the loop's time."""
        return int((START_UNIX_SECONDS + self.monotonic_seconds()) * NANOS_PER_SECOND)

    async def sleep(self, seconds: float) -> None:
        """Wait on the loop's time."""
        await asyncio.sleep(max(seconds, 0.0))  # noqa: TID251 - this is the clock that others take


def run_virtual(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `main()` to its end on a fresh VirtualTimeLoop and return its result."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main())
