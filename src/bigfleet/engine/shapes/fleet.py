"""Builds the working state of one decision from a snapshot, the demand and the options.

Rows are set in processing order, machines in hosting order, and what no known machine can host is set aside. Nothing
here claims or acquires.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bigfleet.engine.decision import Options
from bigfleet.engine.matching import Shapes
from bigfleet.engine.pool import RESERVABLE_STATES, is_set_aside, is_sold_out
from bigfleet.engine.shapes.state import (
    ONE_POD,
    PODS,
    UNLIMITED,
    Cluster,
    Dimensions,
    Host,
    Impossible,
    Offer,
    PodGroup,
    Room,
    Row,
    dominant_share,
    largest,
    offers_of,
)
from bigfleet.engine.snapshot import Snapshot
from bigfleet.engine.targets import Target, class_key
from bigfleet.model import vector
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need
from bigfleet.model.shapes import Overhead
from bigfleet.model.states import MachineState
from bigfleet.model.vector import Vector

#: Machines that host pods of a cluster, or will.
_HELD = (MachineState.CONFIGURED, MachineState.CONFIGURING, MachineState.CREATING)


class HostOrder(NamedTuple):
    """Sort key of a cluster's machines: the least first."""

    state: int
    fleet_cost: float
    kept_penalty: float
    id: str


@dataclass(frozen=True, slots=True)
class ChoiceNote:
    """Why one machine was acquired."""

    row: Row
    #: What the machine costs by the hour at the margin, with what it was chosen to host; Idle ones after the head
    #: start.
    cost_usd_per_hour: float
    #: The machine that would have been taken otherwise, "" for none, and what it costs more for the same pods.
    runner_up: str
    costs_more_usd_per_hour: float
    #: Whether the choice was among the classes of the cluster's target alone.
    is_by_target: bool


@dataclass(slots=True, eq=False, kw_only=True)
class Fleet:
    """Everything that the phases of one decision share."""

    snapshot: Snapshot
    options: Options
    dimensions: Dimensions
    shapes: Shapes
    #: By id.
    clusters: dict[str, Cluster]
    #: In processing order.
    rows: list[Row]
    offers: list[Offer]
    #: Machines in creation whose cluster is not known, by (fingerprint, group); each by id.
    orphans: dict[tuple[str, str], list[Machine]]
    #: Machine id → the row that the machine drains for, or is a victim of.
    taken: dict[str, Row]
    #: Machine id → why it was acquired; machines that complete a target without a claim have none.
    notes: dict[str, "ChoiceNote"]
    _totals: dict[tuple[str, int], Room]
    _overheads: Mapping[str, Sequence[tuple[frozenset[int], Vector]]]

    def total(self, cluster: str, shape: int) -> Room:
        """Return a machine's supply less the cluster's overheads."""
        known = self._totals.get((cluster, shape))
        if known is None:
            overhead: Vector = vector.ZERO
            for matching, amounts in self._overheads.get(cluster, ()):
                if shape in matching:
                    overhead = vector.add(overhead, amounts)
            known = self.dimensions.room(self.shapes.examples[shape].supply, overhead)
            self._totals[(cluster, shape)] = known
        return known

    def totals(self, cluster: str) -> Mapping[int, Room]:
        """Return `total` of every offer's shape."""
        return {offer.shape: self.total(cluster, offer.shape) for offer in self.offers}

    def host(self, cluster: Cluster, machine: Machine) -> Host:
        """Return the machine as an empty host of the cluster; it is not added to the cluster."""
        shape = self.shapes.of[machine.id]
        total = self.total(cluster.id, shape)
        return Host(machine=machine, shape=shape, total=total, room=list(total))

    def free(self) -> list[int]:
        """Return what all offers together have of each dimension; `pods` without a limit counts as 0."""
        sums = [0] * len(self.dimensions.names)
        for offer in self.offers:
            room = self.total("", offer.shape)
            for d, milli in enumerate(room):
                if milli < UNLIMITED:
                    sums[d] += milli * offer.available
        return sums


