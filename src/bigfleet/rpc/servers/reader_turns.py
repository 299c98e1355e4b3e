"""Limits the share of the event loop that large reads take from sessions and cycles.

docs/spec/shard.md §4.4. Reading a row of demand takes some 30 µs of the loop. Without this limit, a hundred readers of
40,000 rows took a third of the loop for minutes, even if they did not receive the answers. A single reader never waits.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final, TypeVar

from bigfleet.model.clock import Clock

T = TypeVar("T")
R = TypeVar("R")

#: Items that are converted in one turn: a millisecond.
ITEMS_PER_TURN: Final = 32
#: After a turn no reader has one for so many times as long, while several read: together they have a fifth of the loop.
REST_TIMES: Final = 4


class ReaderTurns:
    """The turns of all readers of a server, in the order in which they ask."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._turn = asyncio.Lock()
        self._readers = 0

    async def converted(self, items: Sequence[T], convert: Callable[[T], R]) -> AsyncIterator[R]:
        """Yield each item as `convert` makes it, in order. What is yielded is taken outside of a turn."""
        self._readers += 1
        try:
            for start in range(0, len(items), ITEMS_PER_TURN):
                async with self._turn:
                    began_seconds = self._clock.monotonic_seconds()
                    made = [convert(item) for item in items[start : start + ITEMS_PER_TURN]]
                    if self._readers > 1:
                        await self._clock.sleep(REST_TIMES * (self._clock.monotonic_seconds() - began_seconds))
                for each in made:
                    yield each
        finally:
            self._readers -= 1
