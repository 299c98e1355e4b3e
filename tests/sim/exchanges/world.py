"""A shard that exchanges machines while faults happen, and the invariants that hold all the time.

One cluster of dear machines, and cheap ones on offer. Shard, provider and operator are those of `tests.shard.world`;
time is virtual. Faults are drawn by seed: a shard that is killed, machines that do not boot, prices that move back,
demand that changes, machines that another shard takes, drains that are refused, an operator that is away, a roll-up
that lost its rows.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Final

from bigfleet.exchange.course import ACQUIRING_SECONDS_MAX
from bigfleet.exchange.values import ExchangeMode, ExchangeSettings
from bigfleet.model.compute import compute_inline
from bigfleet.model.frames import DrainOutcome
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.shard.exchange.exchange_records import ExchangeRecord, MemoryExchanges
from bigfleet.shard.exchange.proposals import ExchangeProposals
from bigfleet.shard.ports import FenceToken, TransitionAck
from bigfleet.shard.sessions.outbox import CloseReason
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.shard.cycle.test_pods import pods
from tests.shard.world import TARGETS, ScriptedProvider, World, machine

S = MachineState
MINUTE: Final = 60.0
#: Pods of half a cpu that a machine hosts, by instance type.
SLOTS: Final[Mapping[str, int]] = {"dear": 8, "cheap": 16}
RECLAIM_AFTER_SECONDS: Final = 600.0
#: The most that is wanted, as a share of what is wanted at the beginning.
DEMAND_SHARE_MAX: Final = 1.2
SETTINGS: Final = ExchangeSettings(excess_seconds=RECLAIM_AFTER_SECONDS)
#: Looks are a minute apart, and a restart, like the last look, may come late.
LATE_SECONDS: Final = 3 * MINUTE


def dear(number: int) -> Machine:
    """Return a machine of 4 cpu at $3.00 that serves."""
    return machine(
        f"dear{number:02}",
        S.CONFIGURED,
        cluster=ClusterId("c1"),
        instance_type="dear",
        capacity_type=CapacityType.ON_DEMAND,
        price_usd_per_hour=3.0,
    )


def cheap(number: int) -> Machine:
    """Return a machine of 8 cpu at $0.30 on offer."""
    return machine(
        f"cheap{number:02}",
        S.SPECULATIVE,
        instance_type="cheap",
        capacity_type=CapacityType.SPOT,
        allocatable={"cpu": "8", "memory": "32Gi"},
        price_usd_per_hour=0.3,
        interruption_probability=0.0001,
    )


class DurableExchanges(MemoryExchanges):
    """Records that outlive processes, and everything that was ever written to them."""

    def __init__(self) -> None:
        super().__init__()
        self.history: dict[str, ExchangeRecord] = {}

    def put(self, record: ExchangeRecord, now_unix_nanos: int) -> None:
        """Add or replace a record."""
        super().put(record, now_unix_nanos)
        self.history[record.id] = record


class BootingProvider(ScriptedProvider):
    """Transitions end after some minutes, or never; reports each drain that it begins."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._random = random
        self.on_drain: Callable[[str], None] = lambda _machine_id: None
        self.minutes_left: dict[str, int] = {}
        #: Of these the next transition never ends, or fails.
        self.dead: set[str] = set()
        self.faulty: set[str] = set()

    async def drain(self, machine_id: MachineId, grace_seconds: int, token: FenceToken) -> TransitionAck:
        self.on_drain(machine_id)
        return await super().drain(machine_id, grace_seconds, token)

    def tick(self) -> None:
        """Let a minute pass."""
        for machine_id, record in list(self.records.items()):
            if record.state not in TARGETS or machine_id in self.dead:
                continue
            left = self.minutes_left.setdefault(machine_id, self._random.randint(0, 3))
            self.minutes_left[machine_id] = left - 1
            if left > 0:
                continue
            del self.minutes_left[machine_id]
            if machine_id in self.faulty:
                self.faulty.discard(machine_id)
                self.fail(machine_id, "it does not boot")
            else:
                self.settle(machine_id)


@dataclass
class Breaches:
    """What did not hold."""

    found: list[str] = field(default_factory=list)

    def names(self) -> set[str]:
        """Return the invariants that were broken."""
        return {each.split(":")[0] for each in self.found}


