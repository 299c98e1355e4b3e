"""Assigns free machines to rows that are short: the compiled loops of Phase 1's second pass.

docs/spec/aggregates.md §5.4, §5.5. Rows are served in processing order; Idle machines come before Speculative ones,
however cheap. What is claimed is never taken back. Nothing here may look at what is bound, except to count what a
spread row holds.
"""

import numba
import numpy as np

from bigfleet.engine.columnar.arrays import AVAILABLE, CLAIMED, MODE_SAME, MODE_SPREAD, NO_DOMAIN
from bigfleet.engine.columnar.kernels.base import (
    FLEET_T,
    GANGS_T,
    I4_T,
    I8_T,
    INT,
    ROWS_T,
    SCRATCH_T,
    U1_T,
    WORK_T,
    allocating,
    harmless_claims,
    inlined,
    kernel,
    subtract,
    subtract_times,
)


@inlined
def is_useful(fleet, work, row, machine):
    """Say whether the machine offers something that remains."""
    return fleet.helps[fleet.supply_of[fleet.shape[machine]]] & work.want[row] != 0


@inlined
def claim(fleet, work, row, machine):
    """Give the free machine to the row."""
    work.status[machine] = CLAIMED
    work.acquired[work.lengths[1]] = machine
    work.lengths[1] += 1
    subtract(fleet, work, row, fleet.supply_of[fleet.shape[machine]])


@kernel(INT(FLEET_T, WORK_T, I4_T, INT, INT, INT))
def acquire_in_order(fleet, work, machines, row, fit, start):
    """Claim free machines of an order from `start` on while they help; returns where the next row may start (§5.4)."""
    stop = len(machines)
    while start < stop:
        machine = machines[start]
        if work.status[machine] == AVAILABLE and fleet.fits[fit, fleet.shape[machine]] != 0:
            break
        start += 1
    want, size = work.want[row], work.lengths[1]
    run, harmless, pending = np.int64(-1), np.int64(0), np.int64(0)
    for i in range(start, stop):
        if want == 0:
            break
        machine = machines[i]
        if work.status[machine] != AVAILABLE:
            continue
        shape = fleet.shape[machine]
        supply = fleet.supply_of[shape]
        if fleet.fits[fit, shape] == 0 or fleet.helps[supply] & want == 0:
            continue
        work.status[machine] = CLAIMED
        work.acquired[size] = machine
        size += 1
        if supply == run and pending < harmless:
            pending += 1
            continue
        if pending > 0:
            subtract_times(fleet, work, row, run, pending)
        subtract(fleet, work, row, supply)
        want = work.want[row]
        run, pending = np.int64(supply), np.int64(0)
        harmless = harmless_claims(fleet, work, row, supply)
    if pending > 0:
        subtract_times(fleet, work, row, run, pending)
    work.lengths[1] = size
    return start


@kernel(numba.void(FLEET_T, ROWS_T, GANGS_T, WORK_T, INT))
def acquire_in_domain(fleet, rows, gangs, work, row):
    """Claim free machines of the row's domain, Idle before Speculative, while they help (§5.4)."""
    cell = gangs.base[rows.gang[row]] + work.domain[row]
    start, stop = gangs.claim_from[cell], gangs.start[cell + 1]
    while start < stop and work.status[gangs.machines[start]] != AVAILABLE:
        start += 1
    gangs.claim_from[cell] = start
    for i in range(start, stop):
        if work.want[row] == 0:
            return
        machine = gangs.machines[i]
        if work.status[machine] == AVAILABLE and is_useful(fleet, work, row, machine):
            claim(fleet, work, row, machine)


@kernel(numba.void(I8_T, I4_T, I4_T, I4_T, INT, INT))
def count_domains(counts, domains, shape, machines, start, stop):
    """Count a stretch of machines by domain; a count of -1 becomes that of a domain that takes part."""
    for i in range(start, stop):
        domain = domains[shape[machines[i]]]
        if domain != NO_DOMAIN:
            counts[domain] = max(0, counts[domain]) + 1


@kernel(numba.void(FLEET_T, ROWS_T, WORK_T, SCRATCH_T, I8_T, I8_T, INT, INT, INT))
def open_round(fleet, rows, work, scratch, heads, counts, row, size, taken_from):
    """Line the queue up by domain and count what the row holds: a domain takes part when its count is not -1 (§5.5)."""
    domains = fleet.domain_of[rows.key[row]]
    heads[:] = -1
    counts[:] = -1
    for i in range(size - 1, -1, -1):
        domain = domains[fleet.shape[scratch.queue[i]]]
        scratch.following[i] = heads[domain]
        heads[domain] = i
        counts[domain] = 0
    count_domains(counts, domains, fleet.shape, work.credited, work.credit_from[row], work.credit_to[row])
    count_domains(counts, domains, fleet.shape, work.acquired, work.acquire_from[row], work.acquire_to[row])
    count_domains(counts, domains, fleet.shape, work.taken_machine, taken_from, work.lengths[2])


