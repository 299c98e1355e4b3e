"""Stores the demand of a shard: each cluster's last accepted roll-up, in a stable order.

docs/spec/model.md §8 and docs/spec/shard.md §4. Silence does not change demand; only an accepted roll-up does.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

from bigfleet.engine.demand_order import ListedRows
from bigfleet.engine.folding import folded_profile
from bigfleet.engine.shapes.columns.listed import ArrivedRows
from bigfleet.model.need import Need, RowKey, new_need
from bigfleet.model.profile import Profile
from bigfleet.model.shapes import Overhead
from bigfleet.model.vector import ZERO, Vector
from bigfleet.shard.safety_limits import DemandQuarantine, QuarantineVerdict
from bigfleet.shard.sessions.demand_columns import DemandReader

_FirstSight = tuple[int, int]
#: Priority negated, arrival, cluster, rank of first sight, how many rows of its identity the message had before it; no
#: two rows agree in the last three.
_Entry = tuple[int, int, str, int, int, Need]
#: Entries that are put into the order or taken out of it one by one, each of which moves what comes behind; more of
#: them are merged in one pass over all rows.
MOVES_MAX = 256


class NeedsTable:
    """Rows of every cluster; `replace` swaps one cluster's whole contribution.

    A row that is reported again as it was stays the same object, so that code that works on rows may remember them by
    identity.
    """

    def __init__(self) -> None:
        self._rows: dict[str, tuple[Need, ...]] = {}
        #: (arrival, rank) by cluster and (fingerprint, group) of the rows in force.
        self._first_sight: dict[str, dict[tuple[str, str], _FirstSight]] = {}
        self._next_rank = 0
        self._overheads: Mapping[str, tuple[Overhead, ...]] = MappingProxyType({})
        #: Sorted rows of the clusters that were replaced since `_entries` was brought up to date.
        self._replaced: dict[str, list[_Entry]] = {}
        #: Ascending, and the row of each at the same place.
        self._entries: list[_Entry] = []
        self._in_order: list[Need] = []
        #: Interruption bucket of the row at the same place.
        self._buckets = bytearray()
        #: Those entries by cluster, of all and only the clusters that have any.
        self._placed: dict[str, list[_Entry]] = {}
        self._reader = DemandReader()
        self._ordered = ListedRows()
        self._ordered_buckets = b""

    @property
    def clusters(self) -> frozenset[str]:
        """Clusters with at least one row."""
        return frozenset(self._rows)

    def by_cluster(self) -> dict[str, tuple[Need, ...]]:
        """Return every cluster's rows in message order; a cluster's are the same object while it is not replaced."""
        return dict(self._rows)

    def rows_of(self, cluster: str) -> tuple[Need, ...]:
        """Return a cluster's rows in message order."""
        return self._rows.get(cluster, ())

    def overheads_by_cluster(self) -> Mapping[str, tuple[Overhead, ...]]:
        """Return what DaemonSets take, by cluster, without clusters where they take nothing.

        It never changes; the same object while nothing was replaced by something else.
        """
        return self._overheads

    def wants(self, key: RowKey) -> bool:
        """Return whether a row with that key is in force, as it was reported or as it would be folded."""
        cluster, fingerprint, group = key
        is_reported = (fingerprint, group) in self._first_sight.get(cluster, ())
        return is_reported or self._folded_profile_of(key) is not None

    def profile_of(self, key: RowKey) -> Profile | None:
        """Return the profile of the row in force with that key, folded where the key is a folded row's, else None."""
        cluster, fingerprint, group = key
        if (fingerprint, group) in self._first_sight.get(cluster, ()):
            return next(row.profile for row in self.rows_of(cluster) if row.fingerprint == fingerprint)
        return self._folded_profile_of(key)

    def need_of(self, key: RowKey) -> Need | None:
        """Return the first row in force with that key; None for a folded row's key, and when there is none."""
        cluster, fingerprint, group = key
        if (fingerprint, group) not in self._first_sight.get(cluster, ()):
            return None
        return next((row for row in self.rows_of(cluster) if row.key == key), None)

    def _folded_profile_of(self, key: RowKey) -> Profile | None:
        cluster, fingerprint, group = key
        if group:
            return None
        gangs = {row.fingerprint: row.profile for row in self.rows_of(cluster) if row.profile.same_key is not None}
        folded = map(folded_profile, gangs.values())
        return next((profile for profile in folded if profile.fingerprint == fingerprint), None)

    def replace(
        self, cluster: str, rows: Sequence[Need], *, overheads: tuple[Overhead, ...] = (), now_unix_nanos: int
    ) -> None:
        """Put rows and overheads in the place of the cluster's former ones; an empty list clears it.

        A (fingerprint, group) that was there keeps the arrival and rank of its first sight, and its object when
        nothing of it changed.

        A new row of a group takes over the first sight of a former row of the group that is not reported any more: a
        gang that starts may require more of its machines, and it would be younger than its equals.
        """
        known = self._first_sight.get(cluster, {})
        former = _by_identity(self._rows.get(cluster, ()))
        sights: dict[tuple[str, str], _FirstSight] = {}
        repeats: dict[tuple[str, str], int] = {}
        left: _SightsLeft | None = None
        stamped = []
        entries: list[_Entry] = []
        for row in rows:
            profile = row.profile
            identity = (profile.fingerprint, row.group)
            sight = sights.get(identity)
            before = 0
            if sight is None:
                sight = known.get(identity)
                if sight is None:
                    self._next_rank += 1
                    sight = (now_unix_nanos, self._next_rank)
                    if row.group:
                        left = _SightsLeft(known, rows) if left is None else left
                        sight = left.taken_over(row.group, sight)
                sights[identity] = sight
            else:
                before = repeats[identity] = repeats.get(identity, 0) + 1
            same = former.get(identity)
            need = _former_if_equal(same.pop(), row) if same else None
            if need is None:
                need = _arrived(row, sight[0])
            stamped.append(need)
            entries.append((-profile.priority, sight[0], cluster, sight[1], before, need))
        if stamped:
            self._rows[cluster] = tuple(stamped)
            self._first_sight[cluster] = sights
        else:
            self._rows.pop(cluster, None)
            self._first_sight.pop(cluster, None)
        entries.sort()
        others = ((name, [entry[-1] for entry in each]) for name, each in self._entries_of_all() if name != cluster)
        self._replaced[cluster] = entries
        self._reader.replace(cluster, [entry[-1] for entry in entries], others)
        self._replace_overheads(cluster, overheads)

    def unread_rows_of(self, cluster: str) -> ArrivedRows | None:
        """Return a cluster's rows if they have to be read into columns, which any thread may do; else None."""
        return self._reader.unread_rows_of(cluster)

    def _entries_of_all(self) -> Iterator[tuple[str, list[_Entry]]]:
        """Yield the sorted rows of each cluster that has any."""
        for name, entries in {**self._placed, **self._replaced}.items():
            if entries:
                yield name, entries

    def _replace_overheads(self, cluster: str, overheads: tuple[Overhead, ...]) -> None:
        if self._overheads.get(cluster, ()) == overheads:
            return
        # A mapping that was handed out stays as it was.
        others = {name: known for name, known in self._overheads.items() if name != cluster}
        self._overheads = MappingProxyType({**others, cluster: overheads} if overheads else others)

    def in_list_order(self) -> ListedRows:
        """Return every row: priority descending, arrival, cluster, rank of first sight, message order.

        The same object while nothing was replaced; else it says where it differs from the one before, unless many came
        or went. Cost: the rows of what was replaced, and one merge of all rows when many came or went.
        """
        if self._replaced:
            changes = [_Change.between(self._placed.get(name, ()), new) for name, new in self._replaced.items()]
            moves = sum(len(change.gone) + len(change.come) for change in changes)
            if moves > MOVES_MAX:
                self._merge()
                self._ordered = ListedRows(self._in_order)
            else:
                gone = self._places(entry for change in changes for entry in (*change.gone, *change.altered))
                for change in changes:
                    self._patch(change)
                come = self._places(entry for change in changes for entry in (*change.come, *change.altered))
                self._ordered = self._ordered.followed_by(self._in_order, gone=gone, come=come)
            for cluster, placed in self._replaced.items():
                if placed:
                    self._placed[cluster] = placed
                else:
                    self._placed.pop(cluster, None)
            self._replaced = {}
            self._ordered_buckets = bytes(self._buckets)
            self._ordered.columns = self._reader.listed(self._in_order)
            if not self._reader.is_reading:
                self._ordered.says_pods = False
        return self._ordered

    def buckets_in_list_order(self) -> bytes:
        """Return the interruption bucket of each row of `in_list_order`, one byte a row, without looking at any row."""
        self.in_list_order()
        return self._ordered_buckets

    def _places(self, entries: Iterable[_Entry]) -> list[int]:
        return sorted(bisect_left(self._entries, entry[:-1]) for entry in entries)

    def _merge(self) -> None:
        entries = [entry for entry in self._entries if entry[2] not in self._replaced]
        for replaced in self._replaced.values():
            entries.extend(replaced)
        # Sorted runs one after the other: the sort finds them and merges.
        entries.sort()
        self._entries = entries
        self._in_order = [entry[-1] for entry in entries]
        self._buckets = bytearray([row.profile.interruption_bucket for row in self._in_order])
        self._reader.reorder()

    def _patch(self, change: "_Change") -> None:
        for entry in change.gone:
            place = bisect_left(self._entries, entry[:-1])
            del self._entries[place], self._in_order[place], self._buckets[place]
            self._reader.delete(place)
        for entry in change.altered:
            place = bisect_left(self._entries, entry[:-1])
            self._entries[place], self._in_order[place] = entry, entry[-1]
            self._buckets[place] = entry[-1].profile.interruption_bucket
        for entry in change.come:
            place = bisect_left(self._entries, entry[:-1])
            self._entries.insert(place, entry)
            self._in_order.insert(place, entry[-1])
            self._buckets.insert(place, entry[-1].profile.interruption_bucket)
            self._reader.insert(place, entry[-1])


