"""Creates state files and directories with private modes, and reports files that other users can access.

Files are made with mode 0600, directories with 0700. The mode of a file or directory that exists is never changed.
"""

import errno
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


def open_file(path: Path, flags: int = 0) -> int:
    """Open a file for reading and writing, made with mode 0600 when new. Raises OSError, also for a symbolic link.

    Who may write in the directory could otherwise have another file of this user created, truncated or locked.
    """
    wanted = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW | flags
    try:
        return os.open(path, wanted, FILE_MODE)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, f"{path.name} is a symbolic link, name the file itself") from error
        raise


def make_file(path: Path) -> None:
    """Make an empty file with mode 0600 unless it exists; SQLite gives its log the same mode. Raises OSError."""
    os.close(open_file(path))


def write_file(path: Path, text: str) -> None:
    """Replace the content of a file, made with mode 0600 when it is new. Raises OSError."""
    with os.fdopen(open_file(path, os.O_TRUNC), "w", encoding="utf-8") as file:
        file.write(text)


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
