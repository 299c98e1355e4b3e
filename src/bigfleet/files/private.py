"""Creates state files and directories with private modes, and reports files that other users can access.

Files are made with mode 0600, directories with 0700. The mode of a file or directory that exists is never changed.
"""

import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import structlog

FILE_MODE: Final = 0o600
DIRECTORY_MODE: Final = 0o700
_OTHERS: Final = 0o077

_log = structlog.get_logger("bigfleet.files.private")


def make_directory(path: Path) -> None:
    """Make a directory with mode 0700 unless it exists; parents that are missing get the usual mode. Raises OSError."""
    path.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)


def make_file(path: Path) -> None:
    """Make an empty file with mode 0600 unless it exists; SQLite gives its log the same mode. Raises OSError."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, FILE_MODE))


def warn_of_loose_modes(paths: Iterable[Path]) -> None:
    """Log each file or directory that other users may read, write or search; absent ones are skipped."""
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            continue
        mode = stat.S_IMODE(status.st_mode)
        if mode & _OTHERS:
            wanted = DIRECTORY_MODE if stat.S_ISDIR(status.st_mode) else FILE_MODE
            _log.warning(
                "store.mode_loose",
                file=str(path),
                mode=f"{mode:04o}",
                advice=f"other users of this host can use it; run: chmod {wanted:04o} {path}",
            )
