"""Compares two answers by their columns, without making an action or a row.

For the check that a shard makes of its own decisions while it serves: the objects of half a million machines would keep
the interpreter for seconds. True means equal in every field; False may also mean that the columns cannot decide it.
"""

from collections.abc import Iterator
from operator import is_

import numpy as np

from bigfleet.engine.columnar.answer import ColumnarAnswer
from bigfleet.engine.columnar.arrays import Int32s, Int64s


def are_alike(left: ColumnarAnswer, right: ColumnarAnswer) -> bool:
    """Return whether both answers have the same actions and rows, each in the same order."""
    if left.view is not right.view or left.unjoined != right.unjoined:
        return False
    if len(left.demand) != len(right.demand) or not all(map(is_, left.demand, right.demand)):
        return False
    if len(left.rows_in_list) != len(right.rows_in_list):
        return False
    columns = zip(_columns(left), _columns(right), strict=True)
    return all(np.array_equal(mine, theirs) for mine, theirs in columns) and _words(left) == _words(right)


def _columns(answer: ColumnarAnswer) -> Iterator[Int64s | Int32s]:
    """Yield everything that is a number, by the order of the list: how rows are numbered inside plays no part."""
    rows, work, folded, arranged = answer.rows_in_list, answer.work, answer.folded, answer.arranged
    places = np.empty(len(rows), np.int64)
    places[rows] = np.arange(len(rows))
    taken = int(work.lengths[2])
    yield (arranged.places[arranged.start[folded.cluster] + folded.local])[rows]
    yield folded.members[rows]
    yield answer.newly_parked[rows].astype(np.int32)
    yield work.satisfiable[rows].astype(np.int32)
    yield from _machines(work.credited, work.credit_from[rows], work.credit_to[rows])
    yield from _machines(work.acquired, work.acquire_from[rows], work.acquire_to[rows])
    yield places[work.taken_row[:taken]]
    yield work.taken_machine[:taken]
    yield work.taken_victim[:taken].astype(np.int32)
    yield places[answer.acquired_row]
    yield answer.acquired_machine
    yield places[answer.victim_row]
    yield answer.victim_machine
    yield answer.reclaimed
    yield answer.released


def _machines(machines: Int32s, starts: Int64s, stops: Int64s) -> Iterator[Int64s | Int32s]:
    """Yield how many machines each row has, and all of them, row by row."""
    sizes = stops - starts
    ends = np.cumsum(sizes)
    within = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - sizes, sizes)
    yield sizes
    yield machines[np.repeat(starts, sizes) + within]


def _words(answer: ColumnarAnswer) -> list[object]:
    """Return what is no number: domains, which each engine numbers for itself, and the members of folded rows."""
    rows = answer.rows_in_list
    domains = answer.work.domain[rows]
    chosen = np.flatnonzero(domains >= 0)
    names = [
        (place, answer.values[key][domain])
        for place, key, domain in zip(
            chosen.tolist(), answer.rows.key[rows[chosen]].tolist(), domains[chosen].tolist(), strict=True
        )
    ]
    members = [answer.members(row) for row in rows[answer.folded.members[rows] > 0].tolist()]
    return [names, members]
