"""Evaluates the CEL rules of our custom resource definitions as an API server does: with Kubernetes' quantities.

Tests that import it are skipped when the evaluator is not installed.
"""

import functools
from typing import Any

import pytest

from bigfleet.model.quantity import parse_quantity

celpy: Any = pytest.importorskip("celpy", reason="cel-python evaluates the rules of the definitions")


def _quantity(text: Any) -> Any:
    return celpy.celtypes.IntType(parse_quantity(str(text)))


def _is_less_than(left: Any, right: Any) -> Any:
    return celpy.celtypes.BoolType(left < right)


@functools.cache
def _program(rule: str) -> Any:
    environment = celpy.Environment()
    functions = {"quantity": _quantity, "isLessThan": _is_less_than}
    return environment.program(environment.compile(rule), functions=functions)


def holds(rule: str, value: Any, before: Any) -> bool:
    """Say whether a rule holds of a value, and for a transition rule of the value before. Raises CELEvalError."""
    values = {"self": celpy.json_to_cel(value)}
    if before is not None:
        values["oldSelf"] = celpy.json_to_cel(before)
    return bool(_program(rule).evaluate(values))
