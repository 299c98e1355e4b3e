"""Simulates the cloud: hosts boot, join, drain and end with delays, prices change, hosts are interrupted.

docs/spec/provider.md §21. It knows no provider state: it answers calls, emits events and keeps the bill. At most one
host exists per machine id, and none survives a successful delete. Effects must be committed before a call returns.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from bigfleet.model.clock import NANOS_PER_SECOND, Clock
from bigfleet.model.states import CapacityType
from bigfleet.provider.backend import Slot
from bigfleet.provider.backends.simulated.book import Entry, HostBook, Made, SimulatedHost
from bigfleet.provider.backends.simulated.draws import KeyedDraws
from bigfleet.provider.backends.simulated.economy import Economy
from bigfleet.provider.backends.simulated.fleet import Market, SimulatedOffer, pool_name
from bigfleet.provider.backends.simulated.life import LifeStage, billed_nanos, cluster_of, is_there, stage_of
from bigfleet.provider.backends.simulated.world import CloudWorld, Dwell, Faults


class OutOfStock(Exception):
    """There is no capacity of that kind now."""


class Hiccup(Exception):
    """The call failed and may be tried again."""


class CallFailed(Exception):
    """The call failed for good."""


class Warning(NamedTuple):
    """Something that will happen, or happens, to a host."""

    at_unix_nanos: int
    machine_id: str
    host_number: int
    #: Ordered: a hint comes before a notice, a notice before the end.
    kind: int


HINT, NOTICE, END = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    """What a pool is and was."""

    name: str
    #: Machines that are offered.
    offered: int
    #: Hosts that are there, booting ones included.
    hosts: int
    #: Over all hosts that the pool ever had, in seconds of the world; every begun second of a host counts.
    billed_seconds: int


class SimulatedCloud:
    """All hosts of one world. Used on one event loop."""

    def __init__(
        self,
        *,
        world: CloudWorld,
        offers: Sequence[SimulatedOffer],
        draws: KeyedDraws,
        book: HostBook,
        clock: Clock,
        time_scale: float = 1.0,
        is_calm: bool = False,
    ) -> None:
        """Open the book; hosts that are there from the start are made on first sight. Raises StartRefused."""
        self.offers = {offer.slot.id: offer for offer in offers}
        self._world = world
        self._draws = draws
        self._book = book
        self._clock = clock
        self._faults = Faults() if is_calm else world.faults
        began, self._entries = book.load(clock.unix_nanos())
        self.economy = Economy(world, draws, time_scale=time_scale, is_calm=is_calm, began_unix_nanos=began)
        self._is_closed = False
        self._changed = asyncio.Event()
        #: Machines that got a host since `new_warnings` was asked.
        self._unwarned: dict[str, None] = {}
        if is_calm:
            self._spare_hosts()
        self._start_hosts()

    def _spare_hosts(self) -> None:
        """Let go of the fates that hosts got in a world that was not calm; who died stays dead."""
        for machine_id, host in self.hosts():
            if host.dies_unix_nanos is not None:
                host.dies_unix_nanos = host.notice_unix_nanos = host.hint_unix_nanos = None
                self._save(machine_id)

    def _start_hosts(self) -> None:
        now = self._clock.unix_nanos()
        started = []
        for machine_id, offer in self.offers.items():
            if offer.is_idle_at_start and machine_id not in self._entries:
                entry = self._entries[machine_id] = Entry(counters={"create": 1})
                self._put_host(entry, offer, self._new_host(offer, 0, "start", now, now), now)
                started.append((machine_id, entry))
        if started:
            self._book.save(started)

    def close(self) -> None:
        """Close the book; calls that still wait give up."""
        self._is_closed = True
        self._book.close()

    # ---- hosts ---------------------------------------------------------------------------------------------------

    def host(self, machine_id: str) -> SimulatedHost | None:
        """Return the machine's host, None when there is none or it is no more."""
        entry = self._entries.get(machine_id)
        if entry is None or entry.host is None:
            return None
        return entry.host if is_there(entry.host, self._clock.unix_nanos()) else None

    def machine_ids(self) -> list[str]:
        """Return every machine that ever had a host, those included that no offer names any more."""
        return list(self._entries)

    def hosts(self) -> list[tuple[str, SimulatedHost]]:
        """Return every live host, those included that no offer names any more."""
        return [(machine_id, host) for machine_id in self._entries if (host := self.host(machine_id)) is not None]

    def stage(self, host: SimulatedHost) -> LifeStage:
        """Return where a host is now."""
        return stage_of(host, self._clock.unix_nanos())

    def cluster(self, host: SimulatedHost) -> str:
        """Return the cluster that a host was booted into, nothing once it was drained."""
        return cluster_of(host, self._clock.unix_nanos())

    def _entry(self, machine_id: str) -> Entry:
        return self._entries.setdefault(machine_id, Entry())

    def _next(self, machine_id: str, topic: str) -> int:
        """Return how many-th draw of a topic this is for a machine; durable with the next save of the entry."""
        counters = self._entry(machine_id).counters
        number = counters.get(topic, 0)
        counters[topic] = number + 1
        return number

    def _save(self, machine_id: str) -> None:
        self._book.save([(machine_id, self._entry(machine_id))])

    def _happens(self, fault: str, machine_id: str) -> bool:
        probability = getattr(self._faults, fault)
        if not probability:
            return False
        return self._draws.happens(probability, fault, machine_id, self._next(machine_id, fault))

    def _lands_unix_nanos(
        self, machine_id: str, topic: str, dwell: Dwell, deadline_unix_nanos: int, *, grace_seconds: int = 0
    ) -> int:
        """Return when what begins now is done: after its dwell, or after the deadline when that fault happens."""
        number = self._next(machine_id, topic)
        dwell_nanos = self.economy.dwell_nanos(dwell, topic, machine_id, number)
        if grace_seconds > 0:
            dwell_nanos = min(dwell_nanos, grace_seconds * NANOS_PER_SECOND)
        if self._happens("effect_after_timeout", machine_id):
            return deadline_unix_nanos + self.economy.scaled_nanos(dwell.median_seconds)
        return self._clock.unix_nanos() + dwell_nanos

    async def _until(self, unix_nanos: int) -> None:
        """Return at that time or after it; a sleep that ends a rounding error early is not enough."""
        while (left_nanos := unix_nanos - self._clock.unix_nanos()) > 0:
            await self._clock.sleep(left_nanos / NANOS_PER_SECOND)
        if self._is_closed:
            raise CallFailed("the cloud was closed while the call waited")

    async def _land(self, unix_nanos: int, deadline_unix_nanos: int) -> None:
        """Wait for an effect. One that lands after the deadline cannot be stopped, whatever the caller says."""
        if unix_nanos <= deadline_unix_nanos:
            await self._until(unix_nanos)
            return
        waiting = asyncio.ensure_future(self._until(unix_nanos))
        while not waiting.done():
            try:
                await asyncio.wait({waiting})
            except asyncio.CancelledError:
                if self._is_closed:
                    waiting.cancel()
                    raise

    # ---- calls ---------------------------------------------------------------------------------------------------

    async def create(self, machine_id: str, op_id: str, deadline_unix_nanos: int) -> SimulatedHost:
        """Make the machine's host and return it once it runs. Raises OutOfStock, Hiccup or CallFailed."""
        offer = self.offers.get(machine_id)
        if offer is None:
            raise CallFailed(f"no such offer: {machine_id}")
        host = self.host(machine_id)
        if host is not None and host.deleted_by:
            await self._until(host.gone_unix_nanos)
            host = None
        if host is None:
            await self._check_stock(offer)
            self._begin_call(machine_id)
            if self._happens("create_error", machine_id):
                self._save(machine_id)
                raise CallFailed("the cloud refused the request")
            host = self._make_host(offer, op_id, deadline_unix_nanos)
        await self._land(host.running_unix_nanos, deadline_unix_nanos)
        if self.host(machine_id) is not host:
            raise CallFailed("the host went away while it booted")
        self._end_call(machine_id, "create")
        return host

    async def _check_stock(self, offer: SimulatedOffer) -> None:
        if not self.economy.is_stocked_out(offer.market, self._clock.unix_nanos()):
            return
        answer_nanos = self.economy.scaled_nanos(self._world.stockout.answer_seconds)
        await self._until(self._clock.unix_nanos() + answer_nanos)
        slot = offer.slot
        raise OutOfStock(f"no {slot.capacity_type.label} {slot.instance_type} in {slot.zone} now")

    def _make_host(self, offer: SimulatedOffer, op_id: str, deadline_unix_nanos: int) -> SimulatedHost:
        machine_id, entry = offer.slot.id, self._entry(offer.slot.id)
        now = self._clock.unix_nanos()
        number = entry.counters.get("create", 0)
        dwell = self._world.dwell.create(offer.slot.capacity_type)
        running = self._lands_unix_nanos(machine_id, "create", dwell, deadline_unix_nanos)
        self._end_host(entry)
        host = self._new_host(offer, number, op_id, now, running)
        self._put_host(entry, offer, host, now)
        self._save(machine_id)
        self._unwarned[machine_id] = None
        self._changed.set()
        return host

    def _new_host(
        self, offer: SimulatedOffer, number: int, op_id: str, requested_unix_nanos: int, running_unix_nanos: int
    ) -> SimulatedHost:
        fate = self.economy.fate(
            offer, number, requested_unix_nanos=requested_unix_nanos, running_unix_nanos=running_unix_nanos
        )
        return SimulatedHost(
            ref=f"i-{self._draws.token('host', offer.slot.id, number)}",
            number=number,
            created_by=op_id,
            requested_unix_nanos=requested_unix_nanos,
            running_unix_nanos=running_unix_nanos,
            dies_unix_nanos=fate.dies_unix_nanos if fate else None,
            notice_unix_nanos=fate.notice_unix_nanos if fate else None,
            hint_unix_nanos=fate.hint_unix_nanos if fate else None,
        )

    def _put_host(self, entry: Entry, offer: SimulatedOffer, host: SimulatedHost, now_unix_nanos: int) -> None:
        slot = offer.slot
        assert entry.host is None, f"{slot.id} has a host already"
        entry.host = host
        priced = replace(
            slot,
            price_usd_per_hour=self.economy.price_usd_per_hour(offer, now_unix_nanos),
            interruption_probability=self.economy.probability(offer),
        )
        entry.made = msgspec.convert(priced, Made, from_attributes=True)

    def made(self, machine_id: str) -> Slot | None:
        """Return what the machine's latest host was made as."""
        made = self._entry(machine_id).made
        if made is None:
            return None
        facts = msgspec.structs.asdict(made) | {"capacity_type": CapacityType(made.capacity_type)}
        return Slot(id=machine_id, **facts)

    def _begin_call(self, machine_id: str) -> None:
        if self._happens("transient", machine_id):
            self._save(machine_id)
            raise Hiccup("the cloud answered 503; try again")

    def _end_call(self, machine_id: str, what: str) -> None:
        if self._happens("error_after_effect", machine_id):
            self._save(machine_id)
            raise CallFailed(f"the connection broke after {what} was done")

    def configure(self, machine_id: str, cluster: str, op_id: str, deadline_unix_nanos: int) -> SimulatedHost:
        """Boot the host into a cluster; its node becomes Ready later, or never. Raises Hiccup or CallFailed."""
        host = self.host(machine_id)
        if host is None:
            raise CallFailed("there is no host to configure")
        if host.configured_by != op_id:
            self._begin_call(machine_id)
            ready = self._lands_unix_nanos(machine_id, "join", self._world.dwell.join, deadline_unix_nanos)
            host.cluster, host.configured_by = cluster, op_id
            host.configured_unix_nanos = self._clock.unix_nanos()
            host.ready_unix_nanos = None if self._happens("join_never", machine_id) else ready
            host.drained_by, host.drained_unix_nanos = "", 0
            self._save(machine_id)
            self._end_call(machine_id, "configure")
        return host

    async def drain(self, machine_id: str, grace_seconds: int, op_id: str, deadline_unix_nanos: int) -> None:
        """Take the host out of its cluster; a host that is in none is done. Raises Hiccup or CallFailed."""
        host = self.host(machine_id)
        if host is None:
            raise CallFailed("there is no host to drain")
        if not self.cluster(host):
            return
        if host.drained_by != op_id:
            self._begin_call(machine_id)
            dwell = self._world.dwell.drain
            host.drained_unix_nanos = self._lands_unix_nanos(
                machine_id, "drain", dwell, deadline_unix_nanos, grace_seconds=grace_seconds
            )
            host.drained_by = op_id
            self._save(machine_id)
        await self._land(host.drained_unix_nanos, deadline_unix_nanos)
        self._end_call(machine_id, "drain")

    async def delete(self, machine_id: str, op_id: str, deadline_unix_nanos: int) -> None:
        """Remove the host; none is done. From now on nothing else takes it. Raises Hiccup or CallFailed."""
        host = self.host(machine_id)
        if host is None:
            return
        if not host.deleted_by:
            self._begin_call(machine_id)
            gone = self._lands_unix_nanos(machine_id, "delete", self._world.dwell.delete, deadline_unix_nanos)
            host.deleted_by, host.gone_unix_nanos = op_id, gone
            self._save(machine_id)
        await self._land(host.gone_unix_nanos, deadline_unix_nanos)
        self.remove(machine_id, host)
        self._end_call(machine_id, "delete")

    def remove(self, machine_id: str, host: SimulatedHost) -> None:
        """Take a host out of the world at once, unless it is another one by now."""
        entry = self._entry(machine_id)
        if entry.host is host:
            self._end_host(entry)
            self._save(machine_id)

    # ---- the bill ------------------------------------------------------------------------------------------------

    def _end_host(self, entry: Entry) -> None:
        if entry.host is not None:
            entry.billed_seconds += self._billed_seconds(entry.host)
            entry.host = None

    def _billed_seconds(self, host: SimulatedHost) -> int:
        return -(-billed_nanos(host, self._clock.unix_nanos()) // self.economy.world_second_nanos)

    def pools(self) -> list[PoolStatus]:
        """Return every pool that is offered or ever had a host, by name; costs a look at every machine."""
        now = self._clock.unix_nanos()
        offered = Counter(offer.market for offer in self.offers.values())
        hosts: Counter[Market] = Counter()
        billed_seconds: Counter[Market] = Counter()
        for entry in self._entries.values():
            if entry.made is None:
                continue
            market = (entry.made.instance_type, entry.made.zone, CapacityType(entry.made.capacity_type))
            billed_seconds[market] += entry.billed_seconds
            if entry.host is not None:
                billed_seconds[market] += self._billed_seconds(entry.host)
                hosts[market] += is_there(entry.host, now)
        statuses = [
            PoolStatus(
                name=pool_name(market),
                offered=offered[market],
                hosts=hosts[market],
                billed_seconds=billed_seconds[market],
            )
            for market in offered.keys() | billed_seconds.keys()
        ]
        return sorted(statuses, key=lambda status: status.name)

    # ---- faults of the inventory ---------------------------------------------------------------------------------

    def inventory_fault(self, fault: str, subject: str, number: int) -> bool:
        """Return whether a fault of the inventory happens in that pass."""
        return self._draws.happens(getattr(self._faults, fault), fault, subject, number)

    # ---- events --------------------------------------------------------------------------------------------------

    def warnings(self) -> list[Warning]:
        """Return everything that will happen to hosts, or has and was not removed yet, in time order."""
        self._unwarned.clear()
        return sorted(warning for machine_id in self._entries for warning in self._warnings_of(machine_id))

    def new_warnings(self) -> list[Warning]:
        """Return what will happen to the hosts that were made since this or `warnings` was asked."""
        new = [warning for machine_id in self._unwarned for warning in self._warnings_of(machine_id)]
        self._unwarned.clear()
        return new

    def _warnings_of(self, machine_id: str) -> list[Warning]:
        host = self._entries[machine_id].host
        if host is None or host.dies_unix_nanos is None or host.deleted_by:
            return []
        times = ((host.hint_unix_nanos, HINT), (host.notice_unix_nanos, NOTICE), (host.dies_unix_nanos, END))
        return [Warning(at, machine_id, host.number, kind) for at, kind in times if at is not None]

    def pending(self, warning: Warning) -> SimulatedHost | None:
        """Return the host of a warning if it is still that one and is not being deleted."""
        entry = self._entries.get(warning.machine_id)
        host = entry.host if entry is not None else None
        return host if host is not None and host.number == warning.host_number and not host.deleted_by else None

    async def wait_until_or_changed(self, unix_nanos: int) -> bool:
        """Return True when hosts were made before that time, else False at that time."""
        seconds = (unix_nanos - self._clock.unix_nanos()) / NANOS_PER_SECOND
        if not self._changed.is_set() and seconds > 0:
            try:
                async with asyncio.timeout(seconds):
                    await self._changed.wait()
            except TimeoutError:
                return False
        is_changed = self._changed.is_set()
        self._changed.clear()
        return is_changed

    def walking_markets(self) -> dict[tuple[str, str], list[SimulatedOffer]]:
        """Return the machines whose price follows a random walk, by type and zone."""
        markets: defaultdict[tuple[str, str], list[SimulatedOffer]] = defaultdict(list)
        offers: Iterable[SimulatedOffer] = self.offers.values()
        for offer in offers:
            if self.economy.has_walking_price(offer):
                markets[offer.slot.instance_type, offer.slot.zone].append(offer)
        return markets
