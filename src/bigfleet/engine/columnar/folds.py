"""Groups demand by cluster and folds gangs that one machine can host (docs/spec/aggregates.md §4).

Folding asks per (cluster, folded profile, aggregate), not per row. Whether free machines prove a fold is one answer for
all clusters; only where they do not are a cluster's own machines looked at. This module must not look at claims, prices
or states beyond what folding asks.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bigfleet.engine.columnar.arrays import HIDDEN, BoundMachines, Bytes, Int32s, Int64s
from bigfleet.engine.columnar.demand import NO_ASK, ColumnarDemand
from bigfleet.engine.columnar.kernels.sweeps import arrange_rows, distinct_shapes, find_free, prove_folds
from bigfleet.engine.columnar.tables import VocabularyTables
from bigfleet.engine.folding import folded_profile
from bigfleet.model.need import Need


class Arranged(NamedTuple):
    """A demand cluster by cluster, each cluster's rows in list order."""

    #: Number of each need, in this order.
    numbers: Int64s
    #: Place in the list of each.
    places: Int64s
    cluster: Int32s
    #: First row of each cluster, and how many there are.
    start: Int64s
    size: Int64s


def arrange(numbers: Int64s, demand: ColumnarDemand, clusters: int) -> Arranged:
    """Return the demand cluster by cluster."""
    arranged = Arranged(
        numbers=np.empty(len(numbers), np.int64),
        places=np.empty(len(numbers), np.int64),
        cluster=np.empty(len(numbers), np.int32),
        start=np.zeros(clusters, np.int64),
        size=np.zeros(clusters, np.int64),
    )
    arrange_rows(numbers, demand.need_columns.cluster, *arranged)
    return arranged


class Folded(NamedTuple):
    """Rows after folding, cluster by cluster, each cluster's in list order."""

    #: Place of the row's first member among its cluster's rows.
    local: Int64s
    cluster: Int32s
    profile: Int32s
    #: Number of the wanted vector, of all members together.
    aggregate: Int32s
    #: What the row asks of one machine.
    ask: Int32s
    gang: Int32s
    pair: Int32s
    parked: Bytes
    #: How many rows were folded into this one, 0 when it is not folded.
    members: Int64s

    def taken(self, rows: npt.NDArray[np.integer] | npt.NDArray[np.bool_]) -> "Folded":
        """Return some of the rows."""
        return Folded._make(column[rows] for column in self)

    def followed_by(self, other: "Folded") -> "Folded":
        """Return these rows and then the others."""
        return Folded._make(np.concatenate([mine, theirs]) for mine, theirs in zip(self, other, strict=True))


def unfolded(arranged: Arranged, clusters: npt.NDArray[np.bool_], demand: ColumnarDemand) -> tuple[Folded, Int32s]:
    """Return the rows of some clusters before folding, and what each would ask of one machine if it folds."""
    chosen = np.flatnonzero(clusters[arranged.cluster])
    cluster, numbers, columns = arranged.cluster[chosen], arranged.numbers[chosen], demand.need_columns
    rows = Folded(
        local=chosen - arranged.start[cluster],
        cluster=cluster,
        profile=columns.profile[numbers],
        aggregate=columns.aggregate[numbers],
        ask=columns.ask[numbers],
        gang=columns.gang[numbers],
        pair=columns.pair[numbers],
        parked=columns.parked[numbers],
        members=np.zeros(len(numbers), np.int64),
    )
    return rows, columns.folded_ask[numbers]


class Questions(NamedTuple):
    """The distinct (cluster, folded ask) of some gangs: each folds or does not as a whole."""

    #: The gangs among the rows, and the question of each.
    rows: Int64s
    question: Int64s
    cluster: Int64s
    ask: Int32s


def questions_of(rows: Folded, folded_ask: Int32s, asks: int) -> Questions:
    """Return what must be asked to fold the rows."""
    gangs = np.flatnonzero(folded_ask != NO_ASK)
    key = rows.cluster[gangs].astype(np.int64) * asks + folded_ask[gangs]
    distinct, question = np.unique(key, return_inverse=True)
    cluster, ask = np.divmod(distinct, max(1, asks))
    return Questions(gangs, question, cluster, ask.astype(np.int32))


def free_proofs(asks: Int32s, free_counts: Int64s, demand: ColumnarDemand, tables: VocabularyTables) -> Bytes:
    """Say for each question whether a free machine answers it; `free_counts` is how many are visible of each shape."""
    fits = demand.asks.proving_fits(asks)
    proven: Bytes = np.empty(int(fits.max(initial=-1)) + 1, np.uint8)
    find_free(tables.fits, free_counts, proven)
    return proven[fits]


