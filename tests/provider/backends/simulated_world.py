"""Simulated clouds for tests: small worlds, cores over them on virtual time, a book that keeps its own account.

Run as a module it prints what happens in one busy world, so that runs with other hash seeds can be compared.
"""

import asyncio
import copy
import logging
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import structlog

from bigfleet.model.clock import NANOS_PER_SECOND
from bigfleet.model.states import MachineState
from bigfleet.provider.backends.simulated.backend import SimulatedBackend, SimulatedReadiness
from bigfleet.provider.backends.simulated.book import Entry, HostBook, MemoryHostBook, SimulatedHost
from bigfleet.provider.backends.simulated.catalogue import load_catalogue
from bigfleet.provider.backends.simulated.cloud import SimulatedCloud
from bigfleet.provider.backends.simulated.draws import KeyedDraws
from bigfleet.provider.backends.simulated.fleet import build_fleet
from bigfleet.provider.backends.simulated.world import CloudWorld, parse_world
from bigfleet.provider.kit.core import CapacityCore
from bigfleet.provider.kit.options import CoreOptions
from bigfleet.provider.records.refusal import Refused
from bigfleet.provider.storage.store import MemoryStore, Store
from bigfleet.sim.kernel.virtual_time import LoopClock, run_virtual
from tests.provider.harness import make_core, started

S = MachineState

SPOT = "pools: [{instance_type: std.8x32, zone: z, count: 4, capacity_type: spot%s}]\n"
ON_DEMAND = "pools: [{instance_type: std.8x32, zone: z, count: 4}]\n"
SPOT_ID = "sim/spot/std.8x32/z/000"
ON_DEMAND_ID = "sim/on-demand/std.8x32/z/000"

#: Everything that can happen in a world, often, in two zones.
BUSY = """
pools:
  - {instance_type: std.8x32, zone: a, count: 2, capacity_type: spot, interruption_probability: 0.9}
  - {instance_type: std.8x32, zone: b, count: 2}
  - {instance_type: std.2x8, zone: b, count: 1, capacity_type: reserved}
interruption:
  hint_share: 0.7
  without_notice_share: 0.3
  waves:
    - {pool: spot/std.8x32/a, at_seconds: 1500, share: 0.5}
    - {pool: on-demand/std.8x32/b, at_seconds: 2500, share: 1}
  zone_outages: [{zone: b, from_seconds: 3000, to_seconds: 3400}]
stockout: {available_seconds_mean: 900, out_seconds_mean: 200}
dwell: {slow_share: 0.1}
faults: {create_error: 0.1, join_never: 0.1, error_after_effect: 0.1, effect_after_timeout: 0.1, transient: 0.1,
  inventory_partial: 0.1, inventory_stale: 0.1, price_nan: 0.1, price_negative: 0.1, price_x100: 0.1,
  probability_over_1: 0.1}
"""


def world_of(text: str) -> CloudWorld:
    return parse_world(text.encode(), "world.yaml")


def make_cloud(
    world: CloudWorld, *, seed: int = 1, book: HostBook | None = None, is_calm: bool = False, time_scale: float = 1.0
) -> SimulatedCloud:
    return SimulatedCloud(
        world=world,
        offers=build_fleet(world, load_catalogue(None), "sim"),
        draws=KeyedDraws(seed),
        book=book or MemoryHostBook(),
        clock=LoopClock(),
        time_scale=time_scale,
        is_calm=is_calm,
    )


def make_simulated(
    cloud: SimulatedCloud, store: Store | None = None, *, failed_hold_seconds: float = 600.0
) -> CapacityCore:
    return make_core(
        SimulatedBackend(cloud, provider="sim", clock=LoopClock()),
        store=store or MemoryStore(),
        readiness=SimulatedReadiness(cloud, time_scale=1.0),
        options=CoreOptions(is_inline=True, failed_hold_seconds=failed_hold_seconds),
    )


