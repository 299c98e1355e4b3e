"""Serves rows: the compiled loops of Phase 1, each in the order that docs/spec/engine.md gives (§5).

Every kernel does what the reference engine's function of the like name does, over integers. Sums cannot wrap: whoever
calls has made sure that the scaled supply of the whole fleet stays below `QUANTITY_MAX`, and a coverage that would not
fit stops the loop so that exact arithmetic can choose the domain. Prices are compared as they were written. Nothing
here may use fast-math, run in parallel, or allocate per row.
"""

from collections.abc import Callable
from typing import Any, Final

import numba
import numpy as np

from bigfleet.engine.columnar.arrays import (
    FREE,
    MODE_SAME,
    MODE_SPREAD,
    NO_DOMAIN,
    UNDECIDED,
    Fleet,
    Gangs,
    Rows,
    Scratch,
    Views,
    Work,
)

_CONFIG: Final[Any] = numba.config
#: Compiled code leaves the interpreter to others while it runs. It is kept between processes only where the process
#: named a directory (`bigfleet.cli.kernel_cache`): beside its source it would outlive a change of what it takes in.
SETTINGS: Final[dict[str, Any]] = {"cache": bool(_CONFIG.CACHE_DIR), "nogil": True}
#: Sums of weighted shares of coverage stay below this.
COVERAGE_MAX: Final = 2**62

Kernel = Callable[..., Any]


def _array(dtype: type, dimensions: int = 1) -> np.ndarray[Any, Any]:
    return np.zeros((1,) * dimensions, dtype)


_I4, _I8, _U1, _F8 = _array(np.int32), _array(np.int64), _array(np.uint8), _array(np.float64)
_I8X, _I4X, _U1X = _array(np.int64, 2), _array(np.int32, 2), _array(np.uint8, 2)
#: Arguments of the only types that the kernels take; the signatures are derived from them.
FLEET: Final = Fleet(_I4, _I4, _I4, _I4, _I8X, _I8, _I4, _I4, _F8, _I4, _I4X, _I4, _I4, _U1X, _I4X, _I4)
ROWS: Final = Rows(_U1, _U1, _I4, _I4, _I4, _I4, _I8, _I8, _I8X, _I8, _I4, _I8, _I4, _I4, _I8X, _U1, _I8, _I8, _I8, _I8)
VIEWS: Final = Views(_I4, _I4, _I4, _I8, _I8)
GANGS: Final = Gangs(_I4, _I4, _I8, _I4, _I8, _I8, _I4, _I8, _I4, _I8, _I8X, _I8, _I8)
WORK: Final = Work(_I4, _I4, _U1, _I8X, _I8, _I4, _U1, _I4, _I8, _I8, _I8, _I8, _I4, _I4, _U1, _I8, _I8, _I8X)
SCRATCH: Final = Scratch(_I8, _I8, _I8, _I4, _I4, _I8X, _I8X, _I4, _I4, _I4, _F8)
FLEET_T, ROWS_T, VIEWS_T, GANGS_T, WORK_T, SCRATCH_T = (
    numba.typeof(group)  # type: ignore[no-untyped-call]
    for group in (FLEET, ROWS, VIEWS, GANGS, WORK, SCRATCH)
)
I4_T, I8_T, U1_T, F8_T, I8X_T, I4X_T, U1X_T = (
    numba.typeof(a)  # type: ignore[no-untyped-call]
    for a in (_I4, _I8, _U1, _F8, _I8X, _I4X, _U1X)
)
INT: Final = numba.int64
BOOL: Final = numba.boolean


def kernel(signature: Any) -> Callable[[Kernel], Kernel]:
    """Compile a function for one signature."""
    compiled: Callable[[Kernel], Kernel] = numba.njit(signature, **SETTINGS)
    return compiled


def inlined(signature: Any) -> Callable[[Kernel], Kernel]:
    """Compile a function that its callers take in whole.

    A call passes every array of its groups by value: too much for what runs once per machine.
    """
    compiled: Callable[[Kernel], Kernel] = numba.njit(signature, inline="always", **SETTINGS)
    return compiled


@inlined(numba.void(FLEET_T, WORK_T, INT, INT))
def subtract(fleet, work, row, machine):  # type: ignore[no-untyped-def]
    """Take the machine's supply off what the row still wants."""
    supply = fleet.supply_of[fleet.shape[machine]]
    want = work.want[row]
    for d in range(fleet.supply.shape[1]):
        left = work.remaining[row, d]
        if left > 0 and fleet.supply[supply, d] > 0:
            left = max(0, left - fleet.supply[supply, d])
            work.remaining[row, d] = left
            if left == 0:
                want &= ~(np.int64(1) << d)
    work.want[row] = want


