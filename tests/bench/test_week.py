"""A week with and without exchanges: equal paths, what machines cost, and what must hold in each mode."""

import asyncio
import re
from dataclasses import replace

import pytest

from bench.week.__main__ import main
from bench.week.figures import WeekFigures, Why, packer_cost_usd
from bench.week.paths import (
    POOLS,
    SPOT_SHARE_MAX,
    SPOT_SHARE_MIN,
    Loss,
    Pool,
    paths_of,
)
from bench.week.provider import WeekProvider
from bench.week.world import run_week
from bigfleet.exchange.values import ExchangeMode
from bigfleet.model.ids import ClusterId, MachineId, ShardId
from bigfleet.model.states import MachineState
from bigfleet.shard.exchange.exchange_records import ExchangeRecord
from bigfleet.shard.ports import FenceToken, ProviderRefusal, RefusalKind
from bigfleet.sim.kernel.virtual_time import START_UNIX_SECONDS

S = MachineState
SPOT: Pool = next(pool for pool in POOLS if pool.is_spot)
FIRST = MachineId(f"{SPOT.name}-000")
DAY = 24 * 60


def test_paths_of_a_seed_are_equal_and_of_another_seed_differ() -> None:
    first = paths_of(7, minutes=DAY, clusters=2, slots=3)

    assert replace(first, templates={}) == replace(paths_of(7, minutes=DAY, clusters=2, slots=3), templates={})
    other = paths_of(8, minutes=DAY, clusters=2, slots=3)
    assert (first.demand, first.prices, first.losses) != (other.demand, other.prices, other.losses)


def test_spot_prices_move_within_their_bounds() -> None:
    paths = paths_of(0, minutes=7 * DAY, clusters=1, slots=1)
    shares = [usd / pool.kind.usd_per_hour for found in paths.prices.values() for pool, usd in found if pool.is_spot]

    assert SPOT_SHARE_MIN - 0.001 <= min(shares) < 0.3
    assert 0.5 < max(shares) <= SPOT_SHARE_MAX + 0.001


def test_demand_follows_the_day_of_each_cluster() -> None:
    """Of two clusters one has its peak half a day after the other; workers run at night."""
    paths = paths_of(0, minutes=DAY, clusters=2, slots=1)
    peak, trough = 6 * 60, 18 * 60

    assert paths.pods_at("c0", peak)["web"] > 1.5 * paths.pods_at("c0", trough)["web"]
    assert paths.pods_at("c1", trough)["web"] > 1.5 * paths.pods_at("c1", peak)["web"]
    assert paths.pods_at("c0", peak)["batch"] == 0 < paths.pods_at("c0", trough)["batch"]


def test_two_of_a_hundred_machines_fail_in_a_day() -> None:
    paths = paths_of(0, minutes=50 * DAY, clusters=1, slots=10)
    failures = sum(cause is Loss.FAILURE for found in paths.losses.values() for _, cause in found)

    assert 0.015 < failures / (50 * 10 * len(POOLS)) < 0.025


# ---- the provider ----------------------------------------------------------------------------------------------------


def provider() -> tuple[WeekProvider, list[str]]:
    """Return a provider with one pool, and what it says of machines."""
    said: list[str] = []
    made = WeekProvider(
        slots=2,
        seed=0,
        joined=lambda machine: said.append(f"{machine.id} joined {machine.cluster}"),
        left=lambda machine_id, cluster, cause: said.append(f"{machine_id} left {cluster}: {cause}"),
    )
    made.set_prices([(SPOT, 0.1)])
    return made, said


def token(number: int) -> FenceToken:
    """Return a fence token."""
    return FenceToken(ShardId("s"), 1, number)


def serve(made: WeekProvider) -> None:
    """Let one machine be created and bound."""
    asyncio.run(made.create(FIRST, token(1)))
    made.tick(5)
    asyncio.run(made.configure(FIRST, ClusterId("c"), b"", {}, token(2)))
    made.tick(10)


def test_a_machine_is_paid_from_its_create_to_the_end_of_its_delete() -> None:
    made, said = provider()
    assert made.usd_per_hour() == 0
    serve(made)
    assert (said, made.usd_per_hour()) == ([f"{FIRST} joined c"], 0.1)
    made.set_prices([(SPOT, 0.3)])
    assert made.usd_per_hour() == 0.3
    asyncio.run(made.drain(FIRST, 60, token(3)))
    made.tick(12)
    asyncio.run(made.delete(FIRST, token(4)))
    assert made.usd_per_hour() == 0.3
    made.tick(14)
    assert (said[-1], made.usd_per_hour()) == (f"{FIRST} left c: None", 0)


