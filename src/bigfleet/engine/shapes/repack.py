"""Packs a cluster again if the placement by precedence left pods unplaced.

First everything is placed as the target composition says, then largest first; if all of it fits, that packing counts.
Otherwise small clusters are searched exhaustively, row by row in precedence order, with a counted effort. A row never
loses a place to a lower one.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import le
from typing import Final

from bigfleet.engine.shapes.fleet import DecisionState
from bigfleet.engine.shapes.gangs import choose_again
from bigfleet.engine.shapes.hosting import (
    capacity,
    clear_rows,
    fitting,
    is_even,
    may_host,
    place,
    place_group,
    place_more,
    place_row,
    unplace,
)
from bigfleet.engine.shapes.state import ClusterState, HostState, PodGroup, RowState, Searched
from bigfleet.engine.targets import ClassKey

#: Clusters up to this size are searched.
SEARCHED_HOSTS_MAX: Final = 12
SEARCHED_PODS_MAX: Final = 40
#: Priorities of lower rows that are displaced apart from each other, the lowest ones; then all.
DISPLACED_PRIORITIES_MAX: Final = 4
#: Most whole gangs of a cluster that are placed again for a higher row.
WHOLE_GANGS_MAX: Final = 16
#: Placements tried for one question.
SEARCH_STEPS_MAX: Final = 5_000


def repack(cluster: ClusterState, fleet: DecisionState) -> None:
    """Find places for what the cluster's rows have left, without taking any from a higher row."""
    if not cluster.hosts or not any(row.has_left for row in cluster.rows):
        return
    if _has_room_for_all(cluster):
        before = save(cluster)
        if cluster.planned:
            if _pack_as_planned(cluster, fleet):
                return
            restore(cluster, before)
        if _pack_largest_first(cluster):
            return
        restore(cluster, before)
    if not _pack_gangs_as_planned(cluster, fleet):
        _search(cluster, fleet)


def _has_room_for_all(cluster: ClusterState) -> bool:
    """Return whether supply allows that everything has a place; False saves packings that cannot succeed.

    The machines that a short row may use have to hold that row and all others that may use no other machine.
    """
    shapes = {host.shape for host in cluster.hosts}
    wanting = {row.matching & shapes for row in cluster.rows if row.has_left}
    if frozenset() in wanting:
        return False
    demand = {row: _left_by_dimension(row) for row in cluster.rows if not is_fixed(row)}
    usable = {row: row.matching & shapes for row in demand}
    # Nothing is asked of other machines.
    asked = frozenset().union(*wanting)
    supply: dict[int, list[int]] = {}
    for host in cluster.hosts:
        if host.shape not in asked:
            continue
        room = supply.setdefault(host.shape, [0] * len(host.room))
        for d, milli in enumerate(host.room):
            room[d] += milli
        for row, d, milli in _taken(host):
            if row in demand:
                room[d] += milli
                demand[row][d] += milli
    for machines in wanting:
        wanted: defaultdict[int, int] = defaultdict(int)
        # Many rows may use the same machines.
        counts = {each: each <= machines for each in set(usable.values())}
        for row, amounts in demand.items():
            if counts[usable[row]]:
                for d, milli in amounts.items():
                    wanted[d] += milli
        if any(milli > sum(supply[shape][d] for shape in machines) for d, milli in wanted.items()):
            return False
    return True


def _left_by_dimension(row: RowState) -> defaultdict[int, int]:
    left = defaultdict(int, row.divisible or {})
    for group in row.groups:
        if group.left:
            for d, milli in group.request:
                left[d] += milli * group.left
    return left


def _taken(host: HostState) -> Iterator[tuple[RowState, int, int]]:
    """Yield what each row takes of the machine, by dimension."""
    for group, count in host.claims.items():
        for d, milli in group.request:
            yield group.row, d, milli * count
    for row, share in host.shares.items():
        for d, milli in share.items():
            yield row, d, milli


