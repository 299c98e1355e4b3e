"""Detects whether a process makes progress: it writes to its log, or it uses CPU time.

A process on a busy machine is slow and still makes progress; a process that hangs does neither. CPU time is read from
/proc; without /proc only the log counts. The process itself is not changed.
"""

import os
from pathlib import Path
from typing import Final

#: Computing time that counts as progress. A loop that only waits takes less in a minute.
CPU_SECONDS_MIN: Final = 0.2


class ProcessProgress:
    """What one process has done since it was looked at first."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._pid = 0
        self._log_bytes = -1
        self._cpu_seconds = 0.0

    def has_moved(self, pid: int) -> bool:
        """Return whether there was progress since this last returned True; another process is progress."""
        log_bytes, cpu_seconds = _size_bytes(self._log), _cpu_seconds(pid)
        is_same = pid == self._pid and log_bytes == self._log_bytes
        # Small amounts add up until they count.
        if is_same and cpu_seconds - self._cpu_seconds < CPU_SECONDS_MIN:
            return False
        self._pid, self._log_bytes, self._cpu_seconds = pid, log_bytes, cpu_seconds
        return True


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and its ended children; 0 without /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0.0
    # After the name, which may hold blanks and brackets: utime, stime, cutime and cstime are fields 14 to 17.
    fields = stat.rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
