"""Implements the provider's backend over the simulated cloud: calls, stages, events.

docs/spec/provider.md §16, §21. It is resumable in all kinds. It must never look at the provider's records.
"""

import asyncio
import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from bigfleet.model.clock import NANOS_PER_SECOND, Clock
from bigfleet.provider.backend import (
    ExistingHost,
    Feed,
    Found,
    FoundKind,
    Host,
    LateResult,
    Limits,
    MachineView,
    Op,
    Slot,
    Stockout,
    Transient,
)
from bigfleet.provider.backends.simulated.book import SimulatedHost
from bigfleet.provider.backends.simulated.cloud import (
    END,
    HINT,
    Hiccup,
    OutOfStock,
    SimulatedCloud,
    Warning,
)
from bigfleet.provider.backends.simulated.fleet import SimulatedOffer
from bigfleet.provider.backends.simulated.life import LifeStage
from bigfleet.provider.records.kinds import Kind

#: What is pushed for a rebalance hint and for a reclaim notice.
HINT_PROBABILITY = 0.5
NOTICE_PROBABILITY = 0.99
#: A faster random walk of prices than this is not pushed, only read.
_PUSH_SECONDS_MIN = 1.0
_READY_SECONDS_MAX = 2.0
_READY_SECONDS_MIN = 0.02
_SECONDS_PER_HOUR = 3600
#: Some milliseconds of work.
_FACTS_PER_TURN_MAX = 500


