"""Limits the machines and the dollars per hour of a cluster, over one decision (docs/spec/shard.md §1.1).

Pure functions. An action that would give a cluster more than its policy allows is refused. The demand and the target
composition behind it are cut to the allowed supply, so that a second decision gives the machines to others. A cluster
keeps the machines that it has.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from bigfleet.engine.columns.store import REMOVED, ColumnSnapshot
from bigfleet.engine.decision import Action, ActionKind, Decision, Options, RowResult
from bigfleet.engine.reference.reclaim import RELEASABLE
from bigfleet.engine.targets import ClassKey, Target
from bigfleet.exchange.values import total_usd
from bigfleet.model import vector
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import Stamp
from bigfleet.model.need import Need, RowKey
from bigfleet.model.shapes import DemandShape, canonical_shapes, lacking_of, largest_of, total_of
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.model.vector import Vector
from bigfleet.shard.cluster_policy import ClusterLimits
from bigfleet.shard.cycle.created_machines import SnapshotClasses
from bigfleet.shard.inventory.fleet_queries import row_of, supply_of
from bigfleet.shard.safety_limits import row_served_by
from bigfleet.shard.status.views import split_residual, taken_of

#: Sums of prices are compared with this tolerance.
_CENTS = 1e-9


@dataclass(slots=True)
class _Budget:
    """What one cluster may still be given."""

    limits: ClusterLimits
    machines: int
    dollars_per_hour: float

    def spend(self, prices: Sequence[float]) -> str:
        """Take machines of these prices off the budget and return ""; when they exceed it return the limit's name."""
        if self.machines + len(prices) > self.limits.machines_max:
            return "machines"
        dollars = total_usd((self.dollars_per_hour, *prices))
        if dollars > self.limits.dollars_per_hour_max + _CENTS:
            return "dollars"
        self.machines, self.dollars_per_hour = self.machines + len(prices), dollars
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedSupply:
    """What a decision would give to clusters beyond their limits."""

    machines: frozenset[MachineId] = frozenset()
    #: Which limit each of those clusters would exceed first: machines or dollars.
    exceeded: Mapping[str, str] = field(default_factory=dict)


def refused_supply(
    actions: Iterable[Action],
    snapshot: ColumnSnapshot,
    limits_of: Callable[[str], ClusterLimits],
    pending: Mapping[MachineId, str],
) -> RefusedSupply:
    """Return the machines of actions that exceed limits; of a gang all are refused when one is.

    `pending` names the cluster of each machine that is being acquired or preempted for one. A machine in creation of
    which no cluster is known counts for every limited cluster: it may be for any of them.
    """
    asked: defaultdict[str, dict[RowKey, list[MachineId]]] = defaultdict(dict)
    for action in actions:
        row = _gaining_row(action)
        if row is not None and limits_of(row[0]).bounds_supply:
            asked[row[0]].setdefault(row, []).append(action.machine_id)
    refused: set[MachineId] = set()
    exceeded: dict[str, str] = {}
    held = _Held(snapshot, asked, pending)
    for cluster, rows in asked.items():
        prices = held.prices(cluster)
        budget = _Budget(limits_of(cluster), len(prices), total_usd(prices))
        for (_, _, group), machines in rows.items():
            places = [
                (each, place)
                for each in machines
                if (place := row_of(snapshot, each)) is None or not held.has(cluster, place)
            ]
            for portion in [places] if group else [[each] for each in places]:
                limit = budget.spend([_price(snapshot, place) for _, place in portion])
                if limit:
                    refused.update(machine_id for machine_id, _ in portion)
                    exceeded.setdefault(cluster, limit)
    return RefusedSupply(machines=frozenset(refused), exceeded=exceeded)


def _gaining_row(action: Action) -> RowKey | None:
    """Return the row that gains a machine by the action; None when none does."""
    if action.kind is ActionKind.PREEMPT and action.preemptor is not None:
        return (action.preemptor.cluster, action.preemptor.fingerprint, action.preemptor.group)
    return row_served_by(action)


def _stamped(
    snapshot: ColumnSnapshot, state: MachineState, owner_of: Callable[[Stamp], str]
) -> Iterable[tuple[int, str]]:
    """Return the rows of the machines in a state, each with the owner by its stamp; each stamp is read once."""
    columns, stamps = snapshot.columns, snapshot.vocabulary.stamps
    rows = np.flatnonzero(columns.state == state)
    stamp_of = columns.stamp[rows]
    owners = {number: owner_of(stamps[number]) for number in np.unique(stamp_of).tolist()}
    return ((row, owners[number]) for row, number in zip(rows.tolist(), stamp_of.tolist(), strict=True))


def _intended_cluster(stamp: Stamp) -> str:
    return stamp.intended_cluster


def _preempting_cluster(stamp: Stamp) -> str:
    return "" if stamp.preempted_for is None else stamp.preempted_for.cluster


