"""Credits the rows of plain clusters over pods: the compiled loops of `bigfleet.engine.shapes.columns.compiled`.

docs/spec/engine.md §3.4, §3.5, §7.2. Machines that agree in cluster, state, shape, offer and reclamation dollars are of
one *kind* here; they differ in their ids alone. Sums and products of quantities stay below 2⁶²: a room of `NO_LIMIT`
is far above what a cluster with fewer than 2⁴⁰ pods takes of `pods`.
"""

import numba
import numpy as np

from bigfleet.engine.columnar.kernels.base import I4_T, I8_T, I8X_T, INT, U1_T, U1X_T, allocating, inlined, kernel

#: Groups after which hosts without room for what follows are dropped.
GROUPS_TO_DROP = 4
#: Spreads keys over a table: 2⁶⁴ ÷ the golden ratio, odd.
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_NONE = np.int32(-1)
#: Stands for a request that nothing makes.
_NOTHING = np.int64(1) << 62


@allocating(I8_T(I8_T, I4_T, I4_T, U1_T, I4_T, I4_T, I4_T, I8_T, I8_T, I8_T, I4_T))
def number_kinds(rows, owners, cluster_of, state, shape, offer, stamp, order_of_state, keep_of_stamp, sizes, kind):
    """Write the kind of each row, -1 where its owner has no cluster; return the first place of each kind.

    `sizes` has how many shapes, offers and keeps there are at most; their product is below 2⁵⁰ with all clusters.
    """
    shapes, offers, keeps = sizes[0], sizes[1], sizes[2]
    bits = 10
    keys, numbers = np.empty(1 << bits, np.int64), np.full(1 << bits, -1, np.int32)
    found = np.empty(1 << bits, np.int64)
    count = 0
    for place in range(len(rows)):
        row = rows[place]
        cluster = np.int64(cluster_of[owners[row]])
        if cluster < 0:
            kind[place] = _NONE
            continue
        key = ((cluster * 4 + order_of_state[state[row]]) * shapes + shape[row]) * offers + offer[row]
        key = key * keeps + keep_of_stamp[stamp[row]]
        slot = np.int64((np.uint64(key) * _FACTOR) >> np.uint64(64 - bits))
        while numbers[slot] >= 0 and keys[slot] != key:
            slot = (slot + 1) & (len(keys) - 1)
        if numbers[slot] >= 0:
            kind[place] = numbers[slot]
            continue
        keys[slot], numbers[slot], found[count] = key, count, place
        kind[place] = count
        count += 1
        if 2 * count == len(keys):
            # The table and the list double, and all keys get new places.
            bits += 1
            old_keys, old_numbers, old_found = keys, numbers, found
            keys, numbers = np.empty(1 << bits, np.int64), np.full(1 << bits, -1, np.int32)
            found = np.empty(1 << bits, np.int64)
            found[:count] = old_found[:count]
            for old in range(len(old_keys)):
                if old_numbers[old] >= 0:
                    slot = np.int64((np.uint64(old_keys[old]) * _FACTOR) >> np.uint64(64 - bits))
                    while numbers[slot] >= 0:
                        slot = (slot + 1) & (len(keys) - 1)
                    keys[slot], numbers[slot] = old_keys[old], old_numbers[old]
    return found[:count].copy()


@allocating(numba.types.Tuple((I8_T, I4_T))(I8_T, I4_T, U1_T, I8_T, U1_T, I8_T))
def in_rank_order(rows, kind, is_wanted, rank, is_claimed, first):
    """Return the rows that nothing claims, of the kinds that are wanted, in the order of their kinds' ranks; and kinds.

    Rows of one rank stay in their order. Writes where those of each rank begin, and where the last ones end.
    """
    first[:] = 0
    for place in range(len(rows)):
        if kind[place] >= 0 and is_wanted[kind[place]] and not is_claimed[rows[place]]:
            first[rank[kind[place]] + 1] += 1
    for number in range(1, len(first)):
        first[number] += first[number - 1]
    following, ordered = first.copy(), np.empty(first[-1], np.int64)
    kinds = np.empty(first[-1], np.int32)
    for place in range(len(rows)):
        if kind[place] >= 0 and is_wanted[kind[place]] and not is_claimed[rows[place]]:
            where = following[rank[kind[place]]]
            following[rank[kind[place]]] = where + 1
            ordered[where], kinds[where] = rows[place], kind[place]
    return ordered, kinds


