"""Lays out the arrays of one decision: rows in processing order, listings, gang classes, room for the answer.

Between the columns that live across calls and the kernels that run once. Nothing here may serve a row.
"""

from collections.abc import Mapping
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from bigfleet.engine.columnar.arrays import (
    FREE,
    HIDDEN,
    MODE_PLAIN,
    MODE_SAME,
    NO_DOMAIN,
    QUANTITY_MAX,
    UNDECIDED,
    Bytes,
    Fleet,
    Gangs,
    Int32s,
    Int64s,
    Rows,
    Scratch,
    Views,
    Work,
)
from bigfleet.engine.columnar.demand import Demand, Folded
from bigfleet.engine.columnar.orders import Orders
from bigfleet.engine.columnar.store import ColumnSnapshot
from bigfleet.engine.columnar.sweeps import list_bound, list_free
from bigfleet.engine.columnar.tables import DoesNotFit, Tables
from bigfleet.engine.decision import Options
from bigfleet.engine.pool import RESERVABLE_STATES
from bigfleet.model.ids import MachineId
from bigfleet.model.penalty import ORDINALS

#: Cells of (gang class, domain) and entries of free machines by cell; beyond, the reference engine must answer.
CELLS_MAX: Final = 20_000_000
ENTRIES_MAX: Final = 100_000_000


def visible_claims(view: ColumnSnapshot, rows_of: Mapping[MachineId, int], options: Options) -> Int32s:
    """Return the claims before anybody claims: HIDDEN for what no phase but the third may see (§1.1)."""
    claims = np.full(len(view.ids), FREE, np.int32)
    for machine_id in options.unjoined:
        row = rows_of.get(MachineId(machine_id))
        if row is not None:
            claims[row] = HIDDEN
    for machine_id in options.reserved:
        row = rows_of.get(MachineId(machine_id))
        if row is not None and view.columns.state[row] in RESERVABLE_STATES:
            claims[row] = HIDDEN
    return claims


def check_quantities(view: ColumnSnapshot, tables: Tables) -> None:
    """Raise DoesNotFit when the supply of all machines together could wrap, or a number is no number."""
    if len(tables.supply):
        largest = int(tables.supply.max()) * len(view.ids)
        if largest >= QUANTITY_MAX:
            counts = np.bincount(tables.supply_of[view.columns.shape], minlength=len(tables.supply))
            # Python's integers: a sum that is checked for wrapping must not wrap itself.
            sums = (tables.supply.astype(object) * counts[:, None].astype(object)).sum(axis=0)
            if max(sums.tolist()) >= QUANTITY_MAX:
                raise DoesNotFit("the supply of all machines together does not fit")
    for numbers in (
        tables.offer_price,
        tables.offer_probability,
        tables.stamp_interruption,
        tables.stamp_reclamation,
    ):
        if np.isnan(numbers).any():
            raise DoesNotFit("a price, probability or penalty is not a number")


def fleet_arrays(view: ColumnSnapshot, tables: Tables, orders: Orders, keys: list[str]) -> Fleet:
    """Gather what kernels read of the machines; `keys` are the topology keys, by number."""
    columns = view.columns
    attributes = [tables.attribute(key) for key in keys]
    domain_of = np.full((max(1, len(keys)), len(tables.supply_of)), NO_DOMAIN, np.int32)
    for number, attribute in enumerate(attributes):
        domain_of[number] = attribute.domains()
    return Fleet(
        shape=columns.shape,
        offer=columns.offer,
        stamp=columns.stamp,
        supply_of=tables.supply_of,
        supply=tables.supply,
        helps=tables.helps,
        stamp_pair=tables.stamp_pair,
        stamp_intended=tables.stamp_intended,
        offer_price=tables.offer_price,
        idle=orders.idle,
        speculative=orders.speculative,
        creating=orders.creating,
        coming=orders.coming,
        fits=tables.fits,
        domain_of=domain_of,
        domains=np.array([len(attribute.values) for attribute in attributes] or [0], np.int32),
    )


