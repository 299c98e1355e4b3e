"""Computes a lower bound of the cost of a plan's acquisitions by linear relaxation (docs/planning.md).

The relaxation covers, for each row, as much as the plan newly covers, from the same idle and offered machines. It may
take fractions of machines and ignores these rules: idle before offered, order of rows, domains, spreads. The gap
between plan and bound is therefore the cost of whole machines and of these rules together. The bound never changes the
plan.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bigfleet.cli.plan.planning import FleetPlan
from bigfleet.cli.runtime.failures import RunFault, UsageFault
from bigfleet.engine.decision import RowResult
from bigfleet.engine.matching import Shapes
from bigfleet.engine.reference.pool import is_set_aside, is_sold_out
from bigfleet.engine.reference.rows import supply_of
from bigfleet.model import vector
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.penalty import bucket_upper_dollars
from bigfleet.model.states import MachineState
from bigfleet.model.vector import Vector

CLASSES_MAX: Final = 5_000
#: Pairs of a row and a class that fits it: the columns of the program.
PAIRS_MAX: Final = 1_000_000
SOLVE_SECONDS_MAX: Final = 60.0

#: Machines of one class are equal in all that the program sees: type, zone, labels, supply, price, probability.
_ClassKey = tuple[str, str, frozenset[tuple[str, str]], frozenset[tuple[str, int]], float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostBound:
    """The cost of the machines that a plan newly takes, and the lower bound of that cost."""

    #: Effective cost: prices and expected interruptions; for pinned rows the price alone.
    ours_usd_per_hour: float
    least_usd_per_hour: float
    rows: int
    classes: int

    @property
    def gap(self) -> float:
        """By which share of the bound the plan is above it; 0 when both are 0."""
        above = max(0.0, self.ours_usd_per_hour - self.least_usd_per_hour)
        return above / self.least_usd_per_hour if self.least_usd_per_hour else (math.inf if above else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """What one row newly covers, and the machines with which the plan does it."""

    row: RowResult
    covered: Vector
    taken: frozenset[MachineId]


def bound_of(plan: FleetPlan) -> CostBound:
    """Return the bound of a plan. Raises UsageFault without scipy or for a plan that is too big, RunFault otherwise."""
    solve = _solver()
    wanted = [want for row in plan.decision.rows if (want := _wanted(row, plan)).covered]
    free = [
        machine
        for state in (MachineState.IDLE, MachineState.SPECULATIVE)
        for machine in plan.snapshot.of_state(state)
        if machine.id not in plan.options.unjoined
        and machine.id not in plan.options.reserved
        and not is_sold_out(machine, plan.options)
        and not is_set_aside(machine, plan.options)
    ]
    counts = Counter(_class_of(machine) for machine in free)
    if len(counts) > CLASSES_MAX:
        raise UsageFault(f"--bound: {len(counts):,} classes of machines, at most {CLASSES_MAX:,} are bounded")
    if not wanted:
        return CostBound(ours_usd_per_hour=0.0, least_usd_per_hour=0.0, rows=0, classes=len(counts))
    examples = {_class_of(machine): machine for machine in free}
    classes = list(examples)
    program = _Program([examples[key] for key in classes], [counts[key] for key in classes])
    ours = []
    for want in wanted:
        taken = [plan.snapshot.machines[machine_id] for machine_id in sorted(want.taken)]
        program.add_row(want, used={_class_of(machine) for machine in taken})
        ours += [_cost(want.row, machine) for machine in taken]
    if not all(math.isfinite(cost) for cost in ours):
        raise UsageFault("--bound: the plan takes a machine of unbounded price, which cannot be compared with a bound")
    return CostBound(
        ours_usd_per_hour=math.fsum(ours),
        least_usd_per_hour=program.solved(solve),
        rows=len(wanted),
        classes=len(classes),
    )


def _class_of(machine: Machine) -> _ClassKey:
    return (
        machine.instance_type,
        machine.zone,
        frozenset(machine.labels.items()),
        frozenset(machine.supply.items()),
        machine.price_usd_per_hour,
        machine.interruption_probability,
    )


def _wanted(row: RowResult, plan: FleetPlan) -> _Wanted:
    taken = frozenset((*row.bootstraps, *row.provisions))
    credited = supply_of(plan.snapshot.machines[machine_id] for machine_id in row.claimed if machine_id not in taken)
    acquired = supply_of(plan.snapshot.machines[machine_id] for machine_id in taken)
    open_before = vector.subtract(row.need.aggregate, credited)
    covered = {name: min(milli, acquired[name]) for name, milli in open_before.items() if acquired.get(name, 0)}
    return _Wanted(row=row, covered=covered, taken=taken)


def _cost(row: RowResult, machine: Machine) -> float:
    """Return the effective cost; the price alone where the penalty is unbounded, so that sums stay finite."""
    dollars = bucket_upper_dollars(row.need.profile.interruption_bucket)
    return machine.effective_cost_usd_per_hour(dollars) if math.isfinite(dollars) else machine.price_usd_per_hour


def _is_offered(row: RowResult, machine: Machine, *, is_used: bool) -> bool:
    """Return whether the program may give the class to the row; what the plan uses it always may."""
    if not math.isfinite(machine.price_usd_per_hour):
        return is_used
    is_unbounded = math.isinf(machine.cost_for_bucket_usd_per_hour(row.need.profile.interruption_bucket))
    return is_used or not is_unbounded


class _Program:
    """Columns are pairs of a row and a class; rows cover what is wanted, and use no class beyond its count."""

    def __init__(self, examples: Sequence[Machine], counts: Sequence[int]) -> None:
        self._examples = examples
        self._counts = counts
        self._shapes = Shapes(examples)
        #: Classes of each shape, ascending.
        self._classes_of: defaultdict[int, list[int]] = defaultdict(list)
        for number, machine in enumerate(examples):
            self._classes_of[self._shapes.of[machine.id]].append(number)
        self._costs: list[float] = []
        #: Columns of each class.
        self._columns_of_class: defaultdict[int, list[int]] = defaultdict(list)
        #: Coefficients by column of every constraint that covers one dimension of one row, scaled to cover 1.
        self._covers: list[Mapping[int, float]] = []

    def add_row(self, want: _Wanted, *, used: set[_ClassKey]) -> None:
        """Add a row of demand with every class that fits it; `used` are the classes that the plan takes for it."""
        need = want.row.need
        covers: dict[str, dict[int, float]] = {name: {} for name in want.covered}
        shapes = self._shapes.useful(self._shapes.fit(need.profile, need.min_unit).shapes, want.covered)
        for number in (number for shape in sorted(shapes) for number in self._classes_of[shape]):
            machine = self._examples[number]
            if not _is_offered(want.row, machine, is_used=_class_of(machine) in used):
                continue
            column = len(self._costs)
            if column == PAIRS_MAX:
                raise UsageFault(f"--bound: more than {PAIRS_MAX:,} pairs of a row and a class; bound a smaller plan")
            self._costs.append(_cost(want.row, machine))
            self._columns_of_class[number].append(column)
            for name, milli in want.covered.items():
                if name in machine.supply:
                    covers[name][column] = machine.supply[name] / milli
        self._covers += covers.values()

    def solved(self, solve: Any) -> float:
        """Return the least cost, $/h."""
        from scipy.sparse import csr_array

        limits = list(self._columns_of_class.items())
        entries = [(row, column, -value) for row, cover in enumerate(self._covers) for column, value in cover.items()]
        first = len(self._covers)
        entries += [(first + place, column, 1.0) for place, (_, columns) in enumerate(limits) for column in columns]
        rows, columns, values = zip(*entries, strict=True)
        matrix = csr_array((values, (rows, columns)), shape=(first + len(limits), len(self._costs)))
        right = [-1.0] * first + [float(self._counts[number]) for number, _columns in limits]
        answer = solve(self._costs, A_ub=matrix, b_ub=right, method="highs", options={"time_limit": SOLVE_SECONDS_MAX})
        if answer.status != 0:
            raise RunFault(f"--bound: the solver failed ({' '.join(str(answer.message).split())})")
        return float(answer.fun)


def _solver() -> Any:
    try:
        from scipy.optimize import linprog
    except ImportError as error:
        raise UsageFault(
            "--bound needs scipy, which is not installed; run make setup in a checkout, or pip install 'scipy>=1.15'"
        ) from error
    return linprog
