"""Holds the committed fleet as readers see it, and answers List (docs/spec/provider.md §10).

Fed by `bigfleet.provider.storage.ledger` after each commit, in commit order. A view must never show what is not
durable.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from bigfleet.model.ids import Rng
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.model.validation import ensure
from bigfleet.provider.records.record import Record
from bigfleet.provider.storage.change_log import ChangeLog
from bigfleet.provider.storage.cursor import Cursor, CursorRejection, decode_cursor
from bigfleet.provider.storage.machines_by_host import HostScope, MachinesByHost, one_scope

TOMBSTONES_MAX = 200_000
TOMBSTONE_SECONDS_MAX = 24 * 3600.0


class ListKind(Enum):
    """Which of the four answers List gave; the values are metric labels."""

    FULL = "full"
    DELTA = "delta"
    PAGE = "page"
    PICK = "pick"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tombstone:
    """An id that left the inventory."""

    machine_id: str
    revision: int
    removed_unix_nanos: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ListAnswer:
    """One answer of List; the records are in revision order, oldest change first."""

    records: tuple[Record, ...]
    #: Empty for a pick.
    revision: bytes
    removed_ids: tuple[str, ...]
    #: This answer is a delta and its removals are complete.
    tombstones: bool
    kind: ListKind
    rejection: CursorRejection | None


class _StateIndex:
    """Machines of one state, in no order: add, remove and draw at random in constant time."""

    __slots__ = ("_ids", "_places")

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._places: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, place: int) -> str:
        return self._ids[place]

    def add(self, machine_id: str) -> None:
        self._places[machine_id] = len(self._ids)
        self._ids.append(machine_id)

    def remove(self, machine_id: str) -> None:
        place = self._places.pop(machine_id)
        last = self._ids.pop()
        if last != machine_id:
            self._ids[place] = last
            self._places[last] = place


class CommittedView:
    """Every committed record, by id and by revision, and the tombstones.

    Invariants: the records by id, by revision and by state are the same ones; `counts` counts them; no id has both a
    record and a tombstone; tombstones are in revision order; no revision is beyond `head`.
    """

    def __init__(
        self, *, incarnation: bytes, head: int, floor: int, rng: Rng, host_scope: HostScope = one_scope
    ) -> None:
        #: 8 bytes of every cursor; a change of them ends all cursors.
        self.incarnation = incarnation
        self._rng = rng
        #: Revision of the last change or removal.
        self.head = head
        #: Removals up to here may be forgotten.
        self.floor = floor
        self._records: dict[str, Record] = {}
        self._change_log = ChangeLog()
        #: The machines by their host.
        self.hosts = MachinesByHost(host_scope)
        self._states: defaultdict[MachineState, _StateIndex] = defaultdict(_StateIndex)
        #: By id, in revision order.
        self._tombstones: dict[str, Tombstone] = {}
        #: Machines by state and capacity type.
        self.counts: Counter[tuple[MachineState, CapacityType]] = Counter()

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, machine_id: str) -> bool:
        return machine_id in self._records

    @property
    def tombstone_count(self) -> int:
        """Number of tombstones stored now."""
        return len(self._tombstones)

    def get(self, machine_id: str) -> Record | None:
        """Return the record of a machine."""
        return self._records.get(machine_id)

    def of_state(self, state: MachineState) -> list[Record]:
        """Return the records of a state, in no order."""
        index = self._states[state]
        return [self._records[index[place]] for place in range(len(index))]

    def snapshot(self) -> list[Record]:
        """Return every record in revision order."""
        return [record for record in self._change_log.all() if record is not None]

    def has_tombstone(self, machine_id: str) -> bool:
        """Return whether a removed id is still reported to readers."""
        return machine_id in self._tombstones

    def removed_since(self, machine_id: str, revision: int) -> bool:
        """Return whether an id left the inventory after a revision."""
        tombstone = self._tombstones.get(machine_id)
        return tombstone is not None and tombstone.revision > revision

    # ---- changes, in commit order -------------------------------------------------------------------------------

    def put(self, record: Record) -> None:
        """Take a committed record; one with a new revision moves to the end of the order."""
        old = self._records.get(record.id)
        if old is not None and old.revision == record.revision:
            self._replace_unseen(old, record)
            return
        if old is not None:
            self._forget(old)
        self._tombstones.pop(record.id, None)
        self._records[record.id] = record
        self._change_log.append(record)
        self.hosts.add(record.id, record.machine.host.ref)
        self._states[record.state].add(record.id)
        self.counts[record.state, record.machine.capacity_type] += 1
        self.head = max(self.head, record.revision)

    def _replace_unseen(self, old: Record, record: Record) -> None:
        # The change is visible to the kit alone; readers and their cursors do not notice, so the order stays. The
        # journal's entry may lag in such fields, because List reads only `wire`, `machine` and `metadata` from it.
        assert record.shows_the_same_as(old), "a visible change takes a revision"
        self._records[record.id] = record

    def _forget(self, old: Record) -> None:
        self._change_log.remove(old.revision)
        self.hosts.remove(old.id, old.machine.host.ref)
        self._states[old.state].remove(old.id)
        self.counts[old.state, old.machine.capacity_type] -= 1

    def remove(self, tombstone: Tombstone) -> None:
        """Take out a machine and remember that it went."""
        self._forget(self._records.pop(tombstone.machine_id))
        self.restore_tombstone(tombstone)
        self.head = max(self.head, tombstone.revision)

    def restore_tombstone(self, tombstone: Tombstone) -> None:
        """Remember a removal; called in revision order."""
        self._tombstones[tombstone.machine_id] = tombstone

    def expired_tombstones(self, now_unix_nanos: int, room_for: int) -> list[Tombstone]:
        """Return the oldest tombstones that must go so that age and number stay in bounds with `room_for` more."""
        excess = len(self._tombstones) + room_for - TOMBSTONES_MAX
        oldest_unix_nanos = now_unix_nanos - int(TOMBSTONE_SECONDS_MAX * 1e9)
        expired = []
        for number, tombstone in enumerate(self._tombstones.values()):
            if number >= excess and tombstone.removed_unix_nanos >= oldest_unix_nanos:
                break
            expired.append(tombstone)
        return expired

    def drop_tombstones(self, machine_ids: Iterable[str], floor: int) -> None:
        """Forget removals and raise the floor, so that older cursors get a full list."""
        for machine_id in machine_ids:
            self._tombstones.pop(machine_id, None)
        self.floor = floor

    def validate(self) -> None:
        """Compare everything with the invariants. Raises InvariantBroken."""
        records, logged = self._records, self.snapshot()
        by_id = {record.id: record.revision for record in records.values()}
        ensure({record.id: record.revision for record in logged} == by_id, "view: the change log holds other revisions")
        revisions = [record.revision for record in logged]
        ensure(revisions == sorted(set(revisions)), "view: records are not in the order of their revisions")
        for state, index in self._states.items():
            of_state = {record.id for record in records.values() if record.state is state}
            ensure({index[place] for place in range(len(index))} == of_state, f"view: other machines are {state.label}")
        counts = Counter((record.state, record.machine.capacity_type) for record in records.values())
        ensure(+self.counts == counts, f"view: counts {+self.counts}, and there are {counts}")
        ensure(self._tombstones.keys().isdisjoint(records), "view: a removed machine has a record")
        removals = [tombstone.revision for tombstone in self._tombstones.values()]
        ensure(removals == sorted(removals), "view: tombstones are not in the order of their revisions")
        ensure(max([*revisions, *removals], default=0) <= self.head, "view: a revision is beyond the head")

    # ---- List ---------------------------------------------------------------------------------------------------

    def list(self, states: frozenset[MachineState] | None, results_max: int, since: bytes) -> Callable[[], ListAnswer]:
        """Take the view of this moment and return a function that makes the answer of it.

        `states` None is any state; `results_max` at most 0 is no cap. What is returned may run in another thread
        while the view changes.
        """
        rejection = None
        if since:
            cursor = decode_cursor(since, incarnation=self.incarnation, head=self.head, floor=self.floor)
            if isinstance(cursor, Cursor):
                return self._delta(states, results_max, cursor)
            rejection = cursor
        elif states is not None and results_max > 0:
            listing = self._pick(states, results_max)
            return lambda: listing
        places, head, incarnation = self._change_log.all(), self.head, self.incarnation

        def full() -> ListAnswer:
            # A record is true. Without a line of Python for each one, as every other thread waits for the interpreter.
            records, position = _cut(filter(None, places), states, results_max, head)
            kind = ListKind.FULL if results_max <= 0 else ListKind.PAGE
            revision = Cursor(incarnation, position, head).encode()
            return ListAnswer(
                records=records, revision=revision, removed_ids=(), tombstones=False, kind=kind, rejection=rejection
            )

        return full

    def _delta(
        self, states: frozenset[MachineState] | None, results_max: int, cursor: Cursor
    ) -> Callable[[], ListAnswer]:
        records, position = _cut(self._change_log.after(cursor.position), states, results_max, self.head)
        removed = []
        for tombstone in reversed(self._tombstones.values()):
            if tombstone.revision <= cursor.removals:
                break
            removed.append(tombstone.machine_id)
        listing = ListAnswer(
            records=records,
            revision=Cursor(self.incarnation, position, self.head).encode(),
            removed_ids=tuple(reversed(removed)),
            tombstones=True,
            kind=ListKind.PAGE if results_max > 0 else ListKind.DELTA,
            rejection=None,
        )
        return lambda: listing

    def _pick(self, states: frozenset[MachineState], results_max: int) -> ListAnswer:
        indexes = [index for state in sorted(states) if (index := self._states.get(state))]
        total = sum(len(index) for index in indexes)
        chosen = []
        for place in draw_places(total, min(results_max, total), self._rng):
            for index in indexes:
                if place < len(index):
                    chosen.append(self._records[index[place]])
                    break
                place -= len(index)
        chosen.sort(key=lambda record: record.revision)
        return ListAnswer(
            records=tuple(chosen), revision=b"", removed_ids=(), tombstones=False, kind=ListKind.PICK, rejection=None
        )


def _cut(
    records: Iterable[Record], states: frozenset[MachineState] | None, results_max: int, head: int
) -> tuple[tuple[Record, ...], int]:
    """Return the first matching records, and the position of the answer: the last one's revision when cut."""
    matching = records if states is None else (r for r in records if r.state in states)
    if results_max <= 0:
        return tuple(matching), head
    found: list[Record] = []
    for record in matching:
        if len(found) == results_max:
            return tuple(found), found[-1].revision
        found.append(record)
    return tuple(found), head


def draw_places(total: int, count: int, rng: Rng) -> list[int]:
    """Return `count` different numbers below `total`, every set of them equally likely (Floyd's algorithm)."""
    assert 0 <= count <= total, "cannot draw more than there are"
    chosen: dict[int, None] = {}
    for top in range(total - count, total):
        place = _below(top + 1, rng)
        chosen[top if place in chosen else place] = None
    return list(chosen)


def _below(bound: int, rng: Rng) -> int:
    bits = bound.bit_length()
    while True:
        number = rng.getrandbits(bits)
        if number < bound:
            return number
