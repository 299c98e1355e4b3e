"""Queues the keys of objects whose status is to be looked at, most urgent first, each once.

A key that is put again while it waits keeps the more urgent of both; one that is put while it is handled waits again
afterwards. Nothing is dropped.
"""

import asyncio

from bigfleet.operator.conditions.verdicts import Urgency
from bigfleet.operator.demand.entries import ObjectKey


class KeyQueue:
    """Keys by urgency, in the order in which they were put."""

    def __init__(self) -> None:
        self._waiting: dict[Urgency, dict[ObjectKey, None]] = {urgency: {} for urgency in sorted(Urgency)}
        self._active: set[ObjectKey] = set()
        #: Put while they are active.
        self._again: dict[ObjectKey, Urgency] = {}
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        """Return how many keys wait."""
        return sum(len(keys) for keys in self._waiting.values())

    @property
    def is_idle(self) -> bool:
        """Say whether no key waits or is handled."""
        return not len(self) and not self._active

    def put(self, key: ObjectKey, urgency: Urgency) -> None:
        """Have a key handled."""
        if key in self._active:
            self._again[key] = min(urgency, self._again.get(key, urgency))
            return
        for other, keys in self._waiting.items():
            if key in keys:
                if other <= urgency:
                    return
                del keys[key]
        self._waiting[urgency][key] = None
        self._filled.set()

    async def take(self) -> tuple[ObjectKey, Urgency]:
        """Return the next key, when there is one; `done` must follow."""
        while True:
            for urgency, keys in self._waiting.items():
                if keys:
                    key = next(iter(keys))
                    del keys[key]
                    self._active.add(key)
                    return key, urgency
            self._filled.clear()
            await self._filled.wait()

    def done(self, key: ObjectKey) -> None:
        """Say that a key has been handled."""
        self._active.discard(key)
        urgency = self._again.pop(key, None)
        if urgency is not None:
            self.put(key, urgency)
