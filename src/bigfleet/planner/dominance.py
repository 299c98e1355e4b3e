"""Drops columns that another column replaces at no loss."""

import numpy as np

from bigfleet.planner.core import PLENTY, Core
from bigfleet.planner.simulate import Bool, Int


def useful_columns(core: Core) -> list[int]:
    """Return the columns that host something and that no other column dominates, ascending.

    A column is dominated when another one costs no more, hosts every part that it hosts, has at least its supply as far
    as demand can use it, has no more of a scarce dimension unless it is cheaper, and is not about to run out. Held
    machines neither dominate nor are dominated: they are there. Among equal columns the first one stays.
    """
    order = sorted(
        (c for c in range(len(core.columns)) if core.may_run[:, c].any()),
        key=lambda c: (int(core.cost[c]), c),
    )
    chosen = np.array(order, np.int64)
    if not len(chosen):
        return []
    cost = core.cost[chosen]
    supply = np.minimum(core.supply[chosen], core.demand)
    scarce = scarce_supply(core)[chosen]
    is_held = np.array([core.columns[c].is_held for c in order], np.bool_)
    # What is paid for anyway is limited by nature: it replaces nothing that can be bought beside it.
    is_bought = np.array([core.columns[c].cost > 0 or core.columns[c].stock >= PLENTY for c in order], np.bool_)
    never_short = is_bought & (core.stock[chosen] >= _plenty(core)[chosen])
    replaces = (never_short & ~is_held)[:, None] & ~is_held[None, :]
    replaces &= cost[:, None] <= cost[None, :]
    for d in range(supply.shape[1]):
        replaces &= supply[:, None, d] >= supply[None, :, d]
    is_cheaper = cost[:, None] < cost[None, :]
    for d in range(scarce.shape[1]):
        replaces &= is_cheaper | (scarce[:, None, d] <= scarce[None, :, d])
    for hosts in (core.may_run[:, chosen], core.may_claim[:, chosen]):
        words = _words(hosts)
        for word in words.T:
            replaces &= (word[None, :] & ~word[:, None]) == 0
    # Of columns that replace each other the one that comes first stays.
    mutual = replaces & replaces.T
    first = np.arange(len(order))
    replaces &= ~mutual | (first[:, None] < first[None, :])
    np.fill_diagonal(replaces, False)
    return sorted(int(c) for c in chosen[~replaces.any(axis=0)])


def _plenty(core: Core) -> Int:
    """Return the stock from which a column counts as one that cannot run out, (C).

    One in eight of the machines that would host every part alone, each part on machines of its own: a fleet of one
    column, or nearly so, is the exception. The caller looks at all columns when what is left does not suffice.
    """
    fits = np.maximum(core.fits, 1)
    machines = np.where(core.may_claim, -(-core.count[:, None] // fits), 0).sum(axis=0)
    result: Int = np.maximum(-(-machines // 8), 1)
    return result


def scarce_supply(core: Core) -> Int:
    """Return the supply of the dimensions that some parts do not ask for, 0 for the others, (C, D)."""
    if not len(core.parts):
        return core.supply
    is_scarce = (core.request == 0).any(axis=0)
    return np.where(is_scarce[None, :], core.supply, 0)


def _words(hosts: Bool) -> Int:
    """Return the parts that each column hosts as bits of 64-bit words, (C, W)."""
    packed = np.packbits(hosts.T, axis=1)
    padding = -packed.shape[1] % 8
    return np.pad(packed, ((0, 0), (0, padding))).view(np.int64)
