"""Detects that state files were deleted, replaced or truncated while a process uses them, and has them rescued.

SQLite continues to read and write a file that was unlinked, and all of it is lost with the process. So its content is
copied to `FILE.rescue` as soon as the loss is noticed. Inode and size are compared; content is not read.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from bigfleet.files.backup import BackupFault
from bigfleet.files.checked_database import rescue_of
from bigfleet.files.private import make_directory


class FileWatch:
    """Compares the files at some paths with those that the process opened. Any thread may ask."""

    def __init__(self, database: Path, *companions: Path, remedy: str = "") -> None:
        """Remember the files that exist now; a file that appears later is remembered when it is first seen.

        The database never shrinks; the write-ahead log and the `companions` may. `remedy` is what to do about a lost
        file that is not rescued; without it the owner calls `rescue`.
        """
        self._database = database
        self._content = (database, database.with_name(f"{database.name}-wal"))
        self._paths = (*self._content, *companions)
        self._remedy = remedy
        self._files: dict[Path, tuple[int, int]] = {}
        self._size_bytes = 0
        self._is_rescued = False
        self._rescue_fault = ""
        self.fault()

    def fault(self) -> str:
        """Return the fault of the first changed file with the remedy, "" if all are unchanged."""
        for path in self._paths:
            fault = self._fault_of(path)
            if fault:
                return fault
        # A file that was put back is written to again: a later loss needs another copy.
        self._is_rescued, self._rescue_fault = False, ""
        return ""

    def rescue(self, copy: Callable[[Path], object]) -> bool:
        """Have `copy` make `FILE.rescue` from the open database if its file is lost; return False if that failed.

        `copy` is given the path of a new file, and raises BackupFault. It is called once for each loss that succeeds.
        An earlier rescue becomes `FILE.rescue.old`.
        """
        if self._is_rescued or not any(self._is_lost(path) for path in self._content):
            return True
        target = rescue_of(self._database)
        new = target.with_name(f"{target.name}.new")
        try:
            make_directory(target.parent)
            new.unlink(missing_ok=True)
            copy(new)
            with suppress(FileNotFoundError):
                target.replace(target.with_name(f"{target.name}.old"))
            new.rename(target)
        except BackupFault as fault:
            self._rescue_fault = str(fault)
        except OSError as error:
            self._rescue_fault = f"{target}: {error.strerror}"
        else:
            self._is_rescued = True
        return self._is_rescued

    def _fault_of(self, path: Path) -> str:
        known = self._files.get(path)
        try:
            status = path.stat()
        except FileNotFoundError:
            return "" if known is None else f"{path} was deleted; {self._advice(path)}"
        except OSError as error:
            return f"{path}: {error.strerror}; check its disk and its directory"
        found = (status.st_dev, status.st_ino)
        if known is not None and known != found:
            return f"{path} was replaced; {self._advice(path)}"
        self._files[path] = found
        if path == self._database:
            if status.st_size < self._size_bytes:
                return f"{path} was truncated; restore it from a backup"
            self._size_bytes = status.st_size
        return ""

    def _is_lost(self, path: Path) -> bool:
        known = self._files.get(path)
        try:
            status = path.stat()
        except OSError as error:
            return known is not None and isinstance(error, FileNotFoundError)
        return known is not None and known != (status.st_dev, status.st_ino)

    def _advice(self, lost: Path) -> str:
        if self._remedy:
            return self._remedy
        name, rescued = self._database.name, rescue_of(self._database)
        if lost not in self._content:
            return f"{name} is there: restart this process"
        if self._is_rescued:
            return (
                f"what this process has is in {rescued}: put the lost file back if you have it; otherwise stop this "
                f"process, move {name} and {name}-wal away if they exist, rename {rescued.name} to {name}, start again"
            )
        if self._rescue_fault:
            return (
                f"only this process has its content, and could not write it to {rescued} ({self._rescue_fault}): do "
                "not stop this process, and put the file back or mend the directory; it is tried again every minute"
            )
        return f"only this process has its content, and writes it to {rescued}: do not stop this process before"
