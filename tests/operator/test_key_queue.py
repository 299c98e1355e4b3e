"""How keys wait for workers: once, one worker each, again after a change, and later after a delay."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.operator.conditions.verdicts import Urgency
from bigfleet.operator.work_queue import KeyQueue
from bigfleet.sim.kernel.virtual_time import LoopClock, VirtualTimeLoop

pytestmark = pytest.mark.virtual_time


async def take(queue: KeyQueue[str]) -> str | None:
    taken = await queue.take()
    return taken[0] if taken is not None else None


async def test_a_key_that_waits_is_not_queued_twice() -> None:
    queue: KeyQueue[str] = KeyQueue(LoopClock())
    for key in ("a", "b", "a"):
        queue.put(key)

    assert [await take(queue), await take(queue)] == ["a", "b"]
    assert (len(queue), queue.unfinished, queue.backlog) == (0, 2, 2)


async def test_a_key_that_changes_while_it_is_worked_on_comes_again_when_the_worker_is_done() -> None:
    queue: KeyQueue[str] = KeyQueue(LoopClock())
    queue.put("a")
    assert await take(queue) == "a"
    queue.put("a")
    queue.put("b")
    assert await take(queue) == "b"

    queue.done("a")
    assert await take(queue) == "a"


async def test_a_delayed_key_comes_at_its_earliest_time() -> None:
    clock = LoopClock()
    queue: KeyQueue[str] = KeyQueue(clock)
    timer = asyncio.create_task(queue.run_timer())
    for delay_seconds in (60.0, 10.0, 30.0):
        queue.put_later("a", delay_seconds)

    assert await take(queue) == "a"
    assert 10 <= clock.monotonic_seconds() <= 10.5
    queue.done("a")
    await clock.sleep(100)
    assert queue.backlog == 0
    queue.close()
    await timer


async def test_a_delay_that_the_clock_cannot_count_lets_time_pass_all_the_same() -> None:
    """Late in a process's life a tiny delay added to the time is the time itself."""
    clock = LoopClock()
    queue: KeyQueue[str] = KeyQueue(clock)
    timer = asyncio.create_task(queue.run_timer())
    await clock.sleep(1_000_000)
    began_seconds = clock.monotonic_seconds()
    for _ in range(100):
        queue.put_later("a", 1e-12)
        key = await take(queue)
        assert key == "a"
        queue.done(key)

    assert clock.monotonic_seconds() - began_seconds >= 0.9
    queue.close()
    await timer


async def test_a_closed_queue_hands_out_nothing() -> None:
    queue: KeyQueue[str] = KeyQueue(LoopClock())
    waiting = asyncio.create_task(take(queue))
    await asyncio.sleep(1)
    queue.close()

    assert await waiting is None
    queue.put("a")
    assert await take(queue) is None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 0.1, 1.0, 3.0])), max_size=20))
def test_no_addition_is_lost_and_no_key_has_two_workers(additions: list[tuple[str, float]]) -> None:
    async def play() -> None:
        clock = LoopClock()
        queue: KeyQueue[str] = KeyQueue(clock)
        active: Counter[str] = Counter()
        begun: dict[str, float] = {}

        async def work() -> None:
            while (key := await take(queue)) is not None:
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
            queue.put(key) if pause_seconds < 1 else queue.put_later(key, 0.4)
            added[key] = clock.monotonic_seconds()
            await clock.sleep(pause_seconds)
        await clock.sleep(30)
        assert all(begun[key] >= moment for key, moment in added.items())
        queue.close()
        await asyncio.gather(*tasks)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(play())


async def test_keys_come_most_urgent_first_and_each_once() -> None:
    queue: KeyQueue[tuple[str, str]] = KeyQueue(LoopClock())
    a, b, c = ("ns", "a"), ("ns", "b"), ("ns", "c")
    queue.put(a, Urgency.MESSAGE)
    queue.put(b, Urgency.CONDITION)
    queue.put(c, Urgency.CONDITION)
    queue.put(a, Urgency.MESSAGE)
    queue.put(c, Urgency.PHASE)
    queue.put(c, Urgency.MESSAGE)

    assert [await queue.take() for _ in range(3)] == [
        (c, Urgency.PHASE),
        (b, Urgency.CONDITION),
        (a, Urgency.MESSAGE),
    ]


async def test_a_key_that_is_put_while_it_is_handled_comes_again_afterwards() -> None:
    queue: KeyQueue[tuple[str, str]] = KeyQueue(LoopClock())
    queue.put(("ns", "a"), Urgency.MESSAGE)
    await queue.take()
    queue.put(("ns", "a"), Urgency.MESSAGE)
    queue.put(("ns", "a"), Urgency.PHASE)
    assert len(queue) == 0
    assert queue.unfinished == 1

    queue.done(("ns", "a"))

    assert await queue.take() == (("ns", "a"), Urgency.PHASE)
    queue.done(("ns", "a"))
    assert queue.unfinished == 0
