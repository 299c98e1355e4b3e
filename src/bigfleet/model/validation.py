"""Compares states with the invariants of their classes, if that is switched on.

A class whose docstring states invariants has a method `validate` that checks all of its content. That costs too much
for production, so it is off by default. Tests and simulations switch it on; BIGFLEET_VALIDATE=1 does so for any
command. A broken invariant is a defect of BigFleet, never of an input.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

_is_on = False


class InvariantBroken(AssertionError):
    """A state breaks an invariant of its class; the message names both."""


class Validated(Protocol):
    """A state that can be compared with its invariants."""

    def validate(self) -> None:
        """Raise InvariantBroken when an invariant does not hold."""
        ...


def switch_validation_on() -> None:
    """Have states validated from now on, in this process."""
    global _is_on
    _is_on = True


@contextmanager
def validating() -> Iterator[None]:
    """Have states validated for the length of a block."""
    global _is_on
    before, _is_on = _is_on, True
    try:
        yield
    finally:
        _is_on = before


def validate(*states: Validated) -> None:
    """Validate states, where validation is on. Raises InvariantBroken."""
    if _is_on:
        for state in states:
            state.validate()


def ensure(holds: object, fault: str) -> None:
    """Raise InvariantBroken with a fault unless what must hold does."""
    if not holds:
        raise InvariantBroken(fault)
