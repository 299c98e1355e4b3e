"""Waits until a run may begin: the shard has read its machines and can decide.

A wait that is longer than usual is reported, and does not count as part of the run. A shard that was ready once is not
checked again.
"""

import asyncio
import http.client
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Final

from rich.console import Console

from bigfleet.cli.runtime.failures import RunFault
from bigfleet.model.clock import Clock

#: Reading a fleet takes this long on no machine that could run one.
READY_SECONDS_MAX: Final = 600.0
#: A shard is usually ready within this; only a longer wait is reported.
QUIET_SECONDS: Final = 3.0
_POLL_SECONDS: Final = 0.1
_ASK_SECONDS_MAX: Final = 5.0
WAITING: Final = "waiting until the shard has read its machines …"


async def until_ready(
    is_ready: Callable[[], Awaitable[bool]], clock: Clock, console: Console, *, log: str, waiting: str = WAITING
) -> None:
    """Return when the shard says that it is ready; print what it waits for when that takes long.

    Raises RunFault naming `log` when it takes longer than anything can.
    """
    started_seconds = clock.monotonic_seconds()
    with ExitStack() as status:
        has_reported = False
        while not await is_ready():
            waited_seconds = clock.monotonic_seconds() - started_seconds
            if waited_seconds > READY_SECONDS_MAX:
                raise RunFault(f"the shard is not ready after {READY_SECONDS_MAX:g} s (log: {log})")
            if waited_seconds >= QUIET_SECONDS and not has_reported:
                has_reported = True
                if console.is_terminal:
                    status.enter_context(console.status(waiting))
                else:
                    console.print(waiting, highlight=False, markup=False)
            await clock.sleep(_POLL_SECONDS)


async def answers_ready(port: int) -> bool:
    """Ask `/readyz` on a loopback port once; a process that does not answer is not ready."""
    return await asyncio.to_thread(_ask, port)


def _ask(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ASK_SECONDS_MAX)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
