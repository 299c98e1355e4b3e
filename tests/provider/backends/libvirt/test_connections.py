"""Jobs on hosts: in order on one host, in parallel on several, and again after a connection broke."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from bigfleet.cli.runtime.system import SystemClock
from bigfleet.provider.backends.libvirt.connections import AGENT_THREADS, CONNECT_PAUSE_SECONDS, HostThreads
from bigfleet.provider.backends.libvirt.hypervisor import HostDown, HostError, Hypervisor
from tests.provider.backends.libvirt.memory_host import MemoryHost


class Clock(SystemClock):
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def monotonic_seconds(self) -> float:
        return self.seconds


class Daemon:
    """Connections that a test breaks."""

    def __init__(self) -> None:
        self.opened: list[MemoryHost] = []
        self.is_away = False

    def connect(self, uri: str, on_change: Callable[[str], None]) -> Hypervisor:
        if self.is_away:
            raise HostDown(f"{uri}: refused")
        host = MemoryHost()
        self.opened.append(host)
        return host

    def threads(self, clock: Clock | None = None) -> HostThreads:
        return HostThreads("test:///h", self.connect, lambda _name: None, clock or Clock())


def broken(_hypervisor: Hypervisor) -> None:
    raise HostDown("client socket is closed")


async def test_a_host_that_hangs_delays_no_other() -> None:
    daemon, hang = Daemon(), threading.Event()
    hung, other = daemon.threads(), daemon.threads()
    waiting = asyncio.create_task(hung.call(lambda _hypervisor: hang.wait()))
    await asyncio.sleep(0)
    assert await other.call(lambda _hypervisor: 7) == 7
    behind = asyncio.create_task(hung.call(lambda _hypervisor: 8))
    await asyncio.sleep(0.01)
    assert not behind.done()
    hang.set()
    assert (await waiting, await behind) == (True, 8)
    for threads in (hung, other):
        threads.close()


async def test_a_job_that_was_given_up_before_it_began_is_never_run() -> None:
    threads, hang, ran = Daemon().threads(), threading.Event(), []
    first = asyncio.create_task(threads.call(lambda _hypervisor: hang.wait()))
    second = asyncio.create_task(threads.call(lambda _hypervisor: ran.append(1)))
    await asyncio.sleep(0.01)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    hang.set()
    await first
    await threads.call(lambda _hypervisor: None)
    assert ran == []
    threads.close()


async def test_a_broken_connection_is_closed_and_opened_again_after_a_pause() -> None:
    daemon, clock = Daemon(), Clock()
    threads = daemon.threads(clock)
    with pytest.raises(HostDown, match="socket is closed"):
        await threads.call(broken)
    assert daemon.opened[0].is_down
    with pytest.raises(HostDown, match="socket is closed"):
        await threads.call(lambda _hypervisor: None)
    assert len(daemon.opened) == 1
    clock.seconds = CONNECT_PAUSE_SECONDS
    await threads.call(lambda _hypervisor: None)
    assert len(daemon.opened) == 2
    threads.close()


async def test_a_host_that_cannot_be_reached_is_down_and_other_errors_keep_the_connection() -> None:
    daemon, clock = Daemon(), Clock()
    threads = daemon.threads(clock)
    daemon.is_away = True
    with pytest.raises(HostDown, match="refused"):
        await threads.call(lambda _hypervisor: None)
    daemon.is_away, clock.seconds = False, CONNECT_PAUSE_SECONDS

    def wrong(_hypervisor: Hypervisor) -> None:
        raise HostError("no such volume")

    with pytest.raises(HostError, match="no such volume"):
        await threads.call(wrong)
    await threads.call(lambda _hypervisor: None)
    assert len(daemon.opened) == 1
    threads.close()


async def test_guests_are_asked_beside_the_jobs_and_find_a_broken_connection() -> None:
    daemon, clock, hang = Daemon(), Clock(), threading.Event()
    threads = daemon.threads(clock)
    assert await threads.call_agent(lambda _hypervisor: 7) == 7
    waiting = asyncio.create_task(threads.call(lambda _hypervisor: hang.wait()))
    await asyncio.sleep(0.01)
    assert await threads.call_agent(lambda _hypervisor: 8) == 8
    hang.set()
    await waiting
    threads.close()


async def test_guests_that_wait_for_a_thread_hear_that_the_host_is_down_when_its_connection_is_closed() -> None:
    """Another address of the host, while more guests are asked than there are threads."""
    threads, hang = Daemon().threads(), threading.Event()
    assert await threads.call_agent(lambda _hypervisor: 7) == 7
    asked = [asyncio.create_task(threads.call_agent(lambda _hypervisor: hang.wait())) for _ in range(AGENT_THREADS)]
    waiting = asyncio.create_task(threads.call_agent(lambda _hypervisor: 8))
    await asyncio.sleep(0.01)
    threads.close()
    with pytest.raises(HostDown, match="this connection was closed"):
        await waiting
    with pytest.raises(HostDown, match="this connection was closed"):
        await threads.call(lambda _hypervisor: 9)
    with pytest.raises(HostDown, match="this connection was closed"):
        await threads.call_agent(lambda _hypervisor: 9)
    hang.set()
    assert await asyncio.gather(*asked) == [True] * AGENT_THREADS


async def test_a_caller_that_is_cancelled_after_the_connection_was_closed_ends_as_cancelled() -> None:
    threads, hang = Daemon().threads(), threading.Event()
    caller = asyncio.create_task(threads.call(lambda _hypervisor: hang.wait()))
    await asyncio.sleep(0.01)
    threads.close()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    hang.set()
