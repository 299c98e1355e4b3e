"""Assesses fleets: whether all pods fit, what they cost, and what the scheduler would lose."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bigfleet.planner.arena import Fleet
from bigfleet.planner.core import COMPILED, Kernels
from bigfleet.planner.packing import FirstFit
from bigfleet.planner.prepare import prepare
from bigfleet.planner.problem import Problem
from bigfleet.planner.valuation import Valuation

#: Orders of the scheduler's queue, other ones than those in which the planner chooses.
_ORDERS: Final = range(200_000, 200_008)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetAssessment:
    """What one fleet is worth."""

    #: Price and expected interruptions of a packing, nano-dollars per hour each.
    price: int
    interruptions: int
    #: Pods without a place in the scheduler's order on average, in thousandths of a pod.
    lost_millipods: int

    @property
    def cost(self) -> int:
        """Return the sum of both costs, nano-dollars per hour."""
        return self.price + self.interruptions


class FleetAssessor:
    """Assesses fleets of one problem; which machines are held does not matter."""

    def __init__(self, problem: Problem, kernels: Kernels = COMPILED) -> None:
        """Prepare the problem. Raises ProblemFault."""
        problem.validate()
        core = prepare(problem, kernels).every_column
        self._core = core
        self._first_fit = FirstFit(core)
        self._valuation = Valuation(core)
        self._columns = {(column.machine_class, column.is_held): c for c, column in enumerate(core.columns)}

    def assess(self, held: Sequence[int], added: Sequence[int]) -> FleetAssessment | None:
        """Return what so many held and added machines of each class are worth.

        None if not every pod has a place there in as many orders of packing as the planner asks of a composition: it
        would add machines to such a fleet.
        """
        if not len(self._core.parts):
            price = sum(self._core.problem.classes[c].held_cost * count for c, count in enumerate(held))
            price += sum(self._core.problem.classes[c].cost * count for c, count in enumerate(added))
            return FleetAssessment(price=price, interruptions=0, lost_millipods=0)
        counts = {(c, True): count for c, count in enumerate(held)} | {(c, False): n for c, n in enumerate(added)}
        fleet: Fleet = tuple(sorted((self._columns[where], count) for where, count in counts.items() if count))
        if not fleet:
            return None
        packed = self._first_fit.pack(fleet)
        if packed.left.any() or not self._first_fit.fits(fleet):
            return None
        _, lost = self._valuation.values([fleet], _ORDERS)
        return FleetAssessment(
            price=sum(self._core.columns[c].cost * count for c, count in fleet),
            interruptions=self._core.interruptions(fleet, packed.on),
            lost_millipods=lost[0],
        )
