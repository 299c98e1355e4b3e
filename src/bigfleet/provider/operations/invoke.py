"""Calls the backend's code: functions in a bounded pool, coroutines on the loop, both with timeouts.

docs/spec/provider.md §6, §16. A call that exceeds its time is cancelled and not awaited; a late result is passed to a
callback. This module must not wait for a call beyond its time.
"""

import asyncio
import inspect
from collections import Counter
from collections.abc import AsyncIterable, Awaitable, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from bigfleet.provider.backend import (
    Admits,
    Adopts,
    Backend,
    Compensates,
    ConfigureWaits,
    Consults,
    ConsultsHosts,
    Deletes,
    Feeds,
    Identifies,
    KindLimits,
    MachineView,
    MarksOutOfService,
    PartialFacts,
    Ready,
    ScopesHosts,
)
from bigfleet.provider.operations.dispatch import DispatchLane
from bigfleet.provider.records.kinds import Kind
from bigfleet.provider.storage.machines_by_host import HostScope, one_scope

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
    "mark_out_of_service": ("machine",),
    "compensate": ("machine", "late"),
    "admit": ("machine", "kind"),
    "settle": ("machine", "reached"),
    "feed": ("feed",),
    "consult": ("lookup",),
    "consult_hosts": ("hosts",),
    "identify": ("stored",),
    "host_scope": ("machine_id",),
    "ready": ("machine", "cluster", "op"),
}
_REQUIRED = ("inventory", "create", "configure", "drain")
#: Protocols of two methods: an author who wrote one of them wants both.
_TOGETHER = {"admit": "settle", "settle": "admit"}
#: What the names of threads that run an author's functions begin with.
BACKEND_THREADS = "backend"
#: Calls of a coroutine at a time, where the author left it open.
_COROUTINES_MAX = 1000


class BackendFault(TypeError):
    """The author's backend or readiness cannot be called; the text names the method and its signature."""


class DeadlinePassed(Exception):
    """The call did not end in its time; it was cancelled and is not awaited."""


class BackendCancelled(Exception):
    """A call ended as cancelled, and the kit did not cancel it: something that it waited for was cancelled."""

    def __init__(self) -> None:
        super().__init__("something that the backend waited for was cancelled")


class Threads:
    """The pools for plain functions: one a kind of call, and one for everything else."""

    def __init__(self, threads_max: int) -> None:
        self._others = ThreadPoolExecutor(threads_max, BACKEND_THREADS)
        self._kinds = {kind: ThreadPoolExecutor(threads_max, f"{BACKEND_THREADS}-{kind.value}") for kind in Kind}

    def of(self, kind: Kind | None) -> ThreadPoolExecutor:
        """Return the pool of a kind, None being what is no mutating call."""
        return self._others if kind is None else self._kinds[kind]

    def shutdown(self) -> None:
        """Take no more work; what runs is let go."""
        for pool in (self._others, *self._kinds.values()):
            pool.shutdown(wait=False, cancel_futures=True)