@inlined(numba.void(FLEET_T, WORK_T, INT, INT))
def claim(fleet, work, row, machine):  # type: ignore[no-untyped-def]
    """Give the machine to the row."""
    work.claim[machine] = row
    work.claimed[work.lengths[0]] = machine
    work.lengths[0] += 1
    subtract(fleet, work, row, machine)


@inlined(BOOL(FLEET_T, WORK_T, INT, INT))
def is_useful(fleet, work, row, machine):  # type: ignore[no-untyped-def]
    """Say whether the machine offers something that remains."""
    return fleet.helps[fleet.supply_of[fleet.shape[machine]]] & work.want[row] != 0


@kernel(INT(FLEET_T, WORK_T, INT, INT))
def harmless_claims(fleet, work, row, supply):  # type: ignore[no-untyped-def]
    """Return how many machines of a supply the row can take before a dimension is met: until then nothing else changes.

    Machines come in long runs of one supply, and a count is cheaper than a vector.
    """
    most = np.int64(-1)
    for d in range(fleet.supply.shape[1]):
        left, step = work.remaining[row, d], fleet.supply[supply, d]
        if left > 0 and step > 0:
            times = (left - 1) // step
            if most < 0 or times < most:
                most = times
    return max(most, 0)


@kernel(numba.void(FLEET_T, WORK_T, INT, INT, INT))
def subtract_times(fleet, work, row, supply, times):  # type: ignore[no-untyped-def]
    """Take a number of harmless claims off what the row still wants."""
    for d in range(fleet.supply.shape[1]):
        if work.remaining[row, d] > 0:
            work.remaining[row, d] -= fleet.supply[supply, d] * times


@kernel(numba.void(FLEET_T, ROWS_T, VIEWS_T, WORK_T, INT))
def credit_bound(fleet, rows, views, work, row):  # type: ignore[no-untyped-def]
    """Claim what is bound to the row's cluster and fits, in keep-priority order, while something remains (§5.2)."""
    listing, fit = rows.listing[row], rows.fit[row]
    start, length = views.start[listing], views.length[listing]
    # What is claimed stays claimed: claimed machines at the head of a listing are passed once.
    while length > 0 and work.claim[views.machines[start]] != FREE:
        start += 1
        length -= 1
    views.start[listing], views.length[listing] = start, length
    want, place = work.want[row], work.lengths[0]
    run, harmless, pending = np.int64(-1), np.int64(0), np.int64(0)
    for i in range(start, start + length):
        if want == 0:
            break
        shape = views.shapes[i]
        if fleet.fits[fit, shape] == 0:
            continue
        machine, supply = views.machines[i], fleet.supply_of[shape]
        if fleet.helps[supply] & want == 0 or work.claim[machine] != FREE:
            continue
        work.claim[machine] = row
        work.claimed[place] = machine
        place += 1
        if supply == run and pending < harmless:
            pending += 1
            continue
        if pending > 0:
            subtract_times(fleet, work, row, run, pending)
        subtract(fleet, work, row, machine)
        want = work.want[row]
        run, pending = np.int64(supply), np.int64(0)
        harmless = harmless_claims(fleet, work, row, supply)
    if pending > 0:
        subtract_times(fleet, work, row, run, pending)
    work.lengths[0] = place


@kernel(BOOL(FLEET_T, ROWS_T, WORK_T, INT, INT, BOOL))
def is_own_creating(fleet, rows, work, row, machine, is_recorded):  # type: ignore[no-untyped-def]
    """Say whether a Creating machine with the row's stamps is free, fits, and is recorded for the row's cluster.

    With `is_recorded` False: whether it is recorded for no cluster.
    """
    intended = fleet.stamp_intended[fleet.stamp[machine]]
    if intended != (rows.cluster[row] if is_recorded else 0) or (is_recorded and intended == 0):
        return False
    return work.claim[machine] == FREE and fleet.fits[rows.fit[row], fleet.shape[machine]] != 0


