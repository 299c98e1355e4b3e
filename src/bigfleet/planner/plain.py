"""States the planner's inner loops in plain Python: one pod, one machine, one dimension at a time.

`plan(problem, effort, PLAIN)` equals `plan(problem, effort)` byte for byte; tests hold both together on small clusters.
This is the readable form of what bit fields, single precision and batches hide in the fast one.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from bigfleet.planner.arena import NEVER, POINT, TIES, Fleet, Int
from bigfleet.planner.core import Core
from bigfleet.planner.hashing import mix


class PlainKernels:
    """The loops without arrays; arrays only carry arguments and answers."""

    def simulate(self, core: Core, fleets: Sequence[Fleet], queues: Sequence[Int]) -> Int:
        """Return what the scheduler leaves over, by fleet and queue, (F, O, P)."""
        return np.array([[_scheduled(core, fleet, queue.tolist()) for queue in queues] for fleet in fleets], np.int64)

    def place(self, core: Core, columns: Int, orders: Sequence[Sequence[int]], keep: bool) -> tuple[Int, Int]:
        """Return what first-fit leaves (R, P) and, if asked, what it places (R, P, M) on the machines of each row."""
        rows = [_placed(core, machines, order) for machines, order in zip(columns.tolist(), orders, strict=True)]
        left = np.array([row[0] for row in rows], np.int64)
        return left, np.array([row[1] for row in rows] if keep else [], np.int64)

    def patterns(self, core: Core, pending: Sequence[int], left: Int, usable: Int, supply: Int) -> Int:
        """Return how many pods of each pending part an empty machine of each usable column takes in turn, (P', C')."""
        machines = [_taken(core, pending, left.tolist(), c, supply[c].tolist()) for c in usable.tolist()]
        return np.array(machines, np.int64).T.reshape(len(pending), len(machines))


def _scheduled(core: Core, fleet: Fleet, queue: Sequence[int]) -> list[int]:
    """Return the pods of each part that find no machine when they come in the order of the queue."""
    machines = [column for column, count in fleet for _ in range(count)]
    free = [core.supply[column].tolist() for column in machines]
    score = [int(core.arena.empty[column]) for column in machines]
    hosted = [[0] * len(core.parts) for _ in machines]
    lost = [0] * len(core.parts)
    for step, part in enumerate(queue):
        request = core.request[part].tolist()
        best, best_score = -1, 0
        for m, column in enumerate(machines):
            takes = int(core.arena.takes[part, column])
            if takes == NEVER or hosted[m][part] >= core.limit[part]:
                continue
            if any(wants > has for wants, has in zip(request, free[m], strict=True)):
                continue
            tie = mix(step * 31 % TIES + m) & (POINT - 1)
            points = (score[m] - takes) // POINT * POINT
            if points + tie > best_score:
                best, best_score = m, points + tie
        if best < 0:
            lost[part] += 1
            continue
        free[best] = [has - wants for has, wants in zip(free[best], request, strict=True)]
        score[best] -= int(core.arena.takes[part, machines[best]])
        hosted[best][part] += 1
    return lost


def _placed(core: Core, machines: Sequence[int], order: Sequence[int]) -> tuple[list[int], list[list[int]]]:
    """Return the pods of each part without a place, and the pods of each part on each machine."""
    none = len(core.columns)
    free = [core.supply[c].tolist() if c < none else None for c in machines]
    left = [0] * len(core.parts)
    on = [[0] * len(machines) for _ in core.parts]
    for part in order:
        remaining = int(core.count[part])
        request = core.request[part].tolist()
        for m, column in enumerate(machines):
            has = free[m]
            if has is None or not core.may_claim[part, column]:
                continue
            count = min(remaining, int(core.limit[part]), *_times(request, has))
            free[m] = [room - wants * count for room, wants in zip(has, request, strict=True)]
            on[part][m] = count
            remaining -= count
        left[part] = remaining
    return left, on


def _taken(core: Core, pending: Sequence[int], left: Sequence[int], column: int, supply: list[int]) -> list[int]:
    """Return how many pods of each pending part one empty machine takes, one part after the other."""
    taken = []
    for part in pending:
        request = core.request[part].tolist()
        count = min(left[part], int(core.limit[part]), *_times(request, supply))
        count = count if core.may_claim[part, column] else 0
        supply = [has - wants * count for has, wants in zip(supply, request, strict=True)]
        taken.append(count)
    return taken


def _times(request: Sequence[int], free: Sequence[int]) -> list[int]:
    """Return how often each wanted amount fits."""
    return [has // wants for has, wants in zip(free, request, strict=True) if wants]


PLAIN: Final = PlainKernels()
