"""Runs a user's program for one call, within its time: request on standard input, answer on standard output.

docs/spec/exec-provider.md §2, §6. Each way to end has its own result: exit code, signal, timeout, malformed answer. The
program's input must never be in a text that this module returns or raises.
"""

import asyncio
import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from bigfleet.model.clock import Clock
from bigfleet.provider.backend import Op, Transient
from bigfleet.provider.programs.orphan_killer import HelperAbsent, OrphanKiller
from bigfleet.provider.programs.process import ProgramProcess, TakeOutput
from bigfleet.provider.programs.redaction import redacted

#: The exit code of a program whose call may succeed if it is made again (EX_TEMPFAIL of sysexits.h).
TRANSIENT_EXIT_CODE: Final = 75
#: What is retained of an answer; more is drained and makes the answer useless.
OUTPUT_BYTES_MAX: Final = 64 << 20
#: Of a call without a deadline of its own: `describe`, `inventory`, `adopt`.
LOOK_SECONDS_MAX: Final = 60.0
#: What was killed is waited for so long, and pipes that a process outside of the group holds.
PIPES_SECONDS_MAX: Final = 5.0
#: How long before its deadline a program gets SIGTERM.
TERMINATE_SECONDS: Final = 2.0
#: A text that people read on one line.
TEXT_CHARACTERS_MAX: Final = 1000
_TERMINATED_EXIT_CODES: Final = (-15, 128 + 15)
#: Of a machine that is short of something for a moment, or a program that is being replaced.
_TRANSIENT_ERRORS: Final = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ETXTBSY})


class ProgramFailed(Exception):
    """The program failed for good."""


class ProgramNotStarted(ProgramFailed):
    """The program is missing, or is nothing that can be executed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
    """How one run ended."""

    #: Negative for the signal that ended it.
    exit_code: int
    #: Standard output, unless it went to a function of the caller's.
    output: bytes
    #: Last line of standard error that is not blank, without control characters and secrets; may be empty.
    error_line: str


class _Output:
    """Retains what comes up to a bound."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.content = bytearray()

    @property
    def is_cut(self) -> bool:
        return len(self.content) > self._bytes_max

    def take(self, data: bytes) -> None:
        if not self.is_cut:
            self.content += data


