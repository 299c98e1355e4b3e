"""Converts dollars of damage to 28 penalty buckets that cross the wire (docs/spec/model.md §6).

0 is unspecified, 1 is $0, 2 is $0.50, 3 to 26 are $1 doubling to $8,388,608, 27 is pinned (never interrupt).
What a machine costs with it: `effective_cost_usd_per_hour` in machine.py.
"""

import math

UNSPECIFIED = 0
FREE = 1
HALF_DOLLAR = 2
LADDER_FIRST = 3
LADDER_LAST = 26
PINNED = 27
LADDER_DOLLARS_MAX = 2 ** (LADDER_LAST - LADDER_FIRST)

ORDINALS = range(PINNED + 1)


def bucket_for_dollars(dollars: float) -> int:
    """Return the smallest bucket that is not below the dollars; above $8,388,608 that is `PINNED`.

    Raises ValueError for NaN.
    """
    if math.isnan(dollars):
        raise ValueError("a penalty cannot be NaN dollars")
    if dollars <= 0:
        return FREE
    if dollars <= 0.5:
        return HALF_DOLLAR
    if dollars > LADDER_DOLLARS_MAX:
        return PINNED
    return LADDER_FIRST + max(0, math.ceil(dollars) - 1).bit_length()


def bucket_upper_dollars(ordinal: int) -> float:
    """Return the dollars that a bucket stands for: its upper bound, +Inf for pinned, 0 for unspecified.

    Raises ValueError for an ordinal outside 0 to 27.
    """
    if ordinal not in ORDINALS:
        raise ValueError(f"penalty bucket {ordinal} is outside 0 to {PINNED}")
    if ordinal == PINNED:
        return math.inf
    if ordinal >= LADDER_FIRST:
        return float(2 ** (ordinal - LADDER_FIRST))
    return 0.5 if ordinal == HALF_DOLLAR else 0.0


def bucket_label(ordinal: int) -> str:
    """Return the label that metrics and tables show: `unspecified`, `0`, `0.5`, `1` … `8388608`, `pinned`.

    Raises ValueError for an ordinal outside 0 to 27.
    """
    if ordinal == UNSPECIFIED:
        return "unspecified"
    if ordinal == PINNED:
        return "pinned"
    dollars = bucket_upper_dollars(ordinal)
    return "0.5" if ordinal == HALF_DOLLAR else f"{dollars:.0f}"
