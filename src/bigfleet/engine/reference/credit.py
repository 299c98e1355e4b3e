"""Credits rows with what their clusters hold: the first half of Phase 1 (docs/spec/aggregates.md §5.2, §5.3).

Bound machines and the row's own machines in creation are claimed while they are useful; a Same row chooses its one
domain here. Acquiring anything is `bigfleet.engine.reference.acquire`'s business: no Idle or Speculative machine is
ever claimed here, an earmark only keeps later gangs from counting on the same free machines.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bigfleet.engine.reference.gang_domains import DomainOffer, rank_domains
from bigfleet.engine.reference.rows import Allocations, DemandRow
from bigfleet.model import vector
from bigfleet.model.machine import Machine
from bigfleet.model.vector import Vector


def credit_plain(row: DemandRow, allocations: Allocations) -> None:
    """Claim what is bound to the cluster, then the row's own machines in creation, while something remains."""
    _claim_useful(row, allocations, allocations.pool.creditable(row.need, row.fit))


def _claim_useful(row: DemandRow, allocations: Allocations, machines: Iterable[Machine]) -> None:
    for machine in machines:
        if not row.remaining:
            return
        if machine.id not in allocations.claims and vector.is_useful(machine.supply, row.remaining):
            allocations.claim(row, machine)


@dataclass(frozen=True, slots=True)
class Candidates:
    """The machines among which a Same row chooses its domain, and the domains, best first."""

    #: Unclaimed, fitting and useful for the whole aggregate, in credit order.
    creditable: Sequence[Machine]
    #: The same among Idle, then Speculative, without those that an earlier row earmarked; empty for a parked row.
    acquirable: Sequence[Machine]
    domains: Sequence[DomainOffer]
    #: Domain value of each useful shape.
    value_of: Mapping[int, str]


def is_own(row: DemandRow, machine: Machine) -> bool:
    """Return whether the machine carries the row's fingerprint and group."""
    return machine.assigned_need_fingerprint == row.need.fingerprint and machine.assigned_group == row.need.group


def credit_same(row: DemandRow, allocations: Allocations) -> Candidates:
    """Choose the row's domain, claim its creditable members, own first, and earmark what the row will still want.

    Returns what the choice was made among. Without a domain nothing is recorded or claimed.
    """
    candidates = candidates_of(row, allocations)
    credit_domain(row, allocations, candidates)
    return candidates


def credit_domain(row: DemandRow, allocations: Allocations, candidates: Candidates) -> None:
    """Serve a Same row from the best of its domains: claim, and earmark what it will still want."""
    if not candidates.domains:
        row.satisfiable = False
        row.shapes = frozenset()
        return
    best = candidates.domains[0]
    row.domain = best.value
    row.satisfiable = vector.covers(best.total, row.need.aggregate)
    row.shapes = frozenset(n for n, value in candidates.value_of.items() if value == best.value)
    _claim_useful(row, allocations, incumbents_first(row, allocations, candidates))
    if row.remaining and not row.need.parked:
        _earmark(row, allocations, candidates)


def incumbents_first(row: DemandRow, allocations: Allocations, candidates: Candidates) -> list[Machine]:
    """Return the chosen domain's creditable members: the row's own, then the others, each in credit order.

    A machine that just finished configuring can therefore never push out one that serves the gang already.
    """
    shape_of = allocations.pool.shapes.of
    members = [machine for machine in candidates.creditable if shape_of[machine.id] in row.shapes]
    return sorted(members, key=lambda machine: not is_own(row, machine))


def candidates_of(row: DemandRow, allocations: Allocations, counts: Sequence[Counter[int]] | None = None) -> Candidates:
    """Return what a Same row chooses among on its turn.

    `counts` says how many machines of each shape there are, creditable, acquirable, and creditable with the row's
    stamps, where the allocations' pool holds only some of them.
    """
    pool, shape_of = allocations.pool, allocations.pool.shapes.of
    key = row.need.profile.same_key
    assert key is not None, "only a Same row has domains"
    value_of = pool.shapes.values(pool.shapes.useful(row.fit.shapes, row.need.aggregate), key)
    creditable = [
        machine
        for machine in pool.creditable(row.need, row.fit)
        if shape_of[machine.id] in value_of and machine.id not in allocations.claims
    ]
    acquirable: list[Machine] = []
    if not row.need.parked:
        free = (*pool.idle_fitting(row.fit), *pool.speculative_fitting(row.fit))
        acquirable = [m for m in free if shape_of[m.id] in value_of and m.id not in allocations.earmarks]
    if counts is None:
        own = [machine for machine in creditable if is_own(row, machine)]
        counts = [Counter(shape_of[machine.id] for machine in group) for group in (creditable, acquirable, own)]
    domains = _sum_by_domain(counts[0], counts[1], counts[2], value_of, allocations)
    return Candidates(creditable, acquirable, rank_domains(row.need.aggregate, domains), value_of)


def _sum_by_domain(
    creditable: Mapping[int, int],
    acquirable: Mapping[int, int],
    own: Mapping[int, int],
    value_of: Mapping[int, str],
    allocations: Allocations,
) -> list[DomainOffer]:
    """Sum supply by domain from counts by shape: there are far fewer shapes than machines."""

    def supplies(counts: Mapping[int, int]) -> dict[str, Vector]:
        sums: defaultdict[str, Vector] = defaultdict(lambda: vector.ZERO)
        for shape, count in counts.items():
            value = value_of[shape]
            sums[value] = vector.add(sums[value], vector.scale(allocations.pool.shapes.examples[shape].supply, count))
        return sums

    held, free, stamped = supplies(creditable), supplies(acquirable), supplies(own)
    members: Counter[str] = Counter()
    for counts in (creditable, acquirable):
        for shape, count in counts.items():
            members[value_of[shape]] += count
    return [
        DomainOffer(
            value=value,
            members=count,
            total=vector.add(held.get(value, vector.ZERO), free.get(value, vector.ZERO)),
            creditable=held.get(value, vector.ZERO),
            own=stamped.get(value, vector.ZERO),
        )
        for value, count in members.items()
    ]


def _earmark(row: DemandRow, allocations: Allocations, candidates: Candidates) -> None:
    shape_of = allocations.pool.shapes.of
    remaining = row.remaining
    for machine in candidates.acquirable:
        if not remaining:
            return
        if shape_of[machine.id] in row.shapes and vector.is_useful(machine.supply, remaining):
            allocations.earmarks[machine.id] = row
            remaining = vector.subtract(remaining, machine.supply)
