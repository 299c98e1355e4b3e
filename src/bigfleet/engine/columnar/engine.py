"""The columnar engine: the reference engine's answer, action for action, for fleets of half a million machines.

`ColumnarEngine.decide` follows docs/spec/engine.md §2 like the reference: fold, stamp, credit, acquire, preempt,
reclaim, release. Rows are served by the kernels in the reference's order; what an engine keeps between calls (matching,
orders, integers of rows and vocabulary) only saves work. The answer is in columns, objects are made when looked at. It
must never read a clock, do I/O, log, or let anything that it keeps change an answer.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bigfleet.engine import reference
from bigfleet.engine.columnar.answer import Answer
from bigfleet.engine.columnar.arrays import (
    MODE_SAME,
    NO_DOMAIN,
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
from bigfleet.engine.columnar.demand import Demand, Folded, fold_questions, fold_rows, unfolded
from bigfleet.engine.columnar.exact import choose_exactly
from bigfleet.engine.columnar.kernels import acquire, credit
from bigfleet.engine.columnar.objects import snapshot_of
from bigfleet.engine.columnar.orders import Orders
from bigfleet.engine.columnar.preemption import preempt
from bigfleet.engine.columnar.setup import (
    check_quantities,
    cluster_parts,
    fleet_arrays,
    make_gangs,
    make_scratch,
    make_views,
    make_work,
    row_arrays,
    visible_claims,
)
from bigfleet.engine.columnar.store import ColumnSnapshot, column_snapshot
from bigfleet.engine.columnar.sweeps import distinct_shapes, list_excess, prove_folds, rank_victims
from bigfleet.engine.columnar.tables import DoesNotFit, Tables, capacity_holds, ranks
from bigfleet.engine.decision import Decision, Options
from bigfleet.engine.parking import is_parked_age
from bigfleet.engine.preempt import DRAIN_SECONDS_FLOOR, PENALTY_DOLLARS_FLOOR
from bigfleet.engine.reclaim import RELEASABLE
from bigfleet.engine.records import Reporter
from bigfleet.engine.snapshot import Snapshot
from bigfleet.model.ids import MachineId
from bigfleet.model.need import Need
from bigfleet.model.states import MachineState


class ColumnarEngine:
    """Decides from columns. One engine serves one caller at a time; equal input gives equal answers from any engine."""

    def __init__(self) -> None:
        self._tables: Tables | None = None
        self._demand: Demand | None = None
        self._orders: Orders | None = None
        self._orders_view: ColumnSnapshot | None = None
        #: What the last call was given and came to.
        self._last: tuple[ColumnSnapshot, Int64s, Options, Answer] | None = None

    def decide(
        self, view: ColumnSnapshot, demand: Sequence[Need], options: Options, reporter: Reporter | None = None
    ) -> Decision:
        """Decide one cycle: equal to `reference.decide` on the same machines, rows and options.

        With a reporter, or for numbers that the columns cannot hold, the reference engine answers, at its own cost:
        records are its retelling of the same decision.
        """
        if reporter is not None:
            return reference.decide(snapshot_of(view), demand, options, reporter)
        try:
            answer = self._answer(view, demand, options)
        except DoesNotFit:
            self._last = None
            return reference.decide(snapshot_of(view), demand, options)
        # Sequences in place of tuples: they read and compare alike, and make their objects on demand.
        return Decision(actions=answer.actions(), rows=answer.results())

    def _unchanged(self, view: ColumnSnapshot, numbers: Int64s, options: Options) -> Answer | None:
        """Return the last answer when machines, rows and options are those of the last call; only time may differ.

        Time decides about releases alone, so they are worked out again.
        """
        if self._last is None or self._orders is None or self._tables is None:
            return None
        last_view, last_numbers, last_options, answer = self._last
        same_but_time = replace(last_options, now_seconds=options.now_seconds) == options
        if last_view is not view or last_numbers is not numbers or not same_but_time:
            return None
        return replace(answer, released=_releases(view, answer.work, self._orders, self._tables, options))

    @property
    def _known(self) -> tuple[Tables, Demand]:
        assert self._tables is not None, "made when a view is followed"
        assert self._demand is not None, "made with the tables"
        return self._tables, self._demand

    def _follow(self, view: ColumnSnapshot, rows: int) -> tuple[Tables, Demand]:
        """Return tables that know the view's vocabulary; what is kept stays in proportion to what is current."""
        tables = self._tables
        if tables is None or tables.vocabulary is not view.vocabulary or tables.is_overgrown:
            tables = self._tables = Tables(view.vocabulary)
            self._demand = Demand(tables)
            self._orders_view = self._last = None
        elif self._demand is None or self._demand.is_stale(rows):
            self._demand = Demand(tables)
            self._last = None
        assert self._demand is not None, "made with the tables"
        tables.follow()
        tables.trim()
        return tables, self._demand

    def _orders_of(self, view: ColumnSnapshot, tables: Tables) -> Orders:
        if self._orders is None or self._orders_view is not view:
            check_quantities(view, tables)
            self._orders = Orders(view, tables)
            self._orders_view = view
        return self._orders

    def _answer(self, view: ColumnSnapshot, needs: Sequence[Need], options: Options) -> Answer:
        tables, demand = self._follow(view, len(needs))
        numbers = demand.numbers_of(needs)
        known = self._unchanged(view, numbers, options)
        if known is not None:
            return known
        orders = self._orders_of(view, tables)
        claims = visible_claims(view, view.rows, options)
        profiles = demand.profile_columns
        rows_given = unfolded(demand.need_columns, numbers)
        starts, stops = cluster_parts(
            np.arange(len(tables.clusters), dtype=np.int32), tables=tables, view=view, orders=orders
        )
        folded, fits = self._fold(view, rows_given, claims, starts, stops)
        newly_parked = _stamp_parked(folded, options, tables, profiles.mode[folded.profile] == MODE_SAME)
        in_order = np.argsort(-profiles.precedence[folded.profile], kind="stable")
        orders.use_buckets(sorted(set(profiles.bucket[folded.profile].tolist())))

        rows = row_arrays(folded, fits, in_order, newly_parked, demand=demand, orders=orders)
        fleet = fleet_arrays(view, tables, orders, demand.keys)
        views, rows = make_views(fleet, rows, orders, starts[rows.cluster], stops[rows.cluster])
        gangs, rows = make_gangs(fleet, rows, claims)
        work, scratch = make_work(fleet, rows, claims), make_scratch(fleet, rows)

        self._credit(fleet, rows, views, gangs, work, scratch, folded, in_order)
        credited = int(work.lengths[0])
        acquire(fleet, rows, gangs, work, scratch)
        _preempt(fleet, rows, work, scratch, orders, tables, options)
        acquired_row, acquired_machine = _acquisitions(view, work, credited)
        victims = work.taken_victim[: work.lengths[1]] != 0
        rank_of = np.empty(len(in_order), np.int64)
        rank_of[in_order] = np.arange(len(in_order))
        answer = Answer(
            view=view,
            scale=tables.scale_by_name(),
            fleet=fleet,
            rows=rows,
            work=work,
            folded=folded,
            demand=demand.rows,
            values=[tables.attribute(key).values for key in demand.keys],
            in_order=in_order,
            rank_of=rank_of,
            newly_parked=newly_parked,
            unjoined=options.unjoined,
            acquired_row=acquired_row,
            acquired_machine=acquired_machine,
            victim_row=work.taken_row[: work.lengths[1]][victims],
            victim_machine=work.taken_machine[: work.lengths[1]][victims],
            reclaimed=_reclaims(view, work, orders, options),
            released=_releases(view, work, orders, tables, options),
        )
        self._last = (view, numbers, options, answer)
        return answer

    # ---- folding -----------------------------------------------------------------------------------------------

    def _fold(
        self, view: ColumnSnapshot, rows: Folded, claims: Int32s, starts: Int64s, stops: Int64s
    ) -> tuple[Folded, Int32s]:
        """Return the folded list and the fit of each of its rows (§4)."""
        tables, demand = self._known
        orders = self._orders
        assert orders is not None, "made when a view is followed"
        questions = fold_questions(rows, demand.profile_columns)
        pairs = np.zeros(len(questions.cluster), np.int64)
        if len(questions.places):
            asked = list(zip(questions.profile.tolist(), questions.aggregate.tolist(), strict=True))
            proofs = {kind: self._proving_fit(*kind) for kind in set(asked)}
            fit = np.array([proofs[kind] for kind in asked], np.int32)
            pair_of = {
                profile: tables.pairs.number((demand.profiles[profile].fingerprint, ""))
                for profile in set(questions.profile.tolist())
            }
            pairs = np.array([pair_of[profile] for profile in questions.profile.tolist()], np.int64)
            folds = _proven(view, tables, orders, questions.cluster, pairs, fit, claims, starts, stops)
            rows = fold_rows(rows, questions, folds, pairs)
        return rows, self._fits_of(rows)

    def _proving_fit(self, profile_number: int, vector_number: int) -> int:
        tables, demand = self._known
        profile = demand.profiles[profile_number]
        fit = tables.fit(profile.requirements, demand.vectors.vectors[vector_number])
        spread = profile.strict_spread
        return fit if spread is None else tables.carrying(fit, spread.topology_key)

    def _fits_of(self, rows: Folded) -> Int32s:
        tables, demand = self._known
        vectors = len(demand.vectors.vectors)
        key = rows.profile.astype(np.int64) * vectors + rows.min_unit
        if len(key) == 0:
            return np.zeros(0, np.int32)
        distinct, inverse = np.unique(key, return_inverse=True)
        fits = [
            tables.fit(demand.profiles[kind // vectors].requirements, demand.vectors.vectors[kind % vectors])
            for kind in distinct.tolist()
        ]
        return np.array(fits, np.int32)[inverse]

    # ---- Phase 1 -----------------------------------------------------------------------------------------------

    def _credit(
        self,
        fleet: Fleet,
        rows: Rows,
        views: Views,
        gangs: Gangs,
        work: Work,
        scratch: Scratch,
        folded: Folded,
        in_order: Int64s,
    ) -> None:
        """Credit every row; where a gang's coverages do not fit the integers its domain is chosen exactly."""
        tables, demand = self._known
        row = credit(fleet, rows, views, gangs, work, scratch, 0)
        while row < len(rows.mode):
            aggregate = demand.vectors.vectors[folded.aggregate[in_order[row]]]
            domain, satisfiable = choose_exactly(
                row,
                aggregate=aggregate,
                supplies=tables.vocabulary.supplies,
                values=tables.attribute(demand.keys[rows.key[row]]).values,
                fleet=fleet,
                rows=rows,
                views=views,
                gangs=gangs,
                work=work,
            )
            work.domain[row] = domain
            work.satisfiable[row] = satisfiable
            row = credit(fleet, rows, views, gangs, work, scratch, row)


def _proven(
    view: ColumnSnapshot,
    tables: Tables,
    orders: Orders,
    clusters: Int64s,
    pairs: Int64s,
    fit: Int32s,
    claims: Int32s,
    starts: Int64s,
    stops: Int64s,
) -> Bytes:
    """Say for each question whether some machine proves the fold: free, bound to the cluster, or being created (§4)."""
    shape = view.columns.shape
    free = np.concatenate([orders.idle_by_id, orders.speculative_by_id])
    free_shapes = np.unique(shape[free[claims[free] == -1]])
    proven: Bytes = np.any(tables.fits[:, free_shapes], axis=1).astype(np.uint8)[fit]
    # Most large gangs fit no machine whole, wherever it stands: nobody needs to look for one.
    is_open = (proven == 0) & np.any(tables.fits, axis=1)[fit]
    if not is_open.any():
        return proven
    asked, question_cluster = np.unique(clusters, return_inverse=True)
    parts = np.zeros(len(asked) + 1, np.int64)
    room = int((stops[asked] - starts[asked]).sum())
    found = np.empty(max(1, room), np.int32)
    last_seen = np.full(len(tables.supply_of), -1, np.int64)
    distinct_shapes(orders.bound_shapes, claims, orders.bound, starts[asked], stops[asked], parts, last_seen, found)
    first_shape, last_shape = parts[:-1][question_cluster], parts[1:][question_cluster]
    prove_folds(found, tables.fits, fit, first_shape, np.where(is_open, last_shape, first_shape), proven)
    first = np.searchsorted(orders.creating_pair, pairs, "left")
    last = np.searchsorted(orders.creating_pair, pairs, "right")
    for question in np.flatnonzero((proven == 0) & (first < last)).tolist():
        machines = orders.creating[first[question] : last[question]]
        intended = tables.stamp_intended[view.columns.stamp[machines]]
        own = machines[((intended == 0) | (intended == clusters[question])) & (claims[machines] == -1)]
        proven[question] = tables.fits[fit[question], shape[own]].any()
    return proven


def _stamp_parked(folded: Folded, options: Options, tables: Tables, is_same: Bytes) -> Bytes:
    """Return the Same rows whose class is parked by its age (§9)."""
    due = [
        tables.row_key(key.cluster, key.fingerprint, key.group)
        for key, age in options.parking_ages.items()
        if is_parked_age(age)
    ]
    if not due:
        return np.zeros(len(folded.place), np.uint8)
    keys = folded.cluster.astype(np.int64) << 32 | folded.pair
    parked: Bytes = (np.isin(keys, np.array(due, np.int64)) & is_same & (folded.parked == 0)).astype(np.uint8)
    return parked


def _acquisitions(view: ColumnSnapshot, work: Work, credited: int) -> tuple[Int32s, Int32s]:
    """Return row and machine of every acquisition: by row, Bootstraps before Provisions, ids ascending (§5.6).

    Nothing that was credited is among them: credit never takes a free machine.
    """
    machines = work.claimed[credited : work.lengths[0]]
    rows = work.claim[machines]
    is_speculative = view.columns.state[machines] == MachineState.SPECULATIVE
    bits = len(view.ids).bit_length()
    key = (rows.astype(np.int64) << 1 | is_speculative) << bits | machines
    key.sort()
    return (key >> (bits + 1)).astype(np.int32), (key & ((1 << bits) - 1)).astype(np.int32)


# ---- Phase 2 ---------------------------------------------------------------------------------------------------


def _preempt(
    fleet: Fleet, rows: Rows, work: Work, scratch: Scratch, orders: Orders, tables: Tables, options: Options
) -> None:
    """Serve the short rows, priority by priority: each priority has its own order of victims (§6)."""
    is_stuck = (rows.mode == MODE_SAME) & (work.domain == NO_DOMAIN)
    short = np.flatnonzero((work.want != 0) & (rows.parked == 0) & ~is_stuck)
    if len(short) == 0:
        return
    priorities = rows.priority[short]
    firsts = np.flatnonzero(np.diff(priorities, prepend=priorities[0] + 1))
    lasts = np.append(firsts[1:], len(short))
    ranked = np.empty(len(orders.configured), np.int32)
    for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
        rank_of_stamp, size = _victim_ranks(tables, int(priorities[first]), options)
        total = 0
        if (rank_of_stamp >= 0).any():
            sizes = np.zeros(size + 1, np.int64)
            total = rank_victims(orders.configured, fleet.stamp, work.claim, rank_of_stamp, sizes, ranked)
        cursors = np.zeros(len(fleet.fits), np.int64)
        preempt(fleet, rows, work, scratch, ranked[:total], cursors, int(short[first]), int(short[last - 1]) + 1)


def _victim_ranks(tables: Tables, priority: int, options: Options) -> tuple[Int32s, int]:
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


def _reclaims(view: ColumnSnapshot, work: Work, orders: Orders, options: Options) -> Int32s:
    """Return the machines that are given back: by cluster id, then keep-priority (§7)."""
    names = view.vocabulary.clusters
    sizes = orders.bound_starts[1::2] - orders.bound_starts[:-1:2]
    having = [(names[number], number) for number in np.flatnonzero(sizes).tolist() if names[number] in options.reported]
    numbers = np.array([number for _, number in sorted(having)], np.int64)
    machines = np.empty(int(sizes[numbers].sum()), np.int32)
    starts = orders.bound_starts[2 * numbers]
    return machines[: list_excess(work, orders.bound, starts, starts + sizes[numbers], machines)]


def _releases(view: ColumnSnapshot, work: Work, orders: Orders, tables: Tables, options: Options) -> Int32s:
    """Return the Idle machines whose hold is over, by id (§7)."""
    columns, machines = view.columns, orders.idle_by_id
    holds = capacity_holds({int(kind): seconds for kind, seconds in options.hold_seconds.items()})
    is_kept = ~np.isin(np.arange(len(holds)), [int(kind) for kind in RELEASABLE]) | ~(holds > 0)
    kept = is_kept[tables.offer_capacity_type]
    if kept.all():
        return np.zeros(0, np.int32)
    machines = machines[~kept[columns.offer[machines]] & (work.claim[machines] < 0)]
    hold = holds[tables.offer_capacity_type[columns.offer[machines]]]
    since = columns.idle_since_seconds[machines]
    left = hold - (options.now_seconds - since)
    machines = machines[left <= 0]
    reserved = [view.rows.get(MachineId(machine_id), -1) for machine_id in options.reserved]
    return machines[~np.isin(machines, reserved)]


def columnar_decide(
    snapshot: Snapshot, demand: Sequence[Need], options: Options, reporter: Reporter | None = None
) -> Decision:
    """Decide from an object snapshot with a fresh engine; the arguments and the answer of `reference.decide`."""
    return ColumnarEngine().decide(column_snapshot(snapshot), demand, options, reporter)


def warm_up() -> None:
    """Load the kernels, compiling them when no compiled form is at hand, so that the first cycle does not.

    Importing this module does that already; calling makes it visible at the call site and runs them once.
    """
    columnar_decide(Snapshot.of(()), (), Options(now_seconds=0.0, reported=frozenset()))
