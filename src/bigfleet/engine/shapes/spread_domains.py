"""Finds the domains in which a row under a strict spread may acquire machines.

A domain with a machine that the row may use holds all others down to its own pods plus the skew. So a domain in which
the row has no machine is opened only if it can keep up with the others.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set

from bigfleet.engine.shapes.fleet import DecisionState
from bigfleet.engine.shapes.hosting import fitting, hosts_by_domain, may_host, spread_counts
from bigfleet.engine.shapes.state import HostState, OfferState, PodGroup, Room, RowState
from bigfleet.model.profile import TopologySpread


def unplaced(row: RowState) -> int:
    """Return how many pods of the row have no place."""
    return sum(group.left for group in row.groups)


def open_offers(
    row: RowState, fleet: DecisionState, counts: Mapping[str, int], closed: Set[str], *, may_open: bool
) -> list[OfferState]:
    """Return the offers in domains that may take a pod now; `counts` are the row's pods by domain.

    Without `may_open` these are domains in which the row has a machine already; none of them is `closed`.
    """
    spread = row.spread
    assert spread is not None, "only a spread row has open domains"
    most = min(counts.values(), default=0) + spread.skew_max - 1
    found = []
    for offer in fleet.usable(row):
        value = offer.example.attribute(spread.topology_key)
        if value is None or value in closed or not offer.available:
            continue
        if (may_open or value in counts) and counts.get(value, 0) <= most:
            found.append(offer)
    return found


def empty_domains(row: RowState, fleet: DecisionState, spread: TopologySpread, closed: Set[str]) -> tuple[str, ...]:
    """Return the domains in which a spread row of which nothing runs could be hosted by what is on offer."""
    if any(spread_counts(row, row.cluster.hosts, spread).values()):
        return ()
    values = set()
    for offer in fleet.usable(row):
        value = offer.example.attribute(spread.topology_key)
        if value is None or value in closed or not offer.available:
            continue
        total = fleet.total(row.cluster.id, offer.shape)
        if any(fitting(total, group.request, 1) for group in row.groups):
            values.add(value)
    return tuple(sorted(values))


def scarce_domains(row: RowState, fleet: DecisionState, spread: TopologySpread) -> set[str]:
    """Return the domains without a machine of the row that have too little on offer, so that the spread does better.

    They are left out, those with the least room first, as far as that serves more pods.
    """
    pods = sum(group.count for group in row.groups)
    held = hosts_by_domain(row, row.cluster.hosts, spread.topology_key)
    room: defaultdict[str, int] = defaultdict(int)
    for offer in fleet.usable(row):
        value = offer.example.attribute(spread.topology_key)
        if value is not None and offer.available and room[value] < pods:
            total = fleet.total(row.cluster.id, offer.shape)
            room[value] += min(offer.available, pods) * max(_most(group, total, pods) for group in row.groups)
    new = sorted((value for value in room if value not in held and room[value]), key=lambda v: (room[v], v))
    if not new:
        return set()
    for value, count in spread_counts(row, row.cluster.hosts, spread).items():
        if value in held:
            room[value] += count + sum(_room_for(row, host, pods) for host in held[value])
    best, closed = -1, 0
    for dropped in range(len(new) + bool(held)):
        served = min(pods, _served([room[value] for value in (*held, *new[dropped:])], spread.skew_max))
        if served > best:
            best, closed = served, dropped
        if best == pods:
            break
    return set(new[:closed])


def _served(rooms: Sequence[int], skew: int) -> int:
    """Return how many pods domains of these rooms host under the spread."""
    most = min(rooms) + skew
    return sum(min(room, most) for room in rooms)


def _most(group: PodGroup, room: Room, pods: int) -> int:
    """Return how many pods like those of the group a machine hosts, as far as there are pods."""
    return fitting(room, group.request, min(group.limit or pods, pods))


def _room_for(row: RowState, host: HostState, pods: int) -> int:
    """Return how many pods of one group of the row find room on a host beside what is there."""
    return max((_most(group, host.room, pods) for group in row.groups if may_host(group, host)), default=0)
