"""Decides with columns: the reference engine's answer, action for action, for half a million machines.

`ColumnarEngine.decide` follows docs/spec/aggregates.md like the reference; `cycle` has the steps. What an engine keeps
between calls (matching, orders, and what clusters were credited with that nothing touched since) only saves work. The
answer is in columns, objects are made when looked at. It must never read a clock, do I/O, log, or let anything that it
keeps change an answer.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from bigfleet.engine.columnar.answer import ColumnarAnswer, ResultsOfNothing
from bigfleet.engine.columnar.arrays import Int64s
from bigfleet.engine.columnar.cycle import Cycle
from bigfleet.engine.columnar.demand import ColumnarDemand
from bigfleet.engine.columnar.incremental_state import Flags, IncrementalState
from bigfleet.engine.columnar.machine_orders import Orders
from bigfleet.engine.columnar.phases import releases
from bigfleet.engine.columnar.setup import check_quantities
from bigfleet.engine.columnar.tables import DoesNotFit, VocabularyTables
from bigfleet.engine.columnar.verification import Divergence, Verified
from bigfleet.engine.columns.objects import snapshot_of
from bigfleet.engine.columns.store import ColumnSnapshot, column_snapshot
from bigfleet.engine.decision import Basis, Decision, Options, Phase, PhaseListener, unheard
from bigfleet.engine.explain.records import Reporter
from bigfleet.engine.reference import decide as reference
from bigfleet.engine.snapshot import Snapshot
from bigfleet.model.need import Need


class ColumnarEngine:
    """Decides from columns. One engine serves one caller at a time; equal input gives equal answers from any engine."""

    def __init__(
        self,
        *,
        is_incremental: bool = True,
        verify_every_cycles: int = 0,
        on_divergence: Callable[[Divergence], None] | None = None,
    ) -> None:
        """Make an engine that knows nothing yet.

        Without `is_incremental` every decision credits every cluster again. With `verify_every_cycles` above 0 every
        so many decisions are made a second time by an engine that knows nothing; if the two differ, `on_divergence` is
        called, the second is the answer, and what the first was built on is forgotten. If a decision raises,
        `on_divergence` is called as well, and the reference engine decides.
        """
        self._verified = Verified(
            lambda: _Knowledge(is_incremental=is_incremental),
            plainly=_plainly,
            every_cycles=verify_every_cycles,
            on_divergence=on_divergence,
        )

    def decide(
        self,
        view: ColumnSnapshot,
        demand: Sequence[Need],
        options: Options,
        reporter: Reporter | None = None,
        *,
        on_phase: PhaseListener = unheard,
    ) -> Decision:
        """Decide one cycle: equal to `reference.decide` on the same machines, rows and options.

        With a reporter, or for numbers that the columns cannot hold, the reference engine answers, at its own cost:
        records are its replay of the same decision.
        """
        if reporter is not None:
            return reference.decide(snapshot_of(view), demand, options, reporter, on_phase=on_phase)
        return self._verified.decide(view, demand, options, on_phase=on_phase)


def _plainly(view: ColumnSnapshot, demand: Sequence[Need], options: Options, on_phase: PhaseListener) -> Decision:
    return reference.decide(snapshot_of(view), demand, options, on_phase=on_phase)


class _Knowledge:
    """What an engine keeps between decisions, and how it decides with it."""

    def __init__(self, *, is_incremental: bool) -> None:
        self._is_incremental = is_incremental
        self._tables: VocabularyTables | None = None
        self._demand: ColumnarDemand | None = None
        self._orders: Orders | None = None
        self._previous: IncrementalState | None = None
        self._memo_room = 0
        self._results_of_nothing = ResultsOfNothing()
        #: What the last call was given and came to.
        self._last: tuple[ColumnSnapshot, Int64s, Options, ColumnarAnswer] | None = None

    def decide(
        self, view: ColumnSnapshot, demand: Sequence[Need], options: Options, *, on_phase: PhaseListener
    ) -> Decision:
        """Decide one cycle; the reference engine does for numbers that the columns cannot hold."""
        try:
            answer = self._answer(view, demand, options, on_phase)
        except DoesNotFit:
            return _plainly(view, demand, options, on_phase)
        # Sequences in place of tuples: they read and compare alike, and make their objects on demand.
        given = demand if isinstance(demand, tuple) else tuple(demand)
        basis = Basis(demand=given, options=options, snapshot=lambda: snapshot_of(view))
        decision = Decision(actions=answer.actions(), rows=answer.results(), basis=basis)
        on_phase(Phase.RECLAIM)
        return decision

    def _answer(
        self, view: ColumnSnapshot, needs: Sequence[Need], options: Options, on_phase: PhaseListener
    ) -> ColumnarAnswer:
        # Whatever fails from here on leaves nothing behind that a later decision could build on.
        last, self._last = self._last, None
        previous, self._previous = self._previous, None
        tables, demand, is_known = self._follow(view, len(needs))
        numbers = demand.numbers_of(needs)
        if is_known and self._orders is not None and last is not None:
            same_but_time = replace(last[2], now_seconds=options.now_seconds) == options
            if self._is_incremental and last[0] is view and last[1] is numbers and same_but_time:
                # Time decides about releases alone.
                self._last, self._previous = last, previous
                for phase in (Phase.FOLD, Phase.ASSIGN, Phase.PREEMPT):
                    on_phase(phase)
                released = releases(view, last[3].work, self._orders, tables, options)
                return replace(last[3], released=released)
        fresh: Flags = np.zeros(len(tables.clusters), np.bool_)
        orders, is_followed = self._orders_of(view, tables, fresh)
        if not (is_known and is_followed and self._is_incremental):
            previous = None
        cycle = Cycle(
            view=view,
            options=options,
            numbers=numbers,
            tables=tables,
            demand=demand,
            orders=orders,
            fresh=fresh,
            previous=previous,
            memo_room=self._memo_room,
            results_of_nothing=self._results_of_nothing,
            on_phase=on_phase,
        )
        answer = cycle.decide()
        self._previous, self._memo_room = cycle.next_state, cycle.memo_room
        self._last = (view, numbers, options, answer)
        return answer

    def _follow(self, view: ColumnSnapshot, rows: int) -> tuple[VocabularyTables, ColumnarDemand, bool]:
        """Return tables that know the view's vocabulary, and whether they are those of the last decision.

        What is stored stays in proportion to what is current.
        """
        tables, demand, is_known = self._tables, self._demand, True
        if tables is None or tables.vocabulary is not view.vocabulary or tables.is_overgrown:
            tables, demand, is_known = VocabularyTables(view.vocabulary), None, False
            self._orders = None
        if demand is None or demand.is_stale(rows):
            demand, is_known = ColumnarDemand(tables), False
        # Tables that could take in only a part of it must not be gone on with.
        self._tables, self._demand = None, None
        tables.follow()
        tables.trim()
        self._tables, self._demand = tables, demand
        return tables, demand, is_known

    def _orders_of(self, view: ColumnSnapshot, tables: VocabularyTables, fresh: Flags) -> tuple[Orders, bool]:
        """Return the orders of the view, and whether those of the last one were followed.

        Clusters whose machines changed are marked as fresh.
        """
        # Orders that an error left half followed are of no view.
        orders, self._orders = self._orders, None
        is_followed = True
        if orders is None or orders.view is not view:
            check_quantities(view, tables)
            moved = None if orders is None else orders.follow(view)
            if orders is None or moved is None:
                orders, is_followed = Orders(view, tables), False
            else:
                fresh[moved] = True
        orders.segments.grow(len(tables.clusters))
        self._orders = orders
        return orders, is_followed


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
