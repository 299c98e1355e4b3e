"""Builds the working state of one decision from the machines, the demand and the options.

Rows are set in processing order, machines in hosting order, and what no known machine can host is set aside. Nothing
here claims or acquires.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, repeat
from typing import Final

from bigfleet.engine.bulk import made_at_once
from bigfleet.engine.decision import Options, WithheldPools
from bigfleet.engine.shapes.choice import PodPrices, Prices, reference_prices
from bigfleet.engine.shapes.columns.loops import PodLoops
from bigfleet.engine.shapes.columns.machines import ColumnMachines
from bigfleet.engine.shapes.columns.rows import RowsInColumns
from bigfleet.engine.shapes.machines import HELD, Machines, OrphanKey
from bigfleet.engine.shapes.state import (
    BEYOND,
    ONE_POD,
    PODS,
    UNLIMITED,
    ClusterState,
    ClusterUnits,
    Dimensions,
    DomainVerdict,
    HostState,
    Impossible,
    OfferState,
    PodGroup,
    Request,
    Room,
    RowState,
    Searched,
    dominant_share,
    largest,
)
from bigfleet.engine.targets import ClassKey, Target, class_key
from bigfleet.model import vector
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need, RowKey
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.model.vector import Vector

_STATE_ORDER: Final = {state: place for place, state in enumerate(HELD)}

#: Answers about requests of pods that are stored, of each kind.
CACHED_MAX: Final = 200_000


@dataclass(frozen=True, slots=True)
class ChoiceNote:
    """Why one machine was acquired."""

    row: RowState
    #: What the machine costs by the hour at the margin, with what it was chosen to host; Idle ones after the head
    #: start.
    cost_usd_per_hour: float
    #: The machine that would have been taken otherwise, "" for none, and what it costs more for the same pods.
    runner_up: str
    costs_more_usd_per_hour: float
    #: Whether the choice was among the classes of the cluster's target alone.
    is_by_target: bool


class Rooms:
    """What machines of each shape offer a cluster: supply less overheads. What is cached only saves work."""

    def __init__(self, machines: Machines, options: Options, dimensions: Dimensions) -> None:
        self._machines, self._overheads, self._dimensions = machines, options.overheads, dimensions
        self._totals: dict[tuple[str, int], Room] = {}
        self._largest: dict[tuple[str, frozenset[int]], tuple[list[tuple[int, ...]], list[int]]] = {}
        self._pods: dict[tuple[tuple[str, int], ...], tuple[Request, float]] = {}
        self._hostable: dict[tuple[str, frozenset[int]], _Hostable] = {}

    def total(self, cluster: str, shape: int) -> Room:
        """Return a machine's supply less the cluster's overheads, below `BEYOND`; not to be changed."""
        if cluster not in self._overheads:
            cluster = ""
        known = self._totals.get((cluster, shape))
        if known is None:
            example, overhead = self._machines.example(shape), vector.ZERO
            for entry in self._overheads.get(cluster, ()):
                if entry.applies(example.attribute):
                    overhead = vector.add(overhead, entry.resources)
            room = self._dimensions.room(example.supply, overhead)
            known = [milli if milli == UNLIMITED else min(milli, BEYOND - 1) for milli in room]
            self._totals[(cluster, shape)] = known
        return known

    def known(self, cluster: str, matching: frozenset[int]) -> tuple[list[tuple[int, ...]], list[int]]:
        """Return the different rooms of the known machines of some shapes, and the largest room of each dimension."""
        key = (cluster if cluster in self._overheads else "", matching)
        found = self._largest.get(key)
        if found is None:
            rooms = {tuple(self.total(key[0], shape)) for shape in matching & self._machines.known_shapes}
            found = self._largest[key] = (list(rooms), largest(map(list, rooms), len(self._dimensions.names)))
        return found

    def pod(self, resources: Vector) -> tuple[Request, float]:
        """Return what a pod of these resources requests, up to `BEYOND`, and its size."""
        key = tuple(resources.items())
        found = self._pods.get(key)
        if found is None:
            if len(self._pods) >= CACHED_MAX:
                self._pods.clear()
            _rooms, most = self.known("", self._machines.known_shapes)
            asked = self._dimensions.request({**resources, PODS: resources.get(PODS, 0) + ONE_POD})
            request = tuple((d, min(milli, BEYOND)) for d, milli in asked)
            found = self._pods[key] = (request, dominant_share(request, most, self._dimensions.pods))
        return found

    def request(self, amounts: Vector) -> Request:
        """Return the positive dimensions of a vector."""
        return self._dimensions.request(amounts)

    def hostable(self, cluster: str, matching: frozenset[int]) -> Mapping[Request, bool]:
        """Return for every request whether a known machine of some shapes has room for it when it is empty."""
        key = (cluster if cluster in self._overheads else "", matching)
        found = self._hostable.get(key)
        if found is None:
            found = self._hostable[key] = _Hostable(self.known(cluster, matching)[0])
        return found


class _Hostable(dict[Request, bool]):
    """Finds for a request whether any of some rooms holds it, each request once."""

    def __init__(self, rooms: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self._rooms = rooms

    def __missing__(self, request: Request) -> bool:
        if len(self) >= CACHED_MAX:
            self.clear()
        found = self[request] = any(all(room[d] >= milli for d, milli in request) for room in self._rooms)
        return found


@dataclass(slots=True, eq=False, kw_only=True)
class DecisionState:
    """Everything that the phases of one decision share."""

    machines: Machines
    #: The machines, if they are in columns: then hosts are made in credit, where they are needed.
    columns: ColumnMachines | None = None
    #: The rows of `clusters` in columns, if the machines are; there may be rows of others.
    read: RowsInColumns | None = None
    #: Compiled loops; None for arrays alone. Both give one answer.
    loops: PodLoops | None = None
    options: Options
    dimensions: Dimensions
    rooms: Rooms
    #: Clusters that are decided on, by id.
    clusters: dict[str, ClusterState] = field(default_factory=dict)
    #: Clusters whose rows were complete in an earlier decision and that nothing touched since, by id; they are only
    #: looked at for victims.
    unchanged: Mapping[str, ClusterState] = field(default_factory=dict)
    #: Rows of `clusters` in processing order; without those of clusters that credit on columns served whole.
    rows: list[RowState] = field(default_factory=list)
    offers: list[OfferState]
    #: Machines in creation whose cluster is not known; each list by id.
    orphans: dict[OrphanKey, list[Machine]]
    #: Machine id → the row that the machine drains for, or is a victim of.
    taken: dict[str, RowState] = field(default_factory=dict)
    #: Machine id → why it was acquired; machines that complete a target without a claim have none.
    notes: dict[str, ChoiceNote] = field(default_factory=dict)
    #: What searches of small clusters found; it only saves work.
    searched: dict[Hashable, Searched] = field(default_factory=dict)
    #: What domains offer gangs; it only saves work.
    verdicts: dict[Hashable, DomainVerdict] = field(default_factory=dict)
    #: Numbers of offers; decisions that share verdicts share it.
    offer_numbers: dict[Hashable, int] = field(default_factory=dict)
    #: Configured machines by cluster; made when a row looks for victims.
    serving: dict[str, ClusterUnits] | None = None
    #: Draining machines by the key of the row that they drain for; made when a row asks.
    _coming: dict[RowKey, list[Machine]] | None = None
    _totals: dict[str, Mapping[int, Room]] = field(default_factory=dict)
    _free: list[int] | None = None
    #: By shape, capacity type, price and probability.
    _classes: dict[tuple[int, CapacityType, float, float], ClassKey] = field(default_factory=dict)
    _by_class: dict[ClassKey, list[OfferState]] | None = None
    #: By the shapes that a row may use, whether it is pinned, and what is withheld from its cluster.
    _usable: dict[tuple[frozenset[int], bool, WithheldPools | None], list[OfferState]] = field(default_factory=dict)
    _usable_in_domains: dict[tuple[frozenset[int], bool, WithheldPools | None, str], dict[str, list[OfferState]]] = (
        field(default_factory=dict)
    )
    _pod_prices: dict[tuple[str, frozenset[int], bool, WithheldPools | None], PodPrices] = field(default_factory=dict)
    _pod_prices_in: dict[tuple[str, WithheldPools | None], PodPrices] = field(default_factory=dict)
    #: Of gangs with shapes.
    _gang_prices: dict[PodPrices, tuple[Prices, tuple[float, ...]]] = field(default_factory=dict)
    _in_domain: dict[tuple[frozenset[int], str], dict[str, frozenset[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for offer in self.offers:
            machine = offer.example
            # The first machine decides between offers that are equal otherwise.
            kind = (
                offer.shape,
                machine.state,
                machine.capacity_type,
                machine.price_usd_per_hour,
                machine.interruption_probability,
                machine.id,
            )
            offer.number = self.offer_numbers.setdefault(kind, len(self.offer_numbers))

    def total(self, cluster: str, shape: int) -> Room:
        """Return a machine's supply less the cluster's overheads, below `BEYOND`; not to be changed."""
        return self.rooms.total(cluster, shape)

    def totals(self, cluster: str) -> Mapping[int, Room]:
        """Return `total` of every offer's shape."""
        cluster = self._overheads_of(cluster)
        found = self._totals.get(cluster)
        if found is None:
            found = self._totals[cluster] = {offer.shape: self.total(cluster, offer.shape) for offer in self.offers}
        return found

    def class_of(self, host: HostState) -> ClassKey:
        """Return the class of a machine."""
        machine = host.machine
        key = (host.shape, machine.capacity_type, machine.price_usd_per_hour, machine.interruption_probability)
        found = self._classes.get(key)
        if found is None:
            found = self._classes[key] = class_key(machine)
        return found

    def idle_first(self) -> list[OfferState]:
        """Return the offers with those of Idle machines before the others, then by price, otherwise in their order.

        Of a class, machines that are there serve minutes earlier; Spot machines of a class differ in price.
        """
        return sorted(self.offers, key=lambda o: (o.state is not MachineState.IDLE, o.example.price_usd_per_hour))

    def offers_of(self, machine_class: ClassKey) -> Sequence[OfferState]:
        """Return the offers of a class in the order of `idle_first`."""
        if self._by_class is None:
            self._by_class = defaultdict(list)
            for offer in self.idle_first():
                self._by_class[class_key(offer.example)].append(offer)
        return self._by_class.get(machine_class, ())

    def usable(self, row: RowState) -> list[OfferState]:
        """Return the offers that the row may use, whether anything is left of them or not."""
        key = (row.matching, row.is_pinned, row.cluster.withheld)
        found = self._usable.get(key)
        if found is None:
            found = self._usable[key] = [o for o in self.offers if row.may_use(o.example, o.shape)]
        return found

    def usable_in_domains(self, row: RowState, key: str) -> Mapping[str, Sequence[OfferState]]:
        """Return the offers that the row may use by their value of the key; those without one are left out."""
        question = (row.matching, row.is_pinned, row.cluster.withheld, key)
        found = self._usable_in_domains.get(question)
        if found is None:
            found = self._usable_in_domains[question] = {}
            for offer in self.usable(row):
                value = offer.example.attribute(key)
                if value is not None:
                    found.setdefault(value, []).append(offer)
        return found

    def pod_prices(self, row: RowState) -> PodPrices:
        """Return the prices of pods on the offers that the row may use."""
        key = (self._overheads_of(row.cluster.id), row.matching, row.is_pinned, row.cluster.withheld)
        found = self._pod_prices.get(key)
        if found is None:
            totals = self.totals(row.cluster.id)
            found = self._pod_prices[key] = PodPrices(self.usable(row), totals, self.dimensions.pods)
        return found

    def pod_prices_in(self, cluster: str) -> PodPrices:
        """Return the prices of a cluster's pods on all offers."""
        key = (self._overheads_of(cluster), self.options.withheld.get(cluster))
        found = self._pod_prices_in.get(key)
        if found is None:
            found = self._pod_prices_in[key] = PodPrices(self.offers, self.totals(cluster), self.dimensions.pods)
        return found

    def _overheads_of(self, cluster: str) -> str:
        """Return the cluster if it has overheads, "" for all others: machines offer these the same."""
        return cluster if cluster in self.options.overheads else ""

    def gang_prices(self, row: RowState) -> tuple[Prices, tuple[float, ...]]:
        """Return the prices of a gang's pods, and what its choice depends on besides the offers."""
        of_pods, free = self.pod_prices(row), self.free_at_first()
        found = self._gang_prices.get(of_pods)
        if found is None or row.divisible is not None:
            prices = reference_prices([row], of_pods, free, self.dimensions.pods)
            found = prices, (self.options.idle_head_start, of_pods.dearest, *free)
            if row.divisible is None:
                self._gang_prices[of_pods] = found
        return found

    def in_domains(self, row: RowState, key: str) -> Mapping[str, frozenset[int]]:
        """Return the shapes that the row may use by their value of the key; those without one are left out."""
        known = self._in_domain.get((row.matching, key))
        if known is None:
            groups: defaultdict[str, set[int]] = defaultdict(set)
            for shape in row.matching:
                value = self.machines.example(shape).attribute(key)
                if value is not None:
                    groups[value].add(shape)
            known = self._in_domain[(row.matching, key)] = {v: frozenset(found) for v, found in groups.items()}
        return known

    def coming(self, row: RowState) -> Sequence[Machine]:
        """Return the machines that drain for rows of this key, by id."""
        if self._coming is None:
            self._coming = {}
            for machine in self.machines.draining():
                if machine.preempted_for is not None:
                    self._coming.setdefault(machine.preempted_for, []).append(machine)
        return self._coming.get(row.need.key, ())

    def host(self, cluster: ClusterState, machine: Machine) -> HostState:
        """Return the machine as an empty host of the cluster; it is not added to the cluster."""
        shape = self.machines.shape_of(machine)
        total = self.total(cluster.id, shape)
        return HostState(machine=machine, shape=shape, total=total, room=list(total))

    def hosts(self, cluster: ClusterState, machines: Sequence[Machine]) -> list[HostState]:
        """Return machines as empty hosts of the cluster; they are not added to the cluster."""
        shapes = [self.machines.shape_of(machine) for machine in machines]
        totals = [self.total(cluster.id, shape) for shape in shapes]
        slots: dict[str, Iterable[object]] = {
            "machine": machines,
            "shape": shapes,
            "total": totals,
            "room": map(list, totals),
            "claims": iter(dict, None),
            "shares": iter(dict, None),
            "is_target": repeat(False),
            "offer": repeat(None),
        }
        return made_at_once(HostState, len(shapes), slots)

    def free_at_first(self) -> list[int]:
        """Return what `free` was when this was first asked; credit acquires nothing."""
        if self._free is None:
            self._free = self.free()
        return self._free

    def free(self) -> list[int]:
        """Return what all offers together have of each dimension; `pods` without a limit counts as 0."""
        sums = [0] * len(self.dimensions.names)
        for offer in self.offers:
            room = self.total("", offer.shape)
            for d, milli in enumerate(room):
                if milli < UNLIMITED:
                    sums[d] += milli * offer.available
        return sums


