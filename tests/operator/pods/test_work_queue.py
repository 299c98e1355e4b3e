"""How keys wait for workers: once, one worker each, again after a change, and later after a delay."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.operator.pods.work_queue import PodWorkQueue
from bigfleet.sim.kernel.virtual_time import LoopClock, VirtualTimeLoop

pytestmark = pytest.mark.virtual_time


async def test_a_key_that_waits_is_not_queued_twice() -> None:
    queue = PodWorkQueue(LoopClock())
    for key in ("a", "b", "a"):
        queue.add(key)

    assert [await queue.next(), await queue.next()] == ["a", "b"]
    assert len(queue) == 2


async def test_a_key_that_changes_while_it_is_worked_on_comes_again_when_the_worker_is_done() -> None:
    queue = PodWorkQueue(LoopClock())
    queue.add("a")
    assert await queue.next() == "a"
    queue.add("a")
    queue.add("b")
    assert await queue.next() == "b"

    queue.done("a")
    assert await queue.next() == "a"


async def test_a_delayed_key_comes_at_its_earliest_time() -> None:
    clock = LoopClock()
    queue = PodWorkQueue(clock)
    timer = asyncio.create_task(queue.run_timer())
    for delay_seconds in (60.0, 10.0, 30.0):
        queue.add_later("a", delay_seconds)

    assert await queue.next() == "a"
    assert 10 <= clock.monotonic_seconds() <= 10.5
    queue.done("a")
    await clock.sleep(100)
    assert len(queue) == 0
    queue.close()
    await timer


async def test_a_delay_that_the_clock_cannot_count_lets_time_pass_all_the_same() -> None:
    """Late in a process's life a tiny delay added to the time is the time itself."""
    clock = LoopClock()
    queue = PodWorkQueue(clock)
    timer = asyncio.create_task(queue.run_timer())
    await clock.sleep(1_000_000)
    began_seconds = clock.monotonic_seconds()
    for _ in range(100):
        queue.add_later("a", 1e-12)
        key = await queue.next()
        assert key == "a"
        queue.done(key)

    assert clock.monotonic_seconds() - began_seconds >= 0.9
    queue.close()
    await timer


async def test_a_closed_queue_hands_out_nothing() -> None:
    queue = PodWorkQueue(LoopClock())
    waiting = asyncio.create_task(queue.next())
    await asyncio.sleep(1)
    queue.close()

    assert await waiting is None
    queue.add("a")
    assert await queue.next() is None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 0.1, 1.0, 3.0])), max_size=20))
def test_no_addition_is_lost_and_no_key_has_two_workers(additions: list[tuple[str, float]]) -> None:
    async def play() -> None:
        clock = LoopClock()
        queue = PodWorkQueue(clock)
        active: Counter[str] = Counter()
        begun: dict[str, float] = {}

        async def work() -> None:
            while (key := await queue.next()) is not None:
                active[key] += 1
                assert active[key] == 1
                begun[key] = clock.monotonic_seconds()
                await clock.sleep(0.7)
                active[key] -= 1
                queue.done(key)

        tasks = [asyncio.create_task(work()) for _ in range(2)]
        tasks.append(asyncio.create_task(queue.run_timer()))
        added = {}
        for key, pause_seconds in additions:
            queue.add(key) if pause_seconds < 1 else queue.add_later(key, 0.4)
            added[key] = clock.monotonic_seconds()
            await clock.sleep(pause_seconds)
        await clock.sleep(30)
        assert all(begun[key] >= moment for key, moment in added.items())
        queue.close()
        await asyncio.gather(*tasks)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(play())
