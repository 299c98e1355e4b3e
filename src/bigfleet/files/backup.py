"""Copies a SQLite state file while its process runs, with SQLite's online backup.

A backup is one file with mode 0600 that has everything committed before it began. It is checked before it gets its
name, and it never overwrites a file.
"""

import os
import sqlite3
import stat
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from bigfleet.files.checked_database import SUFFIX, CommitCounter, rescue_of
from bigfleet.files.checksums import (
    RefusedContent,
    check_content,
    check_structure,
    has_checksums,
    keep_checksums,
    mark_backup,
)
from bigfleet.files.private import FILE_MODE
from bigfleet.files.sync import sync_path

#: Checks the copy, and may write to it; raises BackupFault.
Finish = Callable[[sqlite3.Connection], None]


class BackupFault(Exception):
    """There is no backup; the message names file, finding and remedy."""


def check_source(source: Path, advice: str) -> None:
    """Raise BackupFault unless there is such a file, with the advice if there is none."""
    try:
        mode = source.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        rescued = rescue_of(source)
        if rescued.exists():
            advice = f"{rescued} is the backup that its process made when the file was lost"
        raise BackupFault(f"{source}: does not exist; {advice}") from error
    except OSError as error:
        raise BackupFault(f"{source}: {error.strerror}; run this as a user who may read it") from error
    if not stat.S_ISREG(mode):
        raise BackupFault(f"{source}: is not a file; {advice}")


def back_up(source: Path, target: Path, finish: Finish) -> int:
    """Copy a database to a new file and return its size in bytes. Raises BackupFault; then there is no file."""
    check_source(source, "name a state file")
    try:
        # Before the copy: the counter is never ahead of the file.
        counted = CommitCounter(source).read()
    except OSError as error:
        raise BackupFault(f"{source}{SUFFIX}: {error.strerror}; no backup was made") from error
    # Not read-only: a log without its index could not be read. Not made: a wrong name must stay an error.
    uri = f"{source.absolute().as_uri()}?mode=rw"
    try:
        with closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as reading:
            return back_up_open(reading, source, target, finish, commits_min=counted or 0)
    except sqlite3.Error as error:
        raise BackupFault(f"{source}: {error}; no backup was made") from error


def back_up_open(
    reading: sqlite3.Connection, source: Path, target: Path, finish: Finish, *, commits_min: int = 0
) -> int:
    """Copy an open database, whose file may be deleted, to a new file and return its size in bytes.

    Raises BackupFault, also for a copy with fewer than `commits_min` commits; then there is no file.
    """
    if os.path.lexists(target):
        raise BackupFault(f"{target}: exists; name a new file")
    part = target.with_name(f".{target.name}.part")
    try:
        part.unlink(missing_ok=True)
        os.close(os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE))
    except OSError as error:
        raise BackupFault(f"{target}: {error.strerror}; choose a directory that can be written") from error
    try:
        _copy(reading, source, part, commits_min, finish)
        size_bytes = part.stat().st_size
        sync_path(part)
        part.rename(target)
        sync_path(target.parent)
    except (sqlite3.Error, RefusedContent, UnicodeDecodeError) as error:
        raise BackupFault(f"{source}: {error}; no backup was made") from error
    except OSError as error:
        raise BackupFault(f"{target}: {error.strerror}; no backup was made") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
    return size_bytes


def _copy(reading: sqlite3.Connection, source: Path, part: Path, commits_min: int, finish: Finish) -> None:
    with closing(sqlite3.connect(part, isolation_level=None)) as writing:
        reading.backup(writing)
        # One file: without a log there is none to forget.
        writing.execute("PRAGMA journal_mode=DELETE")
        if has_checksums(writing):
            commits = check_content(writing).commits
            if commits < commits_min:
                raise RefusedContent(f"has {commits} commits, and {source.name}{SUFFIX} shows {commits_min}")
            mark_backup(writing, is_backup=True)
            keep_checksums(writing)
        else:
            check_structure(writing)
        finish(writing)
