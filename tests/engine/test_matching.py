"""Matching by shape answers as matching machine by machine does (docs/spec/model.md §9)."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.engine.matching import Shapes, fits, matches
from bigfleet.model import vector
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need
from bigfleet.model.profile import Operator, Requirement
from tests.strategies import RACK, machines, needs


@st.composite
def some_machines(draw: st.DrawFn) -> list[Machine]:
    return [draw(machines(f"m{n}")) for n in range(draw(st.integers(1, 8)))]


@given(some_machines(), needs())
def test_a_shape_fits_when_each_of_its_machines_does(fleet: Sequence[Machine], need: Need) -> None:
    shapes = Shapes(fleet)

    fit = shapes.fit(need.profile, need.min_unit)

    for machine in fleet:
        shape = shapes.of[machine.id]
        assert (shape in shapes.matching(need.profile)) == matches(need.profile, machine)
        assert (shape in fit.shapes) == fits(need.profile, need.min_unit, machine)
        assert (shape in shapes.useful(fit.shapes, need.aggregate)) == (
            fits(need.profile, need.min_unit, machine) and vector.is_useful(machine.supply, need.aggregate)
        )


@given(some_machines())
def test_a_shape_has_one_value_of_an_attribute(fleet: Sequence[Machine]) -> None:
    shapes = Shapes(fleet)

    values = shapes.values(frozenset(shapes.of.values()), RACK)

    assert {m.id: values.get(shapes.of[m.id]) for m in fleet} == {m.id: m.attribute(RACK) for m in fleet}


@given(needs())
def test_equal_questions_get_the_same_answer_object(need: Need) -> None:
    shapes = Shapes([Machine(id=MachineId("m"), state=0)])  # type: ignore[arg-type]

    assert shapes.fit(need.profile, need.min_unit) is shapes.fit(need.profile, dict(need.min_unit))


@pytest.mark.parametrize(
    ("operator", "values", "holds"),
    [
        (Operator.IN, ("a", "b"), {"a"}),
        (Operator.IN, (), set()),
        (Operator.NOT_IN, ("a", "b"), {"", "c", None}),
        (Operator.NOT_IN, (), {"a", "", "c", None}),
        (Operator.EXISTS, (), {"a", "", "c"}),
        (Operator.DOES_NOT_EXIST, (), {None}),
        (Operator.SAME, (), {"a", "", "c"}),
        (Operator.SAME, ("a",), {"a"}),
        (Operator.UNSPECIFIED, ("a",), set()),
    ],
)
def test_an_operator_holds_for_these_values_and_no_others(
    operator: Operator, values: tuple[str, ...], holds: set[str | None]
) -> None:
    requirement = Requirement("k", operator, values)

    assert {value for value in ("a", "", "c", None) if requirement.holds(value)} == holds
