"""Credits the rows of plain clusters over pods: the compiled loops of `bigfleet.engine.shapes.columns.compiled`.

docs/spec/engine.md §3.4, §3.5, §7.2. Machines that agree in cluster, state, shape, offer and reclamation dollars are of
one *kind* here; they differ in their ids alone. Sums and products of quantities stay below 2⁶²: a room of `NO_LIMIT`
is far above what a cluster with fewer than 2⁴⁰ pods takes of `pods`.
"""

import numba
import numpy as np

from bigfleet.engine.columnar.arrays import OpenHosts, PodClaims, PodGroups, PodHosts, PodPlaces
from bigfleet.engine.columnar.kernels.base import (
    F8_T,
    F8X_T,
    I4_T,
    I8_T,
    I8X_T,
    INT,
    U1_T,
    allocating,
    inlined,
    kernel,
    typeof,
)

HOSTS_T, GROUPS_T, PLACES_T = (typeof(group) for group in (PodHosts, PodGroups, PodPlaces))
CLAIMS_T, OPEN_T = typeof(PodClaims), typeof(OpenHosts)
ROWS_AND_KINDS_T = numba.types.Tuple((I8_T, I4_T))  # type: ignore[no-untyped-call]  # Numba has no annotations
HOST_AND_PODS_T = numba.types.Tuple((I4_T, I8_T))  # type: ignore[no-untyped-call]  # Numba has no annotations
#: Groups after which hosts without room for what follows are dropped.
GROUPS_TO_DROP = 4
#: Claims for which there is room at first, beside one for each host.
CLAIMS_PER_GROUP = 3
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
    keys, numbers = np.empty(1 << bits, np.int64), np.empty(1 << bits, np.int32)
    numbers[:] = _NONE
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
            keys, numbers = np.empty(1 << bits, np.int64), np.empty(1 << bits, np.int32)
            numbers[:] = _NONE
            found = np.empty(1 << bits, np.int64)
            found[:count] = old_found[:count]
            for old in range(len(old_keys)):
                if old_numbers[old] >= 0:
                    slot = np.int64((np.uint64(old_keys[old]) * _FACTOR) >> np.uint64(64 - bits))
                    while numbers[slot] >= 0:
                        slot = (slot + 1) & (len(keys) - 1)
                    keys[slot], numbers[slot] = old_keys[old], old_numbers[old]
    return found[:count]


@allocating(ROWS_AND_KINDS_T(I8_T, I4_T, U1_T, I8_T, U1_T, I8_T))
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
def drop_full(opened, are_open, group):
    """Drop the hosts that have no room for what follows; return how many stay, in their order."""
    stay = 0
    for i in range(are_open):
        has_room = True
        for d in range(opened.rooms.shape[1]):
            has_room = has_room and opened.rooms[i, d] >= opened.least[group, d]
        if has_room:
            opened.hosts[stay] = opened.hosts[i]
            for d in range(opened.rooms.shape[1]):
                opened.rooms[stay, d] = opened.rooms[i, d]
            stay += 1
    return stay


@inlined
def note_least(opened, groups, first, last):
    """Write the least request of each group and those after it, and after the last one more than any."""
    for d in range(opened.least.shape[1]):
        opened.least[last - first, d] = _NOTHING
    for g in range(last - 1, first - 1, -1):
        for d in range(opened.least.shape[1]):
            opened.least[g - first, d] = min(opened.least[g - first + 1, d], groups.requests[groups.number[g], d])


@inlined
def claim(hosts, places, claims, size, host, pods):
    """Note a claim."""
    claims.host[size], claims.pods[size] = host, pods
    places.is_claimed[hosts.row[host]] = 1


@kernel(INT(INT, HOSTS_T, GROUPS_T, PLACES_T, CLAIMS_T, INT, OPEN_T))
def place_in_cluster(c, hosts, groups, places, claims, size, opened):
    """Place the groups of one cluster; return how many claims there are then, -1 where they have no room."""
    start, unused, are_open, width = groups.first[c], hosts.first[c], 0, hosts.totals.shape[1]
    note_least(opened, groups, start, groups.first[c + 1])
    for g in range(start, groups.first[c + 1]):
        places.first_claim[g] = size
        wanted, limit, request, access = groups.counts[g], groups.limits[g], groups.number[g], groups.access[g]
        if (g - start) % GROUPS_TO_DROP == 0:
            are_open = drop_full(opened, are_open, g - start)
        # Without a limit, and without a host that it may not use, what it passes by has no room for such a pod.
        last, is_bound, i = opened.full_until[request], limit < _NOTHING, 0
        while i < are_open and opened.hosts[i] < last:
            i += 1
        while wanted > 0 and i < are_open:
            fits, host = True, opened.hosts[i]
            for d in range(width):
                fits = fits and opened.rooms[i, d] >= groups.requests[request, d]
            if fits and groups.is_allowed[access, hosts.access_of[hosts.kind[host]]]:
                if size == len(claims.host):
                    return -1
                pods = fitting(opened.rooms, i, groups.requests, request, min(wanted, limit))
                for d in range(width):
                    opened.rooms[i, d] -= groups.requests[request, d] * pods
                claim(hosts, places, claims, size, host, pods)
                wanted, last, size = wanted - pods, host, size + 1
            elif fits:
                is_bound = True
            i += 1
        total, most, stays = np.int64(-1), np.int64(0), False
        while wanted > 0 and unused < hosts.first[c + 1]:
            # Empty hosts of one total hold as many pods, and have as much left.
            if total != hosts.total_of[hosts.kind[unused]]:
                total = hosts.total_of[hosts.kind[unused]]
                most, stays = fitting(hosts.totals, total, groups.requests, request, limit), True
                for d in range(width):
                    after = hosts.totals[total, d] - most * groups.requests[request, d]
                    stays = stays and after >= opened.least[g - start + 1, d]
            pods = np.int64(0)
            if not groups.is_allowed[access, hosts.access_of[hosts.kind[unused]]]:
                is_bound = True
            elif most > 0:
                if size == len(claims.host):
                    return -1
                pods = min(wanted, most)
                claim(hosts, places, claims, size, unused, pods)
                wanted, last, size = wanted - pods, unused, size + 1
            if pods < most or stays:
                opened.hosts[are_open] = unused
                for d in range(width):
                    opened.rooms[are_open, d] = hosts.totals[total, d] - pods * groups.requests[request, d]
                are_open += 1
            unused += 1
        places.left[g] = wanted
        if not is_bound:
            opened.full_until[request] = hosts.first[c + 1] if wanted > 0 else last
    return size


