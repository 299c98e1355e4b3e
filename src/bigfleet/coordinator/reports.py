"""Defines the part of a shard's report that a rebalancing pass works on.

docs/spec/wire.md §10. `prepared` does once per report what each pass would otherwise repeat: it groups capacity by type
and zone, sorts shortfalls, and finds the shard's rows that its own shortfalls need. This module does not read a clock.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import count

import numpy as np
from numpy.typing import NDArray

from bigfleet.model import labels, vector
from bigfleet.model.ids import ShardId
from bigfleet.model.ownership import Base, Reservation
from bigfleet.model.profile import Requirement
from bigfleet.model.shard_report import CapacityCount, Shortfall
from bigfleet.model.vector import Vector

#: Dimensions of a deficit that a pass compares for many shortfalls at once; one with more is looked at by itself.
DIMENSIONS_COMPARED = 4
#: Larger amounts, milli-units, are looked at one by one: products of them would not fit 64 bits.
_COMPARED_MAX = 2**53


@dataclass(frozen=True, slots=True)
class ZoneCapacity:
    """Machines of one instance type and zone, of any capacity type, that could be given away."""

    instance_type: str
    zone: str
    count: int
    #: Smallest among them, per dimension, milli-units; a dimension that one of them lacks is absent.
    allocatable: Vector


@dataclass(frozen=True, slots=True, eq=False)
class ShortfallClass:
    """What many shortfalls have in common: machines that serve one of them serve all. Equal ones are one object."""

    #: The requirements that a type and a zone can answer; the rest is left to the donor.
    gate: tuple[Requirement, ...]
    min_unit: Vector
    #: The dimensions that are short.
    names: frozenset[str]
    #: Distinguishes it from all others in this process; nothing is ordered by it.
    serial: int

    def is_served_by(self, row: ZoneCapacity) -> bool:
        """Return whether a row serves it (§7.1): accepted, large enough, and of use in a dimension that is short."""
        return (
            accepts(self.gate, row.instance_type, row.zone)
            and vector.covers(row.allocatable, self.min_unit)
            and not self.names.isdisjoint(row.allocatable)
        )


_serials = count()


@lru_cache(maxsize=65_536)
def _asking(
    gate: tuple[Requirement, ...], min_unit: tuple[tuple[str, int], ...], names: frozenset[str]
) -> ShortfallClass:
    return ShortfallClass(gate, dict(min_unit), names, next(_serials))


def asking_of(shortfall: Shortfall) -> ShortfallClass:
    """Return the requirements of a shortfall."""
    gate = tuple(r for r in shortfall.requirements if r.key in (labels.INSTANCE_TYPE, labels.ZONE))
    return _asking(gate, vector.vector_key(shortfall.min_unit), frozenset(shortfall.deficit))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardFigures:
    """One shard as a rebalancing pass sees it; built by `prepared`."""

    shard_id: ShardId
    provider_address: str
    base: Base
    #: False: received too long ago, no input to any decision.
    is_fresh: bool
    #: Priority descending, age descending, fingerprint ascending.
    shortfalls: tuple[Shortfall, ...]
    #: Of each shortfall: what it asks for, its priority, its age, and whether Same binds it.
    askings: tuple[ShortfallClass, ...]
    priorities: NDArray[np.int64]
    ages: NDArray[np.int64]
    is_bound: NDArray[np.bool_]
    serials: NDArray[np.int64]
    #: One row for each, names ascending, DIMENSIONS_COMPARED columns; -1 in all of them where it has more names.
    deficits: NDArray[np.int64]
    #: Summed over capacity types, by type and zone; one row for each pair.
    idle: tuple[ZoneCapacity, ...]
    speculative: tuple[ZoneCapacity, ...]
    #: Idle ones only, by id.
    ready: tuple[Reservation, ...]
    #: The (type, zone) of those rows that a shortfall of this shard, of any age, could use itself.
    idle_wanted_here: frozenset[tuple[str, str]]
    speculative_wanted_here: frozenset[tuple[str, str]]
    #: Machines of each type that are neither idle nor speculative, where no shortfall of this shard could use the type.
    drainable: Mapping[str, int]
    #: The other types.
    types_wanted_here: frozenset[str]


def prepared(
    *,
    shard_id: ShardId,
    provider_address: str,
    base: Base,
    is_fresh: bool = True,
    shortfalls: Iterable[Shortfall] = (),
    idle: Iterable[CapacityCount | ZoneCapacity] = (),
    speculative: Iterable[CapacityCount | ZoneCapacity] = (),
    type_counts: Mapping[str, int] | None = None,
    ready: Iterable[Reservation] = (),
) -> ShardFigures:
    """Return a report as passes use it. Rows of one type and zone are summed, their allocatable is the smallest."""
    ordered = sorted(shortfalls, key=lambda s: (-s.priority, -s.age_cycles, s.fingerprint))
    askings = tuple(asking_of(shortfall) for shortfall in ordered)
    idle_rows, speculative_rows = _summed(idle), _summed(speculative)
    own = set(askings)
    counts = type_counts or {}
    wanted_types = _wanted_types(counts, own)
    return ShardFigures(
        shard_id=shard_id,
        provider_address=provider_address,
        base=base,
        is_fresh=is_fresh,
        shortfalls=tuple(ordered),
        askings=askings,
        priorities=np.array([shortfall.priority for shortfall in ordered], np.int64),
        ages=np.array([shortfall.age_cycles for shortfall in ordered], np.int64),
        is_bound=np.array([shortfall.is_topology_constrained for shortfall in ordered], np.bool_),
        serials=np.array([asking.serial for asking in askings], np.int64),
        deficits=np.array([_columns(shortfall.deficit) for shortfall in ordered], np.int64).reshape(
            -1, DIMENSIONS_COMPARED
        ),
        idle=idle_rows,
        speculative=speculative_rows,
        ready=tuple(sorted(ready, key=lambda reservation: reservation.machine_id)),
        idle_wanted_here=_wanted(idle_rows, own),
        speculative_wanted_here=_wanted(speculative_rows, own),
        drainable=_drainable(counts, (*idle_rows, *speculative_rows), wanted_types),
        types_wanted_here=wanted_types,
    )


def _columns(deficit: Vector) -> tuple[int, ...]:
    milli = tuple(deficit[name] for name in sorted(deficit))
    if len(milli) > DIMENSIONS_COMPARED or max(milli, default=0) > _COMPARED_MAX:
        return (-1,) * DIMENSIONS_COMPARED
    return milli + (0,) * (DIMENSIONS_COMPARED - len(milli))


@lru_cache(maxsize=65_536)
def accepts(gate: tuple[Requirement, ...], instance_type: str, zone: str | None) -> bool:
    """Return whether machines of that type and zone meet the requirements on both; a zone of None is any zone."""
    for requirement in gate:
        if requirement.key == labels.INSTANCE_TYPE:
            if not requirement.holds(instance_type or None):
                return False
        elif zone is not None and not requirement.holds(zone or None):
            return False
    return True


def _wanted(rows: Iterable[ZoneCapacity], askings: Iterable[ShortfallClass]) -> frozenset[tuple[str, str]]:
    return frozenset(
        (row.instance_type, row.zone) for row in rows if any(asking.is_served_by(row) for asking in askings)
    )


def _wanted_types(counts: Iterable[str], askings: Iterable[ShortfallClass]) -> frozenset[str]:
    gates = {tuple(r for r in asking.gate if r.key == labels.INSTANCE_TYPE) for asking in askings}
    return frozenset(name for name in counts if any(accepts(gate, name, None) for gate in gates))


def _drainable(counts: Mapping[str, int], free: Iterable[ZoneCapacity], wanted: frozenset[str]) -> dict[str, int]:
    bound = Counter(counts)
    for row in free:
        bound[row.instance_type] -= row.count
    return {name: count for name, count in bound.items() if count > 0 and name not in wanted}


def _summed(rows: Iterable[CapacityCount | ZoneCapacity]) -> tuple[ZoneCapacity, ...]:
    by_kind: dict[tuple[str, str], ZoneCapacity] = {}
    for row in rows:
        kind = (row.instance_type, row.zone)
        known = by_kind.get(kind)
        if known is None:
            by_kind[kind] = ZoneCapacity(*kind, row.count, row.allocatable)
            continue
        smallest = {
            name: min(milli, row.allocatable[name])
            for name, milli in known.allocatable.items()
            if name in row.allocatable
        }
        by_kind[kind] = ZoneCapacity(*kind, known.count + row.count, smallest)
    return tuple(by_kind[kind] for kind in sorted(by_kind))