def cluster_parts(clusters: Int32s, tables: Tables, view: ColumnSnapshot, orders: Orders) -> tuple[Int64s, Int64s]:
    """Return where each row's cluster starts and ends among the bound machines."""
    names = list(tables.clusters.of)
    known = view.vocabulary.cluster_numbers()
    part_of = np.array([known.get(str(name), -1) for name in names], np.int64)
    # A cluster that was first seen after the view was taken has no machines in it; neither has "".
    part_of[(part_of >= orders.clusters) | (part_of == 0)] = -1
    part = part_of[clusters]
    starts = np.where(part >= 0, orders.bound_starts[2 * part], 0)
    stops = np.where(part >= 0, orders.bound_starts[np.where(part >= 0, 2 * part + 2, 0)], 0)
    return starts, stops


def row_arrays(
    folded: Folded,
    fits: Int32s,
    in_order: Int64s,
    newly_parked: Bytes,
    *,
    demand: Demand,
    orders: Orders,
) -> Rows:
    """Gather the rows in processing order. `listing` and `gang` are still those of no one."""
    profiles, vectors = demand.profile_columns, demand.vectors
    profile, aggregate = folded.profile[in_order], folded.aggregate[in_order]
    cluster, pair = folded.cluster[in_order], folded.pair[in_order]
    scaled = vectors.scaled[aggregate]
    for rank in np.flatnonzero(folded.members[in_order] > 1).tolist():
        times = int(folded.members[in_order[rank]])
        scaled[rank] = demand.scaled_times(int(aggregate[rank]), times)
    lines = np.zeros(len(ORDINALS), np.int32)
    lines[list(orders.line_of)] = list(orders.line_of.values())
    key = cluster.astype(np.int64) << 32 | pair
    return Rows(
        mode=profiles.mode[profile],
        parked=(folded.parked | newly_parked)[in_order],
        fit=fits[in_order],
        listing=np.zeros(len(in_order), np.int32),
        cluster=cluster,
        pair=pair,
        precedence=profiles.precedence[profile],
        priority=profiles.priority[profile],
        aggregate=scaled,
        mask=vectors.mask[aggregate],
        key=profiles.key[profile],
        skew=profiles.skew[profile],
        bucket=lines[profiles.bucket[profile]],
        gang=np.full(len(in_order), -1, np.int32),
        weight=vectors.weight[aggregate],
        is_exact=vectors.is_exact[aggregate],
        creating_start=_places(orders.creating_pair, pair, "left"),
        creating_stop=_places(orders.creating_pair, pair, "right"),
        coming_start=_places(orders.coming_for, key, "left"),
        coming_stop=_places(orders.coming_for, key, "right"),
    )


def _places(ordered: Int64s, wanted: npt.NDArray[np.integer], side: Literal["left", "right"]) -> Int64s:
    # Searching among nothing costs as much as among something.
    return np.searchsorted(ordered, wanted, side) if len(ordered) else np.zeros(len(wanted), np.int64)


def make_views(fleet: Fleet, rows: Rows, orders: Orders, starts: Int64s, stops: Int64s) -> tuple[Views, Rows]:
    """List the bound machines that fit, once per (cluster, fit); `starts` and `stops` are per row.

    What one row alone walks once is walked where it is, in the order of all bound machines.
    """
    key = rows.cluster.astype(np.int64) * (len(fleet.fits) + 1) + rows.fit
    _, first, listing, count = np.unique(key, return_index=True, return_inverse=True, return_counts=True)
    order_start, order_stop, fit = starts[first], stops[first], rows.fit[first]
    is_shared = ((count > 1) | (rows.mode[first] == MODE_SAME)).astype(np.uint8)
    room = int(((order_stop - order_start) * is_shared).sum())
    if room > ENTRIES_MAX:
        raise DoesNotFit(f"{room} bound machines by cluster and fit are too many")
    columns = [orders.bound, orders.bound_shapes, orders.bound_pairs]
    if room:
        # Shared listings follow the whole order; without any, nothing is written and the orders serve as they are.
        columns = [_with_room(whole, room) for whole in columns]
    machines, shapes, pairs = columns
    views = Views(machines, shapes, pairs, np.zeros(len(first), np.int64), np.zeros(len(first), np.int64))
    list_bound(fleet.fits, order_start, order_stop, fit, is_shared, views, len(orders.bound))
    return views, rows._replace(listing=listing.astype(np.int32))


def _with_room(column: Int32s, room: int) -> Int32s:
    # What is never written to takes no memory.
    grown = np.empty(len(column) + room, np.int32)
    grown[: len(column)] = column
    return grown


