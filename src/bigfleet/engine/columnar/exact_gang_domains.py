"""Chooses a gang's domain with unbounded integers, for the rows whose coverages do not fit the kernels' (§5.3).

The same question to the same function that the reference engine asks. This module must not claim or earmark anything.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping

from bigfleet.engine.columnar.arrays import FREE, NO_DOMAIN, BoundMachines, FleetArrays, Gangs, Rows, Work
from bigfleet.engine.reference.gang_domains import DomainOffer, rank_domains
from bigfleet.model import vector
from bigfleet.model.vector import Vector


def choose_exactly(
    row: int,
    *,
    aggregate: Vector,
    supplies: list[Vector],
    values: list[str],
    fleet: FleetArrays,
    bound: BoundMachines,
    rows: Rows,
    gangs: Gangs,
    work: Work,
) -> tuple[int, bool]:
    """Return the row's best domain, NO_DOMAIN when there is none, and whether it is satisfiable."""
    key, pair, cluster = rows.key[row], rows.pair[row], int(rows.cluster[row])
    held: defaultdict[int, Counter[int]] = defaultdict(Counter)
    own: defaultdict[int, Counter[int]] = defaultdict(Counter)
    free: defaultdict[int, Counter[int]] = defaultdict(Counter)
    candidates = list(range(bound.start[cluster], bound.creating[cluster]))
    for segment in {cluster, 0}:
        creating = range(bound.creating[segment], bound.stop[segment])
        candidates += [place for place in creating if bound.pairs[place] == pair]
    for place in candidates:
        shape = bound.shapes[place]
        supply, domain = int(fleet.supply_of[shape]), int(fleet.domain_of[key, shape])
        if bound.held[place] != FREE or domain == NO_DOMAIN or not fleet.fits[rows.fit[row], shape]:
            continue
        if not fleet.helps[supply] & rows.mask[row]:
            continue
        held[domain][supply] += 1
        if bound.pairs[place] == pair:
            own[domain][supply] += 1
    if not rows.parked[row]:
        _count_free(free, int(rows.gang[row]), fleet, gangs, work)
    domains = [
        DomainOffer(
            value=values[domain],
            members=held[domain].total() + free[domain].total(),
            total=_sum(held[domain] + free[domain], supplies),
            creditable=_sum(held[domain], supplies),
            own=_sum(own[domain], supplies),
        )
        for domain in sorted(held.keys() | free.keys())
    ]
    if not domains:
        return NO_DOMAIN, False
    best = rank_domains(aggregate, domains)[0]
    return values.index(best.value), vector.covers(best.total, aggregate)


def _count_free(free: Mapping[int, Counter[int]], gang: int, fleet: FleetArrays, gangs: Gangs, work: Work) -> None:
    base = gangs.base[gang]
    for domain in range(gangs.base[gang + 1] - base):
        machines = gangs.machines[gangs.start[base + domain] : gangs.start[base + domain + 1]]
        left = machines[work.earmarked[machines] == 0]
        if len(left):
            free[domain].update(fleet.supply_of[fleet.shape[left]].tolist())


def _sum(counts: Counter[int], supplies: list[Vector]) -> Vector:
    total: Vector = vector.ZERO
    for supply, count in counts.items():
        total = vector.add(total, vector.scale(supplies[supply], count))
    return total
