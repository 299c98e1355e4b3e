"""Places pods on machines: how many fit, first fit in a given order, and strict topology spreads.

A placement is a claim (row, shape, machine, count). This module does not acquire or release a machine.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from bigfleet.engine.shapes.state import HostState, PodGroup, Request, Room, RowState
from bigfleet.model.profile import TopologySpread

#: Where pods of a row stand.
Places = Sequence[tuple[HostState, PodGroup, int]]


def fitting(room: Room, request: Request, most: int) -> int:
    """Return how many equal pods the room holds, `most` at most."""
    for dimension, milli in request:
        if room[dimension] < milli * most:
            most = room[dimension] // milli
            if most <= 0:
                return 0
    return most


def with_room(request: Request, hosts: Iterable[HostState]) -> Iterator[HostState]:
    """Yield the hosts whose room may hold one such pod; only saves work, because two dimensions alone are compared."""
    (d, milli), (other, other_milli) = request[0], request[min(1, len(request) - 1)]
    return (host for host in hosts if host.room[d] >= milli and host.room[other] >= other_milli)


def may_host(group: PodGroup, host: HostState) -> bool:
    """Return whether the group's row may use the host; waiting pods use only what has not joined yet."""
    return group.row.may_use(host.machine, host.shape) and not (group.is_waiting and host.is_configured)


def capacity(group: PodGroup, host: HostState) -> int:
    """Return how many of the group's unplaced pods the host could take now."""
    most = group.left
    if group.limit:
        most = min(most, group.limit - host.claims.get(group, 0))
    return fitting(host.room, group.request, most) if most > 0 else 0


def place(group: PodGroup, host: HostState, count: int) -> None:
    """Claim `count` pods' room on the host."""
    if count <= 0:
        return
    for dimension, milli in group.request:
        host.room[dimension] -= milli * count
        assert host.room[dimension] >= 0, f"{host.machine.id} has no room for {count} pods"
    host.claims[group] = host.claims.get(group, 0) + count
    group.left -= count


def unplace(group: PodGroup, host: HostState) -> int:
    """Give back the group's claim on the host; returns the number of pods."""
    count = host.claims.pop(group, 0)
    for dimension, milli in group.request:
        host.room[dimension] += milli * count
    group.left += count
    return count


def place_share(row: RowState, host: HostState) -> bool:
    """Let a row without shapes take what is left of the host, up to what it still wants; returns whether it took any.

    The room must cover the row's unit, because nothing is known about its pods but the largest request of each
    dimension.
    """
    assert row.divisible is not None, "only a row without shapes takes shares"
    if not row.divisible or fitting(host.room, row.unit, 1) == 0:
        return False
    taken = {d: min(host.room[d], milli) for d, milli in row.divisible.items() if host.room[d] > 0}
    if not taken:
        return False
    share = host.shares.setdefault(row, {})
    for d, milli in taken.items():
        host.room[d] -= milli
        share[d] = share.get(d, 0) + milli
        row.divisible[d] -= milli
        if row.divisible[d] == 0:
            del row.divisible[d]
    return True


def place_first_fit(row: RowState, hosts: Sequence[HostState]) -> None:
    """Place a row without a spread: each group, largest first, on the hosts in order."""
    if row.divisible is not None:
        for host in hosts:
            if not row.divisible:
                return
            if row.may_use(host.machine, host.shape):
                place_share(row, host)
        return
    for group in row.groups:
        if group.left:
            place_group(group, hosts)


def place_group(group: PodGroup, hosts: Iterable[HostState]) -> None:
    """Place what the group has left on the hosts in order.

    It does what `place` of `capacity` does on every host that `may_host` allows, without a call for each.
    """
    request, left, limit = group.request, group.left, group.limit
    (d, milli), (other, other_milli) = request[0], request[min(1, len(request) - 1)]
    may_use, is_waiting = group.row.may_use, group.is_waiting
    for host in hosts:
        room = host.room
        # Most machines are full; comparing two dimensions finds that first.
        if room[d] < milli or room[other] < other_milli or not may_use(host.machine, host.shape):
            continue
        if is_waiting and host.is_configured:
            continue
        count = min(left, limit - host.claims.get(group, 0)) if limit else left
        for dimension, amount in request:
            if room[dimension] < amount * count:
                count = room[dimension] // amount
        if count <= 0:
            continue
        for dimension, amount in request:
            room[dimension] -= amount * count
        host.claims[group] = host.claims.get(group, 0) + count
        left -= count
        if not left:
            break
    group.left = left