def build(machines: Machines, demand: Sequence[Need], options: Options) -> DecisionState:
    """Return the state before Phase 1; `demand` is in list order."""
    dimensions = Dimensions(amounts for need in demand for amounts in vectors_of(need))
    fleet = DecisionState(
        machines=machines,
        options=options,
        dimensions=dimensions,
        rooms=Rooms(machines, options, dimensions),
        offers=machines.offers(),
        orphans=machines.orphans(),
    )
    add_clusters(fleet, needs_by_cluster(demand))
    add_rows(fleet, fleet.clusters.values())
    for cluster in fleet.clusters.values():
        add_hosts(fleet, cluster)
    return fleet


def needs_by_cluster(demand: Sequence[Need]) -> dict[str, list[tuple[int, Need]]]:
    """Return the rows of each cluster with their places in the list, clusters in the order of their first row."""
    by_cluster: defaultdict[str, list[tuple[int, Need]]] = defaultdict(list)
    for position, need in enumerate(demand):
        by_cluster[need.cluster].append((position, need))
    return dict(by_cluster)


def has_pods(need: Need) -> bool:
    """Return whether the row says of which pods it consists; all of them may be waiting."""
    return bool(need.shapes or (need.waiting and not need.aggregate))


def vectors_of(need: Need) -> list[Vector]:
    """Return every vector of a row that a decision looks at."""
    return [need.aggregate, need.min_unit, *(s.resources for s in (*need.shapes, *need.waiting))]