class _Held:
    """The machines that some clusters have, or will have without another decision.

    Cost: one look at the columns for all clusters, and one at each distinct stamp of a machine that is promised.
    """

    def __init__(self, snapshot: ColumnSnapshot, clusters: Iterable[str], pending: Mapping[MachineId, str]) -> None:
        self._snapshot = snapshot
        numbers = snapshot.vocabulary.cluster_numbers()
        #: The number of each of the clusters; -1 for one that no machine carries.
        self._numbers = {cluster: numbers.get(cluster, -1) for cluster in clusters}
        #: Rows that a cluster does not carry, and that it is promised.
        self._promised: dict[str, set[int]] = {cluster: set() for cluster in self._numbers}
        created = list(_stamped(snapshot, MachineState.CREATING, _intended_cluster))
        self._promise(created)
        #: Prices of the machines in creation that may be for any cluster.
        self._unknown_prices = [_price(snapshot, row) for row, owner in created if not owner]
        self._promise(_stamped(snapshot, MachineState.DRAINING, _preempting_cluster))
        self._promise((row_of(snapshot, machine_id), owner) for machine_id, owner in pending.items())
        #: By cluster number: each offer of its machines, with how many have it.
        self._offers = self._count_offers()

    def _promise(self, promises: Iterable[tuple[int | None, str]]) -> None:
        for row, owner in promises:
            promised = self._promised.get(owner)
            if promised is not None and row is not None and not self._carries(owner, row):
                promised.add(row)

    def _count_offers(self) -> Mapping[int, Sequence[tuple[int, int]]]:
        columns, vocabulary = self._snapshot.columns, self._snapshot.vocabulary
        is_asked = np.zeros(len(vocabulary.clusters), np.bool_)
        is_asked[[number for number in self._numbers.values() if number > 0]] = True
        rows = np.flatnonzero(is_asked[columns.cluster] & (columns.state != REMOVED))
        offers = len(vocabulary.offers)
        keys = columns.cluster[rows].astype(np.int64) * offers + columns.offer[rows]
        found: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        kinds, sizes = np.unique(keys, return_counts=True)
        for key, count in zip(kinds.tolist(), sizes.tolist(), strict=True):
            cluster, offer = divmod(key, offers)
            found[cluster].append((offer, count))
        return found

    def _carries(self, cluster: str, row: int) -> bool:
        columns = self._snapshot.columns
        return int(columns.cluster[row]) == self._numbers[cluster] and int(columns.state[row]) != REMOVED

    def has(self, cluster: str, row: int) -> bool:
        """Return whether the cluster has the machine of a row, or will have it."""
        return self._carries(cluster, row) or row in self._promised[cluster]

    def prices(self, cluster: str) -> Sequence[float]:
        """Return the price of each machine of the cluster, and of each that may be created for it."""
        offers = self._snapshot.vocabulary.offers
        prices: list[float] = []
        for offer, count in self._offers.get(self._numbers[cluster], ()):
            prices += [offers[offer].price_usd_per_hour] * count
        prices += (_price(self._snapshot, row) for row in self._promised[cluster])
        return [*prices, *self._unknown_prices]


def allowed_targets(
    decision: Decision, snapshot: ColumnSnapshot, refused: RefusedSupply, targets: Mapping[str, Target]
) -> dict[str, Target]:
    """Return the targets, of the clusters that exceed a limit, that count more machines than the clusters may have.

    Each is returned with at most the machines of each class that its cluster has or is allowed to acquire in the
    decision. A target acquires what it counts, also beyond the demand. Cost: one look at the columns.
    """
    clusters = refused.exceeded.keys() & targets.keys()
    if not clusters:
        return {}
    columns, vocabulary = snapshot.columns, snapshot.vocabulary
    numbers = vocabulary.cluster_numbers()
    name_of = {number: cluster for cluster in clusters if (number := numbers.get(cluster, -1)) > 0}
    is_bound = np.isin(columns.state, [int(MachineState.CONFIGURED), int(MachineState.CONFIGURING)])
    rows = np.flatnonzero(is_bound & np.isin(columns.cluster, list(name_of)))
    owned = [(name_of[int(columns.cluster[row])], row) for row in rows.tolist()]
    owned += [(owner, row) for row, owner in _stamped(snapshot, MachineState.CREATING, _intended_cluster)]
    for action in decision.actions:
        gaining = row_served_by(action)
        if gaining is not None and action.machine_id not in refused.machines:
            owned.append((gaining[0], snapshot.rows[action.machine_id]))
    sizes: defaultdict[str, Counter[ClassKey]] = defaultdict(Counter)
    classes = SnapshotClasses(snapshot)
    for cluster, row in owned:
        if cluster in clusters:
            sizes[cluster][classes.at(row)] += 1
    found = {}
    for cluster in sorted(clusters):
        target, size = targets[cluster], sizes[cluster]
        counts = {each: min(count, size[each]) for each, count in target.counts.items()}
        if counts != target.counts:
            found[cluster] = replace(target, counts=counts)
    return found


