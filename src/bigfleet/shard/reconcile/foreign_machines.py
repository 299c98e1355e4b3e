"""Caches machines of other shards between two Lists, so that their records are not read again.

docs/spec/shard.md §5.3 point 1. Several shards list one provider, and most listed machines belong to others. A record
that was found to be foreign is recognised by its digest until ownership changes. A machine of the inventory is never
cached here.
"""

from collections.abc import Sequence
from typing import Final

from bigfleet.engine.columns.store import NOTE_BYTES
from bigfleet.model.clock import Clock
from bigfleet.model.ids import MachineId
from bigfleet.model.ownership import Owned, RowKind
from bigfleet.shard.reconcile.ownership_filter import OwnershipFilter

#: Digests that are looked up before other tasks get their turn, a few milliseconds of work.
LOOKED_UP_PER_TURN_MAX: Final = 20_000


class ForeignMachines:
    """The records of one provider that are not this shard's, from one full List to the next."""

    def __init__(self, ownership_filter: OwnershipFilter) -> None:
        self._ownership_filter = ownership_filter
        #: What was owned when the last full List was judged; None before it.
        self._judged: Owned | None = None
        #: What is owned as the reconcile under way began.
        self._begun = ownership_filter.owned
        #: The machines of foreign records, by digest: of the last full List, and of the one under way.
        self._known: dict[bytes, MachineId] = {}
        self._shown: dict[bytes, MachineId] = {}
        #: Foreign records of the full List under way without a digest.
        self._undigested = 0
        #: Machines whose row changed since the last full List: their records are read, known or not.
        self.moved: frozenset[MachineId] = frozenset()
        #: Base or domains changed since the last full List: every record is judged again.
        self.must_read_all = False

    @property
    def count(self) -> int:
        """How many machines of the last full List were not ours."""
        return len(self._known) + self._undigested

    @property
    def adopted_before(self) -> frozenset[MachineId]:
        """The machines that were adopted when the reconcile under way began."""
        return frozenset(m for m, row in self._begun.rows.items() if row.kind is RowKind.ADOPTED)

    def begin(self) -> None:
        """A List is about to be sent: see what has changed of what is owned since the last full one."""
        before, after = self._judged, self._ownership_filter.owned
        self._begun, self._shown, self._undigested = after, {}, 0
        if before is after:
            self.moved, self.must_read_all = frozenset(), False
            return
        territories = [(owned.base, owned.domains, owned.leaving) for owned in (before, after) if owned is not None]
        self.must_read_all = before is None or territories[0] != territories[1]
        rows = before.rows if before is not None else {}
        gone = rows.keys() - after.rows.keys()
        self.moved = frozenset(gone.union(m for m, row in after.rows.items() if rows.get(m) is not row))
        if self.must_read_all:
            self._known = {}
        elif self.moved:
            self._known = {digest: m for digest, m in self._known.items() if m not in self.moved}

    def end(self, *, is_full: bool) -> None:
        """The answer was applied; a full one stands for what is owned since the beginning."""
        if is_full:
            self._judged, self._known = self._begun, self._shown

    async def left_of(self, digests: bytes, places: Sequence[int], clock: Clock) -> list[int]:
        """Return the places of an answer's records that are not known to be another shard's, in turns."""
        if not self._known:
            return list(places)
        left: list[int] = []
        for first in range(0, len(places), LOOKED_UP_PER_TURN_MAX):
            if first:
                await clock.sleep(0)
            for place in places[first : first + LOOKED_UP_PER_TURN_MAX]:
                digest = digests[NOTE_BYTES * place : NOTE_BYTES * (place + 1)]
                machine_id = self._known.get(digest)
                if machine_id is None:
                    left.append(place)
                else:
                    self._shown[digest] = machine_id
        return left

    def note(self, machine_id: MachineId, digest: bytes) -> None:
        """A record was found to be another shard's; an empty digest is none."""
        if digest:
            self._shown[digest] = machine_id
        else:
            self._undigested += 1
