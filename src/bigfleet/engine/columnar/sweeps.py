"""Lines machines up for the rows and sweeps up what is left: the compiled passes over whole columns.

Listings of bound machines, free machines by gang class and domain, what is reclaimed, and sums of supply. Nothing here
may choose between machines: an order comes in, a subset in the same order goes out.
"""

import numba

from bigfleet.engine.columnar.arrays import FREE, NO_DOMAIN
from bigfleet.engine.columnar.kernels import (
    BOOL,
    FLEET_T,
    GANGS_T,
    I4_T,
    I8_T,
    I8X_T,
    INT,
    U1_T,
    U1X_T,
    VIEWS_T,
    WORK_T,
    kernel,
)


@kernel(INT(U1X_T, I8_T, I8_T, I4_T, U1_T, VIEWS_T, INT))
def list_bound(fits, order_start, order_stop, fit, is_shared, views, place):  # type: ignore[no-untyped-def]
    """List the bound machines that fit each shared listing, from `place` on; other listings stay where they are.

    The listings begin with the order of all bound machines.
    """
    for listing in range(len(fit)):
        if is_shared[listing] == 0:
            views.start[listing] = order_start[listing]
            views.length[listing] = order_stop[listing] - order_start[listing]
            continue
        views.start[listing] = place
        for i in range(order_start[listing], order_stop[listing]):
            shape = views.shapes[i]
            if fits[fit[listing], shape] != 0:
                views.machines[place] = views.machines[i]
                views.shapes[place] = shape
                views.pairs[place] = views.pairs[i]
                place += 1
        views.length[listing] = place - views.start[listing]
    return place


@kernel(INT(FLEET_T, GANGS_T, I4_T, BOOL))
def list_free(fleet, gangs, claim, writes):  # type: ignore[no-untyped-def]
    """List each gang class's free machines by domain, Idle before Speculative; returns how many entries that takes.

    With `writes` False machines are counted and supply is summed; with True `start` must hold where cells begin and
    `claim_from` is used up as a cursor.
    """
    entries = 0
    for gang in range(len(gangs.fit)):
        fit, key, mask, base = gangs.fit[gang], gangs.key[gang], gangs.mask[gang], gangs.base[gang]
        for part in range(2):
            order = fleet.idle if part == 0 else fleet.speculative[gangs.bucket[gang]]
            for machine in order:
                shape = fleet.shape[machine]
                supply = fleet.supply_of[shape]
                domain = fleet.domain_of[key, shape]
                if claim[machine] != FREE or fleet.fits[fit, shape] == 0 or domain == NO_DOMAIN:
                    continue
                if fleet.helps[supply] & mask == 0:
                    continue
                entries += 1
                cell = base + domain
                if writes:
                    gangs.machines[gangs.claim_from[cell]] = machine
                    gangs.claim_from[cell] += 1
                else:
                    gangs.members[cell] += 1
                    for d in range(fleet.supply.shape[1]):
                        gangs.total[cell, d] += fleet.supply[supply, d]
    return entries


@kernel(numba.void(I4_T, I4_T, I8X_T, I4_T, I8_T, I8_T, I8X_T))
def sum_supply(shape, supply_of, supply, machines, starts, stops, sums):  # type: ignore[no-untyped-def]
    """Add the supply of each row's stretch of `machines` to its line of `sums`."""
    for row in range(len(starts)):
        for i in range(starts[row], stops[row]):
            number = supply_of[shape[machines[i]]]
            for d in range(supply.shape[1]):
                sums[row, d] += supply[number, d]


@kernel(INT(WORK_T, I4_T, I8_T, I8_T, I4_T))
def list_excess(work, order, starts, stops, machines):  # type: ignore[no-untyped-def]
    """List the machines of the segments that are neither held nor taken, in order; returns how many (§7)."""
    size = 0
    for segment in range(len(starts)):
        for i in range(starts[segment], stops[segment]):
            machine = order[i]
            if work.claim[machine] < 0 and work.taken[machine] < 0:
                machines[size] = machine
                size += 1
    return size


@kernel(numba.void(I4_T, U1X_T, I4_T, I8_T, I8_T, U1_T))
def prove_folds(shapes, fits, fit, starts, stops, proven):  # type: ignore[no-untyped-def]
    """Mark the questions to which one of the shapes in the segment is an answer."""
    for question in range(len(fit)):
        if proven[question] != 0:
            continue
        for i in range(starts[question], stops[question]):
            if fits[fit[question], shapes[i]] != 0:
                proven[question] = 1
                break


@kernel(INT(I4_T, I4_T, I4_T, I8_T, I8_T, I8_T, I8_T, I4_T))
def distinct_shapes(shapes, claim, order, starts, stops, out_start, last_seen, out):  # type: ignore[no-untyped-def]
    """List the distinct shapes of each segment's visible machines; `last_seen` is per shape and starts at -1."""
    size = 0
    for segment in range(len(starts)):
        out_start[segment] = size
        for i in range(starts[segment], stops[segment]):
            number = shapes[i]
            if last_seen[number] != segment and claim[order[i]] == FREE:
                last_seen[number] = segment
                out[size] = number
                size += 1
    out_start[len(starts)] = size
    return size


@kernel(INT(I4_T, I4_T, I4_T, I4_T, I8_T, I4_T))
def rank_victims(configured, stamp, claim, rank_of_stamp, sizes, out):  # type: ignore[no-untyped-def]
    """Sort the visible Configured machines, given by id, by the rank of their stamp; rank -1 is left out (§6.4).

    `sizes` has one more entry than there are ranks, all zero. Returns how many machines are ranked.
    """
    total = 0
    for machine in configured:
        rank = rank_of_stamp[stamp[machine]]
        if rank >= 0 and claim[machine] >= FREE:
            sizes[rank + 1] += 1
            total += 1
    for rank in range(1, len(sizes)):
        sizes[rank] += sizes[rank - 1]
    for machine in configured:
        rank = rank_of_stamp[stamp[machine]]
        if rank >= 0 and claim[machine] >= FREE:
            out[sizes[rank]] = machine
            sizes[rank] += 1
    return total