def restore_precedence(cluster: ClusterState, fleet: DecisionState) -> bool:
    """Serve the rows of a cluster with a plan by precedence if that serves a higher row better; return whether it did.

    Planned pods are placed before all others. A plan that was made for other demand, or without a gang that no domain
    hosts whole, may so leave room to a lower row that a higher one lacks. Tried are, and the first of those counts that
    serve the higher rows best: that short rows displace lower ones; that all rows below the first short one are placed
    again after it, which as a gang stays in its domain or chooses it again; that all rows but whole gangs are placed
    again without the plan; and that lower whole gangs, if few, yield and choose their domain again.
    """
    rows = cluster.rows
    left = [_unserved(row) for row in rows]
    first = next((place for place, amount in enumerate(left) if any(amount)), len(rows))
    if not cluster.planned or not any(_serves(host, rows[first + 1 :]) for host in cluster.hosts):
        return False
    movable = [row for row in rows if not is_fixed(row)]
    ways: list[Callable[[], None]] = [
        lambda: _displace_lower(movable, cluster),
        lambda: _place_lower_again(movable, cluster, fleet, chooses_again=False),
        lambda: _place_all_again(movable, cluster, fleet),
    ]
    if first < len(rows) and rows[first].same_key is not None:
        ways.append(lambda: _place_lower_again(movable, cluster, fleet, chooses_again=True))
    gangs = [row for row in rows[first + 1 :] if is_fixed(row)]
    if 0 < len(gangs) <= WHOLE_GANGS_MAX:
        ways.append(lambda: _displace_gangs(gangs, movable, cluster, fleet))
    before, domains = save(cluster), domains_of(rows)
    best, best_domains, least = before, domains, left
    for way in ways:
        way()
        found = [_unserved(row) for row in rows]
        if found < least:
            best, best_domains, least = save(cluster), domains_of(rows), found
        put_in_domains(domains)
        restore(cluster, before)
    put_in_domains(best_domains)
    restore(cluster, best)
    return best is not before


#: Domain, shapes of machines in it, whether it can host the gang, and whether it does on what the cluster holds.
_DomainChoice = tuple[str | None, frozenset[int], bool, bool]


def domains_of(rows: Sequence[RowState]) -> dict[RowState, _DomainChoice]:
    """Return which domains the gangs among the rows have."""
    return {
        row: (row.domain, row.matching, row.is_satisfiable, row.is_held) for row in rows if row.same_key is not None
    }


def put_in_domains(domains: Mapping[RowState, _DomainChoice]) -> None:
    """Have gangs in these domains again."""
    for row, chosen in domains.items():
        row.domain, row.matching, row.is_satisfiable, row.is_held = chosen


def _place_all_again(rows: Sequence[RowState], cluster: ClusterState, fleet: DecisionState) -> None:
    """Place rows by precedence, without the plan; gangs choose their domain again."""
    clear_rows(rows, cluster.hosts)
    for row in rows:
        if row.same_key is None:
            place_row(row, cluster.hosts)
        else:
            choose_again(row, fleet)


def _place_lower_again(
    rows: Sequence[RowState], cluster: ClusterState, fleet: DecisionState, *, chooses_again: bool
) -> None:
    """Place what the first short row lacks, then all lower rows by precedence, without the plan.

    A gang has its places and its domain, or with `chooses_again` chooses its domain once more. Rows under a strict
    spread, of which no single pods are displaced, yield so, too.
    """
    first = next((place for place, row in enumerate(rows) if row.has_left), len(rows))
    if first == len(rows):
        return
    row, lower = rows[first], rows[first + 1 :]
    clear_rows(lower, cluster.hosts)
    if chooses_again:
        _place_all_again([row], cluster, fleet)
    else:
        place_more(row, cluster.hosts)
    _place_all_again(lower, cluster, fleet)


def _displace_gangs(
    gangs: Sequence[RowState], others: Sequence[RowState], cluster: ClusterState, fleet: DecisionState
) -> None:
    """Let short rows have the places of whole gangs, too; these choose their domain again by what is left."""
    clear_rows(gangs, cluster.hosts)
    _displace_lower(others, cluster)
    for row in gangs:
        choose_again(row, fleet)


