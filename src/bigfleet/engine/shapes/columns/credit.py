"""Credits clusters on columns of machines: all of them at once, without an object for each machine.

It equals first fit of every row in processing order (`hosting.place_first_fit`), for clusters whose rows have shapes
and are neither gangs nor spread, and that have no target composition. In step n, every cluster places its nth group.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bigfleet.engine.decision import Placement, RowResult
from bigfleet.engine.shapes.columns.compiled import placed_in_loops
from bigfleet.engine.shapes.columns.demand import DemandColumns, demand_columns
from bigfleet.engine.shapes.columns.machines import ColumnMachines, MachineIds
from bigfleet.engine.shapes.columns.placed import placed_on_arrays
from bigfleet.engine.shapes.columns.results import CompleteRows, complete_rows
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
    """The claims of some clusters; groups are numbered in the order in which they are placed."""

    def __init__(self, fleet: DecisionState, machines: ColumnMachines, demand: DemandColumns) -> None:
        """Place everything that has a place."""
        self.fleet, self.machines, self.demand = fleet, machines, demand
        placed = None if fleet.loops is None else placed_in_loops(fleet, machines, demand, fleet.loops)
        self.placed = placed_on_arrays(fleet, machines, demand) if placed is None else placed
        #: By cluster; found for all of them when the first one asks.
        self._unclaimed: Sequence[MachineIds] | None = None
        short = np.searchsorted(demand.first, np.flatnonzero(self.placed.left), side="right") - 1
        #: By cluster: whether some of its pods have no place, and whether pods were set aside.
        self.has_left: list[bool] = (np.bincount(short, minlength=len(demand.clusters)) > 0).tolist()
        self.has_impossible: list[bool] = demand.has_impossible.tolist()

    def machines_of(self, row: int) -> tuple[MachineId, ...]:
        """Return the machines of a row, in hosting order."""
        ids, hosts = self.machines.ids, np.unique(self.placed.host[self._claims_of(row)])
        return tuple([ids[each] for each in self.placed.row[hosts].tolist()])

    def placements_of(self, row: int) -> tuple[Placement, ...]:
        """Return the claims of a row, by machine in hosting order, then in the order of the row's groups."""
        placed, here = self.placed, self._claims_of(row)
        groups = slice(*self.demand.first_group[row : row + 2].tolist())
        shape = np.repeat(self.demand.index[groups], np.diff(placed.first_claim)[groups])
        host = placed.host[here]
        order = np.argsort(host, kind="stable")
        columns = (placed.row[host[order]], shape[order], placed.pods[here][order])
        ids = self.machines.ids
        claims = zip(*(column.tolist() for column in columns), strict=True)
        return tuple([Placement(ids[machine], shape, count) for machine, shape, count in claims])

    def _claims_of(self, row: int) -> slice:
        return slice(*self.placed.first_claim[self.demand.first_group[row : row + 2]].tolist())

    def unclaimed(self, number: int) -> Sequence[MachineId]:
        """Return the Configured machines of a cluster that nothing claims, in keep-priority order."""
        if self._unclaimed is None:
            self._unclaimed = self.placed.unclaimed()
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
        return self.credit.has_left[self.number]

    @property
    def has_impossible(self) -> bool:
        """Return whether pods of the cluster were set aside."""
        return self.credit.has_impossible[self.number]

    @property
    def _cluster(self) -> ClusterState:
        return self.credit.demand.clusters[self.number]

    def rows(self) -> list[RowState]:
        """Make the cluster's rows in processing order, with what has no place."""
        rows, start = rows_of(self.credit.fleet, self._cluster), int(self.credit.demand.first[self.number])
        groups = [group for row in rows for group in row.groups]
        for group, left in zip(groups, self.credit.placed.left[start : start + len(groups)].tolist(), strict=True):
            group.left = left
        return rows

    def hosts(self) -> list[HostState]:
        """Make the cluster's hosts in hosting order, with their claims."""
        credit, cluster = self.credit, self._cluster
        groups, first = [group for row in cluster.rows for group in row.groups], int(credit.demand.first[self.number])
        placed = credit.placed
        start, end = placed.first_host[self.number : self.number + 2].tolist()
        machines = [credit.machines.at(row) for row in placed.row[start:end].tolist()]
        made = [credit.fleet.host(cluster, machine) for machine in machines]
        first_claim = placed.first_claim[first : first + len(groups) + 1].tolist()
        here = slice(first_claim[0], first_claim[-1])
        hosts, pods = placed.host[here].tolist(), placed.pods[here].tolist()
        # As they were placed.
        for group, begin, stop in zip(groups, first_claim[:-1], first_claim[1:], strict=True):
            for place in range(begin - first_claim[0], stop - first_claim[0]):
                host, count = made[hosts[place] - start], pods[place]
                for d, milli in group.request:
                    host.room[d] -= milli * count
                host.claims[group] = count
        return made

    def unclaimed(self) -> Sequence[MachineId]:
        """Return the Configured machines of the cluster that nothing claims, in keep-priority order."""
        return self.credit.unclaimed(self.number)

    def results(self) -> CompleteRows:
        """Return the results of the rows in list order; all pods of the cluster have a place."""
        first, end = self.credit.demand.first_row[self.number : self.number + 2].tolist()
        return CompleteRows(end - first, lambda: self._made(first, end))

    def _made(self, first: int, end: int) -> tuple[RowResult, ...]:
        demand = self.credit.demand
        rows = first + np.argsort(demand.positions[first:end])
        needs = [demand.needs[place] for place in demand.places[rows].tolist()]
        return tuple(complete_rows(needs, self.credit, rows.tolist()))
