"""Bounds what tests wait for on the real clock.

A wait ends as soon as its condition holds: the bound only turns a hang into a failure, and no test asserts how long
anything took. No other module of the tests reads a real clock to measure (tests/test_busy_machine.py).
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import Final

#: Far beyond what a machine under load needs.
PATIENCE_SECONDS: Final = float(os.environ.get("BIGFLEET_TEST_PATIENCE_SECONDS", "180"))


def wait_until(
    condition: Callable[[], object], failure: str | Callable[[], str], *, poll_seconds: float = 0.05
) -> None:
    """Return once the condition holds. Raises AssertionError with the failure's text after PATIENCE_SECONDS."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() >= deadline:
            raise AssertionError(failure if isinstance(failure, str) else failure())
        time.sleep(poll_seconds)


async def wait_until_async(
    condition: Callable[[], Awaitable[object]], *, poll_seconds: float = 0.005, held_seconds: float = 0.0
) -> None:
    """Return once the condition holds, on a loop with a real clock.

    Raises TimeoutError after PATIENCE_SECONDS, and `held_seconds` more for what a rule may hold back for so long.
    """
    async with asyncio.timeout(PATIENCE_SECONDS + held_seconds):
        while not await condition():  # noqa: ASYNC110 - threads and processes set no event
            await asyncio.sleep(poll_seconds)