def _displace_lower(rows: Sequence[RowState], cluster: ClusterState) -> None:
    """Let rows of which pods have no place displace lower ones, in processing order; these find other places."""
    for row in rows:
        if not row.has_left or row.same_key is not None or row.divisible is not None:
            continue
        place_more(row, cluster.hosts)
        before = save(cluster)
        for rank in _lowest_first(row, rows):
            if row.has_left:
                displace(row, cluster.hosts, below=rank)
        if not is_even(row, cluster.hosts):
            restore(cluster, before)
    for row in rows:
        if row.has_left and row.same_key is None:
            place_more(row, cluster.hosts)


def _lowest_first(row: RowState, rows: Sequence[RowState]) -> list[int]:
    """Return the ranks below which a row displaces others in turn: first those of the lowest priority alone."""
    first: dict[int, int] = {}
    for other in rows:
        if other.rank > row.rank:
            first.setdefault(other.need.profile.priority, other.rank - 1)
    return [*sorted(first.values(), reverse=True)[:DISPLACED_PRIORITIES_MAX], row.rank]


def displace(row: RowState, hosts: Sequence[HostState], *, below: int) -> None:
    """Place pods of the row in room that a plan gives to rows of its cluster whose rank is greater than `below`.

    Without this the row would take a machine that rows of other clusters between the two need. Its spread is not
    looked at.
    """
    for group in row.groups:
        for host in hosts:
            if not group.left:
                break
            lower = [
                (other, count)
                for other, count in host.claims.items()
                if other.row.rank > below and _may_lose_place(other.row)
            ]
            if not lower or not may_host(group, host):
                continue
            for other, _ in lower:
                unplace(other, host)
            place(group, host, capacity(group, host))
            for other, count in sorted(lower, key=lambda entry: (entry[0].row.rank, entry[0].index)):
                place(other, host, min(count, capacity(other, host)))


def _may_lose_place(row: RowState) -> bool:
    """Return whether single pods of the row may lose their place; a spread would become uneven."""
    return row.spread is None and not is_fixed(row)


def _unserved(row: RowState) -> list[int]:
    """Return what has no place, by group; by dimension for a row without shapes."""
    if row.divisible is not None:
        return [row.divisible.get(d, 0) for d in range(max(row.divisible, default=-1) + 1)]
    return [group.left for group in row.groups]


def _serves(host: HostState, rows: Sequence[RowState]) -> bool:
    return not host.rows().isdisjoint(rows)


def is_fixed(row: RowState) -> bool:
    """Return whether the row keeps its places: a whole gang runs where it was placed."""
    return row.same_key is not None and not row.has_left


def _pack_largest_first(cluster: ClusterState) -> bool:
    """Place all rows again, largest pods first; returns whether everything has a place."""
    rows = [row for row in cluster.rows if not is_fixed(row)]
    clear_rows(rows, cluster.hosts)
    groups = sorted((group for row in rows for group in row.groups), key=lambda g: (-g.size, g.row.rank, g.index))
    for group in groups:
        if not group.left:
            continue
        if group.row.spread is not None:
            place_row(group.row, cluster.hosts)
        else:
            place_group(group, cluster.hosts)
    for row in rows:
        if row.divisible is not None:
            place_row(row, cluster.hosts)
    return not any(row.has_left for row in cluster.rows)


def _pack_as_planned(cluster: ClusterState, fleet: DecisionState) -> bool:
    """Place all rows as the target's claims say; returns whether everything has a place that a spread allows."""
    rows = [row for row in cluster.rows if not is_fixed(row)]
    _place_rows_as_planned(rows, cluster, fleet)
    return not any(row.has_left for row in cluster.rows) and all(is_even(row, cluster.hosts) for row in rows)


def _pack_gangs_as_planned(cluster: ClusterState, fleet: DecisionState) -> bool:
    """Place all rows as the target's claims say, whole gangs within their domains, too; return whether that helps.

    First fit may have put a whole gang where the plan has a row that lacks places. The row would acquire a machine that
    is excess as soon as the next decision happens to put the gang elsewhere, and acquire it again without it. If it
    does not help, nothing changes.
    """
    rows = cluster.rows
    is_planned = any(row.has_left and row in cluster.planned_for for row in rows)
    if not is_planned or not any(is_fixed(row) for row in rows):
        return False
    planned, left = _planned_pods(cluster, fleet), [_unserved(row) for row in rows]
    if not any(row.has_left and all(planned[group] >= group.count for group in row.groups) for row in rows):
        return False
    before = save(cluster)
    _place_rows_as_planned(rows, cluster, fleet)
    if [_unserved(row) for row in rows] < left and all(is_even(row, cluster.hosts) for row in rows):
        return True
    restore(cluster, before)
    return False