def proven(
    questions: Questions, by_free: Bytes, bound: BoundMachines, demand: ColumnarDemand, tables: VocabularyTables
) -> Bytes:
    """Say for each question whether some machine proves the fold: free, bound to the cluster, or being created (§4).

    `by_free` is per question ask.
    """
    fit = demand.asks.proving_fits(questions.ask)
    answers: Bytes = by_free[questions.ask]
    # Most large gangs fit no machine whole, in any place: there is no need to search for one.
    is_open = (answers == 0) & np.any(tables.fits, axis=1)[fit]
    if not is_open.any():
        return answers
    answers = answers.copy()
    # Questions come by cluster.
    is_first = np.diff(questions.cluster, prepend=-1) != 0
    asked, place = questions.cluster[is_first], np.cumsum(is_first) - 1
    starts, stops = bound.start[asked], bound.creating[asked]
    parts = np.zeros(len(asked) + 1, np.int64)
    found = np.empty(max(1, int((stops - starts).sum())), np.int32)
    distinct_shapes(bound, starts, stops, parts, np.full(len(tables.supply_of), -1, np.int64), found)
    first, last = parts[:-1][place], parts[1:][place]
    prove_folds(found, tables.fits, fit, first, np.where(is_open, last, first), answers)
    _prove_by_creating(questions, np.flatnonzero(is_open & (answers == 0)), fit, answers, bound, demand, tables)
    return answers


def _prove_by_creating(
    questions: Questions,
    unproven: Int64s,
    fit: Int32s,
    answers: Bytes,
    bound: BoundMachines,
    demand: ColumnarDemand,
    tables: VocabularyTables,
) -> None:
    """Answer with the machines in creation that the folded row would be credited."""
    unrecorded = bound.creating[0] < bound.stop[0]
    if not unrecorded:
        cluster = questions.cluster[unproven]
        unproven = unproven[bound.creating[cluster] < bound.stop[cluster]]
    for question in unproven.tolist():
        pair = folded_pair(int(questions.ask[question]), demand, tables)
        for segment in {int(questions.cluster[question]), 0}:
            places = slice(int(bound.creating[segment]), int(bound.stop[segment]))
            own = (bound.pairs[places] == pair) & (bound.held[places] != HIDDEN)
            if tables.fits[fit[question], bound.shapes[places][own]].any():
                answers[question] = 1


def folded_pair(ask: int, demand: ColumnarDemand, tables: VocabularyTables) -> int:
    """Return the number of (folded fingerprint, no group) of a folded row."""
    return tables.pairs.number((demand.profiles[demand.asks.profile[ask]].fingerprint, ""))


def fold(rows: Folded, questions: Questions, folds: Bytes, demand: ColumnarDemand, tables: VocabularyTables) -> Folded:
    """Return the rows after folding: a folded row stands where its first member stood (§4). `folds` is per question."""
    folding = folds[questions.question] != 0
    if not folding.any():
        return rows
    gangs, question = questions.rows[folding], questions.question[folding]
    asked, first, count = np.unique(question, return_index=True, return_counts=True)
    firsts, ask = gangs[first], questions.ask[asked]
    one = rows.aggregate[firsts]
    pair_of = {number: folded_pair(number, demand, tables) for number in set(ask.tolist())}
    changed = Folded._make(column.copy() for column in rows)
    changed.profile[firsts] = np.array(demand.asks.profile, np.int32)[ask]
    changed.ask[firsts] = ask
    changed.gang[firsts] = NO_ASK
    changed.pair[firsts] = [pair_of[number] for number in ask.tolist()]
    changed.parked[firsts] = 0
    changed.members[firsts] = count
    many = demand.vectors.multiple
    changed.aggregate[firsts] = [many(*pair) for pair in zip(one.tolist(), count.tolist(), strict=True)]
    keep = np.ones(len(rows.local), np.bool_)
    keep[gangs] = False
    keep[firsts] = True
    return changed.taken(keep)


def joined(members: Sequence[Need]) -> Need:
    """Return the folded row of equal gangs: their aggregates summed, the earliest known arrival (§4)."""
    first = members[0]
    arrivals = [need.arrival_unix_nanos for need in members if need.arrival_unix_nanos]
    return replace(
        first,
        profile=folded_profile(first.profile),
        min_unit=first.aggregate,
        group="",
        parked=False,
        aggregate={name: milli * len(members) for name, milli in first.aggregate.items()},
        arrival_unix_nanos=min(arrivals, default=0),
        shapes=(),
        waiting=(),
    )
