"""Kills process groups when the process that named them has died.

Run as a program of its own, without any package: docs/spec/exec-provider.md §6. Standard input has a line `+GROUP` for
each group that began and `-GROUP` for each that ended. When it closes, the groups that are left get SIGTERM, and
SIGKILL after a time.
"""

import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from time import monotonic, sleep  # noqa: TID251 - a program without packages has no Clock

_POLL_SECONDS = 0.05


def main() -> None:
    """Read groups until standard input closes, then end those that are left."""
    terminate_seconds, wait_seconds_max = float(sys.argv[1]), float(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A service manager sends them to each process of the service: the end of the provider is the only sign.
        signal.signal(number, signal.SIG_IGN)
    groups = _groups_left()
    if terminate_seconds > 0:
        _signal_all(groups, signal.SIGTERM)
        groups = _left_after(groups, terminate_seconds)
    _signal_all(groups, signal.SIGKILL)
    _left_after(groups, wait_seconds_max)


def _groups_left() -> set[int]:
    groups: set[int] = set()
    for line in sys.stdin.buffer:
        if line.startswith(b"+"):
            groups.add(int(line[1:]))
        else:
            groups.discard(int(line[1:]))
    return groups


def _signal_all(groups: Iterable[int], number: signal.Signals) -> None:
    for group in groups:
        _signal(group, number)


def _left_after(groups: set[int], seconds_max: float) -> set[int]:
    """Wait until the groups have ended; return those that have not in that time."""
    deadline_seconds = monotonic() + seconds_max
    while (groups := _running(groups)) and monotonic() < deadline_seconds:
        sleep(_POLL_SECONDS)
    return groups


def _running(groups: set[int]) -> set[int]:
    """Return the groups with a process that has not ended."""
    there = {group for group in groups if _signal(group, 0)}
    states = list(Path("/proc").glob("[0-9]*/stat")) if there else []
    if not states:
        return there
    # A process that has ended may wait for seconds until it is reaped.
    return there & {_group_of(path) for path in states}


def _group_of(stat_path: Path) -> int | None:
    """Return the group of a process, None for one that has ended."""
    try:
        _name, _bracket, fields = stat_path.read_text(errors="replace").rpartition(")")
    except OSError:
        return None
    state, _parent, group = fields.split()[:3]
    return None if state in "ZX" else int(group)


def _signal(group: int, number: int) -> bool:
    """Send a signal and return whether the group is there."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


if __name__ == "__main__":
    main()
