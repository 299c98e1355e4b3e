"""Records the input and the decision of each cycle of a shard, off its loop (docs/adr/0134).

`Recorder.take` passes references to immutable values to a task, which writes them in a thread. If cycles come faster
than they can be written, some are left out and the next one has their number. If a write fails, the recording pauses
and resumes by itself in a new file, whose first record has the number of missing cycles. A defect of the recorder ends
the recording. This module must not delay a cycle, change its decision, or see what a provider or an operator is sent.
"""

import asyncio
from collections import deque
from typing import Final

import msgspec
import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge

from bigfleet.engine.decision import Decision
from bigfleet.model.clock import NANOS_PER_SECOND
from bigfleet.model.compute import Compute
from bigfleet.recording.digest import Digester
from bigfleet.recording.file import RecordingFile
from bigfleet.recording.frames import FramePacker
from bigfleet.recording.hook import CycleInput
from bigfleet.recording.tracker import Tracker
from bigfleet.recording.values import CycleRecord, RecordingHead

#: Cycles that wait to be written; another one is left out.
WAITING_MAX: Final = 8
#: A paused recording is tried again so long after the last failure.
RETRY_NANOS: Final = 10 * NANOS_PER_SECOND
#: A file is given up for a new one only when what differs takes as many times what a fresh record took.
_WORTH_OF_FRESH: Final = 2

_log = structlog.get_logger("bigfleet.recording.recorder")


class Recorder:
    """Writes the cycles of one process.

    Invariants: the tracker knows what the file's last record says; one call of `write_waiting` runs at a time.
    """

    def __init__(
        self, file: RecordingFile, *, head: RecordingHead, registry: CollectorRegistry, compute: Compute
    ) -> None:
        self._file = file
        self._head = head
        self._compute = compute
        self._cycles = Counter("bigfleet_shard_recorded_cycles", "Cycles recorded.", registry=registry)
        self._left_out = Counter(
            "bigfleet_shard_recording_missed_cycles",
            "Cycles left out: the recorder was behind, or could not write.",
            registry=registry,
        )
        self._bytes = Counter("bigfleet_shard_recording_bytes", "Bytes of recording written.", registry=registry)
        self._is_on = Gauge("bigfleet_shard_recording_on", "1 while cycles are recorded.", registry=registry)
        self._is_on.set(1)
        #: Filled by the loop, emptied by the writer.
        self._waiting: deque[tuple[CycleInput, Decision | None, int]] = deque()
        self._arrived = asyncio.Event()
        #: Cycles that were left out since the last one that was taken.
        self._missed = 0
        self._tracker = Tracker()
        self._digester = Digester()
        self._packer = FramePacker()
        self._encoder = msgspec.msgpack.Encoder()
        self._fresh_bytes = self._since_fresh_bytes = 0
        self._has_ended = False
        #: When the last write failed, None while cycles are recorded; of the writer.
        self._paused_unix_nanos: int | None = None
        #: Cycles that the pause has cost, and whether a new file was begun for what comes after it.
        self._gap = 0
        self._has_new_file = False

    def take(self, asked: CycleInput, decision: Decision | None) -> None:
        """Have a cycle written some time, or leave it out; on the loop, some microseconds."""
        if self._has_ended:
            return
        if len(self._waiting) >= WAITING_MAX:
            self._missed += 1
            self._left_out.inc()
            return
        self._waiting.append((asked, decision, self._missed))
        self._missed = 0
        self._arrived.set()

    async def run(self) -> None:
        """Have what is taken written, off the loop, until cancelled; what is being written then is still written."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            writing = asyncio.ensure_future(self._compute(self.write_waiting))
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                await writing
                raise

    def write_waiting(self) -> None:
        """Write what waits, in the calling thread; no other call may run at the same time."""
        while self._waiting and not self._has_ended:
            asked, decision, missed = self._waiting.popleft()
            if self._is_too_early(asked.at_unix_nanos):
                self._lose(missed)
                continue
            try:
                self._resume()
                self._write(asked, decision, missed + self._gap)
            except OSError as error:
                self._pause(asked.at_unix_nanos, error.strerror or str(error))
                self._lose(missed)
            except Exception:
                # Nothing of the recorder may cost a shard anything, whatever is wrong with it.
                _log.exception("recording.failed", cycle=asked.cycle)
                self._end("internal error of the recorder", "the shard is not affected; report the previous line")
            else:
                self._has_resumed()

    def close(self) -> None:
        """Write what waits and close the file; `run` must have ended."""
        self.write_waiting()
        self._has_ended = True
        self._file.close()

    # ---- a disk that refuses -------------------------------------------------------------------------------------

    def _is_too_early(self, now_unix_nanos: int) -> bool:
        paused = self._paused_unix_nanos
        # A wall clock that was set back must not make the pause longer.
        return paused is not None and paused <= now_unix_nanos < paused + RETRY_NANOS

    def _pause(self, now_unix_nanos: int, error: str) -> None:
        if self._paused_unix_nanos is None:
            self._is_on.set(0)
            advice = "make room; the recording resumes by itself in a new file, and says how many cycles are missing"
            _log.error("recording.paused", error=error, advice=advice)
        self._paused_unix_nanos = now_unix_nanos

    def _lose(self, missed: int) -> None:
        """Count a cycle that is not written, and those that were left out before it."""
        self._gap += missed + 1
        self._left_out.inc()

    def _resume(self) -> None:
        """Begin a new file once for each pause, and a segment that needs nothing of before. Raises OSError."""
        if self._paused_unix_nanos is None:
            return
        if not self._has_new_file:
            self._file.rotate()
            self._has_new_file = True
        self._tracker.restart()

    def _has_resumed(self) -> None:
        if self._paused_unix_nanos is None:
            return
        _log.info("recording.resumed", missed=self._gap)
        self._paused_unix_nanos, self._gap, self._has_new_file = None, 0, False
        self._is_on.set(1)

    def _end(self, error: str, advice: str) -> None:
        self._has_ended = True
        self._is_on.set(0)
        self._waiting.clear()
        _log.error("recording.ended", error=error, advice=advice)

    def _write(self, asked: CycleInput, decision: Decision | None, missed: int) -> None:
        is_grown = self._since_fresh_bytes >= _WORTH_OF_FRESH * self._fresh_bytes
        if self._file.is_full and (self._tracker.is_fresh or is_grown):
            self._file.rotate()
            self._tracker.restart()
        if not self._tracker.knows(asked.snapshot):
            self._tracker.restart()
        is_fresh = self._tracker.is_fresh
        if is_fresh:
            self._packer = FramePacker()
            self._append(self._packer.head(self._encoder.encode(self._head)))
        demand, view = asked.demand, asked.snapshot
        record = CycleRecord(
            cycle=asked.cycle,
            at_unix_nanos=asked.at_unix_nanos,
            is_timer=asked.is_timer,
            is_fresh=is_fresh,
            missed=missed,
            machines=self._tracker.machines(view),
            demand=self._tracker.demand(demand),
            options=self._tracker.options(asked.options),
            outcome=None if decision is None else self._digester.outcome(decision, view, demand),
        )
        size_bytes = self._append(self._packer.cycle(self._encoder.encode(record)))
        if is_fresh:
            self._fresh_bytes, self._since_fresh_bytes = size_bytes, 0
        else:
            self._since_fresh_bytes += size_bytes
        self._cycles.inc()

    def _append(self, frame: bytes) -> int:
        self._file.append(frame)
        self._bytes.inc(len(frame))
        return len(frame)