@kernel(numba.void(FLEET_T, ROWS_T, WORK_T, INT))
def credit_creating(fleet, rows, work, row):  # type: ignore[no-untyped-def]
    """Claim the row's own machines in creation while something remains: recorded ones first, each by id (§5.2)."""
    for is_recorded in (True, False):
        for i in range(rows.creating_start[row], rows.creating_stop[row]):
            if work.want[row] == 0:
                return
            machine = fleet.creating[i]
            is_own = is_own_creating(fleet, rows, work, row, machine, is_recorded)
            if is_own and is_useful(fleet, work, row, machine):
                claim(fleet, work, row, machine)


@kernel(INT(FLEET_T, ROWS_T, VIEWS_T, WORK_T, SCRATCH_T, INT))
def gather_candidates(fleet, rows, views, work, scratch, row):  # type: ignore[no-untyped-def]
    """Sum up the row's creditable machines by domain; returns how many domains were touched (§5.3)."""
    listing, pair, key, mask = rows.listing[row], rows.pair[row], rows.key[row], rows.mask[row]
    scratch.gathering[0] += 1
    gathering = scratch.gathering[0]
    start, length = views.start[listing], views.length[listing]
    creating_from = rows.creating_start[row]
    creating = rows.creating_stop[row] - creating_from
    touched, kept, size = 0, start, 0
    # The listing, then machines in creation: those recorded for the cluster, then those recorded for none.
    for i in range(length + 2 * creating):
        if i < length:
            machine = views.machines[start + i]
            if work.claim[machine] != FREE:
                continue
            shape, stamped = views.shapes[start + i], views.pairs[start + i]
            views.machines[kept], views.shapes[kept], views.pairs[kept] = machine, shape, stamped
            kept += 1
            is_own = stamped == pair
        else:
            machine = fleet.creating[creating_from + (i - length) % creating]
            if not is_own_creating(fleet, rows, work, row, machine, i - length < creating):
                continue
            shape, is_own = fleet.shape[machine], True
        domain, supply = fleet.domain_of[key, shape], fleet.supply_of[shape]
        if domain == NO_DOMAIN or fleet.helps[supply] & mask == 0:
            continue
        scratch.queue[size] = machine
        scratch.following[size] = -1
        if scratch.seen[domain] != gathering:
            scratch.seen[domain] = gathering
            scratch.members[domain] = 0
            for d in range(fleet.supply.shape[1]):
                scratch.credit[domain, d] = 0
                scratch.own[domain, d] = 0
            scratch.touched[touched] = domain
            scratch.first[domain] = size
            touched += 1
        else:
            scratch.following[scratch.last[domain]] = size
        scratch.last[domain] = size
        size += 1
        scratch.members[domain] += 1
        for d in range(fleet.supply.shape[1]):
            scratch.credit[domain, d] += fleet.supply[supply, d]
            if is_own:
                scratch.own[domain, d] += fleet.supply[supply, d]
    views.length[listing] = kept - start
    return touched


@inlined(numba.void(FLEET_T, ROWS_T, GANGS_T, SCRATCH_T, INT, INT, BOOL, I8_T))
def rank_domain(fleet, rows, gangs, scratch, row, domain, has_credit, key):  # type: ignore[no-untyped-def]
    """Write the domain's sort key into `key`, best first: the five rules of §5.3 (the value comes last, by rank).

    key[0] is 2 when a coverage does not fit the integers.
    """
    cell = gangs.base[rows.gang[row]] + domain
    counts_free = rows.parked[row] == 0
    capped_total, capped_credit, capped_own, uncapped = 0, 0, 0, 0
    covers, fits = True, True
    dimensions = fleet.supply.shape[1]
    for d in range(dimensions):
        weight = rows.weight[row, d]
        aggregate = rows.aggregate[row, d]
        if aggregate == 0:
            continue
        credit = scratch.credit[domain, d] if has_credit else 0
        own = scratch.own[domain, d] if has_credit else 0
        total = credit + (gangs.total[cell, d] if counts_free else 0)
        covers = covers and total >= aggregate
        capped_total += min(total, aggregate) * weight
        capped_credit += min(credit, aggregate) * weight
        capped_own += min(own, aggregate) * weight
        if weight > 0 and total > COVERAGE_MAX // dimensions // weight:
            fits = False
        else:
            uncapped += total * weight
    members = (scratch.members[domain] if has_credit else 0) + (gangs.members[cell] if counts_free else 0)
    if covers:
        key[0], key[1], key[2], key[3] = 0, -capped_credit, -capped_own, uncapped
        if not fits:
            key[0] = 2
    else:
        key[0], key[1], key[2], key[3] = 1, -capped_total, -capped_credit, -capped_own
    key[4], key[5] = -members, domain