@inlined
def fitting(rooms, place, requests, request, most):
    """Return how many equal pods a room holds, `most` at most."""
    for d in range(rooms.shape[1]):
        if requests[request, d] > 0:
            most = min(most, rooms[place, d] // requests[request, d])
    return most


@inlined
def drop_full(opened, rooms, are_open, least):
    """Drop the hosts that have no room for what follows; return how many stay, in their order."""
    stay = 0
    for i in range(are_open):
        has_room = True
        for d in range(rooms.shape[1]):
            has_room = has_room and rooms[i, d] >= least[d]
        if has_room:
            opened[stay] = opened[i]
            for d in range(rooms.shape[1]):
                rooms[stay, d] = rooms[i, d]
            stay += 1
    return stay


@inlined
def note_least(least, first, last, number, requests):
    """Write the least request of each group and those after it, and after the last one more than any."""
    for d in range(requests.shape[1]):
        least[last - first, d] = _NOTHING
    for g in range(last - 1, first - 1, -1):
        for d in range(requests.shape[1]):
            least[g - first, d] = min(least[g - first + 1, d], requests[number[g], d])


@kernel(
    INT(
        *(INT, I8_T, I8_T, I4_T, I8_T, I8_T, I8X_T),
        *(I8_T, I8_T, I8X_T, I8_T, I8_T, I8_T, U1X_T),
        *(U1_T, I8_T, I8_T, I4_T, I8_T, INT),
        *(I8_T, I8X_T, I8X_T),
    )
)
def place_in_cluster(
    c,
    first_host,
    rows,
    kind,
    total_of,
    access_of,
    totals,
    first_group,
    number,
    requests,
    counts,
    limits,
    access,
    is_allowed,
    is_claimed,
    left,
    first_claim,
    claim_host,
    claim_pods,
    size,
    opened,
    rooms,
    least,
):
    """Place the groups of one cluster; return how many claims there are then, -1 where they have no room."""
    start, unused, are_open = first_group[c], first_host[c], 0
    note_least(least, start, first_group[c + 1], number, requests)
    for g in range(start, first_group[c + 1]):
        first_claim[g] = size
        wanted, limit, request, total = counts[g], limits[g], number[g], np.int64(-1)
        if (g - start) % GROUPS_TO_DROP == 0:
            are_open = drop_full(opened, rooms, are_open, least[g - start])
        i, most, stays = 0, np.int64(0), False
        while wanted > 0 and i < are_open:
            fits = True
            for d in range(rooms.shape[1]):
                fits = fits and rooms[i, d] >= requests[request, d]
            if fits and is_allowed[access[g], access_of[kind[opened[i]]]]:
                pods = fitting(rooms, i, requests, request, min(wanted, limit))
                if size == len(claim_host):
                    return -1
                for d in range(rooms.shape[1]):
                    rooms[i, d] -= requests[request, d] * pods
                claim_host[size], claim_pods[size] = opened[i], pods
                wanted -= pods
                is_claimed[rows[opened[i]]] = 1
                size += 1
            i += 1
        while wanted > 0 and unused < first_host[c + 1]:
            # Empty hosts of one total hold as many pods, and have as much left.
            if total != total_of[kind[unused]]:
                total = total_of[kind[unused]]
                most = fitting(totals, total, requests, request, limit)
                stays = True
                for d in range(rooms.shape[1]):
                    stays = stays and totals[total, d] - most * requests[request, d] >= least[g - start + 1, d]
            pods = min(wanted, most) if is_allowed[access[g], access_of[kind[unused]]] else 0
            if pods > 0:
                if size == len(claim_host):
                    return -1
                claim_host[size], claim_pods[size] = unused, pods
                wanted -= pods
                is_claimed[rows[unused]] = 1
                size += 1
            if pods < most or stays:
                opened[are_open] = unused
                for d in range(rooms.shape[1]):
                    rooms[are_open, d] = totals[total, d] - pods * requests[request, d]
                are_open += 1
            unused += 1
        left[g] = wanted
    return size


@allocating(
    numba.types.Tuple((I4_T, I8_T))(
        *(I8_T, I8_T, I4_T, I8_T, I8_T, I8X_T),
        *(I8_T, I8_T, I8X_T, I8_T, I8_T, I8_T, U1X_T),
        *(U1_T, I8_T, I8_T),
    )
)
def place_pods(
    first_host,
    rows,
    kind,
    total_of,
    access_of,
    totals,
    first_group,
    number,
    requests,
    counts,
    limits,
    access,
    is_allowed,
    is_claimed,
    left,
    first_claim,
):
    """Place each group of each cluster on the first hosts with room; return host and pods of each claim, by group.

    `rows` and `kind` are those of the hosts; `total_of` and `access_of` have what each kind is in `totals` and in the
    columns of `is_allowed`. Writes which rows are claimed, what is left of each group, and where its claims begin.
    """
    hosts_max, groups_max = 0, 0
    for c in range(len(first_host) - 1):
        hosts_max = max(hosts_max, first_host[c + 1] - first_host[c])
        groups_max = max(groups_max, first_group[c + 1] - first_group[c])
    width = totals.shape[1]
    # Hosts of a cluster that were looked at and may have room for what follows, in hosting order.
    opened, rooms = np.empty(hosts_max, np.int64), np.empty((hosts_max, width), np.int64)
    least = np.empty((groups_max + 1, width), np.int64)
    hosts, pods = np.empty(len(rows) + len(number), np.int32), np.empty(len(rows) + len(number), np.int64)
    size, c = 0, 0
    while c < len(first_host) - 1:
        sizes = place_in_cluster(
            *(c, first_host, rows, kind, total_of, access_of, totals),
            *(first_group, number, requests, counts, limits, access, is_allowed),
            *(is_claimed, left, first_claim, hosts, pods, size, opened, rooms, least),
        )
        if sizes >= 0:
            size, c = sizes, c + 1
        else:
            # A cluster whose claims have no room is placed again, which gives the same.
            hosts, pods = np.concatenate((hosts, np.empty_like(hosts))), np.concatenate((pods, np.empty_like(pods)))
    first_claim[len(number)] = size
    return hosts[:size].copy(), pods[:size].copy()
