"""Manages one process of a user's program: its group, its pipes, and the part of its output that is retained.

Standard output is passed to a function as it arrives; of standard error the end is retained. All waits and retained
output are bounded.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Final, cast

from bigfleet.provider.programs.orphan_killer import HelperAbsent, OrphanKiller

#: Of what a program writes to standard error, its end.
ERROR_BYTES_RETAINED_MAX: Final = 64 << 10
_STDIN, _STDOUT, _STDERR = 0, 1, 2

#: Takes output as it comes; after True it is read no further until `hold_output(is_held=False)`.
TakeOutput = Callable[[bytes], bool | None]


class ProgramProcess(asyncio.SubprocessProtocol):
    """A process in a session, and so in a group, of its own."""

    def __init__(self, take_output: TakeOutput, orphans: OrphanKiller | None) -> None:
        self._take_output = take_output
        self._orphans = orphans
        self._errors = bytearray()
        self._transport: asyncio.SubprocessTransport | None = None
        self._open_pipes = {_STDOUT, _STDERR}
        #: Set when the process has ended; what it started is killed by then.
        self.ended = asyncio.Event()
        #: Set when no process holds standard output or standard error any more.
        self.is_drained = asyncio.Event()
        #: None until the process has ended; negative for the signal that ended it.
        self.exit_code: int | None = None
        #: Whether SIGTERM was sent.
        self.was_terminated = False
        #: What `take_output` raised; the process was killed for it.
        self.output_fault: Exception | None = None
        self._start_fault: HelperAbsent | None = None

    @classmethod
    async def start(
        cls,
        arguments: Sequence[str],
        take_output: TakeOutput,
        *,
        environment: Mapping[str, str] | None = None,
        orphans: OrphanKiller | None = None,
    ) -> "ProgramProcess":
        """Start a program, which `orphans` ends if this process dies. Raises OSError and HelperAbsent.

        `environment` None is that of this process.
        """
        loop = asyncio.get_running_loop()
        _transport, protocol = await loop.subprocess_exec(
            lambda: cls(take_output, orphans),
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            env=environment,
        )
        if protocol._start_fault is not None:
            # It has been asked nothing.
            protocol.close()
            raise protocol._start_fault
        return protocol

    @property
    def errors(self) -> bytes:
        """The end of what came on standard error so far."""
        return bytes(self._errors)

    def write(self, content: bytes) -> None:
        """Write to standard input and close it behind the content. A program may end without having read it."""
        stdin = cast("asyncio.WriteTransport | None", self._pipe(_STDIN))
        if stdin is not None and not stdin.is_closing():
            stdin.write(content)
            stdin.close()

    def close_input(self) -> None:
        """Close standard input."""
        stdin = self._pipe(_STDIN)
        if stdin is not None:
            stdin.close()

    def hold_output(self, *, is_held: bool) -> None:
        """Read standard output no further, or read on."""
        stdout = cast("asyncio.ReadTransport | None", self._pipe(_STDOUT))
        if stdout is not None and not stdout.is_closing():
            if is_held:
                stdout.pause_reading()
            else:
                stdout.resume_reading()

    def terminate(self) -> None:
        """Send SIGTERM to the group, once."""
        if self.exit_code is None and not self.was_terminated:
            self.was_terminated = True
            self._signal_group(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the group: what the program started must not go on working behind our back."""
        self._signal_group(signal.SIGKILL)

    async def stop(self, *, terminate_seconds: float, wait_seconds_max: float) -> None:
        """End the group: SIGTERM and so long later SIGKILL; at once SIGKILL if it is 0 or SIGTERM was sent before.

        Returns when the process and what it started have ended, and at the latest `wait_seconds_max` after SIGKILL.
        """
        try:
            if terminate_seconds > 0 and not self.was_terminated:
                self.terminate()
                await self.ended_within(terminate_seconds)
        finally:
            # Also when the wait is cut short: a second cancellation is the end of the loop.
            self.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_seconds_max):
                await self.ended.wait()
                # The pipes close with the last of the group, unless one left it.
                await self.is_drained.wait()

    async def ended_within(self, seconds_max: float) -> bool:
        """Wait for the end of the process; return whether it came in time."""
        return await _set_within(self.ended, seconds_max)

    async def drained(self, seconds_max: float) -> bool:
        """Wait for the ends of both pipes; return False when they are held by a process that left the group."""
        return await _set_within(self.is_drained, seconds_max)

    def close(self) -> None:
        """Let go of the pipes, and of the process if it still runs."""
        if self._transport is not None:
            if self.exit_code is None:
                self.kill()
            self._transport.close()

    def _pipe(self, number: int) -> asyncio.BaseTransport | None:
        return None if self._transport is None else self._transport.get_pipe_transport(number)

    def _signal_group(self, number: signal.Signals) -> None:
        assert self._transport is not None, "a process that was started"
        # Gone, or run by another user by now.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._transport.get_pid(), number)

    # ---- what the loop reports -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport, and have the group ended with this process."""
        # Not isinstance: the transports of uvloop are no subclasses.
        self._transport = cast("asyncio.SubprocessTransport", transport)
        if self._orphans is not None:
            try:
                self._orphans.watch(self._transport.get_pid())
            except HelperAbsent as error:  # raised by `start`
                self._start_fault = error

    def pipe_data_received(self, fd: int, data: bytes | str) -> None:
        """Hand output on; of the errors retain the end."""
        assert isinstance(data, bytes), "pipes carry bytes"
        if fd == _STDERR:
            self._errors += data
            del self._errors[:-ERROR_BYTES_RETAINED_MAX]
            return
        if self.output_fault is not None:
            return
        try:
            is_held = self._take_output(data)
            if is_held:
                self.hold_output(is_held=True)
        except Exception as error:  # raised by the runner once the process has ended
            self.output_fault = error
            self.kill()

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """Note the end of a pipe."""
        self._open_pipes.discard(fd)
        if not self._open_pipes:
            self.is_drained.set()

    def process_exited(self) -> None:
        """Note the end of the process, and end what it left behind in its group."""
        assert self._transport is not None, "a process that was started"
        self.exit_code = self._transport.get_returncode()
        self.kill()
        if self._orphans is not None:
            self._orphans.forget(self._transport.get_pid())
        self.ended.set()


async def _set_within(event: asyncio.Event, seconds_max: float) -> bool:
    """Wait for an event; return whether it came in time."""
    if not event.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds_max):
                await event.wait()
    return event.is_set()
