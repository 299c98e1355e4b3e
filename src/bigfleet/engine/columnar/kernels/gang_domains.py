"""Chooses a gang's domain by what a cluster has and what is free, in integers (docs/spec/aggregates.md §5.3).

Sums are gathered once per gang; those of a gang whose choice free machines have a say in are stored, so that a later
decision can choose again without gathering. Nothing here may compare coverages in floating point.
"""

import numba
import numpy as np

from bigfleet.engine.columnar.arrays import FREE, NO_DOMAIN, UNDECIDED
from bigfleet.engine.columnar.kernels.base import (
    BOOL,
    BOUND_T,
    COVERAGE_MAX,
    FLEET_T,
    GANGS_T,
    INT,
    LISTINGS_T,
    MEMO_T,
    ROWS_T,
    SCRATCH_T,
    WORK_T,
    first_at_least,
    inlined,
    kernel,
    subtract,
)
from bigfleet.engine.columnar.kernels.earmark_replay import changed_domains


@kernel(INT(BOUND_T, INT, INT, INT))
def own_creating(bound, segment, pair, first):
    """Return where the segment's machines in creation with the pair begin, or, unless `first`, where they end."""
    return first_at_least(bound.pairs, bound.creating[segment], bound.stop[segment], pair if first else pair + 1)


@kernel(INT(FLEET_T, BOUND_T, ROWS_T, SCRATCH_T, INT))
def gather_again(fleet, bound, rows, scratch, row):
    """Make what the last gang of the kind left into the row's: domains without members go, own machines differ."""
    key, pair, dimensions = rows.key[row], rows.pair[row], fleet.supply.shape[1]
    touched = 0
    for i in range(scratch.gathered[3]):
        domain = scratch.touched[i]
        if scratch.members[domain] == 0:
            scratch.seen[domain] = 0
            continue
        scratch.touched[touched] = domain
        touched += 1
        for d in range(dimensions):
            scratch.own[domain, d] = 0
    for i in range(scratch.gathered[4]):
        place = scratch.queue[i]
        if bound.pairs[place] == pair and bound.held[place] == FREE:
            shape = bound.shapes[place]
            domain, supply = fleet.domain_of[key, shape], fleet.supply_of[shape]
            for d in range(dimensions):
                scratch.own[domain, d] += fleet.supply[supply, d]
    scratch.gathered[3] = touched
    return touched


@kernel(INT(FLEET_T, BOUND_T, ROWS_T, LISTINGS_T, SCRATCH_T, INT))
def gather_candidates(fleet, bound, rows, listings, scratch, row):
    """Sum up the row's creditable machines by domain; returns how many domains were touched (§5.3).

    Gangs of one cluster and kind come one after the other: what the last one left is what the next one finds, unless
    machines are being created, which are some gangs' own.
    """
    listing, pair, cluster = rows.listing[row], rows.pair[row], rows.cluster[row]
    key, mask, fit = rows.key[row], rows.mask[row], rows.fit[row]
    dimensions, gathered = fleet.supply.shape[1], scratch.gathered
    start, length, source = bound.start[cluster], bound.creating[cluster] - bound.start[cluster], np.int64(listing)
    if listing >= 0:
        start, length = listings.start[listing], listings.length[listing]
    else:
        source = -2 - (np.int64(cluster) * len(fleet.fits) + fit)
    if gathered[0] == source and gathered[1] == key and gathered[2] == mask:
        return gather_again(fleet, bound, rows, scratch, row)
    scratch.gathering[0] += 1
    gathering = scratch.gathering[0]
    # Machines in creation come last: those recorded for the cluster, then those recorded for none.
    recorded = own_creating(bound, cluster, pair, 1)
    recorded_count = own_creating(bound, cluster, pair, 0) - recorded if cluster != 0 else 0
    unrecorded = own_creating(bound, 0, pair, 1)
    unrecorded_count = own_creating(bound, 0, pair, 0) - unrecorded
    touched, kept, size = 0, start, 0
    for i in range(length + recorded_count + unrecorded_count):
        if i < length:
            place = np.int64(listings.places[start + i]) if listing >= 0 else start + i
            shape = bound.shapes[place]
            if bound.held[place] != FREE or (listing < 0 and fleet.fits[fit, shape] == 0):
                continue
            if listing >= 0:
                listings.places[kept] = place
                kept += 1
        else:
            place = recorded + i - length
            if i >= length + recorded_count:
                place = unrecorded + i - length - recorded_count
            shape = bound.shapes[place]
            if bound.held[place] != FREE or fleet.fits[fit, shape] == 0:
                continue
        domain, supply = fleet.domain_of[key, shape], fleet.supply_of[shape]
        if domain == NO_DOMAIN or fleet.helps[supply] & mask == 0:
            continue
        scratch.queue[size] = place
        scratch.following[size] = -1
        if scratch.seen[domain] != gathering:
            scratch.seen[domain] = gathering
            scratch.members[domain] = 0
            for d in range(dimensions):
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
        is_own = bound.pairs[place] == pair
        for d in range(dimensions):
            scratch.credit[domain, d] += fleet.supply[supply, d]
            if is_own:
                scratch.own[domain, d] += fleet.supply[supply, d]
    if listing >= 0:
        listings.length[listing] = kept - start
    is_general = bound.creating[cluster] == bound.stop[cluster] and bound.creating[0] == bound.stop[0]
    gathered[0], gathered[1], gathered[2] = source if is_general else -1, key, mask
    gathered[3], gathered[4] = touched, size
    return touched


