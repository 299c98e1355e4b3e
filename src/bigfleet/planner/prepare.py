"""Prepares a problem for planning: sets aside what cannot be hosted, places gangs, splits strict spreads.

Columns that another column replaces at no loss are dropped.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from bigfleet.planner.arena import Bool, Int
from bigfleet.planner.composition import Unhosted, UnhostedReason
from bigfleet.planner.core import PLENTY, Core, Kernels, Part, build_core, columns_of
from bigfleet.planner.gangs import domains_of, gang_domains
from bigfleet.planner.problem import PlannerSpread, Problem

#: Machines of a column that a cluster may well use up.
_FEW: Final = 8


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is planned, and what is set aside."""

    core: Core
    #: The same parts with the columns that others dominate; each hosts something.
    every_column: Core
    unhosted: tuple[Unhosted, ...]


def prepare(problem: Problem, kernels: Kernels) -> Prepared:
    """Return the core of everything that some machine can host, with the columns worth looking at."""
    columns = columns_of(problem)
    order = canonical_shapes(problem)
    core = build_core(problem, [Part(s, problem.shapes[s].count) for s in order], columns, kernels)
    hosts = [bool(row.any()) for row in core.may_claim]
    unhosted = [_reason(problem, core, p) for p in range(len(core.parts)) if not hosts[p]]
    hostable = [p for p in range(len(core.parts)) if hosts[p]]
    parts, no_domain = _confine(core, hostable)
    core = hosting(build_core(problem, parts, columns, kernels))
    return Prepared(
        core.restricted(useful_columns(core)), core, tuple(sorted((*unhosted, *no_domain), key=lambda each: each.shape))
    )


def canonical_shapes(problem: Problem) -> list[int]:
    """Return positions of shapes with pods in an order that does not depend on the caller's."""
    keys = [kind.key for kind in problem.classes]
    classes = sorted(range(len(keys)), key=lambda c: keys[c])

    def content(position: int) -> tuple[object, ...]:
        shape = problem.shapes[position]
        spread = shape.spread or PlannerSpread("", 0)
        first = (shape.rank, shape.row, shape.gang, shape.request, shape.count)
        rest = (shape.max_per_machine, shape.priority, shape.penalty, shape.is_pinned, spread.key, spread.skew)
        return (*first, *rest, sum((shape.matches >> c & 1) << n for n, c in enumerate(classes)) if ties else 0)

    ties = False
    wanted = [s for s in range(len(problem.shapes)) if problem.shapes[s].count]
    if len({content(s) for s in wanted}) < len(wanted):
        ties = True
    return sorted(wanted, key=content)