def pack_without(unwanted: Sequence[HostState], cluster: ClusterState, fleet: DecisionState) -> bool:
    """Pack the cluster as its target's claims say, without some machines; return whether each row is served as well.

    Otherwise nothing changes.
    """
    rows, hosts, excluded = cluster.rows, list(cluster.hosts), frozenset(unwanted)
    served = {group: group.count - group.left for row in rows for group in row.groups}
    before, left = save(cluster), [_unserved(row) for row in rows]
    clear_rows(rows, hosts)
    cluster.hosts[:] = [host for host in hosts if host not in excluded]
    planned = _planned_pods(cluster, fleet)
    is_packed = all(planned[group] >= count for group, count in served.items())
    if is_packed:
        _place_rows_as_planned(rows, cluster, fleet)
        found = [_unserved(row) for row in rows]
        is_packed = all(all(map(le, *each)) for each in zip(found, left, strict=True))
        is_packed = is_packed and all(is_even(row, cluster.hosts) for row in rows)
    cluster.hosts[:] = hosts
    if not is_packed:
        restore(cluster, before)
    return is_packed


def _planned_pods(cluster: ClusterState, fleet: DecisionState) -> Counter[PodGroup]:
    """Return how many pods of each group the target's claims have on machines that the cluster has."""
    planned: Counter[PodGroup] = Counter()
    for number, host in _numbered(cluster, fleet).items():
        for group, count in cluster.planned.get(number, ()):
            if may_host(group, host):
                planned[group] += count
    return planned


def _place_rows_as_planned(rows: Sequence[RowState], cluster: ClusterState, fleet: DecisionState) -> None:
    """Place rows from the beginning, as the target's claims say, then first fit."""
    clear_rows(rows, cluster.hosts)
    placed_again = frozenset(rows)
    for number, host in _numbered(cluster, fleet).items():
        for group, count in cluster.planned.get(number, ()):
            if group.row in placed_again and may_host(group, host):
                place(group, host, min(count, capacity(group, host)))
    for row in rows:
        place_row(row, cluster.hosts)


def _numbered(cluster: ClusterState, fleet: DecisionState) -> dict[tuple[ClassKey, int], HostState]:
    """Return the cluster's machines by class and number, acquired ones last."""
    numbered: dict[tuple[ClassKey, int], HostState] = {}
    sizes: Counter[ClassKey] = Counter()
    for host in cluster.hosts:
        key = fleet.class_of(host)
        numbered[(key, sizes[key])] = host
        sizes[key] += 1
    return numbered


# ---- what was ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Saved:
    """Where the pods of a cluster had their places."""

    rooms: list[list[int]]
    claims: list[dict[PodGroup, int]]
    shares: list[dict[RowState, dict[int, int]]]
    left: list[int]
    divisible: list[dict[int, int] | None]


def save(cluster: ClusterState) -> Saved:
    """Return the places of all pods of the cluster."""
    return Saved(
        rooms=[list(host.room) for host in cluster.hosts],
        claims=[dict(host.claims) for host in cluster.hosts],
        shares=[{row: dict(share) for row, share in host.shares.items()} for host in cluster.hosts],
        left=[group.left for row in cluster.rows for group in row.groups],
        divisible=[None if row.divisible is None else dict(row.divisible) for row in cluster.rows],
    )


def restore(cluster: ClusterState, saved: Saved) -> None:
    """Put all pods where they were; the cluster has the hosts that it had then."""
    for host, room, claims, shares in zip(cluster.hosts, saved.rooms, saved.claims, saved.shares, strict=True):
        host.room[:] = room
        host.claims = dict(claims)
        host.shares = {row: dict(share) for row, share in shares.items()}
    groups = (group for row in cluster.rows for group in row.groups)
    for group, left in zip(groups, saved.left, strict=True):
        group.left = left
    for row, amounts in zip(cluster.rows, saved.divisible, strict=True):
        row.divisible = None if amounts is None else dict(amounts)


