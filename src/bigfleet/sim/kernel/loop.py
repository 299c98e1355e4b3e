"""Runs an event loop on integer virtual time, with a ready order drawn from the seed.

When no callback is ready, time jumps to the next timer. Callbacks that are ready at one moment run in an order that the
scheduler's stream draws. Tasks and futures hash by number, so that no set of them depends on an address. It implements
the part of `asyncio` that flows use; a thread, a socket or a signal is refused, since none may exist in a simulation.
"""

import asyncio
import contextvars
import gc
import heapq
import itertools
import math
import sys
import warnings
from asyncio import events
from collections.abc import Callable, Coroutine, MutableSequence
from typing import Any, Protocol, TypeVar, TypeVarTuple

from bigfleet.model.clock import NANOS_PER_SECOND
from bigfleet.sim.kernel.processes import CURRENT, Process
from bigfleet.sim.kernel.virtual_time import START_UNIX_SECONDS, Deadlock

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

START_UNIX_NANOS = START_UNIX_SECONDS * NANOS_PER_SECOND
#: Callbacks at one virtual moment; more of them wait for each other for ever.
STEPS_PER_MOMENT_MAX = 2_000_000


class InOrder:
    """Leaves the ready order as it came: a `TaskScheduler` for runs that differ in a part and are compared."""

    def shuffle(self, _ready: MutableSequence[Any], /) -> None:
        """Do nothing."""


class Livelock(RuntimeError):
    """Tasks wake each other without end, and time does not move."""


class TaskScheduler(Protocol):
    """The part of `random.Random` that draws the ready order; an instance is handed in, seeded by the caller."""

    def shuffle(self, x: MutableSequence[Any], /) -> None: ...


class _Numbered:
    """Hashes by its number, which is set before anybody may hash it."""

    _number: int

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class _Task(_Numbered, asyncio.Task[Any]):
    """A task of the loop."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], number: int, **settings: Any) -> None:
        self._number = number
        super().__init__(coroutine, **settings)


class _Future(_Numbered, asyncio.Future[Any]):
    """A future of the loop."""

    def __init__(self, number: int, loop: asyncio.AbstractEventLoop) -> None:
        self._number = number
        super().__init__(loop=loop)


#: Above every number that the others may reach.
_ASIDE_FIRST = 2**48

_Ready = tuple[asyncio.Handle, Process | None]


class KernelLoop(asyncio.AbstractEventLoop):
    """An asyncio loop on virtual nanoseconds from 0 on."""

    def __init__(self, scheduler: TaskScheduler, aside: TaskScheduler | None = None) -> None:
        """`aside` orders those who run aside; without it they keep the order in which they came."""
        self.now_nanos = 0
        #: Callbacks that have run.
        self.steps = 0
        #: Exceptions of tasks that are not awaited.
        self.faults: list[BaseException] = []
        self._scheduler = scheduler
        self._aside = aside
        self._ready: list[_Ready] = []
        self._timers: list[tuple[int, int, asyncio.TimerHandle, Process | None]] = []
        self._numbers = itertools.count(1)
        #: Of processes that run aside: what they make takes no number from the others.
        self._aside_numbers = itertools.count(_ASIDE_FIRST)
        self._steps_of_moment = 0
        self._is_running = self._is_stopping = self._is_closed = False

    # ---- running ------------------------------------------------------------------------------------------------

    def run_forever(self) -> None:
        """Run until `stop`. Raises Deadlock or Livelock."""
        before = events._get_running_loop()
        events._set_running_loop(self)
        self._is_running = True
        try:
            while not self._is_stopping:
                self._run_once()
        finally:
            self._is_running = self._is_stopping = False
            events._set_running_loop(before)

    def run_until_complete(self, future: Any) -> Any:
        """Run until the future or coroutine is done and return its result."""
        awaited = asyncio.ensure_future(future, loop=self)
        awaited.add_done_callback(lambda _done: self.stop())
        self.run_forever()
        return awaited.result()

    def _run_once(self) -> None:
        if not self._ready:
            self._move_time()
        batch, self._ready = self._ready, []
        aside = [each for each in batch if _is_aside(each[1])]
        if aside:
            batch = [each for each in batch if not _is_aside(each[1])]
        if len(batch) > 1:
            self._scheduler.shuffle(batch)
        if len(aside) > 1 and self._aside is not None:
            self._aside.shuffle(aside)
        batch += aside
        for handle, process in batch:
            if handle.cancelled() or (process is not None and not process.admits(handle)):
                continue
            self.steps += 1
            handle._run()
        self._steps_of_moment += len(batch)
        if self._steps_of_moment > STEPS_PER_MOMENT_MAX:
            raise Livelock(f"more than {STEPS_PER_MOMENT_MAX:,} callbacks at {self.now_nanos / 1e9:.3f} s")

    def _move_time(self) -> None:
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        if not self._timers:
            raise Deadlock("every task waits for something that no timer and no peer will bring")
        if self._timers[0][0] > self.now_nanos:
            self.now_nanos = self._timers[0][0]
            self._steps_of_moment = 0
        while self._timers and self._timers[0][0] <= self.now_nanos:
            _when, _number, handle, process = heapq.heappop(self._timers)
            self._ready.append((handle, process))

    def stop(self) -> None:
        """End `run_forever` after the present round."""
        self._is_stopping = True

    def is_running(self) -> bool:
        """Return whether the loop runs."""
        return self._is_running

    def is_closed(self) -> bool:
        """Return whether the loop was closed."""
        return self._is_closed

    def close(self) -> None:
        """Forget everything that waits."""
        self._is_closed = True
        self._ready.clear()
        self._timers.clear()

    async def shutdown_asyncgens(self) -> None:
        """Do nothing: generators of the world end with it."""

    # ---- time and callbacks -------------------------------------------------------------------------------------

    def time(self) -> float:
        """Return virtual seconds since the loop was made."""
        return self.now_nanos / NANOS_PER_SECOND

    def call_soon(self, callback: Callable[[*Ts], object], *args: *Ts, context: Any = None) -> asyncio.Handle:
        """Run a callback in the next round."""
        context = contextvars.copy_context() if context is None else context
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append((handle, context.get(CURRENT)))
        return handle

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Any = None
    ) -> asyncio.TimerHandle:
        """Run a callback after `delay` seconds, never a rounding error too early."""
        nanos = self.now_nanos + max(0, math.ceil(delay * NANOS_PER_SECOND))
        return self._call_at_nanos(nanos, callback, args, context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Any = None
    ) -> asyncio.TimerHandle:
        """Run a callback at a time of `time()`; one that is later by less than a rounding error is later."""
        earliest_nanos = self.now_nanos + (when > self.time())
        nanos = max(earliest_nanos, math.ceil(when * NANOS_PER_SECOND))
        return self._call_at_nanos(nanos, callback, args, context)

    def _call_at_nanos(
        self, nanos: int, callback: Callable[..., Any], args: tuple[Any, ...], context: Any
    ) -> asyncio.TimerHandle:
        context = contextvars.copy_context() if context is None else context
        handle = asyncio.TimerHandle(nanos / NANOS_PER_SECOND, callback, args, self, context)
        process = context.get(CURRENT)
        heapq.heappush(self._timers, (nanos, self._number_for(process), handle, process))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: a cancelled timer is left out when its time comes."""

    # ---- tasks --------------------------------------------------------------------------------------------------

    def create_future(self) -> "asyncio.Future[Any]":
        """Return a new future."""
        return _Future(self._number_for(CURRENT.get()), self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None, **_settings: Any) -> Any:
        """Start a task in the caller's process, or in the one that the context names."""
        process: Process | None = (CURRENT.get() if context is None else context.get(CURRENT)) or None
        number = self._number_for(process)
        task = _Task(coro, number, loop=self, name=name or f"task-{number}", context=context)
        if process is not None:
            process.adopt(task)
        return task

    def _number_for(self, process: Process | None) -> int:
        return next(self._aside_numbers if _is_aside(process) else self._numbers)

    def get_task_factory(self) -> None:
        """Return None: tasks are the loop's own."""

    def get_exception_handler(self) -> None:
        """Return None: `faults` is where they go."""

    def call_exception_handler(self, context: Any) -> None:
        """Record an exception that was not caught."""
        error = context.get("exception")
        if error is not None and not self._is_closed:
            self.faults.append(error)

    def default_exception_handler(self, context: Any) -> None:
        """Record an exception that was not caught."""
        self.call_exception_handler(context)

    def get_debug(self) -> bool:
        """Return False: there is no debug mode."""
        return False

    def set_debug(self, enabled: bool) -> None:
        """Do nothing: there is no debug mode."""

    def run_in_executor(self, executor: Any, func: Callable[[*Ts], Any], *args: *Ts) -> Any:
        """Raise: a thread has no place in a world of one."""
        raise RuntimeError(f"{func} asks for a thread; in the simulation work runs inline")