class SimulatedBackend:
    """Implements every optional Protocol but `admit`."""

    def __init__(self, cloud: SimulatedCloud, *, provider: str, clock: Clock) -> None:
        self.provider = provider
        self.limits = Limits(resumable=frozenset(Kind))
        self._cloud = cloud
        self._clock = clock
        self._passes = 0
        self._last_inventory: list[Slot] | None = None

    # ---- facts ---------------------------------------------------------------------------------------------------

    async def inventory(self) -> Sequence[Slot] | Iterator[Slot]:
        """Return every slot and every host, with the prices of now, and with the faults that the world asks for."""
        cloud, number = self._cloud, self._passes
        self._passes += 1
        if self._last_inventory is not None and cloud.inventory_fault("inventory_stale", "", number):
            return self._last_inventory
        now = self._clock.unix_nanos()
        slots: dict[str, Slot] = {}
        for count, (machine_id, offer) in enumerate(cloud.offers.items(), 1):
            slots[machine_id] = self._priced(offer, now, number)
            await self._breathe(count)
        facts: list[Slot] = list(slots.values())
        for count, machine_id in enumerate(cloud.machine_ids(), 1):
            host, slot = cloud.host(machine_id), slots.get(machine_id) or cloud.made(machine_id)
            if host is not None and slot is not None:
                facts.append(ExistingHost.of(slot, host_ref=host.ref, node_name=_node_name(host)))
            await self._breathe(count)
        # The first pass is whole and good: a fleet with a bad one would not start at all.
        if number and cloud.inventory_fault("inventory_partial", "", number):
            return _broken_half_way(facts)
        self._last_inventory = facts
        return facts

    async def _breathe(self, count: int) -> None:
        """Let calls be served while a large world is read out."""
        if count % _FACTS_PER_TURN_MAX == 0:
            await self._clock.sleep(0)

    def _priced(self, offer: SimulatedOffer, now_unix_nanos: int, number: int) -> Slot:
        economy = self._cloud.economy
        price = economy.price_usd_per_hour(offer, now_unix_nanos)
        probability = economy.probability(offer)
        machine_id = offer.slot.id
        if number:
            price = self._bad_price(price, machine_id, number)
            if self._cloud.inventory_fault("probability_over_1", machine_id, number):
                probability += 1.5
        slot = offer.slot
        if price == slot.price_usd_per_hour and probability == slot.interruption_probability:
            return slot
        return replace(slot, price_usd_per_hour=price, interruption_probability=probability)

    def _bad_price(self, price: float, machine_id: str, number: int) -> float:
        if self._cloud.inventory_fault("price_nan", machine_id, number):
            return math.nan
        if self._cloud.inventory_fault("price_negative", machine_id, number):
            return -price - 1.0
        if self._cloud.inventory_fault("price_x100", machine_id, number):
            return price * 100.0
        return price

    # ---- calls ---------------------------------------------------------------------------------------------------

    def _deadline_unix_nanos(self, op: Op) -> int:
        left_seconds = op.deadline_monotonic_seconds - self._clock.monotonic_seconds()
        return self._clock.unix_nanos() + round(left_seconds * NANOS_PER_SECOND)

    async def create(self, machine: MachineView, op: Op) -> Host:
        """Request a host and wait until it runs."""
        try:
            host = await self._cloud.create(machine.id, op.id, self._deadline_unix_nanos(op))
        except OutOfStock as error:
            raise Stockout(str(error)) from error
        except Hiccup as error:
            raise Transient(str(error)) from error
        return Host(ref=host.ref, node_name=_node_name(host))

    async def configure(self, machine: MachineView, cluster: str, blob: bytes, op: Op) -> str | None:
        """Hand the blob to the host; the readiness checker says when its node is Ready."""
        try:
            return _node_name(self._cloud.configure(machine.id, cluster, op.id, self._deadline_unix_nanos(op)))
        except Hiccup as error:
            raise Transient(str(error)) from error

    async def drain(self, machine: MachineView, grace_seconds: int, op: Op) -> None:
        """Take the host out of its cluster."""
        try:
            await self._cloud.drain(machine.id, grace_seconds, op.id, self._deadline_unix_nanos(op))
        except Hiccup as error:
            raise Transient(str(error)) from error

    async def delete(self, machine: MachineView, op: Op) -> None:
        """Remove the host."""
        try:
            await self._cloud.delete(machine.id, op.id, self._deadline_unix_nanos(op))
        except Hiccup as error:
            raise Transient(str(error)) from error

    async def adopt(self, machine: MachineView) -> Found:
        """Say what the cloud knows: it sees its hosts, and it sees which nodes are Ready.

        Raises Transient while a join or a drain is under way, whose end will show it.
        """
        host = self._cloud.host(machine.id)
        if host is None:
            return Found(kind=FoundKind.NO_HOST)
        made = Host(ref=host.ref, node_name=_node_name(host))
        match self._cloud.stage(host):
            case LifeStage.RUNNING | LifeStage.LOST_JOIN:
                return Found(kind=FoundKind.CLEAN, host=made)
            case LifeStage.BOOTSTRAPPING | LifeStage.JOINING | LifeStage.DRAINING as stage:
                raise Transient(f"host {host.ref} is {stage.value}; ask again when that has ended")
            case LifeStage.READY if host.cluster == machine.cluster:
                return Found(kind=FoundKind.SERVING, host=made)
            case _:
                return Found(kind=FoundKind.DIRTY, host=made)

    async def compensate(self, machine: MachineView, late: LateResult) -> None:
        """Remove a host that came too late. Other late effects stay: `adopt` sees them, and none runs unseen."""
        host = self._cloud.host(machine.id)
        if late.op.kind is Kind.CREATE and host is not None and host.ref != machine.host.ref:
            self._cloud.remove(machine.id, host)

    def status(self) -> Mapping[str, str]:
        """Return, for `admin status`, each pool by name: what is offered, what runs, and what was billed so far."""
        return {
            f"pool {pool.name}": f"{pool.offered} offered, {pool.hosts} hosts, billed {pool.billed_seconds} s"
            f" ({pool.billed_seconds / _SECONDS_PER_HOUR:.4f} host-hours)"
            for pool in self._cloud.pools()
        }

    # ---- pushes --------------------------------------------------------------------------------------------------

    async def feed(self, feed: Feed) -> None:
        """Push spot prices, warnings and losses until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._feed_fates(feed))
            group.create_task(self._feed_prices(feed))

    async def _feed_fates(self, feed: Feed) -> None:
        due = self._cloud.warnings()
        while True:
            now = self._clock.unix_nanos()
            while due and due[0].at_unix_nanos <= now:
                await self._push(feed, heapq.heappop(due))
            wake = due[0].at_unix_nanos if due else now + _SECONDS_PER_HOUR * NANOS_PER_SECOND
            if await self._cloud.wait_until_or_changed(wake):
                for warning in self._cloud.new_warnings():
                    heapq.heappush(due, warning)

    async def _push(self, feed: Feed, warning: Warning) -> None:
        host = self._cloud.pending(warning)
        if host is None:
            return
        if warning.kind == END:
            await feed.report_lost(warning.machine_id, f"the cloud took host {host.ref}")
            # Removed after it was reported: a provider that is killed in between hears it again.
            self._cloud.remove(warning.machine_id, host)
        elif warning.kind == HINT:
            await feed.report_interruption(warning.machine_id, HINT_PROBABILITY)
        else:
            await feed.report_interruption(warning.machine_id, NOTICE_PROBABILITY, host.dies_unix_nanos)

    async def _feed_prices(self, feed: Feed) -> None:
        economy = self._cloud.economy
        markets = self._cloud.walking_markets()
        if not markets:
            return
        while True:
            now = self._clock.unix_nanos()
            for offers in markets.values():
                price = economy.price_usd_per_hour(offers[0], now)
                await feed.report_price([offer.slot.id for offer in offers], price)
            left_seconds = (economy.next_price_unix_nanos(now) - self._clock.unix_nanos()) / NANOS_PER_SECOND
            await self._clock.sleep(max(_PUSH_SECONDS_MIN, left_seconds))


class SimulatedReadiness:
    """The readiness checker: reads the stage of the host."""

    def __init__(self, cloud: SimulatedCloud, *, time_scale: float) -> None:
        self.interval_seconds = min(_READY_SECONDS_MAX, max(_READY_SECONDS_MIN, _READY_SECONDS_MAX * time_scale))
        self._cloud = cloud

    async def ready(self, machine: MachineView, cluster: str, op: Op) -> bool:
        """Return whether the host's node is Ready in that cluster."""
        host = self._cloud.host(machine.id)
        return host is not None and host.cluster == cluster and self._cloud.stage(host) is LifeStage.READY


def _broken_half_way(facts: Sequence[Slot]) -> Iterator[Slot]:
    """Yield the first half, then break as a connection does."""
    yield from facts[: len(facts) // 2]
    raise ConnectionError("the inventory broke half way")


def _node_name(host: SimulatedHost) -> str:
    return f"node-{host.ref}"
