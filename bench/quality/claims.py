"""Checks a candidate's claims against the instance: room, profile, limits, gangs, spreads, and that rows are hosted.

Every rule is checked in plain integers on single machines, with no code of any candidate.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from bench.quality.values import MILLI, PODS, Holding, Instance, Offer, PackingCluster, PackingRow, Settled


def violations(instance: Instance, settled: Settled) -> list[str]:
    """Return one sentence per broken rule, in the order of holdings, then of rows."""
    clusters = {cluster.id: cluster for cluster in instance.clusters}
    found = list(_supply_faults(instance, settled))
    for holding in settled.holdings:
        cluster = clusters.get(holding.cluster)
        if cluster is None:
            found.append(f"{holding.machine_id} is held by {holding.cluster}, which has no demand")
        else:
            found += _machine_faults(cluster, holding, instance.offers[holding.offer])
    reports = {(report.cluster, report.row): report for report in settled.rows}
    held = dict(settled.by_cluster())
    for cluster in instance.clusters:
        for row in cluster.rows:
            report = reports.get((cluster.id, row.id))
            if report is None:
                found.append(f"{cluster.id}/{row.id}: the candidate reports nothing")
                continue
            short = {} if report.is_satisfied else report.short
            found += _row_faults(instance.offers, cluster, row, held.get(cluster.id, []), short)
    return found


def _supply_faults(instance: Instance, settled: Settled) -> Iterator[str]:
    """Yield machines that are held twice or do not exist, and classes that are held beyond their stock."""
    for machine_id, times in Counter(holding.machine_id for holding in settled.holdings).items():
        if times > 1:
            yield f"{machine_id} is held {times} times"
    for position, number in Counter(holding.offer for holding in settled.holdings).items():
        offer = instance.offers[position]
        if number > offer.stock:
            yield f"{offer.id}: {number} machines are held, the stock is {offer.stock}"


def _machine_faults(cluster: PackingCluster, holding: Holding, offer: Offer) -> Iterator[str]:
    """Yield what is wrong with the claims on one machine."""
    rows = {row.id: row for row in cluster.rows}
    room = dict(offer.allocatable)
    for overhead in cluster.overheads:
        if offer.matches(overhead.requirements):
            for name, milli in overhead.resources.items():
                room[name] = room.get(name, 0) - milli
    taken: Counter[str] = Counter()
    pods: Counter[tuple[str, int]] = Counter()
    for claim in holding.claims:
        row = rows.get(claim.row)
        if row is None or not 0 <= claim.shape < len(row.shapes) or claim.count <= 0:
            yield f"{holding.machine_id}: claim {claim.row}/{claim.shape} × {claim.count} names no pods of {cluster.id}"
            continue
        if not offer.matches(row.requirements):
            yield f"{holding.machine_id}: {claim.row} does not match the machine"
        if row.penalty_dollars == float("inf") and offer.interruption_probability > 0:
            yield f"{holding.machine_id}: {claim.row} is pinned, the machine may be interrupted"
        for name, milli in row.shapes[claim.shape].resources.items():
            taken[name] += milli * claim.count
        taken[PODS] += MILLI * claim.count
        pods[claim.row, claim.shape] += claim.count
    for name, milli in sorted(taken.items()):
        if name == PODS and PODS not in offer.allocatable:
            continue
        if milli > max(0, room.get(name, 0)):
            yield f"{holding.machine_id}: claims take {milli} of {name}, the machine has {max(0, room.get(name, 0))}"
    for (row_id, shape), count in sorted(pods.items()):
        limit = rows[row_id].shapes[shape].max_per_machine
        if limit and count > limit:
            yield f"{holding.machine_id}: {count} pods of {row_id}/{shape}, at most {limit} may share a machine"


def _row_faults(
    offers: Sequence[Offer],
    cluster: PackingCluster,
    row: PackingRow,
    held: Sequence[Holding],
    short: Mapping[int, int],
) -> Iterator[str]:
    """Yield what is wrong with one row over all machines of its cluster."""
    name = f"{cluster.id}/{row.id}"
    hosted: Counter[int] = Counter()
    by_machine: defaultdict[int, int] = defaultdict(int)
    for place, holding in enumerate(held):
        for claim in holding.claims:
            if claim.row == row.id:
                hosted[claim.shape] += claim.count
                by_machine[place] += claim.count
    for shape, pods in enumerate(row.shapes):
        wanted = pods.count - short.get(shape, 0)
        if hosted[shape] < wanted:
            yield f"{name}/{shape}: {hosted[shape]} pods have a claim, {wanted} are reported as hosted"
        if hosted[shape] > pods.count:
            yield f"{name}/{shape}: {hosted[shape]} pods have a claim, the row has {pods.count}"
    if row.same_key is not None:
        domains = {str(offers[held[place].offer].attribute(row.same_key)) for place in by_machine}
        if len(domains) > 1:
            yield f"{name}: a gang's claims lie in {len(domains)} domains: {', '.join(sorted(domains))}"
    spread = row.strict_spread
    if spread is not None and by_machine:
        counts: Counter[str | None] = Counter()
        for place, holding in enumerate(held):
            offer = offers[holding.offer]
            if offer.matches(row.requirements) or place in by_machine:
                counts[offer.attribute(spread.key)] += by_machine.get(place, 0)
        if counts.get(None):
            yield f"{name}: {counts[None]} pods on machines without {spread.key}, over which the row spreads"
        placed = [count for domain, count in counts.items() if domain is not None]
        if placed and max(placed) - min(placed) > max(1, spread.skew_max):
            skew = max(placed) - min(placed)
            yield f"{name}: the skew over {spread.key} is {skew}, at most {max(1, spread.skew_max)} is allowed"