def _is_aside(process: Process | None) -> bool:
    return process is not None and process.is_aside


class KernelClock:
    """A `Clock` on the running kernel loop."""

    def __init__(self, loop: KernelLoop) -> None:
        self._loop = loop

    def monotonic_seconds(self) -> float:
        """Return virtual seconds."""
        return self._loop.time()

    def unix_nanos(self) -> int:
        """Return the virtual wall clock, exact to the nanosecond."""
        return START_UNIX_NANOS + self._loop.now_nanos

    async def sleep(self, seconds: float) -> None:
        """Wait in virtual time."""
        await asyncio.sleep(max(seconds, 0.0))  # noqa: TID251 - this is the clock that others take


def run_kernel(
    main: Callable[[KernelLoop], Coroutine[Any, Any, T]], scheduler: TaskScheduler, aside: TaskScheduler | None = None
) -> T:
    """Run `main(loop)` to its end on a fresh loop and return its result; whatever still runs is dropped."""
    # What is left abstract are sockets, processes and signals, and those have no place here.
    loop = KernelLoop(scheduler, aside)  # type: ignore[abstract] # left so: sockets, processes, signals
    collecting = gc.isenabled()
    # A collection in the middle would end what the dead left behind, at a moment that differs between processes.
    gc.disable()
    try:
        result: T = loop.run_until_complete(main(loop))
        return result
    finally:
        loop.close()
        drop_all()
        if collecting:
            gc.enable()


def drop_all() -> None:
    """Let go of tasks that will never run again; errors of their last lines have no meaning.

    Whoever still holds the world of a run calls it again after letting go.
    """
    before = sys.unraisablehook
    sys.unraisablehook = lambda _unraisable: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gc.collect()
    finally:
        sys.unraisablehook = before