class ExchangeWorld:
    """The world of one seed."""

    def __init__(self, seed: int, *, machines: int = 12) -> None:
        self.random = Random(seed)
        self.breaches = Breaches()
        self.provider = BootingProvider(self.random)
        self.provider.add(*(dear(n) for n in range(machines)), *(cheap(n) for n in range(machines)))
        self.provider.on_drain = self._drains
        self.store = DurableExchanges()
        self.epoch = 0
        self.wanted = self.usual = SLOTS["dear"] * machines
        self.usual_price = self.price = 0.3
        #: Minutes until what a fault changed is as before.
        self._restores: list[tuple[int, Callable[[], None]]] = []
        self.minute = 0
        self.refused_minutes = 0
        self._begun_machines: dict[str, int] = {}
        self.start()

    # ---- processes ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the shard, in place of one that runs."""
        self.epoch += 1
        self.world = World(
            self.provider,
            epoch=self.epoch,
            exchange_store=self.store,
            reclaim_after_seconds=RECLAIM_AFTER_SECONDS,
        )
        self.exchanges = ExchangeProposals(
            shard=self.world.shard, mode=ExchangeMode.ON, clock=LoopClock(), compute=compute_inline, workers=None
        )
        self.connect()

    def connect(self) -> None:
        """Let the operator come back."""
        self.operator = self.world.connect("c1")
        if self.refused_minutes:
            self.operator.drain = (DrainOutcome.WOULD_NOT_FIT, 1.0)
        self.report()

    def report(self) -> None:
        """Send the cluster's roll-up."""
        self.operator.report(pods("c1", ("500m", self.wanted)))

    async def run(self, minutes: int, faults: Mapping[str, Callable[["ExchangeWorld"], None]], share: float) -> None:
        """Let time pass; in each minute a fault happens with this probability."""
        for _ in range(minutes):
            await asyncio.sleep(MINUTE)
            self.minute += 1
            due = [restore for at, restore in self._restores if at <= self.minute]
            self._restores = [each for each in self._restores if each[0] > self.minute]
            for restore in due:
                restore()
            if faults and self.random.random() < share:
                faults[self.random.choice(sorted(faults))](self)
            self._prices()
            self.provider.tick()
            report = await self.world.cycle()
            await self.exchanges.look()
            self._note_begun()
            if report.decision is None:
                self.breaches.found.append(f"E0: the cycle of minute {self.minute} failed")
            self.breaches.found += self._bounds()

    def later(self, minutes: int, restore: Callable[[], None]) -> None:
        """Restore something after some minutes."""
        self._restores.append((self.minute + minutes, restore))

    def _prices(self) -> None:
        for machine_id, record in self.provider.records.items():
            if record.instance_type == "cheap" and record.price_usd_per_hour != self.price:
                self.provider.records[machine_id] = replace(record, price_usd_per_hour=self.price)

    # ---- what must hold ------------------------------------------------------------------------------------------

    @property
    def running(self) -> list[ExchangeRecord]:
        """The exchanges under way, by their records."""
        return [record for record in self.store.records.values() if not record.ended_unix_nanos]

    def slots(self, *, without: str = "") -> int:
        """Return how many pods the machines that serve the cluster host."""
        found = [each for each in self.provider.records.values() if each.cluster == "c1" and each.id != without]
        return sum(SLOTS[each.instance_type] for each in found if each.state is S.CONFIGURED)

    def _demand(self) -> int:
        rows = self.world.shard.intake.table.rows_of("c1")
        return sum(shape.count for row in rows for shape in row.shapes)

    def _drains(self, machine_id: str) -> None:
        """E1: a machine drains only if those that serve without it host every pod."""
        left = self.slots(without=machine_id)
        if left < self._demand():
            self.breaches.found.append(f"E1: {machine_id} drains, {left} of {self._demand()} pods have a place")

    def _note_begun(self) -> None:
        for record in self.running:
            held = [each for each in self.provider.records.values() if each.cluster == "c1"]
            self._begun_machines.setdefault(record.id, len(held))

    def _bounds(self) -> Iterator[str]:
        """E2: no more than the budget drains; E3: an exchange ends in time; E4: machines cool."""
        now_nanos = LoopClock().unix_nanos()
        for record in self.running:
            budget = SETTINGS.budget(self._begun_machines[record.id])
            going = [self.provider.records[each] for each in record.goes_ids if each in self.provider.records]
            draining = [each.id for each in going if each.state is S.DRAINING]
            if len(draining) > budget:
                yield f"E2: {len(draining)} machines drain for {record.id}, the budget is {budget}"
            waves = -(-len(record.goes_ids) // budget)
            most_seconds = ACQUIRING_SECONDS_MAX + SETTINGS.excess_seconds + 2 * SETTINGS.drain_seconds * waves
            if now_nanos - record.begun_unix_nanos > (most_seconds + LATE_SECONDS) * 1e9:
                yield f"E3: {record.id} has been under way for more than {most_seconds} s"
        cooling_nanos = SETTINGS.cooling_seconds * 1e9
        ended: dict[str, int] = {}
        for record in self.store.history.values():
            for machine_id in record.goes_ids:
                if machine_id in ended and record.begun_unix_nanos - ended[machine_id] < cooling_nanos:
                    yield f"E4: {machine_id} goes in {record.id} less than 6 h after its last exchange"
            ended.update(dict.fromkeys((*record.goes_ids, *record.came_ids), record.ended_unix_nanos))

    def short(self) -> bool:
        """Return whether pods have no place in the last decision."""
        decided = self.world.shard.view.decided_on
        return decided is not None and any(row.unplaced for row in decided.rows)


# ---- faults ----------------------------------------------------------------------------------------------------------


def _kill(world: ExchangeWorld) -> None:
    """The process is killed with SIGKILL, and starts again at once."""
    world.start()


def _boot_fails(world: ExchangeWorld) -> None:
    """The next machine that is created fails."""
    world.provider.faulty.update(each.id for each in world.provider.records.values() if each.state is S.CREATING)


def _boot_hangs(world: ExchangeWorld) -> None:
    """What is being created is not there for three hours."""
    creating = {each.id for each in world.provider.records.values() if each.state is S.CREATING}
    world.provider.dead |= creating
    world.later(180, lambda: world.provider.dead.difference_update(creating))


def _price_back(world: ExchangeWorld) -> None:
    """While something is exchanged, the cheap machines cost more than the dear ones for some time.

    At other times that would only put the next exchange off, for as long as prices are remembered.
    """
    if not world.running:
        return
    world.price = 7.0
    world.later(world.random.randint(5, 60), lambda: setattr(world, "price", world.usual_price))


def _demand_changes(world: ExchangeWorld) -> None:
    """The cluster wants more, or less, for some time."""
    world.wanted = round(world.usual * world.random.choice((0.5, 0.8, 0.97, 1.03, DEMAND_SHARE_MAX)))
    world.report()

    def restore() -> None:
        world.wanted = world.usual
        world.report()

    world.later(world.random.randint(5, 90), restore)


def _handed_over(world: ExchangeWorld) -> None:
    """Another shard takes a machine: it is listed here no longer. What is left is enough for the largest demand."""
    held = sorted(each.id for each in world.provider.records.values() if each.cluster == "c1")
    slots = sum(SLOTS[each.instance_type] for each in world.provider.records.values())
    if len(held) > 4 and slots - max(SLOTS.values()) >= DEMAND_SHARE_MAX * world.usual:
        world.provider.records.pop(world.random.choice(held))


def _drains_refused(world: ExchangeWorld) -> None:
    """Pods fit on no other node, says the operator."""
    world.refused_minutes = 1
    world.operator.drain = (DrainOutcome.WOULD_NOT_FIT, 1.0)

    def restore() -> None:
        world.refused_minutes = 0
        world.operator.drain = (DrainOutcome.DRAINED, 5.0)

    world.later(world.random.randint(10, 60), restore)


def _operator_away(world: ExchangeWorld) -> None:
    """The operator is killed and comes back."""
    world.world.shard.sessions.close(world.operator.session, CloseReason.GONE)
    world.later(world.random.randint(1, 5), world.connect)


def _roll_up_empty(world: ExchangeWorld) -> None:
    """One roll-up has lost nearly all of its pods."""
    world.operator.report(pods("c1", ("500m", 1)))
    world.later(1, world.report)


FAULTS: Final[Mapping[str, Callable[[ExchangeWorld], None]]] = {
    "kill": _kill,
    "boot-fails": _boot_fails,
    "boot-hangs": _boot_hangs,
    "price-back": _price_back,
    "demand-changes": _demand_changes,
    "handed-over": _handed_over,
    "drains-refused": _drains_refused,
    "operator-away": _operator_away,
    "roll-up-empty": _roll_up_empty,
}
