"""How many requests a client may send, and in which order."""

import asyncio

import pytest

from bigfleet.operator.kubernetes.throttle import RequestThrottle
from bigfleet.sim.kernel.virtual_time import LoopClock

pytestmark = pytest.mark.virtual_time


async def moments(throttle: RequestThrottle, requests: int) -> list[float]:
    """Return when each of several requests that come at once is let through."""
    seen: list[float] = []

    async def send() -> None:
        await throttle.take()
        seen.append(round(LoopClock().monotonic_seconds(), 3))

    await asyncio.gather(*(send() for _ in range(requests)))
    return seen


async def test_a_burst_goes_at_once_and_the_rest_at_the_rate() -> None:
    throttle = RequestThrottle(clock=LoopClock(), per_second=2, burst=3)
    assert await moments(throttle, 6) == [0, 0, 0, 0.5, 1.0, 1.5]


async def test_a_pause_saves_up_to_the_burst() -> None:
    throttle = RequestThrottle(clock=LoopClock(), per_second=2, burst=3)
    await moments(throttle, 3)
    await asyncio.sleep(1)
    assert await moments(throttle, 3) == [1.0, 1.0, 1.5]
    await asyncio.sleep(98.5)
    assert await moments(throttle, 5) == [100.0, 100.0, 100.0, 100.5, 101.0]


async def test_no_rate_is_no_limit() -> None:
    throttle = RequestThrottle(clock=LoopClock(), per_second=0, burst=1)
    assert set(await moments(throttle, 1000)) == {0}


async def test_requests_go_in_the_order_in_which_they_came() -> None:
    throttle = RequestThrottle(clock=LoopClock(), per_second=10, burst=1)
    order: list[int] = []

    async def send(number: int) -> None:
        await throttle.take()
        order.append(number)

    await asyncio.gather(*(send(number) for number in range(20)))
    assert order == list(range(20))