# ---- rows --------------------------------------------------------------------------------------------------------


def add_clusters(fleet: DecisionState, needs: Mapping[str, Sequence[tuple[int, Need]]]) -> None:
    """Make clusters, without the states of their rows."""
    for cluster_id, rows in needs.items():
        cluster = fleet.clusters[cluster_id] = ClusterState(id=cluster_id, needs=rows)
        cluster.awaits_plan = cluster_id in fleet.options.awaiting_plan
        cluster.withheld = fleet.options.withheld.get(cluster_id)


def rows_of(fleet: DecisionState, cluster: ClusterState) -> list[RowState]:
    """Return new rows of a cluster in processing order; what no known machine can host is set aside."""
    rows = [
        RowState(need=need, position=position, cluster=cluster, matching=fleet.machines.matching(need.profile))
        for position, need in cluster.needs
    ]
    _add_groups(fleet, [row for row in rows if has_pods(row.need)])
    for row in rows:
        if has_pods(row.need):
            _set_aside(fleet, row)
        else:
            row.divisible = dict(fleet.dimensions.request(row.need.aggregate))
            row.unit = fleet.dimensions.request(row.need.min_unit)
            _check_unit(fleet, row)
    rows.sort(key=lambda row: row.need.profile.precedence, reverse=True)
    for rank, row in enumerate(rows):
        row.rank = rank
    return rows


