"""Ranking domains: integers over one denominator compare as fractions do (docs/spec/aggregates.md §5.3)."""

from fractions import Fraction
from functools import cmp_to_key
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from bigfleet.engine.reference.gang_domains import DomainOffer, deciding_rule, rank_domains
from bigfleet.model import vector
from bigfleet.model.vector import Vector

amounts = st.integers(1, 40) | st.integers(1, 10**22)
aggregates = st.dictionaries(st.sampled_from("abc"), amounts, min_size=1)
vectors = st.dictionaries(st.sampled_from("abcd"), amounts)


@st.composite
def domain_lists(draw: st.DrawFn) -> list[DomainOffer]:
    values = draw(st.lists(st.sampled_from("uvwxyz"), unique=True, max_size=5))
    return [
        DomainOffer(
            value=value,
            members=draw(st.integers(1, 3)),
            total=draw(vectors),
            creditable=draw(vectors),
            own=draw(vectors),
        )
        for value in values
    ]


def coverage(supply: Vector, aggregate: Vector, *, capped: bool) -> Fraction:
    ratios = (Fraction(supply.get(name, 0), milli) for name, milli in aggregate.items())
    return sum((min(ratio, Fraction(1)) if capped else ratio for ratio in ratios), Fraction(0))


def first_difference(aggregate: Vector, left: DomainOffer, right: DomainOffer) -> tuple[int, int]:
    """Return the rule that decides, and −1 when it is for `left`; written as the specification says it."""

    def capped(domain: DomainOffer, name: str) -> Fraction:
        return coverage(getattr(domain, name), aggregate, capped=True)

    satisfiable = [vector.covers(domain.total, aggregate) for domain in (left, right)]
    if satisfiable[0] != satisfiable[1]:
        return 1, -1 if satisfiable[0] else 1
    names = ("creditable", "own") if satisfiable[0] else ("total", "creditable", "own")
    for name in names:
        if capped(left, name) != capped(right, name):
            return (2 if satisfiable[0] else 3), -1 if capped(left, name) > capped(right, name) else 1
    slack = [coverage(domain.total, aggregate, capped=False) for domain in (left, right)]
    if satisfiable[0] and slack[0] != slack[1]:
        return 2, -1 if slack[0] < slack[1] else 1
    if left.members != right.members:
        return 4, -1 if left.members > right.members else 1
    return 5, -1 if left.value < right.value else 1


@given(aggregates, domain_lists())
def test_domains_are_ranked_by_the_first_rule_that_differs(aggregate: Vector, domains: list[DomainOffer]) -> None:
    def compare(left: DomainOffer, right: DomainOffer) -> int:
        return first_difference(aggregate, left, right)[1]

    ranked = rank_domains(aggregate, domains)

    expected = sorted(domains, key=cmp_to_key(compare))
    assert ranked == expected
    for better, worse in pairwise(ranked):
        assert deciding_rule(aggregate, better, worse) == first_difference(aggregate, better, worse)[0]
