"""Places a gang in the domain in which its cluster hosts all of it already, without a look at any offer.

A domain that hosts the whole gang on what the cluster holds ranks before every other one (docs/spec/engine.md §4). So
domains are tried in the order of the rest of their ranks, and the first one that hosts the whole gang is chosen.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from fractions import Fraction

from bigfleet.engine.shapes.hosting import clear_row, place_first_fit, place_group
from bigfleet.engine.shapes.state import (
    ClusterState,
    GangAccess,
    HeldDomain,
    HostIndex,
    HostState,
    LeastRoom,
    Request,
    RowState,
)


def index_of(cluster: ClusterState, leaving: Set[str]) -> HostIndex:
    """Return the cluster's machines by shape and by stamp; build the index again after machines were added.

    Machines that leave are no gang's own: it would stay with them.
    """
    index = cluster.index
    if index is None or index.size != len(cluster.hosts):
        index = cluster.index = HostIndex(len(cluster.hosts))
        for place, host in enumerate(cluster.hosts):
            machine = host.machine
            index.by_shape.setdefault(host.shape, []).append((place, host))
            if machine.id not in leaving:
                stamp = (machine.assigned_need_fingerprint, machine.assigned_group)
                index.by_stamp.setdefault(stamp, []).append(host)
    return index


def own_machines(row: RowState, index: HostIndex) -> Sequence[HostState]:
    """Return the machines that carry the row's fingerprint and group, in hosting order."""
    return index.by_stamp.get((row.need.fingerprint, row.need.group), ())


def hosts_of_shapes(shapes: frozenset[int], index: HostIndex) -> Sequence[HostState]:
    """Return the hosts of some shapes in hosting order."""
    found = index.by_shapes.get(shapes)
    if found is None:
        entries = [entry for shape in shapes & index.by_shape.keys() for entry in index.by_shape[shape]]
        entries.sort(key=lambda entry: entry[0])
        found = index.by_shapes[shapes] = [host for _, host in entries]
    return found


def own_first(row: RowState, index: HostIndex, own: Set[HostState]) -> Sequence[HostState]:
    """Return the hosts of the row's shapes with the row's own machines before the others, each in hosting order."""
    hosts = hosts_of_shapes(row.matching, index)
    return sorted(hosts, key=lambda host: host not in own) if own else hosts


def held_domains(row: RowState, index: HostIndex) -> Mapping[str, HeldDomain]:
    """Return the hosts that the row may use by their value of its key, values ascending; none without a value."""
    key = row.same_key
    assert key is not None, "only a gang has domains"
    question = (row.matching, row.is_pinned, key)
    found = index.domains.get(question)
    if found is None:
        hosts: dict[str, list[HostState]] = {}
        for host in hosts_of_shapes(row.matching, index):
            value = host.machine.attribute(key)
            if value is not None and row.may_use(host.machine, host.shape):
                hosts.setdefault(value, []).append(host)
        found = index.domains[question] = {value: HeldDomain(hosts[value]) for value in sorted(hosts)}
    return found


def place_whole(row: RowState, index: HostIndex, planned: Set[str | None]) -> str | None:
    """Place the whole gang on what its cluster holds, in the best domain that hosts all of it, and return the domain.

    `planned` are the domains in which the target composition has the gang. Without such a domain, nothing changes.
    """
    if not row.has_left:
        return None
    own, shares = _own_by_domain(row, index), dict[str, Fraction]()
    for value, hosts in own.items():
        before, dimensions = wanted(row), list(row.divisible or {})
        place_first_fit(row, hosts)
        if len(own) == 1 and not any(wanted(row)):
            return value
        shares[value] = covered(row, dimensions, before)
        clear_row(row, hosts)
    domains, least = held_domains(row, index), _least_room_of_alike(row, index)
    values: Iterable[str] = domains
    if shares or planned:
        values = sorted(domains, key=lambda value: (-shares.get(value, 0), value not in planned, value))
    needed = _needed(row, least.dimension)
    for value in values:
        hosts = _open_hosts(domains[value], least)
        if not _have_room(hosts, least.dimension, needed):
            continue
        if value in own:
            mine = frozenset(own[value])
            hosts = sorted(hosts, key=lambda host: host not in mine)
        if _places_all(row, hosts):
            return value
        clear_row(row, hosts)
        _drop_full(domains[value], least)
    return None


