"""Defines how pods are simulated, and the inner loops that have a compiled and a plain form.

The queue is sorted by priority and follows a hash within a priority. A machine is feasible when the profile matches,
the request fits and `max_per_machine` is kept. Among the feasible machines the mean over the scored dimensions of the
share that is free (least-allocated) or used (most-allocated) after the placement decides, rounded down to
whole points. Ties are broken by a hash of less than one point, as kube-scheduler breaks them by chance.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from bigfleet.planner.hashing import queue_ranks

if TYPE_CHECKING:
    from bigfleet.planner.core import Core

Int = NDArray[np.int64]
Bool = NDArray[np.bool_]

#: One point of the scheduler's score.
POINT: Final = 1 << 20
#: What a part takes from the score of a class that does not match: far beyond any score.
NEVER: Final = 1 << 30
#: Tie-breaks of a machine repeat after so many steps.
TIES: Final = 4096

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

    def queue(self, order: int) -> Int:
        """Return the part of each pod in one order of the queue."""
        parts = np.repeat(np.arange(len(self.count)), self.count)
        return parts[np.lexsort((queue_ranks(len(parts), order), self.tier[parts]))]


class Kernels(Protocol):
    """The loops over pods and machines; both forms give equal answers."""

    def simulate(self, core: "Core", fleets: Sequence[Fleet], queues: Sequence[Int]) -> Int:
        """Return the pods of each part that the scheduler leaves over, by fleet and queue, (F, O, P)."""
        ...

    def place(self, core: "Core", columns: Int, orders: Sequence[Sequence[int]], keep: bool) -> tuple[Int, Int]:
        """Return what first-fit leaves (R, P) and, if asked, what it places (R, P, M) on the machines of each row."""
        ...

    def patterns(self, core: "Core", pending: Sequence[int], left: Int, usable: Int, supply: Int) -> Int:
        """Return how many pods of each pending part an empty machine of each usable column takes in turn, (P', C')."""
        ...
