"""Limits the sessions whose first frame has not arrived yet, by ending those that have waited longest.

docs/spec/wire.md §2. An operator sends its first frame with the call, so it arrives within a round trip. A peer that
sends it byte by byte is among the oldest and is ended first. The limit reads no frame.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

#: In all, and under one identity; in plain text there are no identities, and only the first holds.
FIRST_FRAMES_MAX = 1_000
FIRST_FRAMES_PER_IDENTITY_MAX = 8


class Crowded(Exception):
    """A session that was ended before its first frame came, because others wait for theirs."""


class FirstFrames:
    """The sessions that wait for their first frame, by identity, oldest first."""

    def __init__(self, most: int = FIRST_FRAMES_MAX, per_identity_max: int = FIRST_FRAMES_PER_IDENTITY_MAX) -> None:
        self._most = most
        self._per_identity_max = per_identity_max
        self._waiting: dict[str, OrderedDict[object, asyncio.Timeout]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @asynccontextmanager
    async def waiting(self, identity: str, timeout_seconds: float) -> AsyncIterator[None]:
        """Let the context wait for a first frame; `identity` is empty in plain text.

        Raises TimeoutError when the time is over, Crowded when the session has to make room for newer ones.
        """
        mark = object()
        try:
            async with asyncio.timeout(timeout_seconds) as deadline:
                self._enter(identity, mark, deadline)
                yield
        except TimeoutError:
            if self._leave(identity, mark):
                raise
            raise Crowded from None
        finally:
            self._leave(identity, mark)

    def _enter(self, identity: str, mark: object, deadline: asyncio.Timeout) -> None:
        if identity and len(self._waiting.get(identity, ())) >= self._per_identity_max:
            self._end_oldest(identity)
        elif self._count >= self._most:
            # Who waits for the most first frames is asked first.
            self._end_oldest(max(self._waiting, key=lambda name: len(self._waiting[name])))
        self._waiting.setdefault(identity, OrderedDict())[mark] = deadline
        self._count += 1

    def _end_oldest(self, identity: str) -> None:
        mark, deadline = next(iter(self._waiting[identity].items()))
        self._leave(identity, mark)
        deadline.reschedule(asyncio.get_running_loop().time())

    def _leave(self, identity: str, mark: object) -> bool:
        """Forget a session; return whether it was still waiting."""
        marks = self._waiting.get(identity, OrderedDict())
        if marks.pop(mark, None) is None:
            return False
        self._count -= 1
        if not marks:
            del self._waiting[identity]
        return True
