"""Tunes the interpreter of a server process: rare garbage collections, short thread turns, few memory arenas.

docs/adr/0115-rare-collections-and-short-turns.md. CPython collects garbage in the thread that allocates the next object
while every other thread waits; a thread that computes holds the interpreter until its turn ends. Few arenas need less
memory. The settings apply to the whole process, so no library may call this module.
"""

import ctypes
import gc
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import structlog

from bigfleet.model.clock import Clock

#: How long a thread that computes keeps the interpreter when another one wants it; by default it is fifty times that.
TURN_SECONDS = 0.0001
#: With a loop that always has work, a cycle would get one turn for each of its rounds: turns get longer, up to this.
TURN_SECONDS_MAX = 0.002
#: A computation that took more times its processor time than this has waited too long for the interpreter.
STARVED_TIMES = 2.0
#: One that took fewer has hardly waited.
CALM_TIMES = 1.5
#: Of a shorter computation neither is known.
JUDGED_SECONDS_MIN = 0.05

#: Of glibc's malloc.h.
_M_ARENA_MAX = -8
#: Pools of memory of the C allocator, of which each has free memory of its own; by default there are eight for each
#: core. Threads wait for the interpreter more than for malloc: the first List of 500,000 machines takes the same
#: processor time with two as without a limit, and leaves 335 MiB in place of 355.
ARENAS_MAX = 2

#: How often it is asked whether to look for garbage.
LOOK_SECONDS = 10.0
#: What cycles hold shows in the process's memory: a growth by this share, and by so much at least, is looked into.
GROWTH_MAX = 0.5
GROWTH_BYTES_MIN = 256 * 1024 * 1024
#: For what grows slower than that.
GAP_SECONDS_MAX = 6 * 3600.0

T = TypeVar("T")

_log = structlog.get_logger("bigfleet.cli.runtime.interpreter")


def settle() -> None:
    """Set all of it for this process. From now on `collect_when_due` alone has garbage in cycles collected."""
    limit = getattr(ctypes.CDLL(None), "mallopt", None)
    if limit is not None:
        limit(_M_ARENA_MAX, ARENAS_MAX)
    gc.disable()
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(TURN_SECONDS)


def resident_bytes() -> int:
    """Return the memory that this process has now; 0 where the system does not report it."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def give_memory_back() -> None:
    """Return free memory of the C allocator to the system, where it is glibc; elsewhere do nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@dataclass(frozen=True, slots=True)
class Collected:
    """When garbage was collected last, and the least memory that was in use since."""

    at_seconds: float
    size_bytes: int

    def is_due(self, now_seconds: float, size_bytes: int) -> bool:
        """Return whether it is time for the next collection."""
        growth_bytes = size_bytes - self.size_bytes
        has_grown = growth_bytes >= max(GROWTH_BYTES_MIN, self.size_bytes * GROWTH_MAX)
        return has_grown or now_seconds - self.at_seconds >= GAP_SECONDS_MAX

    def shrunk_to(self, size_bytes: int) -> "Collected":
        """Return this with the size, if it is smaller."""
        return replace(self, size_bytes=min(self.size_bytes, size_bytes))


class ComputeTurns:
    """Lengthens the turns of threads while computations wait too long for the interpreter, and shortens them again."""

    def __init__(self, clock: Clock, switch: Callable[[float], object] = sys.setswitchinterval) -> None:
        self._clock = clock
        self._switch = switch
        self.seconds = TURN_SECONDS

    def timed(self, work: Callable[[], T]) -> T:
        """Do a computation in this thread, and set the length of turns by what it took."""
        began_seconds, used_seconds = self._clock.monotonic_seconds(), time.thread_time()
        done = work()
        self.judge(self._clock.monotonic_seconds() - began_seconds, time.thread_time() - used_seconds)
        return done

    def judge(self, took_seconds: float, used_seconds: float) -> None:
        """Set the length of turns by the time and the processor time of a computation."""
        seconds = self.seconds
        if took_seconds < JUDGED_SECONDS_MIN:
            return
        if took_seconds > STARVED_TIMES * used_seconds:
            seconds = min(2 * seconds, TURN_SECONDS_MAX)
        elif took_seconds < CALM_TIMES * used_seconds:
            seconds = max(seconds / 2, TURN_SECONDS)
        if seconds != self.seconds:
            self.seconds = seconds
            self._switch(seconds)


async def collect_when_due(
    clock: Clock,
    size_bytes: Callable[[], int] = resident_bytes,
    collect: Callable[[], object] = gc.collect,
    give_back: Callable[[], object] = give_memory_back,
) -> None:
    """Collect garbage when it is worth the pause, until cancelled.

    On the loop, as all threads wait wherever it runs: most of a second with 5,000 streams.
    """
    last = Collected(clock.monotonic_seconds(), size_bytes())
    while True:
        await clock.sleep(LOOK_SECONDS)
        now_seconds, before_bytes = clock.monotonic_seconds(), size_bytes()
        # What a collection freed is given back later: growth counts from the least that was in use since.
        last = last.shrunk_to(before_bytes)
        if last.is_due(now_seconds, before_bytes):
            collect()
            give_back()
            last = Collected(clock.monotonic_seconds(), size_bytes())
            _log.info(
                "runtime.garbage_collected",
                seconds=round(last.at_seconds - now_seconds, 3),
                before_bytes=before_bytes,
                after_bytes=last.size_bytes,
            )
