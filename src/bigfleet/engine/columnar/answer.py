"""Stores a decision in columns and creates action and result objects on access.

Both compare equal to the tuples of the reference engine's decision, and read like them; a caller that only counts, or
looks at some entries, pays for those alone. An answer keeps what it was made of and never changes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from bigfleet.engine.columnar.arrays import Bytes, FleetArrays, Int32s, Int64s, Rows, Work
from bigfleet.engine.columnar.folds import Arranged, Folded, joined
from bigfleet.engine.columnar.kernels.sweeps import sum_supply
from bigfleet.engine.columns.store import ColumnSnapshot
from bigfleet.engine.decision import (
    RECLAIM_GRACE_SECONDS,
    Action,
    ActionKind,
    Preemptor,
    RowResult,
    result_of_nothing,
)
from bigfleet.engine.deferred import LazySequence
from bigfleet.engine.reference.preempt import grace_seconds
from bigfleet.model import vector
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.need import Need, RowKey
from bigfleet.model.states import MachineState
from bigfleet.model.vector import Vector

_IDLE, _SPECULATIVE = int(MachineState.IDLE), int(MachineState.SPECULATIVE)
_FROM_IDLE = (ActionKind.BOOTSTRAP, "phase1.idle")
_FROM_SPECULATIVE = (ActionKind.PROVISION, "phase1.speculative")

Flags = npt.NDArray[np.bool_]


@dataclass(slots=True, eq=False)
class ResultsOfNothing:
    """Results of rows that hold nothing, of the last rows that were asked for, for the answers of one engine.

    A result follows from its row, which stays the same object while a cluster does not change it: who reads decision
    after decision gets the same objects, and may keep what it found of them.
    """

    #: By the id of the row, which its result holds on to.
    by_need: dict[int, RowResult] = field(default_factory=dict)


@dataclass(slots=True, eq=False, kw_only=True)
class ColumnarAnswer:
    """Everything that one decision came to, in columns.

    Nothing in it is written by a later decision: what tables and demand replace as they grow is held here as it was.
    """

    view: ColumnSnapshot
    #: Milli-units per unit of each dimension, by name, and the line's place of the name.
    scale: Mapping[str, tuple[int, int]]
    fleet: FleetArrays
    rows: Rows
    work: Work
    folded: Folded
    #: The rows given, in list order, cluster by cluster, and what each asks of one machine if it folds.
    demand: Sequence[Need]
    arranged: Arranged
    folded_ask: Int32s
    #: Values of each topology key in the order of the domains' numbers.
    values: Sequence[Sequence[str]]
    #: The rows in list order.
    rows_in_list: Int64s
    #: Rows that are parked by their age alone.
    newly_parked: Bytes
    unjoined: frozenset[str]
    #: Phase 1 actions: (row, machine), then victims, then reclaimed and released machines.
    acquired_row: Int32s
    acquired_machine: Int32s
    victim_row: Int32s
    victim_machine: Int32s
    reclaimed: Int32s
    released: Int32s
    results_of_nothing: ResultsOfNothing
    _needs: dict[int, Need] = field(default_factory=dict)
    _tails: "_Tails | None" = None

    def actions(self) -> LazySequence[Action]:
        """Return the actions in emission order."""
        sizes = [len(self.acquired_row), len(self.victim_row), len(self.reclaimed), len(self.released)]
        return ActionColumns(self, sizes)

    def results(self) -> "RowColumns":
        """Return one result per row of the folded list."""
        return RowColumns(self)

    def result(self, place: int) -> RowResult:
        """Return the result of the row at a place of the folded list."""
        return self._result(int(self.rows_in_list[place]))

    def is_short(self) -> Flags:
        """Say of each row whether Phase 1 left it short."""
        is_short: Flags = self.work.want != 0
        # Phase 2 serves short rows alone, and may have left them nothing to want.
        is_short[self.work.taken_row[: self.work.lengths[2]]] = True
        return is_short

    def results_of(self, rows: Int64s) -> Iterator[RowResult]:
        """Yield the results of rows; of many that hold nothing each costs a fraction of what it does one by one."""
        folded, arranged, demand = self.folded, self.arranged, self.demand
        places = arranged.places[arranged.start[folded.cluster[rows]] + folded.local[rows]]
        has_nothing = self._has_nothing(rows).tolist()
        satisfiable = (self.work.satisfiable[rows] != 0).tolist()
        known, made = self.results_of_nothing.by_need, dict[int, RowResult]()
        for row, place, is_bare, can_be in zip(rows.tolist(), places.tolist(), has_nothing, satisfiable, strict=True):
            if not is_bare:
                yield self._result(row)
                continue
            need = demand[place]
            result = known.get(id(need))
            if result is None or result.satisfiable is not can_be:
                result = result_of_nothing(need, satisfiable=can_be)
            made[id(need)] = result
            yield result
        self.results_of_nothing.by_need = made

    def _has_nothing(self, rows: Int64s) -> Flags:
        """Say of each of the rows whether it is as it was given, holds no machine and has none draining for it."""
        work, tails = self.work, self._tails_of_all()
        is_as_given = (self.folded.members[rows] == 0) & (self.newly_parked[rows] == 0) & (work.domain[rows] < 0)
        held = work.credit_to[rows] - work.credit_from[rows] + work.acquire_to[rows] - work.acquire_from[rows]
        has_nothing: Flags = is_as_given & (held == 0) & ~tails.is_awaiting[rows]
        return has_nothing

    # ---- actions -----------------------------------------------------------------------------------------------

    def acquisition(self, place: int) -> Action:
        """Return a Bootstrap or Provision."""
        return next(self.acquisitions(place, place + 1))

    def acquisitions(self, start: int, stop: int) -> Iterator[Action]:
        """Return the Bootstraps and Provisions between two places; many at once cost a fraction of one by one."""
        machines = self.acquired_machine[start:stop]
        is_idle = self.view.columns.state[machines] == int(MachineState.IDLE)
        ids = self.view.ids
        for row, machine, idle in zip(
            self.acquired_row[start:stop].tolist(), machines.tolist(), is_idle.tolist(), strict=True
        ):
            need = self.need(row)
            kind, reason = _FROM_IDLE if idle else _FROM_SPECULATIVE
            yield Action(
                kind=kind,
                machine_id=ids[machine],
                cluster=need.cluster,
                reason=reason,
                profile=need.profile,
                group=need.group,
            )

    def preemption(self, place: int) -> Action:
        """Return a Preempt."""
        machine = int(self.victim_machine[place])
        need = self.need(int(self.victim_row[place]))
        columns, vocabulary = self.view.columns, self.view.vocabulary
        priority = need.profile.priority
        return Action(
            kind=ActionKind.PREEMPT,
            machine_id=self.view.ids[machine],
            cluster=ClusterId(vocabulary.clusters[columns.cluster[machine]]),
            reason="phase2.inversion",
            grace_seconds=grace_seconds(priority - vocabulary.stamps[columns.stamp[machine]].assigned_priority),
            preemptor_priority=priority,
            preemptor=Preemptor(need.cluster, need.fingerprint, need.group),
        )

    def reclaim(self, place: int) -> Action:
        """Return a Reclaim."""
        machine = int(self.reclaimed[place])
        machine_id = self.view.ids[machine]
        return Action(
            kind=ActionKind.RECLAIM,
            machine_id=machine_id,
            cluster=ClusterId(self.view.vocabulary.clusters[self.view.columns.cluster[machine]]),
            reason="phase3.unjoined" if machine_id in self.unjoined else "phase3.excess",
            grace_seconds=RECLAIM_GRACE_SECONDS,
        )

    def release(self, place: int) -> Action:
        """Return a Delete."""
        machine_id = self.view.ids[self.released[place]]
        return Action(kind=ActionKind.DELETE, machine_id=machine_id, cluster=ClusterId(""), reason="phase3.release")

    # ---- rows --------------------------------------------------------------------------------------------------

    def need(self, row: int) -> Need:
        """Return a row, folded and stamped."""
        known = self._needs.get(row)
        if known is None:
            known = self._first(row)
            if self.folded.members[row]:
                known = joined(self.members(row))
            elif self.newly_parked[row]:
                known = replace(known, parked=True)
            self._needs[row] = known
        return known

    def members(self, row: int) -> tuple[Need, ...]:
        """Return the rows that were folded into the row, in list order, or the row itself."""
        if not self.folded.members[row]:
            return (self._first(row),)
        start = int(self.arranged.start[self.folded.cluster[row]])
        stop = start + int(self.arranged.size[self.folded.cluster[row]])
        own = np.flatnonzero(self.folded_ask[start:stop] == self.folded.ask[row])
        return tuple(self.demand[place] for place in self.arranged.places[start:stop][own].tolist())

    def _first(self, row: int) -> Need:
        start = self.arranged.start[self.folded.cluster[row]]
        return self.demand[int(self.arranged.places[start + self.folded.local[row]])]

    def _result(self, row: int) -> RowResult:
        tails, need, ids = self._tails_of_all(), self.need(row), self.view.ids
        rows = tails.claimed(row)
        # A row that is short holds few machines as a rule, and arrays of few cost more than lists.
        claimed, states = rows.tolist(), self.view.columns.state[rows].tolist()
        held = self._unscaled(tails.held[row])
        deficit = vector.subtract(need.aggregate, held)
        domain = int(self.work.domain[row])
        unresolved: Vector = deficit
        freed: Vector = {}
        victims: tuple[MachineId, ...] = ()
        if deficit:
            freed = self._unscaled(tails.freed[row])
            unresolved = vector.subtract(vector.subtract(deficit, freed), self._unscaled(tails.coming[row]))
            victims = _names(ids, tails.victims(row).tolist())
        return RowResult(
            need=need,
            members=(need,) if need is self._first(row) else self.members(row),
            folded=bool(self.folded.members[row]),
            claimed=_names(ids, claimed),
            bootstraps=_names(ids, _in_state(_IDLE, claimed, states)),
            provisions=_names(ids, _in_state(_SPECULATIVE, claimed, states)),
            held=held,
            deficit=deficit,
            domain=self.values[self.rows.key[row]][domain] if domain >= 0 else "",
            has_domain=domain >= 0,
            satisfiable=bool(self.work.satisfiable[row]),
            unresolved=unresolved,
            victims=victims,
            freed=freed,
        )

    def _tails_of_all(self) -> "_Tails":
        if self._tails is None:
            self._tails = _Tails(self)
        return self._tails

    def _unscaled(self, line: Int64s) -> dict[str, int]:
        sums = line.tolist()
        return {name: sums[place] * milli for name, (place, milli) in self.scale.items() if sums[place] > 0}


class ActionColumns(LazySequence[Action]):
    """The actions of one decision: Phase 1, then 2, then 3."""

    def __init__(self, answer: ColumnarAnswer, sizes: list[int]) -> None:
        makers = (answer.acquisition, answer.preemption, answer.reclaim, answer.release)
        # Not a method of its own: an answer is large, and in a cycle of references it would outlive its use.
        super().__init__(sum(sizes), partial(_make_action, tuple(zip(sizes, makers, strict=True))))
        self._sizes = sizes
        self._answer = answer

    def __iter__(self) -> Iterator[Action]:
        acquired = self._sizes[0]
        yield from self._answer.acquisitions(0, acquired)
        yield from (self._make(place) for place in range(acquired, len(self)))

    @property
    def answer(self) -> ColumnarAnswer:
        """What the actions are made of."""
        return self._answer

    def machines(self) -> Int32s:
        """Return the row of each action's machine in the view, in emission order, without making any action."""
        answer = self._answer
        parts = (answer.acquired_machine, answer.victim_machine, answer.reclaimed, answer.released)
        machines: Int32s = np.concatenate(parts)
        return machines

    def excess(self) -> Sequence[MachineId]:
        """Return the machines that are reclaimed because nothing claims them, in emission order."""
        answer = self._answer
        ids, unjoined = answer.view.ids, answer.unjoined
        return [ids[row] for row in answer.reclaimed.tolist() if not unjoined or ids[row] not in unjoined]

    def counts(self) -> Mapping[ActionKind, int]:
        """Return how many actions there are of each kind, without making any."""
        states = self._answer.view.columns.state[self._answer.acquired_machine]
        bootstraps = int((states == MachineState.IDLE).sum())
        return {
            ActionKind.BOOTSTRAP: bootstraps,
            ActionKind.PROVISION: self._sizes[0] - bootstraps,
            ActionKind.RECLAIM: self._sizes[2],
            ActionKind.PREEMPT: self._sizes[1],
            ActionKind.DELETE: self._sizes[3],
        }