def place_row(row: RowState, hosts: Sequence[HostState]) -> None:
    """Place what a row has left on the hosts, in their order, under its strict spread if it has one."""
    spread = row.spread
    if spread is None or row.divisible is not None:
        place_first_fit(row, hosts)
    else:
        place_spread(row, hosts, spread)


def spread_counts(row: RowState, hosts: Iterable[HostState], spread: TopologySpread) -> dict[str, int]:
    """Return the row's pods by domain: domains in which it may use a host, and `Row.spread_domains`."""
    return _counts(row, hosts_by_domain(row, hosts, spread.topology_key))


def hosts_by_domain(row: RowState, hosts: Iterable[HostState], key: str) -> dict[str, list[HostState]]:
    """Return the hosts that the row may use by their value of a key; those without one are left out."""
    found: dict[str, list[HostState]] = {}
    values: dict[int, str | None] = {}
    for host in hosts:
        # Hosts of one shape have one value.
        if host.shape not in values:
            values[host.shape] = host.machine.attribute(key) if host.shape in row.matching else None
        value = values[host.shape]
        if value is not None and row.may_use(host.machine, host.shape):
            found.setdefault(value, []).append(host)
    return found


def _counts(row: RowState, by_domain: Mapping[str, Sequence[HostState]]) -> dict[str, int]:
    counts = dict.fromkeys(row.spread_domains, 0)
    for value, hosts in by_domain.items():
        placed = (count for host in hosts for group, count in host.claims.items() if group.row is row)
        counts[value] = counts.get(value, 0) + sum(placed)
    return counts


def place_spread(row: RowState, hosts: Sequence[HostState], spread: TopologySpread) -> None:
    """Place pods so that no domain holds more than the emptiest one plus the skew.

    The domain with the fewest pods goes first, then the smaller value; within a domain the hosts in order. A domain
    without room stays where it is and holds the others down. Groups are gone through again as long as that places a
    pod: a later group may have raised the domain that held an earlier one down.
    """
    by_domain = hosts_by_domain(row, hosts, spread.topology_key)
    counts = _counts(row, by_domain)
    while True:
        before = sum(counts.values())
        for group in row.groups:
            # A host that has no room for a pod of the group has none later: it is not looked at again.
            first = dict.fromkeys(by_domain, 0)
            while group.left:
                if _place_rounds(group, by_domain, counts, spread.skew_max, first):
                    continue
                if not _place_one_level(group, by_domain, counts, spread.skew_max, first):
                    break
        if len(row.groups) == 1 or not row.has_left or sum(counts.values()) == before:
            return


def keeps_spread(row: RowState, hosts: Sequence[HostState]) -> bool:
    """Return whether the row stands as its strict spread allows; domains that hold no pod of it do not count.

    A gang stands in one domain.
    """
    spread = row.spread
    if spread is None or row.divisible is not None or row.same_key is not None:
        return True
    counts = [count for count in spread_counts(row, hosts, spread).values() if count]
    return not counts or max(counts) - min(counts) <= spread.skew_max


def place_more(row: RowState, hosts: Sequence[HostState]) -> None:
    """Place what a row has left beside what its cluster's hosts have of it, unless that breaks its spread.

    A domain that came after the row's pods takes a pod and so holds all others down to it.
    """
    if row.spread is None or not keeps_spread(row, hosts):
        place_row(row, hosts)
        return
    places = places_of(row)
    place_row(row, hosts)
    if not keeps_spread(row, hosts):
        put_back(row, places)


def places_of(row: RowState) -> Places:
    """Return where the row's pods stand on its cluster's hosts."""
    return [
        (host, group, count) for host in row.cluster.hosts for group, count in host.claims.items() if group.row is row
    ]


def put_back(row: RowState, places: Places) -> None:
    """Have the row's pods where they stood; the other claims on those machines are those of then."""
    clear_row(row, row.cluster.hosts)
    for host, group, count in places:
        place(group, host, count)


def is_even(row: RowState, hosts: Sequence[HostState]) -> bool:
    """Return whether no domain has more pods of the row than another plus the skew, as the scheduler counts them.

    A domain counts if it holds pods of the row or has a machine that the cluster keeps, with room or without.
    """
    spread = row.spread
    if spread is None or row.divisible is not None or row.same_key is not None:
        return True
    counts = _kept_counts(row, hosts_by_domain(row, hosts, spread.topology_key)).values()
    return max(counts, default=0) - min(counts, default=0) <= spread.skew_max


