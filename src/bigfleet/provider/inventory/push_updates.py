"""Commits what a backend pushes (prices, interruption warnings, losses), each before its call returns.

docs/spec/provider.md §13. A bad value is quarantined and changes nothing. A push must never reach a machine that the
inventory does not hold.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from itertools import islice
from typing import Any

import structlog

from bigfleet.model.clock import Clock
from bigfleet.model.states import MachineState
from bigfleet.provider.metrics import ProviderMetrics
from bigfleet.provider.operations.admission import Admissions
from bigfleet.provider.operations.operation_runner import OperationRunner
from bigfleet.provider.records.lifecycle import failed, with_pushed_price, with_pushed_probability
from bigfleet.provider.records.quarantine import FactsQuarantine
from bigfleet.provider.records.record import ErrorCode, Record
from bigfleet.provider.records.validate import price_fault, probability_fault
from bigfleet.provider.storage.ledger import Change, Ledger

_log = structlog.get_logger("bigfleet.provider.inventory.push_updates")

#: A warning from here on says that the host will be taken.
RECLAIM_NOTICE_PROBABILITY = 0.99
#: A host that is known to be gone needs no long hold before its slot may be used again.
_LOST_HOLD_SECONDS = 60.0
_PUSH_CHUNK = 1000


class CoreFeed:
    """The `Feed` of a core. It may be awaited on any loop, so that a thread says `asyncio.run(feed.report_lost(…))`."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        work: OperationRunner,
        admissions: Admissions,
        quarantine: FactsQuarantine,
        clock: Clock,
        metrics: ProviderMetrics,
    ) -> None:
        self._ledger = ledger
        self._work = work
        self._admissions = admissions
        self._loop: asyncio.AbstractEventLoop | None = None
        self._quarantine = quarantine
        self._clock = clock
        self._metrics = metrics

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Say on which loop the core runs; pushes from before are refused."""
        self._loop = loop

    async def _on_loop(self, push: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a push where the core's state may be touched, and return after its commit."""
        if self._loop is None:
            raise RuntimeError("the provider has not started: nothing can be pushed yet")
        if self._loop is asyncio.get_running_loop():
            await push()
        else:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(push(), self._loop))

    async def report_price(self, ids: Iterable[str], usd_per_hour: float) -> None:
        """Serve this price for the machines until the next push, or until the inventory changes its own."""
        await self._on_loop(lambda: self._take_price(ids, usd_per_hour))

    async def _take_price(self, ids: Iterable[str], usd_per_hour: float) -> None:
        self._metrics.pushes.labels("price").inc()

        def priced(record: Record) -> Record | None:
            fault = price_fault(usd_per_hour, record.machine.capacity_type)
            if fault is not None:
                self._quarantine.put(record.id, fault)
                return None
            return with_pushed_price(record, usd_per_hour)

        remaining = iter(ids)
        while chunk := list(islice(remaining, _PUSH_CHUNK)):
            await asyncio.gather(*(self._change(machine_id, priced) for machine_id in chunk))

    async def report_interruption(self, id: str, probability: float, reclaim_at_unix_nanos: int | None = None) -> None:
        """Serve the higher of this and the declared probability until the host is gone."""
        await self._on_loop(lambda: self._take_interruption(id, probability, reclaim_at_unix_nanos))

    async def _take_interruption(self, id: str, probability: float, reclaim_at_unix_nanos: int | None) -> None:
        self._metrics.pushes.labels("interruption").inc()
        is_notice = reclaim_at_unix_nanos is not None or probability >= RECLAIM_NOTICE_PROBABILITY

        def warned(record: Record) -> Record | None:
            fault = probability_fault(probability, record.machine.capacity_type)
            if fault is not None:
                self._quarantine.put(record.id, fault)
                return None
            if not record.machine.host.is_present:
                return None
            return with_pushed_probability(record, probability, reclaim_notice=is_notice)

        await self._change(id, warned)

    async def _change(self, machine_id: str, make: Callable[[Record], Record | None]) -> None:
        async with self._ledger.turn(machine_id) as record:
            if record is None:
                return
            pushed = make(record)
            if pushed is not None and pushed != record:
                await self._ledger.commit_until_done(lambda: Change(record=pushed))

    async def report_lost(self, id: str, reason: str) -> None:
        """Fail the machine at once: its host is gone, which the backend knows for sure. A slot is removed."""
        await self._on_loop(lambda: self._take_loss(id, reason))

    async def _take_loss(self, id: str, reason: str) -> None:
        self._metrics.pushes.labels("lost").inc()
        async with self._ledger.turn(id) as record:
            if record is None or record.state is MachineState.FAILED:
                return
            if record.state is MachineState.SPECULATIVE:
                removal = self._admissions.settled(Change(removed_id=id), record, MachineState.UNSPECIFIED)
                await self._ledger.commit_until_done(lambda: removal)
                self._admissions.committed(removal)
                _log.info("inventory.slot_lost", machine=id, reason=reason)
                return
            self._work.cancel(id)
            had_notice = record.pushed is not None and record.pushed.reclaim_notice
            code = ErrorCode.INTERRUPTED if had_notice else ErrorCode.HOST_LOST
            lost = failed(record, code, reason, self._clock.unix_nanos(), hold_seconds=_LOST_HOLD_SECONDS)
            change = self._admissions.settled(Change(record=lost), record, lost.state)
            await self._ledger.commit_until_done(lambda: change)
            self._admissions.committed(change)
        self._metrics.interruptions.labels("yes" if had_notice else "no").inc()
        _log.warning(
            "inventory.machine_lost",
            machine=id,
            state_from=record.state.name,
            code=code.value,
            reason=lost.machine.last_error,
        )
