"""Checks every second that the state files of a process are still those that it opened.

If a file was deleted, replaced or truncated, the process becomes unready, logs it and sets a gauge. If the file
returns, the process is ready again. This module does not write to a file.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

import structlog
from prometheus_client import CollectorRegistry, Gauge

from bigfleet.model.clock import Clock

LOOK_SECONDS: Final = 1.0

_log = structlog.get_logger("bigfleet.cli.runtime.state_watch")


class StateWatch:
    """What the last look at the state files found."""

    def __init__(self, look: Callable[[], str], registry: CollectorRegistry, prefix: str) -> None:
        """`look` returns what is wrong with the files, or ""; the gauge is `<prefix>_state_file_lost`."""
        self._look = look
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
        while True:
            self.look()
            await clock.sleep(LOOK_SECONDS)
