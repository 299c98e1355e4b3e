"""Credits clusters on columns of machines: all of them at once, without an object for each machine.

It equals first fit of every row in processing order (`hosting.place_first_fit`), for clusters whose rows have shapes
and are neither gangs nor spread, and that have no target composition. In step n, every cluster places its nth group.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from bigfleet.engine.decision import Placement, RowResult
from bigfleet.engine.deferred import Deferred
from bigfleet.engine.shapes.columns.demand import DemandColumns, demand_columns
from bigfleet.engine.shapes.columns.machines import ColumnMachines, MachineIds
from bigfleet.engine.shapes.columns.order import Bools, HostColumns, Rows, hosts_in_order
from bigfleet.engine.shapes.fleet import DecisionState, rows_of
from bigfleet.engine.shapes.state import ClusterState, HostState, RowState
from bigfleet.model.ids import MachineId
from bigfleet.model.vector import sum_of

#: After so many steps, machines that have room for no later group are dropped.
_STEPS_TO_DROP: Final = 3
#: Hosts without claims of a cluster that are looked at together; four times as many each time that this was not enough.
_HOSTS_AT_ONCE: Final = 8


def credit_on_columns(fleet: DecisionState, machines: ColumnMachines) -> list[ClusterState]:
    """Credit the clusters that can be; return the others."""
    demand, others = demand_columns(fleet)
    if demand.clusters:
        credit = ColumnCredit(fleet, machines, demand)
        for number, cluster in enumerate(demand.clusters):
            cluster.claims = ColumnClaims(credit, number)
    return others


class ColumnCredit:
    """The claims of some clusters.

    Hosts are numbered by cluster, then in hosting order; groups in the order in which they are placed.
    """

    def __init__(self, fleet: DecisionState, machines: ColumnMachines, demand: DemandColumns) -> None:
        """Place everything that has a place."""
        self.fleet, self.machines, self.demand = fleet, machines, demand
        self.hosts = hosts_in_order(fleet, machines, demand.clusters, demand.wanted())
        claims = _Placing(self.hosts, demand).claims()
        #: Pods of each group without a place.
        self.left = demand.counts - np.bincount(claims.group, claims.pods, len(demand.counts)).astype(np.int64)
        row = np.repeat(np.arange(len(demand.needs)), np.diff(demand.first_group))[claims.group]
        # By row, then by host in hosting order, then in the order of the row's groups.
        place = claims.group - demand.first_group[row]
        places = int(place.max(initial=0)) + 1
        order = np.argsort((row * max(1, len(self.hosts.row)) + claims.host) * places + place)
        self.claims = _Claims(claims.host[order], claims.group[order], claims.pods[order])
        of_rows = np.arange(len(demand.needs) + 1)
        self.first_claim = np.searchsorted(row[order], of_rows)
        # Several claims of a row on one host stand together.
        is_first = np.diff(row[order] * max(1, len(self.hosts.row)) + self.claims.host, prepend=-1) != 0
        self.claimed = self.hosts.row[self.claims.host[is_first]]
        self.first_claimed = np.searchsorted(row[order][is_first], of_rows)
        self.placements = _Placements(
            self.hosts.row[self.claims.host], demand.index[self.claims.group], self.claims.pods
        )
        #: By cluster; found for all of them when the first one asks.
        self._unclaimed: list[MachineIds] | None = None
        cluster = np.repeat(np.arange(len(demand.clusters)), np.diff(demand.first))
        self.has_left = np.bincount(cluster[self.left > 0], minlength=len(demand.clusters)) > 0

    def unclaimed(self, number: int) -> Sequence[MachineId]:
        """Return the Configured machines of a cluster that nothing claims, in keep-priority order."""
        if self._unclaimed is None:
            names = [cluster.id for cluster in self.demand.clusters]
            self._unclaimed = self.machines.unclaimed_in(names, self.claimed)
        return self._unclaimed[number]


@dataclass(frozen=True, slots=True, eq=False)
class ColumnClaims:
    """The claims of one cluster that was credited on columns."""

    credit: ColumnCredit
    #: Of the cluster.
    number: int

    @property
    def has_left(self) -> bool:
        """Return whether some of the cluster's pods have no place."""
        return bool(self.credit.has_left[self.number])

    @property
    def has_impossible(self) -> bool:
        """Return whether pods of the cluster were set aside."""
        return bool(self.credit.demand.has_impossible[self.number])

    @property
    def _cluster(self) -> ClusterState:
        return self.credit.demand.clusters[self.number]

    def rows(self) -> list[RowState]:
        """Make the cluster's rows in processing order, with what has no place."""
        rows, start = rows_of(self.credit.fleet, self._cluster), int(self.credit.demand.first[self.number])
        groups = [group for row in rows for group in row.groups]
        for group, left in zip(groups, self.credit.left[start : start + len(groups)].tolist(), strict=True):
            group.left = left
        return rows

    def hosts(self) -> list[HostState]:
        """Make the cluster's hosts in hosting order, with their claims."""
        credit, cluster = self.credit, self._cluster
        groups, first = [group for row in cluster.rows for group in row.groups], int(credit.demand.first[self.number])
        start, end = credit.hosts.first[self.number : self.number + 2].tolist()
        machines = [credit.machines.at(row) for row in credit.hosts.row[start:end].tolist()]
        made = [credit.fleet.host(cluster, machine) for machine in machines]
        rows = credit.demand.first_row[self.number : self.number + 2]
        here = slice(*credit.first_claim[rows])
        claims = _Claims(*(column[here] for column in credit.claims))
        # As they were placed.
        order = np.argsort(claims.group, kind="stable")
        for place, number, count in zip(*(column[order].tolist() for column in claims), strict=True):
            host, group = made[place - start], groups[number - first]
            for d, milli in group.request:
                host.room[d] -= milli * count
            host.claims[group] = count
        return made

    def unclaimed(self) -> Sequence[MachineId]:
        """Return the Configured machines of the cluster that nothing claims, in keep-priority order."""
        return self.credit.unclaimed(self.number)

    def results(self) -> Iterator[tuple[int, RowResult]]:
        """Yield the position and the result of each row; all pods of the cluster have a place."""
        credit, ids = self.credit, self.credit.machines.ids
        first_row, end_row = credit.demand.first_row[self.number : self.number + 2].tolist()
        claims = credit.first_claim[first_row : end_row + 1].tolist()
        claimed = credit.first_claimed[first_row : end_row + 1].tolist()
        for place, (position, need) in enumerate(credit.demand.needs[first_row:end_row]):
            start, end = claims[place : place + 2]
            first, last = claimed[place : place + 2]
            yield (
                position,
                RowResult(
                    need=need,
                    members=(need,),
                    claimed=Deferred(last - first, partial(_ids, ids, credit.claimed, first, last)),
                    held=sum_of([(shape.resources, shape.count) for shape in (*need.shapes, *need.waiting)]),
                    placements=Deferred(end - start, partial(_placements, ids, credit.placements, start, end)),
                ),
            )