@kernel(numba.void(MEMO_T, SCRATCH_T, INT, INT))
def keep_memo(memo, scratch, row, touched):
    """Keep what was gathered for the row.

    Where creditable machines alone cover it, only domains with as many of its own can ever win: those are kept.
    """
    size = memo.size[0]
    best_own = np.int64(-1)
    for i in range(touched):
        best_own = max(best_own, scratch.covered_own[i])
    memo.start[row] = size
    for i in range(touched):
        if best_own >= 0 and scratch.covered_own[i] != best_own:
            continue
        if size == len(memo.domain):
            memo.size[1] = 1
            return
        domain = scratch.touched[i]
        memo.domain[size] = domain
        memo.members[size] = scratch.members[domain]
        for d in range(scratch.credit.shape[1]):
            memo.credit[size, d] = scratch.credit[domain, d]
            memo.own[size, d] = scratch.own[domain, d]
        size += 1
    memo.stop[row] = size
    memo.size[0] = size


@inlined
def recall(memo, scratch, replay, row, base, last, is_compared):
    """Put what was stored for the row where it was gathered; returns how many domains it touches.

    With `is_compared` only the last choice and the domains that differ.
    """
    scratch.gathering[0] += 1
    scratch.gathered[0] = -1
    touched = 0
    for i in range(memo.start[row], memo.stop[row]):
        domain = memo.domain[i]
        if is_compared and domain != last and replay.differs[base + domain] == 0:
            continue
        scratch.seen[domain] = scratch.gathering[0]
        scratch.members[domain] = memo.members[i]
        for d in range(scratch.credit.shape[1]):
            scratch.credit[domain, d] = memo.credit[i, d]
            scratch.own[domain, d] = memo.own[i, d]
        scratch.touched[touched] = domain
        touched += 1
    return touched


@kernel(BOOL(*[INT] * 12))
def is_before(k0, k1, k2, k3, k4, k5, l0, l1, l2, l3, l4, l5):
    """Say whether the first six numbers come before the last six. Numba compares tuples several times slower."""
    if k0 != l0:
        return k0 < l0
    if k1 != l1:
        return k1 < l1
    if k2 != l2:
        return k2 < l2
    if k3 != l3:
        return k3 < l3
    if k4 != l4:
        return k4 < l4
    return k5 < l5


@kernel(INT(FLEET_T, ROWS_T, SCRATCH_T, INT))
def full_coverage(fleet, rows, scratch, row):
    """Return the capped coverage of a domain that covers everything, and note how large a total may be."""
    full, dimensions = np.int64(0), fleet.supply.shape[1]
    for d in range(dimensions):
        weight = rows.weight[row, d]
        full += rows.aggregate[row, d] * weight
        scratch.totals_max[d] = COVERAGE_MAX // dimensions // max(weight, 1)
    return full


