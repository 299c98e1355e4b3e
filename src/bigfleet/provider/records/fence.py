"""Fences calls: decides which tokens pass, and keeps the marks of the newest (docs/spec/provider.md §4, ADR-0058).

One mark per (machine, shard). Marks of machines in the inventory stay for good, up to a number of shards for each
machine; the others are bounded in number and age. A mark must never move back. Marks stop late
calls of one shard; which shard owns a machine is bigfleet/model/ownership.py.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple

from bigfleet.model.clock import NANOS_PER_SECOND

UNKNOWN_MARKS_MAX = 100_000
UNKNOWN_MARK_SECONDS_MAX = 7 * 24 * 3600
#: Shards that have called for one machine of the inventory. At this number another one takes the place of the mark that
#: was used least recently, if that is older than `UNKNOWN_MARK_SECONDS_MAX`; else its calls are refused.
SHARDS_PER_MACHINE_MAX = 256


class Token(NamedTuple):
    """Who calls, and how new the call is."""

    shard_id: str = ""
    epoch: int = 0
    sequence: int = 0

    @property
    def is_absent(self) -> bool:
        """Return whether the caller sent no token at all; such a call is not fenced and leaves no mark."""
        return not self.shard_id

    @property
    def order(self) -> tuple[int, int]:
        """What tokens of one shard are compared by: signed, epoch first."""
        return (self.epoch, self.sequence)


NO_TOKEN = Token()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The newest token that passed for one machine and shard."""

    machine_id: str
    shard_id: str
    epoch: int
    sequence: int
    used_unix_nanos: int


class Fence:
    """Every mark. Owned by the ledger, which changes it after the commit."""

    def __init__(self) -> None:
        #: Machine to shard to mark; machines in the inventory only.
        self._known: dict[str, dict[str, Mark]] = {}
        #: Least recently used first; machines outside the inventory only.
        self._unknown: dict[tuple[str, str], Mark] = {}
        #: Marks of machines in the inventory.
        self.known_count = 0
        #: The shards of each id in `_unknown`.
        self._unknown_shards: dict[str, set[str]] = {}

    @property
    def unknown_count(self) -> int:
        """Marks of ids outside the inventory."""
        return len(self._unknown)

    def mark(self, machine_id: str, shard_id: str) -> Mark | None:
        """Return the mark, or None before first contact."""
        return self._known.get(machine_id, {}).get(shard_id) or self._unknown.get((machine_id, shard_id))

    def passes(self, machine_id: str, token: Token) -> bool:
        """Return whether a token is strictly newer than its mark; an absent one and a first contact pass."""
        if token.is_absent:
            return True
        mark = self.mark(machine_id, token.shard_id)
        return mark is None or token.order > (mark.epoch, mark.sequence)

    def has_room(self, machine_id: str, token: Token, now_unix_nanos: int) -> bool:
        """Return whether the fence can remember a token: one of its shard is known, or there is room."""
        marks = self._known.get(machine_id)
        if token.is_absent or marks is None or token.shard_id in marks or len(marks) < SHARDS_PER_MACHINE_MAX:
            return True
        return _oldest_of(marks).used_unix_nanos < now_unix_nanos - UNKNOWN_MARK_SECONDS_MAX * NANOS_PER_SECOND

    def crowded_out(self, new: Iterable[Mark]) -> list[Mark]:
        """Return the marks of machines in the inventory in whose place new ones come, for which there was room."""
        crowded = []
        for mark in new:
            marks = self._known.get(mark.machine_id)
            if marks is not None and mark.shard_id not in marks and len(marks) >= SHARDS_PER_MACHINE_MAX:
                crowded.append(_oldest_of(marks))
        return crowded

    def put(self, mark: Mark, *, is_known: bool) -> None:
        """Move or set a mark."""
        before = self.mark(mark.machine_id, mark.shard_id)
        assert before is None or (mark.epoch, mark.sequence) >= (before.epoch, before.sequence), "a mark moved back"
        if is_known:
            self._put_known(mark)
        else:
            self._put_unknown(mark)

    def _put_known(self, mark: Mark) -> None:
        marks = self._known.setdefault(mark.machine_id, {})
        self.known_count += mark.shard_id not in marks
        marks[mark.shard_id] = mark

    def _put_unknown(self, mark: Mark) -> None:
        self._take_unknown(mark.machine_id, mark.shard_id)
        self._unknown[(mark.machine_id, mark.shard_id)] = mark
        self._unknown_shards.setdefault(mark.machine_id, set()).add(mark.shard_id)

    def _take_unknown(self, machine_id: str, shard_id: str) -> Mark | None:
        mark = self._unknown.pop((machine_id, shard_id), None)
        if mark is not None:
            shards = self._unknown_shards[machine_id]
            shards.discard(shard_id)
            if not shards:
                del self._unknown_shards[machine_id]
        return mark

    def machine_added(self, machine_id: str) -> None:
        """Keep the marks of an id for as long as the machine is in the inventory."""
        for shard_id in sorted(self._unknown_shards.get(machine_id, ())):
            mark = self._take_unknown(machine_id, shard_id)
            assert mark is not None, "the index of unknown marks names only marks"
            self._put_known(mark)

    def machine_removed(self, machine_id: str) -> None:
        """Let the machine's marks join the bounded ones."""
        marks = self._known.pop(machine_id, {})
        self.known_count -= len(marks)
        for mark in marks.values():
            self._put_unknown(mark)

    def evictable(self, now_unix_nanos: int, in_use: AbstractSet[tuple[str, str]]) -> list[Mark]:
        """Return the marks that must go so that number and age of the unknown ones stay in bounds.

        `in_use` names (machine, shard) pairs that are being marked right now; they stay.
        """
        excess = len(self._unknown) - UNKNOWN_MARKS_MAX
        oldest_unix_nanos = now_unix_nanos - UNKNOWN_MARK_SECONDS_MAX * NANOS_PER_SECOND
        evicted = []
        for number, mark in enumerate(self._unknown.values()):
            if number >= excess and mark.used_unix_nanos >= oldest_unix_nanos:
                break
            if (mark.machine_id, mark.shard_id) not in in_use:
                evicted.append(mark)
        return evicted

    def evict(self, marks: Iterable[Mark]) -> None:
        """Forget marks."""
        for mark in marks:
            known = self._known.get(mark.machine_id)
            if known is not None and known.pop(mark.shard_id, None) is not None:
                self.known_count -= 1
            self._take_unknown(mark.machine_id, mark.shard_id)


def _oldest_of(marks: Mapping[str, Mark]) -> Mark:
    return min(marks.values(), key=lambda mark: (mark.used_unix_nanos, mark.shard_id))
