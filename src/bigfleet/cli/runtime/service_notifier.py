"""Reports the state of a process to the service manager that started it, as sd_notify(3) describes.

Datagrams go to the AF_UNIX socket in NOTIFY_SOCKET: READY=1 as soon as `/readyz` answers 200, WATCHDOG=1 from the event
loop, RELOADING=1 around SIGHUP, STOPPING=1. Without that variable nothing is sent. This module must never end a
process.
"""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, MutableMapping
from contextlib import asynccontextmanager, suppress
from typing import Final, Self

import structlog

#: Time between two looks at the readiness, at most.
LOOK_SECONDS: Final = 1.0
#: A process that is not ready yet may wait for its provider or its store for any time, as long as its loop runs.
START_SECONDS: Final = 60.0
_READY: Final = "READY=1"

_log = structlog.get_logger(__name__)


class ServiceNotifier:
    """The connection to a service manager; without an address it sends nothing."""

    def __init__(self, address: str, *, watchdog_seconds: float | None = None) -> None:
        """`address` is a path or, after an @, an abstract name; a silence of `watchdog_seconds` ends the process."""
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watchdog_seconds = watchdog_seconds
        self._socket = _datagram_socket() if address else None
        self._is_ready = self._is_reloading = self._is_stopping = self._has_failed = False
        self._status = ""

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str], pid: int) -> Self:
        """Return the notifier of this process; remove the variables, which are not meant for its children."""
        address = environment.pop("NOTIFY_SOCKET", "")
        watchdog_usec = environment.pop("WATCHDOG_USEC", "")
        is_watched = environment.pop("WATCHDOG_PID", str(pid)) == str(pid)
        if address and not address.startswith(("/", "@")):
            advice = "the service manager learns nothing; use a path or an abstract name"
            _log.warning("runtime.service_manager_rejected", address=address, advice=advice)
            address = ""
        seconds = int(watchdog_usec) / 1e6 if is_watched and watchdog_usec.isdecimal() else 0.0
        return cls(address, watchdog_seconds=seconds or None)

    @asynccontextmanager
    async def reporting(self, readiness: Callable[[], str], stop: asyncio.Event) -> AsyncIterator[None]:
        """Report while the context lasts; `readiness` returns why the process is not ready, "" when it is.

        Ends with STOPPING=1, which is sent as soon as `stop` is set.
        """
        if self._socket is None:
            yield
            return
        following = asyncio.create_task(self._follow(readiness, stop), name="service manager")
        try:
            yield
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            self._stop()
            self._socket.close()

    def reload_began(self) -> None:
        """Report that files are read again."""
        if self._is_ready:
            self._is_reloading = True
            self._send("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def reload_ended(self) -> None:
        """Report that they were read, whether they are in force or not."""
        if self._is_reloading:
            self._is_reloading = False
            # One that is lost is sent again at the next look.
            self._is_ready = self._send(_READY)

    async def _follow(self, readiness: Callable[[], str], stop: asyncio.Event) -> None:
        look_seconds = min(LOOK_SECONDS, (self._watchdog_seconds or 2 * LOOK_SECONDS) / 2)
        while not stop.is_set():
            self._look(readiness())
            with suppress(TimeoutError):
                async with asyncio.timeout(look_seconds):
                    await stop.wait()
        self._stop()

    def _look(self, reason: str) -> None:
        lines = [] if self._watchdog_seconds is None else ["WATCHDOG=1"]
        if not self._is_ready:
            lines.append(f"EXTEND_TIMEOUT_USEC={int(START_SECONDS * 1e6)}" if reason else _READY)
        status = " ".join((reason or "ready").split())
        if status != self._status:
            lines.append(f"STATUS={status}")
        if lines and self._send(*lines):
            self._is_ready |= not reason
            self._status = status

    def _stop(self) -> None:
        if not self._is_stopping:
            self._is_stopping = self._send("STOPPING=1", "STATUS=stopping")

    def _send(self, *lines: str) -> bool:
        """Return whether the service manager got the lines, which go as one datagram."""
        if self._socket is None:
            return False
        try:
            self._socket.sendto("\n".join(lines).encode(), self._address)
        except BlockingIOError:
            # Its queue is full.
            return False
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                address = self._address.replace("\0", "@")
                _log.warning("runtime.service_manager_lost", address=address, error=error.strerror)
            return False
        return True


def _datagram_socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    # A service manager that hangs holds up no loop.
    made.setblocking(False)
    return made
