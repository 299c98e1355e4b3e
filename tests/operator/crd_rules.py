"""Evaluates the CEL rules of our custom resource definitions as an API server does: with Kubernetes' quantities."""

import functools
from collections.abc import Callable
from typing import Any

import celpy
from celpy.adapter import json_to_cel

from bigfleet.model.quantity import parse_quantity


def _quantity(text: Any) -> Any:
    return celpy.celtypes.IntType(parse_quantity(str(text)))


def _is_less_than(left: Any, right: Any) -> Any:
    return celpy.celtypes.BoolType(left < right)


@functools.cache
def _program(rule: str) -> Any:
    environment = celpy.Environment()
    functions: dict[str, Callable[..., Any]] = {"quantity": _quantity, "isLessThan": _is_less_than}
    return environment.program(environment.compile(rule), functions=functions)


def holds(rule: str, value: Any, before: Any) -> bool:
    """Return whether a rule holds of a value, and for a transition rule of the value before. Raises CELEvalError."""
    values = {"self": json_to_cel(value)}
    if before is not None:
        values["oldSelf"] = json_to_cel(before)
    return bool(_program(rule).evaluate(values))
