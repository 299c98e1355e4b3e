"""Tests moves between clusters while faults happen: no pod loses its place, and the fleet comes to rest."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import Final

import pytest

from bigfleet.exchange.course import ACQUIRING_SECONDS_MAX, ExchangeEnd
from bigfleet.model.frames import DrainOutcome
from bigfleet.model.ids import MachineId
from bigfleet.model.states import MachineState
from bigfleet.shard.ports import FenceToken, TransitionAck
from bigfleet.shard.sessions.outbox import CloseReason
from tests.shard.exchange.test_moves import CHEAP, OWN, TwoClusters, cheap, dear, own
from tests.shard.exchange.test_proposals import MINUTE
from tests.shard.world import TARGETS, ScriptedProvider

S = MachineState
MACHINES: Final = 3
#: Reclaim delay, and twenty minutes for each of three waves.
DRAINING_SECONDS_MAX: Final = 600 + 3 * 1200
LATE_SECONDS: Final = 3 * MINUTE

pytestmark = pytest.mark.virtual_time


class WatchedProvider(ScriptedProvider):
    """Transitions end after some minutes; reports each drain that it begins."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._random = random
        self.on_drain: Callable[[str], None] = lambda _machine_id: None
        self.minutes_left: dict[str, int] = {}
        self.faulty: set[str] = set()

    async def drain(self, machine_id: MachineId, grace_seconds: int, token: FenceToken) -> TransitionAck:
        """Report and begin a drain."""
        self.on_drain(machine_id)
        return await super().drain(machine_id, grace_seconds, token)

    def tick(self) -> None:
        """Let a minute pass."""
        for machine_id, record in list(self.records.items()):
            if record.state not in TARGETS:
                continue
            left = self.minutes_left.setdefault(machine_id, self._random.randint(0, 2))
            self.minutes_left[machine_id] = left - 1
            if left > 0:
                continue
            del self.minutes_left[machine_id]
            if machine_id in self.faulty:
                self.faulty.discard(machine_id)
                self.fail(machine_id, "it does not boot")
            else:
                self.settle(machine_id)


