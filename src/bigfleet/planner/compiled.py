"""Compiles the planner's inner loops: scheduling pods one by one, first-fit, and filling one machine.

`plain.py` states the same loops in plain Python, and tests hold both together. Importing this module compiles the
loops, or loads them where the process keeps compiled code on disk: it is imported when the first plan is computed.
"""

from typing import Any, Final

import numba
import numpy as np

_CONFIG: Final[Any] = numba.config
#: Compiled code leaves the interpreter to others while it runs; it is cached where the process named a directory.
_SETTINGS: Final[dict[str, Any]] = {"cache": bool(_CONFIG.CACHE_DIR), "nogil": True, "error_model": "numpy"}
_ROW: Final = numba.int64[::1]
_TABLE: Final = numba.int64[:, ::1]
_CUBE: Final = numba.int64[:, :, ::1]
_FIXED: Final = numba.types.Array(numba.int64, 1, "C", readonly=True)
_INT: Final = numba.int64
#: Inlines a function into the loops that call it; without a signature Numba compiles no copy of its own.
_inlined: Final = numba.njit(inline="always", **_SETTINGS)


@numba.njit(numba.void(_TABLE, _TABLE, _TABLE, _TABLE, _ROW, _TABLE, _ROW, _FIXED, _INT, _CUBE), **_SETTINGS)
def schedule(columns, queues, request, supply, limit, takes, empty, ties, point, lost):
    """Count the pods that the scheduler leaves over, by fleet, queue and part, in `lost`.

    `columns` (F, M) are the machines of each fleet by column, -1 after the last; `queues` (O, N) the part of each pod.
    """
    parts, width = request.shape
    repeat = len(ties) - columns.shape[1]
    free = np.empty((columns.shape[1], width), np.int64)
    score = np.empty(columns.shape[1], np.int64)
    taken = np.empty((parts, columns.shape[1]), np.int64)
    hosted = np.zeros((parts, columns.shape[1]), np.int64)
    for f in range(columns.shape[0]):
        machines = 0
        while machines < columns.shape[1] and columns[f, machines] >= 0:
            for p in range(parts):
                taken[p, machines] = takes[p, columns[f, machines]]
            machines += 1
        for o in range(queues.shape[0]):
            for m in range(machines):
                score[m] = empty[columns[f, m]]
                for d in range(width):
                    free[m, d] = supply[columns[f, m], d]
            hosted[:, :] = 0
            for step in range(queues.shape[1]):
                p = queues[o, step]
                tie = step * 31 % repeat
                best, most = -1, 0
                for m in range(machines):
                    points = ((score[m] - taken[p, m]) & -point) + ties[tie + m]
                    if points <= most or hosted[p, m] >= limit[p]:
                        continue
                    fits = True
                    for d in range(width):
                        fits = fits and request[p, d] <= free[m, d]
                    if fits:
                        best, most = m, points
                if best < 0:
                    lost[f, o, p] += 1
                    continue
                for d in range(width):
                    free[best, d] -= request[p, d]
                score[best] -= taken[p, best]
                hosted[p, best] += 1


@numba.njit(numba.void(_TABLE, _TABLE, _TABLE, _TABLE, _TABLE, _ROW, _TABLE, _CUBE), **_SETTINGS)
def first_fit(columns, orders, request, supply, most, count, left, on):
    """Place parts by first-fit: `left` (R, P) has no place; `on` (R, P, M) is placed, where it is not empty.

    A row is a fleet in an order: `columns` (R, M) are its machines by column, one past the last column for none;
    `orders` the parts one after the other; `most` (P, C) pods of a part that an empty machine hosts.
    """
    width = request.shape[1]
    free = np.empty((columns.shape[1], width), np.int64)
    for r in range(columns.shape[0]):
        machines = 0
        for m in range(columns.shape[1]):
            if columns[r, m] < len(supply):
                machines = m + 1
                for d in range(width):
                    free[m, d] = supply[columns[r, m], d]
        for p in orders[r]:
            remaining = count[p]
            for m in range(machines):
                if remaining == 0:
                    break
                if columns[r, m] >= len(supply):
                    continue
                times = min(remaining, most[p, columns[r, m]])
                for d in range(width):
                    if request[p, d] * times > free[m, d]:
                        times = free[m, d] // request[p, d]
                if times <= 0:
                    continue
                for d in range(width):
                    free[m, d] -= request[p, d] * times
                remaining -= times
                if len(on):
                    on[r, p, m] = times
            left[r, p] = remaining


