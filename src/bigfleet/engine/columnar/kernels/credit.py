"""Credits rows with what their clusters have: the compiled loops of Phase 1's first pass.

docs/spec/aggregates.md §5.2, §5.3. Rows are served in processing order. A row that is not fresh keeps what an earlier
decision credited it with; where free machines have a say in its choice of a domain it chooses again, and a choice that
would credit it otherwise ends the keeping for its cluster's rows from there on. Nothing here may take a free machine.
"""

import numba
import numpy as np

from bigfleet.engine.columnar.arrays import FREE, MODE_SAME, NO_DOMAIN, SETTLED, UNDECIDED, UNSETTLED
from bigfleet.engine.columnar.kernels.base import (
    BOOL,
    BOUND_T,
    FLEET_T,
    GANGS_T,
    I4_T,
    INT,
    LISTINGS_T,
    MEMO_T,
    REPLAY_T,
    ROWS_T,
    SCRATCH_T,
    WORK_T,
    first_at_least,
    harmless_claims,
    inlined,
    kernel,
    subtract,
    subtract_times,
)
from bigfleet.engine.columnar.kernels.earmark_replay import earmark_rest, is_any_changed, replay_until
from bigfleet.engine.columnar.kernels.gang_domains import (
    choose,
    choose_again,
    claim_in_domain,
    gather_candidates,
    keep_memo,
)


@kernel(numba.void(FLEET_T, BOUND_T, ROWS_T, LISTINGS_T, WORK_T, INT))
def credit_bound(fleet, bound, rows, listings, work, row):
    """Claim what is bound to the row's cluster and fits, in keep-priority order, while something remains (§5.2)."""
    listing, fit, cluster = rows.listing[row], rows.fit[row], rows.cluster[row]
    start, length, is_shared = bound.start[cluster], bound.creating[cluster] - bound.start[cluster], False
    if listing >= 0:
        start, length = listings.start[listing], listings.length[listing]
        is_shared = listings.is_shared[listing] != 0
    # What is claimed stays claimed: claimed machines at the head of a listing are passed once.
    while length > 0 and is_shared and bound.held[listings.places[start]] != FREE:
        start += 1
        length -= 1
    if is_shared:
        listings.start[listing], listings.length[listing] = start, length
    local = row - rows.row_start[cluster]
    want, size = work.want[row], work.lengths[0]
    run, harmless, pending = np.int64(-1), np.int64(0), np.int64(0)
    for i in range(start, start + length):
        if want == 0:
            break
        place = np.int64(listings.places[i]) if is_shared else i
        shape = bound.shapes[place]
        if not is_shared and fleet.fits[fit, shape] == 0:
            continue
        supply = fleet.supply_of[shape]
        if bound.held[place] != FREE or fleet.helps[supply] & want == 0:
            continue
        bound.held[place] = local
        work.credited[size] = bound.machines[place]
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
    work.lengths[0] = size


@kernel(numba.void(FLEET_T, BOUND_T, ROWS_T, WORK_T, INT))
def credit_creating(fleet, bound, rows, work, row):
    """Claim the row's own machines in creation while something remains: recorded ones first, each by id (§5.2)."""
    cluster, pair = rows.cluster[row], rows.pair[row]
    local = row - rows.row_start[cluster]
    for part in range(2):
        # Segment 0 has the machines that are recorded for no cluster.
        segment = cluster if part == 0 else 0
        if part == 0 and cluster == 0:
            continue
        stop = bound.stop[segment]
        place = first_at_least(bound.pairs, bound.creating[segment], stop, pair)
        while place < stop and bound.pairs[place] == pair and work.want[row] != 0:
            shape = bound.shapes[place]
            supply = fleet.supply_of[shape]
            is_free = bound.held[place] == FREE and fleet.fits[rows.fit[row], shape] != 0
            if is_free and fleet.helps[supply] & work.want[row] != 0:
                bound.held[place] = local
                work.credited[work.lengths[0]] = bound.machines[place]
                work.lengths[0] += 1
                subtract(fleet, work, row, supply)
            place += 1


