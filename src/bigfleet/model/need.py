"""Demand: one row of what a cluster needs, and how rows of one kind merge (docs/spec/engine.md §1.8).

A row says how much in total and the least that one machine must host alone. There is no pod count and no machine
count anywhere.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from bigfleet.model import vector
from bigfleet.model.ids import ClusterId, Fingerprint
from bigfleet.model.profile import Profile
from bigfleet.model.quantity import Family
from bigfleet.model.vector import Vector

_NO_FAMILIES: Mapping[str, Family] = MappingProxyType({})

RowKey = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Need:
    """One row of demand."""

    cluster: ClusterId
    profile: Profile
    #: Total demand, milli-units; zero demand has no dimension.
    aggregate: Vector
    #: What each counted machine must host alone, milli-units.
    min_unit: Vector = field(default_factory=lambda: vector.ZERO)
    #: First sight of the row, Unix nanoseconds; 0 is unknown.
    arrival_unix_nanos: int = 0
    #: Opaque gang id, "" for none.
    group: str = ""
    #: Stamp of docs/spec/engine.md §9: this gang neither acquires nor preempts in this cycle.
    parked: bool = False
    #: How the row's own quantities were written, so that sums print the same way.
    families: Mapping[str, Family] = field(default_factory=lambda: _NO_FAMILIES, compare=False)

    @property
    def fingerprint(self) -> Fingerprint:
        """The profile's fingerprint."""
        return self.profile.fingerprint

    @property
    def key(self) -> RowKey:
        """(cluster, fingerprint, group): what makes two rows one."""
        return (self.cluster, self.profile.fingerprint, self.group)


def merge_rows(rows: Iterable[Need]) -> list[Need]:
    """Merge rows of equal key, in order of first appearance.

    Aggregates are summed, min units taken by per-dimension maximum, the earliest arrival that is known is kept.
    """
    merged: dict[RowKey, Need] = {}
    for row in rows:
        known = merged.get(row.key)
        if known is None:
            merged[row.key] = row
            continue
        arrivals = [a for a in (known.arrival_unix_nanos, row.arrival_unix_nanos) if a]
        merged[row.key] = replace(
            known,
            aggregate=vector.add(known.aggregate, row.aggregate),
            min_unit=vector.maximum(known.min_unit, row.min_unit),
            arrival_unix_nanos=min(arrivals, default=0),
            families={**row.families, **known.families},
        )
    return list(merged.values())
