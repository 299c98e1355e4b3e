"""Runs the steps after credit: acquisition, Phase 2 by priority, and Phase 3.

docs/spec/aggregates.md §5.6 to §7. Each function turns claims into the columns of an answer. This module must not
change a claim of Phase 1.
"""

from typing import Final

import numpy as np

from bigfleet.engine.columnar.arrays import (
    MODE_SAME,
    NO_DOMAIN,
    SPECULATIVE,
    BoundMachines,
    FleetArrays,
    Int32s,
    Int64s,
    Rows,
    Scratch,
    Work,
)
from bigfleet.engine.columnar.demand import NO_ASK, ColumnarDemand
from bigfleet.engine.columnar.folds import Arranged, Folded, folded_pair
from bigfleet.engine.columnar.incremental_state import ExcessMachines, Flags
from bigfleet.engine.columnar.kernels.acquisition import list_acquired
from bigfleet.engine.columnar.kernels.preemption import preempt
from bigfleet.engine.columnar.kernels.sweeps import list_excess, list_over, list_reclaimed, rank_victims
from bigfleet.engine.columnar.machine_orders import Orders
from bigfleet.engine.columnar.tables import DoesNotFit, VocabularyTables, capacity_holds, ranks
from bigfleet.engine.columns.store import ColumnSnapshot
from bigfleet.engine.decision import Options
from bigfleet.engine.reference.preempt import DRAIN_SECONDS_FLOOR, PENALTY_DOLLARS_FLOOR
from bigfleet.engine.reference.reclaim import RELEASABLE
from bigfleet.model.ids import MachineId

_IS_RELEASABLE: Final = capacity_holds({int(kind): 1.0 for kind in RELEASABLE}) > 0


def short_rows(rows: Rows, work: Work, order: Int32s) -> Int32s:
    """Return the unparked rows that still want something, in processing order."""
    short: Int32s = order[((work.want != 0) & (rows.parked == 0))[order]]
    return short


def acquisitions(view: ColumnSnapshot, work: Work, agenda: Int32s) -> tuple[Int32s, Int32s]:
    """Return row and machine of every acquisition: by row, Bootstraps before Provisions, ids ascending (§5.6)."""
    rows, machines = np.empty((2, int(work.lengths[1])), np.int32)
    list_acquired(work, view.columns.state, SPECULATIVE, agenda, rows, machines)
    return rows, machines


# ---- Phase 2 ---------------------------------------------------------------------------------------------------


def preempt_all(
    fleet: FleetArrays,
    rows: Rows,
    work: Work,
    scratch: Scratch,
    agenda: Int32s,
    *,
    orders: Orders,
    tables: VocabularyTables,
    options: Options,
) -> None:
    """Serve the short rows, priority by priority: each priority has its own order of victims (§6)."""
    is_stuck = (rows.mode[agenda] == MODE_SAME) & (work.domain[agenda] == NO_DOMAIN)
    short = agenda[(work.want[agenda] != 0) & ~is_stuck]
    if len(short) == 0:
        return
    bound = orders.segments.bound
    priorities = rows.priority[short]
    firsts = np.flatnonzero(np.diff(priorities, prepend=priorities[0] + 1))
    ranked = np.zeros(0, np.int32)
    for same in np.split(short, firsts[1:]):
        rank_of_stamp, size = _victim_ranks(tables, int(rows.priority[same[0]]), options)
        total = 0
        if (rank_of_stamp >= 0).any():
            ranked = np.empty(len(orders.configured), np.int32)
            sizes = np.zeros(size + 1, np.int64)
            total = rank_victims(orders.configured, fleet.stamp, bound, rank_of_stamp, sizes, ranked)
        cursors = np.zeros(len(fleet.fits), np.int64)
        preempt(fleet, bound, rows, work, scratch, ranked[:total], cursors, np.ascontiguousarray(same))


def _victim_ranks(tables: VocabularyTables, priority: int, options: Options) -> tuple[Int32s, int]:
    """Return the rank of each stamp by score, best first, -1 for stamps that make no victim (§6.4)."""
    weights = options.weights
    gap = np.maximum(0, priority - tables.stamp_priority).astype(np.float64)
    interruption, reclamation = tables.stamp_interruption, tables.stamp_reclamation
    # Added from left to right, as it is written.
    score = gap * weights.priority
    score = score + (1 / max(DRAIN_SECONDS_FLOOR, options.drain_seconds)) * weights.drain
    score = score + (1 / np.maximum(PENALTY_DOLLARS_FLOOR, interruption)) * weights.interruption
    score = score + (1 / np.maximum(PENALTY_DOLLARS_FLOOR, reclamation)) * weights.reclamation
    if np.isnan(score).any():
        raise DoesNotFit("a victim score is not a number")
    rank = ranks(-score).astype(np.int32)
    size = int(rank.max()) + 1 if len(rank) else 0
    rank[tables.stamp_priority >= priority] = -1
    return rank, size


# ---- Phase 3 ---------------------------------------------------------------------------------------------------


def excess_of(bound: BoundMachines, clusters: int) -> ExcessMachines:
    """Return what no row holds, cluster by cluster, with room for as much again."""
    configured = int((bound.configuring - bound.start).sum())
    none = np.zeros(clusters, np.int64)
    excess = ExcessMachines(np.empty(2 * configured + 1, np.int32), none, none.copy(), 0)
    all_clusters = np.flatnonzero(bound.configuring > bound.start).astype(np.int32)
    excess.used = list_excess(bound, all_clusters, excess.start, excess.stop, excess.machines, 0)
    return excess


