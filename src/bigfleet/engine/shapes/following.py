"""Applies a cluster's target composition: places pods as planned and acquires the planned machines.

The planned machines of a class are alike. They are numbered by precedence of what was planned on them, and the
machines that the cluster holds have the first numbers, in hosting order: what a cluster still waits for serves its
lowest rows. A row acquires the machines on which pods of it were planned, at its turn; lower rows that were planned on
them are placed with it. What a plan does not cover is placed and acquired as without one.
"""

from collections import Counter
from collections.abc import Iterable

from bigfleet.engine.shapes.fleet import DecisionState
from bigfleet.engine.shapes.hosting import capacity, is_even, may_host, place, place_more, trim_spread
from bigfleet.engine.shapes.state import ClusterState, HostState, PodGroup, RowState
from bigfleet.engine.targets import ClassKey
from bigfleet.model.need import RowKey

MachineNumber = tuple[ClassKey, int]
Planned = dict[MachineNumber, list[tuple[PodGroup, int]]]


def read_plan(cluster: ClusterState, fleet: DecisionState) -> None:
    """Note what was planned on which machine, and number the machines that the cluster holds."""
    target = fleet.options.targets.get(cluster.id)
    if target is None:
        return
    groups = groups_by_name(cluster)
    planned_on: Planned = {}
    for claim in target.claims:
        group = groups.get((claim.row, claim.shape))
        if group is None:
            continue
        for number in range(claim.first, claim.first + claim.machines):
            planned_on.setdefault((claim.machine_class, number), []).append((group, claim.count))
    cluster.planned = _by_precedence(planned_on)
    for planned_number, planned in cluster.planned.items():
        for row in dict.fromkeys(group.row for group, _ in planned):
            cluster.planned_for.setdefault(row, []).append(planned_number)
    number_hosts(cluster, fleet)


def number_hosts(cluster: ClusterState, fleet: DecisionState) -> None:
    """Number the machines that the cluster holds within their classes, in hosting order."""
    sizes: Counter[ClassKey] = Counter()
    cluster.numbered = {}
    for host in cluster.hosts:
        key = fleet.class_of(host)
        cluster.numbered[(key, sizes[key])] = host
        sizes[key] += 1


def groups_by_name(cluster: ClusterState) -> dict[tuple[RowKey, int], PodGroup]:
    """Return the cluster's pods by what a target calls them, waiting ones apart.

    That is the key of the row, and the place among the shapes of all rows of the cluster with this key, in list order:
    several rows may have one key.
    """
    before: Counter[RowKey] = Counter()
    found = {}
    for row in cluster.rows:
        key = row.need.key
        found.update({(key, before[key] + group.index): group for group in row.groups if not group.is_waiting})
        before[key] += len(row.need.shapes)
    return found


def _by_precedence(planned_on: Planned) -> Planned:
    """Number the machines of each class again: first those with the most pods of the highest row.

    The plan's own numbers would do while the cluster holds all of them. A cluster that lost a machine would have its
    highest row take the next free one, although it has room for that row, and rows of other clusters between the two
    would lack it and preempt a machine of the same cluster again.
    """
    order = sorted(planned_on, key=lambda number: sorted((g.row.rank, g.index, -n) for g, n in planned_on[number]))
    sizes: Counter[ClassKey] = Counter()
    planned: Planned = {}
    for machine_class, number in order:
        planned[machine_class, sizes[machine_class]] = planned_on[machine_class, number]
        sizes[machine_class] += 1
    return planned


def place_as_planned(cluster: ClusterState) -> None:
    """Place what was planned on the machines that the cluster holds."""
    for number, host in cluster.numbered.items():
        _fill(host, cluster.planned.get(number, ()))


def _fill(host: HostState, planned: Iterable[tuple[PodGroup, int]]) -> None:
    for group, count in planned:
        row = group.row
        is_elsewhere = row.same_key is not None and row.domain is None
        if not is_elsewhere and may_host(group, host):
            place(group, host, min(count, capacity(group, host)))


def keep_spread(row: RowState) -> bool:
    """Take back what a plan has beyond the strict spread of a row whose pods all have a place; return whether it did.

    A scheduler could not place it there. A machine that was acquired for it and hosts nothing else is not needed. A row
    that is short stands as planned: its pods may run already, and a domain lost machines.
    """
    spread, hosts = row.spread, row.cluster.hosts
    if spread is None or row not in row.cluster.planned_for or row.has_left or is_even(row, hosts):
        return False
    trimmed = trim_spread(row, hosts, spread)
    place_more(row, hosts)
    for host in trimmed:
        if host.offer is not None and not host.is_claimed:
            host.is_target = False
    return True


def pending(row: RowState) -> dict[PodGroup, int]:
    """Return how many of the row's unplaced pods are planned on machines that the cluster does not hold yet."""
    counts: Counter[PodGroup] = Counter()
    for group, count in (entry for number in _not_held(row) for entry in row.cluster.planned[number]):
        if group.row is row:
            counts[group] += count
    return {group: min(count, group.left) for group, count in counts.items() if group.left}


def _not_held(row: RowState) -> list[MachineNumber]:
    """Return the numbers on which pods of the row are planned and that are neither held nor known not to be had."""
    cluster = row.cluster
    numbers = cluster.planned_for.get(row, ())
    return [number for number in numbers if number not in cluster.numbered and number not in cluster.unavailable]


def acquire_as_planned(row: RowState, fleet: DecisionState) -> list[HostState]:
    """Acquire the machines on which pods of the row were planned and have no place yet; return them.

    A machine that is not to be had is skipped, and so is what was planned on it.
    """
    cluster = row.cluster
    acquired = []
    for number in _not_held(row):
        planned = cluster.planned[number]
        if not any(group.row is row and group.left for group, _ in planned):
            continue
        found = next((o for o in fleet.offers_of(number[0]) if o.available and row.may_use(o.example, o.shape)), None)
        if found is None:
            cluster.unavailable.add(number)
            continue
        host = fleet.host(cluster, found.take())
        host.offer, host.is_target = found, True
        cluster.hosts.append(host)
        cluster.acquired.append(host)
        cluster.numbered[number] = host
        _fill(host, planned)
        acquired.append(host)
    return acquired


def drop_surplus(cluster: ClusterState, fleet: DecisionState) -> None:
    """Retain no more machines without a claim than the target counts beyond the claimed ones of their class.

    Rows may have claimed other machines of a class than those that were retained before credit: a gang keeps its own.
    """
    target = fleet.options.targets.get(cluster.id)
    if target is None:
        return
    left = Counter(target.counts)
    left.subtract(fleet.class_of(host) for host in cluster.hosts if host.is_claimed)
    for host in cluster.hosts:
        if host.is_target and not host.is_claimed:
            host.is_target = left[fleet.class_of(host)] > 0
            left[fleet.class_of(host)] -= 1


def missing_of_target(cluster: ClusterState, fleet: DecisionState) -> dict[ClassKey, int]:
    """Return how many machines of each class the cluster lacks of its target."""
    target = fleet.options.targets.get(cluster.id)
    if target is None:
        return {}
    missing = dict(target.counts)
    for host in cluster.hosts:
        key = fleet.class_of(host)
        if key in missing:
            missing[key] -= 1
    return missing


def lacks_of_target(cluster: ClusterState, fleet: DecisionState) -> bool:
    """Return whether the cluster lacks machines of its target."""
    return any(count > 0 for count in missing_of_target(cluster, fleet).values())
