"""Limits the share of a cluster's supply that one pool of interruptible machines provides.

A composition is computed, and pools above the limit get less stock until no pool is above it. The limit yields to pods:
a composition that would host fewer is not taken, and held machines are not exchanged.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Final

from bigfleet.planner.composition import Composition
from bigfleet.planner.problem import MachineClass, Problem

#: The limit applies from so many machines in pools: fewer cannot be divided sensibly.
_MACHINES_LEAST: Final = 10
_ROUNDS: Final = 4
#: A composition that costs little more than the cheapest without the limit is not improved.
_CLOSE: Final = Fraction(103, 100)
#: Machines are whole: a share that is so much above the limit counts as within it, if ...
_NEAR: Final = Fraction(11, 10)
#: ... no composition strictly within it costs less than so many times as much.
_EXPENSIVE: Final = Fraction(105, 100)


def limit_pools(problem: Problem, compute: Callable[[Problem], Composition]) -> Composition:
    """Return the composition of a problem in which no pool is above `pool_percent_max`, as far as that is possible.

    The cheapest round within the limit counts. One that is a tenth above it at most counts where the limit costs more
    than a twentieth; without either, the round whose largest share is the smallest. Classes whose `pool` is empty are
    not limited, nor is a pool that hosts only pods without a penalty.
    """
    answer = compute(problem)
    unlimited, fewest = _completed(problem, answer), _unhosted(answer)
    limit = Fraction(problem.pool_percent_max, 100)
    rounds: list[tuple[Fraction, Composition]] = []
    asked = problem
    limits: dict[str, int] = {}
    while _unhosted(answer) <= fewest:
        shares = pool_shares(problem, answer)
        largest = max(shares.values(), default=Fraction(0))
        rounds.append((largest, answer))
        if len(rounds) > _ROUNDS or (largest <= limit and _completed(problem, answer) <= _CLOSE * unlimited):
            break
        limits |= _changes(problem, answer, shares, limits)
        changed = _with_stock(problem, answer, limits)
        if changed == asked:
            break
        asked, answer = changed, compute(changed)
    return replace(_chosen(problem, rounds), limited_pools=tuple(sorted(limits)))


def _chosen(problem: Problem, rounds: Sequence[tuple[Fraction, Composition]]) -> Composition:
    limit = Fraction(problem.pool_percent_max, 100)
    strict = [answer for share, answer in rounds if share <= limit]
    near = [answer for share, answer in rounds if share <= _NEAR * limit]
    if not near:
        return min(rounds, key=lambda each: each[0])[1]
    cheapest, *others = (min(some, key=lambda each: _completed(problem, each)) for some in (near, strict) if some)
    most = _EXPENSIVE * _completed(problem, cheapest)
    return next((answer for answer in others if _completed(problem, answer) <= most), cheapest)


def pool_shares(problem: Problem, answer: Composition) -> dict[str, Fraction]:
    """Return the share of the supply that each limited pool provides; empty where the limit does not apply.

    It is the largest over the dimensions that pods with a penalty request. `pods` does not count: how many pods a
    machine may host says little about its size.
    """
    if not problem.pool_percent_max:
        return {}
    counts, classes = answer.counts, problem.classes
    if sum(count for kind, count in zip(classes, counts, strict=True) if kind.pool) < _MACHINES_LEAST:
        return {}
    concerned = [bool(shape.penalty) and not shape.is_pinned for shape in problem.shapes]
    names = enumerate(problem.dimensions)
    shapes = [shape for shape, is_concerned in zip(problem.shapes, concerned, strict=True) if is_concerned]
    wanted = [d for d, name in names if name != "pods" and any(shape.request[d] for shape in shapes)]
    pools: defaultdict[str, list[int]] = defaultdict(lambda: [0] * len(wanted))
    total = [0] * len(wanted)
    for kind, count in zip(classes, counts, strict=True):
        for n, d in enumerate(wanted):
            total[n] += kind.supply[d] * count
            if kind.pool:
                pools[kind.pool][n] += kind.supply[d] * count
    hosting = {classes[claim.machine_class].pool for claim in answer.claims if concerned[claim.shape]}
    shares = {}
    for pool in hosting & pools.keys():
        parts = zip(pools[pool], total, strict=True)
        shares[pool] = max((Fraction(part, whole) for part, whole in parts if whole), default=Fraction(0))
    return shares


def _changes(
    problem: Problem, answer: Composition, shares: Mapping[str, Fraction], limits: Mapping[str, int]
) -> dict[str, int]:
    """Return the limits to try next: lower ones for pools above the limit, else higher ones for pools without stock."""
    limit = Fraction(problem.pool_percent_max, 100)
    counts = {pool: _machines(problem, answer.counts, pool) for pool in shares}
    most = {pool: int(counts[pool] * limit / share) for pool, share in shares.items() if share}
    above = [pool for pool, count in most.items() if counts[pool] > count]
    if above:
        return {pool: most[pool] for pool in above}
    scarce = [pool for pool, count in limits.items() if counts.get(pool) == count]
    return {pool: (counts[pool] + most[pool] + 1) // 2 for pool in scarce}


def _with_stock(problem: Problem, answer: Composition, limits: Mapping[str, int]) -> Problem:
    """Return the problem with so many machines of each pool, held ones first, which stay, then the cheapest."""
    left = {pool: max(0, limit - _machines(problem, answer.retained, pool)) for pool, limit in limits.items()}
    classes: dict[int, MachineClass] = {}
    for n in sorted(range(len(problem.classes)), key=lambda n: (problem.classes[n].cost, problem.classes[n].key)):
        kind = problem.classes[n]
        if kind.pool in left:
            stock = left[kind.pool] if kind.stock is None else min(kind.stock, left[kind.pool])
            left[kind.pool] -= stock
            classes[n] = replace(kind, stock=stock)
    return replace(problem, classes=tuple(classes.get(n, kind) for n, kind in enumerate(problem.classes)))


def _machines(problem: Problem, counts: Sequence[int], pool: str) -> int:
    return sum(count for kind, count in zip(problem.classes, counts, strict=True) if kind.pool == pool)


def _completed(problem: Problem, answer: Composition) -> Fraction:
    """Return the cost with that of lost pods, each of which counts as the average pod."""
    return answer.cost * (1 + Fraction(answer.lost_millipods, 1000 * max(1, problem.pods)))


def _unhosted(answer: Composition) -> int:
    return sum(each.count for each in answer.unhosted)
