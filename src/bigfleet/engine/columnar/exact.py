"""Chooses a gang's domain with unbounded integers, for the rows whose coverages do not fit the kernels' (§5.3).

The same question to the same function that the reference engine asks. Nothing here may claim or earmark anything.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping

from bigfleet.engine.columnar.arrays import FREE, NO_DOMAIN, Fleet, Gangs, Rows, Views, Work
from bigfleet.engine.domains import Domain, rank_domains
from bigfleet.model import vector
from bigfleet.model.vector import Vector


def choose_exactly(
    row: int,
    *,
    aggregate: Vector,
    supplies: list[Vector],
    values: list[str],
    fleet: Fleet,
    rows: Rows,
    views: Views,
    gangs: Gangs,
    work: Work,
) -> tuple[int, bool]:
    """Return the row's best domain, NO_DOMAIN when there is none, and whether it is satisfiable."""
    key, pair, listing = rows.key[row], rows.pair[row], rows.listing[row]
    held: defaultdict[int, Counter[int]] = defaultdict(Counter)
    own: defaultdict[int, Counter[int]] = defaultdict(Counter)
    free: defaultdict[int, Counter[int]] = defaultdict(Counter)
    start = views.start[listing]
    candidates = [(machine, False) for machine in views.machines[start : start + views.length[listing]].tolist()]
    for machine in fleet.creating[rows.creating_start[row] : rows.creating_stop[row]].tolist():
        if fleet.stamp_intended[fleet.stamp[machine]] in (0, rows.cluster[row]):
            candidates.append((machine, True))
    for machine, is_creating in candidates:
        shape = fleet.shape[machine]
        supply, domain = int(fleet.supply_of[shape]), int(fleet.domain_of[key, shape])
        if work.claim[machine] != FREE or domain == NO_DOMAIN or not fleet.fits[rows.fit[row], shape]:
            continue
        if not fleet.helps[supply] & rows.mask[row]:
            continue
        held[domain][supply] += 1
        if is_creating or fleet.stamp_pair[fleet.stamp[machine]] == pair:
            own[domain][supply] += 1
    if not rows.parked[row]:
        _count_free(free, int(rows.gang[row]), fleet, gangs, work)
    domains = [
        Domain(
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


def _count_free(free: Mapping[int, Counter[int]], gang: int, fleet: Fleet, gangs: Gangs, work: Work) -> None:
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
