"""Credits clusters on columns of machines: all of them at once, without an object for each machine.

It equals first fit of every row in processing order (`hosting.place_first_fit`), for clusters whose rows have shapes
and are neither gangs nor spread, and that have no target composition. In step n, every cluster places its nth group.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from bigfleet.engine.decision import Placement, RowResult
from bigfleet.engine.shapes.columns.demand import DemandColumns, demand_columns
from bigfleet.engine.shapes.columns.machines import ColumnMachines, MachineIds
from bigfleet.engine.shapes.columns.order import hosts_in_order
from bigfleet.engine.shapes.columns.placing import Claims, first_fit
from bigfleet.engine.shapes.columns.results import complete_rows
from bigfleet.engine.shapes.columns.rows import firsts
from bigfleet.engine.shapes.columns.sorting import stable_order
from bigfleet.engine.shapes.fleet import DecisionState, rows_of
from bigfleet.engine.shapes.state import ClusterState, HostState, RowState
from bigfleet.model.ids import MachineId


def credit_on_columns(fleet: DecisionState, machines: ColumnMachines) -> list[ClusterState]:
    """Credit the clusters that can be; return the others."""
    assert fleet.read is not None, "the demand of a fleet in columns is read"
    demand, others = demand_columns(fleet, fleet.read)
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
        wanted = demand.wanted()
        self.hosts = hosts_in_order(fleet, machines, demand.clusters, wanted)
        claims = first_fit(self.hosts, demand, wanted)
        #: Pods of each group without a place.
        self.left = demand.counts - np.bincount(claims.group, claims.pods, len(demand.counts)).astype(np.int64)
        rows = len(demand.positions)
        row = np.repeat(np.arange(rows), np.diff(demand.first_group))[claims.group]
        # By row, then by host in hosting order, then in the order of the row's groups, in which they were placed.
        cluster = np.repeat(np.arange(len(demand.clusters)), np.diff(self.hosts.first))[claims.host]
        order = stable_order(claims.host - self.hosts.first[cluster], row)
        self.claims = Claims(claims.host[order], claims.group[order], claims.pods[order])
        self.first_claim = firsts(np.bincount(row, minlength=rows))
        # Several claims of a row on one host stand together.
        is_first = np.diff(row[order] * max(1, len(self.hosts.row)) + self.claims.host, prepend=-1) != 0
        self.claimed = self.hosts.row[self.claims.host[is_first]]
        self.first_claimed = firsts(is_first)[self.first_claim]
        #: By cluster; found for all of them when the first one asks.
        self._unclaimed: list[MachineIds] | None = None
        cluster = np.repeat(np.arange(len(demand.clusters)), np.diff(demand.first))
        self.has_left = np.bincount(cluster[self.left > 0], minlength=len(demand.clusters)) > 0

    def machines_of(self, row: int) -> tuple[MachineId, ...]:
        """Return the machines of a row, in hosting order."""
        start, end = self.first_claimed[row : row + 2].tolist()
        ids = self.machines.ids
        return tuple([ids[each] for each in self.claimed[start:end].tolist()])

    def placements_of(self, row: int) -> tuple[Placement, ...]:
        """Return the claims of a row, by machine in hosting order, then in the order of the row's groups."""
        here = slice(*self.first_claim[row : row + 2].tolist())
        ids = self.machines.ids
        machines = self.hosts.row[self.claims.host[here]].tolist()
        shapes = self.demand.index[self.claims.group[here]].tolist()
        claims = zip(machines, shapes, self.claims.pods[here].tolist(), strict=True)
        return tuple([Placement(ids[machine], shape, count) for machine, shape, count in claims])

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
        claims = Claims(*(column[here] for column in credit.claims))
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

    def results(self) -> Iterable[tuple[int, RowResult]]:
        """Return the position and the result of each row; all pods of the cluster have a place."""
        credit, demand = self.credit, self.credit.demand
        first, end = demand.first_row[self.number : self.number + 2].tolist()
        positions = demand.positions[first:end].tolist()
        needs = [demand.needs[place] for place in demand.places[first:end].tolist()]
        return zip(positions, complete_rows(needs, credit, range(first, end)), strict=True)
