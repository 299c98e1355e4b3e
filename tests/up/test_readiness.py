"""When a run begins: not before the shard is ready, and with a word to who waits (a first start compiles kernels)."""

import asyncio
import io
from collections.abc import Awaitable, Callable

import pytest
from rich.console import Console

from bigfleet.cli.runtime.failures import RunFault
from bigfleet.cli.up.readiness import QUIET_SECONDS, READY_SECONDS_MAX, WAITING, answers_ready, until_ready
from bigfleet.sim.kernel.virtual_time import LoopClock


def ready_after(seconds: float) -> Callable[[], Awaitable[bool]]:
    """Return the question to a shard that is ready after so long."""
    clock = LoopClock()
    started_seconds = clock.monotonic_seconds()

    async def ask() -> bool:
        return clock.monotonic_seconds() - started_seconds >= seconds

    return ask


async def waited(seconds: float) -> tuple[float, str]:
    """Wait for such a shard; return how long that took and what was printed."""
    clock, console = LoopClock(), Console(file=io.StringIO(), width=100)
    started_seconds = clock.monotonic_seconds()
    await until_ready(ready_after(seconds), clock, console, log="shard.log")
    assert isinstance(console.file, io.StringIO)
    return clock.monotonic_seconds() - started_seconds, console.file.getvalue()


@pytest.mark.virtual_time
async def test_a_shard_that_is_ready_soon_is_not_talked_about() -> None:
    _seconds, printed = await waited(QUIET_SECONDS / 2)

    assert printed == ""


@pytest.mark.virtual_time
async def test_a_shard_that_compiles_is_waited_for_with_one_word() -> None:
    seconds, printed = await waited(60.0)

    assert (printed, seconds >= 60.0) == (f"{WAITING}\n", True)


@pytest.mark.virtual_time
async def test_a_shard_that_never_becomes_ready_is_given_up_with_its_log() -> None:
    with pytest.raises(RunFault, match=r"not ready after .* \(log: shard\.log\)"):
        await waited(2 * READY_SECONDS_MAX)


@pytest.mark.parametrize(("status", "is_ready"), [("200 OK", True), ("503 Service Unavailable", False)])
async def test_readyz_is_asked_over_http(status: str, is_ready: bool) -> None:
    """A port that nobody listens on is not ready."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert (await reader.readline()).startswith(b"GET /readyz ")
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        assert await answers_ready(port) is is_ready
    assert await answers_ready(port) is False