def make_gangs(fleet: Fleet, rows: Rows, claims: Int32s) -> tuple[Gangs, Rows]:
    """List free machines once per class of gangs: fit, topology key, wanted dimensions, bucket."""
    same = np.flatnonzero(rows.mode == MODE_SAME)
    classes = np.stack([rows.fit[same], rows.key[same], rows.mask[same], rows.bucket[same]]).astype(np.int64)
    distinct, gang_of = np.unique(classes, axis=1, return_inverse=True) if len(same) else (classes, same)
    gang = rows.gang.copy()
    gang[same] = gang_of.reshape(-1)
    fit, key, mask, bucket = (np.ascontiguousarray(line) for line in distinct)
    base = np.concatenate([[0], np.cumsum(fleet.domains[key])]).astype(np.int64)
    cells = int(base[-1])
    if cells > CELLS_MAX:
        raise DoesNotFit(f"{cells} pairs of gang class and domain are too many")
    gangs = Gangs(
        fit=fit.astype(np.int32),
        key=key.astype(np.int32),
        mask=mask,
        bucket=bucket.astype(np.int32),
        base=base,
        start=np.zeros(cells + 1, np.int64),
        active=np.zeros(0, np.int32),
        active_start=np.zeros(1, np.int64),
        machines=np.zeros(1, np.int32),
        members=np.zeros(cells, np.int64),
        total=np.zeros((cells, fleet.supply.shape[1]), np.int64),
        earmark_from=np.zeros(cells, np.int64),
        claim_from=np.zeros(cells, np.int64),
    )
    entries = list_free(fleet, gangs, claims, False)
    if entries > ENTRIES_MAX:
        raise DoesNotFit(f"{entries} free machines by gang class are too many")
    start = np.concatenate([[0], np.cumsum(gangs.members)]).astype(np.int64)
    active = np.flatnonzero(gangs.members)
    active_start = np.searchsorted(active, base)
    gangs = gangs._replace(
        machines=np.empty(max(1, entries), np.int32),
        start=start,
        active=(active - np.repeat(base[:-1], np.diff(active_start))).astype(np.int32),
        active_start=active_start.astype(np.int64),
        claim_from=start[:-1].copy(),
    )
    list_free(fleet, gangs, claims, True)
    gangs.claim_from[:] = start[:-1]
    gangs.earmark_from[:] = start[:-1]
    return gangs, rows._replace(gang=gang)


def make_work(fleet: Fleet, rows: Rows, claims: Int32s) -> Work:
    """Make room for the answer; Same rows start undecided."""
    machines, size, fits = len(fleet.shape), len(rows.mode), len(fleet.fits)
    domain = np.full(size, NO_DOMAIN, np.int32)
    domain[rows.mode == MODE_SAME] = UNDECIDED
    return Work(
        claim=claims,
        taken=np.full(machines, -1, np.int32),
        earmarked=np.zeros(machines, np.uint8),
        remaining=rows.aggregate.copy(),
        want=rows.mask.copy(),
        domain=domain,
        satisfiable=np.ones(size, np.uint8),
        claimed=np.empty(machines, np.int32),
        credit_from=np.zeros(size, np.int64),
        credit_to=np.zeros(size, np.int64),
        acquire_from=np.zeros(size, np.int64),
        acquire_to=np.zeros(size, np.int64),
        taken_row=np.empty(machines, np.int32),
        taken_machine=np.empty(machines, np.int32),
        taken_victim=np.empty(machines, np.uint8),
        lengths=np.zeros(2, np.int64),
        cursor_idle=np.zeros(fits, np.int64),
        cursor_speculative=np.zeros((len(fleet.speculative), fits), np.int64),
    )


def make_scratch(fleet: Fleet, rows: Rows) -> Scratch:
    """Make room for what one row needs for a while."""
    domains = int(fleet.domains.max())
    # Plain rows queue no candidates up.
    queue = len(fleet.shape) if (rows.mode != MODE_PLAIN).any() else 0
    dimensions = fleet.supply.shape[1]
    return Scratch(
        gathering=np.zeros(1, np.int64),
        seen=np.zeros(domains, np.int64),
        members=np.zeros(domains, np.int64),
        first=np.zeros(domains, np.int32),
        last=np.zeros(domains, np.int32),
        credit=np.zeros((domains, dimensions), np.int64),
        own=np.zeros((domains, dimensions), np.int64),
        touched=np.zeros(domains, np.int32),
        queue=np.empty(queue, np.int32),
        following=np.empty(queue, np.int32),
        preference=np.empty(queue, np.float64),
    )