def _reason(problem: Problem, core: Core, part: int) -> Unhosted:
    """Return why no column hosts a part."""
    position = core.parts[part].shape
    shape = problem.shapes[position]
    kinds = [
        kind
        for c, kind in enumerate(problem.classes)
        if shape.matches >> c & 1 and not (shape.is_pinned and kind.probability)
    ]
    if not kinds:
        return Unhosted(position, shape.count, UnhostedReason.NO_CLASS_MATCHES)
    if any(all(wants <= has for wants, has in zip(shape.request, kind.supply, strict=True)) for kind in kinds):
        return Unhosted(position, shape.count, UnhostedReason.OUT_OF_STOCK)
    # The dimension that is exceeded most, relative to the largest machine; each may fit alone on some machine.
    largest = [max(kind.supply[d] for kind in kinds) for d in range(len(shape.request))]
    worst = max(range(len(largest)), key=lambda d: (shape.request[d] * 1000 // max(1, largest[d]), -d))
    return Unhosted(
        position,
        shape.count,
        UnhostedReason.REQUEST_TOO_LARGE,
        problem.dimensions[worst],
        shape.request[worst],
        largest[worst],
    )


def _confine(core: Core, hostable: Sequence[int]) -> tuple[list[Part], list[Unhosted]]:
    """Return the parts of hostable shapes: gangs in their domains, strict spreads split; and gangs without a domain."""
    problem = core.problem
    gangs: defaultdict[str, list[int]] = defaultdict(list)
    for p in range(len(core.parts)):
        if problem.shapes[core.parts[p].shape].gang:
            gangs[problem.shapes[core.parts[p].shape].gang].append(p)
    parts: dict[int, list[Part]] = {}
    unhosted = []
    whole = [members for members in gangs.values() if all(p in hostable for p in members)]
    domains = gang_domains(core, whole)
    for members in gangs.values():
        within = domains.get(members[0])
        for p in members:
            part = core.parts[p]
            if within is not None:
                parts[p] = [replace(part, within=within)]
            elif p in hostable:
                unhosted.append(Unhosted(part.shape, part.count, UnhostedReason.NO_DOMAIN_HOLDS_GANG))
    spreads: defaultdict[tuple[int, PlannerSpread], list[int]] = defaultdict(list)
    for p in hostable:
        shape = problem.shapes[core.parts[p].shape]
        if shape.gang:
            continue
        if shape.spread is None:
            parts[p] = [core.parts[p]]
        else:
            spreads[shape.row, shape.spread].append(p)
    for (_, spread), members in spreads.items():
        for p, shares in zip(members, _split(core, members, spread), strict=True):
            part, parts[p] = core.parts[p], shares
            missing = part.count - sum(share.count for share in shares)
            if missing:
                has_domain = bool(domains_of(core, members, spread.key))
                reason = UnhostedReason.SPREAD_HOLDS_BACK if has_domain else UnhostedReason.NO_CLASS_MATCHES
                unhosted.append(Unhosted(part.shape, missing, reason))
    return [part for p in sorted(parts) for part in parts[p]], unhosted


# ---- strict spreads ----------------------------------------------------------------------------------------------


def _split(core: Core, members: Sequence[int], spread: PlannerSpread) -> list[list[Part]]:
    """Return the shares of the parts of one row under its strict spread, by domain: the row as a whole is even.

    Domains of which nothing is held, and that have too little stock, are left out where the others host more pods
    without them. What no domain may take under the skew is in no share.
    """
    domains = domains_of(core, members, spread.key)
    wanted = core.count[list(members)]
    pods = int(wanted.sum())
    machines, fits = np.minimum(core.stock, pods), np.minimum(core.fits[list(members)], pods)
    is_held = [any(core.columns[c].is_held for c in columns) for _, columns in domains]
    rooms = [int((fits[:, columns].max(axis=0) * machines[columns]).sum()) for _, columns in domains]
    chosen = _able_domains(rooms, is_held, pods, spread.skew)
    room, most = np.zeros((len(members), len(chosen)), np.int64), np.zeros(len(chosen), np.int64)
    for n, d in enumerate(chosen):
        columns = domains[d][1]
        hosts = fits[:, columns]
        # Pods run on what is held already: what its stock suffices for is found out with the other rows.
        most[n] = pods if is_held[d] else rooms[d]
        room[:, n] = np.where(hosts.any(axis=1), pods, 0) if is_held[d] else (hosts * machines[columns]).sum(axis=1)
    counts = _levelled([int(count) for count in wanted], room, most, spread.skew)
    kinds = core.problem.classes
    within = [frozenset(c for c in range(len(kinds)) if kinds[c].domain(spread.key) == domains[d][0]) for d in chosen]
    return [
        [Part(core.parts[p].shape, int(n), where) for n, where in zip(row, within, strict=True) if n]
        for p, row in zip(members, counts, strict=True)
    ]


def _able_domains(rooms: Sequence[int], is_held: Sequence[bool], pods: int, skew: int) -> list[int]:
    """Return the domains over which so many pods are spread, ascending: those of the least room are left out first."""
    held = [d for d in range(len(rooms)) if is_held[d]]
    free = sorted((d for d in range(len(rooms)) if not is_held[d]), key=lambda d: (rooms[d], d))
    best, chosen = -1, list[int]()
    for dropped in range(len(free) + bool(held)):
        rest = [*held, *free[dropped:]]
        limit = min(rooms[d] for d in rest) + skew
        served = min(pods, sum(min(rooms[d], limit) for d in rest))
        if served > best:
            best, chosen = served, rest
        if best == pods:
            break
    return sorted(chosen)


def _levelled(wanted: Sequence[int], room: Int, most: Int, skew: int) -> Int:
    """Return how many pods of each part each domain takes, (P, D): the domain with the fewest pods goes first.

    `room` (P, D) are pods of a part, `most` (D) pods in all that a domain may take. No domain takes more than any other
    plus the skew. Parts are gone through again as long as that places a pod.
    """
    counts = np.zeros_like(room)
    left, before = list(wanted), -1
    while sum(left) not in (0, before):
        before = sum(left)
        for p in range(len(left)):
            while left[p]:
                totals = counts.sum(axis=0)
                taken = _one_level(totals, np.minimum(room[p] - counts[p], most - totals), left[p], skew)
                if not taken.any():
                    break
                counts[p] += taken
                left[p] -= int(taken.sum())
    return counts


def _one_level(totals: Int, room: Int, left: int, skew: int) -> Int:
    """Return what the domains with the fewest pods take together, up to the next level or to a limit."""
    taken = np.zeros_like(totals)
    is_open = (room > 0) & (totals < int(totals.min(initial=PLENTY)) + skew)
    if not is_open.any():
        return taken
    level = int(totals[is_open].min())
    is_lowest = is_open & (totals == level)
    lowest, others = np.flatnonzero(is_lowest), totals[~is_lowest]
    step = min(left, int(room[lowest].min()))
    if len(others):
        step = min(step, int(others.min()) + skew - level)
    above = totals[(room > 0) & (totals > level)]
    if len(above):
        step = min(step, int(above.min()) - level)
    each, rest = divmod(left, len(lowest))
    if step <= each:
        taken[lowest] = step
    else:
        taken[lowest] = each
        taken[lowest[:rest]] += 1
    return taken


# ---- columns worth looking at -------------------------------------------------------------------------------------


def hosting(core: Core) -> Core:
    """Return the core without the columns on which none of its pods may run.

    Such a machine is of no use. If it is paid for anyway, it could be planned by chance, because its number in the
    fleet decides how the scheduler breaks ties, and other clusters would lack it.
    """
    return core.restricted([int(c) for c in np.flatnonzero(core.may_run.any(axis=0))])


def useful_columns(core: Core) -> list[int]:
    """Return the columns that no other column dominates, ascending.

    A column is dominated when another one costs no more, hosts every part that it hosts, has at least its supply as far
    as demand can use it, has no more of a scarce dimension unless it is cheaper, and is not about to run out. Held
    machines neither dominate nor are dominated: they are there. Among equal columns the first one stays.
    """
    order = sorted(range(len(core.columns)), key=lambda c: (int(core.cost[c]), c))
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
    column, or nearly so, is the exception. Where few would, all of them. The caller looks at all columns when what is
    left does not suffice.
    """
    fits = np.maximum(core.fits, 1)
    machines = np.where(core.may_claim, -(-core.count[:, None] // fits), 0).sum(axis=0)
    result: Int = np.maximum(-(-machines // 8), np.clip(machines, 1, _FEW))
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
