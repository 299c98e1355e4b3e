"""Tests in a closed loop that exchanges do not follow prices that soon turn back, and follow those that stay."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import pytest

from bigfleet.exchange.values import ExchangeMode, WaitReason
from bigfleet.model.ids import ClusterId
from bigfleet.model.machine import Machine
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.shard.exchange.exchange_records import ExchangeRecord
from tests.shard.exchange.test_execution import Exchanging
from tests.shard.world import machine

S = MachineState
#: Cycles and looks are so far apart.
STEP_HOURS: Final = 1 / 12
CHEAP_USD, COSTLY_USD = 0.13, 0.33

pytestmark = pytest.mark.virtual_time

#: (price of zone a, price of zone b) by the hour.
Prices = Callable[[float], tuple[float, float]]


def spot_in(zone: str, number: int, state: MachineState = S.SPECULATIVE, **fields: object) -> Machine:
    """Return a spot machine of 8 cpu on offer."""
    return machine(
        f"spot-{zone}{number}",
        state,
        instance_type="m8",
        zone=zone,
        capacity_type=CapacityType.SPOT,
        allocatable={"cpu": "8", "memory": "32Gi"},
        price_usd_per_hour=0.2,
        **fields,
    )


@dataclass(slots=True)
class Run:
    """What a fleet did."""

    cost_usd: float
    records: list[ExchangeRecord]
    #: What proposals waited for at any look.
    waits: set[WaitReason | None]

    @property
    def begun_hours(self) -> list[float]:
        """When exchanges began, from the first one on."""
        return [(each.begun_unix_nanos - self.records[0].begun_unix_nanos) / 3.6e12 for each in self.records]


async def run(prices: Prices, hours: float, mode: ExchangeMode) -> Run:
    """Let a cluster hold one machine of zone a at first, on offer in both zones."""
    held = spot_in("a", 9, state=S.CONFIGURED, cluster=ClusterId("c1"))
    fleet = Exchanging(held, *(spot_in(zone, n) for zone in "ab" for n in range(3)), mode=mode)
    for machine_id in [each for each in fleet.provider.records if "spot-" not in each]:
        del fleet.provider.records[machine_id]
    found = Run(0.0, [], set())
    for step in range(round(hours / STEP_HOURS)):
        by_zone = dict(zip("ab", prices(step * STEP_HOURS), strict=True))
        for machine_id, record in fleet.provider.records.items():
            usd = by_zone[record.zone]
            fleet.provider.records[machine_id] = replace(record, price_usd_per_hour=usd)
            found.cost_usd += usd * STEP_HOURS if record.state is not S.SPECULATIVE else 0.0
        await asyncio.sleep(STEP_HOURS * 3600)
        await fleet.world.cycle()
        await fleet.exchanges.look()
        found.waits |= {each.waits_for for one in fleet.exchanges.found() for each in one.exchanges.proposals}
    found.records = fleet.records_of()
    return found


def waves(half_hours: float) -> Prices:
    """Return prices in antiphase."""
    both = (CHEAP_USD, COSTLY_USD)
    return lambda hour: both if int(hour / half_hours) % 2 == 0 else both[::-1]


def falls_at(fall_hour: float) -> Prices:
    """Return prices of which that of zone b falls for good."""
    return lambda hour: (COSTLY_USD, CHEAP_USD if hour >= fall_hour else COSTLY_USD)


@pytest.mark.parametrize("half_hours", [4.6, 6.7])
async def test_prices_in_antiphase_cost_no_more_than_without_exchanges(half_hours: float) -> None:
    """They turn again soon after the exchange that follows a turn: none is carried out, and it is shown why."""
    off = await run(waves(half_hours), 30, ExchangeMode.OFF)
    on = await run(waves(half_hours), 30, ExchangeMode.ON)

    assert on.records == []
    assert on.cost_usd <= 1.02 * off.cost_usd
    assert WaitReason.DOES_NOT_PAY in on.waits
    assert None not in on.waits


async def test_a_price_that_falls_for_good_is_followed_as_soon_as_it_counts() -> None:
    """After four hours, with any prices before."""
    off = await run(falls_at(24), 36, ExchangeMode.OFF)
    on = await run(falls_at(24), 36, ExchangeMode.ON)

    assert [record.end for record in on.records] == ["done"]
    # The last 12 hours, less 4 h until the price counts and an hour in which both run.
    assert on.cost_usd < off.cost_usd - (COSTLY_USD - CHEAP_USD) * (12 - 5)


async def test_what_is_realised_has_the_hours_after_the_end_in_it() -> None:
    """A loss where prices turned back soon after the end; what was promised where they did not."""
    turned = await run(
        lambda hour: (COSTLY_USD, CHEAP_USD) if 2 <= hour < 7 else (CHEAP_USD, COSTLY_USD), 16, ExchangeMode.ON
    )
    stayed = await run(falls_at(2), 16, ExchangeMode.ON)

    (loss,), (gain,) = turned.records, stayed.records
    assert (loss.end, gain.end) == ("done", "done")
    assert loss.promised_usd_per_hour == pytest.approx(gain.promised_usd_per_hour)
    assert (loss.is_measured, gain.is_measured) == (True, True)
    assert loss.realised_usd_per_hour < -0.1
    assert gain.realised_usd_per_hour == pytest.approx(gain.promised_usd_per_hour)
