"""Writes a locked file that grows by complete writes and keeps four older ones.

It is shared by the audit log (`bigfleet.shard.audit.log_file`) and the recording (`bigfleet.recording.file`). It does
not know the content, and removes nothing except the part of a write that a full disk cut off.
"""

import errno
import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

OLD_FILES_MAX: Final = 4
_MODE: Final = 0o640
#: Symbolic links in a row that are followed; as many as Linux follows.
_LINKS_MAX: Final = 40


def without_links(path: Path) -> Path:
    """Return the file that a path leads to, so that old files lie where the current one is.

    Raises OSError for a symbolic link of another user, who could have any file of this user appended to; the links of
    this user and of root are followed.
    """
    for _link in range(_LINKS_MAX):
        try:
            status = path.lstat()
        except FileNotFoundError:
            return path
        if not stat.S_ISLNK(status.st_mode):
            return path
        if status.st_uid not in (0, os.geteuid()):
            raise OSError(errno.ELOOP, f"{path.name} is a symbolic link of another user, name the file itself")
        path = path.parent / path.readlink()
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def open_locked(path: Path, *, takes_devices: bool = False) -> int:
    """Open a file for appending, made when it is new, that no other process writes. Raises OSError saying why not.

    A device, where one is taken, is not locked. Symbolic links are followed as `without_links` does.
    """
    # Without waiting: opening a pipe without a reader would never return.
    wanted = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    opened = os.open(without_links(path), wanted, _MODE)
    try:
        mode = os.fstat(opened).st_mode
        if stat.S_ISREG(mode):
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        elif not (takes_devices and stat.S_ISCHR(mode)):
            raise OSError(0, "is neither a file nor a device" if takes_devices else "is not a file")
    except BlockingIOError as error:
        os.close(opened)
        raise OSError(error.errno, "another process writes it") from error
    except OSError:
        os.close(opened)
        raise
    return opened


def append_whole(opened: int, content: bytes, *, end_bytes: int | None) -> None:
    """Write behind the end of a file, which is at `end_bytes`; None for a device. Raises OSError: nothing is added."""
    try:
        rest = memoryview(content)
        while rest:
            # A disk that takes a part of it says with the next part why.
            rest = rest[os.write(opened, rest) :]
    except OSError:
        if end_bytes is not None:
            with suppress(OSError):
                os.ftruncate(opened, end_bytes)
        raise


def begin_fresh(path: Path, beginning: bytes = b"") -> int:
    """Put a new file in the place of `path`, and that among the old ones, the oldest of which goes; return it, open.

    The caller still has the former one open. Raises OSError; then that one is to be gone on with.
    """
    path = without_links(path)
    fresh = path.with_name(f"{path.name}.new")
    # Made first: a directory without room must not cost an old file.
    fresh.unlink(missing_ok=True)
    opened = open_locked(fresh)
    try:
        append_whole(opened, beginning, end_bytes=0)
        for number in range(OLD_FILES_MAX, 0, -1):
            younger = numbered(path, number - 1)
            if younger.exists():
                younger.replace(numbered(path, number))
        fresh.replace(path)
    except OSError:
        os.close(opened)
        raise
    return opened


def numbered(path: Path, number: int) -> Path:
    """Return the file that was replaced so many times; the file itself for 0."""
    return path.with_name(f"{path.name}.{number}") if number else path
