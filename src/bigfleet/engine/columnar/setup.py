"""Lays out the arrays of one decision: rows, listings, gang classes, room for the answer.

Between the columns that live across calls and the kernels that run once. This module must not serve a row.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from bigfleet.engine.columnar.arrays import (
    MODE_PLAIN,
    MODE_SAME,
    NO_DOMAIN,
    QUANTITY_MAX,
    UNSEEN,
    BoundMachines,
    Bytes,
    FleetArrays,
    Gangs,
    Int32s,
    Int64s,
    Listings,
    Rows,
    Scratch,
)
from bigfleet.engine.columnar.demand import ColumnarDemand
from bigfleet.engine.columnar.folds import Arranged, Folded
from bigfleet.engine.columnar.kernels.sweeps import find_free_entries, list_bound, list_free
from bigfleet.engine.columnar.machine_orders import Orders
from bigfleet.engine.columnar.tables import DoesNotFit, VocabularyTables
from bigfleet.engine.columns.sold_out import sold_out_rows
from bigfleet.engine.columns.store import ColumnSnapshot
from bigfleet.engine.decision import Options
from bigfleet.engine.reference.pool import RESERVABLE_STATES, SET_ASIDE_STATES
from bigfleet.model.ids import MachineId
from bigfleet.model.penalty import ORDINALS

#: Cells of (gang class, domain) and entries of free machines by cell; beyond, the reference engine must answer.
CELLS_MAX: Final = 20_000_000
ENTRIES_MAX: Final = 100_000_000


def hidden_rows(view: ColumnSnapshot, options: Options) -> Int64s:
    """Return the rows of the machines that no phase but the third may see, ascending (docs/spec/engine.md §1.1)."""
    hidden = []
    sold_out = sold_out_rows(view, options)
    if not (options.unjoined or options.reserved or options.set_aside):
        return sold_out
    for machine_id in options.unjoined:
        row = view.rows.get(MachineId(machine_id))
        if row is not None:
            hidden.append(row)
    for machine_id in options.reserved:
        row = view.rows.get(MachineId(machine_id))
        if row is not None and view.columns.state[row] in RESERVABLE_STATES:
            hidden.append(row)
    for machine_id in options.set_aside:
        row = view.rows.get(MachineId(machine_id))
        if row is not None and view.columns.state[row] in SET_ASIDE_STATES:
            hidden.append(row)
    return np.union1d(np.array(hidden, np.int64), sold_out)


def statuses(machines: int, hidden: Int64s) -> Bytes:
    """Return the statuses before anybody claims."""
    status: Bytes = np.zeros(machines, np.uint8)
    status[hidden] = UNSEEN
    return status


def check_quantities(view: ColumnSnapshot, tables: VocabularyTables) -> None:
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


def fleet_arrays(view: ColumnSnapshot, tables: VocabularyTables, orders: Orders, keys: list[str]) -> FleetArrays:
    """Gather what kernels read of the machines; `keys` are the topology keys, by number."""
    columns = view.columns
    attributes = [tables.attribute(key) for key in keys]
    domain_of = np.full((max(1, len(keys)), len(tables.supply_of)), NO_DOMAIN, np.int32)
    for number, attribute in enumerate(attributes):
        domain_of[number] = attribute.domains()
    return FleetArrays(
        shape=columns.shape,
        offer=columns.offer,
        stamp=columns.stamp,
        cluster=columns.cluster,
        cluster_of=tables.cluster_of,
        supply_of=tables.supply_of,
        supply=tables.supply,
        helps=tables.helps,
        offer_price=tables.offer_price,
        idle=orders.idle,
        speculative=orders.speculative,
        coming=orders.coming,
        coming_for=orders.coming_for,
        fits=tables.fits,
        domain_of=domain_of,
        domains=np.array([len(attribute.values) for attribute in attributes] or [0], np.int32),
    )


def row_starts(folded: Folded, clusters: int) -> Int64s:
    """Return the first row of each cluster."""
    sizes = np.bincount(folded.cluster, minlength=clusters)
    return (np.cumsum(sizes) - sizes).astype(np.int64)


def row_arrays(
    folded: Folded, row_start: Int64s, fits: Int32s, parked: Bytes, *, demand: ColumnarDemand, orders: Orders
) -> Rows:
    """Gather the rows. `listing`, `gang` and `is_fresh` are still those of no one."""
    profiles, vectors = demand.profile_columns, demand.vectors
    profile, aggregate = folded.profile.astype(np.intp), folded.aggregate.astype(np.intp)
    lines = np.zeros(len(ORDINALS), np.int32)
    lines[list(orders.line_of)] = list(orders.line_of.values())
    return Rows(
        mode=profiles.mode.take(profile),
        parked=parked,
        fit=fits,
        listing=np.zeros(len(profile), np.int32),
        cluster=folded.cluster,
        row_start=row_start,
        pair=folded.pair,
        precedence=profiles.precedence.take(profile),
        priority=profiles.priority.take(profile),
        aggregate=vectors.scaled.take(aggregate, axis=0),
        mask=vectors.mask.take(aggregate),
        key=profiles.key.take(profile),
        skew=profiles.skew.take(profile),
        bucket=lines[profiles.bucket].take(profile),
        gang=np.full(len(profile), -1, np.int32),
        weight=vectors.weight.take(aggregate, axis=0),
        is_exact=vectors.is_exact.take(aggregate),
        is_fresh=np.ones(len(profile), np.uint8),
    )


def list_order(folded: Folded, arranged: Arranged) -> Int64s:
    """Return the rows in list order: each stands where its first member stands."""
    place = arranged.places[arranged.start[folded.cluster] + folded.local]
    row_at = np.full(len(arranged.places), -1, np.int64)
    row_at[place] = np.arange(len(place))
    return row_at[row_at >= 0]


def processing_order(rows_in_list: Int64s, folded: Folded, demand: ColumnarDemand) -> Int32s:
    """Return the rows in processing order: precedence, then list order (docs/spec/aggregates.md §5.1)."""
    keys = demand.precedence_ranks()[folded.profile[rows_in_list]]
    return rows_in_list[np.argsort(keys, kind="stable")].astype(np.int32)


def make_listings(fleet: FleetArrays, bound: BoundMachines, rows: Rows, fresh: Int64s) -> tuple[Listings, Int32s]:
    """List the bound machines that fit, once per (cluster, fit) of the fresh rows; also return each such row's listing.

    What one row alone scans once is scanned where it is, in its segment.
    """
    key = rows.cluster[fresh].astype(np.int64) * (len(fleet.fits) + 1) + rows.fit[fresh]
    _, first, listing, count = np.unique(key, return_index=True, return_inverse=True, return_counts=True)
    firsts = fresh[first]
    cluster = rows.cluster[firsts]
    segment_start, segment_stop = bound.start[cluster], bound.creating[cluster]
    is_shared = ((count > 1) | (rows.mode[firsts] == MODE_SAME)).astype(np.uint8)
    room = int(((segment_stop - segment_start) * is_shared).sum())
    if room > ENTRIES_MAX:
        raise DoesNotFit(f"{room} bound machines by cluster and fit are too many")
    none = np.zeros(len(first), np.int64)
    listings = Listings(np.empty(max(1, room), np.int32), is_shared, none, none.copy())
    list_bound(fleet.fits, bound, segment_start, segment_stop, rows.fit[firsts], listings)
    return listings, listing.astype(np.int32)


def gang_classes(rows: Rows, folded: Folded) -> tuple[Int64s, Int32s]:
    """Return the distinct classes of gangs, (fit, key, mask, bucket) line by line, and the class of each row, -1 none.

    Rows of one gang number ask alike, so few have to be looked at.
    """
    gang = np.full(len(rows.mode), -1, np.int32)
    same = np.flatnonzero(rows.mode == MODE_SAME)
    if len(same) == 0:
        return np.zeros((4, 0), np.int64), gang
    numbers = folded.gang[same]
    row_of = np.full(int(numbers.max()) + 1, -1, np.int64)
    row_of[numbers] = same
    used = np.flatnonzero(row_of >= 0)
    some = row_of[used]
    classes = np.stack([rows.fit[some], rows.key[some], rows.mask[some], rows.bucket[some]]).astype(np.int64)
    lines = list(zip(*classes.tolist(), strict=True))
    number_of = {line: number for number, line in enumerate(sorted(set(lines)))}
    class_of = np.zeros(len(row_of), np.int32)
    class_of[used] = [number_of[line] for line in lines]
    gang[same] = class_of[numbers]
    return np.array(list(number_of), np.int64).T, gang


def make_gangs(fleet: FleetArrays, classes: Int64s, status: Bytes, room: int) -> Gangs:
    """List free machines once per class of gangs; with `room` for all of them it takes one look at each."""
    fit, key, mask, bucket = (np.ascontiguousarray(line) for line in classes)
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
    domain_of = np.empty(len(fleet.supply_of), np.int32)
    while True:
        machines_found, cells_found = np.empty(room, np.int32), np.empty(room, np.int64)
        entries = find_free_entries(fleet, gangs, status, domain_of, machines_found, cells_found)
        if entries > ENTRIES_MAX:
            raise DoesNotFit(f"{entries} free machines by gang class are too many")
        if entries <= room:
            break
        room = entries
        gangs.members[:] = gangs.total[:] = 0
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
    list_free(gangs, machines_found, cells_found, entries)
    return gangs._replace(claim_from=start[:-1].copy(), earmark_from=start[:-1].copy())


def again(gangs: Gangs) -> Gangs:
    """Return gang classes as they are before anybody earmarks or claims; the listed machines are shared."""
    start = gangs.start[:-1]
    return gangs._replace(
        members=gangs.members.copy(), total=gangs.total.copy(), earmark_from=start.copy(), claim_from=start.copy()
    )


def make_scratch(fleet: FleetArrays, modes: npt.NDArray[np.uint8]) -> Scratch:
    """Make room for what one row needs for a while."""
    domains = int(fleet.domains.max())
    # Plain rows queue no candidates up; a gathering writes one place beyond its last candidate.
    queue = len(fleet.shape) + 1 if (modes != MODE_PLAIN).any() else 0
    dimensions = fleet.supply.shape[1]
    return Scratch(
        gathering=np.zeros(1, np.int64),
        gathered=np.full(5, -1, np.int64),
        seen=np.zeros(domains, np.int64),
        members=np.zeros(domains, np.int64),
        first=np.zeros(domains, np.int32),
        last=np.zeros(domains, np.int32),
        credit=np.zeros((domains, dimensions), np.int64),
        own=np.zeros((domains, dimensions), np.int64),
        touched=np.zeros(domains, np.int32),
        covered_own=np.zeros(domains, np.int64),
        totals_max=np.zeros(dimensions, np.int64),
        left=np.zeros(dimensions, np.int64),
        queue=np.empty(queue, np.int32),
        following=np.empty(queue, np.int32),
        preference=np.empty(queue, np.float64),
    )
