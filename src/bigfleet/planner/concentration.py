"""Limits the share of a cluster's supply that one pool of interruptible machines provides.

A composition is computed, and pools above the limit get less stock until no pool is above it. The limit yields to pods:
a composition that would host fewer is not taken, and held machines are not exchanged.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Final

from bigfleet.planner.composition import Composition
from bigfleet.planner.problem import MachineClass, Problem

#: The limit applies from so many machines in pools: fewer cannot be divided sensibly.
_MACHINES_LEAST: Final = 10
_ROUNDS: Final = 4


def limit_pools(problem: Problem, compute: Callable[[Problem], Composition]) -> Composition:
    """Return the composition of a problem in which no pool is above `pool_percent_max`, as far as that is possible.

    Of several rounds the first within the limit counts, else the one whose largest share is the smallest. Classes
    whose `pool` is empty are not limited, nor is a pool that hosts only pods without a penalty.
    """
    answer = best = compute(problem)
    shares = pool_shares(problem, answer)
    most = Fraction(problem.pool_percent_max, 100)
    lowest = _largest(shares)
    asked = problem
    limits: set[str] = set()
    for _ in range(_ROUNDS):
        too_large = {pool: most / share for pool, share in shares.items() if share > most}
        if not too_large:
            break
        limits.update(too_large)
        changed = _with_less_stock(asked, answer, too_large)
        if changed == asked:
            break
        asked, answer = changed, compute(changed)
        if _unhosted(answer) > _unhosted(best):
            break
        shares = pool_shares(problem, answer)
        if _largest(shares) < lowest:
            best, lowest = answer, _largest(shares)
    return replace(best, limited_pools=tuple(sorted(limits)))


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


def _with_less_stock(problem: Problem, answer: Composition, parts: Mapping[str, Fraction]) -> Problem:
    """Return the problem with so much of each pool's machines as stock, the cheapest of them; held ones stay."""
    left: dict[str, int] = {}
    for pool, part in parts.items():
        members = [n for n, kind in enumerate(problem.classes) if kind.pool == pool]
        retained = sum(answer.retained[n] for n in members)
        added = sum(answer.added[n] for n in members)
        left[pool] = max(0, min(added - 1, int((retained + added) * part) - retained))
    classes: dict[int, MachineClass] = {}
    for n in sorted(range(len(problem.classes)), key=lambda n: (problem.classes[n].cost, problem.classes[n].key)):
        kind = problem.classes[n]
        if kind.pool in left:
            stock = left[kind.pool] if kind.stock is None else min(kind.stock, left[kind.pool])
            left[kind.pool] -= stock
            classes[n] = replace(kind, stock=stock)
    return replace(problem, classes=tuple(classes.get(n, kind) for n, kind in enumerate(problem.classes)))


def _largest(shares: Mapping[str, Fraction]) -> Fraction:
    return max(shares.values(), default=Fraction(0))


def _unhosted(answer: Composition) -> int:
    return sum(each.count for each in answer.unhosted)
