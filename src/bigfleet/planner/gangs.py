"""Chooses the domains of gangs: together they cost the least that a few orders of assignment find.

A gang joins the domain in which hosting it beside the gangs that are there adds the least cost; of equal domains the
one where most stock remains, because a domain that is nearly used up hosts its gangs only if they are packed in one
way. Which gang comes first matters: several orders are tried, and the cheapest of those that leave the fewest gangs of
high precedence without a domain counts.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bigfleet.planner.core import Core
from bigfleet.planner.greedy import cheapest_fill

#: (topology key, value).
_Domain = tuple[str, str]


class _Assigned(NamedTuple):
    """Domains of gangs, by their place; the least is the best."""

    #: Ranks of the gangs without a domain, negative: the highest precedence that lacks one counts first.
    unhosted: tuple[int, ...]
    cost: int
    order: int
    domains: dict[int, str]


def gang_domains(core: Core, gangs: Sequence[Sequence[int]]) -> dict[int, frozenset[int]]:
    """Return the classes of each gang's domain, by the first of its parts; gangs without a domain are left out."""
    if not gangs:
        return {}
    sizes = [_size(core, members) for members in gangs]
    ranks = [core.problem.shapes[core.parts[members[0]].shape].rank for members in gangs]
    orders = [
        sorted(range(len(gangs)), key=lambda g: (-sizes[g], g)),
        sorted(range(len(gangs)), key=lambda g: (ranks[g], g)),
    ]
    found = min(
        (_Assigning(core, gangs, ranks).assigned(order, n) for n, order in enumerate(orders)), key=lambda each: each[:3]
    )
    kinds = core.problem.classes
    result = {}
    for g, value in found.domains.items():
        key = _key(core, gangs[g])
        result[gangs[g][0]] = frozenset(c for c in range(len(kinds)) if kinds[c].domain(key) == value)
    return result


def _key(core: Core, members: Sequence[int]) -> str:
    return core.problem.shapes[core.parts[members[0]].shape].same_key


def _size(core: Core, members: Sequence[int]) -> float:
    """Return the largest share of the whole demand that a gang takes in any dimension."""
    amounts = (core.request[list(members)] * core.count[list(members)][:, None]).sum(axis=0)
    return float((amounts / np.maximum(core.demand, 1)).max(initial=0.0))


class _Assigning:
    """Assigns gangs to domains, one after the other."""

    def __init__(self, core: Core, gangs: Sequence[Sequence[int]], ranks: Sequence[int]) -> None:
        self._core, self._gangs, self._ranks = core, gangs, ranks
        #: Parts in each domain, and the machines that host them alone, by column.
        self._parts: defaultdict[_Domain, list[int]] = defaultdict(list)
        self._machines: defaultdict[_Domain, Mapping[int, int]] = defaultdict(dict)

    def assigned(self, order: Iterable[int], number: int) -> _Assigned:
        """Return the domains that the gangs get in an order."""
        domains: dict[int, str] = {}
        unhosted = []
        for g in order:
            value = self._join(self._gangs[g])
            if value is None:
                unhosted.append(self._ranks[g])
            else:
                domains[g] = value
        cost = sum(self._cost(machines) for machines in self._machines.values())
        return _Assigned(tuple(-rank for rank in sorted(unhosted)), cost, number, domains)

    def _join(self, members: Sequence[int]) -> str | None:
        """Let a gang join the domain where it adds the least cost, and return that; None where none holds it."""
        core, key = self._core, _key(self._core, members)
        best: tuple[tuple[int, int, str], dict[int, int]] | None = None
        for value, columns in domains_of(core, members, key):
            domain = (key, value)
            stock = self._stock(domain, columns)
            machines = cheapest_fill(core, [*self._parts[domain], *members], stock)
            if machines is None:
                continue
            left = sum(stock.values()) - sum(machines.values())
            rank = (self._cost(machines) - self._cost(self._machines[domain]), -left, value)
            if best is None or rank < best[0]:
                best = rank, machines
        if best is None:
            return None
        domain = (key, best[0][2])
        self._parts[domain] += members
        self._machines[domain] = best[1]
        return domain[1]

    def _stock(self, domain: _Domain, columns: Sequence[int]) -> dict[int, int]:
        """Return what a domain has of its columns beside the machines of domains of other keys."""
        used: defaultdict[int, int] = defaultdict(int)
        for other, machines in self._machines.items():
            if other != domain:
                for column, count in machines.items():
                    used[column] += count
        everything = {*columns, *self._machines[domain]}
        return {c: self._core.columns[c].stock - used[c] for c in sorted(everything)}

    def _cost(self, machines: Mapping[int, int]) -> int:
        return sum(int(self._core.cost[c]) * count for c, count in machines.items())


def domains_of(core: Core, parts: Iterable[int], key: str) -> list[tuple[str, list[int]]]:
    """Return the values of a topology key by name, with the columns that host at least one of the parts."""
    usable = core.may_claim[list(parts)].any(axis=0)
    found: defaultdict[str, list[int]] = defaultdict(list)
    for c in np.flatnonzero(usable):
        value = core.problem.classes[core.columns[c].machine_class].domain(key)
        if value is not None:
            found[value].append(int(c))
    return sorted(found.items())
