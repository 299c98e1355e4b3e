"""Makes the results of rows that have a place for every pod, without their claims, which are read when asked for."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, fields
from itertools import repeat
from typing import Final, Protocol

from bigfleet.engine.bulk import made_at_once
from bigfleet.engine.decision import Placement, RowResult
from bigfleet.model import vector
from bigfleet.model.ids import MachineId
from bigfleet.model.need import Need


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