def add_rows(fleet: DecisionState, clusters: Iterable[ClusterState]) -> None:
    """Have the rows of some clusters processed, which are made where they are missing."""
    for cluster in clusters:
        if cluster.claims is None:
            cluster.rows[:] = rows_of(fleet, cluster)
        fleet.rows.extend(cluster.rows)
    # List order first, because sorting by precedence keeps the order of equals.
    fleet.rows.sort(key=lambda row: row.position)
    fleet.rows.sort(key=lambda row: row.need.profile.precedence, reverse=True)
    for rank, row in enumerate(fleet.rows):
        row.rank = rank


def _add_groups(fleet: DecisionState, rows: Sequence[RowState]) -> None:
    """Add the groups of some rows, those of each in canonical order."""
    given = [(*row.need.shapes, *row.need.waiting) for row in rows]
    shapes = list(chain.from_iterable(given))
    pods = [fleet.rooms.pod(shape.resources) for shape in shapes]
    counts = [shape.count for shape in shapes]
    slots: dict[str, Iterable[object]] = {
        "row": chain.from_iterable(repeat(row, len(own)) for row, own in zip(rows, given, strict=True)),
        "index": chain.from_iterable(range(len(own)) for own in given),
        "request": [request for request, _ in pods],
        "count": counts,
        "limit": [shape.max_per_machine for shape in shapes],
        "is_waiting": chain.from_iterable(
            chain(repeat(False, len(row.need.shapes)), repeat(True, len(row.need.waiting))) for row in rows
        ),
        "size": [size for _, size in pods],
        "left": counts,
    }
    made = iter(made_at_once(PodGroup, len(shapes), slots))
    for row, own in zip(rows, given, strict=True):
        row.groups = list(islice(made, len(own)))
        # Those of equal size stay in the order of their index.
        row.groups.sort(key=_size, reverse=True)