class ProgramRunner:
    """Runs `PROGRAM ARGUMENTS… VERB`."""

    def __init__(
        self,
        program: str,
        arguments: Sequence[str] = (),
        *,
        clock: Clock,
        environment: Mapping[str, str] | None = None,
        terminate_seconds: float = 0.0,
        pipes_seconds_max: float = PIPES_SECONDS_MAX,
        orphans: OrphanKiller | None = None,
    ) -> None:
        """`environment` None is that of this process. `terminate_seconds` 0 sends no SIGTERM before SIGKILL.

        `orphans` ends programs that run when this process is killed; without it they run on.
        """
        self.program = program
        self._arguments = tuple(arguments)
        self._clock = clock
        self._environment = environment
        self._terminate_seconds = terminate_seconds
        self._pipes_seconds_max = pipes_seconds_max
        self._orphans = orphans

    async def run(
        self,
        verb: str,
        question: Mapping[str, Any],
        *,
        seconds: float | None = None,
        deadline_monotonic_seconds: float | None = None,
        secret: bytes = b"",
        output_bytes_max: int = OUTPUT_BYTES_MAX,
        take_output: TakeOutput | None = None,
    ) -> ProgramResult:
        """Run the program to its end.

        `seconds` bounds a call that is no operation's. An operation's is cancelled by the kit at its deadline, which
        is given for SIGTERM to come before it. Raises ProgramFailed, Transient for a lack of resources, and what
        `take_output` raised.
        """
        output = _Output(output_bytes_max)
        try:
            async with asyncio.timeout(seconds):
                if seconds is not None and deadline_monotonic_seconds is None:
                    deadline_monotonic_seconds = self._clock.monotonic_seconds() + seconds
                result = await self._outcome(
                    verb,
                    msgspec.json.encode(question),
                    take_output or output.take,
                    output.content,
                    deadline_monotonic_seconds,
                    secret,
                )
        except TimeoutError as error:
            raise ProgramFailed(f"{verb} did not end in {seconds:g} s and was killed") from error
        if result.exit_code == 0 and output.is_cut:
            raise ProgramFailed(f"{verb} wrote more than {_shown_bytes(output_bytes_max)}")
        return result

    async def start(self, verb: str, take_output: TakeOutput) -> ProgramProcess:
        """Start the program and return its process, whose owner must close it. Raises ProgramFailed or Transient."""
        try:
            return await ProgramProcess.start(
                (self.program, *self._arguments, verb),
                take_output,
                environment=self._environment,
                orphans=self._orphans,
            )
        except HelperAbsent as error:
            raise Transient(str(error)) from error
        except OSError as error:
            text = f"{self.program}: {error.strerror}"
            if error.errno in _TRANSIENT_ERRORS:
                raise Transient(text) from error
            hint = "; begin a script with #! and its interpreter" if error.errno == errno.ENOEXEC else ""
            raise ProgramNotStarted(text + hint) from error

    async def _outcome(
        self,
        verb: str,
        content: bytes,
        take_output: TakeOutput,
        output: bytearray,
        deadline_monotonic_seconds: float | None,
        secret: bytes,
    ) -> ProgramResult:
        process = await self.start(verb, take_output)
        process.write(content)
        terminating = self._terminate_before(process, deadline_monotonic_seconds)
        try:
            await process.ended.wait()
            await process.drained(self._pipes_seconds_max)
            await self._await_deadline(process, deadline_monotonic_seconds)
        except asyncio.CancelledError:
            # It had succeeded before its time was over: the caller must learn of the effect, to undo it.
            if process.exit_code != 0:
                await process.stop(terminate_seconds=self._terminate_seconds, wait_seconds_max=self._pipes_seconds_max)
                raise
        finally:
            if terminating is not None:
                terminating.cancel()
            process.close()
        if process.output_fault is not None:
            raise process.output_fault
        assert process.exit_code is not None, "it has ended"
        return ProgramResult(
            exit_code=process.exit_code, output=bytes(output), error_line=error_line(process.errors, secret)
        )

    def _terminate_before(
        self, process: ProgramProcess, deadline_monotonic_seconds: float | None
    ) -> asyncio.TimerHandle | None:
        """Let SIGTERM come so long before the deadline, at half of a time that is short."""
        if deadline_monotonic_seconds is None or self._terminate_seconds <= 0:
            return None
        left_seconds = max(0.0, deadline_monotonic_seconds - self._clock.monotonic_seconds())
        lead_seconds = min(self._terminate_seconds, left_seconds / 2)
        return asyncio.get_running_loop().call_later(left_seconds - lead_seconds, process.terminate)

    async def _await_deadline(self, process: ProgramProcess, deadline_monotonic_seconds: float | None) -> None:
        """Let the deadline decide about a program that SIGTERM ended: then the verdict is that its time was over."""
        if deadline_monotonic_seconds is None or not process.was_terminated:
            return
        if process.exit_code in _TERMINATED_EXIT_CODES:
            left_seconds = deadline_monotonic_seconds - self._clock.monotonic_seconds()
            await self._clock.sleep(max(0.0, left_seconds) + self._terminate_seconds)


def operation_asked(op: Op, clock: Clock) -> dict[str, Any]:
    """Return what a question says of the operation that it belongs to; an attempt has the time until the deadline."""
    left_seconds = max(0.0, op.deadline_monotonic_seconds - clock.monotonic_seconds())
    return {"id": op.id, "attempt": op.attempt, "seconds_left": round(left_seconds, 3)}


def decoded(verb: str, output: bytes, kind: type[Any], *, secret: bytes = b"") -> Any:
    """Return an answer as a value of that type; no output is an empty object. Raises ProgramFailed."""
    try:
        return msgspec.json.decode(output.strip() or b"{}", type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        text = redacted(str(error).encode("utf-8", "replace"), secret)
        raise ProgramFailed(f"{verb} answered what is not understood: {text}") from error


def error_line(errors: bytes, secret: bytes) -> str:
    """Return the last line that is not blank: printable, without the secret, of bounded length."""
    lines = [line for line in errors.splitlines() if line.strip()]
    if not lines:
        return ""
    text = redacted(lines[-1].strip(), secret)
    return "".join(each if each.isprintable() else " " for each in text).strip()[:TEXT_CHARACTERS_MAX]


def _shown_bytes(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"