class _Change(NamedTuple):
    """What becomes of one cluster's entries: those that leave, those with another row in their place, and new ones."""

    gone: list[_Entry]
    altered: list[_Entry]
    come: list[_Entry]

    @classmethod
    def between(cls, old: Sequence[_Entry], new: Sequence[_Entry]) -> "_Change":
        former = {entry[:-1]: entry for entry in old}
        altered, come = [], []
        for entry in new:
            same = former.pop(entry[:-1], None)
            if same is None:
                come.append(entry)
            elif same[-1] is not entry[-1]:
                altered.append(entry)
        return cls(list(former.values()), altered, come)


class _SightsLeft:
    """The first sights of a cluster's grouped rows that a new message does not name, by group."""

    def __init__(self, known: Mapping[tuple[str, str], _FirstSight], rows: Sequence[Need]) -> None:
        reported = {(row.profile.fingerprint, row.group) for row in rows}
        self._sights: dict[str, list[_FirstSight]] = {}
        for identity, sight in known.items():
            if identity[1] and identity not in reported:
                self._sights.setdefault(identity[1], []).append(sight)
        for sights in self._sights.values():
            sights.sort(reverse=True)
        self._arrivals = {group: sights[-1][0] for group, sights in self._sights.items()}

    def taken_over(self, group: str, sight: _FirstSight) -> _FirstSight:
        """Return the earliest sight that is left of the group, else `sight`, as old as the earliest was."""
        sights = self._sights.get(group)
        if sights is None:
            return sight
        return sights.pop() if sights else (self._arrivals[group], sight[1])