# ---- search ------------------------------------------------------------------------------------------------------


def _search(cluster: ClusterState, fleet: DecisionState) -> None:
    """Serve each row in precedence order with as many pods as some packing of it and all rows above it allows."""
    rows = [
        row
        for row in cluster.rows
        if row.groups and row.spread is None and row.same_key is None and row.divisible is None
    ]
    pods = sum(group.count for row in rows for group in row.groups)
    if len(cluster.hosts) > SEARCHED_HOSTS_MAX or pods > SEARCHED_PODS_MAX:
        return
    before = save(cluster)
    served_before = [group.count - group.left for row in rows for group in row.groups]
    clear_rows(rows, cluster.hosts)
    groups = [group for row in rows for group in row.groups]
    question = _question(groups, cluster.hosts)
    answer = fleet.searched.get(question)
    if answer is None:
        answer = _most_pods(groups, cluster.hosts)
    fleet.searched[question] = answer
    if answer.accepted <= served_before:
        # The effort ran out before the search found what first fit had.
        restore(cluster, before)
        return
    for number, counts in answer.placed:
        for host, count in zip(cluster.hosts, counts, strict=True):
            place(groups[number], host, count)


def _question(groups: Sequence[PodGroup], hosts: Sequence[HostState]) -> Hashable:
    """Return everything that a search looks at: equal questions have equal answers."""
    numbers: dict[RowState, int] = {}
    asked = tuple(
        (
            numbers.setdefault(g.row, len(numbers)),
            g.index,
            g.request,
            g.count,
            g.limit,
            g.size,
            tuple(may_host(g, host) for host in hosts),
        )
        for g in groups
    )
    return asked, tuple((host.shape, tuple(host.room)) for host in hosts)


def _most_pods(groups: Sequence[PodGroup], hosts: Sequence[HostState]) -> Searched:
    accepted: dict[PodGroup, int] = {}
    best: dict[PodGroup, list[int]] = {}
    for group in groups:
        fewest, most = 0, group.count
        while fewest < most:
            count = (fewest + most + 1) // 2
            found = _feasible({**accepted, group: count}, hosts)
            if found is None:
                most = count - 1
            else:
                fewest, best = count, found
        accepted[group] = fewest
    number = {group: place for place, group in enumerate(groups)}
    return Searched([accepted[group] for group in groups], [(number[g], counts) for g, counts in best.items()])


def _feasible(wanted: dict[PodGroup, int], hosts: Sequence[HostState]) -> dict[PodGroup, list[int]] | None:
    """Return pods of each group by host such that all have a place, None when the search found no such packing."""
    groups = sorted((g for g, n in wanted.items() if n), key=lambda g: (-g.size, g.row.rank, g.index))
    pods = [group for group in groups for _ in range(wanted[group])]
    rooms = [list(host.room) for host in hosts]
    counts = {group: [0] * len(hosts) for group in wanted}
    steps = [0]

    def place_from(number: int, first: int) -> bool:
        if number == len(pods):
            return True
        group = pods[number]
        tried: set[tuple[int, bool, tuple[int, ...], int]] = set()
        for h in range(first, len(hosts)):
            host, room = hosts[h], rooms[h]
            if not may_host(group, host) or not fitting(room, group.request, 1):
                continue
            if group.limit and counts[group][h] >= group.limit:
                continue
            # Pods of pinned rows, which are placed later, distinguish machines that can be interrupted.
            is_risky = host.machine.interruption_probability > 0
            alike = (host.shape, is_risky, tuple(room), counts[group][h])
            if alike in tried:
                continue
            tried.add(alike)
            steps[0] += 1
            if steps[0] > SEARCH_STEPS_MAX:
                return False
            for d, milli in group.request:
                room[d] -= milli
            counts[group][h] += 1
            follows = number + 1 < len(pods) and pods[number + 1] is group
            if place_from(number + 1, h if follows else 0):
                return True
            for d, milli in group.request:
                room[d] += milli
            counts[group][h] -= 1
        return False

    return counts if place_from(0, 0) else None