async def live(core: CapacityCore, seconds: float) -> list[tuple[float, str, str, float]]:
    """Create everything, bind it, and note every change that a reader sees."""
    seen = []
    cursor = b""
    for step in range(int(seconds / 10)):
        listing = await core.list((), 0, cursor)
        cursor = listing.revision
        seen += [(step * 10.0, r.id, r.state.name, r.machine.price_usd_per_hour) for r in listing.records]
        for record in listing.records:
            try:
                if record.state is S.SPECULATIVE:
                    await core.create(record.id)
                elif record.state is S.IDLE:
                    await core.configure(record.id, "c-1", b"", {})
            except Refused:
                continue
        await asyncio.sleep(10)
    return sorted(seen)


@dataclass(slots=True)
class Life:
    """What the auditor saw of one host."""

    pool: str
    host: SimulatedHost
    #: When an entry no longer held it.
    removed_unix_nanos: int | None = None

    def end_unix_nanos(self) -> int:
        """Return when it ended, by the latest times that were written of it."""
        host = self.host
        ends = [LoopClock().unix_nanos() if self.removed_unix_nanos is None else self.removed_unix_nanos]
        if host.deleted_by:
            ends.append(host.gone_unix_nanos)
        elif host.dies_unix_nanos is not None:
            ends.append(host.dies_unix_nanos)
        return min(ends)


class AuditedBook(MemoryHostBook):
    """A book that follows every host through what is written, and adds up the bill by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.lives: dict[str, Life] = {}
        #: Every write, with its time.
        self.writes: list[tuple[int, str, SimulatedHost | None]] = []
        self._current: dict[str, str] = {}

    def save(self, entries: Iterable[tuple[str, Entry]]) -> None:
        taken = list(entries)
        super().save(taken)
        for machine_id, entry in taken:
            self._follow(machine_id, copy.deepcopy(entry.host))

    def _follow(self, machine_id: str, host: SimulatedHost | None) -> None:
        now = LoopClock().unix_nanos()
        self.writes.append((now, machine_id, host))
        before = self._current.get(machine_id)
        if before is not None and (host is None or host.ref != before):
            self.lives[before].removed_unix_nanos = now
            assert host is None or self.lives[before].end_unix_nanos() <= now, "two hosts of one machine"
            del self._current[machine_id]
        if host is None:
            return
        pool = machine_id.split("/", 1)[1].rsplit("/", 1)[0]
        life = self.lives.setdefault(host.ref, Life(pool=pool, host=host))
        assert life.removed_unix_nanos is None, f"host {host.ref} came back"
        life.host = host
        self._current[machine_id] = host.ref

    def billed_seconds(self) -> Counter[str]:
        """Return the begun seconds of every host that ever ran, by pool."""
        bill: Counter[str] = Counter()
        for life in self.lives.values():
            nanos = life.end_unix_nanos() - life.host.running_unix_nanos
            bill[life.pool] += max(0, (nanos + NANOS_PER_SECOND - 1) // NANOS_PER_SECOND)
        return bill


def _told(host: SimulatedHost | None) -> str:
    """Return a host without the operation ids, which every run draws again."""
    if host is None:
        return "no host"
    fields = {name: getattr(host, name) for name in host.__struct_fields__}
    return str({name: value for name, value in fields.items() if not name.endswith("_by")})


def trace(seed: int) -> list[str]:
    """Return every write of the cloud to the nanosecond without operation ids, every change that a reader saw, and the
    bill."""

    async def main() -> list[str]:
        book = AuditedBook()
        cloud = make_cloud(world_of(BUSY), seed=seed, book=book)
        core = await started(make_simulated(cloud, failed_hold_seconds=30))
        seen = await live(core, 4000)
        await core.stop()
        lines = [f"{at} {machine_id} {_told(host)}" for at, machine_id, host in book.writes]
        lines += [repr(fact) for fact in (*seen, *cloud.pools())]
        cloud.close()
        return lines

    return run_virtual(main)


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    print("\n".join(trace(int(sys.argv[1]))))