class FaultyClusters(TwoClusters):
    """Two clusters of three machines each, of one seed."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.breaches: list[str] = []
        more = [each for n in range(1, MACHINES) for each in (own("giver", n), dear("taker", n))]
        super().__init__(*more, *(cheap(n) for n in range(3, 8)), synchronous=False)
        self.world.shard.sessions.close(self.operators["giver"].session, CloseReason.GONE)
        self.world.shard.sessions.close(self.operators["taker"].session, CloseReason.GONE)
        watched = WatchedProvider(self.random)
        watched.records, self.provider = self.provider.records, watched
        watched.on_drain = self._drains
        self.pods = dict.fromkeys(self.pods, MACHINES)
        self.epoch, self.minute = 0, 0
        self.restores: list[tuple[int, Callable[[], None]]] = []
        self.restart()

    def restart(self) -> None:
        """Start the shard, in place of one that runs."""
        self.epoch += 1
        self.start(self.epoch)

    def later(self, minutes: int, restore: Callable[[], None]) -> None:
        """Restore something after some minutes."""
        self.restores.append((self.minute + minutes, restore))

    async def run(self, minutes: int, faults: Mapping[str, Callable[["FaultyClusters"], None]], share: float) -> None:
        """Let time pass; in each minute a fault happens with this probability."""
        assert isinstance(self.provider, WatchedProvider)
        for _ in range(minutes):
            await asyncio.sleep(MINUTE)
            self.minute += 1
            due = [restore for at, restore in self.restores if at <= self.minute]
            self.restores = [each for each in self.restores if each[0] > self.minute]
            for restore in due:
                restore()
            if faults and self.random.random() < share:
                faults[self.random.choice(sorted(faults))](self)
            self.provider.tick()
            report = await self.world.cycle()
            if report.decision is None:
                self.breaches.append(f"the cycle of minute {self.minute} failed")
            await self.exchanges.look()
            self._check_times()

    def _drains(self, machine_id: str) -> None:
        """A machine drains only if the others of its cluster host every pod."""
        cluster = str(self.provider.records[machine_id].cluster)
        left = [each for each in self.holds(cluster) if each != machine_id]
        if len(left) < self.pods[cluster]:
            self.breaches.append(f"{machine_id} drains, {len(left)} machines of {cluster} are left")

    def _check_times(self) -> None:
        now = self.world.shard.exchanges._clock.unix_nanos()
        most_seconds = ACQUIRING_SECONDS_MAX + DRAINING_SECONDS_MAX + LATE_SECONDS
        for record in self.records():
            if not record.end and (now - record.begun_unix_nanos) / 1e9 > most_seconds:
                self.breaches.append(f"{record.id} takes more than {most_seconds} s")


def _kill(fleet: FaultyClusters) -> None:
    fleet.restart()


def _boot_fails(fleet: FaultyClusters) -> None:
    assert isinstance(fleet.provider, WatchedProvider)
    records = fleet.provider.records.values()
    fleet.provider.faulty.update(each.id for each in records if each.state is S.CREATING)


def _price(fleet: FaultyClusters, price: float) -> None:
    for name, known in list(fleet.provider.records.items()):
        if known.instance_type == CHEAP:
            fleet.provider.records[name] = replace(known, price_usd_per_hour=price)


def _price_moves(fleet: FaultyClusters) -> None:
    _price(fleet, 2.9)
    fleet.later(fleet.random.randint(5, 40), lambda: _price(fleet, 0.3))


def _drains_refused(fleet: FaultyClusters) -> None:
    name = fleet.random.choice(sorted(fleet.operators))
    fleet.operators[name].drain = (DrainOutcome.WOULD_NOT_FIT, 1.0)

    def restore() -> None:
        fleet.operators[name].drain = (DrainOutcome.DRAINED, 5.0)

    fleet.later(fleet.random.randint(10, 40), restore)


def _operator_away(fleet: FaultyClusters) -> None:
    name = fleet.random.choice(sorted(fleet.operators))
    fleet.world.shard.sessions.close(fleet.operators[name].session, CloseReason.GONE)

    def restore() -> None:
        fleet.operators[name] = fleet.world.connect(name, *fleet.capabilities)
        fleet.report(name)

    fleet.later(fleet.random.randint(1, 30), restore)


def _demand_falls(fleet: FaultyClusters) -> None:
    name = fleet.random.choice(sorted(fleet.operators))
    fleet.report(name, MACHINES - 1)
    fleet.later(fleet.random.randint(5, 60), lambda: fleet.report(name, MACHINES))


FAULTS: Final[Mapping[str, Callable[[FaultyClusters], None]]] = {
    "kill": _kill,
    "boot-fails": _boot_fails,
    "price-moves": _price_moves,
    "drains-refused": _drains_refused,
    "operator-away": _operator_away,
    "demand-falls": _demand_falls,
}


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(0, marks=pytest.mark.slow),
        *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 30)),
    ],
)
async def test_no_pod_loses_its_place_and_the_fleet_comes_to_rest(seed: int) -> None:
    """Ten hours with a fault every forty minutes, then two days without: at the end nothing happens any more."""
    fleet = FaultyClusters(seed)
    await fleet.run(600, FAULTS, 0.025)
    assert fleet.records(), "a course without an exchange shows nothing"
    for _ in range(8):
        await asyncio.sleep(7 * 3600)
        await fleet.run(150, {}, 0.0)
    calls, records = len(fleet.provider.calls), len(fleet.records())
    await fleet.run(120, {}, 0.0)

    assert fleet.breaches == []
    assert [method for method, _, _ in fleet.provider.calls[calls:] if method != "delete"] == []
    assert len([each for each in fleet.records() if not each.end]) == 0
    assert records
    bound = [each for each in fleet.provider.records.values() if each.cluster]
    own_ones = [each.id for each in bound if each.instance_type == OWN and each.state is S.CONFIGURED]
    # Machines that failed to boot are not on offer any more, and everything that is paid for serves.
    assert len(own_ones) == MACHINES
    assert fleet.rent() == pytest.approx(0.3 * MACHINES)
    assert {each.end for each in fleet.records()} <= {end.value for end in ExchangeEnd}
