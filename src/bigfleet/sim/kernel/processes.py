"""Simulates processes that are killed, paused and resumed at any await.

Each callback stores the process in which it was made. The loop (`bigfleet.sim.kernel.loop`) runs no callback of a dead
process and delays those of a paused one. So a death takes place between two awaits and no `finally` of the dead process
ever runs, as with SIGKILL. State that must outlive a process is stored outside of it. A dead process never continues: a
restart is another process.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from enum import Enum
from typing import Any, TypeVar

T = TypeVar("T")

#: Tasks made between two clearances of those that are done.
_CLEAR_EVERY = 256


class Life(Enum):
    """How a process is."""

    RUNNING = "running"
    PAUSED = "paused"
    DEAD = "dead"


class Process:
    """One process; `spawn` starts what belongs to it."""

    def __init__(self, name: str, *, is_aside: bool = False) -> None:
        self.name = name
        #: It runs after everybody else of a round, in an order and with numbers of its own.
        self.is_aside = is_aside
        self.life = Life.RUNNING
        #: Callbacks that have run in it.
        self.steps = 0
        #: The step before which it dies; None is never.
        self.dies_at_step: int | None = None
        self._on_death: list[Callable[[], None]] = []
        #: Set when it has died.
        self.died = asyncio.Event()
        #: Callbacks that came while it was paused, in order.
        self.parked: list[asyncio.Handle] = []
        #: Tasks of it that may not have ended. Those of the dead stay here: collected, they would run their `finally`.
        self._tasks: list[asyncio.Task[Any]] = []
        self._clear_at = _CLEAR_EVERY

    @property
    def is_alive(self) -> bool:
        """Return whether it was not killed; a paused one is alive."""
        return self.life is not Life.DEAD

    def add_death_callback(self, callback: Callable[[], None]) -> None:
        """Call this when the process has died, in no task's context, before what was added earlier."""
        self._on_death.append(callback)

    def spawn(self, coroutine: Coroutine[Any, Any, T], name: str = "") -> "asyncio.Task[T]":
        """Start a task of this process; any caller may ask. A dead process never runs it."""
        return asyncio.get_running_loop().create_task(coroutine, name=name or None, context=self._context())

    async def outcome(self, coroutine: Coroutine[Any, Any, T], name: str = "") -> "asyncio.Task[T] | None":
        """Run a coroutine in this process; return its task once it is done, None when the process died before."""
        task = self.spawn(coroutine, name)
        ended = asyncio.ensure_future(self.died.wait())
        try:
            await asyncio.wait((task, ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        return task if task.done() else None

    def adopt(self, task: "asyncio.Task[Any]") -> None:
        """Keep a task that was made in this process."""
        self._tasks.append(task)
        if len(self._tasks) >= self._clear_at:
            self._tasks = [each for each in self._tasks if self.life is Life.DEAD or not each.done()]
            self._clear_at = len(self._tasks) + _CLEAR_EVERY

    def admits(self, handle: asyncio.Handle) -> bool:
        """Return whether a callback may run now; that of a paused process is deferred."""
        if self.life is Life.RUNNING:
            self.steps += 1
            if self.dies_at_step is not None and self.steps >= self.dies_at_step:
                self.kill()
                return False
            return True
        if self.life is Life.PAUSED:
            self.parked.append(handle)
        return False

    def kill(self) -> None:
        """End it where it stands."""
        if self.life is Life.DEAD:
            return
        self.life = Life.DEAD
        self.parked.clear()
        self.died.set()
        for callback in reversed(self._on_death):
            callback()

    def pause(self) -> None:
        """Let nothing of it run until `resume`."""
        if self.life is Life.RUNNING:
            self.life = Life.PAUSED

    def resume(self) -> None:
        """Let it go on, knowing nothing of the time between."""
        if self.life is not Life.PAUSED:
            return
        self.life = Life.RUNNING
        parked, self.parked = self.parked, []
        loop = asyncio.get_running_loop()
        for handle in parked:
            # A handle runs in its own context, not in that of its caller.
            loop.call_soon(_Again(handle), context=self._context())

    def _context(self) -> Context:
        context = copy_context()
        context.run(CURRENT.set, self)
        return context


class _Again:
    """Runs a callback that was deferred."""

    def __init__(self, handle: asyncio.Handle) -> None:
        self._handle = handle

    def __call__(self) -> None:
        if not self._handle.cancelled():
            self._handle._run()


#: The process in whose context code runs; None is the world itself.
CURRENT: ContextVar[Process | None] = ContextVar("process", default=None)
