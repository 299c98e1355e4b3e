"""Forms units of machines that are preempted together, and orders them by the value that is lost.

A unit lies within one cluster and depends on its claims alone, so a cluster keeps its units for as long as it is not
decided on again.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain, islice
from typing import Final

from bigfleet.engine.shapes.fleet import DecisionState
from bigfleet.engine.shapes.slack import SlackPriorities
from bigfleet.engine.shapes.state import (
    UNLIMITED,
    ClaimLoss,
    ClusterState,
    ClusterUnits,
    HostState,
    RowState,
    Unit,
    UnitsOfShapes,
    largest,
)
from bigfleet.model.penalty import bucket_upper_dollars

#: Lowest priority of each class (docs/spec/engine.md §10): other, batch, service, critical.
CLASS_FLOORS: Final = (100, 1_000, 1_000_000)
#: Classes below those of priorities: machines that nothing protects, and those that a target retains without a claim.
EXCESS, SLACK = -2, -1
#: Most units that one row compares.
UNITS_MAX: Final = 4_096
#: Below every priority, of which -2^31 is the lowest: that of a unit which nothing protects.
UNPROTECTED: Final = -(1 << 31) - 1

_GangKey = tuple[str, str, str]


def units_for(row: RowState, fleet: DecisionState) -> list[Unit]:
    """Return the units that the row may preempt, the least loss first, at most `UNITS_MAX`.

    Units of higher priority classes are tried only where those of lower ones do not make the room, which the order by
    loss brings about.
    """
    found = [
        _eligible(row, units, fleet)
        for name, serving in _serving(fleet).items()
        if name != row.cluster.id
        for alike in _units_with(row.matching, serving)
        if (units := _ordered(alike, serving)) and _yields(alike.lowest, row)
    ]
    return list(islice(heapq.merge(*found, key=lambda unit: unit.loss), UNITS_MAX))


def _units_with(shapes: frozenset[int], serving: ClusterUnits) -> Iterable[UnitsOfShapes]:
    """Return the units of a cluster in which a machine is of one of the shapes, each once."""
    known = serving.by_shape
    there = [shape for shape in shapes if shape in known] if len(shapes) < len(known) else shapes.intersection(known)
    return dict.fromkeys(alike for shape in there for alike in known[shape])


def priority_class(priority: int) -> int:
    """Return the class of a priority, 0 lowest."""
    return sum(priority >= floor for floor in CLASS_FLOORS)


def _protecting(host: HostState, rows: Set[RowState], slack: SlackPriorities, *, is_reported: bool) -> int | None:
    """Return the priority that protects a machine; None for excess, which nothing protects.

    The highest priority among its claims when its cluster has reported, else its stamp's.
    """
    if not is_reported:
        return host.machine.assigned_priority
    if rows:
        return max([row.need.profile.priority for row in rows])
    return slack.of(host) if host.is_target else None


def _yields(priority: int, row: RowState) -> bool:
    return priority == UNPROTECTED or priority < row.need.profile.priority


def _eligible(row: RowState, units: Iterable[Unit], fleet: DecisionState) -> Iterator[Unit]:
    for unit in units:
        if (
            _yields(unit.loss.priority, row)
            and any(row.may_use(host.machine, host.shape) for host in unit.hosts)
            and not any(host.machine.id in fleet.taken for host in unit.hosts)
        ):
            yield unit


# ---- the units of a cluster --------------------------------------------------------------------------------------


def _serving(fleet: DecisionState) -> Mapping[str, ClusterUnits]:
    """Return the units of each cluster that has Configured machines; those without demand have units as well."""
    if fleet.serving is None:
        fleet.serving = {}
        outdated = list(fleet.machines.clusters_with_machines())
    else:
        outdated = [name for name, units in fleet.serving.items() if _is_outdated(name, units, fleet)]
    if outdated:
        fleet.serving.update((name, _machines_of(name, fleet)) for name in outdated)
        basis = tuple(largest((list(u.largest) for u in fleet.serving.values()), len(fleet.dimensions.names)))
        for name, units in fleet.serving.items():
            _form(units, (basis, name in fleet.options.reported))
    return fleet.serving


def _is_outdated(name: str, units: ClusterUnits, fleet: DecisionState) -> bool:
    cluster = fleet.clusters.get(name)
    return cluster is not None and cluster.units is not units


def _machines_of(name: str, fleet: DecisionState) -> ClusterUnits:
    """Return the cluster's machines, with its stored units."""
    cluster = fleet.clusters.get(name) or fleet.unchanged.get(name)
    if cluster is not None and cluster.units is not None:
        return cluster.units
    hosts = _hosts_without_demand(name, fleet) if cluster is None else _hosts_of(cluster)
    rooms = {(host.shape, tuple(host.total)) for host in hosts}
    most = largest((list(room) for _, room in rooms), len(fleet.dimensions.names))
    rows = cluster.rows if cluster is not None and name in fleet.options.targets else ()
    units = ClusterUnits(hosts=hosts, rows=rows, largest=most)
    if cluster is not None:
        cluster.units = units
    return units


def _hosts_of(cluster: ClusterState) -> list[HostState]:
    # Machines of other clusters stand among the hosts while a row counts on them.
    found = [host for host in cluster.hosts if host.is_configured and host.machine.cluster == cluster.id]
    return sorted(found, key=lambda host: host.machine.id)


