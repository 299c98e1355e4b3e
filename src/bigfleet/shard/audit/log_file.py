"""Stores the audit log on disk: one file that grows and four older ones, synced to disk.

docs/spec/shard.md §13. A line is written at once and in one piece; the file is synced once a second, off the loop. If a
full disk takes only a part of a line, that part is removed. The file is locked for the life of the process. It is never
rewritten: only an unfinished last line, left by a crash, is cut off at the next start.
"""

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import structlog

from bigfleet.model.clock import Clock
from bigfleet.model.compute import Compute
from bigfleet.recording.growing_file import append_whole, begin_fresh, numbered, open_locked, without_links
from bigfleet.shard.audit.log import START, AuditHead, read_line

SYNC_INTERVAL_SECONDS = 1.0
#: A record is bounded by its texts; this is far above any.
LINE_BYTES_MAX = 1024 * 1024
#: What to do with a log that cannot be gone on with.
_REMEDY = "move the file away to continue in a new one; bigfleet audit verify lists what is wrong in it"
#: What every record begins with: nothing else is ever cut off.
_BEGINNING = b'{"time":"'

_log = structlog.get_logger("bigfleet.shard.audit.log_file")


class AuditFileFault(Exception):
    """The file cannot be used; the message names file, finding and remedy."""


class AuditFile:
    """The open audit log of one process.

    Invariants: `_file` is open until `close`; `_size_bytes` is its length, 0 for what is no regular file.
    """

    def __init__(self, path: Path, *, size_bytes_max: int) -> None:
        """Open the file for appending, and find the end of its chain. Raises AuditFileFault."""
        self._path = path
        self._size_bytes_max = size_bytes_max
        #: Replaced files that the disk has not been asked to keep yet.
        self._replaced: list[int] = []
        self._needs_sync = False
        try:
            self._file = open_locked(path, takes_devices=True)
            self._is_regular = stat.S_ISREG(os.fstat(self._file).st_mode)
        except OSError as error:
            raise AuditFileFault(f"{path}: {error.strerror}; choose a file that can be written") from error
        try:
            self.head = self._find_head()
            self._size_bytes = os.fstat(self._file).st_size if self._is_regular else 0
        except BaseException:
            os.close(self._file)
            raise

    @property
    def is_new_file(self) -> bool:
        """Return whether the next line will be the first of its file."""
        return not self._size_bytes

    def make_room(self, size_bytes: int) -> None:
        """Begin a new file when the line would make this one too large; when that fails, go on with this one."""
        if not self._is_regular or not self._size_bytes or self._size_bytes + size_bytes <= self._size_bytes_max:
            return
        try:
            self._replace(begin_fresh(self._path))
        except OSError as error:
            advice = "the log continues in the current file; check the disk and the directory's permissions"
            _log.error("audit.rotation_failed", file=str(self._path), error=error.strerror, advice=advice)
            # It is tried again when as much has been written once more, not at every record.
            self._size_bytes = 1

    def append(self, line: bytes) -> None:
        """Write the line as a whole. Raises OSError; then the file is as it was."""
        append_whole(self._file, line, end_bytes=os.fstat(self._file).st_size if self._is_regular else None)
        self._size_bytes += len(line) if self._is_regular else 1
        self._needs_sync = True

    def reopen(self) -> None:
        """Open the path again when somebody has moved the file away; when that fails, go on with the old one."""
        with suppress(OSError):
            if os.path.samestat(os.stat(self._path), os.fstat(self._file)):
                return
        try:
            opened = open_locked(self._path, takes_devices=True)
        except OSError as error:
            advice = "the log continues in the file that was moved; check the path and its permissions"
            _log.error("audit.reopen_failed", file=str(self._path), error=error.strerror, advice=advice)
            return
        self._replace(opened)
        _log.info("audit.file_reopened", file=str(self._path))

    async def keep_synced(self, clock: Clock, in_thread: Compute, on_failure: Callable[[], None]) -> None:
        """Ask the disk once a second to keep what was written, until cancelled; `on_failure` counts its refusals."""
        while True:
            await clock.sleep(SYNC_INTERVAL_SECONDS)
            if self._needs_sync or self._replaced:
                self._needs_sync = False
                replaced, self._replaced = self._replaced, []
                # A descriptor of its own: the file may be replaced and closed while the disk takes its time.
                files = [*replaced, os.dup(self._file)]
                await in_thread(partial(_sync_and_close, files, on_failure))

    def close(self) -> None:
        """Ask the disk to keep everything, and close the file."""
        _sync_and_close([*self._replaced, self._file], lambda: None)
        self._replaced = []

    # ---- files --------------------------------------------------------------------------------------------------

    def _replace(self, opened: int) -> None:
        self._replaced.append(self._file)
        self._file = opened
        status = os.fstat(opened)
        self._is_regular = stat.S_ISREG(status.st_mode)
        self._size_bytes = status.st_size if self._is_regular else 0

    def _find_head(self) -> AuditHead:
        if not self._is_regular:
            return START
        whole = _whole_lines(self._file, self._path)
        if whole:
            return _head_of(whole, self._path)
        # A process may have ended between beginning a new file and writing its first line.
        older = numbered(without_links(self._path), 1)
        try:
            with older.open("rb") as file:
                return _head_of(_tail(file.fileno()).removesuffix(b"\n"), older)
        except FileNotFoundError:
            return START
        except OSError as error:
            raise AuditFileFault(f"{older}: {error.strerror}; choose a file that can be written") from error


