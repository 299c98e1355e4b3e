"""Decides which pods the stock suffices for, by precedence."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bigfleet.planner.arena import Int
from bigfleet.planner.composition import Unhosted, UnhostedReason
from bigfleet.planner.core import PLENTY, Core
from bigfleet.planner.greedy import Filled, fill, least_prices, size_order
from bigfleet.planner.packing import FirstFit
from bigfleet.planner.prepare import Prepared, hosting
from bigfleet.planner.starts import held


def filled(core: Core, wanted: Int) -> Filled:
    """Return a greedy fill of so many pods of each part, held machines included.

    Where it leaves pods, parts that few machines host come first, if that leaves fewer.
    """
    prices = least_prices(core, core.cost)
    order = size_order(core, [int(p) for p in np.flatnonzero(wanted)])
    found = fill(core, order, wanted, core.stock, core.cost, prices, core.supply)
    if not found.left.any():
        return found
    hosts = core.may_claim @ np.minimum(core.stock, PLENTY >> 20)
    order.sort(key=lambda p: int(hosts[p]))
    other = fill(core, order, wanted, core.stock, core.cost, prices, core.supply)
    return min(found, other, key=lambda one: int(one.left.sum()))


def admit(prepared: Prepared) -> Prepared:
    """Return what the stock suffices for; the rest is set aside as out of stock, lowest precedence first.

    When the columns worth looking at do not suffice, all columns take part. A greedy fill does not find room for all
    that held machines host in some order of packing, and the search begins with these.
    """
    if not filled(prepared.core, prepared.core.count).left.any():
        return prepared
    core = prepared.every_column
    if not filled(core, core.count).left.any() or _held_suffice(core):
        return replace(prepared, core=core)
    admitted = np.zeros(len(core.parts), np.int64)
    ranks = np.array([core.problem.shapes[part.shape].rank for part in core.parts], np.int64)
    for rank in np.unique(ranks):
        admitted += _admitted_of_rank(core, admitted, np.flatnonzero(ranks == rank).tolist())
    short = core.count - admitted
    reason = UnhostedReason.OUT_OF_STOCK
    missing: dict[int, int] = {}
    for p in np.flatnonzero(short):
        missing[core.parts[p].shape] = missing.get(core.parts[p].shape, 0) + int(short[p])
    unhosted = (*prepared.unhosted, *(Unhosted(shape, count, reason) for shape, count in missing.items()))
    places = [p for p in range(len(core.parts)) if admitted[p]]
    return replace(
        prepared,
        core=hosting(core.with_parts(places, admitted)),
        unhosted=tuple(sorted(unhosted, key=lambda each: each.shape)),
    )


def _held_suffice(core: Core) -> bool:
    base = held(core)
    return bool(base) and not FirstFit(core).pack(base).left.any()


def _admitted_of_rank(core: Core, before: Int, members: Sequence[int]) -> Int:
    """Return the pods of one rank that find room beside those admitted before."""
    chosen = np.zeros(len(core.parts), np.int64)
    chosen[members] = core.count[members]
    while chosen.any():
        left = filled(core, before + chosen).left
        if not left.any():
            break
        lower = np.minimum(left, chosen)
        if not lower.any():
            # Room that was found for a higher rank is not found beside this one: it yields, smallest first.
            last = max(np.flatnonzero(chosen), key=lambda p: (int(core.request[p].max()), int(p)))
            lower[last] = chosen[last]
        chosen -= lower
        for gang in {core.problem.shapes[core.parts[p].shape].gang for p in np.flatnonzero(lower)} - {""}:
            chosen[[p for p, part in enumerate(core.parts) if core.problem.shapes[part.shape].gang == gang]] = 0
    return chosen
