"""Plans very large clusters on a sample of their pods, so that the effort does not grow with them."""

from dataclasses import replace
from typing import Final

import numpy as np

from bigfleet.planner.arena import Fleet, Int
from bigfleet.planner.core import Core
from bigfleet.planner.search import Candidate, Effort, Search
from bigfleet.planner.starts import completed

#: Fleets of the sample that are multiplied back, and how much more or less of them, per mille.
_FLEETS: Final = 2
_SCALES: Final = (960, 985, 1000, 1015, 1030, 1060)
#: Machines times fleets that are simulated with all pods: memory and time grow with them.
_MACHINES: Final = 1 << 13


def plan_sample(core: Core, effort: Effort, base: Fleet) -> tuple[list[Candidate], int]:
    """Return fleets for all pods that follow the best fleets of a sample, best first, and the steps spent."""
    pods = int(core.count.sum())
    factor = max(1, -(-pods // effort.sample))
    sampled = Search(core.with_counts(thinned(core.count, factor)), effort)
    small_base = tuple((column, count // factor) for column, count in base if count >= factor)
    wanted = sampled.first_fit.pack(small_base).left if small_base else sampled.core.count
    found = sampled.run(small_base, wanted)
    whole = Search(core, replace(effort, final_orders=1))
    fleets = {
        _multiplied(core, candidate.fleet, factor * scale, base) for candidate in found[:_FLEETS] for scale in _SCALES
    }
    packed = completed(core, whole.first_fit, sorted(fleets))
    packed.sort(key=lambda fleet: (core.price(fleet), fleet))
    most = max(1, _MACHINES // max(1, max((sum(n for _, n in fleet) for fleet in packed), default=1)))
    candidates = whole.compare(packed[:most])
    return candidates, sampled.valuation.steps + whole.valuation.steps


def thinned(count: Int, factor: int) -> Int:
    """Return one in so many pods; what rounding takes from one part is given to the next."""
    total = np.cumsum(count)
    result: Int = np.diff((total + factor // 2) // factor, prepend=0)
    return result


def _multiplied(core: Core, fleet: Fleet, per_mille: int, base: Fleet) -> Fleet:
    """Return the fleet multiplied, within stock, with all of the base."""
    least = dict(base)
    counts = dict(base)
    for column, count in fleet:
        wanted = -(-count * per_mille // 1000)
        counts[column] = max(least.get(column, 0), min(wanted, int(core.stock[column])))
    return tuple(sorted((column, count) for column, count in counts.items() if count))