@kernel(BOOL(I8_T, I8_T))
def is_before(left, right):  # type: ignore[no-untyped-def]
    """Say whether one sort key comes before another."""
    for i in range(6):
        if left[i] != right[i]:
            return left[i] < right[i]
    return False


@kernel(INT(FLEET_T, ROWS_T, GANGS_T, SCRATCH_T, INT, INT, I8X_T))
def choose_domain(fleet, rows, gangs, scratch, row, touched, keys):  # type: ignore[no-untyped-def]
    """Return the row's best domain, NO_DOMAIN, or UNDECIDED; whether it is satisfiable is keys[0, 0] == 0.

    A domain without anything to credit can only win while none with something to credit is satisfiable: its covered
    share by creditable machines is zero, theirs is not.
    """
    best, candidate = keys[0], keys[1]
    found = False
    for i in range(touched):
        rank_domain(fleet, rows, gangs, scratch, row, scratch.touched[i], True, candidate)
        if candidate[0] == 2:
            return UNDECIDED
        if not found or is_before(candidate, best):
            best[:] = candidate
            found = True
    if rows.parked[row] != 0 or (found and best[0] == 0):
        return best[5] if found else NO_DOMAIN
    gang = rows.gang[row]
    base = gangs.base[gang]
    for i in range(gangs.active_start[gang], gangs.active_start[gang + 1]):
        domain = gangs.active[i]
        if gangs.members[base + domain] == 0 or scratch.seen[domain] == scratch.gathering[0]:
            continue
        rank_domain(fleet, rows, gangs, scratch, row, domain, False, candidate)
        if candidate[0] == 2:
            return UNDECIDED
        if not found or is_before(candidate, best):
            best[:] = candidate
            found = True
    return best[5] if found else NO_DOMAIN


@kernel(numba.void(FLEET_T, ROWS_T, WORK_T, SCRATCH_T, INT))
def claim_in_domain(fleet, rows, work, scratch, row):  # type: ignore[no-untyped-def]
    """Claim the chosen domain's creditable members while useful: own first, then the others (§5.3)."""
    pair, domain = rows.pair[row], work.domain[row]
    if scratch.seen[domain] != scratch.gathering[0]:
        return
    for wants_own in (True, False):
        place = scratch.first[domain]
        while place >= 0 and work.want[row] != 0:
            machine = scratch.queue[place]
            is_own = fleet.stamp_pair[fleet.stamp[machine]] == pair
            if is_own == wants_own and work.claim[machine] == FREE and is_useful(fleet, work, row, machine):
                claim(fleet, work, row, machine)
            place = scratch.following[place]


@kernel(numba.void(FLEET_T, GANGS_T, WORK_T, INT))
def earmark(fleet, gangs, work, machine):  # type: ignore[no-untyped-def]
    """Hide the machine from the totals of every later domain choice."""
    work.earmarked[machine] = 1
    shape = fleet.shape[machine]
    supply = fleet.supply_of[shape]
    for gang in range(len(gangs.fit)):
        domain = fleet.domain_of[gangs.key[gang], shape]
        if domain == NO_DOMAIN or fleet.fits[gangs.fit[gang], shape] == 0:
            continue
        if fleet.helps[supply] & gangs.mask[gang] == 0:
            continue
        cell = gangs.base[gang] + domain
        gangs.members[cell] -= 1
        for d in range(fleet.supply.shape[1]):
            gangs.total[cell, d] -= fleet.supply[supply, d]


@kernel(numba.void(FLEET_T, ROWS_T, GANGS_T, WORK_T, INT))
def earmark_rest(fleet, rows, gangs, work, row):  # type: ignore[no-untyped-def]
    """Earmark what the row would still want of its domain's free machines; it claims nothing (§5.3)."""
    cell = gangs.base[rows.gang[row]] + work.domain[row]
    start, stop = gangs.earmark_from[cell], gangs.start[cell + 1]
    while start < stop and work.earmarked[gangs.machines[start]] != 0:
        start += 1
    gangs.earmark_from[cell] = start
    left = work.remaining[row].copy()
    want = work.want[row]
    for i in range(start, stop):
        if want == 0:
            return
        machine = gangs.machines[i]
        supply = fleet.supply_of[fleet.shape[machine]]
        if work.earmarked[machine] != 0 or fleet.helps[supply] & want == 0:
            continue
        earmark(fleet, gangs, work, machine)
        for d in range(len(left)):
            if left[d] > 0:
                left[d] = max(0, left[d] - fleet.supply[supply, d])
                if left[d] == 0:
                    want &= ~(np.int64(1) << d)