@numba.njit(numba.void(_ROW, _ROW, _ROW, _TABLE, _TABLE, _TABLE, _TABLE), **_SETTINGS)
def fill_one(pending, left, usable, request, supply, most, takes):
    """Count how many pods of each pending part an empty machine of each usable column takes in turn, in `takes`."""
    width = request.shape[1]
    free = np.empty(width, np.int64)
    for n in range(len(usable)):
        c = usable[n]
        for d in range(width):
            free[d] = supply[c, d]
        for k in range(len(pending)):
            p = pending[k]
            times = min(left[p], most[p, c])
            for d in range(width):
                if request[p, d] > 0:
                    times = min(times, max(0, free[d]) // request[p, d])
            takes[k, n] = times
            for d in range(width):
                free[d] -= request[p, d] * times


@_inlined
def pick(state, below):
    """Return the next value of a hash sequence, from 0 to below - 1; `state` holds its number."""
    state[0] += 1
    value = np.uint64(state[0]) + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    value = value ^ (value >> np.uint64(31))
    return np.int64((value >> np.uint64(11)) % np.uint64(below))


@_inlined
def several(state, count):
    """Return how many machines a change takes: mostly one, sometimes a part of those of the column."""
    choice = pick(state, 6)
    return 1 + (count // 8 if choice == 4 else count // 3 if choice == 5 else 0)


@_inlined
def change(state, machines, held, addable, removable, stock, counts, changed):
    """Remove up to three times, and add up to three times, machines of one column; return how many columns it names.

    `machines` are the columns of the fleet's machines, `held` 0 where the fleet is empty.
    """
    number = 0
    for _ in range((1, 1, 1, 2, 2, 3)[pick(state, 6)] if held else 0):
        c = machines[pick(state, held)]
        if counts[c] and removable[c]:
            counts[c] -= min(counts[c], several(state, counts[c]))
            changed[number] = c
            number += 1
    for _ in range((0, 0, 1, 1, 1, 2, 2, 3)[pick(state, 8)]):
        # Half of the time a column of which the fleet has machines.
        if held and pick(state, 2):
            c = machines[pick(state, held)]
            if not removable[c]:
                continue
        elif len(addable):
            c = addable[pick(state, len(addable))]
        else:
            continue
        counts[c] = min(counts[c] + several(state, counts[c]), stock[c])
        changed[number] = c
        number += 1
    return number


@_inlined
def left_over(counts, used, columns, rank, order, request, supply, most, pods, at, free, left):
    """Count the pods of each part that first-fit leaves on a fleet, in `left`.

    The first `columns` of `used` are those of the fleet; machines stand in the order of `rank`. `at` and `free` are
    room to work in.
    """
    width = request.shape[1]
    for n in range(1, columns):
        c, k = used[n], n
        while k > 0 and rank[used[k - 1]] > rank[c]:
            used[k] = used[k - 1]
            k -= 1
        used[k] = c
    machines = 0
    for n in range(columns):
        for _ in range(counts[used[n]]):
            at[machines] = used[n]
            for d in range(width):
                free[machines, d] = supply[used[n], d]
            machines += 1
    for p in order:
        remaining = pods[p]
        for m in range(machines):
            times = min(remaining, most[p, at[m]])
            for d in range(width):
                if request[p, d] * times > free[m, d]:
                    times = free[m, d] // request[p, d]
            if times > 0:
                for d in range(width):
                    free[m, d] -= request[p, d] * times
                remaining -= times
                if remaining == 0:
                    break
        left[p] = remaining


@_inlined
def cheapest_hosts(request, supply, most, cost, addable, single, left):
    """Return column × 1024 + machines of the cheapest machines that host what is left by volume, or -1."""
    parts, width = request.shape
    need = np.zeros(width, np.int64)
    for p in range(parts):
        if left[p]:
            for d in range(width):
                need[d] += request[p, d] * left[p]
    best, least = -1, 0
    for c in addable:
        times = 1
        for d in range(width):
            if need[d] > supply[c, d]:
                times = 1024 if single or not supply[c, d] else max(times, -(-need[d] // supply[c, d]))
        if times >= 1024 or (best >= 0 and times * cost[c] >= least):
            continue
        hosts = True
        for p in range(parts):
            if left[p] and not most[p, c]:
                hosts = False
                break
        if hosts:
            best, least = c * 1024 + times, times * cost[c]
    return best


@_inlined
def copy(values, into):
    """Copy an array. An assignment of slices would compile the formatting of its error message as well."""
    for n in range(len(values)):
        into[n] = values[n]


@_inlined
def list_columns(before, base, changed, named, used):
    """Write the columns of a changed fleet in `used`: its own, and new ones among the `named` first of `changed`."""
    copy(base, used)
    columns = len(base)
    for n in range(named):
        is_new = not before[changed[n]]
        for other in range(n):
            is_new = is_new and changed[other] != changed[n]
        if is_new:
            used[columns] = changed[n]
            columns += 1
    return columns


@_inlined
def lacks_volume(demand, used, columns, counts, supply):
    """Return whether the fleet has less of any dimension than all pods request."""
    lacks = False
    for d in range(len(demand)):
        volume = demand[d]
        for n in range(columns):
            has = supply[used[n], d]
            # Divided first: the supply of many large machines does not fit 64 bits.
            if has > 0 and volume > 0:
                volume -= counts[used[n]] * has if counts[used[n]] <= volume // has else volume
        lacks = lacks or volume > 0
    return lacks


@_inlined
def least_left(counts, used, columns, ranks, orders, tried, request, supply, most, pods, prices, at, free, left, best):
    """Write what the first `tried` orders leave over at the least worth in `best`; return the worth."""
    least = -1
    for k in range(tried):
        left_over(counts, used, columns, ranks[k], orders[k], request, supply, most, pods, at, free, left)
        worth = 0
        for p in range(len(left)):
            worth += left[p] * prices[p]
        if least < 0 or worth < least:
            least = worth
            copy(left, best)
        if not least:
            break
    return least


@numba.njit(
    _INT(*(_ROW,) * 8, _INT, *(_TABLE,) * 5, _ROW, _ROW, _ROW, _TABLE),
    **_SETTINGS,
)
def propose(
    state,
    before,
    machines,
    base,
    addable,
    removable,
    stock,
    cost,
    value,
    orders,
    ranks,
    request,
    supply,
    most,
    pods,
    demand,
    prices,
    found,
):
    """Write fleets near `before` that cost less than `value` and host every pod, or nearly so; return how many.

    One is tried for each line of `found` (N, C). What a change leaves over, in the order of first-fit that leaves the
    cheapest pods, goes to the cheapest machines that host it. `machines` has the column of each machine of `before`.
    """
    width, held = request.shape[1], len(machines)
    counts = np.empty(len(before), np.int64)
    copy(before, counts)
    left, best = np.empty(len(pods), np.int64), np.empty(len(pods), np.int64)
    room = 2 * held + 4096
    at, free = np.empty(room, np.int64), np.empty((room, width), np.int64)
    used, changed = np.empty(len(base) + 16, np.int64), np.empty(16, np.int64)
    number = 0
    for _ in range(len(found)):
        named = change(state, machines, held, addable, removable, stock, counts, changed)
        for attempt in range(3):
            columns = list_columns(before, base, changed, named, used)
            price = size = 0
            for n in range(columns):
                price += counts[used[n]] * cost[used[n]]
                size += counts[used[n]]
            if price >= value or size > room:
                break
            # Where the volume does not suffice, another order leaves as much.
            tried = 1 if lacks_volume(demand, used, columns, counts, supply) else len(orders)
            least = least_left(
                counts, used, columns, ranks, orders, tried, request, supply, most, pods, prices, at, free, left, best
            )
            if least == 0:
                copy(counts, found[number])
                number += 1
                break
            hosts = cheapest_hosts(request, supply, most, cost, addable, attempt, best) if attempt < 2 else -1
            if hosts < 0:
                break
            column, times = hosts // 1024, hosts % 1024
            counts[column] += times
            changed[named] = column
            named += 1
            if counts[column] > stock[column]:
                break
            # A single machine hosts all that is left by volume: whether it does is found out where it matters.
            if times == 1:
                if price + cost[column] < value:
                    copy(counts, found[number])
                    number += 1
                break
        for n in range(named):
            counts[changed[n]] = before[changed[n]]
    return number
