"""Reports to operators what the cluster policy changed or left out of their demand (docs/spec/shard.md §1.1).

A row whose priority or penalty was lowered is decided on under another fingerprint; its operator knows only the one
that it reported. Values here never change, so they may be read off the loop.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from bigfleet.model import vector
from bigfleet.model.frames import NeedStatus, UnmetReason
from bigfleet.model.need import Need
from bigfleet.model.vector import Vector

#: (fingerprint, group).
RowName = tuple[str, str]


class ReportedRow(NamedTuple):
    """A row as its operator reported it, and what the policy changed of it, "" for nothing."""

    name: RowName
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitedDemand:
    """What the cluster policy did to the demand of one cycle, by cluster; clusters without an effect are absent."""

    #: The rows that were reported, by the row that was decided on in their place.
    reported: Mapping[str, Mapping[RowName, Sequence[ReportedRow]]] = field(default_factory=dict)
    #: Statuses of rows that were left out.
    left_out: Mapping[str, Sequence[NeedStatus]] = field(default_factory=dict)
    #: Statuses of rows, as decided on, that were cut to what the cluster may have.
    cut: Mapping[str, Sequence[NeedStatus]] = field(default_factory=dict)

    def statuses(self, found: Mapping[str, Sequence[NeedStatus]], clusters: Set[str]) -> dict[str, list[NeedStatus]]:
        """Return the statuses of rows as they were reported, with those of what was cut or left out."""
        shown = {cluster: list(rows) for cluster, rows in found.items()}
        for cluster in clusters & (self.reported.keys() | self.left_out.keys() | self.cut.keys()):
            cut = self.cut.get(cluster, ())
            names = {(row.fingerprint, row.group) for row in cut}
            rows = [row for row in shown.get(cluster, ()) if (row.fingerprint, row.group) not in names]
            shown[cluster] = [*self._as_reported(cluster, [*cut, *rows]), *self.left_out.get(cluster, ())]
        return shown

    def coming(self, found: Mapping[str, Sequence[RowName]]) -> Mapping[str, Sequence[RowName]]:
        """Return the names of rows as they were reported."""
        if not self.reported:
            return found
        return {
            cluster: [
                row.name for name in names for row in self.reported.get(cluster, {}).get(name, (ReportedRow(name, ""),))
            ]
            for cluster, names in found.items()
        }

    def _as_reported(self, cluster: str, rows: Sequence[NeedStatus]) -> list[NeedStatus]:
        known, shown = self.reported.get(cluster, {}), dict[RowName, NeedStatus]()
        for row in rows:
            name = (row.fingerprint, row.group)
            for one in known.get(name, (ReportedRow(name, ""),)):
                message = f"{row.message}; {one.note}" if one.note else row.message
                # Rows that became one are served as one: the first that is short speaks for all.
                shown.setdefault(one.name, replace(row, fingerprint=one.name[0], group=one.name[1], message=message))
        return list(shown.values())


def limit_status(need: Need, residual: Vector, message: str) -> NeedStatus:
    """Return the status of a row that the policy does not let have more."""
    return NeedStatus(
        fingerprint=need.fingerprint,
        group=need.group,
        residual=vector.format_vector(residual, need.families),
        reason=UnmetReason.CLUSTER_LIMIT,
        age_cycles=0,
        parked=False,
        message=message,
    )
