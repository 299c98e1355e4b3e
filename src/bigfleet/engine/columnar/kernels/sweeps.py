"""Assigns machines to row orders and collects unused ones: the compiled passes over whole columns.

Listings of bound machines, free machines by gang class and domain, what is reclaimed, and sums of supply. Nothing here
may choose between machines: an order comes in, a subset in the same order goes out.
"""

import numba

from bigfleet.engine.columnar.arrays import AVAILABLE, CLAIMED, HIDDEN, NO_DOMAIN
from bigfleet.engine.columnar.kernels.base import (
    BOUND_T,
    F8_T,
    FLEET_T,
    GANGS_T,
    I4_T,
    I8_T,
    I8X_T,
    INT,
    LISTINGS_T,
    U1_T,
    U1X_T,
    inlined,
    kernel,
)


@kernel(numba.void(I8_T, I4_T, I8_T, I8_T, I4_T, I8_T, I8_T))
def arrange_rows(given, cluster_of, numbers, places, cluster, start, size):
    """Lay rows out cluster by cluster, each cluster's in the order given; `start` and `size` are zero at first."""
    for number in given:
        size[cluster_of[number]] += 1
    total = 0
    for owner in range(len(start)):
        start[owner] = total
        total += size[owner]
    for i in range(len(given)):
        owner = cluster_of[given[i]]
        place = start[owner]
        numbers[place] = given[i]
        places[place] = i
        cluster[place] = owner
        start[owner] += 1
    for owner in range(len(start)):
        start[owner] -= size[owner]


@kernel(numba.void(I8_T, F8_T, F8_T, I4_T, INT, I8_T))
def merge_runs(group, first, second, machines, middle, order):
    """Merge two runs, each in the order of (group, first, second, machine): one up to `middle`, one from there on.

    `order` gets the places of the entries in the order of both.
    """
    i, j = 0, middle
    for place in range(len(machines)):
        takes_first = j == len(machines)
        if i < middle and not takes_first:
            if group[i] != group[j]:
                takes_first = group[i] < group[j]
            elif first[i] != first[j]:
                takes_first = first[i] < first[j]
            elif second[i] != second[j]:
                takes_first = second[i] < second[j]
            else:
                takes_first = machines[i] < machines[j]
        if takes_first:
            order[place] = i
            i += 1
        else:
            order[place] = j
            j += 1


@kernel(INT(U1X_T, BOUND_T, I8_T, I8_T, I4_T, LISTINGS_T))
def list_bound(fits, bound, segment_start, segment_stop, fit, listings):
    """Write down the places that fit each shared listing; the others are the segments themselves.

    Returns how many places that takes.
    """
    size = 0
    for listing in range(len(fit)):
        if listings.is_shared[listing] == 0:
            listings.start[listing] = segment_start[listing]
            listings.length[listing] = segment_stop[listing] - segment_start[listing]
            continue
        listings.start[listing] = size
        for place in range(segment_start[listing], segment_stop[listing]):
            if fits[fit[listing], bound.shapes[place]] != 0:
                listings.places[size] = place
                size += 1
        listings.length[listing] = size - listings.start[listing]
    return size


@kernel(INT(FLEET_T, GANGS_T, U1_T, I4_T, I4_T, I8_T))
def find_free_entries(fleet, gangs, status, domain_of, machines, cells):
    """Count each gang class's free machines by domain, and sum up their supply; returns how many entries there are.

    As many as there is room for are noted, each with its cell: class by class, Idle before Speculative, in acquisition
    order. `domain_of` is room for a number per shape.
    """
    entries = 0
    for gang in range(len(gangs.fit)):
        fit, key, mask, base = gangs.fit[gang], gangs.key[gang], gangs.mask[gang], gangs.base[gang]
        # Machines are many times as many as shapes: what a shape says is worked out once.
        for shape in range(len(domain_of)):
            is_listed = fleet.fits[fit, shape] != 0 and fleet.helps[fleet.supply_of[shape]] & mask != 0
            domain_of[shape] = fleet.domain_of[key, shape] if is_listed else NO_DOMAIN
        for part in range(2):
            order = fleet.idle if part == 0 else fleet.speculative[gangs.bucket[gang]]
            for machine in order:
                shape = fleet.shape[machine]
                domain = domain_of[shape]
                if domain == NO_DOMAIN or status[machine] != AVAILABLE:
                    continue
                cell, supply = base + domain, fleet.supply_of[shape]
                if entries < len(machines):
                    machines[entries] = machine
                    cells[entries] = cell
                entries += 1
                gangs.members[cell] += 1
                for d in range(fleet.supply.shape[1]):
                    gangs.total[cell, d] += fleet.supply[supply, d]
    return entries


@kernel(numba.void(GANGS_T, I4_T, I8_T, INT))
def list_free(gangs, machines, cells, entries):
    """List the entries by cell, in their order; `claim_from` holds where cells begin and is used up as a cursor."""
    for i in range(entries):
        cell = cells[i]
        gangs.machines[gangs.claim_from[cell]] = machines[i]
        gangs.claim_from[cell] += 1


