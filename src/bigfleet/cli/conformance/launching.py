"""Finds or starts the providers under test, kills them, and starts them again.

A command is an argument vector, never a shell's line; it is killed by its own pid. docs/spec/provider.md §23. Nothing
here may leave a process behind.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from bigfleet.cli.conformance.settings import ADDRESS, SEEDS, STATE, ConformanceSettings
from bigfleet.conformance.ports import ProviderClient, ProviderUnderTest, SiteFault, SiteMissing
from bigfleet.conformance.profiles import Lane
from bigfleet.model.clock import Clock
from bigfleet.rpc.clients.conformance import GrpcConnection, until_serving
from bigfleet.rpc.security.tls import TlsFiles

_CONNECTIONS = 2
#: A start may take so long, also with less patience.
START_SECONDS_MIN = 20.0
_STOP_SECONDS_MAX = 10.0
_SEEDS_MAIN = 256
_SEEDS_RESTARTED = 64
_LOG_TAIL_CHARACTERS_MAX = 400


class RunningSite:
    """A provider at an address, over connections of the suite's own. Made on a running event loop."""

    def __init__(self, address: str, tls: TlsFiles | None) -> None:
        self._address = address
        self._connections = [GrpcConnection(address, tls) for _ in range(_CONNECTIONS)]

    @property
    def address(self) -> str:
        """`HOST:PORT`."""
        return self._address

    @property
    def connections(self) -> Sequence[ProviderClient]:
        """Channels that share nothing."""
        return self._connections

    async def redial(self) -> None:
        """Connect again, to a provider that was started again."""
        await asyncio.gather(*(connection.redial() for connection in self._connections))

    async def restart(self) -> None:
        """Raise SiteFault: who did not start it must not kill it."""
        raise SiteFault(f"{self._address}: a provider that the suite did not start is not restarted; give --launch")

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.gather(*(connection.close() for connection in self._connections))


class LaunchedSite:
    """A provider that the suite starts, over one state for all its lives."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        seeds: int,
        tls: TlsFiles | None,
        clock: Clock,
        log: Path | None,
        start_seconds_max: float = START_SECONDS_MIN,
    ) -> None:
        """Prepare an address and a folder; `start` it before use. The log goes to the folder without `log`."""
        #: Holds the state; gone after `close`.
        self.folder = Path(tempfile.mkdtemp(prefix="bigfleet-conformance-"))
        self._address = f"127.0.0.1:{_free_port()}"
        places = {ADDRESS: self._address, STATE: str(self.folder / "state"), SEEDS: str(seeds)}
        self._arguments = [_filled(argument, places) for argument in command]
        self._log = log or self.folder / "provider.log"
        self._tls = tls
        self._clock = clock
        self._start_seconds_max = start_seconds_max
        self._process: asyncio.subprocess.Process | None = None
        self._running = RunningSite(self._address, tls)

    @property
    def address(self) -> str:
        """`HOST:PORT`, the same over all lives."""
        return self._address

    @property
    def connections(self) -> Sequence[ProviderClient]:
        """Channels that share nothing and find the next life by themselves."""
        return self._running.connections

    @property
    def pid(self) -> int:
        """The id of the process of now."""
        assert self._process is not None, "only a started provider has a process"
        return self._process.pid

    async def start(self) -> None:
        """Start the process and return once it serves. Raises SiteFault."""
        with self._log.open("ab") as log:
            self._process = await self._spawn(log)
        serving = asyncio.ensure_future(
            until_serving(self._address, self._tls, self._clock, seconds_max=self._start_seconds_max)
        )
        ending = asyncio.ensure_future(self._process.wait())
        try:
            await asyncio.wait({serving, ending}, return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                raise SiteFault(f"{self._arguments[0]} ended with {ending.result()}{self._log_text()}")
            try:
                serving.result()
            except SiteFault as fault:
                raise SiteFault(f"{fault}{self._log_text()}") from fault
        finally:
            serving.cancel()
            ending.cancel()
            await asyncio.gather(serving, ending, return_exceptions=True)

    async def _spawn(self, log: IO[bytes]) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                *self._arguments, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log
            )
        except OSError as error:
            raise SiteFault(f"{self._arguments[0]}: {error.strerror}; name a program that can be run") from error

    def _log_text(self) -> str:
        tail = " ".join(self._log.read_text(errors="replace")[-_LOG_TAIL_CHARACTERS_MAX:].split())
        return f"; its last words: {tail}" if tail else "; it said nothing"

    async def restart(self) -> None:
        """Kill the process without warning, and start it again over the same state. Raises SiteFault."""
        await self._end(signal.SIGKILL)
        await self.start()
        await self._running.redial()

    async def _end(self, how: signal.Signals) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, how)
        try:
            async with asyncio.timeout(_STOP_SECONDS_MAX):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    async def close(self) -> None:
        """End the process, and remove its folder."""
        try:
            await self._running.close()
        finally:
            await self._end(signal.SIGTERM)
            shutil.rmtree(self.folder, ignore_errors=True)


def _filled(argument: str, places: dict[str, str]) -> str:
    for placeholder, text in places.items():
        argument = argument.replace(placeholder, text)
    return argument


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class CommandSites:
    """The provider of each lane, as the flags define it."""

    def __init__(self, settings: ConformanceSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock

    async def open(self, lane: Lane) -> ProviderUnderTest:
        """Return the provider of a lane, serving. Raises SiteMissing or SiteFault."""
        settings = self._settings
        if lane in (Lane.MAIN, Lane.SCALE) and settings.target is not None:
            return RunningSite(settings.target, settings.tls)
        if lane is Lane.FAULT:
            return await self._launched(settings.launch_fault, "--launch-fault", lane, _SEEDS_RESTARTED)
        seeds = {Lane.MAIN: _SEEDS_MAIN, Lane.SCALE: settings.plan.scale_count, Lane.DURABLE: _SEEDS_RESTARTED}
        return await self._launched(settings.launch, "--launch", lane, seeds[lane])

    async def _launched(self, command: Sequence[str] | None, flag: str, lane: Lane, seeds: int) -> ProviderUnderTest:
        if command is None:
            raise SiteMissing(f"{flag} is missing: the {lane.value} behaviours start their provider themselves")
        out = self._settings.out
        log = None if out is None else out / f"provider-{lane.value}.log"
        site = LaunchedSite(
            command,
            seeds=seeds,
            tls=self._settings.tls,
            clock=self._clock,
            log=log,
            start_seconds_max=max(START_SECONDS_MIN, self._settings.plan.patience.step_seconds),
        )
        try:
            await site.start()
        except BaseException:
            await site.close()
            raise
        return site
