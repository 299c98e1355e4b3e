"""Writes recordings to disk: one file that grows and four older ones, each readable on its own.

docs/adr/0134-a-recording-is-what-the-engine-saw.md. A frame is written in one piece; if a full disk takes only a part,
that part is removed. The file is locked for the life of the process. The next process continues behind the last
complete frame. It never writes into a file that is not a recording.
"""

import os
from pathlib import Path

import structlog

from bigfleet.recording.frames import MAGIC, Damage, FrameKind, Torn, WrongFile, frames
from bigfleet.recording.growing_file import append_whole, begin_fresh, open_locked
from bigfleet.recording.values import FORMAT, format_of_head

_log = structlog.get_logger("bigfleet.recording.file")


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
            self._file = open_locked(path)
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
        """Return whether the next frame belongs into a new file."""
        return self.size_bytes >= self._size_bytes_max

    def append(self, frame: bytes) -> None:
        """Write a frame as a whole. Raises OSError; then the file is as it was."""
        append_whole(self._file, frame, end_bytes=self.size_bytes)
        self.size_bytes += len(frame)

    def rotate(self) -> None:
        """Go on in a new file; the oldest of the old ones goes. Raises OSError; then it goes on with this one."""
        opened = begin_fresh(self._path, MAGIC)
        os.close(self._file)
        self._file, self.size_bytes = opened, len(MAGIC)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _find_end(self) -> int:
        """Return the length of the file once it ends with a whole frame.

        A file that is damaged, or that another version of bigfleet wrote, is put aside.
        """
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
                        _log.warning("recording.tail_truncated", file=str(self._path), bytes=found.size_bytes)
                        return found.start
                    written = format_of_head(found.content) if found.kind is FrameKind.HEAD else FORMAT
                    if written != FORMAT:
                        # Readers stop at records of another format, so ours would never be read behind them.
                        _log.warning(
                            "recording.file_put_aside", file=str(self._path), error=f"records of format {written}"
                        )
                        self.rotate()
                        return self.size_bytes
                    end = found.stop
        except WrongFile as fault:
            raise RecordingFault(f"{self._path}: {fault}; it is left alone, choose another file") from fault
        except Damage as damage:
            _log.warning("recording.file_put_aside", file=str(self._path), error=str(damage))
            self.rotate()
            return self.size_bytes
        return end
