"""Tests that begun exchanges are remembered over a restart, and that a killed process leaves a sound fleet."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from bigfleet.exchange.course import ExchangePhase
from bigfleet.exchange.values import ExchangeMode, ExclusionReason
from bigfleet.model.compute import compute_inline
from bigfleet.model.states import MachineState
from bigfleet.shard.exchange.exchange_records import (
    META_KEY,
    RECORDS_MAX,
    RETAINED_SECONDS,
    ExchangeRecord,
    MemoryExchanges,
    RecordedKind,
    with_record,
)
from bigfleet.shard.exchange.proposals import ExchangeProposals
from bigfleet.shard.ownership.state_file import StateFile, StateFileFault, back_up_state
from bigfleet.sim.kernel.virtual_time import LoopClock, run_virtual
from tests.files.editing import edit
from tests.shard.cycle.test_pods import pods
from tests.shard.exchange.test_execution import Exchanging
from tests.shard.world import World, machine

KIND = RecordedKind(2, "dear", "za", "OnDemand", 3.0)
RECORD = ExchangeRecord(
    id="x-1-1",
    cluster="c1",
    begun_unix_nanos=1_000,
    goes_ids=("a", "b"),
    goes=(KIND,),
    comes=(RecordedKind(1, "cheap", "zb", "Spot", 0.3),),
    promised_usd_per_hour=5.7,
)
DAY_NANOS = int(RETAINED_SECONDS * 1e9)


def opened(directory: Path) -> StateFile:
    """Open the state file of a directory."""
    return StateFile.open(directory, shard_id="shard-0", clock=LoopClock())


def test_a_record_is_what_a_later_process_reads(tmp_path: Path) -> None:
    """Every field, in the order in which exchanges were begun, also from a backup."""

    async def main() -> None:
        ended = replace(RECORD, end="done", ended_unix_nanos=5_000, came_ids=("n",), realised_usd_per_hour=5.5, left=2)
        with opened(tmp_path) as file:
            assert file.exchanges.records == {}
            file.exchanges.put(replace(RECORD, id="x-1-2"), 2_000)
            file.exchanges.put(RECORD, 2_000)
            file.exchanges.put(replace(ended, id="x-1-2"), 5_000)
        with opened(tmp_path) as file:
            assert list(file.exchanges.records.values()) == [replace(ended, id="x-1-2"), RECORD]
        copy = tmp_path / "copy"
        copy.mkdir()
        back_up_state(tmp_path, copy / "shard.db")
        with opened(copy) as file:
            assert list(file.exchanges.records) == ["x-1-2", "x-1-1"]

    run_virtual(main)


def test_records_are_kept_for_a_day_after_the_end() -> None:
    """Those of exchanges under way as long as they are."""
    ended = replace(RECORD, id="x-1-2", ended_unix_nanos=10_000)
    known = with_record({}, ended, 10_000)
    known = with_record(known, RECORD, 10_000 + DAY_NANOS - 1)
    assert list(known) == ["x-1-2", "x-1-1"]
    known = with_record(known, replace(RECORD, id="x-1-3"), 10_000 + DAY_NANOS)
    assert list(known) == ["x-1-1", "x-1-3"]


async def _restarted(fleet: Exchanging, store: MemoryExchanges, epoch: int) -> None:
    """Kill the shard, and let a new process go on with what the provider and the state file have."""
    fleet.world = World(
        fleet.provider, epoch=epoch, audit_log=fleet.log, exchange_store=store, reclaim_after_seconds=600.0
    )
    fleet.exchanges = ExchangeProposals(
        shard=fleet.world.shard, mode=ExchangeMode.ON, clock=LoopClock(), compute=compute_inline, workers=None
    )
    fleet.operator = fleet.world.connect("c1")
    fleet.operator.report(pods("c1", ("500m", 12)))


@pytest.mark.virtual_time
@pytest.mark.parametrize("minutes", [17, *(pytest.param(n, marks=pytest.mark.slow) for n in (16, 18, 20, 28, 29, 30))])
async def test_a_shard_that_is_killed_at_any_moment_leaves_a_sound_fleet(minutes: int) -> None:
    """No pod lacks a place, what it began is ended as restarted, and its machines cool for six hours."""
    store = MemoryExchanges()
    fleet = Exchanging(exchange_store=store)
    await fleet.minutes(minutes)
    (record,) = store.records.values()
    was_done = record.end == "done"
    await _restarted(fleet, store, 2)
    (record,) = store.records.values()
    assert record.end == ("done" if was_done else "restarted")

    for _ in range(60):
        await fleet.minutes(1)
        decision = fleet.world.shard.view.decided_on
        assert decision is not None
        assert not any(row.unplaced for row in decision.rows)
    assert list(store.records) == [record.id]
    await fleet.minutes(200)
    held = set(fleet.holds())
    cooling = held & {*record.goes_ids, *record.came_ids}
    assert dict(fleet.only().excluded).get(ExclusionReason.COOLING, 0) == len(cooling)
    await fleet.minutes(150)
    assert fleet.holds() in (["spot0"], ["spot1"], ["spot2"])


@pytest.mark.virtual_time
async def test_a_drain_that_was_waiting_is_decided_anew() -> None:
    """The provider knows nothing of it yet: the machine serves, and counts."""
    store = MemoryExchanges()
    fleet = Exchanging(exchange_store=store)
    await fleet.until(ExchangePhase.DRAINING)
    await fleet.minutes(9)
    fleet.operator.drain = None
    waiting = asyncio.create_task(fleet.minutes(2))
    await asyncio.sleep(130)
    assert fleet.world.state("c1-dear0").label == "Draining"
    waiting.cancel()
    await _restarted(fleet, store, 2)
    await fleet.minutes(1)

    assert fleet.holds() == ["c1-dear0", "c1-dear1", "spot0"]
    assert [record.end for record in store.records.values()] == ["restarted"]


@pytest.mark.virtual_time
async def test_records_of_yesterday_keep_no_exchange_from_beginning() -> None:
    """A thousand began in a day; they are dropped when the next one is recorded."""
    store = MemoryExchanges()
    ended = ExchangeRecord(
        id="",
        cluster="other",
        begun_unix_nanos=1,
        goes_ids=(),
        goes=(),
        comes=(),
        promised_usd_per_hour=1.0,
        ended_unix_nanos=LoopClock().unix_nanos(),
        end="done",
    )
    store.records = {f"x-0-{n}": replace(ended, id=f"x-0-{n}") for n in range(RECORDS_MAX)}
    fleet = Exchanging(exchange_store=store)
    await fleet.minutes(20)
    assert len(fleet.records_of()) == RECORDS_MAX

    await asyncio.sleep(RETAINED_SECONDS)
    await fleet.until(ExchangePhase.ACQUIRING)
    assert [record.cluster for record in fleet.records_of()] == ["c1"]


@pytest.mark.virtual_time
async def test_stamps_of_a_wall_clock_that_was_ahead_hold_nothing_for_longer() -> None:
    """They count from the moment at which they are found to be ahead, also in what is stored."""
    store, six_hours = MemoryExchanges(), 6 * 3600.0
    ahead = LoopClock().unix_nanos() + 30 * DAY_NANOS
    given = replace(RECORD, begun_unix_nanos=ahead, ended_unix_nanos=ahead, end="done", taker="c2")
    store.records = {given.id: given}
    # It has room for no pod, so that it stays Idle.
    tiny = machine("a", MachineState.IDLE, allocatable={"cpu": "100m", "memory": "1Gi"})
    fleet = Exchanging(tiny, exchange_store=store)
    exchanges = fleet.world.shard.exchanges
    await fleet.minutes(1)
    assert [each.taker for each in exchanges.promises()] == ["c2"]
    assert store.records[given.id].ended_unix_nanos <= LoopClock().unix_nanos()

    await asyncio.sleep(3600)
    assert exchanges.promises() == []
    assert exchanges.unfinished_takers(six_hours) == {"c2"}
    await asyncio.sleep(six_hours)
    assert exchanges.unfinished_takers(six_hours) == exchanges.cooling(six_hours) == frozenset()


def test_a_damaged_row_ends_the_start(tmp_path: Path) -> None:
    """It is named, and nothing is taken for empty."""

    async def main() -> None:
        with opened(tmp_path) as file:
            file.exchanges.put(RECORD, 2_000)
        edit(tmp_path / "shard.db", f"UPDATE meta SET value = '[{{' WHERE key = '{META_KEY}'")
        with pytest.raises(StateFileFault, match="table meta: exchanges:"):
            opened(tmp_path)

    run_virtual(main)