def _by_identity(rows: Sequence[Need]) -> dict[tuple[str, str], list[Need]]:
    """Return the rows by (fingerprint, group); of those that share one the first is last."""
    found: dict[tuple[str, str], list[Need]] = {}
    for row in reversed(rows):
        identity = (row.profile.fingerprint, row.group)
        same = found.get(identity)
        if same is None:
            found[identity] = [row]
        else:
            same.append(row)
    return found


def _arrived(row: Need, arrival_unix_nanos: int) -> Need:
    """Return the row with its arrival: what `dataclasses.replace` does, in a sixth of its time."""
    return new_need(
        row.cluster,
        row.profile,
        row.aggregate,
        row.min_unit,
        arrival_unix_nanos,
        row.group,
        row.parked,
        row.families,
        row.shapes,
        row.waiting,
    )


def _former_if_equal(former: Need, row: Need) -> Need | None:
    """Return the former object when the row says what it said, its way of writing included."""
    is_same = (
        former.aggregate,
        former.min_unit,
        former.families,
        former.parked,
        former.shapes,
        former.waiting,
    ) == (row.aggregate, row.min_unit, row.families, row.parked, row.shapes, row.waiting)
    return former if is_same else None


class RollUpOutcome(Enum):
    """What became of one roll-up; the values are metric labels."""

    ACCEPTED = "accepted"
    UNCHANGED = "unchanged"
    HELD = "held"
    REJECTED = "rejected"
    MISROUTED = "misrouted"
    #: Of a cluster that is retired.
    RETIRED = "retired"


