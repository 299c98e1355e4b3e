"""Computes digests of what the rows of a decision got, in compiled code: half a million claims in a millisecond.

docs/adr/0134-a-recording-is-what-the-engine-saw.md. Importing this module loads or compiles the loop, which is why it
is imported when the first cycle is recorded and not before. The numbers are for finding accidents: nothing here may be
taken for a proof against somebody who wants two decisions to look alike.
"""

from typing import Final

import numba
import numpy as np

from bigfleet.engine.columnar.arrays import Bytes, Int32s, Int64s
from bigfleet.engine.columnar.kernels.base import I4_T, I8_T, U1_T, inlined, kernel

#: Places in what `mix_rows` writes: what rows are and how much they hold, which machines, which domains they chose.
ROWS: Final = 0
CLAIMS: Final = 1
DOMAINS: Final = 2
_FACTOR: Final = np.uint64(0x9E3779B97F4A7C15)
_SPREAD: Final = np.uint64(0xD1B54A32D192ED03)
_SHIFT: Final = np.uint64(29)


@inlined
def _mixed(number: np.int64, value: np.int64) -> np.int64:
    mixed = (np.uint64(number) ^ np.uint64(value)) * _FACTOR
    return np.int64(mixed ^ (mixed >> _SHIFT))


@inlined
def _placed(place: np.int64, value: np.int64) -> np.int64:
    """Return a number for a value at a place: sums of them need not wait for each other, as mixing does."""
    mixed = (np.uint64(value) + np.uint64(place) * _SPREAD) * _FACTOR
    return np.int64(mixed ^ (mixed >> _SHIFT))


@inlined
def _sum(place: np.int64, values: Int32s) -> np.int64:
    """Return the sum of the numbers of values at a place and at those that follow it."""
    total = np.int64(0)
    for i in range(len(values)):
        # An index that may be negative keeps the compiler from taking several at once: four times the time.
        total += _placed(place + i, values[np.uint64(i)])
    return total


#: Of the arguments of `mix_rows`, in their order.
_TYPES: Final = (
    *(I8_T, I8_T, I8_T),
    *(I8_T, I8_T, I4_T, I8_T, I8_T, U1_T, U1_T, U1_T),
    *(I4_T, I4_T, I8_T, I8_T),
    *(I4_T, I8_T, I8_T, I4_T, I8_T, I8_T),
)


@kernel(numba.void(*_TYPES))
def mix_rows(
    numbers: Int64s,
    place_of: Int64s,
    rows: Int64s,
    places: Int64s,
    start: Int64s,
    cluster: Int32s,
    local: Int64s,
    members: Int64s,
    parked: Bytes,
    newly_parked: Bytes,
    satisfiable: Bytes,
    domain: Int32s,
    key: Int32s,
    value_start: Int64s,
    values: Int64s,
    credited: Int32s,
    credit_from: Int64s,
    credit_to: Int64s,
    acquired: Int32s,
    acquire_from: Int64s,
    acquire_to: Int64s,
) -> None:
    """Go through the rows in list order; write a number for each part, and the place of each row.

    Each number depends on everything that it is of, in its order: for whatever else an engine does inside, equal
    decisions give equal numbers.
    """
    of_rows = of_claims = of_domains = np.int64(len(rows))
    claimed = np.int64(0)
    for place in range(len(rows)):
        row = rows[place]
        place_of[row] = place
        of_rows = _mixed(of_rows, places[start[cluster[row]] + local[row]])
        flags = (parked[row] | newly_parked[row]) * 2 + satisfiable[row]
        of_rows = _mixed(of_rows, members[row] * 4 + flags)
        if domain[row] >= 0:
            of_domains = _mixed(_mixed(of_domains, place), values[value_start[key[row]] + domain[row]])
        # Where each row's machines end keeps one from passing for a machine of the next row.
        of_claims += _sum(claimed, credited[credit_from[row] : credit_to[row]])
        claimed += credit_to[row] - credit_from[row]
        of_claims += _sum(claimed, acquired[acquire_from[row] : acquire_to[row]])
        claimed += acquire_to[row] - acquire_from[row]
        of_rows = _mixed(of_rows, claimed)
    numbers[ROWS] = of_rows
    numbers[CLAIMS] = of_claims
    numbers[DOMAINS] = of_domains
