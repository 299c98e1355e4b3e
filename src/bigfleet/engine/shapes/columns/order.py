"""Puts the machines of many clusters in hosting order, on columns (docs/spec/engine.md §3.4).

It equals `fleet.sort_hosts` for clusters without a target composition.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from bigfleet.engine.shapes.columns.machines import ColumnMachines
from bigfleet.engine.shapes.columns.rows import NO_LIMIT, Rows
from bigfleet.engine.shapes.columns.sorting import stable_order
from bigfleet.engine.shapes.fleet import DecisionState
from bigfleet.engine.shapes.machines import HELD
from bigfleet.engine.shapes.state import ClusterState

Floats = npt.NDArray[np.float64]

#: Numbers that there could be for each one that is looked for, up to which all of them get a place in memory.
_PLACES_MAX: Final = 8


class HostKind(NamedTuple):
    """What rows look at before they use a machine."""

    shape: int
    is_configured: bool
    can_be_interrupted: bool


@dataclass(frozen=True, slots=True, eq=False)
class HostColumns:
    """The hosts of some clusters, by cluster, each in hosting order."""

    #: Where the hosts of each cluster begin, and where the last ones end.
    first: Rows
    #: The machine, as a row of the view.
    row: Rows
    #: A place in `kinds`.
    kind: Rows
    kinds: Sequence[HostKind]
    #: Supply less overheads: (host, dimension).
    totals: Rows


def hosts_in_order(
    fleet: DecisionState, machines: ColumnMachines, clusters: Sequence[ClusterState], wanted: Floats
) -> HostColumns:
    """Return the hosts of the clusters; `wanted` has the whole demand of each: (cluster, dimension)."""
    held = [machines.held_rows(cluster.id) for cluster in clusters]
    sizes = [len(rows) for rows in held]
    hosts = Hosts.of(machines, np.concatenate(held), np.repeat(np.arange(len(clusters)), sizes))
    # Machines that agree in all of this differ in their ids alone.
    alike, first = _numbered(hosts.cluster, hosts.state, hosts.shape, hosts.offer, hosts.keep)
    examples = Examples.of(fleet, machines, clusters, hosts.at(first), wanted)
    order = rearranged(fleet, machines, hosts, stable_order(examples.rank[alike]))
    row, alike = hosts.row[order], alike[order]
    ends = np.cumsum(np.array(sizes, np.int64))
    totals = examples.totals[examples.total[alike]]
    return HostColumns(np.concatenate(([0], ends)), row, examples.kind[alike], examples.kinds, totals)


def rearranged(fleet: DecisionState, machines: ColumnMachines, hosts: "Hosts", order: Rows) -> Rows:
    """Return the order of hosts with fuller ones first among like ones, and those that leave last."""
    if fleet.options.fullness:
        order = _fuller_first(fleet, machines, hosts, order)
    if fleet.options.leaving:
        order = _leaving_last(fleet, machines, hosts, order)
    return order


@dataclass(frozen=True, slots=True, eq=False)
class Examples:
    """What hosts that differ in their ids alone have in common, with one of each as an example."""

    #: Ascends by cluster, then as hosting order without ids; and by cluster, then as keep-priority order without ids.
    rank: Rows
    keep_rank: Rows
    #: A place in `totals`, which has the different supplies less overheads: (total, dimension).
    total: Rows
    totals: Rows
    #: A place in `kinds`.
    kind: Rows
    kinds: Sequence[HostKind]

    @classmethod
    def of(
        cls,
        fleet: DecisionState,
        machines: ColumnMachines,
        clusters: Sequence[ClusterState],
        hosts: "Hosts",
        wanted: Floats,
    ) -> "Examples":
        """Look at each example; `wanted` has the whole demand of each cluster: (cluster, dimension)."""
        totals, total = _totals(fleet, clusters, hosts)
        price = np.array([offer.price_usd_per_hour for offer in machines.vocabulary.offers])[hosts.offer]
        cost = price * _largest_share(wanted[hosts.cluster], totals[total])
        risk = np.array([offer.interruption_probability > 0 for offer in machines.vocabulary.offers])[hosts.offer]
        kind, first = _numbered(hosts.shape, hosts.state == 0, risk)
        columns = (hosts.shape[first].tolist(), (hosts.state[first] == 0).tolist(), risk[first].tolist())
        return cls(
            rank=_ranks(hosts.cluster, hosts.state, cost, hosts.keep),
            keep_rank=_ranks(hosts.cluster, price, hosts.keep),
            total=total,
            totals=totals,
            kind=kind,
            kinds=[HostKind(*each) for each in zip(*columns, strict=True)],
        )


class Hosts(NamedTuple):
    """Machines with what orders them."""

    row: Rows
    cluster: Rows
    #: A place in `HELD`.
    state: Rows
    shape: Rows
    offer: Rows
    stamp: Rows
    #: Ascends as the assigned reclamation dollars descend.
    keep: Rows

    @classmethod
    def of(cls, machines: ColumnMachines, row: Rows, cluster: Rows) -> "Hosts":
        """Return some rows of the view."""
        columns, vocabulary = machines.columns, machines.vocabulary
        shape, offer, stamp = (column[row].astype(np.int64) for column in (columns.shape, columns.offer, columns.stamp))
        stamps, number = np.unique(stamp, return_inverse=True)
        dollars = [-vocabulary.stamps[each].assigned_reclamation_penalty_dollars for each in stamps.tolist()]
        keep = np.unique(np.array(dollars, np.float64), return_inverse=True)[1][number]
        return cls(row, cluster, state_places()[columns.state[row]], shape, offer, stamp, keep)

    def at(self, places: Rows) -> "Hosts":
        """Return some of them."""
        return Hosts(*(column[places] for column in self))


def state_places() -> Rows:
    """Return the place in `HELD` of each state, 0 for others."""
    places = np.zeros(256, np.int64)
    places[list(HELD)] = range(len(HELD))
    return places


def _numbered(*columns: npt.NDArray[Any]) -> tuple[Rows, Rows]:
    """Return a number for each place, equal where all columns are, and the first place of each number.

    Numbers ascend with the columns, the first column first.
    """
    rows, found, size = len(columns[0]), np.zeros(len(columns[0]), np.int64), 1
    for column in columns:
        values = int(column.max(initial=0)) + 1
        if size * values > NO_LIMIT:
            found = np.unique(found, return_inverse=True)[1]
            size = rows
        found, size = found * values + column, size * values
    if size > _PLACES_MAX * rows:
        _, first, found = np.unique(found, return_index=True, return_inverse=True)
        return found, first
    # As many places as there could be numbers cost less than a sort.
    is_there = np.zeros(size, np.bool_)
    is_there[found] = True
    found = (np.cumsum(is_there) - 1)[found]
    first = np.zeros(int(found.max(initial=-1)) + 1, np.int64)
    # Of several places the last one stays.
    first[found[::-1]] = np.arange(rows - 1, -1, -1)
    return found, first


def _ranks(*keys: npt.NDArray[Any]) -> Rows:
    """Return the rank of each place, the first key first; equal ones have one rank."""
    order = np.lexsort(keys[::-1])
    is_next = np.zeros(len(order), np.bool_)
    for key in keys:
        in_order = key[order]
        is_next[1:] |= in_order[1:] != in_order[:-1]
    ranks = np.zeros(len(order), np.int64)
    ranks[order] = np.cumsum(is_next)
    return ranks


def _totals(fleet: DecisionState, clusters: Sequence[ClusterState], hosts: Hosts) -> tuple[Rows, Rows]:
    """Return the different supplies less overheads, (total, dimension), and which of them each host has."""
    own = np.array([number + 1 if c.id in fleet.options.overheads else 0 for number, c in enumerate(clusters)])
    number, first = _numbered(own[hosts.cluster], hosts.shape)
    totals = [
        [min(milli, NO_LIMIT) for milli in fleet.total(clusters[cluster].id, shape)]
        for cluster, shape in zip(hosts.cluster[first].tolist(), hosts.shape[first].tolist(), strict=True)
    ]
    return np.array(totals, np.int64).reshape(len(totals), len(fleet.dimensions.names)), number


def _largest_share(wanted: Floats, totals: Rows) -> Floats:
    """Return the largest demand ÷ total over the dimensions with a finite total above 0."""
    is_finite = (totals > 0) & (totals < NO_LIMIT)
    shares = np.divide(wanted, totals.astype(np.float64), out=np.zeros(totals.shape), where=is_finite)
    found: Floats = shares.max(axis=1, initial=0.0)
    return found


def _fuller_first(fleet: DecisionState, machines: ColumnMachines, hosts: Hosts, order: Rows) -> Rows:
    """Swap machines that are alike, so that those whose nodes are fuller come first."""
    fullness = np.zeros(len(machines.ids), np.int64)
    for machine_id, amount in fleet.options.fullness.items():
        row = machines.row_of(machine_id)
        if row is not None:
            fullness[row] = amount
    found = hosts.at(order)
    full = fullness[found.row]
    places = np.flatnonzero(np.isin(found.cluster, found.cluster[full != 0]))
    found, full = found.at(places), full[places]
    offers = [(o.price_usd_per_hour, o.interruption_probability) for o in machines.vocabulary.offers]
    stamps = np.unique(found.stamp)
    groups = np.zeros(int(stamps.max(initial=0)) + 1, np.int64)
    groups[stamps] = _numbers([machines.vocabulary.stamps[stamp].assigned_group for stamp in stamps.tolist()])
    alike, _ = _numbered(
        found.cluster, found.shape, found.state, _numbers(offers)[found.offer], found.keep, groups[found.stamp]
    )
    swapped = order.copy()
    swapped[places[np.argsort(alike, kind="stable")]] = order[places[np.lexsort((-full, alike))]]
    return swapped


def _leaving_last(fleet: DecisionState, machines: ColumnMachines, hosts: Hosts, order: Rows) -> Rows:
    """Put the machines of each cluster that leave behind its others."""
    rows = [row for machine_id in fleet.options.leaving if (row := machines.row_of(machine_id)) is not None]
    is_leaving = np.isin(hosts.row[order], np.array(rows, np.int64))
    return order[np.lexsort((is_leaving, hosts.cluster[order]))]


def _numbers(values: Sequence[Hashable]) -> Rows:
    """Return a number for each value, equal for equal ones."""
    known: dict[Hashable, int] = {}
    return np.array([known.setdefault(value, len(known)) for value in values], np.int64)
