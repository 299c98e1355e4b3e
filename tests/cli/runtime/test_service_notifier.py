"""A process reports its state to the service manager: readiness, the watchdog, reloads, the stop."""

import asyncio
import os
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from bigfleet.cli.runtime.service_notifier import LOOK_SECONDS, ServiceNotifier

pytestmark = pytest.mark.virtual_time

EXTENDED = "EXTEND_TIMEOUT_USEC=60000000"


class ServiceManager:
    """The socket of a service manager, by a path or an abstract name."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self._socket.setblocking(False)

    def messages(self) -> list[list[str]]:
        """Return the lines of each datagram since the last call."""
        found = []
        while True:
            try:
                found.append(self._socket.recv(65536).decode().split("\n"))
            except BlockingIOError:
                return found

    def close(self) -> None:
        self._socket.close()
        if not self.address.startswith("@"):
            Path(self.address).unlink(missing_ok=True)


class ServedProcess:
    """A process that is followed: why it is not ready, and its stop."""

    def __init__(self, notifier: ServiceNotifier) -> None:
        self.notifier = notifier
        self.reason = ""
        self.stop = asyncio.Event()

    def reporting(self) -> AbstractAsyncContextManager[None]:
        return self.notifier.reporting(lambda: self.reason, self.stop)


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServiceManager]:
    # Of a path at most 107 bytes fit, and pytest's may be longer.
    name = os.path.relpath(tmp_path / "notify") if request.param == "path" else f"@bigfleet-test-{os.getpid()}"
    made = ServiceManager(name)
    made.address = str(tmp_path / "notify") if request.param == "path" else name
    yield made
    made.close()


def environment(manager: ServiceManager, **more: str) -> dict[str, str]:
    return {"NOTIFY_SOCKET": manager.address, "PATH": "/usr/bin", **more}


def notifier_for(manager: ServiceManager, **more: str) -> ServiceNotifier:
    return ServiceNotifier.from_environment(environment(manager, **more), pid=77)


async def looks(count: int) -> None:
    """Let the notifier look a number of times."""
    await asyncio.sleep((count - 0.5) * LOOK_SECONDS)


async def test_readiness_is_reported_once_it_is_there(manager: ServiceManager) -> None:
    served = ServedProcess(notifier_for(manager))
    served.reason = "reading\nthe inventory"
    async with served.reporting():
        await looks(2)
        waiting = manager.messages()
        served.reason = ""
        await looks(5)
        ready = manager.messages()
    ended = manager.messages()

    assert waiting == [[EXTENDED, "STATUS=reading the inventory"], [EXTENDED]]
    assert ready == [["READY=1", "STATUS=ready"]]
    assert ended == [["STOPPING=1", "STATUS=stopping"]]


async def test_a_process_that_is_no_longer_ready_says_why(manager: ServiceManager) -> None:
    """It stays started; READY=1 is no measure of health."""
    served = ServedProcess(notifier_for(manager))
    async with served.reporting():
        await looks(1)
        manager.messages()
        served.reason = "the state file is gone"
        await looks(2)
        served.reason = ""
        await looks(2)
        found = manager.messages()

    assert found == [["STATUS=the state file is gone"], ["STATUS=ready"]]


@pytest.mark.parametrize(("usec", "expected"), [("4000000", 10), ("1000000", 20)])
async def test_the_loop_reports_to_the_watchdog_at_least_twice_in_its_time(
    manager: ServiceManager, usec: str, expected: int
) -> None:
    served = ServedProcess(notifier_for(manager, WATCHDOG_USEC=usec, WATCHDOG_PID="77"))
    async with served.reporting():
        found = []
        # A queue holds ten datagrams by default.
        for _second in range(10):
            await asyncio.sleep(0.99)
            found += manager.messages()

    assert [message[0] for message in found] == ["WATCHDOG=1"] * expected
    assert found[0][1:] == ["READY=1", "STATUS=ready"]


@pytest.mark.parametrize("more", [{}, {"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "78"}, {"WATCHDOG_USEC": "0"}])
async def test_a_watchdog_of_another_process_gets_nothing(manager: ServiceManager, more: dict[str, str]) -> None:
    served = ServedProcess(notifier_for(manager, **more))
    async with served.reporting():
        await looks(5)
        found = manager.messages()

    assert found == [["READY=1", "STATUS=ready"]]


def hang(seconds: float) -> None:
    """Let nothing else run for so long: what a loop does that hangs."""
    time.sleep(seconds)


async def test_a_loop_that_hangs_is_silent(manager: ServiceManager) -> None:
    """The reports come from the loop that works, not from another thread."""
    served = ServedProcess(notifier_for(manager, WATCHDOG_USEC="20000"))
    async with served.reporting():
        await asyncio.sleep(0.01)
        assert manager.messages()
        hang(0.2)
        found = manager.messages()

    assert found == []


async def test_a_stop_is_reported_when_it_begins(manager: ServiceManager) -> None:
    served = ServedProcess(notifier_for(manager, WATCHDOG_USEC="1000000"))
    async with served.reporting():
        await looks(1)
        manager.messages()
        served.stop.set()
        await asyncio.sleep(10 * LOOK_SECONDS)
        found = manager.messages()

    assert found == [["STOPPING=1", "STATUS=stopping"]]
    assert manager.messages() == []


async def test_a_process_that_fails_reports_its_stop(manager: ServiceManager) -> None:
    served = ServedProcess(notifier_for(manager))

    async def fail() -> None:
        async with served.reporting():
            await looks(1)
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        await fail()

    assert manager.messages() == [["READY=1", "STATUS=ready"], ["STOPPING=1", "STATUS=stopping"]]


async def test_a_reload_is_reported_from_its_begin_to_its_end(manager: ServiceManager) -> None:
    served = ServedProcess(notifier_for(manager))
    async with served.reporting():
        await looks(1)
        manager.messages()
        served.notifier.reload_began()
        ((first, second),) = manager.messages()
        served.notifier.reload_ended()
        served.notifier.reload_ended()
        ended = manager.messages()

    assert first == "RELOADING=1"
    # Newer service managers compare it with the time at which they asked.
    name, _equals, usec = second.partition("=")
    assert (name, usec.isdecimal()) == ("MONOTONIC_USEC", True)
    assert ended == [["READY=1"]]


async def test_a_reload_of_a_process_that_starts_makes_it_not_ready(manager: ServiceManager) -> None:
    served = ServedProcess(notifier_for(manager))
    served.reason = "reading"
    async with served.reporting():
        await looks(1)
        manager.messages()
        served.notifier.reload_began()
        served.notifier.reload_ended()
        found = manager.messages()

    assert found == []


async def test_what_a_full_queue_refused_is_sent_again(manager: ServiceManager) -> None:
    served = ServedProcess(notifier_for(manager))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.setblocking(False)
        address = manager.address
        filled = 0
        try:
            while True:
                other.sendto(b"X=1", "\0" + address[1:] if address.startswith("@") else address)
                filled += 1
        except BlockingIOError:
            pass
    async with served.reporting():
        await looks(2)
        assert len(manager.messages()) == filled
        await looks(1)
        found = manager.messages()

    assert filled > 0
    assert found == [["READY=1", "STATUS=ready"]]


async def test_a_service_manager_that_is_gone_is_logged_once_and_ends_nothing(manager: ServiceManager) -> None:
    served = ServedProcess(notifier_for(manager, WATCHDOG_USEC="2000000"))
    manager.close()
    with capture_logs() as logs:
        async with served.reporting():
            await looks(5)

    assert [(log["event"], log["address"]) for log in logs] == [("runtime.service_manager_lost", manager.address)]


def test_the_variables_are_not_for_children(manager: ServiceManager) -> None:
    given = environment(manager, WATCHDOG_USEC="1", WATCHDOG_PID="1")

    ServiceNotifier.from_environment(given, pid=77)

    assert given == {"PATH": "/usr/bin"}


async def test_without_a_service_manager_nothing_is_sent_or_looked_at() -> None:
    looked: list[int] = []

    def readiness() -> str:
        looked.append(1)
        return ""

    notifier = ServiceNotifier.from_environment({"WATCHDOG_USEC": "1000000"}, pid=77)
    async with notifier.reporting(readiness, asyncio.Event()):
        await looks(5)
        notifier.reload_began()
        notifier.reload_ended()

    assert looked == []


async def test_an_address_that_is_no_socket_of_this_host_is_logged() -> None:
    with capture_logs() as logs:
        notifier = ServiceNotifier.from_environment({"NOTIFY_SOCKET": "vsock:2:1"}, pid=77)
        async with notifier.reporting(lambda: "", asyncio.Event()):
            await looks(2)

    assert [(log["event"], log["address"]) for log in logs] == [("runtime.service_manager_rejected", "vsock:2:1")]
