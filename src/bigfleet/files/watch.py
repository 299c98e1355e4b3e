"""Detects that state files were deleted, replaced or truncated while a process uses them.

SQLite continues to write to a file that was unlinked, and all of it is lost with the process. Inode and size
are compared; content is not read.
"""

from pathlib import Path

_ADVICE = "this process still uses the former file, and what it writes is lost when it ends; restart it"


class FileWatch:
    """Compares the files at some paths with those that the process opened."""

    def __init__(self, database: Path, *companions: Path) -> None:
        """Remember the files that exist now; a file that appears later is remembered when it is first seen.

        The database never shrinks; the write-ahead log and the `companions` may.
        """
        self._database = database
        self._paths = (database, database.with_name(f"{database.name}-wal"), *companions)
        self._files: dict[Path, tuple[int, int]] = {}
        self._size_bytes = 0
        self.fault()

    def fault(self) -> str:
        """Return the fault of the first changed file, "" if all are unchanged."""
        for path in self._paths:
            fault = self._fault_of(path)
            if fault:
                return fault
        return ""

    def _fault_of(self, path: Path) -> str:
        known = self._files.get(path)
        try:
            status = path.stat()
        except FileNotFoundError:
            return "" if known is None else f"{path} was deleted; {_ADVICE}"
        except OSError as error:
            return f"{path}: {error.strerror}; check its disk and its directory"
        found = (status.st_dev, status.st_ino)
        if known is not None and known != found:
            return f"{path} was replaced; {_ADVICE}"
        self._files[path] = found
        if path == self._database:
            if status.st_size < self._size_bytes:
                return f"{path} was truncated; restore it from a backup"
            self._size_bytes = status.st_size
        return ""