def followed_excess(excess: ExcessMachines | None, bound: BoundMachines, fresh: Flags) -> ExcessMachines:
    """Return what no row holds after some clusters were credited again."""
    if excess is None or fresh.all():
        return excess_of(bound, len(fresh))
    clusters = np.flatnonzero(fresh).astype(np.int32)
    needed = int((bound.configuring[clusters] - bound.start[clusters]).sum())
    if excess.used + needed > len(excess.machines):
        return excess_of(bound, len(fresh))
    excess.grow(len(fresh))
    excess.used = list_excess(bound, clusters, excess.start, excess.stop, excess.machines, excess.used)
    return excess


def short_stamps(
    work: Work, folded: Folded, arranged: Arranged, demand: ColumnarDemand, tables: VocabularyTables
) -> Int64s:
    """Return the keys, cluster << 32 | pair, with which machines are stamped that were bound for a short row (§7).

    Call it between acquisition and Phase 2: Phase 2 writes into `work.want`, and a row with victims is still short.
    """
    short = np.flatnonzero(work.want)
    if len(short) == 0:
        return np.zeros(0, np.int64)
    needs = demand.need_columns
    own = folded.cluster[short].astype(np.int64) << 32 | folded.pair[short]
    # A gang that does not fold now may have folded when its machines were bound.
    gangs = short[folded.members[short] == 0]
    asks = needs.folded_ask[arranged.numbers[arranged.start[folded.cluster[gangs]] + folded.local[gangs]]]
    gangs, asks = gangs[asks != NO_ASK], asks[asks != NO_ASK]
    distinct, place = np.unique(asks, return_inverse=True)
    pairs = np.array([folded_pair(ask, demand, tables) for ask in distinct.tolist()], np.int64)
    own = np.concatenate([own, folded.cluster[gangs].astype(np.int64) << 32 | pairs[place]])
    short_folds = short[folded.members[short] != 0]
    if len(short_folds) == 0:
        return own
    # Of one cluster all gangs with one folded ask fold together. NO_ASK is -1, which makes a key below all of these.
    asked = folded.cluster[short_folds].astype(np.int64) << 32 | folded.ask[short_folds]
    asking = arranged.cluster.astype(np.int64) << 32 | needs.folded_ask[arranged.numbers]
    members = np.flatnonzero(np.isin(asking, asked))
    of_members = arranged.cluster[members].astype(np.int64) << 32 | needs.pair[arranged.numbers[members]]
    return np.concatenate([own, of_members])


def reclaims(
    excess: ExcessMachines,
    fleet: FleetArrays,
    work: Work,
    short: Int64s,
    *,
    view: ColumnSnapshot,
    tables: VocabularyTables,
    options: Options,
) -> Int32s:
    """Return the machines that are reclaimed: by cluster id, then keep-priority (§7).

    `short` is the result of `short_stamps`: what is stored between decisions knows nothing of it.
    """
    sizes = excess.stop - excess.start
    names = list(tables.clusters.of)
    having = [(str(names[number]), number) for number in np.flatnonzero(sizes).tolist()]
    numbers = np.array([number for name, number in sorted(having) if name in options.reported], np.int32)
    machines = np.empty(int(sizes[numbers].sum()), np.int32)
    found = list_reclaimed(work.taken, numbers, excess.start, excess.stop, excess.machines, machines)
    machines = machines[:found]
    if len(short) == 0 or found == 0:
        return machines
    stays = _bound_for(short, machines, fleet, tables)
    if options.unjoined:
        unjoined = [view.rows.get(MachineId(machine_id), -1) for machine_id in options.unjoined]
        stays = stays[~np.isin(machines[stays], unjoined)]
    return np.delete(machines, stays)


def _bound_for(short: Int64s, machines: Int32s, fleet: FleetArrays, tables: VocabularyTables) -> Int64s:
    """Return the places in `machines` of those that are stamped with a key of `short`, ascending.

    Only machines whose pair and whose cluster occur in keys are compared with the keys: `np.isin` sorts all of
    them, which is three quarters of a decision that gives back most of its machines.
    """
    keys = np.unique(short)
    is_short_cluster = np.isin(fleet.cluster_of, keys >> 32)
    is_short_pair = np.isin(tables.stamp_pair, keys.astype(np.int32))  # the lower half
    if not is_short_pair.any():
        return np.zeros(0, np.int64)
    places = np.flatnonzero(is_short_pair[fleet.stamp[machines]])
    places = places[is_short_cluster[fleet.cluster[machines[places]]]]
    cluster = fleet.cluster_of[fleet.cluster[machines[places]]].astype(np.int64)
    stamped = cluster << 32 | tables.stamp_pair[fleet.stamp[machines[places]]]
    at = np.minimum(np.searchsorted(keys, stamped), len(keys) - 1)
    found: Int64s = places[keys[at] == stamped]
    return found


def releases(view: ColumnSnapshot, work: Work, orders: Orders, tables: VocabularyTables, options: Options) -> Int32s:
    """Return the Idle machines whose hold is over, by id (§7)."""
    columns = view.columns
    holds = capacity_holds({int(kind): seconds for kind, seconds in options.hold_seconds.items()})
    is_held = ~(_IS_RELEASABLE & (holds > 0))
    if is_held[tables.offer_capacity_type].all():
        return np.zeros(0, np.int32)
    hold_of_offer = np.where(is_held, np.inf, holds)[tables.offer_capacity_type]
    machines = np.empty(len(orders.idle), np.int32)
    since, now = columns.idle_since_seconds, options.now_seconds
    found = list_over(orders.idle, work.status, columns.offer, hold_of_offer, since, now, machines)
    reserved = [view.rows.get(MachineId(machine_id), -1) for machine_id in options.reserved]
    machines = np.sort(machines[:found])
    return machines[~np.isin(machines, reserved)] if reserved else machines
