"""Finds the places of the pods of plain clusters, on arrays; `compiled` finds the same ones in compiled loops."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bigfleet.engine.shapes.columns.demand import DemandColumns
from bigfleet.engine.shapes.columns.machines import ColumnMachines, MachineIds
from bigfleet.engine.shapes.columns.order import hosts_in_order
from bigfleet.engine.shapes.columns.placing import first_fit
from bigfleet.engine.shapes.columns.rows import Rows, firsts
from bigfleet.engine.shapes.columns.sorting import stable_order
from bigfleet.engine.shapes.fleet import DecisionState


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CreditedPods:
    """The claims of some clusters. Hosts are numbered by cluster, then in hosting order."""

    #: Where the hosts of each cluster begin, and where the last ones end.
    first_host: Rows
    #: Of each host: the machine, as a row of the view.
    row: Rows
    #: Where the claims of each group begin, and where the last ones end; those of a group are in hosting order.
    first_claim: Rows
    #: Of each claim.
    host: Rows | npt.NDArray[np.int32]
    pods: Rows
    #: Pods of each group without a place.
    left: Rows
    #: Returns, by cluster, the Configured machines that nothing claims, in keep-priority order.
    unclaimed: Callable[[], Sequence[MachineIds]]


def placed_on_arrays(fleet: DecisionState, machines: ColumnMachines, demand: DemandColumns) -> CreditedPods:
    """Place everything that has a place."""
    wanted = demand.wanted()
    hosts = hosts_in_order(fleet, machines, demand.clusters, wanted)
    claims = first_fit(hosts, demand, wanted)
    # Those of a group are found in hosting order.
    order, groups = stable_order(claims.group), len(demand.counts)
    names = [cluster.id for cluster in demand.clusters]
    return CreditedPods(
        first_host=hosts.first,
        row=hosts.row,
        first_claim=firsts(np.bincount(claims.group, minlength=groups)),
        host=claims.host[order],
        pods=claims.pods[order],
        left=demand.counts - np.bincount(claims.group, claims.pods, groups).astype(np.int64),
        unclaimed=lambda: machines.unclaimed_in(names, hosts.row[claims.host]),
    )
