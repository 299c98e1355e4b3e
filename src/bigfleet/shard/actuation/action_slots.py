"""Limits how many actions run at the same time; an action that waits for an operator holds no slot.

docs/spec/shard.md §8. It must never know what an action does.
"""

import asyncio
from collections.abc import AsyncIterator, Set
from contextlib import asynccontextmanager

from bigfleet.model.ids import MachineId
from bigfleet.shard.metrics import ShardMetrics
from bigfleet.shard.ports import ShardSettings


class ActionSlots:
    """The slots of one shard process: `execute_concurrency_max` of them."""

    def __init__(self, *, settings: ShardSettings, metrics: ShardMetrics) -> None:
        self._waiting_max = settings.execute_waiting_max
        self._metrics = metrics
        self._slots = asyncio.Semaphore(settings.execute_concurrency_max)
        #: All and only the machines whose action holds a slot at this moment.
        self._held: set[MachineId] = set()
        self._waiting = 0

    @property
    def held(self) -> Set[MachineId]:
        """The machines whose action holds a slot at this moment; a live view."""
        return self._held

    async def acquire(self) -> None:
        """Wait for a slot; `hold` says whose it is, `give_back` returns it before."""
        await self._slots.acquire()

    def give_back(self) -> None:
        """Return a slot that no machine holds."""
        self._slots.release()

    def hold(self, machine_id: MachineId) -> None:
        """Give a slot that was acquired to a machine's action."""
        self._note(machine_id, held=True)

    def release(self, machine_id: MachineId) -> None:
        """Return a machine's slot, unless it was cancelled on its way back into one."""
        if machine_id in self._held:
            self._note(machine_id, held=False)
            self._slots.release()

    @asynccontextmanager
    async def waiting(self, machine_id: MachineId, waited_for: str) -> AsyncIterator[None]:
        """Give the slot back while an operator is asked; at `execute_waiting_max` further ones wait in their slot."""
        gives_back = self._waiting < self._waiting_max
        gauge = self._metrics.waiting.labels(waited_for)
        gauge.inc()
        if gives_back:
            self._waiting += 1
            self._note(machine_id, held=False)
            self._slots.release()
        try:
            yield
        finally:
            gauge.dec()
            if gives_back:
                self._waiting -= 1
                await self._slots.acquire()
                self._note(machine_id, held=True)

    def _note(self, machine_id: MachineId, *, held: bool) -> None:
        if held:
            self._held.add(machine_id)
        else:
            self._held.discard(machine_id)
        self._metrics.inflight.set(len(self._held))
