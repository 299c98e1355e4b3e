"""Calls that are shared between machines: how many ids one request has, and who gets which result."""

import asyncio
from collections.abc import Sequence

import pytest

from bigfleet.provider.backends.aws.api import IDS_MAX
from bigfleet.provider.backends.aws.batches import GATHER_SECONDS, Batches
from bigfleet.sim.kernel.virtual_time import LoopClock

pytestmark = pytest.mark.virtual_time


class Calls:
    """Remembers the requests and answers each item with itself."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    async def __call__(self, items: Sequence[str]) -> dict[str, str]:
        self.sizes.append(len(items))
        if "broken" in items:
            raise OSError("broken")
        return {item: item for item in items}


@pytest.mark.parametrize("count", [1, IDS_MAX, IDS_MAX + 1, 1000])
async def test_a_request_has_at_most_100_ids_however_many_are_asked_for_at_once(count: int) -> None:
    calls = Calls()
    batches = Batches(calls, LoopClock())
    items = [f"i-{number}" for number in range(count)]
    assert await asyncio.gather(*(batches.ask(item) for item in items)) == items
    assert sum(calls.sizes) == count
    assert max(calls.sizes) <= IDS_MAX
    assert len(calls.sizes) == -(-count // IDS_MAX)


async def test_those_that_ask_for_one_item_share_its_place() -> None:
    calls = Calls()
    batches = Batches(calls, LoopClock())
    assert await asyncio.gather(*(batches.ask("i-1") for _ in range(3 * IDS_MAX))) == ["i-1"] * 3 * IDS_MAX
    assert calls.sizes == [1]


async def test_a_full_batch_leaves_the_next_one_its_time_to_gather() -> None:
    clock = LoopClock()
    calls = Calls()
    batches = Batches(calls, clock)
    full = [asyncio.ensure_future(batches.ask(f"i-{number}")) for number in range(IDS_MAX)]
    await clock.sleep(GATHER_SECONDS * 0.9)
    first = asyncio.ensure_future(batches.ask("first"))
    await clock.sleep(GATHER_SECONDS * 0.9)
    second = asyncio.ensure_future(batches.ask("second"))
    await asyncio.gather(*full, first, second)
    assert calls.sizes == [IDS_MAX, 2]


async def test_an_error_is_that_of_its_own_request() -> None:
    calls = Calls()
    batches = Batches(calls, LoopClock())
    items = [*(f"i-{number}" for number in range(IDS_MAX)), "broken"]
    results = await asyncio.gather(*(batches.ask(item) for item in items), return_exceptions=True)
    assert results[:IDS_MAX] == items[:IDS_MAX]
    assert isinstance(results[-1], OSError)


async def test_who_no_longer_waits_is_not_asked_for() -> None:
    calls = Calls()
    batches = Batches(calls, LoopClock())
    left = asyncio.ensure_future(batches.ask("left"))
    stays = asyncio.ensure_future(batches.ask("stays"))
    await asyncio.sleep(0)
    left.cancel()
    assert await stays == "stays"
    assert calls.sizes == [1]
