"""When cycles start: on the timer, and sooner while the first List fails."""

import asyncio

import pytest

from bigfleet.shard.cycle.cycle_trigger import CycleTrigger
from bigfleet.shard.ports import ShardSettings
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.shard.world import World

pytestmark = pytest.mark.virtual_time


async def test_a_cycle_that_asks_for_it_is_repeated_soon_then_ever_later() -> None:
    """At the latest with the timer; one that does not ask ends the series."""
    trigger, starts = CycleTrigger(LoopClock(), None), list[float]()
    async for is_timer in trigger.cycles(10.0):
        assert is_timer
        starts.append(asyncio.get_running_loop().time())
        if len(starts) not in (8, 9):
            trigger.retry_soon()
        if len(starts) == 11:
            break

    assert starts == [0.0, 0.5, 1.5, 3.5, 7.5, 15.5, 25.5, 35.5, 45.5, 55.5, 56.0]


@pytest.mark.parametrize(
    ("cycle_seconds", "starts"),
    [(0.1, [0.0, 0.5, 1.0, 1.5]), (0.4, [0.0, 0.8, 1.6, 2.4]), (3.0, [0.0, 4.0, 8.0, 11.0])],
    ids=["a short cycle", "as long as the cycle", "one second at most, and the timer does not wait"],
)
async def test_long_cycles_that_follow_each_other_leave_time_for_sessions(
    cycle_seconds: float, starts: list[float]
) -> None:
    """A woken cycle starts after a rest that is as long as the cycle before it."""
    trigger, seen = CycleTrigger(LoopClock(), 0.5), list[float]()
    async for _is_timer in trigger.cycles(10.0):
        seen.append(asyncio.get_running_loop().time())
        if len(seen) == 4:
            break
        trigger.wake()
        await asyncio.sleep(cycle_seconds)

    assert seen == pytest.approx(starts)


async def test_a_failed_first_list_does_not_wait_for_the_timer() -> None:
    """A later one does: the shard decides on what it knows."""
    world = World(settings=ShardSettings(cycle_interval_seconds=600.0))
    world.provider.list_fails = True
    running = asyncio.create_task(world.shard.run())
    await asyncio.sleep(3.0)
    before = world.shard.is_ready
    world.provider.list_fails = False
    await asyncio.sleep(4.0)
    assert (before, world.shard.is_ready) == (False, True)

    world.provider.list_fails = True
    lists = len(world.provider.cursors)
    await asyncio.sleep(1_300.0)
    running.cancel()
    assert len(world.provider.cursors) - lists == 2
