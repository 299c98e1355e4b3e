"""The recording on disk: one file that grows, four old ones beside it, each of which can be read by itself.

docs/adr/0134-a-recording-is-what-the-engine-saw.md. A frame is handed to the operating system as a whole; what a full
disk took of one is taken back. The file is locked for the life of the process. A next process goes on behind the last
whole frame. It must never write into a file that is no recording.
"""

import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog

from bigfleet.shard.recording_frames import MAGIC, Damage, Torn, WrongFile, frames

OLD_FILES_MAX: Final = 4
_MODE: Final = 0o640

_log = structlog.get_logger("bigfleet.shard.recording_file")


class RecordingFault(Exception):
    """The file cannot be used; the message names file, finding and remedy."""


class RecordingFile:
    """The open recording of one process.

    Invariants: the file ends with a whole frame or with its first line; `size_bytes` is its length; the first frame
    that is written begins a segment.
    """

    def __init__(self, path: Path, *, size_bytes_max: int) -> None:
        """Open the file for appending, behind what an earlier process wrote. Raises RecordingFault."""
        self._path = path
        self._size_bytes_max = size_bytes_max
        try:
            self._file = _open(path)
        except OSError as error:
            raise RecordingFault(f"{path}: {error.strerror}; choose a file that can be written") from error
        try:
            self.size_bytes = self._find_end()
        except OSError as error:
            os.close(self._file)
            raise RecordingFault(f"{path}: {error.strerror}; choose a file that can be written") from error
        except BaseException:
            os.close(self._file)
            raise

    @property
    def is_full(self) -> bool:
        """Say whether the next frame belongs into a new file."""
        return self.size_bytes >= self._size_bytes_max

    def append(self, frame: bytes) -> None:
        """Write a frame as a whole. Raises OSError; then the file is as it was."""
        try:
            rest = memoryview(frame)
            while rest:
                # A disk that takes a part of it says with the next part why.
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, self.size_bytes)
            raise
        self.size_bytes += len(frame)

    def rotate(self) -> None:
        """Go on in a new file; the oldest of the old ones goes. Raises OSError; then it goes on with this one."""
        fresh = self._path.with_name(f"{self._path.name}.new")
        # Made first: a directory without room must not cost an old file.
        fresh.unlink(missing_ok=True)
        opened = _open(fresh)
        try:
            os.write(opened, MAGIC)
            for number in range(OLD_FILES_MAX, 0, -1):
                younger = numbered(self._path, number - 1)
                if younger.exists():
                    younger.replace(numbered(self._path, number))
            fresh.replace(self._path)
        except OSError:
            os.close(opened)
            raise
        os.close(self._file)
        self._file, self.size_bytes = opened, len(MAGIC)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _find_end(self) -> int:
        """Return the length of the file once it ends with a whole frame; one that is damaged is put aside."""
        if not os.fstat(self._file).st_size:
            self.size_bytes = 0
            self.append(MAGIC)
            return self.size_bytes
        end = len(MAGIC)
        try:
            with self._path.open("rb") as file:
                for found in frames(file):
                    if isinstance(found, Torn):
                        os.ftruncate(self._file, found.start)
                        _log.warning("recording_tail_cut", file=str(self._path), bytes=found.size_bytes)
                        return found.start
                    end = found.stop
        except WrongFile as fault:
            raise RecordingFault(f"{self._path}: {fault}; it is left alone, choose another file") from fault
        except Damage as damage:
            _log.warning("recording_put_aside", file=str(self._path), fault=str(damage))
            self.rotate()
            return self.size_bytes
        return end


def numbered(path: Path, number: int) -> Path:
    """Return the file that was replaced so many times; the file itself for 0."""
    return path.with_name(f"{path.name}.{number}") if number else path


def _open(path: Path) -> int:
    # Without waiting: opening a pipe that nobody reads would never return.
    opened = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, _MODE)
    try:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise OSError(0, "is no file")
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(opened)
        raise OSError(error.errno, "another process writes it") from error
    except OSError:
        os.close(opened)
        raise
    return opened