def releases_of_refused(
    decision: Decision, snapshot: ColumnSnapshot, refused: RefusedSupply
) -> dict[MachineId, Action]:
    """Return a release of each Idle machine that the decision gives to a cluster beyond its limit, after its hold.

    The decision itself releases no machine that a row acquires (docs/spec/engine.md §7.3).
    """
    if decision.basis is None:
        return {}
    options = decision.basis.options
    found = {}
    for machine_id in sorted(refused.machines):
        row = row_of(snapshot, machine_id)
        if row is not None and _is_hold_over(snapshot, row, options):
            found[machine_id] = Action(
                kind=ActionKind.DELETE, machine_id=machine_id, cluster=ClusterId(""), reason="phase3.release"
            )
    return found


def _is_hold_over(snapshot: ColumnSnapshot, row: int, options: Options) -> bool:
    columns = snapshot.columns
    if int(columns.state[row]) != MachineState.IDLE:
        return False
    capacity_type = CapacityType(snapshot.vocabulary.offers[int(columns.offer[row])].capacity_type)
    seconds = options.hold_seconds.get(capacity_type, 0.0)
    # Without a stamp of the time this is not true.
    is_over = bool(options.now_seconds - float(columns.idle_since_seconds[row]) >= seconds)
    return capacity_type in RELEASABLE and seconds > 0 and is_over


def _price(snapshot: ColumnSnapshot, row: int | None) -> float:
    assert row is not None, "a decision is about machines of its snapshot"
    return snapshot.vocabulary.offers[int(snapshot.columns.offer[row])].price_usd_per_hour


@dataclass(frozen=True, slots=True)
class CutRow:
    """A row and what is left of it."""

    need: Need
    rest: Need
    residual: Vector


def cut_rows(decision: Decision, snapshot: ColumnSnapshot, refused: RefusedSupply) -> list[CutRow]:
    """Return the rows, of the clusters that exceed a limit, that want more than they are allowed to get."""
    return [
        cut
        for result in decision.rows
        if result.need.cluster in refused.exceeded
        for cut in _cut(result, snapshot, refused.machines)
        if cut.residual
    ]


def _cut(result: RowResult, snapshot: ColumnSnapshot, refused: frozenset[MachineId]) -> Iterable[CutRow]:
    claimed = _allowed_claims(result, snapshot, refused)
    victims = [each for each in result.victims if each not in refused]
    member = result.members[0]
    if member.shapes or member.waiting:
        yield _cut_pods(member, result, claimed, is_promised=bool(victims))
        return
    covered: Vector = vector.ZERO
    for machine_id in result.claimed:
        if machine_id in claimed:
            covered = vector.add(covered, taken_of(result, machine_id, snapshot))
    for machine_id in victims:
        covered = vector.add(covered, supply_of(snapshot, machine_id))
    for one, residual in split_residual(result.members, covered):
        yield CutRow(one, replace(one, aggregate=vector.subtract(one.aggregate, residual)), residual)


def _allowed_claims(result: RowResult, snapshot: ColumnSnapshot, refused: frozenset[MachineId]) -> frozenset[MachineId]:
    """Return the claims of a row that are not refused; of a gang that is refused, what was bound for it before."""
    claimed = frozenset(result.claimed) - refused
    group = result.need.group
    if not group or refused.isdisjoint((*result.claimed, *result.victims)):
        return claimed
    stamp_of, stamps = snapshot.columns.stamp, snapshot.vocabulary.stamps
    return frozenset(
        machine_id
        for machine_id in claimed
        if (row := row_of(snapshot, machine_id)) is not None and stamps[int(stamp_of[row])].assigned_group == group
    )


def _cut_pods(member: Need, result: RowResult, claimed: frozenset[MachineId], *, is_promised: bool) -> CutRow:
    """Keep the pods that have a place on an allowed machine, and those for which victims are drained."""
    shapes = (*member.shapes, *member.waiting)
    counts = [0] * len(shapes)
    for placement in result.placements:
        if placement.machine_id in claimed:
            counts[placement.shape] += placement.count
    for shape, count in result.unplaced if is_promised else ():
        counts[shape] += count
    for impossible in result.impossible:
        if impossible.shape is not None:
            counts[impossible.shape] = shapes[impossible.shape].count
    kept = [
        (index, replace(shape, count=min(shape.count, count)))
        for index, (shape, count) in enumerate(zip(shapes, counts, strict=True))
        if count
    ]
    asked = canonical_shapes(shape for index, shape in kept if index < len(member.shapes))
    waiting = canonical_shapes(shape for index, shape in kept if index >= len(member.shapes))
    rest = replace(
        member,
        shapes=asked,
        waiting=waiting,
        aggregate=total_of(asked),
        min_unit=largest_of((*asked, *waiting)) or member.min_unit,
    )
    removed = [
        DemandShape(shape.resources, shape.count - count)
        for shape, count in zip(shapes, counts, strict=True)
        if count < shape.count
    ]
    residual = total_of(removed) or lacking_of((shape.resources, shape.count) for shape in removed)
    return CutRow(member, rest, residual)