def _hosts_without_demand(name: str, fleet: DecisionState) -> list[HostState]:
    empty = ClusterState(id=name)
    machines = fleet.machines.configured_in(name)
    return [fleet.host(empty, machine) for machine in machines if machine.id not in fleet.options.unjoined]


def _form(serving: ClusterUnits, basis: tuple[tuple[int, ...], bool]) -> None:
    """Form the cluster's units, unless they stand."""
    if serving.basis == basis:
        return
    is_reported = basis[1]
    gangs = {host: keys for host in serving.hosts if (keys := _gangs(host, is_reported=is_reported))}
    of_gang: defaultdict[_GangKey, list[HostState]] = defaultdict(list)
    for host, keys in gangs.items():
        for key in keys:
            of_gang[key].append(host)
    formed: set[HostState] = set()
    by_shapes: defaultdict[frozenset[int], UnitsOfShapes] = defaultdict(UnitsOfShapes)
    of_shape = {shape: frozenset([shape]) for shape in {host.shape for host in serving.hosts}}
    for host in serving.hosts:
        if host not in gangs:
            by_shapes[of_shape[host.shape]].hosts.append((host,))
        elif host not in formed:
            hosts = _closure(host, of_gang, gangs)
            formed.update(hosts)
            by_shapes[frozenset([other.shape for other in hosts])].hosts.append(hosts)
    serving.by_shape = {}
    for shapes, alike in by_shapes.items():
        for shape in shapes:
            serving.by_shape.setdefault(shape, []).append(alike)
    serving.basis = basis


def _ordered(alike: UnitsOfShapes, serving: ClusterUnits) -> Sequence[Unit]:
    """Return units, the least loss first; losses are found when a row that may use the machines asks."""
    if alike.units is None:
        assert serving.basis is not None, "the units are formed"
        most, is_reported = serving.basis
        supplies = _Supplies(most)
        slack = SlackPriorities(serving.rows, serving.hosts)
        found = [Unit(hosts, _loss(hosts, supplies, slack, is_reported=is_reported)) for hosts in alike.hosts]
        alike.units = sorted(found, key=lambda unit: unit.loss)
        alike.lowest = min(unit.loss.priority for unit in found)
    return alike.units


def _gangs(host: HostState, *, is_reported: bool) -> list[_GangKey]:
    """Return the gangs that have pods on the machine; by its stamp where the cluster has not reported."""
    if is_reported:
        found = {group.row.need.key for group in host.claims if group.row.same_key is not None}
        found.update(row.need.key for row in host.shares if row.same_key is not None)
        return sorted(found)
    machine = host.machine
    return (
        [(machine.cluster, machine.assigned_need_fingerprint, machine.assigned_group)] if machine.assigned_group else []
    )


def _closure(
    host: HostState,
    of_gang: Mapping[_GangKey, Sequence[HostState]],
    gangs: Mapping[HostState, Sequence[_GangKey]],
) -> tuple[HostState, ...]:
    found, waiting = {host.machine.id: host}, [host]
    while waiting:
        for key in gangs[waiting.pop()]:
            for other in of_gang.get(key, ()):
                if other.machine.id not in found:
                    found[other.machine.id] = other
                    waiting.append(other)
    return tuple(found[machine_id] for machine_id in sorted(found))


class _Supplies(dict[int, Sequence[float]]):
    """Finds, by the number of the shape, the shares that machines of one cluster have of the largest supply."""

    def __init__(self, most: Sequence[int]) -> None:
        super().__init__()
        self._most = most

    def of(self, host: HostState) -> Sequence[float]:
        """Return those of a machine, by dimension."""
        found = self.get(host.shape)
        if found is None:
            most = self._most
            amounts = enumerate(host.total)
            found = [float(milli) / float(most[d]) for d, milli in amounts if most[d] and milli < UNLIMITED]
            self[host.shape] = found
        return found


def _loss(hosts: Sequence[HostState], supplies: _Supplies, slack: SlackPriorities, *, is_reported: bool) -> ClaimLoss:
    highest, lost_class = UNPROTECTED, EXCESS
    penalties = []
    for host in hosts:
        rows = host.rows() if is_reported else set()
        priority = _protecting(host, rows, slack, is_reported=is_reported)
        if priority is not None:
            highest = max(highest, priority)
            lost_class = max(lost_class, priority_class(priority) if rows or not is_reported else SLACK)
        penalties.append(_penalties(host, rows))
    supply, lost = sum(chain.from_iterable([supplies.of(host) for host in hosts])), sum(penalties)
    return ClaimLoss(lost_class, lost, highest, supply, hosts[0].machine.id)


def _penalties(host: HostState, rows: Set[RowState]) -> float:
    """Return the reclamation and interruption penalties of what runs on the machine, dollars.

    By its stamp, if its cluster has not reported or nothing runs on it; then there are no rows.
    """
    if rows:
        profiles = [row.need.profile for row in sorted(rows, key=lambda r: r.rank)]
        return sum(
            bucket_upper_dollars(p.interruption_bucket) + bucket_upper_dollars(p.reclamation_bucket) for p in profiles
        )
    machine = host.machine
    return machine.assigned_interruption_penalty_dollars + machine.assigned_reclamation_penalty_dollars