def trim_spread(row: RowState, hosts: Sequence[HostState], spread: TopologySpread) -> list[HostState]:
    """Take back the row's pods beyond its skew, from the last hosts of a domain first; return the hosts that had them.

    A plan places pods without a look at the skew, and at the domains in which only other rows have machines.
    """
    by_domain = hosts_by_domain(row, hosts, spread.topology_key)
    counts = _kept_counts(row, by_domain)
    most = min(counts.values(), default=0) + spread.skew_max
    trimmed = []
    for value, count in counts.items():
        excess = count - most
        for host in reversed(by_domain[value]) if excess > 0 else ():
            for group in reversed(row.groups):
                taken = min(excess, host.claims.get(group, 0))
                if taken > 0:
                    _take_back(group, host, taken)
                    trimmed.append(host)
                    excess -= taken
    return trimmed


def _kept_counts(row: RowState, by_domain: Mapping[str, Sequence[HostState]]) -> dict[str, int]:
    """Return the row's pods in the domains that hold some or have a machine that any row or a target keeps."""
    counts = _counts(row, by_domain)
    return {
        value: counts[value]
        for value, hosts in by_domain.items()
        if counts[value] or any(host.is_claimed or host.is_target for host in hosts)
    }


def _take_back(group: PodGroup, host: HostState, count: int) -> None:
    """Give back the room of some of the group's pods on the host."""
    for dimension, milli in group.request:
        host.room[dimension] += milli * count
    group.left += count
    host.claims[group] -= count
    if not host.claims[group]:
        del host.claims[group]


def _place_rounds(
    group: PodGroup,
    by_domain: Mapping[str, Sequence[HostState]],
    counts: dict[str, int],
    skew: int,
    first: dict[str, int],
) -> bool:
    """Place what many levels would place one after the other; returns whether it placed anything.

    Where all domains hold the same number of pods, each takes `skew` in turn. Rounds are placed together as far as the
    host that each domain is at has room for them.
    """
    if len(counts) != len(by_domain) or len(set(counts.values())) != 1:
        return False
    rounds = group.left // (skew * len(counts))
    for value, hosts in by_domain.items():
        while first[value] < len(hosts) and rounds > 1:
            host = hosts[first[value]]
            room = capacity(group, host) if may_host(group, host) else 0
            if room:
                rounds = min(rounds, room // skew)
                break
            first[value] += 1
        if first[value] == len(hosts) or rounds <= 1:
            return False
    for value, hosts in by_domain.items():
        place(group, hosts[first[value]], rounds * skew)
        counts[value] += rounds * skew
    return True


def _place_one_level(
    group: PodGroup,
    by_domain: Mapping[str, Sequence[HostState]],
    counts: dict[str, int],
    skew: int,
    first: dict[str, int],
) -> bool:
    """Place pods of the group in the first open domain that has room; returns whether there was one.

    `first` has the place of the first host of each domain that may have room.
    """
    minimum = min(counts.values(), default=0)
    for value in sorted(by_domain, key=lambda domain: (counts[domain], domain)):
        allowed = minimum + skew - counts[value]
        if allowed <= 0:
            return False
        placed, hosts = 0, by_domain[value]
        while first[value] < len(hosts) and placed < allowed and group.left:
            host = hosts[first[value]]
            room = capacity(group, host) if may_host(group, host) else 0
            count = min(room, allowed - placed)
            place(group, host, count)
            placed += count
            if count == room:
                first[value] += 1
        if placed:
            counts[value] += placed
            return True
    return False


def clear_row(row: RowState, hosts: Iterable[HostState]) -> None:
    """Give back everything that the row takes of the hosts."""
    if row.divisible is not None:
        clear_rows((row,), hosts)
        return
    for host in hosts:
        for group in row.groups if host.claims else ():
            if group in host.claims:
                unplace(group, host)


def clear_rows(rows: Iterable[RowState], hosts: Iterable[HostState]) -> None:
    """Give back everything that the rows take of the hosts."""
    cleared = frozenset(rows)
    for host in hosts:
        if host.claims:
            for group in [group for group in host.claims if group.row in cleared]:
                unplace(group, host)
        for row in [row for row in host.shares if row in cleared] if host.shares else ():
            for d, milli in host.shares.pop(row).items():
                host.room[d] += milli
                if row.divisible is not None:
                    row.divisible[d] = row.divisible.get(d, 0) + milli
