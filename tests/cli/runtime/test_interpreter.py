"""Garbage in cycles is collected when memory has grown, and at no other time; decisions leave none behind."""

import asyncio
import gc
import platform
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from bigfleet.cli.runtime import interpreter
from bigfleet.cli.runtime.interpreter import (
    ARENAS_MAX,
    GAP_SECONDS_MAX,
    GROWTH_BYTES_MIN,
    LOOK_SECONDS,
    TURN_SECONDS,
    TURN_SECONDS_MAX,
    Collected,
    ComputeTurns,
)
from bigfleet.cli.runtime.system import SystemClock
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


#: Twelve threads take memory at the same time; prints how many arenas malloc has made.
ARENAS = """
import ctypes, sys, threading
from bigfleet.cli.runtime import interpreter
if sys.argv[1] == "settled":
    interpreter.settle()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.open_memstream.restype = ctypes.c_void_p
libc.malloc_info.argtypes, libc.fclose.argtypes = [ctypes.c_int, ctypes.c_void_p], [ctypes.c_void_p]
together = threading.Barrier(12)
def take():
    together.wait()
    for _ in range(1_000):
        libc.malloc(2_000)
    together.wait()
threads = [threading.Thread(target=take) for _ in range(12)]
[each.start() for each in threads], [each.join() for each in threads]
text, size = ctypes.c_char_p(), ctypes.c_size_t()
stream = libc.open_memstream(ctypes.byref(text), ctypes.byref(size))
libc.malloc_info(0, stream), libc.fclose(stream)
print(text.value.count(b"<heap nr="))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc has no arenas")
def test_the_threads_of_a_settled_process_share_two_arenas() -> None:
    """Without the limit they have more."""

    def arenas(how: str) -> int:
        ran = subprocess.run(
            [sys.executable, "-c", ARENAS, how], capture_output=True, text=True, check=True, timeout=60
        )
        return int(ran.stdout)

    assert arenas("settled") <= ARENAS_MAX < arenas("as it is")


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


class Calls:
    """Takes the lengths of turns that are set."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.turns = ComputeTurns(SystemClock(), self.seconds.append)


def test_turns_get_longer_while_computations_wait_for_the_interpreter_and_shorter_again() -> None:
    """Within bounds; a computation that is over at once says nothing."""
    calls = Calls()
    for _ in range(8):
        calls.turns.judge(1.0, 0.4)
    calls.turns.judge(0.04, 0.001)
    calls.turns.judge(1.0, 0.6)
    assert calls.seconds == pytest.approx([0.0002, 0.0004, 0.0008, 0.0016, TURN_SECONDS_MAX])

    calls.seconds.clear()
    for _ in range(8):
        calls.turns.judge(1.0, 0.9)
    assert calls.seconds == pytest.approx([0.001, 0.0005, 0.00025, 0.000125, TURN_SECONDS])


def test_a_computation_that_another_thread_holds_up_lengthens_turns() -> None:
    """As a busy event loop does, which works all the time."""
    calls = Calls()
    ended = threading.Event()

    def busy() -> None:
        while not ended.is_set():
            sum(range(100))

    def count() -> int:
        total = 0
        for number in range(1_000_000):
            total += number
        return total

    others = [threading.Thread(target=busy) for _ in range(4)]
    for each in others:
        each.start()
    try:
        assert calls.turns.timed(count) == 499_999_500_000
    finally:
        ended.set()
        for each in others:
            each.join()
    assert calls.seconds == [2 * TURN_SECONDS]
