"""Preempts machines of lower rows for higher ones: the compiled loops of Phase 2 (docs/spec/aggregates.md §6).

Rows of one priority share one order of victims and are served together; the order is made outside. A machine that an
equal or a higher row holds is never touched, and a machine serves at most one row. Nothing here may look at a penalty:
penalties are in the order already.
"""

import numba
import numpy as np

from bigfleet.engine.columnar.arrays import FREE, MODE_PLAIN, MODE_SPREAD, NO_DOMAIN, UNSEEN
from bigfleet.engine.columnar.kernels.acquisition import is_useful, next_pick, open_round
from bigfleet.engine.columnar.kernels.base import (
    BOUND_T,
    FLEET_T,
    I4_T,
    I8_T,
    INT,
    ROWS_T,
    SCRATCH_T,
    WORK_T,
    allocating,
    first_at_least,
    inlined,
    kernel,
    subtract,
)


@inlined
def take(fleet, work, row, machine, is_victim):
    """Count a machine that will be free for the row."""
    work.taken[machine] = 1
    place = work.lengths[2]
    work.taken_row[place] = row
    work.taken_machine[place] = machine
    work.taken_victim[place] = is_victim
    work.lengths[2] = place + 1
    subtract(fleet, work, row, fleet.supply_of[fleet.shape[machine]])


@inlined
def is_allowed(fleet, rows, work, row, machine):
    """Say whether the machine lies in the row's domain (Same) or carries its topology key (strict spread)."""
    if rows.mode[row] == MODE_PLAIN:
        return True
    shape = fleet.shape[machine]
    domain = fleet.domain_of[rows.key[row], shape]
    if rows.mode[row] == MODE_SPREAD:
        return domain != NO_DOMAIN
    return domain == work.domain[row] and fleet.helps[fleet.supply_of[shape]] & rows.mask[row] != 0


@kernel(numba.void(FLEET_T, ROWS_T, WORK_T, INT))
def count_coming(fleet, rows, work, row):
    """Subtract what drains for the row already (§6.2)."""
    preemptor = np.int64(rows.cluster[row]) << 32 | np.int64(rows.pair[row])
    place = first_at_least(fleet.coming_for, 0, len(fleet.coming_for), preemptor)
    while place < len(fleet.coming_for) and fleet.coming_for[place] == preemptor:
        machine = fleet.coming[place]
        place += 1
        if work.taken[machine] != 0 or work.status[machine] == UNSEEN:
            continue
        if fleet.fits[rows.fit[row], fleet.shape[machine]] == 0 or not is_allowed(fleet, rows, work, row, machine):
            continue
        if is_useful(fleet, work, row, machine):
            take(fleet, work, row, machine, False)


@inlined
def is_out_of_reach(fleet, bound, rows, work, row, machine):
    """Say whether neither the row nor a later one of its kind may have the machine, whatever they still want."""
    if work.taken[machine] != 0 or fleet.fits[rows.fit[row], fleet.shape[machine]] == 0:
        return True
    place = bound.place_of[machine]
    local = bound.held[place] if place >= 0 else np.int32(FREE)
    if local < 0:
        return False
    holder = rows.row_start[fleet.cluster_of[fleet.cluster[machine]]] + local
    return rows.precedence[holder] >= rows.precedence[row]


@kernel(numba.void(FLEET_T, BOUND_T, ROWS_T, WORK_T, SCRATCH_T, I4_T, INT, INT, INT, I8_T, I8_T))
def pick_spread(fleet, bound, rows, work, scratch, ranked, row, start, taken_from, heads, counts):
    """Pick victims under the row's strict spread: as in Phase 1, by place in the order of victims (§6.3)."""
    size = 0
    for i in range(start, len(ranked)):
        machine = ranked[i]
        if is_out_of_reach(fleet, bound, rows, work, row, machine) or not is_allowed(fleet, rows, work, row, machine):
            continue
        if is_useful(fleet, work, row, machine):
            scratch.queue[size] = machine
            scratch.preference[size] = size
            size += 1
    if size == 0:
        return
    size_of_key = fleet.domains[rows.key[row]]
    heads, counts = heads[:size_of_key], counts[:size_of_key]
    open_round(fleet, rows, work, scratch, heads, counts, row, size, taken_from)
    while work.want[row] != 0:
        place = next_pick(fleet, rows, work, scratch, heads, counts, row)
        if place < 0:
            return
        take(fleet, work, row, scratch.queue[place], True)


@allocating(numba.void(FLEET_T, BOUND_T, ROWS_T, WORK_T, SCRATCH_T, I4_T, I8_T, I4_T))
def preempt(fleet, bound, rows, work, scratch, ranked, cursors, agenda):
    """Serve the rows of the agenda, which share one priority and so one order of victims.

    `cursors` is per fit and starts at zero.
    """
    heads, counts = np.zeros(len(scratch.seen), np.int64), np.zeros(len(scratch.seen), np.int64)
    for row in agenda:
        taken_from = work.lengths[2]
        count_coming(fleet, rows, work, row)
        fit = rows.fit[row]
        start = cursors[fit]
        while start < len(ranked) and is_out_of_reach(fleet, bound, rows, work, row, ranked[start]):
            start += 1
        cursors[fit] = start
        if rows.mode[row] == MODE_SPREAD:
            if work.want[row] != 0:
                pick_spread(fleet, bound, rows, work, scratch, ranked, row, start, taken_from, heads, counts)
            continue
        for i in range(start, len(ranked)):
            if work.want[row] == 0:
                break
            machine = ranked[i]
            if is_out_of_reach(fleet, bound, rows, work, row, machine) or not is_allowed(
                fleet, rows, work, row, machine
            ):
                continue
            if is_useful(fleet, work, row, machine):
                take(fleet, work, row, machine, True)
