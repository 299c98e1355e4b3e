"""Reads files that a command or a process is given, up to a size.

A device has no end, and a sparse file of a terabyte uses no disk space: either would take all memory. Pipes and
terminals are allowed, so that a command can be given `<(zcat file.gz)`.
"""

import errno
import os
import stat
from pathlib import Path
from typing import Final

#: Bytes of a file that a provider is configured with.
CONFIGURATION_BYTES_MAX: Final = 256 * 1024 * 1024
_PIECE_BYTES: Final = 64 * 1024


def read_bounded(path: Path, size_bytes_max: int) -> bytes:
    """Return the content of a file. Raises OSError, also for a device and for more than so many bytes."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if stat.S_ISCHR(status.st_mode) and not file.isatty():
            raise OSError(errno.EINVAL, "Is a device", str(path))
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


def _too_large(path: Path, size_bytes_max: int) -> OSError:
    return OSError(errno.EFBIG, f"Has more than {size_bytes_max:,} bytes", str(path))
