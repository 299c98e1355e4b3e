"""Records which requests each roll-up was the first to contain, until the shard acknowledges it.

docs/spec/operator.md §5. A request counts as acknowledged when the shard's ack arrives, not when the roll-up is sent. A
generation must never count as acknowledged before a roll-up with it is in force.
"""

from collections import deque
from collections.abc import Callable, Iterator

from bigfleet.operator.demand.entries import RequestEntry


class FirstReports:
    """Entries by the roll-up that first contained them, oldest first; taken once, up to a timestamp."""

    def __init__(self) -> None:
        self._reports: deque[tuple[int, list[RequestEntry]]] = deque()
        self._size = 0

    def __len__(self) -> int:
        """Return how many entries have not been taken; entries that are gone since are among them."""
        return self._size

    def add(self, stamp_nanos: int, entries: list[RequestEntry]) -> None:
        """Remember a roll-up; timestamps rise."""
        if entries:
            self._reports.append((stamp_nanos, entries))
            self._size += len(entries)

    def take(self, stamp_nanos: int) -> Iterator[RequestEntry]:
        """Yield the entries that were first contained at or before a timestamp, and forget them."""
        while self._reports and self._reports[0][0] <= stamp_nanos:
            entries = self._reports.popleft()[1]
            self._size -= len(entries)
            yield from entries

    def retain(self, is_alive: Callable[[RequestEntry], bool]) -> None:
        """Forget the entries of which `is_alive` is false."""
        alive = [(stamp, [entry for entry in entries if is_alive(entry)]) for stamp, entries in self._reports]
        self._reports = deque(report for report in alive if report[1])
        self._size = sum(len(entries) for _stamp, entries in self._reports)

    def __iter__(self) -> Iterator[RequestEntry]:
        """Iterate over what has not been taken."""
        for _stamp, entries in self._reports:
            yield from entries


class SentRollUps:
    """The timestamps of a session's roll-ups that are not acknowledged yet."""

    def __init__(self) -> None:
        self._stamps: deque[int] = deque()

    def session_opened(self) -> None:
        """Forget the roll-ups of former sessions: they are never acknowledged in this one."""
        self._stamps.clear()

    def add(self, stamp_nanos: int) -> None:
        """Remember a roll-up; timestamps rise."""
        self._stamps.append(stamp_nanos)

    def acknowledged(self, stamp_nanos: int) -> int:
        """Return up to which timestamp an ack counts. One without a timestamp counts for the oldest roll-up."""
        if not stamp_nanos:
            return self._stamps.popleft() if self._stamps else 0
        while self._stamps and self._stamps[0] <= stamp_nanos:
            self._stamps.popleft()
        return stamp_nanos