@inlined
def choose_domain(fleet, rows, gangs, work, scratch, row, touched, others, first, stop):
    """Return the row's best domain, NO_DOMAIN, or UNDECIDED; work.satisfiable says whether it could cover the row.

    It is chosen among the domains touched, which have something to credit, and a stretch of others, which have not.
    The sort key of a domain is (1 when unsatisfiable, k1, k2, k3, -members, domain), smallest first: the rules of §5.3,
    the value by rank. A domain with nothing to credit can only win while none with something to credit is satisfiable.
    The row is open unless one domain covers it by creditable machines alone, and no rival with as many of its own:
    what is free enters the comparison only after both.
    """
    gang, dimensions, full = rows.gang[row], fleet.supply.shape[1], full_coverage(fleet, rows, scratch, row)
    base, counts_free = gangs.base[gang], rows.parked[row] == 0
    found, best0, best1, best2, best3, best4, best = False, 0, 0, 0, 0, 0, np.int64(NO_DOMAIN)
    best_own, rivals = -1, 0
    for i in range(touched + stop - first):
        has_credit = i < touched
        if i == touched and (not counts_free or (found and best0 == 0)):
            break
        domain = np.int64(scratch.touched[i]) if has_credit else np.int64(others[first + i - touched])
        cell = base + domain
        if not has_credit and (gangs.members[cell] == 0 or scratch.seen[domain] == scratch.gathering[0]):
            continue
        if has_credit:
            scratch.covered_own[i] = -1
        total_share, credit_share, own_share, whole, covers = 0, 0, 0, 0, True
        for d in range(dimensions):
            aggregate, weight = rows.aggregate[row, d], rows.weight[row, d]
            if aggregate == 0:
                continue
            credit = scratch.credit[domain, d] if has_credit else 0
            own = scratch.own[domain, d] if has_credit else 0
            total = credit + (gangs.total[cell, d] if counts_free else 0)
            covers = covers and total >= aggregate
            if found and best0 == 0 and not covers:
                break
            total_share += min(total, aggregate) * weight
            credit_share += min(credit, aggregate) * weight
            own_share += min(own, aggregate) * weight
            if weight > 0 and total > scratch.totals_max[d]:
                whole = -1
            elif whole >= 0:
                whole += total * weight
        if covers and whole < 0:
            return UNDECIDED
        if found and best0 == 0 and not covers:
            continue
        k0, k1, k2, k3 = 1, -total_share, -credit_share, -own_share
        if covers:
            k0, k1, k2, k3 = 0, -credit_share, -own_share, whole
        k4 = -(scratch.members[domain] if has_credit else 0) - (gangs.members[cell] if counts_free else 0)
        if has_credit and covers and credit_share == full:
            scratch.covered_own[i] = own_share
            if own_share > best_own:
                best_own, rivals = own_share, 0
            rivals += own_share == best_own
        wins = is_before(k0, k1, k2, k3, k4, domain, best0, best1, best2, best3, best4, best)
        if wins or not found:
            found, best0, best1, best2, best3, best4, best = True, k0, k1, k2, k3, k4, domain
    work.is_open[row] = counts_free and rivals != 1
    work.satisfiable[row] = found and best0 == 0
    return best


@kernel(INT(FLEET_T, ROWS_T, GANGS_T, WORK_T, SCRATCH_T, INT, INT))
def choose(fleet, rows, gangs, work, scratch, row, touched):
    """Return the row's best domain of all."""
    gang = rows.gang[row]
    first, stop = gangs.active_start[gang], gangs.active_start[gang + 1]
    return choose_domain(fleet, rows, gangs, work, scratch, row, touched, gangs.active, first, stop)


@inlined
def choose_again(fleet, rows, gangs, memo, work, scratch, replay, row):
    """Return the domain that an unchanged gang chooses among today's free machines.

    The last choice won over all that it was compared with, and what does not differ compares as it did: where the last
    choice does not differ itself, it can lose to domains that do and to no others.
    """
    gang, last, is_open = rows.gang[row], work.domain[row], work.is_open[row]
    base = gangs.base[gang]
    others, first, stop = gangs.active, gangs.active_start[gang], gangs.active_start[gang + 1]
    is_compared = replay.state[2] != 0 and work.want[row] != 0 and (last < 0 or replay.differs[base + last] == 0)
    if is_compared:
        others, first, stop = replay.changed, base, base + changed_domains(gangs, replay, gang)
    chosen = last
    if not is_compared or first < stop:
        if is_compared and last >= 0:
            # It is not among those listed, so there is room for it behind them.
            others[stop] = last
            stop += 1
        touched = recall(memo, scratch, replay, row, base, last, is_compared)
        chosen = choose_domain(fleet, rows, gangs, work, scratch, row, touched, others, first, stop)
        work.is_open[row] = is_open
    return chosen


@kernel(numba.void(FLEET_T, BOUND_T, ROWS_T, WORK_T, SCRATCH_T, INT))
def claim_in_domain(fleet, bound, rows, work, scratch, row):
    """Claim the chosen domain's creditable members while useful: own first, then the others (§5.3)."""
    pair, domain = rows.pair[row], work.domain[row]
    if scratch.seen[domain] != scratch.gathering[0]:
        return
    local = row - rows.row_start[rows.cluster[row]]
    for wants_own in (True, False):
        queued = scratch.first[domain]
        while queued >= 0 and work.want[row] != 0:
            place = scratch.queue[queued]
            supply = fleet.supply_of[bound.shapes[place]]
            is_own = bound.pairs[place] == pair
            if is_own == wants_own and bound.held[place] == FREE and fleet.helps[supply] & work.want[row] != 0:
                bound.held[place] = local
                work.credited[work.lengths[0]] = bound.machines[place]
                work.lengths[0] += 1
                subtract(fleet, work, row, supply)
                scratch.members[domain] -= 1
                for d in range(fleet.supply.shape[1]):
                    scratch.credit[domain, d] -= fleet.supply[supply, d]
            queued = scratch.following[queued]
