"""Defines a row of demand, and how rows of one kind merge (docs/spec/model.md §8).

A row has a total and the least amount that one machine must host alone. It may also list its requests
(`bigfleet.model.shapes`); then the total is their sum.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import NamedTuple

from bigfleet.model import vector
from bigfleet.model.ids import ClusterId, Fingerprint
from bigfleet.model.profile import Profile
from bigfleet.model.quantity import Family
from bigfleet.model.shapes import DemandShape, canonical_shapes, largest_of, merged_upwards, total_of
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
    #: The distinct requests of the row, in canonical order; none: the aggregate may be divided at will.
    shapes: tuple[DemandShape, ...] = ()
    #: Pods that wait although the row was called met, in canonical order; no part of `shapes` and the aggregate.
    waiting: tuple[DemandShape, ...] = ()

    @property
    def fingerprint(self) -> Fingerprint:
        """The profile's fingerprint."""
        return self.profile.fingerprint

    @property
    def key(self) -> RowKey:
        """(cluster, fingerprint, group): what makes two rows one."""
        return (self.cluster, self.profile.fingerprint, self.group)


#: The setter of each slot of a row, by the order of the fields.
_SETTERS: tuple[Callable[[Need, object], None], ...] = tuple(getattr(Need, slot.name).__set__ for slot in fields(Need))
_CLUSTER, _PROFILE, _AGGREGATE, _MIN_UNIT, _ARRIVAL, _GROUP, _PARKED, _FAMILIES, _SHAPES, _WAITING = _SETTERS


def new_need(
    cluster: ClusterId,
    profile: Profile,
    aggregate: Vector,
    min_unit: Vector,
    arrival_unix_nanos: int,
    group: str,
    parked: bool,
    families: Mapping[str, Family],
    shapes: tuple[DemandShape, ...] = (),
    waiting: tuple[DemandShape, ...] = (),
) -> Need:
    """Return `Need` of the same arguments in half the time: rows are made by the hundred thousand."""
    need = Need.__new__(Need)
    _CLUSTER(need, cluster)
    _PROFILE(need, profile)
    _AGGREGATE(need, aggregate)
    _MIN_UNIT(need, min_unit)
    _ARRIVAL(need, arrival_unix_nanos)
    _GROUP(need, group)
    _PARKED(need, parked)
    _FAMILIES(need, families)
    _SHAPES(need, shapes)
    _WAITING(need, waiting)
    return need


def merge_rows(rows: Iterable[Need]) -> list[Need]:
    """Merge rows of equal key, in order of first appearance.

    Aggregates are summed, min units taken by per-dimension maximum, the earliest known arrival is taken. Shapes
    and waiting pods are joined, at most `SHAPES_MAX` of each. A row without shapes says nothing of its requests, so the
    merged row has none, unless the row without them wants nothing.
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
            shapes=_joined_shapes(known, row),
            waiting=merged_upwards((*known.waiting, *row.waiting)) if known.waiting or row.waiting else (),
        )
    return list(merged.values())


def _joined_shapes(one: Need, other: Need) -> tuple[DemandShape, ...]:
    if any(row.aggregate and not row.shapes for row in (one, other)):
        return ()
    return merged_upwards((*one.shapes, *other.shapes))


class Amounts(NamedTuple):
    """What a row of shapes says in the two fields that rows without shapes have alone."""

    aggregate: Vector
    min_unit: Vector
    #: In canonical order.
    shapes: tuple[DemandShape, ...]


def amounts_of(shapes: Iterable[DemandShape], *, aggregate: Vector, min_unit: Vector) -> Amounts:
    """Return the amounts of a row: what is empty of the aggregate and the min unit follows from the shapes.

    The aggregate is the sum of all pods, the min unit the largest request in each dimension. What is given stays.
    """
    canonical = canonical_shapes(shapes)
    if not canonical:
        return Amounts(aggregate, min_unit, ())
    return Amounts(aggregate or total_of(canonical), min_unit or largest_of(canonical), canonical)