def _make_action(parts: tuple[tuple[int, Callable[[int], Action]], ...], place: int) -> Action:
    for size, make in parts:
        if place < size:
            return make(place)
        place -= size
    raise IndexError(place)


class RowColumns(LazySequence[RowResult]):
    """The rows of one decision, of which the short ones can be had without making the others."""

    def __init__(self, answer: ColumnarAnswer) -> None:
        super().__init__(len(answer.rows_in_list), answer.result)
        self._answer = answer

    @property
    def answer(self) -> ColumnarAnswer:
        """What the rows are made of."""
        return self._answer

    def short(self, also: Set[RowKey] = frozenset()) -> tuple[RowResult, ...]:
        """Return all and only the rows that Phase 1 left short, and those with the keys `also`, in list order."""
        answer = self._answer
        is_wanted = answer.is_short()
        is_wanted[self._rows_with(also)] = True
        return tuple(answer.results_of(answer.rows_in_list[is_wanted[answer.rows_in_list]]))

    def _rows_with(self, keys: Set[RowKey]) -> list[int]:
        """Return the rows with these keys; cost: the rows of their clusters, and one look at the others' numbers."""
        if not keys:
            return []
        answer, clusters = self._answer, {key[0] for key in keys}
        numbers, firsts = np.unique(answer.folded.cluster, return_index=True)
        found: list[int] = []
        for number, first in zip(numbers.tolist(), firsts.tolist(), strict=True):
            if answer.need(first).cluster in clusters:
                own = np.flatnonzero(answer.folded.cluster == number).tolist()
                found += [row for row in own if answer.need(row).key in keys]
        return found

    def claims(self) -> tuple[Int64s, Int64s]:
        """Return, per row, the place of its first member in the demand given, and how many machines it holds.

        No row is made.
        """
        answer = self._answer
        work, folded, arranged, rows = answer.work, answer.folded, answer.arranged, answer.rows_in_list
        held: Int64s = (work.credit_to - work.credit_from + work.acquire_to - work.acquire_from)[rows]
        return arranged.places[arranged.start[folded.cluster[rows]] + folded.local[rows]], held