@dataclass(slots=True)
class _ClusterIntake:
    quarantine: DemandQuarantine = field(default_factory=DemandQuarantine)
    #: Digest of the last accepted roll-up without its timestamp.
    digest: bytes | None = None


class Intake:
    """From a roll-up to the table: unchanged ones are skipped, suspicious ones held, the rest replace the demand."""

    def __init__(
        self,
        *,
        guard: bool = True,
        bounded: Callable[[str, Sequence[Need]], Sequence[Need]] = lambda _cluster, rows: rows,
    ) -> None:
        """`bounded` returns a cluster's reported rows as they are to be decided on."""
        self.table = NeedsTable()
        self._bounded = bounded
        #: Clusters that have reported since this process started, held reports included, and those that are retired.
        self.reported: set[str] = set()
        self._reported_by_now: frozenset[str] = frozenset()
        self._guard = guard
        self._clusters: dict[str, _ClusterIntake] = {}

    def reported_by_now(self) -> frozenset[str]:
        """Return the clusters that have reported by now: the same object until another one reports."""
        if self._reported_by_now != self.reported:
            self._reported_by_now = frozenset(self.reported)
        return self._reported_by_now

    def replace_rows(self, changed: Iterable[tuple[str, Sequence[Need]]], now_unix_nanos: int) -> None:
        """Have rows of some clusters decided on otherwise than before; what they reported stays in force."""
        for cluster, rows in changed:
            overheads = self.table.overheads_by_cluster().get(cluster, ())
            self.table.replace(cluster, rows, overheads=overheads, now_unix_nanos=now_unix_nanos)

    def digest_of(self, cluster: str) -> bytes | None:
        """Return the digest of the cluster's last accepted roll-up; None before there is one."""
        intake = self._clusters.get(cluster)
        return intake.digest if intake is not None else None

    def knows(self, cluster: str, digest: bytes) -> bool:
        """Return whether the roll-up equals the cluster's last accepted one."""
        intake = self._clusters.get(cluster)
        return intake is not None and intake.digest == digest

    def is_unchanged(self, cluster: str, digest: bytes) -> bool:
        """Return whether the roll-up equals the cluster's last accepted one; if so it counts as a report.

        An unchanged roll-up ends a quarantine streak and changes nothing else.
        """
        if not self.knows(cluster, digest):
            return False
        intake = self._clusters[cluster]
        intake.quarantine = intake.quarantine.unchanged()
        return True

    def offer(
        self,
        cluster: str,
        rows: Sequence[Need],
        *,
        overheads: tuple[Overhead, ...] = (),
        digest: bytes,
        now_unix_nanos: int,
        largest_supply: Callable[[], Vector] = lambda: ZERO,
    ) -> QuarantineVerdict:
        """Judge a valid roll-up and, when it is accepted, put it in force. Either way the cluster has reported.

        `largest_supply` returns the largest supply, per dimension, among the machines bound to the cluster.
        """
        self.reported.add(cluster)
        intake = self._clusters.setdefault(cluster, _ClusterIntake())
        verdict, judged = QuarantineVerdict.ACCEPT, intake.quarantine
        if self._guard:
            verdict, judged = intake.quarantine.admit(rows, largest_supply)
        intake.quarantine = judged
        if verdict.is_accepted:
            intake.digest = digest
            bounded = self._bounded(cluster, rows)
            self.table.replace(cluster, bounded, overheads=overheads, now_unix_nanos=now_unix_nanos)
        return verdict

    def end_demand(self, cluster: str, *, now_unix_nanos: int) -> None:
        """Empty a cluster's demand as if it had reported that, without the quarantine."""
        self.reported.add(cluster)
        self._clusters.pop(cluster, None)
        self.table.replace(cluster, self._bounded(cluster, ()), now_unix_nanos=now_unix_nanos)

    def forget(self, cluster: str) -> None:
        """Forget that a cluster without demand has ever reported; nothing of it is reclaimed then."""
        assert not self.table.rows_of(cluster), f"{cluster} has demand"
        self.reported.discard(cluster)
        self._clusters.pop(cluster, None)

    def is_quarantined(self, cluster: str) -> bool:
        """Return whether the cluster's last roll-up was held."""
        intake = self._clusters.get(cluster)
        return intake is not None and intake.quarantine.suspicious_in_a_row > 0

    def suspicion(self, cluster: str) -> str:
        """Return what was suspicious in the cluster's last roll-up, "" for nothing."""
        intake = self._clusters.get(cluster)
        return "" if intake is None else intake.quarantine.suspicion
