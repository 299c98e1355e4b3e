"""Shares flags between commands: each is written once, as the field of a frozen dataclass.

`taking` adds the flags of such a group to a command. The command gets one object of the group, which checks and reads
them. Typer reads flags off a signature, so this module builds a signature. This module does not parse anything.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from functools import wraps
from typing import Any, ClassVar, Concatenate, ParamSpec, Protocol, TypeVar, get_type_hints


class Group(Protocol):
    """A dataclass; its annotations are those of Typer."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


G = TypeVar("G", bound=Group)
P = ParamSpec("P")
R = TypeVar("R")


def taking(
    group: type[G],
    *,
    without: tuple[str, ...] = (),
    defaults: Mapping[str, object] | None = None,
    is_first: bool = False,
) -> Callable[[Callable[Concatenate[G, P], R]], Callable[..., R]]:
    """Put the flags of a group on a command whose first parameter takes them.

    They come after the command's own, or before them with `is_first`. `without` names fields that make no sense there,
    `defaults` are the command's own.
    """
    shared = _parameters(group, without, defaults or {})

    def decorate(function: Callable[Concatenate[G, P], R]) -> Callable[..., R]:
        own = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in list(inspect.signature(function, eval_str=True).parameters.values())[1:]
        ]
        # Only the parser calls it, with what the signature below says.
        make: Callable[..., G] = group
        call: Callable[..., R] = function

        @wraps(function)
        def command(**values: Any) -> R:
            return call(make(**{name: values.pop(name) for name in shared}), **values)

        parameters = [*shared.values(), *own] if is_first else [*own, *shared.values()]
        vars(command)["__signature__"] = inspect.Signature(parameters)
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        # Typer follows this to the annotations of the function itself, which lack the group's.
        del vars(command)["__wrapped__"]
        return command

    return decorate


def _parameters(
    group: type[G], without: tuple[str, ...], defaults: Mapping[str, object]
) -> dict[str, inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    unknown = {*without, *defaults} - {field.name for field in fields(group)}
    assert not unknown, f"no flags of {group.__name__}: {sorted(unknown)}"
    return {
        field.name: inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults.get(field.name, inspect.Parameter.empty if field.default is MISSING else field.default),
            annotation=hints[field.name],
        )
        for field in fields(group)
        if field.name not in without
    }