class _Tails:
    """What each row holds and frees; made once, when the first result is looked at."""

    def __init__(self, answer: ColumnarAnswer) -> None:
        work = answer.work
        taken = int(work.lengths[2])
        rows = work.taken_row[:taken]
        # A row's machines stay in the order in which they were taken.
        order = np.argsort(rows, kind="stable")
        victims, others = order[work.taken_victim[order] != 0], order[work.taken_victim[order] == 0]
        of_rows = np.arange(len(answer.rows.mode) + 1)
        self._victims, coming = work.taken_machine[victims], work.taken_machine[others]
        self._victims_from = np.searchsorted(rows[victims], of_rows)
        coming_from = np.searchsorted(rows[others], of_rows)
        self._work = work
        #: Whether machines drain for the row, its victims or others that were picked before.
        self.is_awaiting = np.zeros(len(answer.rows.mode), np.bool_)
        self.is_awaiting[rows] = True
        self.held = _sums(answer, work.credited, work.credit_from, work.credit_to)
        self.held += _sums(answer, work.acquired, work.acquire_from, work.acquire_to)
        self.freed = _sums(answer, self._victims, self._victims_from[:-1], self._victims_from[1:])
        self.coming = _sums(answer, coming, coming_from[:-1], coming_from[1:])

    def claimed(self, row: int) -> Int32s:
        """Return the machines that the row holds, in claim order."""
        work = self._work
        credited = work.credited[work.credit_from[row] : work.credit_to[row]]
        return np.concatenate([credited, work.acquired[work.acquire_from[row] : work.acquire_to[row]]])

    def victims(self, row: int) -> Int32s:
        """Return the row's victims in pick order."""
        victims: Int32s = self._victims[self._victims_from[row] : self._victims_from[row + 1]]
        return victims


def _sums(answer: ColumnarAnswer, machines: Int32s, starts: Int64s, stops: Int64s) -> Int64s:
    fleet = answer.fleet
    sums = np.zeros((len(starts), fleet.supply.shape[1]), np.int64)
    starts, stops = np.ascontiguousarray(starts), np.ascontiguousarray(stops)
    sum_supply(fleet.shape, fleet.supply_of, fleet.supply, np.ascontiguousarray(machines), starts, stops, sums)
    return sums


def _names(ids: Sequence[Any], machines: Iterable[int]) -> tuple[MachineId, ...]:
    return tuple([ids[machine] for machine in machines])


def _in_state(state: int, machines: list[int], states: list[int]) -> list[int]:
    """Return the machines that are in a state, ascending."""
    if state not in states:
        return []
    return sorted(machine for machine, its_state in zip(machines, states, strict=True) if its_state == state)
