"""Limits how many actions run at the same time; an action that waits for an operator holds no slot.

docs/spec/shard.md §8. It must never know what an action does.
"""

import asyncio
from collections import Counter, defaultdict
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
        #: Actions that wait without a slot, by what they wait for and cluster; none is 0.
        self._waiting: defaultdict[str, Counter[str]] = defaultdict(Counter)

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

    def may_wait(self, waited_for: str, cluster: str) -> bool:
        """Return whether a long wait of this cluster may begin: a cluster gets as many places as are left for others.

        So no cluster takes them all. Without any place, at an `execute_waiting_max` of 0, each waits in its slot.
        """
        counts = self._waiting[waited_for]
        return not self._waiting_max or counts[cluster] < self._waiting_max - counts.total()

    @asynccontextmanager
    async def waiting(self, machine_id: MachineId, waited_for: str, cluster: str) -> AsyncIterator[None]:
        """Give the slot back while an operator is asked.

        Of each kind of wait `execute_waiting_max` do; further ones wait in their slot.
        """
        counts = self._waiting[waited_for]
        gives_back = counts.total() < self._waiting_max
        gauge = self._metrics.waiting.labels(waited_for)
        gauge.inc()
        if gives_back:
            counts[cluster] += 1
            self._note(machine_id, held=False)
            self._slots.release()
        try:
            yield
        finally:
            gauge.dec()
            if gives_back:
                counts[cluster] -= 1
                if not counts[cluster]:
                    del counts[cluster]
                await self._slots.acquire()
                self._note(machine_id, held=True)

    def _note(self, machine_id: MachineId, *, held: bool) -> None:
        if held:
            self._held.add(machine_id)
        else:
            self._held.discard(machine_id)
        self._metrics.inflight.set(len(self._held))
