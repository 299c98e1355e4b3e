"""Defines how pods are simulated.

The queue is sorted by priority and follows a hash within a priority. A machine is feasible when the profile matches,
the request fits and `max_per_machine` holds. Among the feasible machines the mean over the scored dimensions of the
share that is free (least-allocated) or used (most-allocated) after the placement decides, rounded down to
whole points. Ties are broken by a hash of less than one point, as kube-scheduler breaks them by chance.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bigfleet.planner.hashing import ranks_of_orders

Int = NDArray[np.int64]
Bool = NDArray[np.bool_]

#: One point of the scheduler's score.
POINT: Final = 1 << 20
#: What a part takes from the score of a class that does not match: far beyond any score.
NEVER: Final = 1 << 30
#: Tie-breaks of a machine repeat after so many steps.
TIES: Final = 4096
#: Pods × orders that are sorted by one call; each array of the call then takes 8 MiB.
_RANKS_AT_ONCE: Final = 1 << 20

#: A fleet: columns with their counts, ascending by column, counts above 0.
Fleet = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Arena:
    """What a simulation needs to know of a problem beside requests and supplies; P parts, C columns."""

    #: Score that a part takes from a machine, NEVER where it does not match, (P, C).
    takes: Int
    #: Score of an empty machine of a column, (C).
    empty: Int
    #: Pods of each part, (P).
    count: Int
    #: Place of each part in the queue, ascending, (P).
    tier: Int

    def queues(self, orders: Sequence[int]) -> list[Int]:
        """Return the part of each pod in each of the orders of the queue."""
        parts = np.repeat(np.arange(len(self.count)), self.count)
        tier = self.tier[parts]
        at_once = max(1, _RANKS_AT_ONCE // max(1, len(parts)))
        found: list[Int] = []
        for first in range(0, len(orders), at_once):
            ranks = ranks_of_orders(len(parts), orders[first : first + at_once])
            found += list(parts[np.lexsort((ranks, np.broadcast_to(tier, ranks.shape)))])
        return found
