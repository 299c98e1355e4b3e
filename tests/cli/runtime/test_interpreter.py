"""Garbage in cycles is collected when memory has grown, and at no other time; decisions leave none behind."""

import asyncio
import gc
import sys
from collections.abc import Iterator

import pytest

from bigfleet.cli.runtime import interpreter
from bigfleet.cli.runtime.interpreter import GAP_SECONDS_MAX, GROWTH_BYTES_MIN, LOOK_SECONDS, Collected
from bigfleet.sim.kernel.virtual_time import LoopClock

GIB = 1024**3


@pytest.fixture
def settings() -> Iterator[None]:
    """Put back what belongs to the process of the tests."""
    turn_seconds, is_enabled = sys.getswitchinterval(), gc.isenabled()
    yield
    sys.setswitchinterval(turn_seconds)
    gc.unfreeze()
    if is_enabled:
        gc.enable()


@pytest.mark.usefixtures("settings")
def test_a_settled_process_collects_nothing_by_itself() -> None:
    """Turns are short, and what was loaded is out of every collection."""
    interpreter.settle()

    assert not gc.isenabled()
    assert gc.get_freeze_count() > 0
    assert sys.getswitchinterval() == pytest.approx(0.0001)


@pytest.mark.parametrize(
    ("seconds", "size_bytes", "is_due"),
    [
        (0.0, GIB, False),
        (0.0, GIB + GIB // 2 - 1, False),
        (0.0, GIB + GIB // 2, True),
        (GAP_SECONDS_MAX - 1, GIB, False),
        (GAP_SECONDS_MAX, 0, True),
    ],
)
def test_a_collection_is_due_after_growth_by_half_or_after_hours(seconds: float, size_bytes: int, is_due: bool) -> None:
    """Either is enough."""
    assert Collected(5.0, GIB).is_due(5.0 + seconds, size_bytes) is is_due


def test_a_small_process_may_grow_by_more_than_half() -> None:
    """Loading and listening are no reason to look for garbage."""
    small = Collected(0.0, 1024)

    assert not small.is_due(1.0, 1024 + GROWTH_BYTES_MIN - 1)
    assert small.is_due(1.0, 1024 + GROWTH_BYTES_MIN)


@pytest.mark.virtual_time
async def test_what_is_left_is_the_measure_of_the_next_growth() -> None:
    """A process that is larger for good reason is not looked through again and again."""
    clock, sizes, collections = LoopClock(), [GIB], [0]

    def collect() -> None:
        collections[0] += 1

    keeping = asyncio.create_task(interpreter.collect_when_due(clock, lambda: sizes[0], collect))
    counted = []
    for size_bytes in (GIB, GIB * 3 // 2, GIB * 2, GIB * 9 // 4, GIB):
        sizes[0] = size_bytes
        await clock.sleep(LOOK_SECONDS + 0.1)
        counted.append(collections[0])
    keeping.cancel()

    assert counted == [0, 1, 1, 2, 2]


@pytest.mark.virtual_time
async def test_memory_that_is_given_back_late_does_not_raise_the_next_threshold() -> None:
    """The measure is the least that was in use since the collection, not the peak before it."""
    clock, sizes, collections = LoopClock(), [GIB], [0]

    def collect() -> None:
        collections[0] += 1

    keeping = asyncio.create_task(interpreter.collect_when_due(clock, lambda: sizes[0], collect, lambda: None))
    counted = []
    for size_bytes in (GIB, 6 * GIB, GIB, GIB * 3 // 2):
        sizes[0] = size_bytes
        await clock.sleep(LOOK_SECONDS + 0.1)
        counted.append(collections[0])
    keeping.cancel()

    assert counted == [0, 1, 1, 2]


def test_a_process_knows_how_large_it_is() -> None:
    """Tens of mebibytes at least: the interpreter and its libraries."""
    assert interpreter.resident_bytes() > 10 * 1024 * 1024