@kernel(BOOL(FLEET_T, BOUND_T, ROWS_T, LISTINGS_T, GANGS_T, MEMO_T, WORK_T, SCRATCH_T, REPLAY_T, INT, INT))
def credit_same(fleet, bound, rows, listings, gangs, memo, work, scratch, replay, row, place):
    """Choose the row's domain, claim what it may be credited there, earmark the rest; False when undecided (§5.3)."""
    if work.domain[row] == UNDECIDED and rows.is_exact[row] == 0:
        return False
    touched = gather_candidates(fleet, bound, rows, listings, scratch, row)
    if work.domain[row] == UNDECIDED:
        chosen = choose(fleet, rows, gangs, work, scratch, row, touched)
        if chosen == UNDECIDED:
            return False
        work.domain[row] = chosen
        if work.is_open[row] != 0:
            keep_memo(memo, scratch, row, touched)
    if work.domain[row] == NO_DOMAIN:
        return True
    claim_in_domain(fleet, bound, rows, work, scratch, row)
    if work.want[row] != 0 and rows.parked[row] == 0:
        earmark_rest(fleet, rows, gangs, work, scratch, replay, row, place)
    return True


@inlined
def keep(fleet, rows, gangs, memo, work, scratch, replay, row, place):
    """Let an unchanged gang choose among today's free machines; False when that would credit it otherwise.

    Another choice changes nothing for other rows of the cluster when the gang was credited with nothing and is with
    nothing now.
    """
    if replay.state[2] != 0:
        replay_until(fleet, gangs, replay, replay.place_then[row])
        # Where creditable machines cover a gang, only rivals that they cover too are in its memo and can win.
        if work.want[row] == 0 and not is_any_changed(gangs, memo, replay, rows.gang[row], row):
            return True
    chosen = choose_again(fleet, rows, gangs, memo, work, scratch, replay, row)
    if chosen != work.domain[row]:
        has_credit = chosen >= 0 and scratch.seen[chosen] == scratch.gathering[0]
        if chosen == UNDECIDED or has_credit or work.credit_from[row] != work.credit_to[row]:
            return False
        work.domain[row] = chosen
    if chosen >= 0 and work.want[row] != 0 and rows.parked[row] == 0:
        earmark_rest(fleet, rows, gangs, work, scratch, replay, row, place)
    return True


@kernel(BOOL(BOUND_T, ROWS_T, WORK_T, I4_T, INT))
def end_keeping(bound, rows, work, agenda, place):
    """Take back what the row at a place of the agenda and the later ones of its cluster were credited with.

    They are fresh then; what rows above them hold stands. False when the log has no room: then nothing was done.
    """
    cluster = rows.cluster[agenda[place]]
    room = bound.stop[cluster] - bound.start[cluster]
    if work.lengths[3] + room > len(work.credited):
        return False
    work.lengths[3] += room
    for i in range(place, len(agenda)):
        row = agenda[i]
        if rows.cluster[row] != cluster:
            continue
        for j in range(work.credit_from[row], work.credit_to[row]):
            bound.held[bound.place_of[work.credited[j]]] = FREE
        for d in range(work.remaining.shape[1]):
            work.remaining[row, d] = rows.aggregate[row, d]
        work.want[row] = rows.mask[row]
        work.domain[row] = UNDECIDED if rows.mode[row] == MODE_SAME else NO_DOMAIN
        work.satisfiable[row] = 1
        work.is_open[row] = 0
        rows.is_fresh[row] = 1
        rows.listing[row] = -1
    work.disputed[cluster] = SETTLED
    return True


@kernel(INT(FLEET_T, BOUND_T, ROWS_T, LISTINGS_T, GANGS_T, MEMO_T, WORK_T, SCRATCH_T, REPLAY_T, I4_T, INT))
def credit(fleet, bound, rows, listings, gangs, memo, work, scratch, replay, agenda, first):
    """Credit the rows of the agenda from `first` on.

    Returns the place in the agenda of a row whose domain must be chosen outside, or the length of the agenda.
    """
    scratch.gathered[0] = -1
    for place in range(first, len(agenda)):
        row = agenda[place]
        cluster = rows.cluster[row]
        if rows.is_fresh[row] == 0:
            if work.is_open[row] == 0:
                continue
            is_kept = keep(fleet, rows, gangs, memo, work, scratch, replay, row, place)
            if not is_kept and not end_keeping(bound, rows, work, agenda, place):
                work.disputed[cluster] = UNSETTLED
            if rows.is_fresh[row] == 0:
                continue
        work.credit_from[row] = work.lengths[0]
        if rows.mode[row] == MODE_SAME:
            if not credit_same(fleet, bound, rows, listings, gangs, memo, work, scratch, replay, row, place):
                return place
        else:
            scratch.gathered[0] = -1
            if rows.listing[row] < 0 or listings.length[rows.listing[row]] > 0:
                credit_bound(fleet, bound, rows, listings, work, row)
            if bound.creating[cluster] < bound.stop[cluster] or bound.creating[0] < bound.stop[0]:
                credit_creating(fleet, bound, rows, work, row)
        work.credit_to[row] = work.lengths[0]
    return len(agenda)