def _head_of(lines: bytes, path: Path) -> AuditHead:
    """Return the head of a log that ends with some lines. Raises AuditFileFault if the last one is not as written."""
    former, _, last = lines.rpartition(b"\n")
    before = former.rpartition(b"\n")[2]
    line, previous = read_line(last), read_line(before)
    if line is None or (before and previous is None):
        raise AuditFileFault(f"{path}: its last line is not a record of an audit log; {_REMEDY}")
    # The first line of a file says itself what it goes on from.
    chain = line.previous if previous is None else previous.chain
    if chain is not None and not line.follows(chain):
        raise AuditFileFault(f"{path}: damaged: record {line.sequence} does not match its chain; {_REMEDY}")
    return AuditHead(line.sequence, line.chain)


def _tail(opened: int) -> bytes:
    size_bytes = os.fstat(opened).st_size
    start = max(0, size_bytes - LINE_BYTES_MAX)
    return os.pread(opened, size_bytes - start, start)


def _whole_lines(opened: int, path: Path) -> bytes:
    """Return the last lines of the file, cutting off what a crash left of an unfinished one."""
    content = _tail(opened)
    whole, end, rest = content.rpartition(b"\n")
    if rest:
        size_bytes = os.fstat(opened).st_size
        is_ours = _BEGINNING.startswith(rest[: len(_BEGINNING)])
        if not is_ours or (not end and size_bytes > len(rest)):
            raise AuditFileFault(f"{path}: its last line is not a record of an audit log; {_REMEDY}")
        if read_line(rest[:-1]) is not None:
            # No crash leaves more than a record and less than its line feed.
            raise AuditFileFault(f"{path}: damaged: the end of its last line is another byte; {_REMEDY}")
        try:
            os.ftruncate(opened, size_bytes - len(rest))
        except OSError as error:
            raise AuditFileFault(f"{path}: {error.strerror}; choose a file that can be written") from error
        _log.warning(
            "audit.tail_truncated", file=str(path), bytes=len(rest), text=rest[:200].decode("utf-8", "replace")
        )
    return whole


def _sync_and_close(files: list[int], on_failure: Callable[[], None]) -> None:
    for opened in files:
        try:
            os.fsync(opened)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a device keeps nothing, and says so
                on_failure()
                advice = "the newest records may be lost if the host fails; check the disk"
                _log.error("audit.sync_failed", error=error.strerror, advice=advice)
        os.close(opened)