@kernel(BOOL(FLEET_T, ROWS_T, VIEWS_T, GANGS_T, WORK_T, SCRATCH_T, INT, I8X_T))
def credit_same(fleet, rows, views, gangs, work, scratch, row, keys):  # type: ignore[no-untyped-def]
    """Choose the row's domain, claim what it may be credited there, earmark the rest; False when undecided (§5.3)."""
    if work.domain[row] == UNDECIDED and rows.is_exact[row] == 0:
        return False
    touched = gather_candidates(fleet, rows, views, work, scratch, row)
    if work.domain[row] == UNDECIDED:
        chosen = choose_domain(fleet, rows, gangs, scratch, row, touched, keys)
        if chosen == UNDECIDED:
            return False
        work.domain[row] = chosen
        work.satisfiable[row] = chosen != NO_DOMAIN and keys[0, 0] == 0
    if work.domain[row] == NO_DOMAIN:
        return True
    claim_in_domain(fleet, rows, work, scratch, row)
    if work.want[row] != 0 and rows.parked[row] == 0:
        earmark_rest(fleet, rows, gangs, work, row)
    return True


@kernel(INT(FLEET_T, ROWS_T, VIEWS_T, GANGS_T, WORK_T, SCRATCH_T, INT))
def credit(fleet, rows, views, gangs, work, scratch, first):  # type: ignore[no-untyped-def]
    """Credit the rows from `first` on; returns the row whose domain must be chosen outside, or the number of rows."""
    keys = np.zeros((2, 6), np.int64)
    for row in range(first, len(rows.mode)):
        work.credit_from[row] = work.lengths[0]
        if rows.mode[row] == MODE_SAME:
            if not credit_same(fleet, rows, views, gangs, work, scratch, row, keys):
                return row
        else:
            if views.length[rows.listing[row]] > 0:
                credit_bound(fleet, rows, views, work, row)
            if rows.creating_start[row] < rows.creating_stop[row]:
                credit_creating(fleet, rows, work, row)
        work.credit_to[row] = work.lengths[0]
    return len(rows.mode)


@kernel(INT(FLEET_T, WORK_T, I4_T, INT, INT, INT))
def acquire_in_order(fleet, work, machines, row, fit, start):  # type: ignore[no-untyped-def]
    """Claim free machines of an order from `start` on while they help; returns where the next row may start (§5.4)."""
    stop = len(machines)
    while start < stop:
        machine = machines[start]
        if work.claim[machine] == FREE and fleet.fits[fit, fleet.shape[machine]] != 0:
            break
        start += 1
    for i in range(start, stop):
        if work.want[row] == 0:
            break
        machine = machines[i]
        if work.claim[machine] != FREE or fleet.fits[fit, fleet.shape[machine]] == 0:
            continue
        if is_useful(fleet, work, row, machine):
            claim(fleet, work, row, machine)
    return start


@kernel(numba.void(FLEET_T, ROWS_T, GANGS_T, WORK_T, INT))
def acquire_in_domain(fleet, rows, gangs, work, row):  # type: ignore[no-untyped-def]
    """Claim free machines of the row's domain, Idle before Speculative, while they help (§5.4)."""
    cell = gangs.base[rows.gang[row]] + work.domain[row]
    start, stop = gangs.claim_from[cell], gangs.start[cell + 1]
    while start < stop and work.claim[gangs.machines[start]] != FREE:
        start += 1
    gangs.claim_from[cell] = start
    for i in range(start, stop):
        if work.want[row] == 0:
            return
        machine = gangs.machines[i]
        if work.claim[machine] == FREE and is_useful(fleet, work, row, machine):
            claim(fleet, work, row, machine)


@inlined(BOOL(FLEET_T, WORK_T, SCRATCH_T, INT, INT))
def head_helps(fleet, work, scratch, row, place):  # type: ignore[no-untyped-def]
    """Say whether the candidate at a place of the spread's queue is still useful."""
    return is_useful(fleet, work, row, scratch.queue[place])


