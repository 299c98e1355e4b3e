"""Places the pods of plain clusters in compiled loops; equal to `placed.placed_on_arrays`.

The loops are handed in, because a shard decides over pods before they are compiled
(docs/adr/0229-cold-decisions-in-compiled-loops.md).
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from bigfleet.engine.columnar.arrays import PodGroups, PodHosts, PodPlaces
from bigfleet.engine.shapes.columns.demand import DemandColumns
from bigfleet.engine.shapes.columns.loops import PodLoops
from bigfleet.engine.shapes.columns.machines import ColumnMachines, MachineIds
from bigfleet.engine.shapes.columns.order import Examples, Hosts, rearranged, state_places
from bigfleet.engine.shapes.columns.placed import CreditedPods
from bigfleet.engine.shapes.columns.placing import access_of
from bigfleet.engine.shapes.columns.rows import Rows
from bigfleet.engine.shapes.fleet import DecisionState

#: Kinds of machines that there could be, up to which one integer holds the number of a kind.
_KINDS_MAX: Final = 1 << 62

Int32s = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]


def placed_in_loops(
    fleet: DecisionState, machines: ColumnMachines, demand: DemandColumns, loops: PodLoops
) -> CreditedPods | None:
    """Place everything that has a place; None where the numbers of the vocabulary are too large."""
    names = [cluster.id for cluster in demand.clusters]
    rows, cluster_of = machines.rows_held_by(names)
    keep_of_stamp = machines.keep_ranks()
    vocabulary, columns = machines.vocabulary, machines.columns
    sizes = np.array([len(vocabulary.shapes), len(vocabulary.offers), len(vocabulary.stamps)], np.int64)
    if len(names) * 4 * int(sizes[0]) * int(sizes[1]) * int(sizes[2]) >= _KINDS_MAX:
        return None
    places, kind = state_places(), np.empty(len(rows), np.int32)
    first = loops.number_kinds(
        *(rows, machines.owners, cluster_of, columns.state, columns.shape, columns.offer, columns.stamp),
        *(places, keep_of_stamp, sizes, kind),
    )
    found = rows[first]
    hosts = Hosts(
        row=found,
        cluster=cluster_of[machines.owners[found]].astype(np.int64),
        state=places[columns.state[found]],
        shape=columns.shape[found].astype(np.int64),
        offer=columns.offer[found].astype(np.int64),
        stamp=columns.stamp[found].astype(np.int64),
        keep=keep_of_stamp[columns.stamp[found]],
    )
    examples = Examples.of(fleet, machines, demand.clusters, hosts, demand.wanted())
    is_claimed = np.zeros(len(machines.ids), np.uint8)
    ranks = np.zeros(int(examples.rank.max(initial=-1)) + 2, np.int64)
    everything = np.ones(len(found), np.uint8)
    row, kind_of = loops.in_rank_order(rows, kind, everything, examples.rank, is_claimed, ranks)
    first_host = _firsts_of(hosts.cluster, examples.rank, ranks, len(names))
    if fleet.options.fullness or fleet.options.leaving:
        cluster = np.repeat(np.arange(len(names)), np.diff(first_host))
        order = rearranged(fleet, machines, Hosts.of(machines, row, cluster), np.arange(len(row)))
        row, kind_of = row[order], kind_of[order]
    access, is_allowed = access_of(examples.kinds, demand)
    left, first_claim = np.zeros(len(demand.counts), np.int64), np.zeros(len(demand.counts) + 1, np.int64)
    requests = np.ascontiguousarray(demand.requests)
    host, pods = loops.place_pods(
        PodHosts(first_host, row, kind_of, examples.total, examples.kind, examples.totals),
        PodGroups(
            *(demand.first, demand.number, requests, demand.counts, demand.limits, access),
            is_allowed.view(np.uint8),
        ),
        PodPlaces(is_claimed, left, first_claim),
    )

    def unclaimed() -> Sequence[MachineIds]:
        if machines.has_unjoined:
            return machines.unclaimed_in(names, np.flatnonzero(is_claimed))
        is_configured = (hosts.state == 0).astype(np.uint8)
        ranks = np.zeros(int(examples.keep_rank.max(initial=-1)) + 2, np.int64)
        free, _ = loops.in_rank_order(rows, kind, is_configured, examples.keep_rank, is_claimed, ranks)
        of_cluster = _firsts_of(hosts.cluster, examples.keep_rank, ranks, len(names)).tolist()
        ids = machines.ids
        return [MachineIds(ids, free[a:b]) for a, b in pairwise(of_cluster)]

    return CreditedPods(
        first_host=first_host, row=row, first_claim=first_claim, host=host, pods=pods, left=left, unclaimed=unclaimed
    )


def _firsts_of(cluster: Rows, rank: Rows, ranks: Rows, clusters: int) -> Rows:
    """Return where the rows of each cluster begin; `ranks` has that of each rank, and ranks ascend by cluster."""
    of_rank = np.zeros(len(ranks) - 1, np.int64)
    of_rank[rank] = cluster
    found: Rows = ranks[np.searchsorted(of_rank, np.arange(clusters + 1))]
    return found
