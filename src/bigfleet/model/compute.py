"""Defines how a flow runs a pure function off its event loop, or inline where time is virtual."""

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Compute(Protocol):
    """Runs a pure function off the loop, or inline where time is virtual, and returns its result."""

    def __call__(self, work: Callable[[], T]) -> Awaitable[T]: ...


async def compute_inline(work: Callable[[], T]) -> T:
    """Run the work on the spot: for tests and the simulation, where no thread may exist."""
    return work()