class BackendAdapter:
    """The author's backend and readiness, checked once. `threads` None runs plain functions inline (simulation)."""

    def __init__(
        self,
        backend: Backend,
        readiness: Ready | ConfigureWaits,
        threads: Threads | None,
        *,
        provider: str | None = None,
        on_stray_ended: Callable[[str], None] = lambda _machine_id: None,
    ) -> None:
        """Raises BackendFault naming the method that cannot be called. `provider` None is the backend's own name.

        `on_stray_ended` is called with a machine's id when its last stray thread ended.
        """
        for name in _SIGNATURES:
            partner = _TOGETHER.get(name)
            is_wanted = name in _REQUIRED or (partner is not None and hasattr(backend, partner))
            if name != "ready" and (is_wanted or hasattr(backend, name)):
                _check_signature(backend, name)
        if not isinstance(readiness, ConfigureWaits):
            _check_signature(readiness, "ready")
        if not backend.provider:
            raise BackendFault(f"{type(backend).__name__}.provider is empty; it names who runs the hosts")
        self.backend = backend
        self.readiness = readiness
        self.deletes: Deletes | None = backend if isinstance(backend, Deletes) else None
        self.adopts: Adopts | None = backend if isinstance(backend, Adopts) else None
        self.marks: MarksOutOfService | None = backend if isinstance(backend, MarksOutOfService) else None
        self.compensates: Compensates | None = backend if isinstance(backend, Compensates) else None
        self.feeds: Feeds | None = backend if isinstance(backend, Feeds) else None
        self.consults: Consults | None = backend if isinstance(backend, Consults) else None
        self.consults_hosts: ConsultsHosts | None = backend if isinstance(backend, ConsultsHosts) else None
        self.identifies: Identifies | None = backend if isinstance(backend, Identifies) else None
        self.admits: Admits | None = backend if isinstance(backend, Admits) else None
        #: HostRef.provider of every host.
        self.provider = provider or backend.provider
        #: The name space of a machine's host_ref.
        self.host_scope: HostScope = backend.host_scope if isinstance(backend, ScopesHosts) else one_scope
        #: What a Drain leaves, as the author declared it.
        self.reset = backend.limits.reset
        self._threads = threads
        #: Abandoned threads that still run, by machine.
        self._strays: Counter[str] = Counter()
        self._on_stray_ended = on_stray_ended

    def limits(self, kind: Kind) -> KindLimits:
        """Return how a kind is driven, as the author wrote it."""
        return self.backend.limits.kinds[kind]

    def lane(self, kind: Kind) -> DispatchLane:
        """Return the bounds of a kind's calls with what the author left open filled in."""
        return lane_of(self.backend, kind)

    def has_stray(self, machine_id: str) -> bool:
        """Return whether a thread works on a machine after its call was given up."""
        return self._strays[machine_id] > 0

    async def call(
        self,
        method: Callable[..., Any],
        machine: MachineView,
        *arguments: object,
        on_late: Callable[[Any], None],
        kind: Kind | None = None,
    ) -> Any:
        """Call a method for a machine. `on_late` gets the result of a thread that was not waited for."""
        if inspect.iscoroutinefunction(method):
            return await method(machine, *arguments)
        if self._threads is None:
            result = method(machine, *arguments)
        else:
            result = await self._in_thread(self._threads.of(kind), method, (machine, *arguments), on_late)
        return await result if inspect.isawaitable(result) else result

    async def _in_thread(
        self,
        threads: ThreadPoolExecutor,
        method: Callable[..., Any],
        arguments: tuple[Any, ...],
        on_late: Callable[[Any], None],
    ) -> Any:
        loop = asyncio.get_running_loop()
        machine_id = arguments[0].id
        future: Future[Any] = threads.submit(method, *arguments)

        def stray_ended(done: Future[Any]) -> None:
            self._strays[machine_id] -= 1
            if self._strays[machine_id] <= 0:
                del self._strays[machine_id]
            if not done.cancelled() and done.exception() is None:
                on_late(done.result())
            self._on_stray_ended(machine_id)

        def late(done: Future[Any]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(stray_ended, done)

        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            # A thread cannot be cancelled: one that began goes on, and its effect lands.
            if not future.cancel():
                self._strays[machine_id] += 1
                future.add_done_callback(late)
            raise

    async def inventory(self) -> PartialFacts:
        """Return every fact, or raise what the backend raised; what it cancelled itself raises BackendCancelled."""
        task = asyncio.current_task()
        cancelled_before = 0 if task is None else task.cancelling()
        try:
            return await self._read_inventory()
        except asyncio.CancelledError:
            if task is not None and task.cancelling() > cancelled_before:
                raise
            raise BackendCancelled from None

    async def _read_inventory(self) -> PartialFacts:
        threads = self._threads
        if threads is None:
            return await read_facts(self.backend.inventory, _inline)
        loop = asyncio.get_running_loop()
        return await read_facts(self.backend.inventory, lambda work: loop.run_in_executor(threads.of(None), work))


def lane_of(backend: Backend, kind: Kind) -> DispatchLane:
    """Return the bounds of a kind's calls with what the author left open filled in."""
    limits = backend.limits.kinds[kind]
    if inspect.iscoroutinefunction(getattr(backend, kind.value, None)):
        concurrency_max = limits.concurrency_max or _COROUTINES_MAX
    else:
        threads_max = backend.limits.threads_max
        concurrency_max = min(limits.concurrency_max or threads_max, threads_max)
    return DispatchLane(
        concurrency_max=concurrency_max,
        queue_max=limits.queue_max,
        rate_per_second=limits.rate_per_second,
        burst=limits.burst,
    )


async def _inline(work: Callable[[], Any]) -> Any:
    return work()


async def read_facts(
    method: Callable[[], Any], run_plain: Callable[[Callable[[], Any]], Awaitable[Any]]
) -> PartialFacts:
    """Return an inventory read to its end; what is no coroutine runs, and is read, where `run_plain` runs it."""
    if inspect.isasyncgenfunction(method) or inspect.iscoroutinefunction(method):
        facts = method()
    else:
        # A generator does its work while it is read.
        facts = await run_plain(lambda: _read_plain(method))
    if inspect.isawaitable(facts):
        facts = await facts
    if isinstance(facts, PartialFacts):
        whole = facts
    elif isinstance(facts, AsyncIterable):
        whole = PartialFacts(facts=tuple([fact async for fact in facts]))
    else:
        whole = PartialFacts(facts=tuple(facts))
    if len(whole.facts) > FACTS_MAX:
        raise ValueError(f"the inventory has {len(whole.facts)} entries, at most {FACTS_MAX} are taken")
    return whole


def _read_plain(method: Callable[[], Any]) -> Any:
    facts = method()
    is_ready_made = isinstance(facts, AsyncIterable | PartialFacts) or inspect.isawaitable(facts)
    return facts if is_ready_made else list(facts)


def _check_signature(owner: object, name: str) -> None:
    method = getattr(owner, name, None)
    expected = ", ".join(("self", *_SIGNATURES[name]))
    if not callable(method):
        raise BackendFault(f"{type(owner).__name__} has no method {name}({expected})")
    try:
        inspect.signature(method).bind(*_SIGNATURES[name])
    except TypeError as error:
        raise BackendFault(f"{type(owner).__name__}.{name} must be callable as {name}({expected}): {error}") from error


async def within(
    coroutine: Coroutine[Any, Any, T], seconds: float, on_abandoned: Callable[[asyncio.Task[T]], None]
) -> T:
    """Return the coroutine's result if it ends in time, else cancel it and raise DeadlinePassed at once.

    A coroutine that ends as cancelled by itself raises BackendCancelled, and its caller goes on. `on_abandoned` gets
    the task when it was left behind, by the deadline or because the caller was cancelled.
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
    if task.cancelled():
        raise BackendCancelled
    return task.result()
