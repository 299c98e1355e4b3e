"""Checks every second that the state files of a process are still those that it opened.

If a file was deleted, replaced or truncated, the process becomes unready, logs it, sets a gauge and has the content
rescued. If the file returns, the process is ready again.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import structlog
from prometheus_client import CollectorRegistry, Gauge

from bigfleet.model.clock import Clock

LOOK_SECONDS: Final = 1.0
#: Before a rescue that failed is tried again.
RESCUE_AGAIN_SECONDS: Final = 60.0

_log = structlog.get_logger("bigfleet.cli.runtime.state_watch")


async def _in_place(work: Callable[[], bool]) -> bool:
    return work()


class StateWatch:
    """What the last look at the state files found."""

    def __init__(
        self,
        look: Callable[[], str],
        registry: CollectorRegistry,
        prefix: str,
        *,
        rescue: Callable[[], bool] | None = None,
        compute: Callable[[Callable[[], bool]], Awaitable[bool]] = _in_place,
    ) -> None:
        """`look` returns what is wrong with the files, or ""; the gauge is `<prefix>_state_file_lost`.

        `rescue` copies the content of lost files and returns False if it failed; `compute` runs it.
        """
        self._look = look
        self._rescue = rescue
        self._compute = compute
        self._gauge = Gauge(
            f"{prefix}_state_file_lost",
            "1 while a state file is deleted, replaced or truncated under the process.",
            registry=registry,
        )
        #: What is wrong, "" while nothing is.
        self.fault = ""

    def look(self) -> None:
        """Look at the files once."""
        former, self.fault = self.fault, self._look()
        self._gauge.set(bool(self.fault))
        if self.fault and self.fault != former:
            _log.error("store.file_lost", error=self.fault)
        if former and not self.fault:
            _log.info("store.file_recovered")

    @asynccontextmanager
    async def watching(self, clock: Clock) -> AsyncIterator[None]:
        """Look every second while the context lasts."""
        task = asyncio.create_task(self._run(clock), name="state files")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self, clock: Clock) -> None:
        rescue_at_seconds = 0.0
        while True:
            self.look()
            if self.fault and self._rescue is not None and clock.monotonic_seconds() >= rescue_at_seconds:
                is_safe = await self._compute(self._rescue)
                rescue_at_seconds = 0.0 if is_safe else clock.monotonic_seconds() + RESCUE_AGAIN_SECONDS
                former, self.fault = self.fault, self._look()
                if self.fault and self.fault != former:
                    _log.error("store.file_rescued" if is_safe else "store.rescue_failed", error=self.fault)
            await clock.sleep(LOOK_SECONDS)