def test_a_lost_machine_is_not_paid_and_is_on_offer_again_after_its_repair() -> None:
    made, said = provider()
    assert not made.lose(FIRST, Loss.FAILURE), "nothing is lost that is not there"
    serve(made)
    assert made.lose(FIRST, Loss.FAILURE)
    assert (said[-1], made.usd_per_hour()) == (f"{FIRST} left c: {Loss.FAILURE}", 0)
    made.tick(39)
    assert made.records[FIRST].state is S.FAILED
    made.tick(40)
    assert made.records[FIRST].state is S.SPECULATIVE


def test_of_a_pool_that_is_sold_out_nothing_is_created() -> None:
    made, _ = provider()
    made.set_sold_out(frozenset({SPOT}))
    with pytest.raises(ProviderRefusal, match="sold out") as refused:
        asyncio.run(made.create(FIRST, token(1)))

    assert refused.value.kind is RefusalKind.EXHAUSTED


def test_a_list_has_what_changed_since_its_cursor() -> None:
    made, _ = provider()
    first = asyncio.run(made.list(b""))
    asyncio.run(made.create(FIRST, token(1)))
    second = asyncio.run(made.list(first.revision))

    assert (len(first.records), first.tombstones) == (2, False)
    assert [(each.machine.id, each.machine.state) for each in second.records] == [(FIRST, S.CREATING)]
    assert second.tombstones


# ---- figures ---------------------------------------------------------------------------------------------------------


def record(day: int, *goes: str, promised: float = 1.0, realised: float = 1.0, end: str = "done") -> ExchangeRecord:
    """Return an exchange of cluster `c` that began on that day and ended."""
    begun = int((START_UNIX_SECONDS + day * 86_400 + 60) * 1e9)
    return ExchangeRecord(
        id=f"x-{day}-{goes[0]}",
        cluster="c",
        begun_unix_nanos=begun,
        goes_ids=goes,
        goes=(),
        comes=(),
        promised_usd_per_hour=promised,
        realised_usd_per_hour=realised,
        ended_unix_nanos=begun + 1,
        end=end,
    )


def test_exchanges_are_counted_by_machine_and_day() -> None:
    """Ten machines on two days and five on a third: two of ten go, none, and one of five."""
    figures = WeekFigures("on", 0, 3 * DAY, held={("c", 0): 10 * DAY, ("c", 1): 10 * DAY, ("c", 2): 5 * DAY})
    figures.records = [record(0, "a", "b"), record(2, "c", promised=3.0, realised=1.0, end="price-moved")]

    assert figures.exchanges_per_machine_day() == [0.2, 0.0, 0.2]
    assert figures.exchanged_median == 0.2
    assert figures.realised_usd_per_hour / figures.promised_usd_per_hour == 0.5
    assert ([each.id for each in figures.done], dict(figures.ends)) == (["x-0-a"], {"done": 1, "price-moved": 1})


def test_the_packer_follows_prices_and_stockouts() -> None:
    """Twice the prices cost twice as much; without spot machines it pays on-demand prices."""
    paths = paths_of(0, minutes=180, clusters=1, slots=12)
    usual = packer_cost_usd(paths, slots=12)
    dearer = replace(paths, prices={m: [(p, 2 * usd) for p, usd in f] for m, f in paths.prices.items()})
    sold_out = replace(paths, stockouts={pool: [(0, 180)] if pool.is_spot else [] for pool in POOLS})

    assert packer_cost_usd(dearer, slots=12) == pytest.approx(2 * usual, rel=0.05)
    assert packer_cost_usd(sold_out, slots=12) > 1.3 * usual


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--days", "0"], "'0' is no number of days; write a number from 0.1 to 60"),
        (["--modes", "off,maybe"], "'maybe' is no mode; choose from off, propose, on"),
        (["--seeds", "x"], "'x' are no seeds; write numbers such as 0 or 0,3"),
        (["--clusters", "99"], "'99' is no number of clusters; write one from 1 to 20"),
    ],
)
def test_wrong_options_end_with_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)

    assert ended.value.code == 2
    assert said in re.sub(r"\s+", " ", capsys.readouterr().err)


# ---- some hours ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_some_hours_in_each_mode() -> None:
    """`propose` acts as `off` does; `on` exchanges machines, costs no more, and takes no pod's place."""
    minutes = 600  # machines cool for six hours, and what is begun then takes its time
    paths = paths_of(0, minutes=minutes, clusters=1, slots=12)
    off, propose, on = (
        run_week(paths, mode=mode, seed=0, slots=12)
        for mode in (ExchangeMode.OFF, ExchangeMode.PROPOSE, ExchangeMode.ON)
    )

    assert (propose.calls, propose.by_hour_usd) == (off.calls, off.by_hour_usd)
    assert propose.checksum == off.checksum != on.checksum
    assert off.records == propose.records == []
    assert on.done
    assert on.cost_usd <= 1.02 * off.cost_usd
    assert on.evicted[Why.EXCHANGE] > 0
    assert on.without_room[Why.EXCHANGE] == on.stranded[Why.EXCHANGE] == 0
    assert [figures.failed_cycles for figures in (off, propose, on)] == [0, 0, 0]
