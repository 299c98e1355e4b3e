"""Runs one decision: mark what changed, fold, lay rows out, credit, acquire, preempt, reclaim.

docs/spec/aggregates.md §2. What the last decision left is used for clusters that nothing touched (docs/adr/0111); a
cycle that is given nothing does everything, with the same steps. This module must not look at a machine or a row one by
one.
"""

from dataclasses import dataclass, field

import numpy as np

from bigfleet.engine.columnar.answer import ColumnarAnswer, ResultsOfNothing
from bigfleet.engine.columnar.arrays import (
    MODE_SAME,
    Bytes,
    FleetArrays,
    Gangs,
    Int32s,
    Int64s,
    Memo,
    Rows,
    Scratch,
    Work,
)
from bigfleet.engine.columnar.credit_pass import Pass, clear, credits_of
from bigfleet.engine.columnar.demand import ColumnarDemand
from bigfleet.engine.columnar.earmarks import Earmarks
from bigfleet.engine.columnar.exact_gang_domains import choose_exactly
from bigfleet.engine.columnar.folds import Arranged, arrange, fold, free_proofs, proven, questions_of, unfolded
from bigfleet.engine.columnar.incremental_state import (
    ExcessMachines,
    Flags,
    IncrementalState,
    Spliced,
    mark_changed_proofs,
    mark_changed_rows,
    mark_changed_visibility,
    splice,
)
from bigfleet.engine.columnar.kernels.acquisition import acquire
from bigfleet.engine.columnar.machine_orders import Orders
from bigfleet.engine.columnar.phases import (
    acquisitions,
    followed_excess,
    preempt_all,
    reclaims,
    releases,
    short_rows,
    short_stamps,
)
from bigfleet.engine.columnar.setup import (
    fleet_arrays,
    gang_classes,
    hidden_rows,
    list_order,
    make_gangs,
    make_scratch,
    processing_order,
    row_arrays,
    row_starts,
    statuses,
)
from bigfleet.engine.columnar.tables import VocabularyTables
from bigfleet.engine.columns.store import ColumnSnapshot
from bigfleet.engine.decision import Options, Phase, PhaseListener
from bigfleet.engine.parking import is_parked_age