def _own_by_domain(row: RowState, index: HostIndex) -> dict[str, list[HostState]]:
    """Return the machines that the gang may use and that carry its stamp, by the value of its key."""
    found: dict[str, list[HostState]] = {}
    key = row.same_key
    assert key is not None, "only a gang has domains"
    for host in own_machines(row, index):
        value = host.machine.attribute(key)
        if value is not None and row.may_use(host.machine, host.shape):
            found.setdefault(value, []).append(host)
    return found


def _needed(row: RowState, dimension: int) -> int:
    """Return what the row has left of one dimension."""
    if row.divisible is not None:
        return row.divisible.get(dimension, 0)
    return sum([milli * group.left for group in row.groups for d, milli in group.request if d == dimension])


def _have_room(hosts: Iterable[HostState], dimension: int, milli: int) -> bool:
    """Return whether hosts have so much room of one dimension in all; most small domains fail by this."""
    for host in hosts:
        if milli <= 0:
            break
        milli -= host.room[dimension]
    return milli <= 0


def _places_all(row: RowState, hosts: Sequence[HostState]) -> bool:
    """Place the row by first fit, up to the first group of which a pod has no place; return whether there was none."""
    if row.divisible is not None:
        place_first_fit(row, hosts)
        return not row.divisible
    for group in row.groups:
        if group.left:
            place_group(group, hosts)
            if group.left:
                return False
    return True


def wanted(row: RowState) -> Sequence[int]:
    """Return what the gang has left: by dimension of a divisible row, else its pods."""
    return [*row.divisible.values()] if row.divisible is not None else [sum(group.left for group in row.groups)]


def covered(row: RowState, dimensions: Sequence[int], before: Sequence[int]) -> Fraction:
    """Return the share of the gang that has a place: of its pods, or the mean over a divisible row's dimensions."""
    if row.divisible is None:
        had, has = before[0], sum(group.left for group in row.groups)
        return Fraction(had - has, had) if had else Fraction(1)
    left = [row.divisible.get(d, 0) for d in dimensions]
    shares = [Fraction(had - has, had) for had, has in zip(before, left, strict=True) if had]
    return sum(shares, Fraction(0)) / len(shares) if shares else Fraction(1)


# ---- full machines -----------------------------------------------------------------------------------------------

# While gangs are credited, no machine gets room back, so that one that is full for a gang and all that are like it is
# not looked at again.


def least_room(requests: Iterable[Request]) -> LeastRoom:
    """Return the least of two dimensions in some requests; 0 of any dimension without requests."""
    different = set(requests)
    if not different:
        return LeastRoom(0, 0, 0, 0)
    first = min(different)
    d, other = first[0][0], first[min(1, len(first) - 1)][0]
    amounts = [dict(request) for request in different]
    return LeastRoom(d, min(each.get(d, 0) for each in amounts), other, min(each.get(other, 0) for each in amounts))


def _least_room_of_alike(row: RowState, index: HostIndex) -> LeastRoom:
    """Return the least that pods of the cluster's gangs request that may use the same machines, by the same key."""
    if not index.least:
        alike: dict[GangAccess, set[Request]] = {}
        divisible: set[GangAccess] = set()
        for each in row.cluster.rows:
            if each.same_key is not None:
                access = (each.matching, each.is_pinned, each.same_key)
                alike.setdefault(access, set()).update([group.request for group in each.groups])
                if each.divisible is not None:
                    divisible.add(access)
        for access, requests in alike.items():
            index.least[access] = least_room(() if access in divisible else requests)
    assert row.same_key is not None, "only a gang has domains"
    return index.least[(row.matching, row.is_pinned, row.same_key)]


def _open_hosts(domain: HeldDomain, least: LeastRoom) -> list[HostState]:
    """Return the hosts of a domain from the first one on that has room."""
    hosts, first = domain.hosts, domain.first
    while first < len(hosts) and not least.is_in(hosts[first].room):
        first += 1
    if first > len(hosts) // 2:
        domain.hosts, first = hosts[first:], 0
    domain.first = first
    return domain.hosts[first:]


def _drop_full(domain: HeldDomain, least: LeastRoom) -> None:
    """Drop the hosts without room from a domain."""
    domain.hosts, domain.first = [host for host in domain.hosts[domain.first :] if least.is_in(host.room)], 0