@kernel(numba.void(FLEET_T, ROWS_T, WORK_T, SCRATCH_T, I8_T, I8_T, INT, INT, INT))
def open_round(fleet, rows, work, scratch, heads, counts, row, size, taken_from):  # type: ignore[no-untyped-def]
    """Line the queue up by domain and count what the row holds: a domain takes part when its count is not -1 (§5.5)."""
    domains = fleet.domain_of[rows.key[row]]
    heads[:] = -1
    counts[:] = -1
    for i in range(size - 1, -1, -1):
        domain = domains[fleet.shape[scratch.queue[i]]]
        scratch.following[i] = heads[domain]
        heads[domain] = i
        counts[domain] = 0
    for part in range(2):
        held_from = work.credit_from[row] if part == 0 else work.acquire_from[row]
        held_to = work.credit_to[row] if part == 0 else work.acquire_to[row]
        for i in range(held_from, held_to):
            domain = domains[fleet.shape[work.claimed[i]]]
            if domain != NO_DOMAIN:
                counts[domain] = max(0, counts[domain]) + 1
    for i in range(taken_from, work.lengths[1]):
        domain = domains[fleet.shape[work.taken_machine[i]]]
        if domain != NO_DOMAIN:
            counts[domain] = max(0, counts[domain]) + 1


@kernel(INT(FLEET_T, ROWS_T, WORK_T, SCRATCH_T, I8_T, I8_T, INT))
def next_pick(fleet, rows, work, scratch, heads, counts, row):  # type: ignore[no-untyped-def]
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
        while heads[domain] >= 0 and not head_helps(fleet, work, scratch, row, heads[domain]):
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
def acquire_spread(fleet, rows, work, scratch, machines, row, start, heads, counts):  # type: ignore[no-untyped-def]
    """Claim free machines of one order under the row's strict spread (§5.5)."""
    size = 0
    for i in range(start, len(machines)):
        machine = machines[i]
        shape = fleet.shape[machine]
        if work.claim[machine] != FREE or fleet.fits[rows.fit[row], shape] == 0:
            continue
        if fleet.domain_of[rows.key[row], shape] != NO_DOMAIN and is_useful(fleet, work, row, machine):
            scratch.queue[size] = machine
            scratch.preference[size] = fleet.offer_price[fleet.offer[machine]]
            size += 1
    if size == 0:
        return
    size_of_key = fleet.domains[rows.key[row]]
    heads, counts = heads[:size_of_key], counts[:size_of_key]
    open_round(fleet, rows, work, scratch, heads, counts, row, size, work.lengths[1])
    while work.want[row] != 0:
        place = next_pick(fleet, rows, work, scratch, heads, counts, row)
        if place < 0:
            return
        claim(fleet, work, row, scratch.queue[place])


@kernel(numba.void(FLEET_T, ROWS_T, GANGS_T, WORK_T, SCRATCH_T))
def acquire(fleet, rows, gangs, work, scratch):  # type: ignore[no-untyped-def]
    """Let every row that is short take free machines, Idle before Speculative, however cheap (§5.4)."""
    heads, counts = np.zeros(len(scratch.seen), np.int64), np.zeros(len(scratch.seen), np.int64)
    for row in range(len(rows.mode)):
        work.acquire_from[row] = work.lengths[0]
        work.acquire_to[row] = work.lengths[0]
        if work.want[row] == 0 or rows.parked[row] != 0:
            continue
        fit, bucket = rows.fit[row], rows.bucket[row]
        if rows.mode[row] == MODE_SAME:
            if work.domain[row] != NO_DOMAIN:
                acquire_in_domain(fleet, rows, gangs, work, row)
        elif rows.mode[row] == MODE_SPREAD:
            idle_from, speculative_from = work.cursor_idle[fit], work.cursor_speculative[bucket, fit]
            acquire_spread(fleet, rows, work, scratch, fleet.idle, row, idle_from, heads, counts)
            # What was just taken from Idle counts for Speculative.
            work.acquire_to[row] = work.lengths[0]
            if work.want[row] != 0:
                order = fleet.speculative[bucket]
                acquire_spread(fleet, rows, work, scratch, order, row, speculative_from, heads, counts)
        else:
            start = work.cursor_idle[fit]
            work.cursor_idle[fit] = acquire_in_order(fleet, work, fleet.idle, row, fit, start)
            if work.want[row] != 0:
                start, order = work.cursor_speculative[bucket, fit], fleet.speculative[bucket]
                work.cursor_speculative[bucket, fit] = acquire_in_order(fleet, work, order, row, fit, start)
        work.acquire_to[row] = work.lengths[0]
