"""Reduces the plan of a failing run while the same invariant fails.

Fewer faults, clusters, replicas, kinds of pods, pools and machines, and a shorter run: each reduction is tried in turn
and stays if the run fails as before (docs/spec/simulation.md). A smaller plan is another world with other draws, so a
reduction after which the run passes is only undone. It must never take another failure for the one that was asked
about.
"""

from collections.abc import Callable, Iterator

import msgspec

from bigfleet.sim.plan_generator import WorldPlan
from bigfleet.sim.world.run import WorldResult, run_plan

#: Runs that one shrinking may take.
RUNS_MAX = 200


class NothingFails(Exception):
    """The plan holds every invariant, so there is nothing to make smaller; the message names its seed."""


def shrink(
    plan: WorldPlan,
    *,
    runs_max: int = RUNS_MAX,
    run: Callable[[WorldPlan], WorldResult] = run_plan,
    on_run: Callable[[int, WorldPlan, bool], None] = lambda _number, _plan, _fails: None,
) -> WorldResult:
    """Return the result of the smallest plan that was found to fail in the invariant in which `plan` fails first.

    Raises NothingFails when the plan does not fail at all. `on_run` takes each attempt, and whether it failed the same.
    """
    best = run(plan)
    if not best.violations:
        raise NothingFails(f"seed {plan.seed} fails in nothing")
    wanted = best.violations[0].invariant
    number, is_better = 0, True
    while is_better:
        is_better = False
        for smaller in _smaller(best.plan, at_seconds=best.violations[0].at_nanos / 1e9):
            if number >= runs_max:
                return best
            number += 1
            result = run(smaller)
            fails = any(violation.invariant == wanted for violation in result.violations)
            on_run(number, smaller, fails)
            if fails:
                best, is_better = result, True
                break
    return best


def _smaller(plan: WorldPlan, *, at_seconds: float) -> Iterator[WorldPlan]:
    """Yield plans that are one step smaller, the largest steps first."""
    if at_seconds < plan.safety_seconds * 0.8:
        yield msgspec.structs.replace(plan, safety_seconds=at_seconds + 1.0)
    half = len(plan.faults) // 2
    if half:
        yield msgspec.structs.replace(plan, faults=plan.faults[:half])
        yield msgspec.structs.replace(plan, faults=plan.faults[half:])
    for place in range(len(plan.faults)):
        yield msgspec.structs.replace(plan, faults=_without(plan.faults, place))
    if len(plan.clusters) > 1:
        for place in range(len(plan.clusters)):
            homes = _without(plan.homes, place) if plan.homes else ()
            yield msgspec.structs.replace(plan, clusters=_without(plan.clusters, place), homes=homes)
    if plan.replicas > 1:
        yield msgspec.structs.replace(plan, replicas=plan.replicas - 1)
    if len(plan.pools) > 1:
        for place in range(len(plan.pools)):
            yield msgspec.structs.replace(plan, pools=_without(plan.pools, place))
    for place, kinds in enumerate(plan.clusters):
        for gone in range(len(kinds)):
            if len(kinds) > 1:
                clusters = (*plan.clusters[:place], _without(kinds, gone), *plan.clusters[place + 1 :])
                yield msgspec.structs.replace(plan, clusters=clusters)
    for place, pool in enumerate(plan.pools):
        if pool.count > 1:
            fewer = msgspec.structs.replace(pool, count=pool.count // 2)
            yield msgspec.structs.replace(plan, pools=(*plan.pools[:place], fewer, *plan.pools[place + 1 :]))


def _without(items: tuple[object, ...], place: int) -> tuple:  # type: ignore[type-arg]
    return (*items[:place], *items[place + 1 :])