def _size(group: PodGroup) -> float:
    return group.size


def _set_aside(fleet: DecisionState, row: RowState) -> None:
    """Take out the groups of which no known machine can host one pod, with the dimension that comes closest."""
    hostable = fleet.rooms.hostable(row.cluster.id, row.matching)
    excluded = [group for group in row.groups if not hostable[group.request]]
    if not excluded:
        return
    rooms, most = fleet.rooms.known(row.cluster.id, row.matching)
    for group in excluded:
        lacking = [(d, milli) for d, milli in group.request if most[d] < milli]
        dimension, wanted = lacking[0] if lacking else group.request[0]
        name = fleet.dimensions.names[dimension]
        # What is asked for is reported as it was asked for, beyond `BEYOND` as well.
        shape = (*row.need.shapes, *row.need.waiting)[group.index]
        wanted = max(wanted, shape.resources.get(name, 0))
        row.impossible.append(Impossible(group, name if rooms else "", wanted, most[dimension]))
    row.groups = [group for group in row.groups if hostable[group.request]]


def _check_unit(fleet: DecisionState, row: RowState) -> None:
    """Let a row keep what it holds, and acquire nothing, when no known machine covers its unit."""
    rooms, most = fleet.rooms.known(row.cluster.id, row.matching)
    if not rooms or any(all(room[d] >= milli for d, milli in row.unit) for room in rooms):
        return
    lacking = [(d, milli) for d, milli in row.unit if most[d] < milli]
    dimension, wanted = lacking[0] if lacking else row.unit[0]
    row.impossible.append(Impossible(None, fleet.dimensions.names[dimension], wanted, most[dimension]))
    row.unit = ()


