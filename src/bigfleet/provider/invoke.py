"""How the kit calls an author's code: plain functions in a bounded pool, coroutines on the loop, both cut in time.

docs/spec/provider.md §6, §16. A call that overran is cancelled and not awaited; what it brings later is handed to a
callback. Nothing here may wait for a call beyond its time.
"""

import asyncio
import inspect
from collections.abc import AsyncIterable, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from bigfleet.provider.backend import (
    Adopts,
    Backend,
    Compensates,
    ConfigureWaits,
    Deletes,
    Feeds,
    KindLimits,
    Ready,
    Slot,
)
from bigfleet.provider.kinds import Kind

T = TypeVar("T")
#: A page that never ends is a broken page.
FACTS_MAX = 2_000_000

#: The parameters of every method that the kit calls, `self` aside.
_SIGNATURES = {
    "inventory": (),
    "create": ("machine", "op"),
    "configure": ("machine", "cluster", "blob", "op"),
    "drain": ("machine", "grace_seconds", "op"),
    "delete": ("machine", "op"),
    "adopt": ("machine",),
    "compensate": ("machine", "late"),
    "feed": ("feed",),
    "ready": ("machine", "cluster", "op"),
}
_REQUIRED = ("inventory", "create", "configure", "drain")


class DeadlinePassed(Exception):
    """The call did not end in its time; it was cancelled and is not awaited."""


class Author:
    """The author's backend and readiness, checked once. `threads` None runs plain functions inline (simulation)."""

    def __init__(self, backend: Backend, readiness: Ready | ConfigureWaits, threads: ThreadPoolExecutor | None) -> None:
        for name in _SIGNATURES:
            if name != "ready" and (name in _REQUIRED or hasattr(backend, name)):
                _check_signature(backend, name)
        if not isinstance(readiness, ConfigureWaits):
            _check_signature(readiness, "ready")
        if not backend.provider:
            raise TypeError(f"{type(backend).__name__}.provider is empty; it names who runs the hosts")
        self.backend = backend
        self.readiness = readiness
        self.deletes: Deletes | None = backend if isinstance(backend, Deletes) else None
        self.adopts: Adopts | None = backend if isinstance(backend, Adopts) else None
        self.compensates: Compensates | None = backend if isinstance(backend, Compensates) else None
        self.feeds: Feeds | None = backend if isinstance(backend, Feeds) else None
        self._threads = threads

    @property
    def provider(self) -> str:
        """HostRef.provider of every host."""
        return self.backend.provider

    def limits(self, kind: Kind) -> KindLimits:
        """Return how a kind is driven."""
        return self.backend.limits.kinds[kind]

    async def call(self, method: Callable[..., Any], *arguments: object, on_late: Callable[[Any], None]) -> Any:
        """Call a method and return its result. `on_late` gets the result of a thread that was not waited for."""
        if inspect.iscoroutinefunction(method):
            return await method(*arguments)
        if self._threads is None:
            result = method(*arguments)
        else:
            result = await _in_thread(self._threads, method, arguments, on_late)
        return await result if inspect.isawaitable(result) else result

    async def inventory(self) -> list[Slot]:
        """Return every fact, or raise what the backend raised on the way."""
        method = self.backend.inventory
        if inspect.isasyncgenfunction(method) or inspect.iscoroutinefunction(method) or self._threads is None:
            facts = method()
            if inspect.isawaitable(facts):
                facts = await facts
            if isinstance(facts, AsyncIterable):
                return _bounded_facts([fact async for fact in facts])
            return _bounded_facts(list(facts))
        # A generator does its work while it is read, so it is read where plain functions run.
        result = await asyncio.get_running_loop().run_in_executor(self._threads, _read_facts, method)
        if isinstance(result, AsyncIterable):
            return _bounded_facts([fact async for fact in result])
        return _bounded_facts(result)


def _read_facts(method: Callable[[], Any]) -> Any:
    facts = method()
    return facts if isinstance(facts, AsyncIterable) else list(facts)


def _bounded_facts(facts: list[Slot]) -> list[Slot]:
    if len(facts) > FACTS_MAX:
        raise ValueError(f"the inventory has {len(facts)} entries, at most {FACTS_MAX} are taken")
    return facts


def _check_signature(owner: object, name: str) -> None:
    method = getattr(owner, name, None)
    expected = ", ".join(("self", *_SIGNATURES[name]))
    if not callable(method):
        raise TypeError(f"{type(owner).__name__} has no method {name}({expected})")
    try:
        inspect.signature(method).bind(*_SIGNATURES[name])
    except TypeError as error:
        raise TypeError(f"{type(owner).__name__}.{name} must be callable as {name}({expected}): {error}") from error


async def _in_thread(
    threads: ThreadPoolExecutor,
    method: Callable[..., Any],
    arguments: tuple[object, ...],
    on_late: Callable[[Any], None],
) -> Any:
    loop = asyncio.get_running_loop()
    future: Future[Any] = threads.submit(method, *arguments)

    def late(done: Future[Any]) -> None:
        if not done.cancelled() and done.exception() is None and not loop.is_closed():
            loop.call_soon_threadsafe(on_late, done.result())

    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        # A thread cannot be cancelled: it goes on, and its effect lands.
        future.add_done_callback(late)
        raise


async def within(
    coroutine: Coroutine[Any, Any, T], seconds: float, on_abandoned: Callable[[asyncio.Task[T]], None]
) -> T:
    """Return the coroutine's result if it ends in time, else cancel it and raise DeadlinePassed at once.

    `on_abandoned` gets the task when it was left behind, by the deadline or because the caller was cancelled.
    """
    task = asyncio.ensure_future(coroutine)
    try:
        # wait() and not wait_for(): wait_for awaits the loser, and a loser may swallow its cancellation.
        done, _running = await asyncio.wait({task}, timeout=max(seconds, 0.0))
    except asyncio.CancelledError:
        task.cancel()
        on_abandoned(task)
        raise
    if not done:
        task.cancel()
        on_abandoned(task)
        raise DeadlinePassed
    return task.result()