def build(snapshot: Snapshot, demand: Sequence[Need], options: Options) -> Fleet:
    """Return the state before Phase 1."""
    usable = [m for m in snapshot.machines.values() if is_usable(m, options)]
    shapes = Shapes(snapshot.machines.values())
    vectors = [amounts for need in demand for amounts in _vectors(need)]
    fleet = Fleet(
        snapshot=snapshot,
        options=options,
        dimensions=Dimensions(vectors),
        shapes=shapes,
        clusters={},
        rows=[],
        offers=offers_of([m for m in usable if m.state in (MachineState.IDLE, MachineState.SPECULATIVE)], shapes),
        orphans={},
        taken={},
        notes={},
        _totals={},
        _overheads={
            cluster: [(_matching(shapes, o), o.resources) for o in overheads]
            for cluster, overheads in options.overheads.items()
        },
    )
    _add_rows(fleet, demand)
    _add_hosts(fleet, usable)
    return fleet


def is_usable(machine: Machine, options: Options) -> bool:
    """Return whether any phase but the third may see the machine."""
    if machine.id in options.unjoined or is_sold_out(machine, options) or is_set_aside(machine, options):
        return False
    return machine.id not in options.reserved or machine.state not in RESERVABLE_STATES


def _vectors(need: Need) -> list[Vector]:
    return [need.aggregate, need.min_unit, *(s.resources for s in (*need.shapes, *need.waiting))]


def _matching(shapes: Shapes, overhead: Overhead) -> frozenset[int]:
    return frozenset(n for n, example in enumerate(shapes.examples) if overhead.applies(example.attribute))


# ---- rows --------------------------------------------------------------------------------------------------------


def _add_rows(fleet: Fleet, demand: Sequence[Need]) -> None:
    """Make the rows, clusters and groups; set aside what no known machine can host."""
    known = frozenset(fleet.shapes.of[m.id] for m in fleet.snapshot.machines.values() if _can_be_known(m, fleet))
    most = largest((fleet.total("", n) for n in known), len(fleet.dimensions.names))
    for position, need in enumerate(demand):
        cluster = fleet.clusters.setdefault(need.cluster, Cluster(id=need.cluster))
        row = Row(need=need, position=position, cluster=cluster, matching=fleet.shapes.matching(need.profile))
        if need.shapes:
            row.groups = _groups(fleet, row, most)
            _set_aside(fleet, row, known)
        else:
            row.divisible = dict(fleet.dimensions.request(need.aggregate))
            row.unit = fleet.dimensions.request(need.min_unit)
            _check_unit(fleet, row, known)
        cluster.rows.append(row)
        fleet.rows.append(row)
    fleet.rows.sort(key=lambda row: row.need.profile.precedence, reverse=True)
    for rank, row in enumerate(fleet.rows):
        row.rank = rank
    for cluster in fleet.clusters.values():
        cluster.rows.sort(key=lambda row: row.need.profile.precedence, reverse=True)


def _can_be_known(machine: Machine, fleet: Fleet) -> bool:
    return machine.id not in fleet.options.unjoined and machine.state is not MachineState.FAILED


def _groups(fleet: Fleet, row: Row, most: Sequence[int]) -> list[PodGroup]:
    groups = []
    for index, shape in enumerate((*row.need.shapes, *row.need.waiting)):
        request = fleet.dimensions.request({**shape.resources, PODS: shape.resources.get(PODS, 0) + ONE_POD})
        group = PodGroup(
            row=row,
            index=index,
            request=request,
            count=shape.count,
            limit=shape.max_per_machine,
            is_waiting=index >= len(row.need.shapes),
            size=dominant_share(request, most, fleet.dimensions.pods),
        )
        groups.append(group)
    return sorted(groups, key=lambda g: (-g.size, g.index))