@allocating(HOST_AND_PODS_T(HOSTS_T, GROUPS_T, PLACES_T))
def place_pods(hosts, groups, places):
    """Place each group of each cluster on the first hosts with room; return host and pods of each claim, by group."""
    hosts_max, groups_max = 0, 0
    for c in range(len(hosts.first) - 1):
        hosts_max = max(hosts_max, hosts.first[c + 1] - hosts.first[c])
        groups_max = max(groups_max, groups.first[c + 1] - groups.first[c])
    width = hosts.totals.shape[1]
    opened = OpenHosts(
        np.empty(hosts_max, np.int64),
        np.empty((hosts_max, width), np.int64),
        np.empty((groups_max + 1, width), np.int64),
        np.zeros(len(groups.requests), np.int64),
    )
    # Most hosts have one claim, and most groups end on hosts that have others.
    most = len(hosts.row) + CLAIMS_PER_GROUP * len(groups.number)
    claims = PodClaims(np.empty(most, np.int32), np.empty(most, np.int64))
    size, c = 0, 0
    while c < len(hosts.first) - 1:
        found = place_in_cluster(c, hosts, groups, places, claims, size, opened)
        if found >= 0:
            size, c = found, c + 1
        else:
            # A cluster whose claims have no room is placed again, which gives the same.
            opened.full_until[:] = 0
            claims = PodClaims(
                np.concatenate((claims.host, np.empty_like(claims.host))),
                np.concatenate((claims.pods, np.empty_like(claims.pods))),
            )
    places.first_claim[len(groups.number)] = size
    return claims.host[:size], claims.pods[:size]


@inlined
def has_room(rooms, first, last, requests, request):
    """Return whether one of some rooms holds a pod."""
    for r in range(first, last):
        fits = True
        for d in range(requests.shape[1]):
            fits = fits and rooms[r, d] >= requests[request, d]
        if fits:
            return True
    return False


@kernel(
    INT(
        *(I8_T, I8_T, I8_T, I8_T, I8_T, I8_T, I8X_T, F8_T, I8_T, I8X_T),
        *(I8_T, I8_T, I8_T, I8_T, U1_T, I8X_T, F8X_T),
    )
)
def arrange_groups(
    order,
    first_row,
    first_shape,
    number,
    counts,
    request_of,
    requests,
    size_of,
    first_room,
    rooms,
    pair,
    first_group,
    shape,
    group_request,
    left_out,
    sums,
    about,
):
    """Write the groups of rows in `order`: those of a row by size, largest first; return how many there are.

    A group of which no room of its row's `pair` holds a pod is left out, and noted for its cluster. `shape` has places
    in all shapes. `sums` and `about` have the demand of each cluster, the former within 64 bits.
    """
    size = 0
    for c in range(len(first_row) - 1):
        for position in range(first_row[c], first_row[c + 1]):
            row, begin = order[position], size
            first_group[position] = begin
            for s in range(first_shape[row], first_shape[row + 1]):
                request = request_of[number[s]]
                if not has_room(rooms, first_room[pair[row]], first_room[pair[row] + 1], requests, request):
                    left_out[c] = 1
                    continue
                for d in range(requests.shape[1]):
                    sums[c, d] += counts[s] * requests[request, d]
                    about[c, d] += np.float64(counts[s]) * np.float64(requests[request, d])
                # Those of equal size stay in the order of their places.
                i = size
                while i > begin and size_of[group_request[i - 1]] < size_of[request]:
                    shape[i], group_request[i] = shape[i - 1], group_request[i - 1]
                    i -= 1
                shape[i], group_request[i] = s, request
                size += 1
    first_group[first_row[-1]] = size
    return size
