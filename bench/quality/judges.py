"""Judges a candidate's answer to an instance: claims, placement, scheduler orders, and completed cost.

The interruption part of a cost follows the claims; where a candidate claims no shapes, the judge's own
first-fit-decreasing placement stands in, which keeps pinned rows off machines that may be interrupted.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bench.quality.claims import violations
from bench.quality.packer import pack
from bench.quality.placement import Machines, Placement, place
from bench.quality.scheduler import ORDERS, simulate
from bench.quality.values import Claim, Holding, Instance, PackingCluster, RowReport, Scheduler, Settled
from bigfleet.sim.packing.arrays import Bool, ClusterArrays, Int
from bigfleet.sim.packing.packer import Packer, stock_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one candidate reached on one instance; counts are of pods."""

    #: Machines at rest: price at the margin and expected interruptions.
    cost_usd_per_hour: float
    #: The same with a packer's purchase for each pod that has no place in a scheduler's order, mean over the orders.
    completed_usd_per_hour: float
    machines: int
    #: Broken rules of the claims; None where the candidate makes no claims.
    violations: tuple[str, ...] | None
    #: Reported as satisfied, and without a place in the best first-fit-decreasing order.
    unplaced: int
    #: Reported as satisfied, protected by slack, and lost in a scheduler's order: mean and worst over the orders.
    lost_mean: float
    lost_worst: int
    #: Reported as satisfied and lost, of shapes that no slack protects, mean over the orders.
    lost_unprotected: float
    #: Reported as short although machines with stock or room host them.
    short_hostable: int
    #: Reported as short.
    short: int
    #: Pods that no machine of the instance hosts.
    impossible: int
    #: Of rows with an impossible pod: pods that could be hosted, and are called short or have no place.
    lost_to_neighbour: int
    #: Supply held ÷ demand that some machine can host, by dimension that is requested.
    held_ratio: Mapping[str, float]


