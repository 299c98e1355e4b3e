"""The result of a row that was credited on columns reads and compares as any other result."""

from dataclasses import fields, replace

import pytest

from bigfleet.engine.decision import Placement, RowResult
from bigfleet.engine.shapes.columns.results import complete_rows
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.need import Need
from bigfleet.model.profile import Profile
from bigfleet.model.shapes import DemandShape

SHAPES = (DemandShape({"cpu": 2000, "memory": 5}, 3), DemandShape({"cpu": 1000}, 2))
NEED = Need(ClusterId("c"), Profile(priority=100), {"cpu": 8000, "memory": 15}, shapes=SHAPES)


class _Claims:
    """Claims that count how often they are asked for."""

    def __init__(self) -> None:
        self.asked = 0

    def machines_of(self, row: int) -> tuple[MachineId, ...]:
        """Return one machine."""
        self.asked += 1
        return (MachineId(f"m{row}"),)

    def placements_of(self, row: int) -> tuple[Placement, ...]:
        """Return one claim."""
        self.asked += 1
        return (Placement(MachineId(f"m{row}"), 0, 3),)


def _made(claims: _Claims, row: int) -> RowResult:
    return complete_rows([NEED], claims, [row])[0]


def _plain(row: int) -> RowResult:
    return RowResult(
        need=NEED,
        members=(NEED,),
        claimed=(MachineId(f"m{row}"),),
        held={"cpu": 8000, "memory": 15},
        placements=(Placement(MachineId(f"m{row}"), 0, 3),),
    )


def test_it_equals_a_result_of_the_same_fields_and_no_other() -> None:
    assert _made(_Claims(), 1) == _plain(1)
    assert _plain(1) == _made(_Claims(), 1)
    assert _made(_Claims(), 1) != _plain(2)
    assert _plain(2) != _made(_Claims(), 1)
    other: object = 1
    assert _made(_Claims(), 1) != other
    assert all(getattr(_made(_Claims(), 1), each.name) == getattr(_plain(1), each.name) for each in fields(RowResult))


def test_claims_are_found_when_they_are_asked_for_and_once() -> None:
    claims = _Claims()
    made = _made(claims, 1)
    assert made.satisfied
    assert not made.bootstraps
    assert claims.asked == 0
    assert made.claimed == made.claimed == (MachineId("m1"),)
    assert claims.asked == 1


def test_it_is_replaced_as_any_other() -> None:
    made = _made(_Claims(), 1)
    assert replace(made, satisfiable=False) == replace(_plain(1), satisfiable=False)
    assert replace(made, members=()).claimed == (MachineId("m1"),)


def test_what_it_does_not_have_is_an_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'machines'"):
        _ = _made(_Claims(), 1).machines  # type: ignore[attr-defined]
