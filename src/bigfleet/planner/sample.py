"""Plans very large clusters on a sample of their pods, so that the effort does not grow with them."""

from dataclasses import replace
from typing import Final

import numpy as np

from bigfleet.planner.arena import Fleet, Int
from bigfleet.planner.core import PLENTY, Core
from bigfleet.planner.packing import PLACING, FirstFit, fractions
from bigfleet.planner.search import Effort, FleetCandidate, Search
from bigfleet.planner.starts import completed, is_held, merged, packable

#: Fleets of the sample that are multiplied back, and how much more or less of them, per mille.
_FLEETS: Final = 2
_SCALES: Final = (960, 980, 1000, 1020, 1040, 1060, 1100)
#: Machines times fleets that are simulated with all pods, and fleets: memory and time grow with them.
_MACHINES: Final = 1 << 13
_COMPARED: Final = 12
#: Fleets that are completed for the usual number of orders, and fleets of which machines are dropped again.
_COMPLETED: Final = 5
_TRIMMED: Final = 2
#: Orders of first-fit-decreasing that have to place every pod where the usual number costs so much more, per mille.
_PLACING_LEAST: Final = 2
_DEARER: Final = 1020
#: Machines times pods times rounds of moves with all pods.
_POLISHED: Final = 3_000_000


def plan_sample(core: Core, effort: Effort, base: Fleet) -> tuple[list[FleetCandidate], int]:
    """Return fleets for all pods that follow the best fleets of a sample, best first, and the steps spent."""
    pods = int(core.count.sum())
    factor = max(1, -(-pods // effort.sample))
    stock = _thinned_stock(core, factor)
    sampled = Search(core.with_counts(_thinned_pods(core, factor)).with_stock(stock), effort)
    small_base = tuple((column, int(stock[column])) for column, _ in base if stock[column])
    wanted = sampled.first_fit.pack(small_base).left if small_base else sampled.core.count
    found = sampled.run(small_base, wanted)
    whole = Search(core, replace(effort, final_orders=1))
    fleets = {
        _multiplied(core, candidate.fleet, factor * scale, base) for candidate in found[:_FLEETS] for scale in _SCALES
    }
    packed = _packable(core, whole.first_fit, fleets)
    trimmed = [each for fleet in packed[:_TRIMMED] for each in _trimmed(core, whole.first_fit, fleet, dict(base))]
    candidates = whole.compare([*packed, *trimmed])
    if candidates:
        machines = sum(count for _, count in candidates[0].fleet)
        rounds = min(effort.rounds, _POLISHED // max(1, machines * pods))
        candidates = sorted({*candidates, *whole.improved(candidates[0].fleet, rounds)})
    return candidates, sampled.valuation.steps + whole.valuation.steps


def _packable(core: Core, first_fit: FirstFit, fleets: set[Fleet]) -> list[Fleet]:
    """Return the cheapest fleets that simple packers fill, completed where they lack machines."""
    found = packable(core, first_fit, sorted(fleets), _PLACING_LEAST)
    several = packable(core, first_fit, found[:_COMPLETED])
    if several and core.price(several[0]) * 1000 <= core.price(found[0]) * _DEARER:
        found = several
    elif not found:
        found = completed(core, first_fit, sorted(fleets))
    machines = max((sum(n for _, n in fleet) for fleet in found), default=1)
    return found[: max(1, min(_COMPARED, _MACHINES // max(1, machines)))]


def _trimmed(core: Core, first_fit: FirstFit, fleet: Fleet, least: dict[int, int]) -> list[Fleet]:
    """Return the fleet with fewer machines of the dearest columns, as few as the orders need that place everything."""
    numbers = first_fit.placing(fleet)[:PLACING]
    found: list[Fleet] = []
    counts = dict(fleet)
    if not numbers:
        return found
    for column in sorted(counts, key=lambda c: (-int(core.cost[c]) * counts[c], c)):
        low, high = least.get(column, 0), counts[column]
        while low < high:
            middle = (low + high) // 2
            fewer = merged(tuple({**counts, column: middle}.items()))
            if fewer and first_fit.placing(fewer, numbers) == numbers:
                high = middle
            else:
                low = middle + 1
        counts[column] = high
        found.append(merged(tuple(counts.items())))
    return [each for each in dict.fromkeys(found) if first_fit.fits(each, len(numbers))][-_COMPARED:]


def thinned(count: Int, factor: int) -> Int:
    """Return one in so many; what rounding takes from one entry is given to the next."""
    total = np.cumsum(count)
    result: Int = np.diff((total + factor // 2) // factor, prepend=0)
    return result


def _thinned_pods(core: Core, factor: int) -> Int:
    """Return one in so many pods, (P): of parts that run on the same columns, evenly over their sizes."""
    shares = fractions(core.request, core.demand)
    kinds: dict[bytes, int] = {}
    kind = [kinds.setdefault(row.tobytes(), len(kinds)) for row in core.may_run]
    order = np.lexsort((shares.sum(axis=1), shares.argmax(axis=1), kind))
    count = np.zeros_like(core.count)
    count[order] = thinned(core.count[order], factor)
    return count


def _thinned_stock(core: Core, factor: int) -> Int:
    """Return one in so many machines of each column, held ones and others apart; what is plenty stays so."""
    stock, held = core.stock.copy(), is_held(core).astype(np.bool_)
    for some in (held, ~held & (stock < PLENTY)):
        stock[some] = thinned(stock[some], factor)
    return stock


def _multiplied(core: Core, fleet: Fleet, per_mille: int, base: Fleet) -> Fleet:
    """Return the fleet multiplied, within stock, with all of the base."""
    least = dict(base)
    counts = dict(base)
    for column, count in fleet:
        wanted = -(-count * per_mille // 1000)
        counts[column] = max(least.get(column, 0), min(wanted, int(core.stock[column])))
    return merged(tuple(counts.items()))