# ---- hosts -------------------------------------------------------------------------------------------------------


def add_hosts(fleet: DecisionState, cluster: ClusterState) -> None:
    """Make the cluster's hosts."""
    cluster.hosts[:] = fleet.hosts(cluster, fleet.machines.held_by(cluster.id))
    sort_hosts(cluster, fleet.options)
    target = fleet.options.targets.get(cluster.id)
    if target is not None:
        _mark_targets(fleet, cluster, target)


def sort_hosts(cluster: ClusterState, options: Options) -> None:
    """Put the cluster's machines in hosting order; what is acquired comes last, because it cannot host anything yet."""
    cluster.hosts.sort(key=_hosting_order(_wanted(cluster)))
    if options.fullness:
        _put_fuller_first(cluster.hosts, options.fullness)
    if options.leaving:
        cluster.hosts.sort(key=lambda host: host.machine.id in options.leaving)


def _hosting_order(wanted: Mapping[int, int]) -> Callable[[HostState], tuple[int, float, float, str]]:
    """Return a function to the sort key of a host: state, fleet cost, penalty and id; the least first."""
    costs: dict[tuple[int, float], float] = {}
    # Most shapes differ in labels alone.
    of_total: dict[tuple[tuple[int, ...], float], float] = {}

    def order(host: HostState) -> tuple[int, float, float, str]:
        machine = host.machine
        price = machine.price_usd_per_hour
        cost = costs.get((host.shape, price))
        if cost is None:
            total = (tuple(host.total), price)
            if total not in of_total:
                of_total[total] = fleet_cost(price, host.total, wanted)
            cost = costs[(host.shape, price)] = of_total[total]
        state = _STATE_ORDER.get(machine.state, len(HELD))
        return (state, cost, -machine.assigned_reclamation_penalty_dollars, machine.id)

    return order


def _put_fuller_first(hosts: list[HostState], fullness: Mapping[str, int]) -> None:
    """Swap machines that are alike, so that those whose nodes are fuller come first.

    Only like machines are swapped, because then the same pods have a place whatever is reported of nodes.
    """
    places: dict[Hashable, list[int]] = {}
    for place, host in enumerate(hosts):
        machine = host.machine
        # An offer has one price and one interruption probability; a shape has the rest of what a choice looks at.
        alike = (
            host.shape,
            machine.state,
            machine.price_usd_per_hour,
            machine.interruption_probability,
            machine.assigned_reclamation_penalty_dollars,
            machine.assigned_group,
        )
        places.setdefault(alike, []).append(place)
    for found in places.values():
        fuller = sorted((hosts[place] for place in found), key=lambda host: -fullness.get(host.machine.id, 0))
        for place, host in zip(found, fuller, strict=True):
            hosts[place] = host


def _wanted(cluster: ClusterState) -> dict[int, int]:
    """Return the cluster's whole demand by dimension."""
    if cluster.wanted is None:
        pods: dict[Request, int] = {}
        for row in cluster.rows:
            for group in row.groups:
                pods[group.request] = pods.get(group.request, 0) + group.count
        cluster.wanted = {}
        for request, count in pods.items():
            for d, milli in request:
                cluster.wanted[d] = cluster.wanted.get(d, 0) + milli * count
    total = dict(cluster.wanted)
    for row in cluster.rows:
        for d, milli in (row.divisible or {}).items():
            total[d] = total.get(d, 0) + milli
    return total


def fleet_cost(price: float, total: Room, wanted: Mapping[int, int]) -> float:
    """Return what the whole demand would cost on machines of this kind alone, dollars an hour."""
    share = max(
        (float(milli) / float(total[d]) for d, milli in wanted.items() if 0 < total[d] < UNLIMITED), default=0.0
    )
    return price * share


def _mark_targets(fleet: DecisionState, cluster: ClusterState, target: Target) -> None:
    """Mark the machines that the target composition keeps, and put them before the others."""
    left = dict(target.counts)
    for host in cluster.hosts:
        key = fleet.class_of(host)
        if left.get(key, 0) > 0:
            left[key] -= 1
            host.is_target = True
    cluster.hosts.sort(key=lambda host: not host.is_target)
