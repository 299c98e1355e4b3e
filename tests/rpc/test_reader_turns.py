"""Several readers of large answers have a fifth of the event loop; one that is the only reader waits for nothing."""

import asyncio

import pytest

from bigfleet.rpc.servers.reader_turns import ITEMS_PER_TURN, REST_TIMES, ReaderTurns

pytestmark = pytest.mark.virtual_time

ITEM_SECONDS = 0.001


class Work:
    """A clock that only converting an item, or sleeping, moves on."""

    def __init__(self) -> None:
        self.now_seconds = 0.0
        self.slept_seconds = 0.0

    def monotonic_seconds(self) -> float:
        return self.now_seconds

    def unix_nanos(self) -> int:
        return int(self.now_seconds * 1e9)

    async def sleep(self, seconds: float) -> None:
        self.now_seconds += seconds
        self.slept_seconds += seconds
        await asyncio.sleep(0)

    def convert(self, item: int) -> int:
        self.now_seconds += ITEM_SECONDS
        return item * 2


async def read(turns: ReaderTurns, work: Work, items: int, *, takes: int | None = None) -> list[int]:
    """Read items as a call does; one that takes only some stays where it is."""
    read: list[int] = []
    async for each in turns.converted(range(items), work.convert):
        read.append(each)
        await asyncio.sleep(0)
        if len(read) == takes:
            await asyncio.Event().wait()
    return read


async def test_the_only_reader_waits_for_nothing() -> None:
    work = Work()

    assert await read(ReaderTurns(work), work, 1_000) == [2 * number for number in range(1_000)]
    assert work.slept_seconds == 0


async def test_several_readers_together_have_a_share_of_the_time() -> None:
    """Each gets all, in order; when all but one are through, that one waits no more."""
    work = Work()
    turns = ReaderTurns(work)
    answers = await asyncio.gather(*(read(turns, work, 50 * ITEMS_PER_TURN) for _ in range(4)))

    assert answers == [[2 * number for number in range(50 * ITEMS_PER_TURN)]] * 4
    busy_seconds = 4 * 50 * ITEMS_PER_TURN * ITEM_SECONDS
    assert work.slept_seconds == pytest.approx(REST_TIMES * busy_seconds, rel=0.05)


async def test_a_reader_that_takes_nothing_keeps_no_turn() -> None:
    """Nor do its share and its place stay when its call ends."""
    work = Work()
    turns = ReaderTurns(work)
    silent = asyncio.create_task(read(turns, work, 1_000, takes=1))
    await asyncio.sleep(0)
    async with asyncio.timeout(1):
        assert len(await read(turns, work, 1_000)) == 1_000
    silent.cancel()
    await asyncio.gather(silent, return_exceptions=True)
    slept_seconds = work.slept_seconds

    assert len(await read(turns, work, 1_000)) == 1_000
    assert work.slept_seconds == slept_seconds