class _Placements(NamedTuple):
    """One claim in each place of the columns, by row, then by host in hosting order."""

    row: Rows
    shape: Rows
    pods: Rows


def _ids(ids: Sequence[MachineId], rows: Rows, start: int, end: int) -> tuple[MachineId, ...]:
    return tuple([ids[row] for row in rows[start:end].tolist()])


def _placements(ids: Sequence[MachineId], claims: _Placements, start: int, end: int) -> tuple[Placement, ...]:
    columns = (column[start:end].tolist() for column in claims)
    return tuple([Placement(ids[row], shape, count) for row, shape, count in zip(*columns, strict=True)])


# ---- placing -----------------------------------------------------------------------------------------------------


class _Claims(NamedTuple):
    """One claim in each place of the columns."""

    host: Rows
    group: Rows
    pods: Rows


class _Placing:
    """Places the groups of all clusters, step by step."""

    def __init__(self, hosts: HostColumns, demand: DemandColumns) -> None:
        self._demand, self._first_group = demand, demand.first
        self._access, self._is_allowed = _access(hosts, demand)
        #: Hosts by cluster, each in order, with their kinds and rooms. Those before `start` have room for nothing that
        #: follows, those from `unused` on have no claims.
        self._host, self._kind = np.arange(len(hosts.row)), hosts.kind.copy()
        self._rooms = [hosts.totals[:, d].copy() for d in range(hosts.totals.shape[1])]
        self._start, self._unused, self._end = hosts.first[:-1].copy(), hosts.first[:-1].copy(), hosts.first[1:]
        self._least = demand.least_from()
        self._found: list[_Claims] = []

    def claims(self) -> _Claims:
        """Return the claims of each step after those before it."""
        sizes = np.diff(self._first_group)
        for step in range(int(sizes.max(initial=0))):
            # Clusters stand in the order of their groups.
            clusters = int(np.searchsorted(-sizes, -step, side="left"))
            groups = self._first_group[:clusters] + step
            if step % _STEPS_TO_DROP == 0:
                self._drop(groups)
            self._place(groups)
        none = np.zeros(0, np.int64)
        return _Claims(
            *(np.concatenate(columns) for columns in zip(*[_Claims(none, none, none), *self._found], strict=True))
        )

    def _drop(self, groups: Rows) -> None:
        """Drop the hosts that have claims and no room for a pod of these groups and of those that follow."""
        end = self._unused[: len(groups)]
        many = end - self._start[: len(groups)]
        places, cluster = _ranges(end - many, many), np.repeat(np.arange(len(groups)), many)
        least, is_open = self._least[groups], np.ones(len(places), np.bool_)
        for d in np.flatnonzero(least.any(axis=0)).tolist():
            is_open &= self._rooms[d][places] >= least[:, d][cluster]
        left = np.bincount(cluster[is_open], minlength=len(groups))
        # Those that stay move to the others, in their order.
        kept, moved = places[is_open], _ranges(end - left, left)
        for column in (self._host, self._kind, *self._rooms):
            column[moved] = column[kept]
        self._start[: len(groups)] = end - left

    def _place(self, groups: Rows) -> None:
        """Place one group of each cluster; `groups` are by cluster."""
        left, most = self._demand.counts[groups], _HOSTS_AT_ONCE
        cluster, start, end = np.arange(len(groups)), self._start[: len(groups)], self._end[: len(groups)]
        stop = np.minimum(self._unused[: len(groups)] + most, end)
        # Most groups have their places on the first hosts.
        while len(cluster):
            many = stop - start
            self._place_on(_ranges(start, many), np.repeat(cluster, many), groups, left)
            is_open = (left[cluster] > 0) & (stop < end)
            cluster, start, end, most = cluster[is_open], stop[is_open], end[is_open], 4 * most
            stop = np.minimum(start + most, end)

    def _place_on(self, places: Rows, cluster: Rows, groups: Rows, left: Rows) -> None:
        """Place what is left of each cluster's group on these hosts, in order; `cluster` has the cluster of each."""
        requests = self._demand.requests[self._demand.number[groups]]
        dimensions = np.flatnonzero(requests.any(axis=0)).tolist()
        has_room = self._is_allowed[self._access[groups][cluster], self._kind[places]]
        for d in dimensions:
            has_room &= self._rooms[d][places] >= requests[:, d][cluster]
        places, cluster = places[has_room], cluster[has_room]
        # Each host takes a pod at least: no more hosts than pods are looked at.
        first = np.searchsorted(cluster, np.arange(len(groups)))
        is_near = np.arange(len(places)) - first[cluster] < left[cluster]
        places, cluster = places[is_near], cluster[is_near]
        if not len(places):
            return
        most = np.minimum(left, self._demand.limits[groups])[cluster]
        for d in dimensions:
            each = requests[:, d][cluster]
            np.minimum(most, self._rooms[d][places] // np.maximum(each, 1), out=most, where=each > 0)
        sums = np.cumsum(most)
        first = np.searchsorted(cluster, np.arange(len(groups)))
        before = np.concatenate(([0], sums))[first][cluster]
        taken = np.minimum(most, left[cluster] - (sums - most - before))
        is_taken = taken > 0
        places, cluster, taken = places[is_taken], cluster[is_taken], taken[is_taken]
        for d in dimensions:
            self._rooms[d][places] -= taken * requests[:, d][cluster]
        np.subtract.at(left, cluster, taken)
        # Of the places of a cluster the last one stays.
        unused = np.zeros(len(groups), np.int64)
        unused[cluster] = places + 1
        np.maximum(self._unused[: len(groups)], unused, out=self._unused[: len(groups)])
        self._found.append(_Claims(self._host[places], groups[cluster], taken))


def _ranges(start: Rows, many: Rows) -> Rows:
    """Return the numbers of some ranges, one after the other."""
    found: Rows = np.arange(many.sum()) + np.repeat(start - np.cumsum(many) + many, many)
    return found


def _access(hosts: HostColumns, demand: DemandColumns) -> tuple[Rows, Bools]:
    """Return a number for each group, and whether groups of a number may use hosts of a kind: (number, kind)."""
    shapes = np.array([kind.shape for kind in hosts.kinds], np.int64)
    is_risky = np.array([kind.can_be_interrupted for kind in hosts.kinds], np.bool_)
    is_coming = np.array([not kind.is_configured for kind in hosts.kinds], np.bool_)
    is_allowed = np.zeros((2 * len(demand.accesses), len(shapes)), np.bool_)
    for place, access in enumerate(demand.accesses):
        is_usable = np.isin(shapes, list(access.matching))
        if access.is_pinned:
            is_usable &= ~is_risky
        is_allowed[2 * place], is_allowed[2 * place + 1] = is_usable, is_usable & is_coming
    return 2 * demand.access + demand.is_waiting, is_allowed
