"""Runs the planner alone as a candidate: each cluster gets its target composition, in the order of the clusters.

After steps a cluster keeps what it held as long as it is needed, and nothing is exchanged. Stock that an earlier
cluster took is not there for a later one.
"""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bench.quality.arrays import ClusterArrays
from bench.quality.values import Claim, Cluster, Holding, Instance, Offer, RowReport, Scheduler, Settled, Start
from bigfleet.planner import Composition, MachineClass, Problem, SchedulerOrder, Shape, Spread, plan
from bigfleet.planner.problem import BILLION, NANO

#: Above what any demand reaches, below what the planner's arithmetic carries.
_PLENTY = 1 << 50


class PlannerCandidate:
    """The planner's compositions, carried out at once."""

    def settle(self, instance: Instance, start: Start, scheduler: Scheduler) -> Settled:
        """Return what the clusters hold after the last demand."""
        held: dict[str, tuple[int, ...]] = {}
        before: dict[str, tuple[int, ...]] = {}
        planned: list[_Planned] = []
        seconds = 0.0
        for clusters in instance.demands(start):
            before, seconds = dict(held), 0.0
            planned = []
            for cluster in clusters:
                began = time.process_time()
                one = _planned(cluster, instance.offers, held, scheduler)
                seconds += time.process_time() - began
                held[cluster.id] = one.composition.counts
                planned.append(one)
        none = (0,) * len(instance.offers)
        actions = sum(
            abs(now - then)
            for cluster in held
            for now, then in zip(held[cluster], before.get(cluster, none), strict=True)
        )
        return Settled(
            holdings=tuple(_holdings(planned, instance.offers)),
            rows=tuple(report for one in planned for report in _reports(one)),
            has_claims=True,
            cycles=1,
            actions=actions,
            actions_unneeded=0,
            engine_seconds=seconds,
        )


@dataclass(frozen=True, slots=True)
class _Planned:
    arrays: ClusterArrays
    composition: Composition


def _planned(
    cluster: Cluster, offers: Sequence[Offer], held: Mapping[str, tuple[int, ...]], scheduler: Scheduler
) -> _Planned:
    """Return the composition of one cluster beside what the clusters hold."""
    taken = np.sum([np.zeros(len(offers), np.int64), *(np.array(counts) for counts in held.values())], axis=0)
    own = held.get(cluster.id, (0,) * len(offers))
    arrays = ClusterArrays(cluster, offers)
    return _Planned(arrays, plan(problem_of(arrays, own, taken.tolist(), scheduler)))


def problem_of(arrays: ClusterArrays, held: Sequence[int], taken: Sequence[int], scheduler: Scheduler) -> Problem:
    """Return the planner's problem: machines held by the cluster, and what the clusters together have not taken."""
    # A dimension that no pod asks for still tells GPU machines from others.
    others = sorted({name for offer in arrays.offers for name in offer.allocatable} - set(arrays.dimensions))
    topology = {row.same_key or (row.strict_spread.key if row.strict_spread else "") for row in arrays.cluster.rows}
    classes = [
        _class_of(arrays, position, others, topology, held[position], offer.stock - taken[position])
        for position, offer in enumerate(arrays.offers)
    ]
    bits = np.packbits(arrays.matches, axis=1, bitorder="little")
    shapes = [
        _shape_of(arrays, position, len(others), int.from_bytes(bits[position].tobytes(), "little"))
        for position in range(len(arrays.keys))
    ]
    return Problem(
        dimensions=(*arrays.dimensions, *others),
        classes=tuple(classes),
        shapes=tuple(shapes),
        order=SchedulerOrder(scheduler.value),
    )


def _class_of(
    arrays: ClusterArrays, position: int, others: Sequence[str], topology: set[str], held: int, stock: int
) -> MachineClass:
    offer = arrays.offers[position]
    extra = tuple(offer.allocatable.get(name, 0) for name in others)
    cost = round(offer.marginal_usd_per_hour * NANO)
    return MachineClass(
        key=offer.id,
        supply=(*(min(int(milli), _PLENTY) for milli in arrays.supply[position]), *extra),
        allocatable=(*(min(int(milli), _PLENTY) for milli in arrays.allocatable[position]), *extra),
        cost=cost,
        held=held,
        held_cost=cost,
        stock=max(0, stock),
        probability=round(offer.interruption_probability * BILLION),
        domains=tuple((key, value) for key in sorted(topology) if key and (value := offer.attribute(key)) is not None),
    )


def _shape_of(arrays: ClusterArrays, position: int, others: int, matches: int) -> Shape:
    key = arrays.keys[position]
    row = arrays.cluster.rows[key.row]
    higher = {other.priority for other in arrays.cluster.rows if other.priority > row.priority}
    is_pinned = math.isinf(row.penalty_dollars)
    spread = row.strict_spread
    return Shape(
        row=key.row,
        request=(*(int(milli) for milli in arrays.request[position]), *(0,) * others),
        count=row.shapes[key.shape].count,
        matches=matches,
        rank=len(higher),
        priority=row.priority,
        max_per_machine=row.shapes[key.shape].max_per_machine,
        penalty=0 if is_pinned else round(row.penalty_dollars * NANO),
        is_pinned=is_pinned,
        gang=row.id if row.same_key else "",
        same_key=row.same_key or "",
        spread=None if spread is None else Spread(spread.key, max(1, spread.skew_max)),
    )


def _holdings(planned: Sequence[_Planned], offers: Sequence[Offer]) -> list[Holding]:
    """Return every machine with its claims, by cluster, then by id."""
    holdings: list[Holding] = []
    used: Counter[int] = Counter()
    for one in planned:
        cluster, keys = one.arrays.cluster, one.arrays.keys
        claims: dict[tuple[int, int], Counter[int]] = {}
        for claim in one.composition.claims:
            for number in range(claim.first, claim.first + claim.machines):
                claims.setdefault((claim.machine_class, number), Counter())[claim.shape] += claim.count
        for position in sorted(range(len(offers)), key=lambda c: offers[c].id):
            for number in range(one.composition.counts[position]):
                pods = claims.get((position, number), Counter())
                holdings.append(
                    Holding(
                        machine_id=offers[position].machine_id(used[position]),
                        offer=position,
                        cluster=cluster.id,
                        claims=tuple(
                            Claim(cluster.rows[keys[shape].row].id, keys[shape].shape, count)
                            for shape, count in sorted(pods.items())
                        ),
                    )
                )
                used[position] += 1
    return holdings


def _reports(one: _Planned) -> list[RowReport]:
    """Return what is reported of each row: how many pods of each shape have no machine, and why."""
    short: dict[int, dict[int, int]] = {}
    reasons: dict[int, str] = {}
    for each in one.composition.unhosted:
        key = one.arrays.keys[each.shape]
        short.setdefault(key.row, {})[key.shape] = each.count
        reasons[key.row] = each.reason.value
    return [
        RowReport(
            cluster=one.arrays.cluster.id,
            row=row.id,
            is_satisfied=number not in short,
            short=short.get(number, {}),
            reason=reasons.get(number, ""),
        )
        for number, row in enumerate(one.arrays.cluster.rows)
    ]