@kernel(numba.void(I4_T, I4_T, I8X_T, I4_T, I8_T, I8_T, I8X_T))
def sum_supply(shape, supply_of, supply, machines, starts, stops, sums):
    """Add the supply of each row's stretch of `machines` to its line of `sums`."""
    for row in range(len(starts)):
        for i in range(starts[row], stops[row]):
            number = supply_of[shape[machines[i]]]
            for d in range(supply.shape[1]):
                sums[row, d] += supply[number, d]


@kernel(INT(BOUND_T, I4_T, I8_T, I8_T, I4_T, INT))
def list_excess(bound, clusters, excess_start, excess_stop, excess, size):
    """List the Configured machines of each cluster that no row holds, from `size` on, in keep-priority order (§7).

    Returns how many entries there are then.
    """
    for cluster in clusters:
        excess_start[cluster] = size
        for place in range(bound.start[cluster], bound.configuring[cluster]):
            if bound.held[place] < 0:
                excess[size] = bound.machines[place]
                size += 1
        excess_stop[cluster] = size
    return size


@kernel(INT(U1_T, I4_T, I8_T, I8_T, I4_T, I4_T))
def list_reclaimed(taken, clusters, excess_start, excess_stop, excess, machines):
    """List the excess of the clusters that is not preempted either; returns how many machines that is (§7)."""
    size = 0
    for cluster in clusters:
        for i in range(excess_start[cluster], excess_stop[cluster]):
            if taken[excess[i]] == 0:
                machines[size] = excess[i]
                size += 1
    return size


@kernel(INT(I4_T, U1_T, I4_T, F8_T, F8_T, numba.float64, I4_T))
def list_over(idle, status, offer, hold_of_offer, idle_since, now, machines):
    """List the Idle machines that no row claimed and whose hold is over; returns how many these are (§7).

    An offer that is never released has an infinite hold; no stamp, which is NaN, compares as false.
    """
    size = 0
    for machine in idle:
        if status[machine] == CLAIMED:
            continue
        if hold_of_offer[offer[machine]] - (now - idle_since[machine]) <= 0:
            machines[size] = machine
            size += 1
    return size


@kernel(numba.void(U1X_T, I8_T, U1_T))
def find_free(fits, counts, found):
    """Say for each fit whether a free machine fits; `counts` is how many are free of each shape."""
    for fit in range(len(found)):
        found[fit] = 0
        for shape in range(len(counts)):
            if counts[shape] != 0 and fits[fit, shape] != 0:
                found[fit] = 1
                break


@kernel(numba.void(I4_T, U1X_T, I4_T, I8_T, I8_T, U1_T))
def prove_folds(shapes, fits, fit, starts, stops, proven):
    """Mark the questions to which one of the shapes in the segment is an answer."""
    for question in range(len(fit)):
        if proven[question] != 0:
            continue
        for i in range(starts[question], stops[question]):
            if fits[fit[question], shapes[i]] != 0:
                proven[question] = 1
                break


@kernel(INT(BOUND_T, I8_T, I8_T, I8_T, I8_T, I4_T))
def distinct_shapes(bound, starts, stops, out_start, last_seen, out):
    """List the distinct shapes of each stretch's visible machines; `last_seen` is per shape and starts at -1."""
    size = 0
    for segment in range(len(starts)):
        out_start[segment] = size
        for place in range(starts[segment], stops[segment]):
            number = bound.shapes[place]
            if last_seen[number] != segment and bound.held[place] != HIDDEN:
                last_seen[number] = segment
                out[size] = number
                size += 1
    out_start[len(starts)] = size
    return size


@inlined
def is_hidden(bound, machine):
    """Say whether no phase but the third may see the bound machine."""
    place = bound.place_of[machine]
    return place >= 0 and bound.held[place] == HIDDEN


@kernel(INT(I4_T, I4_T, BOUND_T, I4_T, I8_T, I4_T))
def rank_victims(configured, stamp, bound, rank_of_stamp, sizes, out):
    """Sort the visible Configured machines, given by id, by the rank of their stamp; rank -1 is left out (§6.4).

    `sizes` has one more entry than there are ranks, all zero. Returns how many machines are ranked.
    """
    total = 0
    for machine in configured:
        rank = rank_of_stamp[stamp[machine]]
        if rank >= 0 and not is_hidden(bound, machine):
            sizes[rank + 1] += 1
            total += 1
    for rank in range(1, len(sizes)):
        sizes[rank] += sizes[rank - 1]
    for machine in configured:
        rank = rank_of_stamp[stamp[machine]]
        if rank >= 0 and not is_hidden(bound, machine):
            out[sizes[rank]] = machine
            sizes[rank] += 1
    return total


@kernel(INT(I4_T, U1_T, I4_T, I4_T, F8_T, I4_T))
def merge_order(order, is_dropped, added, offer, cost_of_offer, merged):
    """Merge two orders by (cost, id), leaving out what is dropped from the first; returns how many machines remain."""
    size, next_added = 0, 0
    for machine in order:
        if is_dropped[machine] != 0:
            continue
        cost = cost_of_offer[offer[machine]]
        while next_added < len(added):
            other = added[next_added]
            other_cost = cost_of_offer[offer[other]]
            if other_cost > cost or (other_cost == cost and other > machine):
                break
            merged[size] = other
            size += 1
            next_added += 1
        merged[size] = machine
        size += 1
    while next_added < len(added):
        merged[size] = added[next_added]
        size += 1
        next_added += 1
    return size
