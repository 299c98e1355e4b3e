"""Plans target compositions: which machines, and how many of each, one cluster should hold at the lowest cost."""

from bigfleet.planner.composition import Composition, RunnerUp, ShapeAssignment, Unhosted, UnhostedReason
from bigfleet.planner.plan import closed_form, plan
from bigfleet.planner.problem import (
    MachineClass,
    PlannerShape,
    PlannerSpread,
    PlanSettings,
    Problem,
    ProblemFault,
    SchedulerOrder,
    mask_of,
)
from bigfleet.planner.search import Effort

__all__ = [
    "ShapeAssignment",
    "Composition",
    "Effort",
    "MachineClass",
    "PlanSettings",
    "Problem",
    "ProblemFault",
    "RunnerUp",
    "SchedulerOrder",
    "PlannerShape",
    "PlannerSpread",
    "Unhosted",
    "UnhostedReason",
    "closed_form",
    "mask_of",
    "plan",
]
