"""The demand that a shard holds: each cluster's last accepted roll-up, in an order that stands still while it does.

docs/spec/engine.md §1.8 and docs/spec/shard.md §4. Silence changes nothing here; only an accepted roll-up does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from bigfleet.model.need import Need
from bigfleet.shard.rails import Quarantine, Verdict

_FirstSight = tuple[int, int]


class NeedsTable:
    """Rows of every cluster; `replace` swaps one cluster's whole contribution."""

    def __init__(self) -> None:
        self._rows: dict[str, tuple[Need, ...]] = {}
        #: (arrival, rank) by cluster and (fingerprint, group) of the rows in force.
        self._first_sight: dict[str, dict[tuple[str, str], _FirstSight]] = {}
        self._next_rank = 0
        self._ordered: tuple[Need, ...] | None = ()

    @property
    def clusters(self) -> frozenset[str]:
        """Clusters with at least one row."""
        return frozenset(self._rows)

    def rows_of(self, cluster: str) -> tuple[Need, ...]:
        """Return a cluster's rows in message order."""
        return self._rows.get(cluster, ())

    def replace(self, cluster: str, rows: Sequence[Need], *, now_unix_nanos: int) -> None:
        """Put rows in the place of the cluster's former ones; an empty list clears it.

        A (fingerprint, group) that was there keeps the arrival and rank of its first sight.
        """
        known = self._first_sight.get(cluster, {})
        sights: dict[tuple[str, str], _FirstSight] = {}
        stamped = []
        for row in rows:
            identity = (row.fingerprint, row.group)
            sight = sights.get(identity) or known.get(identity)
            if sight is None:
                self._next_rank += 1
                sight = (now_unix_nanos, self._next_rank)
            sights[identity] = sight
            stamped.append(replace(row, arrival_unix_nanos=sight[0]))
        if stamped:
            self._rows[cluster] = tuple(stamped)
            self._first_sight[cluster] = sights
        else:
            self._rows.pop(cluster, None)
            self._first_sight.pop(cluster, None)
        self._ordered = None

    def in_list_order(self) -> tuple[Need, ...]:
        """Return every row: priority descending, arrival, cluster, rank of first sight, message order."""
        if self._ordered is None:
            keyed = []
            for cluster, rows in self._rows.items():
                sights = self._first_sight[cluster]
                for position, row in enumerate(rows):
                    arrival, rank = sights[(row.fingerprint, row.group)]
                    keyed.append(((-row.profile.priority, arrival, cluster, rank, position), row))
            keyed.sort(key=lambda item: item[0])
            self._ordered = tuple(row for _key, row in keyed)
        return self._ordered


class RollUpOutcome(Enum):
    """What became of one roll-up; the values are metric labels."""

    ACCEPTED = "accepted"
    UNCHANGED = "unchanged"
    HELD = "held"
    REJECTED = "rejected"
    MISROUTED = "misrouted"


@dataclass(slots=True)
class _ClusterIntake:
    quarantine: Quarantine = field(default_factory=Quarantine)
    #: Digest of the last accepted roll-up without its timestamp.
    digest: bytes | None = None


class Intake:
    """From a roll-up to the table: unchanged ones are skipped, suspicious ones held, the rest replace the demand."""

    def __init__(self, *, guard: bool = True) -> None:
        self.table = NeedsTable()
        #: Clusters that have reported since this process started, held reports included.
        self.reported: set[str] = set()
        self._guard = guard
        self._clusters: dict[str, _ClusterIntake] = {}

    def is_unchanged(self, cluster: str, digest: bytes) -> bool:
        """Say whether the roll-up equals the cluster's last accepted one; if so it counts as a report.

        An unchanged roll-up ends a quarantine streak and changes nothing else.
        """
        intake = self._clusters.get(cluster)
        if intake is None or intake.digest != digest:
            return False
        intake.quarantine = intake.quarantine.unchanged()
        return True

    def offer(self, cluster: str, rows: Sequence[Need], *, digest: bytes, now_unix_nanos: int) -> Verdict:
        """Judge a valid roll-up and, when it is accepted, put it in force. Either way the cluster has reported."""
        self.reported.add(cluster)
        intake = self._clusters.setdefault(cluster, _ClusterIntake())
        verdict, judged = intake.quarantine.admit(len(rows))
        if not self._guard:
            verdict, judged = Verdict.ACCEPT, Quarantine(len(rows))
        intake.quarantine = judged
        if verdict.is_accepted:
            intake.digest = digest
            self.table.replace(cluster, rows, now_unix_nanos=now_unix_nanos)
        return verdict

    def is_quarantined(self, cluster: str) -> bool:
        """Say whether the cluster's last roll-up was held."""
        intake = self._clusters.get(cluster)
        return intake is not None and intake.quarantine.suspicious_in_a_row > 0
