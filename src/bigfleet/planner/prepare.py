"""Prepares a problem for planning: sets aside what cannot be hosted, places gangs, and splits strict spreads."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bigfleet.planner.composition import Unhosted, UnhostedReason
from bigfleet.planner.core import Core, Part, build_core, columns_of
from bigfleet.planner.dominance import useful_columns
from bigfleet.planner.greedy import cheapest_fill
from bigfleet.planner.kernels import Kernels
from bigfleet.planner.problem import Problem, Spread


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is planned, and what is set aside."""

    core: Core
    #: The same parts with the columns that others dominate.
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
    core = build_core(problem, parts, columns, kernels)
    return Prepared(
        core.restricted(useful_columns(core)), core, tuple(sorted((*unhosted, *no_domain), key=lambda each: each.shape))
    )


def canonical_shapes(problem: Problem) -> list[int]:
    """Return positions of shapes with pods in an order that does not depend on the caller's."""
    keys = [kind.key for kind in problem.classes]
    classes = sorted(range(len(keys)), key=lambda c: keys[c])

    def content(position: int) -> tuple[object, ...]:
        shape = problem.shapes[position]
        spread = shape.spread or Spread("", 0)
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
    left = {c: column.stock for c, column in enumerate(core.columns)}
    # In order of first appearance: by rank, as the parts are.
    for members in gangs.values():
        whole = all(p in hostable for p in members)
        within = _gang_domain(core, members, left) if whole else None
        for p in members:
            part = core.parts[p]
            if within is not None:
                parts[p] = [replace(part, within=within)]
            elif p in hostable:
                unhosted.append(Unhosted(part.shape, part.count, UnhostedReason.NO_DOMAIN_HOLDS_GANG))
    offsets: defaultdict[int, int] = defaultdict(int)
    for p in hostable:
        shape = problem.shapes[core.parts[p].shape]
        if shape.gang:
            continue
        if shape.spread is None:
            parts[p] = [core.parts[p]]
        else:
            parts[p] = _split(core, p, shape.spread.key, offsets)
            if not parts[p]:
                unhosted.append(Unhosted(core.parts[p].shape, shape.count, UnhostedReason.NO_CLASS_MATCHES))
    return [part for p in sorted(parts) for part in parts[p]], unhosted


def _gang_domain(core: Core, members: Sequence[int], left: dict[int, int]) -> frozenset[int] | None:
    """Return the classes of the domain that hosts a whole gang at the least cost; lower the stock by its machines."""
    key = core.problem.shapes[core.parts[members[0]].shape].same_key
    best: tuple[int, str, dict[int, int]] | None = None
    for domain, columns in _domains(core, members, key):
        stock = {c: left[c] for c in columns}
        found = cheapest_fill(core, members, stock)
        if found is None:
            continue
        cost = sum(int(core.cost[c]) * count for c, count in found.items())
        if best is None or (cost, domain) < best[:2]:
            best = (cost, domain, found)
    if best is None:
        return None
    for c, count in best[2].items():
        left[c] -= count
    kinds = core.problem.classes
    return frozenset(c for c in range(len(kinds)) if kinds[c].domain(key) == best[1])


def _split(core: Core, part: int, key: str, offsets: defaultdict[int, int]) -> list[Part]:
    """Return the shares of a strict spread: even over the domains that can host it.

    The larger shares of a row's shapes begin where those of its shape before ended, so the row as a whole is even, too.
    """
    whole, kinds = core.parts[part], core.problem.classes
    row = core.problem.shapes[whole.shape].row
    domains = _domains(core, [part], key)
    if not domains:
        return []
    base, rest = divmod(whole.count, len(domains))
    shares = []
    for n, (domain, _) in enumerate(domains):
        count = base + ((n - offsets[row]) % len(domains) < rest)
        if count:
            within = frozenset(c for c in range(len(kinds)) if kinds[c].domain(key) == domain)
            shares.append(Part(whole.shape, count, within))
    offsets[row] += rest
    return shares


def _domains(core: Core, parts: Iterable[int], key: str) -> list[tuple[str, list[int]]]:
    """Return the values of a topology key by name, with the columns that host at least one of the parts."""
    usable = core.may_claim[list(parts)].any(axis=0)
    found: defaultdict[str, list[int]] = defaultdict(list)
    for c in np.flatnonzero(usable):
        value = core.problem.classes[core.columns[c].machine_class].domain(key)
        if value is not None:
            found[value].append(int(c))
    return sorted(found.items())
