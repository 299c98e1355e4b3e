"""Supervises the child processes: starts them, restarts those that die unexpectedly, stops them in order.

A child that dies is started again after a back-off that doubles. A child that never became ready and keeps dying is not
restarted again, because a person has to read its log. Exit codes and listening ports are the only signals that are
used.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Literal

from bigfleet.cli.runtime.failures import RunFault
from bigfleet.cli.runtime.process_progress import ProcessProgress
from bigfleet.model.clock import Clock

BACKOFF_FIRST_SECONDS: Final = 0.2
BACKOFF_SECONDS_MAX: Final = 5.0
#: A child that lived this long starts its back-off again.
STEADY_SECONDS: Final = 10.0
#: So many deaths in a row without ever listening mean that it cannot run at all.
FALSE_STARTS_MAX: Final = 3
#: A child that starts and makes no progress for this long hangs; one that makes progress may take as long as it likes.
STALL_SECONDS_MAX: Final = 60.0
#: A child usually listens within this; only a longer wait is reported.
QUIET_SECONDS: Final = 5.0
_PROGRESS_LOOK_SECONDS: Final = 0.5
#: A shard ends its streams and calls within 20 s.
STOP_SECONDS_MAX: Final = 25.0
LOG_BYTES_MAX: Final = 16 * 1024 * 1024
_PROBE_SECONDS: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """One process to keep alive."""

    name: str
    #: The arguments of `bigfleet`, or of `program`.
    arguments: Sequence[str]
    #: Loopback port that answers once it is up.
    port: int
    log: Path
    #: Holds the id of the process while there is one, for a person who wants to see it die.
    pid_file: Path
    #: The path of another program, empty for `bigfleet`.
    program: str = ""

    @property
    def command(self) -> tuple[str, ...]:
        """The command line; whatever runs ends with our end of its standard input."""
        if self.program:
            return (sys.executable, "-m", "bigfleet.cli.up.external_program", self.program, *self.arguments)
        return (sys.executable, "-m", "bigfleet.cli.up.child", *self.arguments)


@dataclass(slots=True, kw_only=True)
class ChildStatus:
    """What the view shows of one child."""

    name: str
    pid: int = 0
    up: bool = False
    restarts_total: int = 0
    #: The last unexpected end, for a person.
    last_end: str = ""


class _Child:
    """One child over its lives."""

    def __init__(self, spec: ChildSpec, clock: Clock) -> None:
        self.spec = spec
        self.status = ChildStatus(name=spec.name)
        self.listened = asyncio.Event()
        self._clock = clock
        self._process: asyncio.subprocess.Process | None = None
        self._stop_asked = asyncio.Event()

    async def keep(self) -> None:
        """Run the child for ever, until `stop`. Raises RunFault when it cannot run at all."""
        deaths_in_row = 0
        while not self._stop_asked.is_set():
            started_seconds = self._clock.monotonic_seconds()
            code = await self._live_once()
            if self._stop_asked.is_set():
                return
            self.status.up = False
            self.status.restarts_total += 1
            self.status.last_end = _describe_exit(code)
            if self._clock.monotonic_seconds() - started_seconds >= STEADY_SECONDS:
                deaths_in_row = 0
            deaths_in_row += 1
            if not self.listened.is_set() and deaths_in_row >= FALSE_STARTS_MAX:
                raise RunFault(
                    f"the {self.spec.name} does not start ({self.status.last_end}): "
                    f"{_last_line(self.spec.log)} (log: {self.spec.log})"
                )
            await self._clock.sleep(min(BACKOFF_SECONDS_MAX, BACKOFF_FIRST_SECONDS * 2 ** min(deaths_in_row - 1, 10)))

    async def _live_once(self) -> int:
        with _open_log(self.spec.log) as log:
            self._process = await asyncio.create_subprocess_exec(
                *self.spec.command,
                # Our end closes with this process, however it ends; the child stops then.
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                # A signal to our process group, such as Ctrl-C or that of timeout(1), must not reach the children: they
                # would stop in any order, and their ends would count as restarts.
                start_new_session=True,
            )
        self.status.pid = self._process.pid
        self.spec.pid_file.write_text(f"{self._process.pid}\n", encoding="utf-8")
        probe = asyncio.create_task(self._probe())
        try:
            return await self._process.wait()
        finally:
            probe.cancel()
            self.spec.pid_file.unlink(missing_ok=True)

    async def _probe(self) -> None:
        """Wait until the port answers."""
        while True:
            try:
                _reader, writer = await asyncio.open_connection("127.0.0.1", self.spec.port)
            except OSError:
                await self._clock.sleep(_PROBE_SECONDS)
                continue
            writer.close()
            self.status.up = True
            self.listened.set()
            return

    async def stop(self) -> None:
        """End the child: politely, then by force."""
        self._stop_asked.set()
        self.status.up = False
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(STOP_SECONDS_MAX):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


class Supervisor:
    """The children of one run, in the order in which they start; they stop in the opposite one."""

    def __init__(self, specs: Sequence[ChildSpec], clock: Clock) -> None:
        self._children = [_Child(spec, clock) for spec in specs]
        self._clock = clock
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def statuses(self) -> list[ChildStatus]:
        """The children as they are now, in start order."""
        return [child.status for child in self._children]

    @property
    def restarts_total(self) -> int:
        """How often any child was started again."""
        return sum(status.restarts_total for status in self.statuses)

    async def start(self, *, through: str = "", on_wait: Callable[[str], None] = lambda _text: None) -> None:
        """Start each child once the one before it listens, up to the one of a name; another call goes on there.

        `on_wait` is called once for each child that takes long, with what is waited for. Raises RunFault when one does
        not come up: it ends again and again, or makes no progress.
        """
        names = [child.spec.name for child in self._children]
        last = names.index(through) + 1 if through else len(names)
        for child in self._children[len(self._tasks) : last]:
            keeper = asyncio.create_task(child.keep(), name=f"keep-{child.spec.name}")
            self._tasks.append(keeper)
            listened = asyncio.create_task(child.listened.wait())
            try:
                await self._until_listening(child, keeper, listened, on_wait)
            finally:
                listened.cancel()
            if keeper.done():
                keeper.result()

    async def _until_listening(
        self,
        child: _Child,
        keeper: "asyncio.Task[None]",
        listened: "asyncio.Task[Literal[True]]",
        on_wait: Callable[[str], None],
    ) -> None:
        """Return when the child listens or has been given up. Raises RunFault when it makes no progress."""
        spec, progress = child.spec, ProcessProgress(child.spec.log)
        began_seconds = moved_seconds = self._clock.monotonic_seconds()
        has_reported = False
        while True:
            done, _running = await asyncio.wait(
                (keeper, listened), timeout=_PROGRESS_LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            if done:
                return
            now_seconds = self._clock.monotonic_seconds()
            if progress.has_moved(child.status.pid):
                moved_seconds = now_seconds
            if now_seconds - moved_seconds >= STALL_SECONDS_MAX:
                raise RunFault(
                    f"the {spec.name} does not listen on port {spec.port} and has made no progress for "
                    f"{STALL_SECONDS_MAX:g} s: {_last_line(spec.log)} (log: {spec.log})"
                )
            if now_seconds - began_seconds >= QUIET_SECONDS and not has_reported:
                has_reported = True
                on_wait(f"waiting until the {spec.name} listens on port {spec.port} (log: {spec.log}) …")

    async def watch(self) -> None:
        """Return never before `stop`; raises RunFault when a child cannot be restarted.

        Cancelling it stops nothing but the watching.
        """
        done, _running = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()

    async def stop(self) -> None:
        """Stop the children, the last one started first."""
        for child in reversed(self._children):
            await child.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _open_log(path: Path) -> IO[bytes]:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size > LOG_BYTES_MAX:
        path.replace(path.with_suffix(".old.log"))
    return path.open("ab")


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _last_line(log: Path) -> str:
    """Return the last line of a log that says anything, cut to what fits a message."""
    with log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 8192))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    return next((line[:300] for line in reversed(lines) if line), "it said nothing")