@dataclass(slots=True, eq=False, kw_only=True)
class Cycle:
    """What one decision is made of. `next_state` and `memo_room` are for the next one once `decide` has returned."""

    view: ColumnSnapshot
    options: Options
    #: Number of each row given, in list order.
    numbers: Int64s
    tables: VocabularyTables
    demand: ColumnarDemand
    orders: Orders
    #: Clusters that must be folded and credited again.
    fresh: Flags
    previous: IncrementalState | None
    memo_room: int
    results_of_nothing: ResultsOfNothing
    on_phase: PhaseListener
    next_state: IncrementalState | None = None
    _is_tied: bool = field(init=False)
    _hidden: Int64s = field(init=False)
    _values: list[list[str]] = field(init=False)
    _arranged: Arranged = field(init=False)
    _by_free: Bytes = field(init=False)
    _spliced: Spliced = field(init=False)
    _newly_parked: Bytes = field(init=False)
    _parked: Bytes = field(init=False)

    def decide(self) -> ColumnarAnswer:
        """Make the decision. Raises DoesNotFit for numbers that the columns cannot hold."""
        self._mark()
        self._fold()
        self.on_phase(Phase.FOLD)
        self._park()
        folded = self._spliced.folded
        rows_in_list = list_order(folded, self._arranged)
        order = processing_order(rows_in_list, folded, self.demand)
        rows, classes = self._rows()
        fleet = fleet_arrays(self.view, self.tables, self.orders, self.demand.keys)
        gangs = make_gangs(fleet, classes, statuses(len(self.view.ids), self._hidden), self._entries_expected())
        scratch = make_scratch(fleet, rows.mode)
        work, excess = self._credit(fleet, rows, gangs, scratch, order)
        return self._serve(fleet, rows, gangs, work, scratch, order, rows_in_list, excess)

    def _entries_expected(self) -> int:
        """Return room for some more free machines by class of gangs than there were in the last decision."""
        return 0 if self.previous is None else 2 * len(self.previous.earmarks.gangs.machines)

    # ---- what changed --------------------------------------------------------------------------------------------

    def _mark(self) -> None:
        """Mark the clusters that cannot keep their credits; without a previous state these are all."""
        tables, demand, bound = self.tables, self.demand, self.orders.segments.bound
        self._hidden = hidden_rows(self.view, self.options)
        self._values = [tables.attribute(key).values for key in demand.keys]
        # Machines in creation for no cluster may be credited to any: their claims tie clusters to each other, in this
        # decision and in what it would leave for the next.
        self._is_tied = bool(bound.creating[0] < bound.stop[0])
        if self.previous is not None and (
            self._is_tied or not self.previous.holds_for(self._values, tables.scale_version)
        ):
            self.previous = None
        self._arranged = self._arrange()
        self._by_free = self._proofs_by_free()
        if self.previous is None:
            self.fresh[:] = True
        else:
            mark_changed_rows(self.previous, self._arranged, demand.followed, self.fresh)
            mark_changed_proofs(self.previous, self._by_free, self._arranged, demand, self.fresh)
            mark_changed_visibility(self.previous, self._hidden, self.orders.segments, self.fresh)
        clear(self.orders.segments, self.fresh, self._hidden)

    def _arrange(self) -> Arranged:
        previous, clusters = self.previous, len(self.fresh)
        if previous is not None and previous.numbers is self.numbers and len(previous.arranged.size) == clusters:
            return previous.arranged
        return arrange(self.numbers, self.demand, clusters)

    def _proofs_by_free(self) -> Bytes:
        """Say for each ask that some gang folds under whether a free machine proves it."""
        folded_ask = self.demand.need_columns.folded_ask[self._arranged.numbers]
        asks = np.flatnonzero(np.bincount(folded_ask + 1, minlength=1)[1:]).astype(np.int32)
        by_free = np.zeros(len(self.demand.asks.profile), np.uint8)
        if len(asks):
            counts = self.orders.free_counts(self._hidden)
            by_free[asks] = free_proofs(asks, counts, self.demand, self.tables)
        return by_free

    # ---- rows ----------------------------------------------------------------------------------------------------

    def _fold(self) -> None:
        """Fold the rows of fresh clusters; the others are folded already (§4)."""
        tables, demand, clusters = self.tables, self.demand, len(self.fresh)
        part, folded_ask = unfolded(self._arranged, self.fresh, demand)
        questions = questions_of(part, folded_ask, len(demand.asks.profile))
        if len(questions.rows):
            folds = proven(questions, self._by_free, self.orders.segments.bound, demand, tables)
            part = fold(part, questions, folds, demand, tables)
            demand.vectors.follow()
        starts = row_starts(part, clusters)
        if self.previous is None:
            self._spliced = Spliced(part, starts, np.arange(len(part.local)))
        else:
            self._spliced = splice(self.previous, part, starts, self.fresh)

    def _park(self) -> None:
        """Stamp the gangs whose class is parked by its age; mark clusters in which that changed as fresh."""
        folded, tables = self._spliced.folded, self.tables
        is_same = self.demand.profile_columns.mode[folded.profile] == MODE_SAME
        due = [
            tables.row_key(key.cluster, key.fingerprint, key.group)
            for key, age in self.options.parking_ages.items()
            if is_parked_age(age)
        ]
        self._newly_parked = np.zeros(len(folded.local), np.uint8)
        if due:
            keys = folded.cluster.astype(np.int64) << 32 | folded.pair
            self._newly_parked[:] = np.isin(keys, np.array(due, np.int64)) & is_same & (folded.parked == 0)
        self._parked = folded.parked | self._newly_parked
        if self.previous is not None:
            known = np.flatnonzero(self._spliced.source < len(self.previous.parked))
            changed = self._parked[known] != self.previous.parked[self._spliced.source[known]]
            self.fresh[folded.cluster[known[changed]]] = True

    def _rows(self) -> tuple[Rows, Int64s]:
        """Return the rows, and the classes of gangs among them."""
        folded, demand = self._spliced.folded, self.demand
        buckets = demand.profile_columns.bucket[np.flatnonzero(np.bincount(folded.profile))]
        self.orders.use_buckets(sorted(set(buckets.tolist())))
        fits = demand.asks.fits(folded.ask)
        rows = row_arrays(folded, self._spliced.row_start, fits, self._parked, demand=demand, orders=self.orders)
        classes, gang = gang_classes(rows, folded)
        return rows._replace(gang=gang), classes

    # ---- phases --------------------------------------------------------------------------------------------------

    def _credit(
        self, fleet: FleetArrays, rows: Rows, gangs: Gangs, scratch: Scratch, order: Int32s
    ) -> tuple[Work, ExcessMachines]:
        """Credit the rows and remember what a later decision can build on."""
        credit_pass = Pass(
            fleet=fleet,
            rows=rows,
            gangs=gangs,
            scratch=scratch,
            segments=self.orders.segments,
            order=order,
            hidden=self._hidden,
            fresh=self.fresh,
            previous=self.previous,
            source=self._spliced.source,
            memo_room=self.memo_room,
            fits_version=self.tables.fits_version,
            choose_exactly=lambda row, gangs, work: self._choose_exactly(row, fleet, rows, gangs, work),
        )
        work, memo, earmarks = credit_pass.run()
        previous_excess = None if self.previous is None else self.previous.excess
        excess = followed_excess(previous_excess, self.orders.segments.bound, self.fresh)
        self._store_state(work, memo, earmarks, excess, is_volatile=credit_pass.is_volatile)
        return work, excess

    def _store_state(
        self, work: Work, memo: Memo, earmarks: Earmarks, excess: ExcessMachines, *, is_volatile: bool
    ) -> None:
        if memo.size[1]:
            self.memo_room = 2 * len(memo.domain)
        elif not (is_volatile or self._is_tied):
            self.next_state = IncrementalState(
                numbers=self.numbers,
                arranged=self._arranged,
                hidden=self._hidden,
                by_free=self._by_free,
                values=self._values,
                scale_version=self.tables.scale_version,
                folded=self._spliced.folded,
                row_start=self._spliced.row_start,
                parked=self._parked,
                credits=credits_of(work),
                memo=memo,
                earmarks=earmarks,
                credited=work.credited,
                credited_used=int(work.lengths[0]),
                excess=excess,
            )

    def _choose_exactly(self, row: int, fleet: FleetArrays, rows: Rows, gangs: Gangs, work: Work) -> tuple[int, bool]:
        """Choose the domain of a gang whose coverages do not fit the kernels' integers."""
        return choose_exactly(
            row,
            aggregate=self.demand.vectors.vectors[self._spliced.folded.aggregate[row]],
            supplies=self.tables.vocabulary.supplies,
            values=self._values[rows.key[row]],
            fleet=fleet,
            bound=self.orders.segments.bound,
            rows=rows,
            gangs=gangs,
            work=work,
        )

    def _serve(
        self,
        fleet: FleetArrays,
        rows: Rows,
        gangs: Gangs,
        work: Work,
        scratch: Scratch,
        order: Int32s,
        rows_in_list: Int64s,
        excess: ExcessMachines,
    ) -> ColumnarAnswer:
        """Acquire, preempt and give back, and put the answer together."""
        view, options, tables, orders = self.view, self.options, self.tables, self.orders
        short = short_rows(rows, work, order)
        acquire(fleet, rows, gangs, work, scratch, short)
        acquired_row, acquired_machine = acquisitions(view, work, short)
        stamps = short_stamps(work, self._spliced.folded, self._arranged, self.demand, tables)
        self.on_phase(Phase.ASSIGN)
        preempt_all(fleet, rows, work, scratch, short, orders=orders, tables=tables, options=options)
        self.on_phase(Phase.PREEMPT)
        taken = int(work.lengths[2])
        victims = work.taken_victim[:taken] != 0
        return ColumnarAnswer(
            view=view,
            scale=tables.scale_by_name(),
            fleet=fleet,
            rows=rows,
            work=work,
            folded=self._spliced.folded,
            demand=self.demand.rows,
            arranged=self._arranged,
            folded_ask=self.demand.need_columns.folded_ask[self._arranged.numbers],
            values=self._values,
            rows_in_list=rows_in_list,
            newly_parked=self._newly_parked,
            unjoined=options.unjoined,
            acquired_row=acquired_row,
            acquired_machine=acquired_machine,
            victim_row=work.taken_row[:taken][victims],
            victim_machine=work.taken_machine[:taken][victims],
            reclaimed=reclaims(excess, fleet, work, stamps, view=view, tables=tables, options=options),
            released=releases(view, work, orders, tables, options),
            results_of_nothing=self.results_of_nothing,
        )