@kernel(INT(FLEET_T, ROWS_T, WORK_T, SCRATCH_T, I8_T, I8_T, INT))
def next_pick(fleet, rows, work, scratch, heads, counts, row):
    """Return the place of the next pick of a strict spread, -1 when no domain is open (§5.5).

    Of the open domains the one whose next candidate has the smallest preference wins, then the smallest value.
    """
    minimum = np.int64(-1)
    for domain in range(len(counts)):
        if counts[domain] >= 0 and (minimum < 0 or counts[domain] < minimum):
            minimum = counts[domain]
    best = -1
    for domain in range(len(counts)):
        # What no longer helps will not help later either: what remains only shrinks.
        while heads[domain] >= 0 and not is_useful(fleet, work, row, scratch.queue[heads[domain]]):
            heads[domain] = scratch.following[heads[domain]]
        head = heads[domain]
        if head < 0 or counts[domain] > minimum + rows.skew[row] - 1:
            continue
        if best < 0 or scratch.preference[head] < scratch.preference[best]:
            best = head
    if best >= 0:
        domain = fleet.domain_of[rows.key[row], fleet.shape[scratch.queue[best]]]
        heads[domain] = scratch.following[best]
        counts[domain] += 1
    return best


@kernel(numba.void(FLEET_T, ROWS_T, WORK_T, SCRATCH_T, I4_T, INT, INT, I8_T, I8_T))
def acquire_spread(fleet, rows, work, scratch, machines, row, start, heads, counts):
    """Claim free machines of one order under the row's strict spread (§5.5)."""
    size = 0
    for i in range(start, len(machines)):
        machine = machines[i]
        shape = fleet.shape[machine]
        if work.status[machine] != AVAILABLE or fleet.fits[rows.fit[row], shape] == 0:
            continue
        if fleet.domain_of[rows.key[row], shape] != NO_DOMAIN and is_useful(fleet, work, row, machine):
            scratch.queue[size] = machine
            scratch.preference[size] = fleet.offer_price[fleet.offer[machine]]
            size += 1
    if size == 0:
        return
    size_of_key = fleet.domains[rows.key[row]]
    heads, counts = heads[:size_of_key], counts[:size_of_key]
    open_round(fleet, rows, work, scratch, heads, counts, row, size, work.lengths[2])
    while work.want[row] != 0:
        place = next_pick(fleet, rows, work, scratch, heads, counts, row)
        if place < 0:
            return
        claim(fleet, work, row, scratch.queue[place])


@allocating(numba.void(FLEET_T, ROWS_T, GANGS_T, WORK_T, SCRATCH_T, I4_T))
def acquire(fleet, rows, gangs, work, scratch, agenda):
    """Let the rows of the agenda, all short and none parked, take free machines (§5.4)."""
    heads, counts = np.zeros(len(scratch.seen), np.int64), np.zeros(len(scratch.seen), np.int64)
    for row in agenda:
        work.acquire_from[row] = work.lengths[1]
        work.acquire_to[row] = work.lengths[1]
        fit, bucket = rows.fit[row], rows.bucket[row]
        if rows.mode[row] == MODE_SAME:
            if work.domain[row] != NO_DOMAIN:
                acquire_in_domain(fleet, rows, gangs, work, row)
        elif rows.mode[row] == MODE_SPREAD:
            idle_from, speculative_from = work.cursor_idle[fit], work.cursor_speculative[bucket, fit]
            acquire_spread(fleet, rows, work, scratch, fleet.idle, row, idle_from, heads, counts)
            # What was just taken from Idle counts for Speculative.
            work.acquire_to[row] = work.lengths[1]
            if work.want[row] != 0:
                order = fleet.speculative[bucket]
                acquire_spread(fleet, rows, work, scratch, order, row, speculative_from, heads, counts)
        else:
            start = work.cursor_idle[fit]
            work.cursor_idle[fit] = acquire_in_order(fleet, work, fleet.idle, row, fit, start)
            if work.want[row] != 0:
                start, order = work.cursor_speculative[bucket, fit], fleet.speculative[bucket]
                work.cursor_speculative[bucket, fit] = acquire_in_order(fleet, work, order, row, fit, start)
        work.acquire_to[row] = work.lengths[1]


@allocating(numba.void(WORK_T, U1_T, INT, I4_T, I4_T, I4_T))
def list_acquired(work, state, speculative, agenda, rows, machines):
    """List what each row acquired: Bootstraps before Provisions, ids ascending (§5.6). Idle ones were claimed first."""
    size = 0
    for row in agenda:
        start, stop = work.acquire_from[row], work.acquire_to[row]
        middle = start
        while middle < stop and state[work.acquired[middle]] != speculative:
            middle += 1
        for part in range(2):
            first, last = (start, middle) if part == 0 else (middle, stop)
            is_sorted = True
            for i in range(first, last):
                rows[size + i - start] = row
                machines[size + i - start] = work.acquired[i]
                is_sorted = is_sorted and (i == first or work.acquired[i - 1] < work.acquired[i])
            if not is_sorted:
                machines[size + first - start : size + last - start].sort()
        size += stop - start
