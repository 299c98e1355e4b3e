"""Declares the inner loops of the planner, which have a fast and a plain form."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from bigfleet.planner.simulate import Fleet, Int

if TYPE_CHECKING:
    from bigfleet.planner.core import Core


class Kernels(Protocol):
    """The loops over pods and machines; both forms give equal answers."""

    def simulate(self, core: "Core", fleets: Sequence[Fleet], queues: Sequence[Int]) -> Int:
        """Return the pods of each part that the scheduler leaves over, by fleet and queue, (F, O, P)."""
        ...

    def place(self, core: "Core", columns: Int, orders: Sequence[Sequence[int]], keep: bool) -> tuple[Int, Int]:
        """Return what first-fit leaves (R, P) and, if asked, what it places (R, P, M) on the machines of each row."""
        ...

    def patterns(self, core: "Core", pending: Sequence[int], left: Int, usable: Int, supply: Int) -> Int:
        """Return how many pods of each pending part an empty machine of each usable column takes in turn, (P', C')."""
        ...