def judge(
    instance: Instance, settled: Settled, *, scheduler: Scheduler, orders: int = ORDERS, seed: int = 0
) -> Verdict:
    """Return the verdict on an answer; equal arguments give an equal verdict."""
    held = dict(settled.by_cluster())
    stock = stock_of(instance.offers)
    for holding in settled.holdings:
        stock[holding.offer] -= 1
    # A class that is held beyond its stock is a violation already; it sells nothing more.
    np.maximum(stock, 0, out=stock)
    reports = {(report.cluster, report.row): report for report in settled.rows}
    judged = [
        _judge_cluster(
            ClusterArrays(cluster, instance.offers),
            held.get(cluster.id, []),
            reports,
            stock.copy(),
            scheduler=scheduler,
            seed=seed + number,
            orders=orders,
        )
        for number, cluster in enumerate(instance.clusters)
    ]
    lost = np.sum([cluster.lost for cluster in judged], axis=0)
    # A machine that a cluster without demand holds is paid for as well.
    known = {cluster.id for cluster in instance.clusters}
    stray = [h for h in settled.holdings if h.cluster not in known]
    cost = math.fsum(c.cost for c in judged) + sum(instance.offers[h.offer].marginal_usd_per_hour for h in stray)
    return Verdict(
        cost_usd_per_hour=cost,
        completed_usd_per_hour=cost + math.fsum(c.completing for c in judged),
        machines=len(settled.holdings),
        violations=tuple(violations(instance, settled)) if settled.has_claims else None,
        unplaced=sum(c.unplaced for c in judged),
        lost_mean=float(lost.mean()),
        lost_worst=int(lost.max()),
        lost_unprotected=math.fsum(c.lost_unprotected for c in judged),
        short_hostable=sum(c.short_hostable for c in judged),
        short=sum(c.short for c in judged),
        impossible=sum(c.impossible for c in judged),
        lost_to_neighbour=sum(c.lost_to_neighbour for c in judged),
        held_ratio=_ratios(judged),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judged:
    cost: float
    completing: float
    unplaced: int
    #: By order, (O,).
    lost: Int
    lost_unprotected: float
    short_hostable: int
    short: int
    impossible: int
    lost_to_neighbour: int
    held: Mapping[str, int]
    wanted: Mapping[str, int]


def _judge_cluster(
    arrays: ClusterArrays,
    holdings: Sequence[Holding],
    reports: Mapping[tuple[str, str], RowReport],
    stock: Int,
    *,
    scheduler: Scheduler,
    seed: int,
    orders: int,
) -> _Judged:
    machines = Machines(arrays, [holding.offer for holding in holdings])
    short = _short(arrays, reports)
    placed = place(machines, arrays.count - short)
    domains = {**placed.domain_of_row, **_claimed_domains(arrays, holdings)}
    lost = simulate(machines, domains, scheduler=scheduler, seed=seed, orders=orders).lost
    hosts = arrays.fits.max(axis=1, initial=0)
    complaints = np.maximum(lost - short, 0)
    protected = hosts > 1
    completing = [_completing(arrays, stock, np.where(hosts > 0, one, 0)) for one in lost]
    return _Judged(
        cost=_cost(machines, holdings),
        completing=math.fsum(completing) / len(completing),
        unplaced=placed.pods_lost,
        lost=complaints[:, protected].sum(axis=1),
        lost_unprotected=float(complaints[:, ~protected].sum(axis=1).mean()),
        short_hostable=_hostable(arrays, machines, placed, short, stock),
        short=int(short.sum()),
        impossible=int(arrays.count[hosts == 0].sum()),
        lost_to_neighbour=_lost_to_neighbour(arrays, short + placed.lost, hosts == 0),
        held=_totals(arrays.dimensions, machines.supply),
        wanted=_totals(arrays.dimensions, arrays.request * np.where(hosts > 0, arrays.count, 0)[:, None]),
    )


def _lost_to_neighbour(arrays: ClusterArrays, lost: Int, is_impossible: Bool) -> int:
    """Return the lost pods that could be hosted, of rows that have an impossible pod as well."""
    rows = {int(row) for row in arrays.row[is_impossible]}
    return int(sum(lost[s] for s in range(len(lost)) if not is_impossible[s] and int(arrays.row[s]) in rows))


def _short(arrays: ClusterArrays, reports: Mapping[tuple[str, str], RowReport]) -> Int:
    """Return how many pods of each shape the candidate calls short; a row without a report counts as satisfied."""
    short = np.zeros(len(arrays.keys), np.int64)
    for position, key in enumerate(arrays.keys):
        report = reports.get((arrays.cluster.id, arrays.cluster.rows[key.row].id))
        if report is not None and not report.is_satisfied:
            short[position] = min(report.short.get(key.shape, 0), int(arrays.count[position]))
    return short


def _claimed_domains(arrays: ClusterArrays, holdings: Sequence[Holding]) -> dict[int, str]:
    """Return the domain in which each gang's claims lie, the first one where there are several."""
    places = {row.id: n for n, row in enumerate(arrays.cluster.rows)}
    found: dict[int, str] = {}
    for holding in holdings:
        for claim in holding.claims:
            place = places.get(claim.row)
            key = None if place is None else arrays.cluster.rows[place].same_key
            if place is not None and key is not None:
                found.setdefault(place, str(arrays.offers[holding.offer].attribute(key)))
    return found


def _cost(machines: Machines, holdings: Sequence[Holding]) -> float:
    """Return the price at the margin of the machines, and the expected interruptions of what runs on them."""
    arrays = machines.arrays
    if not len(machines):
        return 0.0
    price = float(arrays.price[machines.classes].sum())
    if not (arrays.probability[machines.classes] > 0).any():
        return price
    if any(holding.claims for holding in holdings):
        positions = {(arrays.cluster.rows[k.row].id, k.shape): p for p, k in enumerate(arrays.keys)}
        on = np.zeros((len(arrays.keys), len(machines)), np.int64)
        for machine, holding in enumerate(holdings):
            for claim in holding.claims:
                position = positions.get((claim.row, claim.shape))
                if position is not None:
                    on[position, machine] += claim.count
    else:
        on = place(machines, avoid_interruption=True).on
    return price + math.fsum(
        float(arrays.interruption_cost(shape, on[shape], machines.classes).sum()) for shape in range(len(on))
    )


def _completing(arrays: ClusterArrays, stock: Int, lost: Int) -> float:
    """Return what a packer pays for the pods that are lost, from what is not held."""
    return Packer(arrays, stock.copy()).buy(lost).usd_per_hour if lost.any() else 0.0


def _hostable(arrays: ClusterArrays, machines: Machines, placed: Placement, short: Int, stock: Int) -> int:
    """Return how many pods that are called short have room on held machines, or on machines with stock."""
    if not short.any():
        return 0
    with_short = place(machines, arrays.count) if len(machines) else placed
    # What the held machines take in addition, by shape, at most what is called short.
    taken = np.clip(with_short.on.sum(axis=1) - placed.on.sum(axis=1), 0, short)
    if with_short.pods_lost > placed.pods_lost + int((short - taken).sum()):
        taken = np.zeros_like(taken)
    left = short - taken
    purchase = Packer(arrays, stock.copy()).buy(left)
    return int(taken.sum()) + int(left.sum()) - sum(purchase.unhosted.values())


def _totals(dimensions: Sequence[str], vectors: Int) -> dict[str, int]:
    return {name: sum(vectors[:, place].tolist()) for place, name in enumerate(dimensions)}


def _ratios(judged: Sequence[_Judged]) -> dict[str, float]:
    held: Counter[str] = Counter()
    wanted: Counter[str] = Counter()
    for cluster in judged:
        held.update(cluster.held)
        wanted.update(cluster.wanted)
    return {name: held[name] / wanted[name] for name in sorted(wanted) if wanted[name]}


# ---- the packer as an answer -------------------------------------------------------------------------------------


def packed(instance: Instance, clusters: Sequence[PackingCluster] | None = None) -> Settled:
    """Return the packer's fleet as an answer, with its claims; what it cannot host is short."""
    chosen = instance.clusters if clusters is None else clusters
    used: Counter[int] = Counter()
    holdings: list[Holding] = []
    rows: list[RowReport] = []
    for cluster, purchase in zip(chosen, pack(instance, chosen), strict=True):
        keys = ClusterArrays(cluster, instance.offers).keys
        for machine in purchase.machines:
            claims = tuple(
                Claim(cluster.rows[keys[shape].row].id, keys[shape].shape, count)
                for shape, count in sorted(machine.pods.items())
            )
            offer = instance.offers[machine.offer]
            holdings.append(
                Holding(
                    machine_id=offer.machine_id(used[machine.offer]),
                    offer=machine.offer,
                    cluster=cluster.id,
                    claims=claims,
                )
            )
            used[machine.offer] += 1
        for number, row in enumerate(cluster.rows):
            short = {keys[s].shape: count for s, count in purchase.unhosted.items() if keys[s].row == number}
            reason = "no machine hosts them" if short else ""
            rows.append(RowReport(cluster=cluster.id, row=row.id, is_satisfied=not short, short=short, reason=reason))
    return Settled(
        holdings=tuple(holdings),
        rows=tuple(rows),
        has_claims=True,
        cycles=1,
        actions=len(holdings),
        actions_unneeded=0,
        engine_seconds=0.0,
    )
