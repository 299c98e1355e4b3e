"""Stores a finished decision in columns: the holder of each machine, the order of rows and of machines.

docs/adr/0121-explain-one-row.md. Made of what a cycle decided on and what it came to, so that one row can be replayed
without deciding all others again. An array that is by machine has one entry per row of the view, removed ones included.
This module does not decide, and makes no object per machine.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bigfleet.engine.columns.objects import example_of, snapshot_of
from bigfleet.engine.columns.sold_out import sold_out_rows
from bigfleet.engine.columns.store import REMOVED, Columns, ColumnSnapshot
from bigfleet.engine.decision import Options, RowResult
from bigfleet.engine.matching import Shapes
from bigfleet.engine.reference.pool import RESERVABLE_STATES, SET_ASIDE_STATES
from bigfleet.engine.reference.preempt import score_terms
from bigfleet.engine.snapshot import Snapshot
from bigfleet.model import vector
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine, Stamp
from bigfleet.model.need import Need, RowKey
from bigfleet.model.profile import Profile
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.model.vector import Vector

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

#: Rank of the holder of a machine without one: behind every row.
NO_HOLDER_RANK: Final = np.iinfo(np.int64).max
_NONE: Final = np.zeros(0, np.int64)
_FREE: Final = (MachineState.IDLE, MachineState.SPECULATIVE)


class DecidedFleet:
    """What one cycle decided on, and what it came to. Cost: each row's result is made once."""

    def __init__(self, view: ColumnSnapshot, options: Options, rows: Sequence[RowResult]) -> None:
        self.view = view
        self.options = options
        self.results = rows
        columns = view.columns
        self.state = columns.state
        self.shape = columns.shape
        machines = len(view.ids)
        #: By machine: the place of the row that holds it after Phase 1, and of the row whose victim it is; -1 for none.
        self.holder = np.full(machines, -1, np.int64)
        self.taker = np.full(machines, -1, np.int64)
        #: By place: the row's need, and whether it is a Same row that wanted more than it was credited with.
        self.needs: list[Need] = []
        self.counts_on_free: list[bool] = []
        #: Places of the rows of each key, ascending.
        self.places: dict[RowKey, list[int]] = {}
        for place, result in enumerate(rows):
            self._add(place, result)
        precedences = [need.profile.precedence for need in self.needs]
        #: Places in processing order, and the rank of each place in it.
        self.in_order = sorted(range(len(self.needs)), key=precedences.__getitem__, reverse=True)
        self.rank = np.zeros(len(self.needs) + 1, np.int64)
        self.rank[self.in_order] = np.arange(len(self.needs))
        self.rank[-1] = NO_HOLDER_RANK
        levels = {precedence: level for level, precedence in enumerate(sorted(set(precedences), reverse=True))}
        #: By place: 0 for the highest precedence; a place of -1 has the lowest.
        self.level = np.array([*(levels[precedence] for precedence in precedences), len(levels)], np.int64)
        self.holder_rank = self.rank[self.holder]
        self.taker_rank = self.rank[self.taker]
        self.hidden = self._hidden()
        self.is_free = np.isin(self.state, _FREE)
        # The vocabulary grows while this is read, so its size is looked at once.
        self._shape_count = len(view.vocabulary.shapes)
        used = np.unique(self.shape[self.state != REMOVED])
        self._shapes = Shapes(example_of(view.vocabulary, number) for number in used.tolist())
        self._used = used
        self._orders: dict[object, Ints] = {}

    def _add(self, place: int, result: RowResult) -> None:
        row_of = self.view.rows
        need = result.need
        self.needs.append(need)
        self.places.setdefault(need.key, []).append(place)
        self.holder[[row_of[machine_id] for machine_id in result.claimed]] = place
        self.taker[[row_of[machine_id] for machine_id in result.victims]] = place
        is_unmet = bool(result.bootstraps or result.provisions or result.deficit)
        is_gang = need.profile.same_key is not None and result.has_domain and not need.parked
        self.counts_on_free.append(is_unmet and is_gang)

    def _hidden(self) -> Mask:
        hidden = np.zeros(len(self.state), np.bool_)
        hidden[self.rows_of(self.options.unjoined)] = True
        reserved = self.rows_of(self.options.reserved)
        hidden[reserved[np.isin(self.state[reserved], list(RESERVABLE_STATES))]] = True
        aside = self.rows_of(self.options.set_aside)
        hidden[aside[np.isin(self.state[aside], list(SET_ASIDE_STATES))]] = True
        hidden[sold_out_rows(self.view, self.options)] = True
        return hidden

    def rows_of(self, machine_ids: Iterable[str]) -> Ints:
        """Return the view's rows of some machines, as given; without those that it does not hold."""
        rows = (self.view.rows.get(MachineId(machine_id)) for machine_id in machine_ids)
        return np.array([row for row in rows if row is not None and self.state[row] != REMOVED], np.int64)

    def objects(self, rows: Ints) -> Snapshot:
        """Return some machines as objects."""
        view = self.view
        if view.source is not None:
            source = view.source
            ids = [view.ids[row] for row in rows.tolist()]
            since = source.idle_since_seconds
            return Snapshot.of([source.machines[one] for one in ids], {one: since[one] for one in ids if one in since})
        rows = np.sort(rows)
        ids = [view.ids[row] for row in rows.tolist()]
        columns = Columns.empty(len(rows))
        columns.put(np.arange(len(rows)), view.columns, rows)
        places = {machine_id: place for place, machine_id in enumerate(ids)}
        return snapshot_of(replace(view, ids=ids, rows=places, columns=columns, derived={}))

    def supply_at(self, row: int) -> Vector:
        """Return the supply of one machine."""
        vocabulary = self.view.vocabulary
        return vocabulary.supplies[vocabulary.supply_of_shape[int(self.shape[row])]]

    def supply(self, rows: Ints) -> Vector:
        """Return the summed supply of some machines."""
        total: Vector = vector.ZERO
        numbers, counts = np.unique(self.supply_of_shape[self.shape[rows]], return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            total = vector.add(total, vector.scale(self.view.vocabulary.supplies[number], count))
        return total

    # ---- by shape of the vocabulary ------------------------------------------------------------------------------

    def fits(self, profile: Profile, min_unit: Vector) -> Mask:
        """Return which shapes fit."""
        return self._by_shape(self._shapes.fit(profile, min_unit).shapes)

    def matches(self, profile: Profile) -> Mask:
        """Return which shapes the profile matches, supply apart."""
        return self._by_shape(self._shapes.matching(profile))

    def useful(self, remaining: Vector) -> Mask:
        """Return which shapes have something of what remains."""
        return self._by_shape(self._shapes.useful(frozenset(range(len(self._used))), remaining))

    def covering(self, want: Vector) -> Mask:
        """Return which shapes cover the want alone."""
        supplies = self.view.vocabulary.supplies
        covers = np.array([vector.covers(supply, want) for supply in supplies], np.bool_)
        return covers[self.supply_of_shape]

    def values(self, key: str) -> tuple[Ints, list[str]]:
        """Return the number of each shape's value of an attribute, -1 without it, and the values by number."""
        numbers = np.full(self._shape_count, -1, np.int64)
        values: list[str] = []
        for value, found in self._shapes.with_attribute(key).items():
            if value is not None:
                numbers[self._used[list(found)]] = len(values)
                values.append(value)
        return numbers, values

    @cached_property
    def supply_of_shape(self) -> Ints:
        """By shape: the number of its supply."""
        return np.array(self.view.vocabulary.supply_of_shape[: self._shape_count], np.int64)

    @cached_property
    def dimensions_of_shape(self) -> Ints:
        """By shape: the number of its supply's set of dimensions."""
        numbers: dict[frozenset[str], int] = {}
        supplies = self.view.vocabulary.supplies
        of_supply = [numbers.setdefault(frozenset(supply), len(numbers)) for supply in supplies]
        return np.array(of_supply, np.int64)[self.supply_of_shape]

    def _by_shape(self, numbers: frozenset[int]) -> Mask:
        mask = np.zeros(self._shape_count, np.bool_)
        mask[self._used[np.fromiter(numbers, np.int64, len(numbers))]] = True
        return mask

    # ---- orders --------------------------------------------------------------------------------------------------

    def of_state(self, state: MachineState) -> Ints:
        """Return the machines of a state, ids ascending."""
        return self._cached(state, lambda: np.flatnonzero(self.state == state))

    def by_price(self) -> Ints:
        """Return the Idle machines: price, id."""
        rows = self.of_state(MachineState.IDLE)
        return self._cached(
            "price", lambda: rows[np.argsort(self._prices[self.view.columns.offer[rows]], kind="stable")]
        )

    def by_cost(self, penalty_dollars: float) -> Ints:
        """Return the Speculative machines: effective cost, id."""
        rows = self.of_state(MachineState.SPECULATIVE)

        def order() -> Ints:
            costs = [machine.effective_cost_usd_per_hour(penalty_dollars) for machine in self._offers()]
            return rows[np.argsort(np.array([*costs, 0.0])[self.view.columns.offer[rows]], kind="stable")]

        return self._cached(("cost", penalty_dollars), order)

    def by_keep_priority(self, cluster: str, state: MachineState) -> Ints:
        """Return a cluster's machines of a state: price, reclamation dollars descending, id."""
        columns = self.view.columns
        number = self.view.vocabulary.cluster_numbers().get(cluster, -1)

        def order() -> Ints:
            rows = np.flatnonzero((self.state == state) & (columns.cluster == number)) if number > 0 else _NONE
            negated_penalty = -self._stamped("assigned_reclamation_penalty_dollars")[columns.stamp[rows]]
            return rows[np.lexsort((rows, negated_penalty, self._prices[columns.offer[rows]]))]

        return self._cached(("keep", cluster, state), order)

    def by_score(self, priority: int) -> Ints:
        """Return the Configured machines: victim score for a row of that priority descending, id."""
        rows = self.of_state(MachineState.CONFIGURED)

        def order() -> Ints:
            scores = []
            for stamp in self.view.vocabulary.stamps:
                terms = score_terms(
                    row_priority=priority,
                    assigned_priority=stamp.assigned_priority,
                    interruption_dollars=stamp.assigned_interruption_penalty_dollars,
                    reclamation_dollars=stamp.assigned_reclamation_penalty_dollars,
                    drain_seconds=self.options.drain_seconds,
                    weights=self.options.weights,
                )
                scores.append(terms[0] + terms[1] + terms[2] + terms[3])
            return rows[np.argsort(-np.array([*scores, 0.0])[self.view.columns.stamp[rows]], kind="stable")]

        return self._cached(("score", priority), order)

    @property
    def assigned_priority(self) -> Ints:
        """The priority that each machine was bound with."""
        priorities = self._cached("priority", lambda: self._stamped("assigned_priority").astype(np.int64))
        return priorities[self.view.columns.stamp]

    def stamped(self, is_meant: Callable[[Stamp], bool]) -> Mask:
        """Return which machines carry a stamp that is meant."""
        meant = [is_meant(stamp) for stamp in self.view.vocabulary.stamps]
        mask: Mask = np.array([*meant, False], np.bool_)[self.view.columns.stamp]
        return mask

    @property
    def _prices(self) -> npt.NDArray[np.float64]:
        return np.array([*(offer.price_usd_per_hour for offer in self.view.vocabulary.offers), 0.0])

    def _stamped(self, name: str) -> npt.NDArray[Any]:
        # An entry more keeps the lookup of rows without a machine legal.
        return np.array([*(getattr(stamp, name) for stamp in self.view.vocabulary.stamps), 0])

    def _offers(self) -> Iterable[Machine]:
        for number, offer in enumerate(self.view.vocabulary.offers):
            yield Machine(
                id=MachineId(str(number)),
                state=MachineState.SPECULATIVE,
                capacity_type=CapacityType(offer.capacity_type),
                price_usd_per_hour=offer.price_usd_per_hour,
                interruption_probability=offer.interruption_probability,
            )

    def _cached(self, key: object, make: Callable[[], Ints]) -> Ints:
        known = self._orders.get(key)
        if known is None:
            known = self._orders[key] = make()
        return known


def first_of_each(rows: Ints, kinds: Ints, counts: Ints) -> Ints:
    """Return, in the same order, those machines before which fewer than `counts` of their kind stand."""
    if not len(rows):
        return rows
    order = np.argsort(kinds, kind="stable")
    sorted_kinds = kinds[order]
    starts = np.flatnonzero(np.diff(sorted_kinds, prepend=sorted_kinds[0] - 1))
    places = np.arange(len(rows)) - np.repeat(starts, np.diff(starts, append=len(rows)))
    is_chosen = np.zeros(len(rows), np.bool_)
    is_chosen[order] = places < counts[order]
    return rows[is_chosen]
