"""Computes a cluster's target composition."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from bigfleet.planner.admission import admit, filled
from bigfleet.planner.arena import Fleet, Int
from bigfleet.planner.composition import Composition, RunnerUp, ShapeAssignment
from bigfleet.planner.concentration import limit_pools
from bigfleet.planner.core import COMPILED, Core, Kernels
from bigfleet.planner.packing import FirstFit
from bigfleet.planner.prepare import Prepared, prepare
from bigfleet.planner.problem import BILLION, Problem
from bigfleet.planner.sample import plan_sample
from bigfleet.planner.search import Effort, FleetCandidate, Search, leader
from bigfleet.planner.starts import completed, held, kinds, leading_kinds, led_fleets, merged, within_stock

DEFAULT: Final = Effort()
#: When no other cluster waits for its plan (docs/adr/0244-small-clusters-are-planned-thoroughly.md).
THOROUGH: Final = Effort(small_rounds=4)
#: Leading types of the closed form, and the fleets that it compares.
_CLOSED_LEADERS: Final = 4
_CLOSED_SCALES: Final = (104, 109, 115, 122)
_CLOSED_FLEETS: Final = 8


def plan(problem: Problem, effort: Effort = DEFAULT, kernels: Kernels = COMPILED) -> Composition:
    """Return the composition with the least completed cost that was found.

    Every hostable pod has a claim. Without `may_exchange` all held machines stay as long as they are needed, and others
    are only added. Equal problems, in any order of their shapes and classes, give equal compositions. Raises
    ProblemFault.
    """
    problem.validate()
    return limit_pools(problem, lambda asked: _planned(asked, effort, kernels))


def _planned(problem: Problem, effort: Effort, kernels: Kernels) -> Composition:
    prepared = admit(prepare(problem, kernels))
    core = prepared.core
    if not core.parts:
        return _composition(prepared, (), np.zeros((0, 0), np.int64), (), 0)
    if int(core.count.sum()) > effort.whole:
        candidates, steps = plan_sample(core, effort, held(core))
    else:
        candidates, steps = _searched(core, effort)
    if not candidates:
        return _composition(prepared, *greedy_packing(core), (), steps)
    best = candidates[0]
    return _composition(prepared, best.fleet, FirstFit(core).pack(best.fleet).on, candidates, steps)


def closed_form(problem: Problem, kernels: Kernels = COMPILED) -> Composition:
    """Return a composition led by one type, without simulations: what stands in until a plan is there.

    Its cost depends on shapes, classes and machines, not on pods. Expected lost pods are not known and given as 0.
    Raises ProblemFault.
    """
    problem.validate()
    prepared = admit(prepare(problem, kernels))
    core = prepared.core
    if not core.parts:
        return _composition(prepared, (), np.zeros((0, 0), np.int64), (), 0)
    first_fit = FirstFit(core)
    base = held(core)
    wanted = first_fit.pack(base).left if base else core.count
    fleets: set[Fleet] = {base} if not wanted.any() else set()
    for group in leading_kinds(core, kinds(core), wanted, _CLOSED_LEADERS):
        fleets.update(merged(base, fleet) for fleet in led_fleets(core, group, wanted, _CLOSED_SCALES))
    cheapest = sorted((f for f in fleets if within_stock(core, f)), key=lambda f: (core.price(f), f))[:_CLOSED_FLEETS]
    whole = completed(core, first_fit, cheapest)
    if not whole:
        return _composition(prepared, *greedy_packing(core), (), 0)
    best = min(whole, key=lambda fleet: (core.price(fleet), fleet))
    return _composition(prepared, best, first_fit.pack(best).on, (FleetCandidate(core.price(best), best, 0),), 0)


def _searched(core: Core, effort: Effort) -> tuple[list[FleetCandidate], int]:
    """Return candidates, best first, and the steps spent."""
    search = Search(core, effort)
    base = held(core)
    wanted = search.first_fit.pack(base).left if base else core.count
    candidates = search.run(base, wanted)
    if candidates:
        candidates = search.packable_first(sorted({*candidates, *search.prune(candidates[0].fleet)}))
    return candidates, search.valuation.steps


def greedy_packing(core: Core) -> tuple[Fleet, Int]:
    """Return the greedy fleet with its own packing: what remains when no order of first-fit-decreasing fits a fleet."""
    runs = sorted(filled(core, core.count).runs, key=lambda run: run[0])
    on = np.zeros((len(core.parts), sum(times for _, times, _ in runs)), np.int64)
    at = 0
    counts: dict[int, int] = {}
    for column, times, takes in runs:
        for part, count in takes.items():
            on[part, at : at + times] = count
        counts[column] = counts.get(column, 0) + times
        at += times
    return tuple(sorted(counts.items())), on


def _composition(
    prepared: Prepared, fleet: Fleet, on: Int, candidates: Sequence[FleetCandidate], steps: int
) -> Composition:
    """Return a fleet with its packing in the terms of the problem."""
    core = prepared.core
    problem = core.problem
    retained, added = [0] * len(problem.classes), [0] * len(problem.classes)
    cost = 0
    for column, count in fleet:
        of = core.columns[column]
        (retained if of.is_held else added)[of.machine_class] += count
        cost += of.cost * count
    claims = _claims(core, fleet, on)
    led_by = leader(core, fleet) if fleet else None
    return Composition(
        retained=tuple(retained),
        added=tuple(added),
        claims=tuple(claims),
        unhosted=prepared.unhosted,
        cost=cost + sum(interruption_cost(problem, claim) for claim in claims),
        lost_millipods=candidates[0].lost_millipods if candidates else 0,
        leader="" if led_by is None else problem.classes[core.columns[led_by].machine_class].key,
        runner_up=_runner_up(core, led_by, candidates),
        steps=steps,
    )


def _runner_up(core: Core, led_by: int | None, candidates: Sequence[FleetCandidate]) -> RunnerUp | None:
    for other in candidates:
        if other.fleet and (column := leader(core, other.fleet)) != led_by:
            key = core.problem.classes[core.columns[column].machine_class].key
            return RunnerUp(key, other.value - candidates[0].value)
    return None


def _claims(core: Core, fleet: Fleet, on: Int) -> list[ShapeAssignment]:
    """Return the packing as claims on runs of machines, sorted."""
    places: list[tuple[int, int]] = []
    numbers: dict[int, int] = {}
    for column, count in fleet:
        kind = core.columns[column].machine_class
        first = numbers.get(kind, 0)
        places += [(kind, first + n) for n in range(count)]
        numbers[kind] = first + count
    shapes: dict[int, Int] = {}
    for p, part in enumerate(core.parts):
        shapes[part.shape] = shapes[part.shape] + on[p] if part.shape in shapes else on[p]
    claims: list[ShapeAssignment] = []
    for shape, counts in shapes.items():
        run: ShapeAssignment | None = None
        for machine in np.flatnonzero(counts):
            (kind, number), count = places[machine], int(counts[machine])
            if run and (run.machine_class, run.first + run.machines, run.count) == (kind, number, count):
                run = ShapeAssignment(kind, run.first, run.machines + 1, shape, count)
                claims[-1] = run
            else:
                run = ShapeAssignment(kind, number, 1, shape, count)
                claims.append(run)
    return sorted(claims)


def interruption_cost(problem: Problem, claim: ShapeAssignment) -> int:
    """Return what expected interruptions of a claim cost: probability × largest share × penalty, rounded down."""
    kind, shape = problem.classes[claim.machine_class], problem.shapes[claim.shape]
    if not kind.probability or not shape.penalty:
        return 0
    risk = kind.probability * shape.penalty
    shares = ((wants * claim.count, has) for wants, has in zip(shape.request, kind.supply, strict=True) if wants)
    most = max((risk * wants // max(1, has) for wants, has in shares), default=0)
    return claim.machines * most // BILLION
