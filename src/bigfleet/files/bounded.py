"""Reads files that a command or a process is given, up to a size.

A device has no end, and a sparse file of a terabyte uses no disk space: either would take all memory. Pipes and
terminals are allowed, so that a command can be given `<(zcat file.gz)`.
"""

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

#: Bytes of a file that a provider is configured with.
CONFIGURATION_BYTES_MAX: Final = 256 * 1024 * 1024
_PIECE_BYTES: Final = 64 * 1024


def read_bounded(path: Path, size_bytes_max: int) -> bytes:
    """Return the content of a file. Raises OSError, also for a device and for more than so many bytes."""
    with path.open("rb") as file:
        status = _checked(file, path)
        if status.st_size > size_bytes_max:
            raise _too_large(path, size_bytes_max)
        content = bytearray()
        # A read makes room for all that it asks for.
        wanted = status.st_size + 1
        while len(content) <= size_bytes_max and (piece := file.read(wanted)):
            content += piece
            wanted = _PIECE_BYTES
    if len(content) > size_bytes_max:
        raise _too_large(path, size_bytes_max)
    return bytes(content)


def bounded_lines(path: Path, line_bytes_max: int) -> Iterator[bytes]:
    """Yield the lines of a file of any size, each with its end. Raises OSError, also for a device and a longer line."""
    with path.open("rb") as file:
        _checked(file, path)
        while line := file.readline(line_bytes_max + 1):
            if len(line) > line_bytes_max:
                raise OSError(errno.EFBIG, f"Has a line of more than {line_bytes_max:,} bytes", str(path))
            yield line


def _checked(file: IO[bytes], path: Path) -> os.stat_result:
    """Return the status of an open file. Raises OSError for a device."""
    status = os.fstat(file.fileno())
    if stat.S_ISCHR(status.st_mode) and not file.isatty():
        raise OSError(errno.EINVAL, "Is a device", str(path))
    return status


def _too_large(path: Path, size_bytes_max: int) -> OSError:
    return OSError(errno.EFBIG, f"Has more than {size_bytes_max:,} bytes", str(path))
