"""The queue of keyed work: one handler at a time per key, the newest state last, retries with back-off."""

import asyncio
import itertools
import random
from collections import Counter

import pytest

from bigfleet.operator.kubernetes.api import ApiError
from bigfleet.operator.work_queue import WorkQueue
from bigfleet.sim.kernel.virtual_time import LoopClock

pytestmark = pytest.mark.virtual_time


def queue(workers: int = 4) -> tuple[WorkQueue, "asyncio.Task[None]"]:
    made = WorkQueue(clock=LoopClock(), rng=random.Random(1), workers=workers)
    return made, asyncio.create_task(made.run())


async def stop(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_key_is_handled_by_one_worker_at_a_time_and_ends_with_the_newest_state() -> None:
    made, task = queue()
    state = 0
    seen: list[int] = []
    running = Counter[str]()

    async def handle(key: str) -> None:
        running[key] += 1
        assert running[key] == 1
        value = state
        await asyncio.sleep(1)
        seen.append(value)
        running[key] -= 1

    for _ in range(5):
        state += 1
        made.put(handle, "k")
        await asyncio.sleep(0.3)
    await asyncio.sleep(10)
    await stop(task)

    assert seen[-1] == 5
    assert len(seen) < 5


async def test_so_many_keys_are_handled_at_once_as_there_are_workers() -> None:
    made, task = queue(workers=3)
    running, most = 0, 0

    async def handle(key: str) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(1)
        running -= 1

    for number in range(10):
        made.put(handle, str(number))
    assert len(made) == 10
    await asyncio.sleep(10)
    await stop(task)

    assert (most, len(made)) == (3, 0)


@pytest.mark.parametrize("status", [503, 403, 401, 302])
async def test_what_may_succeed_later_is_retried_with_longer_and_longer_waits(status: int) -> None:
    made, task = queue()
    times: list[float] = []

    async def handle(key: str) -> None:
        times.append(asyncio.get_running_loop().time())
        if len(times) < 12:
            raise ApiError(status, "", "away")

    made.put(handle, "k")
    await asyncio.sleep(3600)
    await stop(task)

    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert len(times) == 12
    assert gaps[0] <= 1.0
    assert 30.0 <= gaps[-1] <= 60.0


async def test_the_time_that_the_server_names_is_waited_for() -> None:
    made, task = queue()
    times: list[float] = []

    async def handle(key: str) -> None:
        times.append(asyncio.get_running_loop().time())
        if len(times) == 1:
            raise ApiError(429, "TooManyRequests", "later", retry_after_seconds=20.0)

    made.put(handle, "k")
    await asyncio.sleep(60)
    await stop(task)

    assert times == [0.0, 20.0]


@pytest.mark.parametrize("error", [ApiError(422, "Invalid", "no"), KeyError("bug")])
async def test_what_cannot_succeed_is_dropped_and_harms_no_other_key(error: Exception) -> None:
    made, task = queue(workers=1)
    seen: list[str] = []

    async def handle(key: str) -> None:
        seen.append(key)
        if key == "bad":
            raise error

    made.put(handle, "bad")
    made.put(handle, "good")
    await asyncio.sleep(600)
    assert seen == ["bad", "good"]
    made.put(handle, "bad")
    await asyncio.sleep(600)
    await stop(task)

    assert seen == ["bad", "good", "bad"]


async def test_keys_that_are_put_later_come_in_the_order_of_their_times() -> None:
    made, task = queue()
    seen: list[tuple[str, float]] = []

    async def handle(key: str) -> None:
        seen.append((key, asyncio.get_running_loop().time()))

    made.put_later(handle, "third", 30.0)
    made.put_later(handle, "first", 10.0)
    await asyncio.sleep(5)
    made.put_later(handle, "second", 10.0)
    await asyncio.sleep(60)
    await stop(task)

    assert seen == [("first", 10.0), ("second", 15.0), ("third", 30.0)]
