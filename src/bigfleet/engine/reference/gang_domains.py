"""Compares the domains of a gang exactly, and picks one (docs/spec/aggregates.md §5.3).

A coverage is a sum of fractions sum ÷ aggregate. All domains of one row share the aggregate, so the fractions are
brought to one denominator and compared as integers. No float may ever come near this choice, and price plays no part.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction

from bigfleet.model import vector
from bigfleet.model.vector import Vector


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainOffer:
    """What one domain offers a Same row."""

    value: str
    #: Number of candidates, creditable and acquirable.
    members: int
    #: Supply of all candidates.
    total: Vector
    #: Supply of those that may be credited.
    creditable: Vector = field(default_factory=lambda: vector.ZERO)
    #: Supply of those credited that carry the row's own stamps.
    own: Vector = field(default_factory=lambda: vector.ZERO)


#: Sorts domains best first; the first element is whether the domain is unsatisfiable.
RankKey = tuple[bool, int, int, int, int, str]


class Coverage:
    """Measures sums of supply against one aggregate."""

    def __init__(self, aggregate: Vector) -> None:
        """Bring every dimension of the aggregate to the common denominator."""
        self._aggregate = aggregate
        self.denominator = math.lcm(*aggregate.values())
        self._weights = {name: self.denominator // milli for name, milli in aggregate.items()}

    def capped(self, supply: Vector) -> int:
        """Return Σ min(1, supply ÷ aggregate), in parts of the denominator."""
        return sum(min(supply.get(name, 0), self._aggregate[name]) * w for name, w in self._weights.items())

    def uncapped(self, supply: Vector) -> int:
        """Return Σ supply ÷ aggregate, in parts of the denominator."""
        return sum(supply.get(name, 0) * w for name, w in self._weights.items())

    def fraction(self, parts: int) -> Fraction:
        """Return a coverage as the fraction that it is."""
        return Fraction(parts, self.denominator)

    def rank_key(self, domain: DomainOffer) -> RankKey:
        """Return the sort key of the five rules, best domain first."""
        if vector.covers(domain.total, self._aggregate):
            first, second, third = (
                -self.capped(domain.creditable),
                -self.capped(domain.own),
                self.uncapped(domain.total),
            )
            return (False, first, second, third, -domain.members, domain.value)
        first, second, third = -self.capped(domain.total), -self.capped(domain.creditable), -self.capped(domain.own)
        return (True, first, second, third, -domain.members, domain.value)


def rank_domains(aggregate: Vector, domains: Iterable[DomainOffer]) -> list[DomainOffer]:
    """Return the domains best first; values must differ, so no tie is left."""
    return sorted(domains, key=Coverage(aggregate).rank_key)


def deciding_rule(aggregate: Vector, first: DomainOffer, second: DomainOffer) -> int:
    """Return which of the five rules put `first` before `second`."""
    coverage = Coverage(aggregate)
    left, right = coverage.rank_key(first), coverage.rank_key(second)
    if left[0] != right[0]:
        return 1
    if left[1:4] != right[1:4]:
        return 3 if left[0] else 2
    return 4 if left[4] != right[4] else 5
