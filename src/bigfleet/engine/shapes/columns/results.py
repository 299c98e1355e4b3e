"""Makes the results of rows when they are read; those of rows with a place for every pod without their claims."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import MISSING, fields
from functools import partial
from itertools import repeat
from typing import Final, Protocol

from bigfleet.engine.bulk import made_at_once
from bigfleet.engine.decision import ParkingKey, Placement, RowResult
from bigfleet.engine.deferred import Deferred
from bigfleet.engine.parking import with_members_of
from bigfleet.model import vector
from bigfleet.model.ids import MachineId
from bigfleet.model.need import Need, RowKey


class RowClaims(Protocol):
    """Where the pods of rows have their places."""

    def machines_of(self, row: int) -> tuple[MachineId, ...]:
        """Return the machines of a row, in hosting order."""
        ...

    def placements_of(self, row: int) -> tuple[Placement, ...]:
        """Return the claims of a row, by machine in hosting order, then in the order of the row's groups."""
        ...


class CompleteRow(RowResult):
    """The result of a row of which every pod has a place; equal to a `RowResult` of the same fields."""

    __slots__ = ("_claims", "_row")

    _claims: RowClaims
    _row: int

    def __getattr__(self, name: str) -> object:
        # Python asks for slots that are not set here.
        find = _LATER.get(name)
        if find is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = find(self)
        getattr(CompleteRow, name).__set__(self, value)
        return value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RowResult):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in _NAMES)

    __hash__ = RowResult.__hash__


_NAMES: Final = tuple(field.name for field in fields(RowResult))


def _held(result: CompleteRow) -> vector.Vector:
    need = result.need
    return vector.sum_of([(shape.resources, shape.count) for shape in (*need.shapes, *need.waiting)])


_LATER: Final[dict[str, Callable[[CompleteRow], object]]] = {
    "claimed": lambda result: result._claims.machines_of(result._row),
    "placements": lambda result: result._claims.placements_of(result._row),
    "held": _held,
}
#: What the others have in common.
_EQUAL: Final[dict[str, object]] = {
    field.name: vector.ZERO if field.default is MISSING else field.default
    for field in fields(RowResult)
    if field.name not in ("need", "members", *_LATER)
}


def complete_rows(needs: Sequence[Need], claims: RowClaims, rows: Iterable[int]) -> Sequence[RowResult]:
    """Return the results of rows, of which `claims` knows the numbers given."""
    slots: dict[str, Iterable[object]] = {name: repeat(value) for name, value in _EQUAL.items()}
    slots.update(need=needs, members=zip(needs), _claims=repeat(claims), _row=rows)
    return made_at_once(CompleteRow, len(needs), slots)


#: Rows with their places in a demand.
PlacedRows = Sequence[tuple[int, Need]]


class CompleteRows(Deferred[RowResult]):
    """The results of a cluster's rows, of which every pod has a place; made when the first one is read."""


class PodRows(Deferred[RowResult]):
    """One result per row of the demand; those of clusters that were credited on columns are made when they are read."""

    __slots__ = ("_ages", "_demand", "_parts", "_results")

    def __init__(
        self,
        demand: Sequence[Need],
        results: Mapping[int, RowResult],
        parts: Sequence[tuple[PlacedRows, Sequence[RowResult]]],
        ages: Mapping[ParkingKey, int],
    ) -> None:
        """Make nothing.

        `results` are by the place of the row in the demand; each of `parts` has rows with their places, and the results
        of these rows.
        """
        # Not a method of its own: in a cycle of references, the columns would outlive their use.
        super().__init__(len(demand), partial(_all_results, demand, results, parts, ages))
        self._demand, self._results, self._parts, self._ages = demand, results, parts, ages

    def with_members_of(self, demand: Sequence[Need], ages: Mapping[ParkingKey, int]) -> "PodRows":
        """Return the same results for rows of which other gangs may be parked."""
        if not ages and not self._ages:
            return self
        return PodRows(demand, self._results, self._parts, ages)

    def short(self, also: Set[RowKey] = frozenset()) -> Sequence[RowResult]:
        """Return all and only the rows that Phase 1 left short, and those with the keys `also`, in list order."""
        if also or self._ages:
            return [result for result in self if not result.satisfied or result.need.key in also]
        found = dict(self._results)
        for rows, results in self._parts:
            if not isinstance(results, CompleteRows):
                found.update(zip([place for place, _ in rows], results, strict=True))
        return [found[place] for place in sorted(found) if not found[place].satisfied]


def _all_results(
    demand: Sequence[Need],
    results: Mapping[int, RowResult],
    parts: Sequence[tuple[PlacedRows, Sequence[RowResult]]],
    ages: Mapping[ParkingKey, int],
) -> tuple[RowResult, ...]:
    found = dict(results)
    for rows, of_cluster in parts:
        found.update(zip([place for place, _ in rows], of_cluster, strict=True))
    return with_members_of(demand, [found[place] for place in range(len(demand))], ages)
