"""Orders records by their last change: appends, removes anywhere, reads from a position.

The cost of an operation grows with the records it touches, never with the fleet, except `all`, which copies references.
It is owned by `bigfleet.provider.storage.view`. It must never have one id twice; its owner removes the old position
first.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from bigfleet.provider.records.record import Record

_BLOCK_RECORDS_MAX = 4096
#: Below this share of live records a block is squeezed.
_SPARSE_DIVISOR = 4


class _Block:
    __slots__ = ("live", "records", "revisions")

    def __init__(self) -> None:
        #: Ascending, parallel to `records`.
        self.revisions: list[int] = []
        #: None marks a place that was struck out.
        self.records: list[Record | None] = []
        self.live = 0


class ChangeLog:
    """Records by revision, ascending."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = [_Block()]
        #: The first revision of each block, parallel to `_blocks`; the tail's is that of its first append.
        self._firsts: list[int] = [0]
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def append(self, record: Record) -> None:
        """Add a record whose revision is higher than every one before."""
        tail = self._blocks[-1]
        if len(tail.records) >= _BLOCK_RECORDS_MAX:
            tail = _Block()
            self._blocks.append(tail)
            self._firsts.append(record.revision)
        assert not tail.revisions or record.revision > tail.revisions[-1], "revisions rise"
        tail.revisions.append(record.revision)
        tail.records.append(record)
        tail.live += 1
        self._live += 1

    def remove(self, revision: int) -> None:
        """Take out the record with this revision."""
        number = bisect_right(self._firsts, revision) - 1
        block = self._blocks[number]
        place = bisect_left(block.revisions, revision)
        assert block.revisions[place] == revision, f"revision {revision} is not in the journal"
        assert block.records[place] is not None, f"revision {revision} was struck out before"
        block.records[place] = None
        block.live -= 1
        self._live -= 1
        is_tail = number == len(self._blocks) - 1
        if not is_tail and block.live * _SPARSE_DIVISOR < len(block.records):
            self._squeeze(number)

    def _squeeze(self, number: int) -> None:
        block = self._blocks[number]
        live = [(r.revision, r) for r in block.records if r is not None]
        if not live and number > 0:
            del self._blocks[number], self._firsts[number]
            return
        block.revisions = [revision for revision, _ in live]
        block.records = [record for _, record in live]
        if number == 0:
            return
        before = self._blocks[number - 1]
        if len(before.records) + len(block.records) <= _BLOCK_RECORDS_MAX:
            before.revisions.extend(block.revisions)
            before.records.extend(block.records)
            before.live += block.live
            del self._blocks[number], self._firsts[number]

    def after(self, position: int) -> Iterator[Record]:
        """Yield the records whose revision is above `position`, ascending. The journal must not change meanwhile."""
        number = max(0, bisect_right(self._firsts, position) - 1)
        place = bisect_right(self._blocks[number].revisions, position)
        for block in self._blocks[number:]:
            for record in block.records[place:]:
                if record is not None:
                    yield record
            place = 0

    def all(self) -> list[Record | None]:
        """Return every place, struck out ones as None, ascending: a copy of references to immutable records."""
        places: list[Record | None] = []
        for block in self._blocks:
            places.extend(block.records)
        return places
