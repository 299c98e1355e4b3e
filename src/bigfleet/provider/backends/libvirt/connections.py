"""Runs jobs on hosts, each host on threads of its own, so that a host that hangs delays no other.

docs/spec/libvirt-provider.md §7. A job is a function over the host's `Hypervisor`. A connection is opened by the first
job that needs it, and again after it broke. It does not know what a job does.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol, TypeVar

import structlog

from bigfleet.model.clock import Clock
from bigfleet.provider.backends.libvirt.hypervisor import Connect, HostDown, Hypervisor
from bigfleet.provider.backends.libvirt.names import OBJECT_PREFIX
from bigfleet.provider.operations.invoke import BACKEND_THREADS

_log = structlog.get_logger("bigfleet.provider.backends.libvirt.connections")

A = TypeVar("A")
T = TypeVar("T")
Job = Callable[[Hypervisor], T]

#: At least so long between two attempts to connect to a host.
CONNECT_PAUSE_SECONDS: Final = 5.0
#: libvirtd serves five calls of a connection at a time by default; one is left for what is no guest's.
AGENT_THREADS: Final = 4


def _same(hypervisor: Hypervisor) -> Hypervisor:
    return hypervisor


def _look(hypervisor: Hypervisor) -> None:
    hypervisor.domain(OBJECT_PREFIX)


class HostCalls(Protocol):
    """What the driver needs of one host."""

    async def call(self, job: Job[T]) -> T:
        """Run a job after those before it. Raises HostDown, and what the job raises."""
        ...

    async def call_agent(self, job: Job[T]) -> T:
        """Run a job that waits for a guest, in parallel to the others. Raises HostDown, and what the job raises."""
        ...

    def close(self) -> None:
        """Close the connection when what runs has ended."""
        ...


class HostThreads:
    """The threads of one host, and its connection."""

    def __init__(self, uri: str, connect: Connect, on_change: Callable[[str], None], clock: Clock) -> None:
        """`on_change` is called, on any thread, with the name of a domain that changed."""
        self._uri = uri
        self._connect = connect
        self._on_change = on_change
        self._clock = clock
        # The names let the command end although a thread hangs.
        self._jobs = ThreadPoolExecutor(1, f"{BACKEND_THREADS}-libvirt")
        self._agents = ThreadPoolExecutor(AGENT_THREADS, f"{BACKEND_THREADS}-agent")
        #: Used by the one thread of `_jobs`; those of `_agents` read it.
        self._hypervisor: Hypervisor | None = None
        self._failed_seconds: float | None = None
        self._failure = ""
        self._is_closed = False

    async def call(self, job: Job[T]) -> T:
        """Run a job after those before it; a job that is cancelled before it began is not run."""
        return await self._run_on(self._jobs, self._run, job)

    async def call_agent(self, job: Job[T]) -> T:
        """Run a job on the connection that there is, or on a new one."""
        hypervisor = self._hypervisor
        if hypervisor is None:
            hypervisor = await self.call(_same)
        try:
            return await self._run_on(self._agents, job, hypervisor)
        except HostDown:
            # The thread of the jobs finds out as well, and drops the connection.
            await self.call(_look)
            raise

    async def _run_on(self, threads: ThreadPoolExecutor, work: Callable[[A], T], argument: A) -> T:
        """Run work on a thread. Raises HostDown once this connection is closed, also for work that still waited."""
        if self._is_closed:
            raise HostDown(f"{self._uri}: this connection was closed")
        future = threads.submit(work, argument)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._was_closed() or task is None or task.cancelling():
                raise
            raise HostDown(f"{self._uri}: this connection was closed") from None

    def _was_closed(self) -> bool:
        """Return whether it is closed by now: it may be closed while a thread works."""
        return self._is_closed

    def _run(self, job: Job[T]) -> T:
        hypervisor = self._opened()
        try:
            return job(hypervisor)
        except HostDown as error:
            self._lose(error)
            raise

    def _opened(self) -> Hypervisor:
        if self._hypervisor is not None:
            return self._hypervisor
        now_seconds = self._clock.monotonic_seconds()
        if self._failed_seconds is not None and now_seconds - self._failed_seconds < CONNECT_PAUSE_SECONDS:
            raise HostDown(self._failure)
        try:
            self._hypervisor = self._connect(self._uri, self._on_change)
        except HostDown as error:
            self._lose(error)
            raise
        _log.info("host.connected", uri=self._uri)
        self._failed_seconds = None
        return self._hypervisor

    def _lose(self, error: HostDown) -> None:
        hypervisor, self._hypervisor = self._hypervisor, None
        if self._failed_seconds is None:
            _log.warning("host.connection_lost", uri=self._uri, error=str(error))
        self._failure = str(error)
        self._failed_seconds = self._clock.monotonic_seconds()
        if hypervisor is not None:
            hypervisor.close()

    def close(self) -> None:
        """Close the connection after the jobs that run; those that wait are dropped."""

        def close() -> None:
            if self._hypervisor is not None:
                self._hypervisor.close()

        self._is_closed = True
        self._agents.shutdown(wait=False, cancel_futures=True)
        self._jobs.submit(close)
        self._jobs.shutdown(wait=False)