def _set_aside(fleet: Fleet, row: Row, known: frozenset[int]) -> None:
    """Take out the groups of which no known machine can host one pod, with the dimension that comes closest."""
    candidates = [fleet.total(row.cluster.id, n) for n in sorted(known & row.matching)]
    most = largest(candidates, len(fleet.dimensions.names))
    hostable = []
    for group in row.groups:
        if any(all(room[d] >= milli for d, milli in group.request) for room in candidates):
            hostable.append(group)
            continue
        lacking = [(d, milli) for d, milli in group.request if most[d] < milli]
        dimension, wanted = lacking[0] if lacking else group.request[0]
        name = fleet.dimensions.names[dimension] if candidates else ""
        row.impossible.append(Impossible(group, name, wanted, most[dimension]))
    row.groups = hostable


def _check_unit(fleet: Fleet, row: Row, known: frozenset[int]) -> None:
    """Let a row keep what it holds, and acquire nothing, when no known machine covers its unit."""
    candidates = [fleet.total(row.cluster.id, n) for n in sorted(known & row.matching)]
    if not candidates or any(all(room[d] >= milli for d, milli in row.unit) for room in candidates):
        return
    most = largest(candidates, len(fleet.dimensions.names))
    lacking = [(d, milli) for d, milli in row.unit if most[d] < milli]
    dimension, wanted = lacking[0] if lacking else row.unit[0]
    row.impossible.append(Impossible(None, fleet.dimensions.names[dimension], wanted, most[dimension]))
    row.unit = ()


# ---- hosts -------------------------------------------------------------------------------------------------------


def _add_hosts(fleet: Fleet, usable: Sequence[Machine]) -> None:
    by_cluster: defaultdict[str, list[Machine]] = defaultdict(list)
    orphans: defaultdict[tuple[str, str], list[Machine]] = defaultdict(list)
    for machine in usable:
        if machine.state not in _HELD:
            continue
        owner = machine.intended_cluster if machine.state is MachineState.CREATING else machine.cluster
        if owner:
            by_cluster[owner].append(machine)
        else:
            orphans[(machine.assigned_need_fingerprint, machine.assigned_group)].append(machine)
    fleet.orphans.update(orphans)
    for cluster in fleet.clusters.values():
        cluster.hosts = [fleet.host(cluster, machine) for machine in by_cluster[cluster.id]]
        sort_hosts(cluster)
        target = fleet.options.targets.get(cluster.id)
        if target is not None:
            _mark_targets(cluster, target)


def sort_hosts(cluster: Cluster) -> None:
    """Put the cluster's machines in hosting order; what is acquired counts as Configured."""
    wanted = _wanted(cluster)
    cluster.hosts.sort(key=lambda host: _order(host, wanted))


def _wanted(cluster: Cluster) -> dict[int, int]:
    """Return the cluster's whole demand by dimension."""
    total: dict[int, int] = {}
    for row in cluster.rows:
        for d, milli in (row.divisible or {}).items():
            total[d] = total.get(d, 0) + milli
        for group in row.groups:
            for d, milli in group.request:
                total[d] = total.get(d, 0) + milli * group.count
    return total


def fleet_cost(price: float, total: Room, wanted: Mapping[int, int]) -> float:
    """Return what the whole demand would cost on machines of this kind alone, dollars an hour."""
    share = max(
        (float(milli) / float(total[d]) for d, milli in wanted.items() if 0 < total[d] < UNLIMITED), default=0.0
    )
    return price * share


def _order(host: Host, wanted: Mapping[int, int]) -> HostOrder:
    machine = host.machine
    return HostOrder(
        state=_HELD.index(machine.state) if machine.state in _HELD else 0,
        fleet_cost=fleet_cost(machine.price_usd_per_hour, host.total, wanted),
        kept_penalty=-machine.assigned_reclamation_penalty_dollars,
        id=machine.id,
    )


def _mark_targets(cluster: Cluster, target: Target) -> None:
    """Mark the machines that the target composition keeps, and put them before the others."""
    left = dict(target.counts)
    for host in cluster.hosts:
        key = class_key(host.machine)
        if left.get(key, 0) > 0:
            left[key] -= 1
            host.is_target = True
    cluster.hosts.sort(key=lambda host: not host.is_target)
