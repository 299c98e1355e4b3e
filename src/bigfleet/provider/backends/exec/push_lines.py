"""Runs the program's `feed` for as long as the provider serves and pushes each of its lines.

docs/spec/exec-provider.md §5. A line that cannot be parsed is logged and skipped. If the program ends, it is started
again with a growing delay. While 1,000 lines wait for their commit, the program's output is not read.
"""

import asyncio
import datetime
from typing import Annotated, Final

import msgspec
import structlog

from bigfleet.model.clock import NANOS_PER_SECOND, Clock
from bigfleet.provider.backend import Feed
from bigfleet.provider.programs.process import ProgramProcess
from bigfleet.provider.programs.runner import PIPES_SECONDS_MAX, TERMINATE_SECONDS, ProgramRunner, error_line

_log = structlog.get_logger("bigfleet.provider.backends.exec.push_lines")

FEED: Final = "feed"
RESTART_SECONDS_MIN: Final = 1.0
RESTART_SECONDS_MAX: Final = 60.0
LINE_BYTES_MAX: Final = 64 << 10
#: Lines that wait for their commit; from then on the program is read no further.
_WAITING_LINES_MAX: Final = 1000
#: Once a line is refused so often, the program is no feed.
_REFUSED_LOGGED_MAX: Final = 10


class _Price(msgspec.Struct, forbid_unknown_fields=True):
    ids: list[str]
    usd: float


class _Interruption(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    probability: float
    #: With its offset from UTC, as in 2026-01-31T12:00:00Z.
    reclaim_at: Annotated[datetime.datetime, msgspec.Meta(tz=True)] | None = None


class _Lost(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    reason: str


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    price: _Price | None = None
    interruption: _Interruption | None = None
    lost: _Lost | None = None


class _LineQueue:
    """Splits what comes into lines; the program is held up while many of them wait."""

    def __init__(self) -> None:
        self._rest = b""
        self._is_skipping = False
        self._lines: asyncio.Queue[bytes | None] = asyncio.Queue()

    def take(self, data: bytes) -> bool:
        """Take the next bytes and return whether to read no further; a line that is too long is passed over."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not self._is_skipping and line.strip():
                self._lines.put_nowait(line)
            self._is_skipping = False
        if len(self._rest) > LINE_BYTES_MAX:
            self._rest, self._is_skipping = b"", True
        return self._lines.qsize() > _WAITING_LINES_MAX

    def end(self) -> None:
        """Say that nothing more comes."""
        self._lines.put_nowait(None)

    async def next(self) -> bytes | None:
        """Return the next line, None behind the last."""
        return await self._lines.get()

    @property
    def is_half_empty(self) -> bool:
        """Whether so many lines have been taken that the program may be read on."""
        return self._lines.qsize() == _WAITING_LINES_MAX // 2


async def run_feed(runner: ProgramRunner, feed: Feed, clock: Clock) -> None:
    """Run the program until cancelled; then close its standard input and end it."""
    wait_seconds = RESTART_SECONDS_MIN
    while True:
        began_seconds = clock.monotonic_seconds()
        try:
            text = await _run_once(runner, feed)
        except Exception as error:  # it cannot be started now
            text = str(error)
        if clock.monotonic_seconds() - began_seconds >= RESTART_SECONDS_MAX:
            wait_seconds = RESTART_SECONDS_MIN
        _log.error("backend.push_program_ended", error=text, restart_in_seconds=wait_seconds)
        await clock.sleep(wait_seconds)
        wait_seconds = min(2 * wait_seconds, RESTART_SECONDS_MAX)


async def _run_once(runner: ProgramRunner, feed: Feed) -> str:
    """Push the lines of one run and return why it ended."""
    lines = _LineQueue()
    process = await runner.start(FEED, lines.take)
    pushing = asyncio.create_task(_push_all(lines, process, feed))
    try:
        await process.ended.wait()
        await process.drained(PIPES_SECONDS_MAX)
        lines.end()
        await pushing
        return error_line(process.errors, b"") or f"exit code {process.exit_code}"
    finally:
        await _end(process, pushing)


async def _end(process: ProgramProcess, pushing: "asyncio.Task[None]") -> None:
    """Let the program end by itself once its standard input is closed, and end it otherwise."""
    try:
        pushing.cancel()
        process.close_input()
        if not await process.ended_within(TERMINATE_SECONDS):
            await process.stop(terminate_seconds=TERMINATE_SECONDS, wait_seconds_max=PIPES_SECONDS_MAX)
    finally:
        process.close()


async def _push_all(lines: _LineQueue, process: ProgramProcess, feed: Feed) -> None:
    refused = 0
    while (content := await lines.next()) is not None:
        if lines.is_half_empty:
            process.hold_output(is_held=False)
        try:
            await _push(msgspec.json.decode(content, type=_Line), feed)
        except Exception as error:  # a line of a program, and the next one may be right
            refused += 1
            if refused <= _REFUSED_LOGGED_MAX:
                _log.error("backend.push_line_refused", error=str(error), refused=refused)


async def _push(line: _Line, feed: Feed) -> None:
    if (line.price is not None) + (line.interruption is not None) + (line.lost is not None) != 1:
        raise ValueError("a line must have one of price, interruption and lost")
    if line.price is not None:
        await feed.report_price(line.price.ids, line.price.usd)
    elif line.lost is not None:
        await feed.report_lost(line.lost.id, line.lost.reason)
    elif line.interruption is not None:
        reclaim_at = line.interruption.reclaim_at
        nanos = None if reclaim_at is None else round(reclaim_at.timestamp() * NANOS_PER_SECOND)
        await feed.report_interruption(line.interruption.id, line.interruption.probability, nanos)
